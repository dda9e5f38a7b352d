"""XXH128 digests of files, and JSON files that end in a digest of their own content. Digests detect damage, not
forgery."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_128

CHUNK = 8 << 20
"""Bytes of a file that are written, digested or searched at a time: few enough for the CPU's cache."""
BEFORE, AFTER = b',\n"digest": "', b'"}\n'
TAIL = len(BEFORE) + 32 + len(AFTER)
THREADS = 4
"""Number of threads of a process that compute digests of files."""

K = TypeVar("K", str, Path)


@dataclass(frozen=True)
class Digest:
    """The size in bytes and the XXH128 digest of a file."""

    bytes: int
    xxh128: str


def digest_of(file: RawIOBase) -> Digest:
    """The size and digest of an unbuffered file, from its current position to the end. Raises OSError."""
    digest, size, buffer = xxh3_128(), 0, bytearray(CHUNK)
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        size += count
    return Digest(size, digest.hexdigest())


def digest_of_file(path: Path) -> Digest:
    """The size and digest of a file; symbolic links are followed. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return digest_of(file)


def sealed(body: bytes) -> bytes:
    """A JSON object, given without its closing brace, with a last key `digest`: the digest of all bytes before it."""
    return body + BEFORE + xxh3_128(body).hexdigest().encode() + AFTER


def unsealed(content: bytes) -> bytes | None:
    """The content of a JSON file up to its last key `digest`; None if the content does not match that digest."""
    body = content[:-TAIL]
    return body if content == sealed(body) else None


def share(files: Mapping[K, Digest], rank: int, size: int) -> list[K]:
    """The files whose digests this rank is to compute: the largest are assigned first, to the rank with the fewest
    bytes."""
    load = [0] * size
    mine: list[K] = []
    by_size: Iterable[K] = sorted(files, key=lambda name: (-files[name].bytes, str(name)))
    for name in by_size:
        least = load.index(min(load))
        load[least] += files[name].bytes
        if least == rank:
            mine.append(name)
    return mine
