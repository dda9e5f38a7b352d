"""The cache of ranges: bounded, shared by processes, and never the source of a wrong byte."""

import fcntl
import logging
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llava_fsdp.data.containers import range_cache
from llava_fsdp.data.containers.range_cache import BLOCK, DIGEST, RangeCache
from llava_fsdp.runtime.errors import ConfigError

RAW = random.Random(0).randbytes(2 << 20)
SIZE = 2 * BLOCK - DIGEST
"""Bytes of an entry that fills two blocks."""


def gib(size: int) -> float:
    return size / 2**30


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*") if path.is_file()]


def bytes_in(folder: Path) -> int:
    total = 0
    for path in entries(folder):
        try:
            total += range_cache.on_disk(path.stat().st_size)
        except FileNotFoundError:
            pass
    return total


@pytest.fixture
def cache(tmp_path: Path) -> RangeCache:
    return RangeCache(tmp_path / "cache", gib(1 << 30))


def test_what_was_put_is_got(cache: RangeCache) -> None:
    assert cache.get("c", 0, 5) is None
    cache.put("c", 0, b"01234")
    cache.put("c", 5, b"")
    assert cache.get("c", 0, 5) == b"01234"
    assert cache.get("c", 5, 0) == b""
    assert [cache.get(*key) for key in (("c", 0, 4), ("c", 1, 5), ("d", 0, 5), ("c 0", 0, 5))] == [None] * 4
    assert RangeCache(cache.folder, 1).get("c", 0, 5) == b"01234"
    assert (cache.hits, cache.misses, cache.damaged) == (2, 5, 0)
    assert cache.folder.stat().st_mode & 0o077 == 0


def damage_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: damage_byte(path, 0),
        lambda path: damage_byte(path, -1),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"!"),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
)
def test_a_damaged_entry_is_dropped(damage, cache: RangeCache) -> None:
    cache.put("c", 0, RAW[:1000])
    path = cache.path("c", 0, 1000)
    damage(path)
    assert cache.get("c", 0, 1000) is None
    assert cache.damaged == 1
    assert not path.exists()
    cache.put("c", 0, RAW[:1000])
    assert cache.get("c", 0, 1000) == RAW[:1000]


def test_an_entry_at_the_place_of_another_is_dropped(cache: RangeCache) -> None:
    cache.put("c", 0, RAW[:1000])
    cache.put("d", 0, RAW[1000:2000])
    os.replace(cache.path("c", 0, 1000), cache.path("d", 0, 1000))
    assert cache.get("d", 0, 1000) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/hostname")])
def test_what_is_no_file_is_no_entry(make, cache: RangeCache) -> None:
    path = cache.path("c", 0, 1000)
    path.parent.mkdir()
    make(path)
    assert cache.get("c", 0, 1000) is None


def test_the_oldest_used_is_deleted_first(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, gib(16 * 2 * BLOCK))
    for number in range(16):
        cache.put("c", number, RAW[:SIZE])
        os.utime(cache.path("c", number, SIZE), (0, 1000 * (number + 1)))
    assert cache.get("c", 3, SIZE) is not None  # used again
    cache.put("c", 16, RAW[:SIZE])
    left = [number for number in range(17) if cache.path("c", number, SIZE).exists()]
    assert left == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]  # 14 are 7/8 of the bound


def test_a_smaller_bound_is_kept_from_the_next_entry_on(tmp_path: Path) -> None:
    for number in range(20):
        RangeCache(tmp_path, gib(1 << 30)).put("c", number, RAW[:SIZE])
    (tmp_path / "total").write_text("")  # as a crash leaves it
    cache = RangeCache(tmp_path, gib(8 * 2 * BLOCK))
    cache.put("c", 20, RAW[:SIZE])
    assert bytes_in(tmp_path) <= 8 * 2 * BLOCK
    assert cache.path("c", 20, SIZE).exists()
    assert int((tmp_path / "total").read_text()) == bytes_in(tmp_path)
    (tmp_path / "total").write_text("9" * 20)  # many more digits than the total that replaces it
    cache.put("c", 21, RAW[:SIZE])
    assert int((tmp_path / "total").read_text()) == bytes_in(tmp_path)


