"""Environments for peers of peers.py whose requirements contradict ours, and why others cannot run on a CPU."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

FOREIGN = {
    "trl": {"trl": "1.16.0", "datasets": "5.2.0"},
    "automodel": {"nemo-automodel": "0.7.0", "torchdata": "0.11.0", "torchao": "0.18.0", "datasets": "5.2.0"},
}
"""Packages of each peer's own environment, and their versions."""
CANNOT_RUN = {
    "NeMo Automodel 0.7.0's recipes": "call torch.cuda.reset_peak_memory_stats (train_ft.py:561)",
    "torchtitan 0.3.0": "flex attention has no backward on a CPU, varlen no kernel, and its SDPA module rejects masks",
    "lmms-engine 0.1.4": 'calls init_device_mesh("cuda") (process_group_manager.py:62); needs transformers < 5.9',
    "VeOmni 0.1.12": "knows no backend for the device type cpu (utils/device.py:88)",
}
"""Packed trainers that need a GPU, and the line that needs it."""


def environment_of(peer: str, folder: Path) -> str:
    """The interpreter that runs a peer: this one, or that of the peer's own environment, which is made on first use.

    The environment has the peer's packages without their requirements, and behind them all packages of this one. So
    torch and transformers are the same for all, and what the peer pins cannot replace them.

    Raises:
        SystemExit: a package cannot be installed.
    """
    if peer not in FOREIGN:
        return sys.executable
    own = folder / peer
    python, done = own / "bin" / "python", own / "installed"
    pins = [f"{name}=={version}" for name, version in FOREIGN[peer].items()]
    if done.is_file() and done.read_text().split() == pins:
        return str(python)
    print(f"{peer}: installing {' '.join(pins)} into {own}", flush=True)
    commands = (
        [sys.executable, "-m", "venv", "--without-pip", "--clear", str(own)],
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *pins],
    )
    for command in commands:
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode != 0:
            raise SystemExit(f"{peer}: {' '.join(command)} failed; its output is above")
    packages = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"])
    Path(packages.decode().strip(), "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done.write_text("\n".join(pins) + "\n")
    return str(python)
