"""What a process has to do with the one that started it: its end, and its environment. Imports nothing of ours."""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping

LAUNCHER_VARIABLES = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|(MASTER|GROUP|ROLE|TORCHELASTIC)_.*)")
"""What one torchrun tells its workers; a torchrun inside another's worker must not see it."""


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the system send this process a signal when `parent`, which started it, ends; on Linux, which alone can."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # it had died before that
            os._exit(1)


def end_torchrun() -> None:
    """Tell this machine's torchrun to end with its ranks, where a stop was asked for on another machine.

    That one's is leaving, and this one would start its ranks again and wait for it until the meeting's timeout.
    On one machine there is nobody to wait for.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE", "1") != "1" and env.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """For a torchrun of its own."""
    return {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
