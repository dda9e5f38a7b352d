"""What all peers of peers.py begin with: the model's weights, and the samples of every step in every layout."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench import composed
from safetensors.torch import load_file, save_file
from samples import IMAGE, MEAN_TEXT, grouped, write_model, write_records
from starts import write_llava, write_samples

from llava_fsdp.config import Config
from llava_fsdp.data.batching.packing import Assignment

SCALE = 4
"""Samples are as many times shorter than LLaVA's, so that a step takes a few seconds."""
SIDE = 12
"""Patches on a side: IMAGE / SCALE positions for an image."""
VOCABULARY = 2048
DATA = ("mixed", "equal", "text")
PADDED_LAYOUTS = ("grouped", "sorted")
RATE = 1e-4


@dataclass(frozen=True)
class Fixed:
    """An order: records as they lie in their file, which was written step by step, rank by rank.

    The file is in the order of the original's sampler, so that its cuts are even stretches.
    """

    steps: int
    layout: str
    """grouped: as the original's sampler deals a step's samples; otherwise left to `packing.py`."""
    ranks: int
    rows: int
    """Samples of a rank in a step."""

    @property
    def per_epoch(self) -> int:
        return self.steps

    @property
    def shape(self) -> str:
        return f"{self.steps} steps, {self.layout}"

    def samples(self, step: int) -> list[int]:
        samples = self.ranks * self.rows
        return list(range(step * samples, (step + 1) * samples))

    def draw(self, steps: int) -> None:
        """Nothing is drawn."""

    def assignment(self, step: int) -> Assignment | None:
        if self.layout != "grouped":
            return None
        numbers = self.samples(step)
        return [[numbers[rank * self.rows : (rank + 1) * self.rows]] for rank in range(self.ranks)]


def lengths_of(data: str, options: argparse.Namespace) -> list[tuple[int, bool]]:
    """(positions, has an image) of every sample, at LLaVA's own scale, in the order of the original's sampler.

    mixed: the guess of packing.py with the medium tail, and of its epoch the first steps with images: a step of the
    original's is of one modality, and 19 of 20 have them. equal: all of the mean length. text: the lengths of mixed,
    all of it text.
    """
    steps, ranks, rows = options.steps, options.ranks, options.rows
    if data == "equal":
        return [(IMAGE + MEAN_TEXT, True)] * (steps * ranks * rows)
    lengths, order = grouped("medium", ranks, rows)
    shown = [micro for micro in order if lengths[micro[0]][1]]
    return [(lengths[i][0], data == "mixed") for micro in shown[: steps * ranks] for i in micro]


def configure(work: Path, data: str, pack: bool, options: argparse.Namespace) -> Config:
    """Our training as a user would write it down; what is not named here is as it comes."""
    overrides = [
        "stage=finetune",
        f"model.checkpoint={work / 'weights'}",
        "data=llava_json",
        f"data.path={work / data / 'records.json'}",
        f"data.images={work / data / 'images'}",
        "data.template=plain",  # writes nothing around a text, which is short here
        "data.max_length=640",
        "data.workers=0",
        f"output_dir={work / 'runs' / f'{data}-{pack}'}",
        "precision=fp32",
        "activation_checkpointing=none",
        f"pack={str(pack).lower()}",
        f"micro_batch_size={options.rows}",
        f"global_batch_size={options.rows * options.ranks}",
        "max_steps=100000",
        f"optim.lr={RATE}",
        "optim.projector_lr=null",
        "optim.schedule=constant",
        "optim.warmup_ratio=0",
        "optim.weight_decay=0",
        "optim.clip=1.0",
        "checkpoint.every=null",
        "export.enabled=false",
        "model.projector=random",
    ]
    return composed(overrides)


def write_language(weights: Path, drawn: Path, folder: Path) -> None:
    """The language model of a LLaVA's weights as a model of its own, for who trains on text alone."""
    shutil.copytree(drawn, folder)
    language = "model.language_model."
    own = {
        name.replace(language, "model."): value
        for name, value in load_file(weights).items()
        if name.startswith((language, "lm_head."))
    }
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})


def write_start(work: Path, options: argparse.Namespace) -> None:
    """Weights, records, and for transformers' side the padded micro-batches of every step as tensors."""
    parts = work / "parts"
    write_model(parts, options.hidden, options.layers, SIDE, VOCABULARY)
    for data in options.data:
        write_records(work / data, lengths_of(data, options), SIDE * SIDE, SCALE, captions=True)
    named = [f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}", "model.projector=random"]
    drawn = composed(["stage=finetune", *named])
    write_llava(work / "weights", drawn, parts / "language", parts / "vision")
    write_language(work / "weights" / "model.safetensors", parts / "language", work / "language")
    for data in options.data:
        order = Fixed(options.steps, options.padded, options.ranks, options.rows)
        cfg = configure(work, data, False, options)
        write_samples(work / "samples" / data, cfg, options.ranks, options.steps, 1, order)
