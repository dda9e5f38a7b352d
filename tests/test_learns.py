"""The embedded default, from nothing to answers."""

import json
from pathlib import Path

import pytest
from commands import command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_embedded_default_learns_to_see(tmp_path: Path) -> None:
    """Both stages as a newcomer runs them: at least 90 % on held-out pictures, at most half of that on blank ones."""
    for stage in ("pretrain", "finetune"):
        ran = command("llava_fsdp.train", f"stage={stage}", cwd=tmp_path, timeout=600)
        assert ran.returncode == 0, ran.stderr
    ran = command("llava_fsdp.evaluate", "format=json", cwd=tmp_path)
    found = json.loads(ran.stdout)
    assert found["accuracy"] >= 0.9
    assert found["accuracy_blank_pictures"] <= found["accuracy"] / 2
