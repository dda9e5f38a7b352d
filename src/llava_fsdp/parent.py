"""A process that ends when the one that started it does. Imports nothing of ours."""

import ctypes
import os
import signal
import sys


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the system send this process a signal when `parent`, which started it, ends; on Linux, which alone can."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # it had died before that
            os._exit(1)
