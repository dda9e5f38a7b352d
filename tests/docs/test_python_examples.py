"""The Python programs of docs/extending.md and the notebook run, cell by cell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCS, ROOT, blocks_of

OWN = ("in_python.py", "own_events.py", "own_loss.py", "own_projector.py", "own_source.py")
CHECKS = """
assert below.step and result.step == 4 and best.fits
folders = ("in-python", "own-events", "own-loss", "own-projector", "own-source")
found = [llava_fsdp.TrainResult(Path("outputs") / own, 4, None, None).metrics for own in folders]
losses = [[row["loss"] for row in own] for own in found]
assert losses[0] == losses[1] and all(len(own) == 4 for own in losses)
assert len({own[0] for own in losses}) == 4, "each object has an effect"
"""


def run(program: str, folder: Path) -> str:
    """Run a program as a notebook does: in a module whose file no data worker imports."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    (folder / "cells.py").write_text(program)
    (folder / "program.py").write_text('if __name__ == "__main__":\n    exec(open("cells.py").read(), {})\n')
    done = subprocess.run(
        [sys.executable, "program.py"], check=False, cwd=folder, env=environment, capture_output=True, text=True,
        timeout=900, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_programs_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    blocks = {block.note: block.text for block in blocks_of(DOCS / "extending.md") if block.note in OWN}
    assert tuple(blocks) == OWN
    run("\n".join(["from pathlib import Path", *blocks.values(), CHECKS]), tmp_path)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Without jupyter; it is stored without results."""
    notebook = json.loads((ROOT / "examples" / "train_in_a_notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    shown = run("\n\n".join("".join(cell["source"]) for cell in cells), tmp_path)
    assert "5 " in shown and shown.count("label tokens") == 5 and "tokens/s" in shown
