"""Damaged files of every sort that we read: an error of ours, or nothing; no other error, no hang, no crash."""

import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
import warnings
from pathlib import Path

import pytest
from readers import READERS, Reader
from tiers import slow_after

from llava_fsdp.runtime.errors import LlavaFsdpError

FAST, FULL = 20, 200
SECONDS = 20
"""For one file; most take milliseconds."""
MEMORY = 3 << 30
"""Bytes beyond what the process has when it begins."""


def damaged(whole: bytes, dice: random.Random) -> bytes:
    """A few bytes flipped, put in, taken out, or all behind some byte cut off; or two stretches that change places."""
    content = bytearray(whole)
    for _ in range(dice.choice([1, 1, 2, 8])):
        at = dice.randrange(len(content) or 1)
        # heads say more than bodies
        at = at if dice.random() < 0.5 else dice.randrange(min(len(content), 64) or 1)
        match dice.randrange(6):
            case 0:
                content[at : at + 1] = bytes([content[at] ^ 1 << dice.randrange(8)]) if content else b""
            case 1:
                content[at:at] = dice.randbytes(dice.choice([1, 4, 30]))
            case 2:
                del content[at : at + dice.choice([1, 2, 50])]
            case 3:
                del content[at:]
            case 4:
                content[at : at + 8] = dice.choice(
                    [b"\xff" * 8, b"\0" * 8, b"-1", b"1e999", b'"', b"[", b"{}", b"null"]
                )
            case _:
                other = dice.randrange(len(content) or 1)
                content[at : at + 4], content[other : other + 4] = content[other : other + 4], content[at : at + 4]
    return bytes(content)


def read_damaged(reader: Reader, folder: Path, count: int, seed: str, answers: int) -> None:
    """In a child: damage and read so many times, and write what came of each before the next begins."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    path = reader.write(folder)
    whole = path.read_bytes()
    reader.read(path)  # as it is, it is read
    for number in range(count):
        path.write_bytes(damaged(whole, random.Random(f"{seed} {number}")))
        shutil.rmtree(folder / "index", ignore_errors=True)
        began, said = time.monotonic(), "read"
        signal.alarm(SECONDS)
        try:
            reader.read(path)
        except LlavaFsdpError as error:
            said = f"refused: {type(error).__name__}"
        except BaseException:
            said = traceback.format_exc()
        signal.alarm(0)
        os.write(answers, (json.dumps([number, said, time.monotonic() - began]) + "\n").encode())


def fuzz(name: str, folder: Path, count: int) -> None:
    answers, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            read_damaged(READERS[name], folder, count, name, ours)
            code = 0
        except BaseException:
            os.write(ours, (json.dumps([-1, traceback.format_exc(), 0]) + "\n").encode())
        finally:
            os._exit(code)
    os.close(ours)
    with os.fdopen(answers) as lines:
        rows = [json.loads(line) for line in lines]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the process ended with {status} at damaged file {len(rows)}; {rows[-1:]}"
    wrong = [
        f"file {number}: {said}" for number, said, _ in rows if said != "read" and not said.startswith("refused: ")
    ]
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong[:3])
    assert len(rows) == count
    assert not READERS[name].raises or any(said != "read" for _, said, _ in rows), "some of it must be noticed"


@pytest.mark.parametrize("name", slow_after(4, READERS))
def test_damaged_files(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, FAST)


@pytest.mark.faults
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, FULL)
