"""Where the golden cases lie, and how they are read."""

import json
import os
from pathlib import Path
from typing import Any


def golden_folder() -> Path:
    """`LLAVA_FSDP_GOLDEN`, or the cases that the project has."""
    return Path(os.environ.get("LLAVA_FSDP_GOLDEN", Path(__file__).parents[1] / "golden" / "open")).resolve()


def read_json(name: str) -> Any:
    return json.loads((golden_folder() / name).read_text())


def read_lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (golden_folder() / name).read_text().splitlines()]
