"""Compute XXH128 digests of files, and write JSON files that end with a digest of their own content. The digests detect
damage, not forgery."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_128

CHUNK = 8 << 20
"""Number of bytes of a file that are written, digested or searched at a time; small enough for the CPU's cache."""
BEFORE, AFTER = b',\n"digest": "', b'"}\n'
TAIL = len(BEFORE) + 32 + len(AFTER)
THREADS = 4
"""Number of threads with which a process computes digests of files."""

K = TypeVar("K", str, Path)


@dataclass(frozen=True)
class Digest:
    """The size in bytes and the XXH128 digest of a file."""

    bytes: int
    xxh128: str


def digest_of(file: RawIOBase) -> Digest:
    """Return the size and digest of an unbuffered file, read from its current position to its end. Raises OSError."""
    digest, size, buffer = xxh3_128(), 0, bytearray(CHUNK)
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        size += count
    return Digest(size, digest.hexdigest())


def digest_of_file(path: Path) -> Digest:
    """Return the size and digest of a file; symbolic links are followed. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return digest_of(file)


def sealed(body: bytes) -> bytes:
    """Complete the text of a JSON object: append a last key, `digest`, with the digest of the text before it.

    Args:
        body: the object's text without the closing brace.
    """
    return body + BEFORE + xxh3_128(body).hexdigest().encode() + AFTER


def unsealed(content: bytes) -> bytes | None:
    """Check a JSON object that `sealed` completed: its last key, `digest`, holds a digest of the text before it. Return
    that text, or None if the digest does not match."""
    body = content[:-TAIL]
    return body if content == sealed(body) else None


def share(files: Mapping[K, Digest], rank: int, size: int) -> list[K]:
    """Divide files among ranks that compute the files' digests together, and return those for this rank. Files are
    assigned from the largest to the smallest, each to the rank that has the fewest bytes so far.

    Args:
        files: size and expected digest of each file, by name or path.
        rank: this rank.
        size: number of ranks.
    """
    load = [0] * size
    mine: list[K] = []
    by_size: Iterable[K] = sorted(files, key=lambda name: (-files[name].bytes, str(name)))
    for name in by_size:
        least = load.index(min(load))
        load[least] += files[name].bytes
        if least == rank:
            mine.append(name)
    return mine
