"""Where the members of a WebDataset tar lie, by a walk over its headers; the members themselves are not read.

A sample is the members in a row whose names share a key: all up to the first dot of the base name, the folder
included. What follows the dot, in lower case, is the extension. `https://github.com/webdataset/webdataset` groups
members the same way. Formats: USTAR, GNU (long names, sizes over 8 GiB) and pax; not compressed.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from llava_fsdp.data.containers.place import Reader
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.terminal_text import shown_name

BLOCK = 512
MOST_EXTRA = 1 << 20
"""Largest size in bytes of a pax header or of a long name."""
MOST_END = 64 << 20
"""Most bytes after the end mark; tar pads its last record with zeros, 10 KiB long unless `tar -b` says otherwise."""
COPY_AGAIN = "take it from its source again"
PACK_AGAIN = "unpack it and pack it again with tar --format=pax"
GUNZIP, UNZSTD = "gunzip", "zstd -d"
SUFFIXES = {
    ".gz": GUNZIP, ".tgz": GUNZIP, ".zst": UNZSTD, ".tzst": UNZSTD, ".bz2": "bunzip2", ".tbz2": "bunzip2",
    ".xz": "xz -d", ".txz": "xz -d",
}  # fmt: skip
MAGICS = {b"\x1f\x8b": GUNZIP, b"\x28\xb5\x2f\xfd": UNZSTD, b"BZh": "bunzip2", b"\xfd7zXZ\0": "xz -d"}
FILES = (b"0", b"\0", b"7")
FOLDER, PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK, SPARSE = b"5", b"x", b"g", b"L", b"K", b"S"
EXTRAS = (PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK)
NO_FILES = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
}  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A file in a tar."""

    name: str
    offset: int
    """First byte of its content in the tar."""
    size: int
    """Bytes of its content."""


