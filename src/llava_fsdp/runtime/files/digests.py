"""XXH128 digests of files, and JSON files that end with a digest of their own content. They detect damage, not
forgery."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_128

CHUNK = 8 << 20
"""Bytes that are written, digested or searched at a time; fits into the CPU's cache."""
BEFORE, AFTER = b',\n"digest": "', b'"}\n'
TAIL = len(BEFORE) + 32 + len(AFTER)
THREADS = 4
"""Number of threads with which a process computes digests."""

K = TypeVar("K", str, Path)


@dataclass(frozen=True)
class Digest:
    """Size in bytes and XXH128 digest of a file."""

    bytes: int
    xxh128: str


def digest_of(file: RawIOBase) -> Digest:
    """Return the size and digest of an unbuffered file from its current position on. Raises OSError."""
    digest, size, buffer = xxh3_128(), 0, bytearray(CHUNK)
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        size += count
    return Digest(size, digest.hexdigest())


def digest_of_file(path: Path) -> Digest:
    """Return the size and digest of a file; symbolic links are followed. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return digest_of(file)


def with_digest(body: bytes) -> bytes:
    """Complete the text of a JSON object, given without its closing brace, with a last key `digest`: the digest of the
    text before it."""
    return body + BEFORE + xxh3_128(body).hexdigest().encode() + AFTER


def without_digest(content: bytes) -> bytes | None:
    """Return the text before the key `digest` that `with_digest` appended; None if the digest does not match."""
    body = content[:-TAIL]
    return body if content == with_digest(body) else None


def files_of_rank(files: Mapping[K, Digest], rank: int, size: int) -> list[K]:
    """Divide files among the ranks, which compute digests together, and return those of this rank. Each file, from the
    largest on, goes to the rank with the fewest bytes so far."""
    bytes_of_rank = [0] * size
    own_files: list[K] = []
    by_size: Iterable[K] = sorted(files, key=lambda name: (-files[name].bytes, str(name)))
    for name in by_size:
        least = bytes_of_rank.index(min(bytes_of_rank))
        bytes_of_rank[least] += files[name].bytes
        if least == rank:
            own_files.append(name)
    return own_files
