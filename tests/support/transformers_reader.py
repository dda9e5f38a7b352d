"""A program for transformers, which a test also starts in an environment with torchvision: what its class answers about
an export. Its arguments are those of `vllm_reader`, without the adapter."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


@torch.no_grad()
def answers_of_transformers(folder: Path, task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each question (of `consumer_models.questions`) the prompt's token ids with the log-probability of each, and
    the greedy answer with the smallest difference of log-probability between a first and a second choice."""
    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # the answer goes on after an end: min_new_tokens would forbid ends
    found = {}
    for case in task["cases"]:
        content = [{"type": "image"}] * len(case["images"]) + [{"type": "text", "text": case["text"]}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        opened = [Image.open(path) for path in case["images"]]
        inputs = processor(text=prompt, images=opened or None, add_special_tokens=False, return_tensors="pt")
        ids = inputs["input_ids"][0]
        made = model.generate(
            **inputs, max_new_tokens=task["tokens"], do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        logs = model(**inputs).logits[0].float().log_softmax(-1)
        best = torch.stack(made.scores)[:, 0].float().log_softmax(-1).topk(2).values
        found[case["name"]] = {
            "ids": ids.tolist(),
            "logs": logs[:-1].gather(1, ids[1:, None])[:, 0].tolist(),
            "answer": made.sequences[0, len(ids) :].tolist(),
            "margin": float((best[:, 0] - best[:, 1]).min()),
        }
    return found


if __name__ == "__main__":
    answers = answers_of_transformers(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
    Path(sys.argv[3]).write_text(json.dumps(answers))
