"""Identify the content of a dataset's files by checksums. Files whose sizes and modification times are known are not
read again."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_fsdp.data.containers.file_reader import reading
from llava_fsdp.data.index.record_store import DataSource, SourceFile, digest_of_records, files_of
from llava_fsdp.runtime.errors import SourceError
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.small_json import BadJson, Kinds, parse_object, require_kinds
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.text.progress import Watch

FORMAT = 12
"""Version of the index format, increased whenever the columns change, or the values in them for the same record."""
STORED_EVERY = 100
"""Number of files after which the checksums known so far are stored."""
KNOWN, DIGESTS = "known.json", "digests.json"
STORED: dict[str, Kinds] = {"key": (str,), "fingerprint": (str,), "shards": (list,)}
"""Keys of a State in `known.json`, and the types of their values."""


@dataclass(frozen=True)
class State:
    """Checksums that identify the content of a dataset's files."""

    key: str
    """Text that changes with the content and paths of the files, and with `data.max_record_bytes`."""
    fingerprint: str
    file_keys: list[str]
    """For each file, a text that changes with its content and path, and with `data.max_record_bytes`."""

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "fingerprint": self.fingerprint, "shards": self.file_keys}


def find_state(sources: list[DataSource], folder: Path, most_bytes: int, watch: Watch, look_again: bool) -> State:
    """Return the State of a dataset's files: checksums of their content, by which the folders of the index are named.
    It is looked up in `known.json` by the files' sizes and times, and computed if not there, or with `look_again`.

    Args:
        folder: folder of the index.
        most_bytes: greatest size of a valid record in bytes. The State depends on it.
        watch: shows the progress of reading the files.
    """
    known_states = read_known(folder)
    stamp_now = stamp(sources, most_bytes)
    if stamp_now not in known_states or look_again:
        files = files_of(sources)
        digests = digests_of(files, folder, watch, look_again)
        check_unchanged(sources, most_bytes, stamp_now)
        digest_of_all = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        identities = [file.identity for file in files]
        keys = [
            short_digest(FORMAT, most_bytes, checksum, identity)
            for checksum, identity in zip(digests, identities, strict=True)
        ]
        known_states[stamp_now] = State(short_digest(FORMAT, most_bytes, digests, identities), digest_of_all[:32], keys)
        replace_file(
            folder / KNOWN,
            json.dumps({key: state.to_json() for key, state in known_states.items()}).encode(),
        )
    return known_states[stamp_now]


def digests_of(files: list[SourceFile], folder: Path, watch: Watch, look_again: bool) -> list[str]:
    """Return the SHA-256 checksum of each file. A file whose size and modification time are those stored in
    `digests.json` in the folder of the index is not read again, unless `look_again`. `watch` shows the progress."""
    stored: dict[str, list[Any]] = {}
    with contextlib.suppress(ValueError, OSError):
        stored = parse_object((folder / DIGESTS).read_bytes())

    def of_file(file: SourceFile) -> list[Any]:
        """Return a file's entry [size, modification time, checksum] in `digests.json`."""
        entry = stored.get(file.path)
        if look_again or not isinstance(entry, list) or len(entry) != 3 or entry[:2] != version_of(file):
            entry = [*version_of(file), digest_of_records(file)]
        return entry

    kept: dict[str, list[Any]] = {}
    with watch("fingerprints", len(files)) as advance, ThreadPoolExecutor(read_host().usable_cores) as pool:
        for file, entry in zip(files, pool.map(of_file, files), strict=True):
            kept[file.path] = entry
            if len(kept) % STORED_EVERY == 0:  # so that they are not lost if the process is killed
                replace_file(folder / DIGESTS, json.dumps(stored | kept).encode())
            advance(1)
    replace_file(folder / DIGESTS, json.dumps(kept).encode())
    return [str(kept[file.path][2]) for file in files]


def check_unchanged(
    sources: list[DataSource], most_bytes: int, since: str, undo: Callable[[], None] = lambda: None
) -> None:
    """Raise SourceError if a file of records has changed: if `stamp` no longer returns `since`. `undo` is called first;
    it deletes what was made from the files meanwhile."""
    try:
        is_changed = stamp(sources, most_bytes) != since
    except SourceError:  # a file is gone
        is_changed = True
    if is_changed:
        undo()
        raise SourceError(f"{', '.join(s.path for s in sources)} changed while being read; run it again")


def state_from(values: dict[str, Any]) -> State:
    """Undo `State.to_json`."""
    return State(key=values["key"], fingerprint=values["fingerprint"], file_keys=values["shards"])


def read_known(folder: Path) -> dict[str, State]:
    """Read `known.json`: {result of `stamp`: State}. A damaged file counts as empty: it can be made again."""
    path = folder / KNOWN
    try:
        known = parse_object(path.read_bytes()) if path.is_file() else {}
        return {key: state_from(require_kinds(values, STORED)) for key, values in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError, BadJson):
        return {}


def stamp(sources: list[DataSource], most_bytes: int) -> str:
    """Return a text that changes with the sizes and modification times of the files, and with the limit on a record's
    size, `most_bytes`."""
    values = []
    for file in files_of(sources):
        values.append([file, *version_of(file)])
    return short_digest(FORMAT, most_bytes, values)


def version_of(file: SourceFile) -> list[Any]:
    """Return values that change when a file's content does: its size, and its modification time in ns (for a remote
    file, the storage's text for its version)."""
    if file.remote is not None:
        return [file.remote.size, file.remote.pin]
    with reading(Path(file.path)):
        stat = os.stat(file.path)
    return [stat.st_size, stat.st_mtime_ns]


def short_digest(*what: object) -> str:
    """Return a checksum of the arguments, as 12 hexadecimal digits."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]
