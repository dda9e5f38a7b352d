"""A command that is forked from a process which has imported everything has none of that process's files."""

import subprocess
from pathlib import Path

from commands import TORCHRUN

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
