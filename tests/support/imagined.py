"""Folders of trainings that never were, as trainings leave them."""

import json
import math
import random
from pathlib import Path
from typing import Any

from PIL import Image

ODD = '<script>alert(1)</script> & "it\'s"'


def row(step: int, dice: random.Random, sources: tuple[str, ...]) -> dict[str, Any]:
    loss = 1.1 + 9 * math.exp(-step / 400) + dice.gauss(0, 0.05)
    seconds = 1.6 + abs(dice.gauss(0, 0.05))
    return {
        "step": step,
        "loss": loss if step % 997 else None,
        "sources": {
            n: {"loss": loss + 0.2 * k + dice.gauss(0, 0.1), "label_tokens": 900} for k, n in enumerate(sources)
        },
        "lr": 2e-5 * (1 + math.cos(step / 2000)),
        "grad_norm": 1 + abs(dice.gauss(0, 0.3)),
        "skipped": step % 997 == 0,
        "skipped_steps": step // 997,
        "loss_scale": None,
        "label_tokens": 900 * len(sources),
        "tokens": 90_000,
        "samples": 128,
        "images": 120,
        "truncated": 1,
        "skipped_records": 0,
        "unlabelled": 0,
        "seconds": seconds,
        "data_seconds": abs(dice.gauss(0, 0.02)),
        "tokens_per_second": 90_000 / seconds,
        "mfu": 0.48 + dice.gauss(0, 0.01),
        "hfu": 0.6 + dice.gauss(0, 0.01),
        "peak_memory_bytes": 61_000_000_000 + step * 1000,
    }


def validation(step: int, pictures: list[str | None], sources: tuple[str, ...]) -> dict[str, Any]:
    loss = 1.2 + 5 * math.exp(-step / 400)
    return {
        "step": step,
        "loss": loss,
        "label_tokens": 4000,
        "sources": {name: {"loss": loss + 0.1 * k, "label_tokens": 1000} for k, name in enumerate(sources)},
        "metric": "exact",
        "score": 1 - math.exp(-step / 900),
        "questions": 60,
        "seconds": 3.5,
        "answers": [
            {
                "record": f"r{number}",
                "question": "What colour is the circle?" if number else f"What is {ODD}?",
                "answer": "red" if step > 500 else f"a{number}",
                "references": ["red", "dark red"],
                "score": 1.0 if step > 500 else 0.0,
                "picture": picture,
            }
            for number, picture in enumerate(pictures)
        ],
    }


def start(step: int, total: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1.79e9 + 2 * step,
        "total_steps": total,
        "run": "0123456789abcdef",
        "ranks": 8,
        "nodes": 1,
        "device": "NVIDIA H100 80GB HBM3",
        "versions": {"llava_fsdp": "0.1", "python": "3.12", "torch": "2.13.0", "CUDA": "13.0", "NCCL": "2.28"},
        "commit": "0123456789ab",
        "command": f"torchrun --nproc-per-node 8 -m llava_fsdp.train stage=finetune 'output_dir={ODD}'",
        "stage": "finetune",
        "model": "llava_v1_5_7b",
        "data": "llava_v1_5_mix665k.json: 665,298 records",
        "strategy": "FULL_SHARD",
        "trains": [["vision_tower", 0, 303_507_456], ["multi_modal_projector", 20_979_712, 0]],
        "unlike": "labels=exact, sampler=shuffle; compat=llava_v1_5 sets the original's (docs/llava.md)",
        "recipe": [["optim.lr", "2e-05", "1e-05"], ["data.path", "null", ODD]],
        "at_rest": {"parameters": 3_400_000_000, "gradients": 1_700_000_000, "optimizer": 6_900_000_000},
        "planned_peak": 63_500_000_000,
        **more,
    }


def imagine(
    folder: Path,
    steps: int,
    sources: tuple[str, ...] = ("llava_v1_5_mix665k",),
    status: str = "done",
    starts: tuple[int, ...] = (0,),
    config: str = "optim:\n  lr: 1.0e-05\nseed: 42\n",
    seed: int = 0,
) -> Path:
    """A run of so many steps."""
    dice = random.Random(seed)
    folder.mkdir(parents=True)
    picture = folder / "picture.png"
    Image.effect_noise((400, 300), 80).convert("RGB").save(picture)
    pictures: list[str | None] = [str(picture), str(picture), str(folder / "missing.jpg"), None]
    lines(folder / "metrics.jsonl", (row(step, dice, sources) for step in range(1, steps + 1)))
    lines(
        folder / "validation.jsonl",
        (validation(s, pictures, sources) for s in range(50, steps + 1, max(50, steps // 20))),
    )
    lines(folder / "starts.jsonl", (start(step, steps) for step in starts))
    (folder / "config.yaml").write_text(config)
    said = {"status": status, "reason": f"it {status}: {ODD}", "exit_code": 0 if status == "done" else 2, "step": steps}
    (folder / "run_status.json").write_text(json.dumps(said))
    return folder


def lines(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(own) + "\n" for own in rows))