@dataclass(frozen=True)
class TarSample:
    """The members of a tar that share a key."""

    key: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset in the tar and size in bytes of each member, by its extension, such as `jpg` or `seg.png`."""


def samples(shard: Reader, skipped: Counter[str]) -> Iterator[TarSample]:
    """Yield the samples of a tar in order.

    Args:
        shard: the tar. It is read forward, a header at a time: a remote reader should fetch large blocks.
        skipped: counts the members that belong to no sample: `folder`, `hidden file` (base names that begin with a dot,
            such as macOS's `._x.jpg`) and `no extension`.

    Raises:
        DataError: the tar is compressed, truncated or damaged, has a member that is not read (link, sparse file), or
            has a key or an extension twice.
        SourceError: the tar cannot be read.
    """
    seen: set[str] = set()
    sample: TarSample | None = None
    for member in members(shard, skipped):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot:
            skipped["no extension" if stem else "hidden file"] += 1
            continue
        key, extension = folder + slash + stem, extension.lower()
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            if key in seen:
                refuse(
                    shard, member.offset, f"sample {shown_name(key)} comes twice, with other samples between",
                    "members of a sample must stand in a row: pack it again with tar --sort=name", member.name,
                )  # fmt: skip
            seen.add(key)
            sample = TarSample(key)
        if extension in sample.members:
            refuse(
                shard, member.offset, f"sample {shown_name(key)} has two members .{shown_name(extension)}",
                "give one of them another name", member.name,
            )  # fmt: skip
        sample.members[extension] = (member.offset, member.size)
    if sample is not None:
        yield sample


def members(shard: Reader, skipped: Counter[str]) -> Iterator[Member]:
    """Yield the files of a tar in order; see `samples`."""
    refuse_compressed(shard)
    at, extra, for_all, before = 0, {}, {}, False
    while True:
        header = read(shard, at, BLOCK, "in a header, or without an end mark")
        if header.count(0) == BLOCK:
            if before:
                refuse(shard, at, "it ends after a header that belongs to the next member", COPY_AGAIN)
            check_zeros(shard, at)
            return
        kind, size, at_body = header[156:157], header_size(shard, at, header), at + BLOCK
        if kind in EXTRAS:
            if size > MOST_EXTRA:
                refuse(shard, at, f"a header has {size} bytes, most are {MOST_EXTRA}", PACK_AGAIN)
            values = extra_values(shard, at, kind, read(shard, at_body, size, "in a header"))
            extra, for_all = (extra, for_all | values) if kind == PAX_GLOBAL else (extra | values, for_all)
            before = kind != PAX_GLOBAL
            at = at_body + padded(size)
            continue
        extra, values, before = {}, for_all | extra, False
        name = values.get("path") or header_name(shard, at, header)
        size = pax_size(shard, at, name, values, size)
        check_kind(shard, at, name, kind, values)
        if kind == FOLDER or name.endswith("/"):
            skipped["folder"] += 1
            at = at_body + (0 if kind == FOLDER else padded(size))  # the size of a folder counts no bytes here
            continue
        if at_body + size > shard.size:
            refuse(shard, at, f"it ends at byte {shard.size}, within the member", COPY_AGAIN, name)
        yield Member(name, at_body, size)
        at = at_body + padded(size)


def refuse(shard: Reader, at: int, problem: str, cure: str, member: str | None = None) -> NoReturn:
    """Raise a DataError that names the tar, the member if known, and the cure."""
    where = f"byte {at}" if member is None else f"member {shown_name(member)} at byte {at}"
    raise DataError(f"{shard.name}, {where}: {problem}; {cure}").about(file=shard.name, member=member)


def refuse_compressed(shard: Reader) -> None:
    """Raise DataError if the name or the first bytes of a file are those of a compressed tar."""
    head = shard.read(0, min(shard.size, 6))
    tool = next((tool for magic, tool in MAGICS.items() if head.startswith(magic)), None)
    tool = tool or next((tool for suffix, tool in SUFFIXES.items() if shard.name.lower().endswith(suffix)), None)
    if tool is not None:
        refuse(shard, 0, "it is compressed, so that no image can be read alone", f"decompress it once: {tool} FILE")


def read(shard: Reader, at: int, size: int, where: str) -> bytes:
    if at + size > shard.size:
        refuse(shard, at, f"the tar ends at byte {shard.size}, {where}: it is truncated", COPY_AGAIN)
    return shard.read(at, size)


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def check_zeros(shard: Reader, at: int) -> None:
    """Raise DataError if anything but zeros follows the end mark."""
    if shard.size - at > MOST_END:
        refuse(shard, at, f"{shard.size - at} bytes follow its end mark, most are {MOST_END}", COPY_AGAIN)
    while at < shard.size:
        data = shard.read(at, min(1 << 20, shard.size - at))
        if data.count(0) < len(data):
            refuse(
                shard, at, "data follow its end mark: of tars joined with cat, only the first would be read",
                "join them with tar --concatenate, or take it from its source again",
            )  # fmt: skip
        at += len(data)


def header_size(shard: Reader, at: int, header: bytes) -> int:
    """Return the size of a member in bytes from its header, whose checksum is checked."""
    checksum = octal(header[148:156])
    # the checksum field itself counts as spaces
    if checksum != sum(header) - sum(header[148:156]) + 8 * 32:
        # some old programs summed signed bytes
        if checksum != sum(struct.unpack("512b", header)) - sum(struct.unpack("8b", header[148:156])) + 8 * 32:
            refuse(shard, at, "no valid tar header is there (its checksum is wrong)", COPY_AGAIN)
    if header[124] == 0x80:  # GNU: a binary number
        return int.from_bytes(header[125:136], "big")
    size = octal(header[124:136])
    if size is None:
        refuse(shard, at, "a header has no valid size", PACK_AGAIN)
    return size


def octal(data: bytes) -> int | None:
    """Parse a number of a tar header: octal digits, padded with spaces and zero bytes; None for other bytes."""
    digits = data.partition(b"\0")[0].strip(b" ")
    return int(digits or b"0", 8) if not digits.strip(b"01234567") else None


def text(shard: Reader, at: int, data: bytes) -> str:
    """Decode a name up to its first zero byte."""
    try:
        return (name := data.partition(b"\0")[0]).decode()
    except UnicodeDecodeError:
        refuse(shard, at, f"the name {shown_name(name[:80])} is not UTF-8", f"{PACK_AGAIN}, with names in UTF-8")


def header_name(shard: Reader, at: int, header: bytes) -> str:
    name = text(shard, at, header[:100])
    if header[257:263] == b"ustar\0" and header[345]:  # GNU has other things at the place of USTAR's prefix
        return f"{text(shard, at, header[345:500])}/{name}"
    return name


def extra_values(shard: Reader, at: int, kind: bytes, data: bytes) -> dict[str, str]:
    """Return what a pax header or a GNU long name says about the next member, by pax keyword."""
    if kind in (LONG_NAME, LONG_LINK):
        return {"path" if kind == LONG_NAME else "linkpath": text(shard, at, data)}
    values, start = {}, 0
    while start < len(data) and data[start] != 0:
        length, space, _ = data[start : start + 20].partition(b" ")
        end = start + int(length) if space and length.isdigit() else 0
        keyword, equals, value = data[start + len(length) + 1 : end - 1].partition(b"=")
        if not equals or end > len(data) or data[end - 1 : end] != b"\n":
            refuse(shard, at, "a pax header is damaged", COPY_AGAIN)
        if keyword in (b"path", b"size") or keyword.startswith(b"GNU.sparse."):
            values[keyword.decode("ascii", "replace")] = text(shard, at, value)
        start = end
    return values


def pax_size(shard: Reader, at: int, name: str, values: dict[str, str], size: int) -> int:
    """Return the size that a pax header gives a member; without one, the size in the member's own header."""
    own = values.get("size")
    if own is None:
        return size
    if not (own.isascii() and own.isdigit() and len(own) < 20):
        refuse(shard, at, f"its pax header has the size {shown_name(own)}", COPY_AGAIN, name)
    return int(own)


def check_kind(shard: Reader, at: int, name: str, kind: bytes, values: dict[str, str]) -> None:
    """Raise DataError if a member is neither a file nor a folder, or has a name that leaves its folder."""
    if kind == SPARSE or any(key.startswith("GNU.sparse.") for key in values):
        refuse(shard, at, "it is a sparse file, stored without its zeros", "pack it again without tar --sparse", name)
    if kind in NO_FILES:
        cure = "pack it again with tar --dereference --hard-dereference, which stores files instead of links"
        refuse(shard, at, f"it is {NO_FILES[kind]}, which has no bytes of its own", cure, name)
    if kind not in (*FILES, FOLDER):
        refuse(shard, at, f"it is of the unknown kind {kind!r}", PACK_AGAIN, name)
    if name.startswith("/") or ".." in name.split("/"):
        refuse(shard, at, "its name is absolute or has ..", "pack it again with names below one folder", name)
