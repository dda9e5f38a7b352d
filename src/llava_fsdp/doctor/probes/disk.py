"""Check the free space and the speed of the folders that a training writes and reads. This takes a few seconds.

In all checks, `name` is that of the check in the report.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llava_fsdp.doctor.findings import Finding, fail, ok, warn
from llava_fsdp.runtime.files.durable_files import LEAST_INODES
from llava_fsdp.runtime.files.os_errors import FULL, free_inodes, full_disk, nearest_existing
from llava_fsdp.runtime.text.humanize import readable

MIB = 1 << 20
BLOCK = 8 * MIB
MOST = 256 * MIB
"""Maximum number of bytes that a measurement writes and reads."""
SECONDS = 2.0
"""Seconds after which a measurement stops, once its current read or write is finished."""
IMAGES = 64
"""Maximum number of image files that are read."""
SLOW_SAVE = 600
"""Seconds for writing a checkpoint above which a disk is reported as slow."""
SLOW_READ = 20 * MIB
"""Bytes per second of reading a dataset below which a disk is reported as slow."""


@dataclass(frozen=True)
class Speed:
    """Speed of a disk in bytes per second."""

    write: float
    """With the fsync."""
    read: float
    """Without the file cache, if the system allows dropping it."""


def measure(folder: Path, max_bytes: int = MOST) -> Speed:
    """Measure a disk's speed: write a temporary file of at most `max_bytes` bytes, fsync it and read it. The file has
    no name, so that it cannot be left behind."""
    block = os.urandom(MIB) * (BLOCK // MIB)  # a disk that compresses would seem too fast
    with tempfile.TemporaryFile(dir=folder) as file:
        handle, written_bytes, start = file.fileno(), 0, time.monotonic()
        while written_bytes < max_bytes and time.monotonic() - start < SECONDS:
            written_bytes += os.write(handle, block)
        os.fsync(handle)
        write_seconds = time.monotonic() - start
        return Speed(written_bytes / max(write_seconds, 1e-6), read_speed(handle, written_bytes))


def read_speed(handle: int, max_bytes: int = MOST) -> float:
    """Read an open file from its beginning, at most `max_bytes` bytes, and return the bytes per second."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # the file's content must come from the disk, not from memory
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(handle, 0, os.SEEK_SET)
    count, start = 0, time.monotonic()
    while count < max_bytes and time.monotonic() - start < SECONDS:
        num_read = len(os.read(handle, BLOCK))
        count += num_read
        if not num_read:
            break
    return count / max(time.monotonic() - start, 1e-6)


def judge_room(name: str, folder: Path, free: int, needed: int, what: str, cure: str) -> Iterator[Finding]:
    """Check that a folder's disk has enough free bytes, and `LEAST_INODES` free inodes, as a checkpoint needs.

    Args:
        free: free bytes of the disk.
        needed: bytes that the training writes into the folder; 0: unknown.
        what: what these bytes are for, in words with a verb, such as "checkpoints take"; `cure`: advice.
    """
    result = f"{folder}: {readable(free)} free" + (f", {what} {readable(needed)}" if needed else "")
    if needed > free:
        yield fail(name, result, cure)
    elif (inodes := free_inodes(folder)) is not None and inodes < LEAST_INODES:
        yield fail(
            name, f"{result}, but {inodes} inodes (df -i): {LEAST_INODES} new files must fit", "delete files there"
        )
    else:
        yield ok(name, result)


def judge_speed(
    name: str, folder: Path, checkpoint: int, measure_speed: Callable[[Path], Speed] = measure
) -> Iterator[Finding]:
    """Check how fast a folder's disk is, by writing a file of at most MOST bytes and reading it. Without room for it,
    the result is a warning. `checkpoint`: bytes of a checkpoint, to tell how long saving one takes; 0: unknown."""
    try:
        speed = measure_speed(folder)
    except OSError as error:
        if error.errno not in FULL:
            raise
        result = f"not measured: no room for the {readable(MOST)} that this would write ({full_disk(folder)})"
        yield warn(name, result, "make room there, or give a folder on another disk")
        return
    result = f"writes {readable(speed.write)}/s to the disk, reads {readable(speed.read)}/s"
    seconds = checkpoint / speed.write
    if seconds > SLOW_SAVE:
        cure = "an output_dir on a faster disk, or a larger checkpoint.every: saves run beside the steps"
        yield warn(name, f"{result}: {seconds / 60:.0f} minutes a checkpoint", cure)
    else:
        yield ok(name, result + (f": {seconds:.0f} s a checkpoint" if seconds >= 1 else ""))


def check_writable(name: str, folder: Path) -> Iterator[Finding]:
    """Check that files can be created in a folder, or in its nearest parent that exists; yield nothing if they can."""
    present = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        cure = "give a folder that this user may write to: output_dir=..."
        yield fail(name, f"{present} cannot be written ({error.strerror or error})", cure)


def images_in(folder: Path, max_files: int = IMAGES) -> list[Path]:
    """Return at most `max_files` files below a folder: the first that are found within `SECONDS`."""

    def files() -> Iterator[Path]:
        start = time.monotonic()
        for parent, _, names in os.walk(folder):
            yield from (Path(parent) / name for name in names[:max_files])
            if time.monotonic() - start > SECONDS:
                return

    return list(islice(files(), max_files))


def judge_images(name: str, paths: Iterable[Path]) -> Iterator[Finding]:
    """Measure how fast image files are read, one after the other."""
    count, files, start = 0, 0, time.monotonic()
    for path in paths:
        try:
            count += len(path.read_bytes())
        except OSError as error:
            cure = "let this user read the images: chmod -R a+rX"
            yield fail(name, f"{path} cannot be read ({error.strerror})", cure)
            return
        files += 1
        if time.monotonic() - start > SECONDS:
            break
    if not files:
        yield fail(name, "no file in it", "data.images names the folder below which the records' images are")
        return
    seconds = max(time.monotonic() - start, 1e-6)
    result = f"{files / seconds:,.0f} files a second, {readable(count / seconds)}/s, by one reader"
    if count / seconds < SLOW_READ and files / seconds < IMAGES:
        yield warn(name, result, "copy the images to a local disk, or raise data.workers and data.prefetch")
    else:
        yield ok(name, result)


def judge_records(name: str, path: Path, index: Path) -> Iterator[Finding]:
    """Measure how fast a file of records is read. `index`: folder of the dataset's index, which need not exist."""
    with open(path, "rb") as file:
        handle = file.fileno()
        count = os.fstat(handle).st_size
        if not count:
            yield fail(name, f"{path} is empty", f"name a file with records: {name}")
            return
        speed = read_speed(handle)
    indexed = "" if index.exists() else "; no index yet: the first start makes it, or llava-fsdp prepare alone"
    yield ok(name, f"{path}: {readable(count)}, read at {readable(speed)}/s{indexed}")