def test_bytes_wait_for_a_total_that_another_process_holds(tmp_path: Path) -> None:
    """A process does not wait for the lock before it has many bytes to report, and reports each of them once."""
    entry = 2 * BLOCK
    cache = RangeCache(tmp_path, gib(range_cache.REPORTED * entry))

    def total() -> str:
        return (tmp_path / "total").read_text()

    cache.put("c", 0, RAW[:SIZE])
    assert total() == "", "too few to report"
    cache.put("c", 1, RAW[:SIZE])
    assert total() == str(2 * entry)
    with (tmp_path / "total").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for number in range(2, 6):
            cache.put("c", number, RAW[:SIZE])
        assert total() == str(2 * entry)
    cache.put("c", 6, RAW[:SIZE])
    assert total() == str(7 * entry)
    for number in range(7, 9):
        cache.put("c", number, RAW[:SIZE])
    assert total() == str(9 * entry)


def test_what_a_killed_writer_left_is_deleted_later(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, gib(4 * 2 * BLOCK))
    (tmp_path / "ab").mkdir()
    old, new = (tmp_path / "ab" / f"{name}.12345678.tmp" for name in ("old", "new"))
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    os.utime(old, (0, time.time() - range_cache.LEFT_BEHIND - 10))
    for number in range(5):
        cache.put("c", number, RAW[:SIZE])
    assert (old.exists(), new.exists()) == (False, True)


@pytest.fixture
def small_files() -> Iterator[None]:
    """This process can write files of at most 5,000 bytes: more fails in the middle, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, handler)


def test_an_entry_that_cannot_be_written_leaves_nothing(
    cache: RangeCache, small_files: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("llava_fsdp"), "propagate", True)
    for number in range(3):
        cache.put("c", number, RAW[:20_000])
    assert cache.not_written == 3
    assert entries(cache.folder) == []
    assert cache.get("c", 0, 20_000) is None
    # a handler of an earlier test may report a record twice
    assert len({id(record) for record in caplog.records if record.levelno == logging.WARNING}) == 1
    cache.put("c", 9, RAW[:4000])
    assert cache.get("c", 9, 4000) == RAW[:4000]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_entries_alone(small_disk: Path) -> None:
    cache = RangeCache(small_disk, gib(1 << 30))
    for number in range(30):
        cache.put("c", number, RAW[number : number + 20_000])
    kept = [number for number in range(30) if cache.get("c", number, 20_000) is not None]
    assert 5 < len(kept) < 13
    assert len(kept) + cache.not_written == 30
    assert cache.damaged == 0
    assert len(entries(small_disk)) == len(kept)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache"):
        RangeCache(tmp_path / "file" / "cache", 1)


def read_at_random(folder: Path, seed: int, count: int, bound: int, answers: multiprocessing.Queue) -> None:
    cache, draw = RangeCache(folder, gib(bound)), random.Random(seed)
    wrong = largest = 0
    for number in range(count):
        offset = draw.randrange(100) * 20_000
        data = cache.get("x", offset, 20_000)
        if data is None:
            data = RAW[offset : offset + 20_000]
            cache.put("x", offset, data)
        wrong += data != RAW[offset : offset + 20_000]
        if number % 50 == 0:
            largest = max(largest, bytes_in(folder))
    answers.put((wrong, largest, cache.hits, cache.misses, cache.damaged))


def test_four_processes_share_a_folder(tmp_path: Path) -> None:
    bound = 1 << 20
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=read_at_random, args=(tmp_path, seed, 300, bound, answers)) for seed in range(4)]
    for child in children:
        child.start()
    found = [answers.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    wrong, largest, hits, misses, damaged = zip(*found, strict=True)
    assert sum(wrong) == sum(damaged) == 0
    assert min(hits) > 50 and min(misses) > 50
    assert bound * 3 / 4 < max(largest) <= bound + 5 * 20_480  # an entry of each process, and one
    assert list(tmp_path.glob("*/*.tmp")) == []


def write_for_ever(folder: Path, started: multiprocessing.Event) -> None:
    cache = RangeCache(folder, gib(8 << 20))
    for number in range(1 << 30):
        cache.put("x", number % 1000, RAW[number % 1000 :][:500_000])
        started.set()


@pytest.mark.parametrize("delay", [0.01, 0.05])
def test_a_killed_writer_leaves_no_wrong_entry(delay: float, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    child = context.Process(target=write_for_ever, args=(tmp_path, started))
    child.start()
    assert started.wait(30)
    time.sleep(delay)
    child.kill()
    child.join()
    cache = RangeCache(tmp_path, gib(8 << 20))
    found = [cache.get("x", number, 500_000) for number in range(1000)]
    assert any(found)
    assert all(data in (None, RAW[number:][:500_000]) for number, data in enumerate(found))
    assert cache.damaged == 0
    cache.put("x", 1000, RAW[:500_000])  # the lock died with its holder
    assert cache.get("x", 1000, 500_000) == RAW[:500_000]
