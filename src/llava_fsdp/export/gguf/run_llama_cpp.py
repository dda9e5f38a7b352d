"""Compare what llama.cpp computes with GGUF files with what transformers computes with the folder of which they were
made: token ids of prompts, greedy answers, and the log-probabilities of their tokens."""

import base64
import importlib.util
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from llava_fsdp.export.gguf import llama_cpp_server
from llava_fsdp.export.gguf.gguf_writer import types_in
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.text.log import log

TOKENS = 12
"""Number of tokens of the answers that are compared."""
BOUNDS = {"F32": 0.02, "F16": 0.05, "BF16": 0.15, "Q8_0": 0.5}
"""Largest difference of a log-probability of a token of an answer, by the type of the matrices. llama.cpp
rounds activations to the type of the matrix that it multiplies them with, and computes GELU in steps."""
TRIES = 4
"""How often llama.cpp is started: xllamacpp's server hangs at about one start in ten."""
SECONDS, BYTES_PER_SECOND = 60, 20e6
"""Time limit of a try: so many seconds, and one for so many bytes of the files."""
ASKS = {
    "n_predict": TOKENS, "temperature": 0, "n_probs": 1, "return_tokens": True, "cache_prompt": False,
}  # fmt: skip
QUESTIONS = ("What colour is the sky at noon?", "Name three animals. 12 größe  it's")


@dataclass(frozen=True)
class ComparedAnswer:
    """A question with transformers' answer.

    Attributes:
        messages: the conversation; `image` is the file of its image as text (base64), or None.
        ids: token ids of its prompt, with one for each feature of an image.
        answer: token ids of the greedy answer.
        logs: log-probability of each of them; `margins` are the differences to the second choices.
    """

    messages: list[dict[str, Any]]
    image: str | None
    ids: list[int]
    answer: list[int]
    logs: list[float]
    margins: list[float]


def has_llama_cpp() -> bool:
    """Return whether llama.cpp can be run here."""
    return importlib.util.find_spec("xllamacpp") is not None


class NoAnswer(ModelError):
    """Error: llama.cpp gave no answer in time, so that nothing was compared."""


def prove_by_llama_cpp(folder: Path, gguf_folder: Path, with_images: bool) -> str:
    """Compare the answers of the GGUF files in `gguf_folder` with those of the model in `folder` of which they were
    made; return in words how far they differ.

    Args:
        with_images: whether to compare a question with an image, too. The image has the size of the vision tower's
            input, because llama.cpp resizes images by other arithmetic.

    Raises:
        ModelError: llama.cpp cannot open the files, or computes something else.
    """
    processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    asked = answers_of_transformers(folder, processor, with_images)
    found = run_llama_cpp(gguf_folder / "model.gguf", gguf_folder / "mmproj.gguf" if with_images else None, asked)
    special = processor.tokenizer.all_special_ids
    # the type of weights in the files that may differ most
    matrix_type = max(
        types_in(gguf_folder / "model.gguf") | types_in(gguf_folder / "mmproj.gguf"), key=BOUNDS.__getitem__
    )
    return "; ".join(
        compare_answer(one, theirs, matrix_type, special, gguf_folder) for one, theirs in zip(asked, found, strict=True)
    )


def compare_answer(
    asked: ComparedAnswer, theirs: dict[str, Any], matrix_type: str, special: list[int], gguf_folder: Path
) -> str:
    """Compare an answer of llama.cpp (`theirs`, of `llama_cpp_server`) with transformers', and return the difference in
    words. Raise ModelError if it is too large. `matrix_type`: type of the model's matrices (F16, ...); `special`:
    ids of the special tokens; `gguf_folder`: for messages."""
    what = f"llama.cpp with {gguf_folder}, asked {asked.messages[0]['content'][-1]['text']!r},"
    if "error" in theirs:
        raise ModelError(f"{what} fails: {theirs['error'][:400]}")
    if asked.image is None and theirs["ids"] != asked.ids:
        raise ModelError(f"{what} makes the token ids {theirs['ids']}, and transformers {asked.ids}")
    answer = theirs["answer"]
    tokens, count = answer["tokens"], answer["tokens_evaluated"]
    if count != len(asked.ids):
        raise ModelError(f"{what} makes a prompt of {count} tokens, and transformers one of {len(asked.ids)}")
    pairs = zip(tokens, asked.answer, strict=False)
    same = next((n for n, (token, ours) in enumerate(pairs) if token != ours), len(tokens))
    # llama.cpp ends at more tokens than training, which it knows by their names
    ended = bool(tokens) and same == len(tokens) and tokens[-1] in special
    # where transformers' first two choices differ by at most the bound, llama.cpp may choose another token
    if same < len(asked.answer) and not ended and asked.margins[same] > BOUNDS[matrix_type]:
        raise ModelError(f"{what} answers {tokens}, and transformers {asked.answer}")
    # the server tells nothing of tokens that are a part of a character
    told = {one["id"]: one["logprob"] for one in answer["completion_probabilities"]}
    once = [n for n, token in enumerate(tokens[:same]) if tokens.count(token) == 1 and token in told]
    far = max((abs(told[tokens[n]] - asked.logs[n]) for n in once), default=0.0)
    if not far <= BOUNDS[matrix_type]:
        raise ModelError(
            f"{what} differs by {far:.3g} in a log-probability (bound {BOUNDS[matrix_type]} for {matrix_type})"
        )
    image = "" if asked.image is None else " with an image"
    return f"{same} of {len(tokens)} tokens{image}, log-probabilities of {len(once)} within {far:.2g}"


