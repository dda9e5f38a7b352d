"""First starts of the embedded default, each with folders of its own, give the same step to the bit.

`LLAVA_FSDP_STARTS=200 python -m pytest tests/train/test_first_starts.py` runs that many; a start takes about ten
seconds.
"""

import json
import os
from pathlib import Path

import pytest
from commands import command

STARTS = int(os.environ.get("LLAVA_FSDP_STARTS", "6"))
SETTINGS = "max_steps=1", "output_dir=out", "data.root=shapes", "data.index=index"


def first_step(folder: Path, stage: str) -> dict:
    """The first row of a start in an empty folder, without what depends on the clock."""
    folder.mkdir()
    run = command("llava_fsdp.train", f"stage={stage}", *SETTINGS, "export.enabled=false", cwd=folder, timeout=600)
    assert run.returncode == 0, run.stderr
    row = json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[0])
    return {name: row[name] for name in ("step", "loss", "grad_norm", "tokens", "label_tokens")}


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * STARTS)
def test_first_starts_are_equal(tmp_path: Path) -> None:
    found = [first_step(tmp_path / str(n), ("pretrain", "finetune")[n % 2]) for n in range(STARTS)]
    for stage in range(2):
        assert all(row == found[stage] for row in found[stage::2]), found[stage::2]
