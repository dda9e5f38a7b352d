"""A process that ends when the one that started it does, or ends that one. Imports nothing of ours."""

import ctypes
import os
import signal
import sys


def end_with(parent: int) -> None:
    """Let the system kill this process when `parent`, which started it, ends; on Linux, which alone can."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
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
