"""Digests (XXH128) of files, and of a JSON file's own content at its end. They detect damage, not forgery."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_128

CHUNK = 8 << 20
"""Bytes that are written, digested or searched at a time: few enough to stay in the CPU's cache."""
BEFORE, AFTER = b',\n"digest": "', b'"}\n'
TAIL = len(BEFORE) + 32 + len(AFTER)
THREADS = 4
"""Threads of a process that digest files at the same time."""

K = TypeVar("K", str, Path)


@dataclass(frozen=True)
class Digest:
    """The size and digest of a file."""

    bytes: int
    xxh128: str


def digest_of(file: RawIOBase) -> Digest:
    """The digest of an unbuffered file from its current position on. Raises OSError if it cannot be read."""
    digest, size, buffer = xxh3_128(), 0, bytearray(CHUNK)
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        size += count
    return Digest(size, digest.hexdigest())


def digest_of_file(path: Path) -> Digest:
    """The digest of a file; links are followed. Raises OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        return digest_of(file)


def sealed(body: bytes) -> bytes:
    """The content of a JSON file whose last key, `digest`, is the digest of all bytes before it.

    Args:
        body: a JSON object without its closing brace.
    """
    return body + BEFORE + xxh3_128(body).hexdigest().encode() + AFTER


def unsealed(content: bytes) -> bytes | None:
    """The body that was given to `sealed`; None if the content does not match its digest."""
    body = content[:-TAIL]
    return body if content == sealed(body) else None


def share(files: Mapping[K, Digest], rank: int, size: int) -> list[K]:
    """The files that this rank is to digest. The largest are assigned first, each to the rank with the fewest bytes."""
    load = [0] * size
    mine: list[K] = []
    by_size: Iterable[K] = sorted(files, key=lambda name: (-files[name].bytes, str(name)))
    for name in by_size:
        least = load.index(min(load))
        load[least] += files[name].bytes
        if least == rank:
            mine.append(name)
    return mine
