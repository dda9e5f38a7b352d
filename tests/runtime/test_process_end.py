"""How a process of somebody else's ended, before its parent has asked and after."""

import os
import signal
import subprocess
import sys

import pytest
from lives import TELLS_ALWAYS

from llava_fsdp.runtime.process_end import ending_of

UNKNOWN = "ended without a report; the kernel kills processes when memory runs out (see dmesg)"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone can tell")
@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (f"kill(getpid(), {signal.SIGKILL:d})", "was killed by signal 9 (out of host memory? see dmesg)"),
        (f"kill(getpid(), {signal.SIGSEGV:d})", "was killed by signal 11"),
        ("_exit(0)", "ended with exit code 0 in the middle of the run"),
        ("_exit(7)", "ended with exit code 7 in the middle of the run"),
    ],
)
def test_an_end_is_told_before_and_after_its_parent_has_asked(deed: str, said: str) -> None:
    with subprocess.Popen([sys.executable, "-c", f"from os import *; {deed}"]) as process:
        pidfd = os.pidfd_open(process.pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert ending_of(pidfd, process.pid) == said
    assert ending_of(pidfd, process.pid) == (said if TELLS_ALWAYS else UNKNOWN)
    os.close(pidfd)
    assert ending_of(pidfd, process.pid) == UNKNOWN, "a kernel that cannot tell"
