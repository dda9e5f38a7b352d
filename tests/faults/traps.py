"""What tests make ranks do: see `runs.py`, `trap=`. Called in a rank before its training begins."""

import json
import os
from pathlib import Path
from typing import Any


def note_samples(notes: str) -> None:
    """Write every record that this rank reads for a step, by step: what was learned from, not what was planned."""
    from llava_fsdp.data.steps import Steps

    rank, attempt = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = Path(notes) / f"samples-{rank}-{attempt}-{os.getpid()}.jsonl"
    prepare, load = Steps.prepare, Steps.load
    read: list[int] = []

    def noted_load(self: Steps, number: int) -> Any:
        read.append(number)
        return load(self, number)

    def noted_prepare(self: Steps, step: int) -> Any:
        read.clear()
        prepared = prepare(self, step)
        with path.open("a") as file:
            file.write(json.dumps({"rank": int(rank), "step": step + 1, "records": sorted(read)}) + "\n")
        return prepared

    Steps.prepare, Steps.load = noted_prepare, noted_load
