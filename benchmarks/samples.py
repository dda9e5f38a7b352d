"""Samples with lengths as LLaVA's are guessed to be, and small models and records to train on them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from bench import ASSETS
from PIL import Image

from llava_fsdp.data.batching.llava_samplers import group_by_modality, split_into
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer

Lengths = list[tuple[int, bool]]
"""Of each sample: number of tokens, and whether it has an image."""
IMAGE = 576
LONGEST = 2048
TEXT_ONLY = 0.061
"""Share of LLaVA-1.5's 665k records without an image (haotian-liu/LLaVA#657)."""
MEAN_TEXT, MEAN_TEXT_ONLY = 265, 700
"""Tokens. Guesses: nobody has published the lengths of LLaVA's records; hence three tails."""
TAILS = {"light": 0.5, "medium": 0.65, "heavy": 0.8}
"""Standard deviation of the logarithm of a text's length, at one mean."""
RANKS, SAMPLES, ROWS = 8, 128, 16
"""LLaVA's second stage: 8 GPUs of 16 rows."""
STEPS = 50


def draw_lengths(tail: str, count: int, seed: int) -> Lengths:
    """Lengths of samples like LLaVA's: an image of 576 tokens and a text."""
    dice, sigma = random.Random(f"{tail} {seed}"), TAILS[tail]
    found = []
    for _ in range(count):
        shown = dice.random() >= TEXT_ONLY
        mean = MEAN_TEXT if shown else MEAN_TEXT_ONLY
        # a lognormal's mean is exp(mu + sigma^2 / 2)
        text = mean * dice.lognormvariate(-(sigma**2) / 2, sigma)
        found.append((max(8, min(LONGEST, int(text) + IMAGE * shown)), shown))
    return found


def grouped(tail: str, ranks: int = RANKS, rows: int = ROWS) -> tuple[Lengths, list[list[int]]]:
    """An epoch's lengths, and its micro-batches by the original's `group_by_modality_length`, as in its second stage.

    It sorts a megabatch, which is a step, by words and deals it over the ranks, so that each has long and short ones.
    """
    lengths = draw_lengths(tail, SAMPLES * STEPS, seed=0)
    words = [length - IMAGE if shown else -length for length, shown in lengths]
    dice = [torch.Generator().manual_seed(seed) for seed in range(2)]
    kept = len(words) - 2 * ranks * rows  # the last two steps are set aside, mixed
    order = group_by_modality(words, rows, ranks, *dice)[:kept]
    return lengths, split_into(order, rows)


def write_model(folder: Path, hidden: int, layers: int, side: int, vocabulary: int | None = None) -> None:
    """A llama and a CLIP tower of `side` x `side` patches; without `vocabulary` it is the tokenizer's."""
    language = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary or open_tokenizer(ASSETS / "tiny-llama").size, "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers, "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32, "max_position_embeddings": LONGEST, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = json.loads((ASSETS / "tiny-clip" / "config.json").read_text())
    vision |= {"image_size": 14 * side, "patch_size": 14}
    preprocessor = json.loads((ASSETS / "tiny-clip" / "preprocessor_config.json").read_text())
    for key in ("size", "crop_size"):
        value = preprocessor[key]
        preprocessor[key] = dict.fromkeys(value, 14 * side) if isinstance(value, dict) else 14 * side
    for name, files in {
        "language": {"config.json": language},
        "vision": {"config.json": vision, "preprocessor_config.json": preprocessor},
    }.items():
        (folder / name).mkdir(parents=True)
        for file, values in files.items():
            (folder / name / file).write_text(json.dumps(values))
    for file in (ASSETS / "tiny-llama").glob("*token*"):
        (folder / "language" / file.name).write_bytes(file.read_bytes())


def write_records(folder: Path, lengths: Lengths, image: int, scale: int, captions: bool = False) -> None:
    """Records of nearly these lengths over `scale`, half of each text the answer.

    Args:
        captions: for the plain template, which writes the answer and nothing around it.
    """
    tokenizer = open_tokenizer(ASSETS / "tiny-llama")
    word = next(w for w in (" red", " the", " is", " a", " left") if len(tokenizer.encode(w * 50)) <= 51)
    overhead = len(tokenizer.encode("\n" if captions else "A chat. USER: ASSISTANT: </s>"))
    (folder / "images").mkdir(parents=True)
    Image.effect_noise((96, 72), 60).convert("RGB").save(folder / "images" / "0.png")
    records = []
    for number, (length, shown) in enumerate(lengths):
        words = max(2, length // scale - image * shown - overhead)
        answered = words if captions else words // 2
        asked, answer = (word * (words - answered)).strip(), (word * answered).strip()
        turns = [
            {"from": "human", "value": "<image>\n" * shown + asked},
            {"from": "gpt", "value": answer},
        ]
        records.append({"id": str(number), **({"image": "0.png"} if shown else {}), "conversations": turns})
    (folder / "records.json").write_text(json.dumps(records))
