"""A process that makes the index is killed again and again; the index becomes the same as one made without a kill."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from containers import HOLD_IMAGES, write_container
from s3 import s3_server
from test_build import plan_of
from test_containers import config
from tiers import slow_after

from llava_fsdp.data.index import build
from llava_fsdp.data.index.build import Plan, open_index
from llava_fsdp.runtime.text.progress import watch_silently

NOT_COMPARED = (".tmp", ".looked", "lock")
"""Ends of names of files that may differ: temporary files of killed processes, and two files without results."""


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(NOT_COMPARED))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def life(plan: Plan, renames: int) -> int:
    """Make the index in a forked process; its pid.

    Args:
        renames: the process kills itself before it gives so many files their final names (0: it does not). Between two
            such steps, what it has done is lost; nothing else changes the index.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        left, replace = [renames], os.replace

        def counted(*names: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*names)

        os.replace = counted
        open_index(plan, watch_silently)
        code = 0
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kills_change_nothing(plan: Plan, kills: int, seed: str) -> None:
    """Kill before a rename and at any moment by turns, then let it end."""
    folder, dice = plan.cfg.index_folder, random.Random(seed)
    begun = time.monotonic()
    assert ended(life(plan, 0)) == 0
    seconds = time.monotonic() - begun
    calm = tree(folder)
    shutil.rmtree(folder)
    killed = 0
    for number in range(kills):
        pid = life(plan, dice.randrange(1, 12) if number % 2 else 0)
        if number % 2 == 0:
            time.sleep(dice.uniform(0, seconds / 5))
            os.kill(pid, signal.SIGKILL)
        killed += ended(pid) == -signal.SIGKILL
    assert killed > kills // 3, "the index was whole too early"
    assert ended(life(plan, 0)) == 0
    found = tree(folder)
    assert found.keys() == calm.keys()
    assert found == calm


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CHUNKS", dict.fromkeys(build.CHUNKS, 7))


Make = Callable[..., Plan]


@pytest.fixture
def make(parts: Path, dataset: Path, tmp_path: Path) -> Make:
    def made(kind: str, path: str | None = None) -> Plan:
        rows = json.loads((dataset / "mixed.json").read_text()) * 3
        rows = [{**row, "id": number} for number, row in enumerate(rows)]
        write_container(kind, tmp_path / "shards", rows, dataset / "images", 3)
        cfg = config(parts, dataset, tmp_path, path or str(tmp_path / "shards"), kind in HOLD_IMAGES)
        return plan_of(cfg, parts)

    return made


KINDS = ("tar", "parquet with images", "gzip")


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_a_few_kills(kind: str, make: Make) -> None:
    kills_change_nothing(make(kind), 4, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(kind: str, make: Make) -> None:
    kills_change_nothing(make(kind), 15, kind)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Callable[[], str]]:
    with s3_server() as proxy:
        made = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{proxy.upstream}").Bucket("bkt")
        made.create()

        def upload() -> str:
            for file in (tmp_path / "shards").iterdir():
                made.put_object(Key=f"kills/{file.name}", Body=file.read_bytes())
            return "s3://bkt/kills"

        yield upload


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "lines"])
def test_kills_with_remote_files(kind: str, make: Make, bucket: Callable[[], str]) -> None:
    make(kind)
    kills_change_nothing(make(kind, bucket()), 12, kind)
