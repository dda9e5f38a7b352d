"""What all peers of whole_peers.py begin with: a Qwen2.5-VL with random weights, records, and the samples that
transformers' own processor makes of them."""

from __future__ import annotations

import tests_support  # noqa: F401

# isort: split
import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from bench import composed
from families import make_model, make_processor, make_tokenizer, resolve
from family_parts import rotary
from family_table import FAMILIES
from PIL import Image
from samples import IMAGE, draw_lengths
from whole_models import WholeModel, conversation, example_of

from llava_fsdp.config import Config

FAMILY = "qwen2_5_vl"
DATA = ("mixed", "text", "mix665k")
BLANK = "text, blank image"
"""The data set `text` for this project, as on ranks without images beside others that have some: each step has a blank
image, and runs the vision part."""
SCALE = 4
"""Texts of `mixed` and `text` are as many times shorter than LLaVA's, so that a step takes a few seconds."""
PATCH = 14
SIDES = range(6, 15)
"""Sides of the images of `mixed`, in units of 2 x 2 patches, which are a token: 36 to 196 tokens."""
COCO, VISUAL_GENOME, COVERS, OPEN_IMAGES = (640, 480), (500, 375), (330, 500), (1024, 768)
SOURCES = {
    COCO: 158 + 83 + 9 + 66 + 48,  # LLaVA, VQAv2, OKVQA, A-OKVQA, RefCOCO
    VISUAL_GENOME: 72 + 86,  # GQA, Visual Genome
    COVERS: 80,  # OCR-VQA
    OPEN_IMAGES: 22,  # TextCaps
}
"""Of `mix665k`: thousands of records with images of each size, in LLaVA-1.5's mixture (arXiv:2310.03744, table 7; its
40 thousand others are texts of ShareGPT). The sizes in pixels are usual ones of these sources."""
VOCABULARY = 8192
RATE = 1e-4
Steps = list[list[dict[str, torch.Tensor]]]
"""Of each step, the samples: arguments of transformers' class for one sample, and `labels`."""


def write_model(folder: Path, hidden: int, layers: int) -> None:
    """Width, depth and heads of the vision part relate to those of the language model nearly as in Qwen2.5-VL-3B."""
    row = FAMILIES[FAMILY]
    heads, wide = hidden // 64, hidden * 5 // 8
    text = {
        **row.config["text_config"], "vocab_size": VOCABULARY, "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4), "head_dim": 64, **rotary([8, 12, 12]), "initializer_range": 0.02,
    }  # fmt: skip
    vision = {
        **row.config["vision_config"], "depth": layers, "hidden_size": wide, "num_heads": wide // 80,
        "intermediate_size": wide * 8 // 3, "out_hidden_size": hidden, "patch_size": PATCH, "window_size": 8 * PATCH,
        "fullatt_block_indexes": [layers - 1], "initializer_range": 0.02,
    }  # fmt: skip
    size = {"shortest_edge": 16 * PATCH**2, "longest_edge": 4096 * PATCH**2}
    kind, fields = row.image
    row = replace(
        row,
        config={**row.config, "text_config": text, "vision_config": vision},
        image=(kind, {**fields, "patch_size": PATCH, "size": size}),
        video_fields={"patch_size": PATCH},
    )
    tokenizer = make_tokenizer(row)
    make_model(transformers.CONFIG_MAPPING[row.kind](**resolve(row.config, tokenizer))).save_pretrained(folder)
    make_processor(row, tokenizer).save_pretrained(folder)


def write_records(folder: Path, data: str, count: int) -> list[dict[str, Any]]:
    """Records in the drawn order, half of each text the answer. mixed: lengths as packing.py guesses them (medium
    tail) over SCALE, images of many sizes, and 6 % of the records without one; text: the same texts without images;
    mix665k: the lengths as guessed, and images of the sizes of LLaVA-1.5's sources."""
    dice = random.Random(0)
    (folder / "images").mkdir(parents=True)
    records = []
    is_real = data == "mix665k"
    for number, (length, has_image) in enumerate(draw_lengths("medium", count, seed=1)):
        sides = dice.choice(SIDES), dice.choice(SIDES)
        words = ["fox"] * max(2, (length - IMAGE * has_image) // (1 if is_real else SCALE) // 2)
        shown = has_image and data != "text"
        name = f"{number}.png"
        if shown:
            size = dice.choices(list(SOURCES), list(SOURCES.values()))[0] if is_real else (28 * sides[0], 28 * sides[1])
            Image.effect_noise(size, 60).convert("RGB").save(folder / "images" / name)
        half = len(words) // 2
        turns = ["<image>\n" * shown + " ".join(words[:half] or ["fox"]), " ".join(words[half:])]
        records.append(conversation(number, turns, [name] * shown))
    (folder / "records.json").write_text(json.dumps(records))
    return records


def write_start(work: Path, options: argparse.Namespace) -> None:
    """Weights, records, and for transformers' side the samples of every step, in a file for each data set."""
    write_model(work / "weights", options.hidden, options.layers)
    for data in options.data:
        records = write_records(work / data, data, options.steps * options.rows)
        model = WholeModel(FAMILY, work / "weights", work / data / "images")
        samples = []
        for record in records:
            example = example_of(model, record)
            samples.append({**example.inputs, "labels": example.labels[None]})
        rows = options.rows
        torch.save([samples[n : n + rows] for n in range(0, len(samples), rows)], work / f"{data}.pt")


def read_steps(work: Path, data: str) -> Steps:
    return torch.load(work / f"{data}.pt")


def configure(work: Path, data: str, options: argparse.Namespace) -> Config:
    """Our training as a user would write it down; what is not named here is as it comes."""
    return composed([
        "stage=finetune_task",
        f"model.train=[{'' if options.frozen else 'vision,'}projector,language]",
        f"model.checkpoint={work / 'weights'}",
        "data=llava_json",
        f"data.path={work / data / 'records.json'}",
        f"data.images={work / data / 'images'}",
        "data.workers=0",
        "data.max_length=4096",
        f"output_dir={work / 'runs' / data}",
        "precision=fp32",
        "activation_checkpointing=none",
        f"micro_batch_size={options.rows}",
        f"global_batch_size={options.rows}",
        "data.template=chat_template",
        "pack=true",
        "max_steps=100000",
        f"optim.lr={RATE}",
        "optim.projector_lr=null",
        "optim.vision_lr=null",
        "optim.schedule=constant",
        "optim.warmup_ratio=0",
        "optim.weight_decay=0",
        "optim.clip=1.0",
        "checkpoint.every=null",
        "export.enabled=false",
    ])  # fmt: skip
