"""Records of every kind for packed rows, and runs on them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from harness import alone
from small import record, sentence, write_json

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.batching.tile_inputs import Row
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.state import TrainState


def write_every_kind(dataset: Path, folder: Path) -> Path:
    """34 records: one picture, two, three, none; of very different lengths. The pictures are the dataset's."""
    dice = random.Random(3)
    records = [record(dice, n, n % 4 == 1) for n in range(34)]
    for n in range(2, 34, 4):
        count = 2 + n % 3 // 2
        records[n]["image"] = [f"{(n + i) % 12}.{'png' if (n + i) % 12 % 2 else 'jpg'}" for i in range(count)]
        asked = " ".join(["<image>", sentence(dice, 1, 4)] * count)
        records[n]["conversations"][0]["value"] = asked
    for n in range(3, 34, 8):
        records[n]["conversations"][-1]["value"] = sentence(dice, 60, 90)
    (folder / "images").symlink_to(dataset / "images")
    write_json(folder / "mixed.json", records)
    return folder


def build(cfg: Config) -> TrainState:
    state = build_state(cfg, alone(cfg))
    state.model.train()
    return state


def gradients(state: TrainState) -> dict[str, torch.Tensor]:
    """What `backward` has left, by name; nothing stays behind."""
    found = {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}
    state.model.zero_grad(set_to_none=True)
    return found


class Noted:
    """A collator that remembers whose samples it laid out."""

    def __init__(self, steps: Steps):
        self.ids: list[list[str]] = []
        self.collate, steps.collate = steps.collate, self  # type: ignore[assignment]
        self.normalize = self.collate.normalize
        self.steps, self.load = steps, steps.read_row
        self.names: dict[int, str] = {}
        steps.read_row = self.note  # type: ignore[method-assign]

    def note(self, number: int) -> Row:
        row = self.load(number)
        self.names[id(row[0])] = self.steps.records[number].id
        return row

    def __call__(self, rows: list, facts: object, *laid_out: Any) -> MicroBatch:
        self.ids.append([self.names[id(sample)] for sample, _ in rows])
        return self.collate(rows, facts, *laid_out)  # type: ignore[arg-type]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
