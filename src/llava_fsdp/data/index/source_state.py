"""Identify the content of a dataset's files: by their sizes and modification times if these are known, else by reading
them."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llava_fsdp.data.index.record_store import DataSource, SourceFile, digest, files_of
from llava_fsdp.data.records.record import reading
from llava_fsdp.runtime.durable_files import replace_file
from llava_fsdp.runtime.errors import SourceError
from llava_fsdp.runtime.host import read_host
from llava_fsdp.runtime.progress import Watch
from llava_fsdp.runtime.small_json import BadJson, kinds_of, parse_object, require_kinds

FORMAT = 9
"""Version of the index format. It is increased whenever the columns change, or the values in them for the same
record."""
STORED_EVERY = 100
"""Number of files after whose digests all digests are stored."""
KNOWN, DIGESTS = "known.json", "digests.json"


@dataclass(frozen=True)
class State:
    """The content of a dataset's files."""

    key: str
    """Text that changes with the content and the places of the files, and with the largest size of a record."""
    fingerprint: str
    """Digest of the content of all files."""
    shards: list[str]
    """For each file, a text that changes with its content and its place, and with the largest size of a record."""


def find_state(sources: list[DataSource], folder: Path, most: int, watch: Watch, look_again: bool) -> State:
    """Identify the content of the files of records. It is stored by the files' sizes and modification times, so that
    unchanged files are not read again.

    Args:
        most: largest size of a record in bytes. The keys depend on it, because with another limit other records are
            valid.
        look_again: read the files even if their sizes and modification times are known.
    """
    known = read_known(folder)
    now = stamp(sources, most)
    if now not in known or look_again:
        files = files_of(sources)
        digests = digests_of(files, folder, watch, look_again)
        check_unchanged(sources, most, now)
        whole = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        places = [file.place for file in files]
        shards = [short(FORMAT, most, own, place) for own, place in zip(digests, places, strict=True)]
        known[now] = State(short(FORMAT, most, digests, places), whole[:32], shards)
        replace_file(folder / KNOWN, json.dumps({key: asdict(own) for key, own in known.items()}).encode())
    return known[now]


def digests_of(files: list[SourceFile], folder: Path, watch: Watch, look_again: bool) -> list[str]:
    """Return the sha256 of the content of each file. A file whose size and modification time are as they were when it
    was last read is not read again."""
    stored: dict[str, list[Any]] = {}
    with contextlib.suppress(ValueError, OSError):
        stored = parse_object((folder / DIGESTS).read_bytes())

    def of_file(file: SourceFile) -> list[Any]:
        own = stored.get(file.path)
        if look_again or not isinstance(own, list) or len(own) != 3 or own[:2] != version_of(file):
            own = [*version_of(file), digest(file)]
        return own

    kept: dict[str, list[Any]] = {}
    with watch("fingerprints", len(files)) as advance, ThreadPoolExecutor(read_host().usable_cores) as pool:
        for file, own in zip(files, pool.map(of_file, files), strict=True):
            kept[file.path] = own
            if len(kept) % STORED_EVERY == 0:  # so that a killed process has not read them for nothing
                replace_file(folder / DIGESTS, json.dumps(stored | kept).encode())
            advance(1)
    replace_file(folder / DIGESTS, json.dumps(kept).encode())
    return [str(kept[file.path][2]) for file in files]


def check_unchanged(sources: list[DataSource], most: int, since: str, undo: Callable[[], None] = lambda: None) -> None:
    """Raise SourceError, after calling `undo`, if the size or modification time of a file of records has changed.

    Args:
        since: earlier result of `stamp` for these sources.
    """
    try:
        is_changed = stamp(sources, most) != since
    except SourceError:  # a file is gone
        is_changed = True
    if is_changed:
        undo()
        raise SourceError(f"{', '.join(s.path for s in sources)} changed while being read; run it again")


def read_known(folder: Path) -> dict[str, State]:
    """Return the content of `known.json`: for each state of the files seen so far (sizes and modification times), their
    content. A damaged file counts as empty, because its content can be computed again."""
    path = folder / KNOWN
    try:
        known = parse_object(path.read_bytes()) if path.is_file() else {}
        return {key: State(**require_kinds(own, kinds_of(State))) for key, own in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError, BadJson):
        return {}


def stamp(sources: list[DataSource], most: int) -> str:
    values = []
    for file in files_of(sources):
        values.append([file, *version_of(file)])
    return short(FORMAT, most, values)


def version_of(file: SourceFile) -> list[Any]:
    """Return what changes with a file's content: its size, and its modification time in ns or, of a remote file, its
    pin."""
    if file.remote is not None:
        return [file.remote.size, file.remote.pin]
    with reading(Path(file.path)):
        stat = os.stat(file.path)
    return [stat.st_size, stat.st_mtime_ns]


def short(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]
