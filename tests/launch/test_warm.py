"""A command that is forked from a process which has imported everything has none of that process's files."""

import subprocess
from pathlib import Path

import pytest
import torch
from commands import TORCHRUN
from harness import RankPool, single_world

from llava_fsdp.data.text.chat_template.bounded_jinja import process, render
from llava_fsdp.parallel.ranks.world import World

RANK = """
import gc, io, logging, os, socket, sys

gc.unfreeze()
inherited = [own for own in gc.get_objects() if issubclass(type(own), (io.FileIO, socket.socket))]
inherited = [own for own in inherited if not getattr(own, "closed", False) and own.fileno() > 2]

pairs = [socket.socketpair() for _ in range(40)]
for logger in [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]:
    if isinstance(logger, logging.Logger):
        logger.error("an error")
got = []
for end in [end for pair in pairs for end in pair]:
    end.setblocking(False)
    try:
        got.append((end.fileno(), end.recv(300)))
    except BlockingIOError:
        pass
print(got, inherited)
sys.exit(bool(got or inherited))
"""


def test_a_rank_writes_nothing_into_its_connections(tmp_path: Path) -> None:
    """Neither the log, which every logger of this process had a file for, nor any other file of this process."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ran = subprocess.run(
        [*TORCHRUN, "1", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert ran.stdout == "[] []\n"


def renders_in_a_fork(_: World) -> bool:
    """Whether the process that renders chat templates was forked, and not started with a command line of its own."""
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "a word"}], {})[0] == "a word"
    started = process()._process
    assert started is not None
    return b"limited_process" not in Path(f"/proc/{started.pid}/cmdline").read_bytes()


@pytest.mark.ranks
def test_processes_beside_tests_and_ranks_are_forked(pools: dict[int, RankPool]) -> None:
    """Each would otherwise import transformers anew, which takes most of a second."""
    is_installed = not torch.cuda.is_available()  # see conftest.py
    assert renders_in_a_fork(single_world()) == is_installed
    assert pools[2].run(renders_in_a_fork) == [is_installed] * 2
