"""Run a function in a process of its own, within a time and a memory limit."""

import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from llava_fsdp.runtime.errors import LlavaFsdpError

SECONDS = 20
MEMORY = 3 << 30
"""Bytes of address space beyond what the process has when it begins."""


def within_limits(function: Callable[[], object], seconds: int = SECONDS, memory: int = MEMORY) -> object:
    """Return what a function returns, or the LlavaFsdpError that it raises; it runs in a forked process.

    Raises:
        AssertionError: it raised another error, took too long, or the process died.
    """
    answers, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(answers)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
            signal.alarm(seconds)
            try:
                result: object = function()
            except LlavaFsdpError as error:
                result = error
            except BaseException:
                result = traceback.format_exc()
                code = 3
            with os.fdopen(ours, "wb") as file:
                pickle.dump(result, file)
            code = 0 if code == 1 else code
        finally:
            os._exit(code)
    os.close(ours)
    with os.fdopen(answers, "rb") as file:
        answer = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 3), f"the process ended with {status}"
    found = pickle.loads(answer)
    assert status == 0, found
    return found
