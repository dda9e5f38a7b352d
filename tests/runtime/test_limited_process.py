"""A function in a process of its own: its limits, its end, and what a broken limit leaves."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from llava_fsdp.runtime.process.limited_process import Answer, LimitBroken, LimitedProcess, Work

ENDS_BY = """
import os, sys
from test_limited_process import make
from llava_fsdp.runtime.process.limited_process import LimitedProcess

process = LimitedProcess(make, 1, 64)
print(process({"do": "pid"})[0]["pid"], flush=True)
sys.stdin.read()
"""


def make() -> Work:
    """The tests' own function, found by the process by its module's name."""

    def work(request: dict[str, Any]) -> Answer:
        match request["do"]:
            case "pid":
                return {"pid": os.getpid()}, b""
            case "spin":
                return {"never": 9 ** (9**9)}, b""
            case "fill":
                return {}, bytes(200 << 20)
            case "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "print":
                print("not an answer", flush=True)
        return {"echo": request["do"]}, request["do"].encode() * 100_000

    return work


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> LimitedProcess:
    here = os.path.dirname(__file__)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    made = LimitedProcess(make, 1, 64)
    return made


@pytest.mark.parametrize(("do", "why"), [("spin", "processor time"), ("fill", "64 MiB"), ("die", "exit status -11")])
def test_a_limit_ends_the_process_and_the_next_request_has_another(process: LimitedProcess, do: str, why: str) -> None:
    first = process({"do": "pid"})[0]["pid"]
    assert process({"do": "pid"})[0]["pid"] == first
    began = time.monotonic()
    with pytest.raises(LimitBroken, match=why):
        process({"do": do})
    assert time.monotonic() - began < 20
    assert process({"do": "pid"})[0]["pid"] != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize("kind", [resource.RLIMIT_CPU, resource.RLIMIT_AS])
def test_a_limit_that_the_user_may_not_raise_is_kept(kind: int) -> None:
    """As after `ulimit -H`, or under a scheduler that sets limits."""
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", ENDS_BY],
        env=os.environ | {"PYTHONPATH": here},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(kind, (1 << 40, 1 << 40)),
        check=True,
    )
    assert int(done.stdout) > 0


def test_a_program_with_many_open_files_gets_answers(process: LimitedProcess) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        assert process({"do": "print"})[0] == {"echo": "print"}


def test_answers_are_whole_and_prints_are_none(process: LimitedProcess) -> None:
    assert process({"do": "print"}) == ({"echo": "print"}, b"print" * 100_000)
    assert process({"do": "ü"}) == ({"echo": "ü"}, "ü".encode() * 100_000)


def test_it_ends_with_its_parent_however_that_ends() -> None:
    here = os.path.dirname(__file__)
    environment = os.environ | {"PYTHONPATH": here}
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDS_BY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{child}") and "Z" not in open(f"/proc/{child}/stat").read():
        assert time.monotonic() < until
        time.sleep(0.05)
