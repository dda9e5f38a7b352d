"""How a process of somebody else's ended, before its parent has asked and after."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from lives import TELLS_ALWAYS

from llava_fsdp.runtime.launch import incarnation, launch_id, start_time
from llava_fsdp.runtime.process.process_end import AGENT, end_with, ending_of, without_launcher

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


def test_a_child_has_nothing_of_the_torchrun_around_it() -> None:
    """What it set for its workers; the user's own variables stay."""
    theirs = {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
        "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", AGENT,
    }  # fmt: skip
    own = {"PATH", "MY_RANK", "RANKS", "OMP_NUM_THREADS", "TORCH_LOGS"}
    assert without_launcher(dict.fromkeys(theirs | own, "1")) == dict.fromkeys(own, "1")


@pytest.mark.parametrize(
    ("environment", "name", "start"),
    [
        ({}, None, "process PID"),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"}, "a", "a 2"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"},
            "none-HOST-PARENT", "none-HOST-PARENT 2",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7",
             "TORCHELASTIC_RESTART_COUNT": "2"},
            "none", "none h:7",
        ),
    ],
)  # fmt: skip
def test_what_a_start_of_the_ranks_is_called(
    environment: dict[str, str], name: str | None, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    own = {"PARENT": str(os.getppid()), "PID": str(os.getpid()), "HOST": socket.gethostname()}
    for word, value in own.items():  # names of cases are the same in all processes of the tests
        name, start = name and name.replace(word, value), start.replace(word, value)
    assert (launch_id(), incarnation()) == (name, start)


def test_when_a_process_has_started() -> None:
    began = time.time()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert abs(start_time(process.pid) - began) < 5 and start_time(os.getpid()) < began
        process.kill()
    assert start_time(process.pid) == 0.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone can tell")
@pytest.mark.parametrize("is_orphan", [True, False])
def test_a_process_whose_parent_has_already_ended_ends_at_once(is_orphan: bool) -> None:
    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            end_with(1 << 22 if is_orphan else parent)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == is_orphan