@torch.no_grad()
def answers_of_transformers(folder: Path, processor: Any, with_images: bool) -> list[ComparedAnswer]:
    """Return, for each question that is compared, its messages, image and prompt ids, and the token ids of
    transformers' greedy answer with their log-probabilities and the margins to the second choices."""
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True, weights_only=True
    ).eval()
    image, file = probe_image(model.config.vision_config.image_size), io.BytesIO()
    image.save(file, "PNG")
    shown = base64.b64encode(file.getvalue()).decode()
    found = []
    for number, question in enumerate([*QUESTIONS, *QUESTIONS[:1] * with_images]):
        has_image = number == len(QUESTIONS)
        content = [{"type": "image"}] * has_image + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        images = [image] if has_image else None
        inputs = processor(text=prompt, images=images, add_special_tokens=False, return_tensors="pt")
        made = model.generate(
            **inputs, max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ids = inputs["input_ids"][0].tolist()
        answer = made.sequences[0, len(ids) :]
        logs = torch.stack(made.logits)[:, 0].float().log_softmax(-1)
        best = logs.topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        chosen = logs.gather(1, answer[:, None])[:, 0].tolist()
        found.append(ComparedAnswer(messages, shown if has_image else None, ids, answer.tolist(), chosen, margins))
    return found


def probe_image(side: int) -> Image.Image:
    """Return a square image of random patches, with a side of so many pixels."""
    coarse = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def as_served(asked: ComparedAnswer) -> dict[str, Any]:
    """Return the message of a question in the form of llama.cpp's server (OpenAI's protocol), with the image (a PNG
    file in base64), if there is one, before the text."""
    text = asked.messages[0]["content"][-1]  # the question's text part; before it there may be one for the image
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{asked.image}"}}
    return {"role": "user", "content": [text] if asked.image is None else [image, text]}


def run_llama_cpp(model: Path, mmproj: Path | None, asked: list[ComparedAnswer]) -> list[dict[str, Any]]:
    """Open GGUF files in llama.cpp, in a process of its own, and return its answers to questions. Raise ModelError if
    llama.cpp ends with an error, and NoAnswer if it hangs."""
    files = [file for file in (model, mmproj) if file is not None]
    limit = SECONDS + sum(file.stat().st_size for file in files) / BYTES_PER_SECOND
    questions = [{"message": as_served(one), "image": one.image} for one in asked]
    package = importlib.util.find_spec("xllamacpp")
    assert package is not None and package.origin is not None, "has_llama_cpp was asked"
    place = str(Path(package.origin).parents[1])
    content = {
        "package": place,
        "model": str(model),
        "mmproj": mmproj and str(mmproj),
        "asked": questions,
        "settings": ASKS,
    }
    with TemporaryDirectory(prefix="llava_fsdp-") as made:
        task, result = Path(made) / "task.json", Path(made) / "answers.json"
        task.write_text(json.dumps(content))
        for number in range(1, TRIES + 1):
            command = [sys.executable, llama_cpp_server.__file__, str(task), str(result)]
            try:
                ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                log().info("llama.cpp gave no answer in %.0f s, in try %d of %d", limit, number, TRIES)
                continue
            if ended.returncode or not result.is_file():
                lines = "\n".join(ended.stderr.strip().splitlines()[-8:])
                raise ModelError(f"llama.cpp ended with {ended.returncode} at {model}\n{lines}")
            return json.loads(result.read_text())
    raise NoAnswer(f"llama.cpp gave no answer about {model} in {TRIES} tries of {limit:.0f} s")
