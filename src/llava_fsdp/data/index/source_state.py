"""Identify the content of a dataset's files: by their sizes and modification times if these are known, else by reading
them."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from llava_fsdp.data.index.record_store import SourceFile, digest
from llava_fsdp.runtime.durable_files import replace_file
from llava_fsdp.runtime.errors import SourceError
from llava_fsdp.runtime.progress import Watch
from llava_fsdp.runtime.small_json import parse_object

FORMAT = 6
"""Version of the index format. It is increased whenever the columns change, or the values in them for the same
record."""
KNOWN = "known.json"


def find_state(sources: list[SourceFile], folder: Path, most: int, watch: Watch, look_again: bool) -> dict[str, str]:
    """Return a key and a fingerprint of the content of the source files, as {key: ..., fingerprint: ...}. Both are
    stored by the sizes and modification times of the files, so that unchanged files are not read again.

    Args:
        most: largest size of a record in bytes. The key depends on it, because with another limit other records are
            valid.
        look_again: read the files even if their sizes and modification times are known.
    """
    known = read_known(folder)
    now = stamp(sources, most)
    if now not in known or look_again:
        with watch("fingerprints", len(sources)) as advance:
            digests = []
            for source in sources:
                digests.append(digest(Path(source.path)))
                advance(1)
        check_unchanged(sources, most, now)
        whole = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        places = [[s.name, s.path, s.images and os.path.realpath(s.images), s.keys] for s in sources]
        known[now] = {"key": short(FORMAT, most, digests, places), "fingerprint": whole[:32]}
        replace_file(folder / KNOWN, json.dumps(known).encode())
    return known[now]


def check_unchanged(sources: list[SourceFile], most: int, since: str, undo: Callable[[], None] = lambda: None) -> None:
    """Raise SourceError, after calling `undo`, if the size or modification time of a source file has changed.

    Args:
        since: earlier result of `stamp` for these sources.
    """
    if stamp(sources, most) != since:
        undo()
        raise SourceError(f"{', '.join(s.path for s in sources)} changed while being read; run it again")


def read_known(folder: Path) -> dict[str, dict[str, str]]:
    """Return the content of `known.json`: for each state of the source files seen so far (sizes and modification
    times), the key and fingerprint of their content. A damaged file counts as empty, because its content can be
    computed again."""
    path = folder / KNOWN
    try:
        known = parse_object(path.read_bytes()) if path.is_file() else {}
        return {key: {name: own[name] for name in ("key", "fingerprint")} for key, own in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def stamp(sources: list[SourceFile], most: int) -> str:
    stats = [os.stat(s.path) for s in sources]
    values = [[s, stat.st_size, stat.st_mtime_ns] for s, stat in zip(sources, stats, strict=True)]
    return short(FORMAT, most, values)


def short(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]
