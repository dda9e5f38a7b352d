"""Entries run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def command(*words: str, cwd: Path, ranks: int = 2, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run an entry; under torchrun where it is `train`."""
    start = [*TORCHRUN, str(ranks), "-m"] if words[0] == "llava_fsdp.train" and ranks else [sys.executable, "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [*start, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
