"""Room and speed of the folders that a training writes to and reads from; a few seconds at most."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llava_fsdp.doctor.findings import Finding, fail, ok, warn
from llava_fsdp.runtime.humanize import readable
from llava_fsdp.runtime.os_errors import FULL, existing, free_inodes, full

MIB = 1 << 20
BLOCK = 8 * MIB
MOST = 256 * MIB
SECONDS = 2.0
"""That each measurement may take, but for what is under way when they are over."""
PICTURES = 64
SLOW_SAVE = 600
"""Seconds from which writing a checkpoint is called slow."""
SLOW_READ = 20 * MIB
"""Bytes a second below which a dataset is called slow to read."""


@dataclass(frozen=True)
class Speed:
    """Bytes a second."""

    write: float
    """Until the disk has it."""
    read: float
    """As far as the system lets its cache be emptied."""


def measure(folder: Path, most: int = MOST) -> Speed:
    """Write a file without a name, which is gone whatever happens, force it to the disk, and read it."""
    block = os.urandom(MIB) * (BLOCK // MIB)  # what could be compressed would be too fast
    with tempfile.TemporaryFile(dir=folder) as file:
        handle, written, start = file.fileno(), 0, time.monotonic()
        while written < most and time.monotonic() - start < SECONDS:
            written += os.write(handle, block)
        os.fsync(handle)
        wrote = time.monotonic() - start
        return Speed(written / max(wrote, 1e-6), read_speed(handle, written))


def read_speed(handle: int, most: int = MOST) -> float:
    """Bytes a second of an open file from its beginning."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(handle, 0, os.SEEK_SET)
    count, start = 0, time.monotonic()
    while count < most and time.monotonic() - start < SECONDS:
        got = len(os.read(handle, BLOCK))
        count += got
        if not got:
            break
    return count / max(time.monotonic() - start, 1e-6)


def judge_room(name: str, folder: Path, free: int, needed: int, what: str, cure: str) -> Iterator[Finding]:
    """
    Args:
        needed: bytes; 0: not known.
    """
    said = f"{folder}: {readable(free)} free" + (f", {what} {readable(needed)}" if needed else "")
    if needed > free:
        yield fail(name, said, cure)
    elif free_inodes(folder) == 0:
        yield fail(name, f"{said}, but no inodes: the disk takes no new file (df -i)", "delete files there")
    else:
        yield ok(name, said)


def judge_speed(
    name: str, folder: Path, checkpoint: int, measured: Callable[[Path], Speed] = measure
) -> Iterator[Finding]:
    """
    Args:
        checkpoint: bytes; 0: not known.
    """
    try:
        speed = measured(folder)
    except OSError as error:
        if error.errno not in FULL:  # which is no mistake of a probe
            raise
        said = f"not measured: no room for the {readable(MOST)} that this would write ({full(folder)})"
        yield warn(name, said, "make room there, or give a folder on another disk")
        return
    said = f"writes {readable(speed.write)}/s to the disk, reads {readable(speed.read)}/s"
    seconds = checkpoint / speed.write
    if seconds > SLOW_SAVE:
        cure = "an output_dir on a faster disk, or a larger checkpoint.every: saves run beside the steps"
        yield warn(name, f"{said}: {seconds / 60:.0f} minutes a checkpoint", cure)
    else:
        yield ok(name, said + (f": {seconds:.0f} s a checkpoint" if seconds >= 1 else ""))


def check_writable(name: str, folder: Path) -> Iterator[Finding]:
    """Whether a file can be made where the folder is, or will be."""
    place = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        cure = "give a folder that this user may write: output_dir=..."
        yield fail(name, f"{place} cannot be written ({error.strerror or error})", cure)


def pictures_in(folder: Path, most: int = PICTURES) -> list[Path]:
    """The first files below a folder, found within `SECONDS`."""

    def found() -> Iterator[Path]:
        start = time.monotonic()
        for place, _, names in os.walk(folder):
            yield from (Path(place) / name for name in names[:most])
            if time.monotonic() - start > SECONDS:
                return

    return list(islice(found(), most))


def judge_pictures(name: str, paths: Iterable[Path]) -> Iterator[Finding]:
    """How fast single files are read, one after the other."""
    count, files, start = 0, 0, time.monotonic()
    for path in paths:
        try:
            count += len(path.read_bytes())
        except OSError as error:
            yield fail(
                name, f"{path} cannot be read ({error.strerror})", "let this user read the pictures: chmod -R a+rX"
            )
            return
        files += 1
        if time.monotonic() - start > SECONDS:
            break
    if not files:
        yield fail(name, "no file in it", "data.images names the folder below which the records' pictures are")
        return
    seconds = max(time.monotonic() - start, 1e-6)
    said = f"{files / seconds:,.0f} files a second, {readable(count / seconds)}/s, by one reader"
    if count / seconds < SLOW_READ and files / seconds < PICTURES:
        yield warn(name, said, "copy the pictures to a local disk, or raise data.workers and data.prefetch")
    else:
        yield ok(name, said)


def judge_records(name: str, path: Path) -> Iterator[Finding]:
    """A file of records: there, and how fast it is read."""
    with open(path, "rb") as file:
        handle = file.fileno()
        count = os.fstat(handle).st_size
        if not count:
            yield fail(name, f"{path} is empty", "data.path names the file of the records")
            return
        speed = read_speed(handle)
    index = path.with_name(path.name + ".index")
    indexed = "" if index.exists() else "; no index yet: the first start makes it, or llava_fsdp.prepare alone"
    yield ok(name, f"{path}: {readable(count)}, read at {readable(speed)}/s{indexed}")
