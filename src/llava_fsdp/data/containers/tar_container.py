"""Find the bytes of the samples in a WebDataset tar by reading its headers; the contents of the files are not read.

A sample is a sequence of consecutive files in the tar with the same key. The key of a file is its path up to the first
dot of the base name; the rest after this dot, in lower case, is its extension.
`https://github.com/webdataset/webdataset` groups files the same way. Supported formats: uncompressed USTAR, GNU (long
names, sizes over 8 GiB) and pax.

`at` is the offset of a header in the tar, `values` are {keyword: value} of a pax header, and `name` and `kind` a
member's path and the byte for its type.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

BLOCK = 512
MOST_EXTRA = 1 << 20
"""Greatest number of bytes of a pax header or of a GNU long name."""
MOST_END = 64 << 20
"""Greatest number of bytes from the end mark to the end of a tar. The program tar fills its last record, which has 10
KiB unless `tar -b` says otherwise, with zeros."""
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
SPARSE_KEYWORD = "GNU.sparse"
"""Stands for all pax keywords of a sparse file, which begin with it."""
EXTRAS = (PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK)
NO_FILES = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
}  # fmt: skip


@dataclass(frozen=True)
class Member:
    name: str
    offset: int
    """Offset in the tar of the first byte of the content."""
    size: int


@dataclass(frozen=True)
class TarSample:
    """Consecutive files whose paths differ only in the extension."""

    key: str
    """Path of the files without their extensions."""
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    """{extension, such as `jpg` or `seg.png`: (offset of the content in the tar, size in bytes)}."""


def tar_samples(file: Reader, skipped: Counter[str]) -> Iterator[TarSample]:
    """Yield the samples of a tar in order. A sample consists of consecutive members whose paths are the same up to the
    first dot of the file name; this part is its key, and what follows the dot is a member's extension.

    Args:
        file: the tar, whose headers are read in ascending order: a remote one should be read in large blocks.
        skipped: counts the members of the tar that belong to no sample, and is updated: `folder`, `hidden file` (file
            names that begin with a dot, such as macOS's `._x.jpg`) and `no extension`.

    Raises:
        DataError: the tar is compressed, truncated or damaged, has a member that is not supported (link, sparse file),
            has two samples with the same key, or a sample with the same extension twice.
        SourceError: the tar cannot be read.
    """
    keys_seen: set[str] = set()
    sample: TarSample | None = None
    for member in members(file, skipped):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot:
            skipped["no extension" if stem else "hidden file"] += 1
            continue
        key, extension = folder + slash + stem, extension.lower()
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            if key in keys_seen:
                refuse(
                    file, member.offset, f"sample {shown_name(key)} comes twice, with other samples between",
                    "members of a sample must stand in a row: pack it again with tar --sort=name", member.name,
                )  # fmt: skip
            keys_seen.add(key)
            sample = TarSample(key)
        if extension in sample.members:
            refuse(
                file, member.offset, f"sample {shown_name(key)} has two members .{shown_name(extension)}",
                "give one of them another name", member.name,
            )  # fmt: skip
        sample.members[extension] = (member.offset, member.size)
    if sample is not None:
        yield sample


def members(file: Reader, skipped: Counter[str]) -> Iterator[Member]:
    """Yield the files in a tar in order, and count its folders in `skipped`. Raise DataError if the tar is damaged or
    has a member that is not supported."""
    refuse_compressed(file)
    at = 0
    values_of_next: dict[str, str] = {}  # pax values for the next member alone
    values_of_all: dict[str, str] = {}  # pax values for all members that follow
    announces_member = False  # whether the header before belongs to a member that must follow
    while True:
        header = read_bytes(file, at, BLOCK, "in a header, or without an end mark")
        if header.count(0) == BLOCK:
            if announces_member:
                refuse(file, at, "it ends after a header that belongs to the next member", COPY_AGAIN)
            check_zeros(file, at)
            return
        kind, size, at_body = header[156:157], header_size(file, at, header), at + BLOCK
        # a pax header or a GNU long name, which describes members that follow
        if kind in EXTRAS:
            if size > MOST_EXTRA:
                refuse(file, at, f"a header has {size} bytes, most are {MOST_EXTRA}", PACK_AGAIN)
            values = extra_values(file, at, kind, read_bytes(file, at_body, size, "in a header"))
            if kind == PAX_GLOBAL:
                values_of_all = values_of_all | values
            else:
                values_of_next = values_of_next | values
            announces_member = kind != PAX_GLOBAL
            at = at_body + in_whole_blocks(size)
            continue
        values = values_of_all | values_of_next
        values_of_next, announces_member = {}, False
        name = values.get("path") or header_name(file, at, header)
        size = pax_size(file, at, name, values, size)
        check_kind(file, at, name, kind, values)
        if kind == FOLDER or name.endswith("/"):
            skipped["folder"] += 1
            # a member of the type FOLDER has no content, whatever size its header has
            at = at_body if kind == FOLDER else at_body + in_whole_blocks(size)
            continue
        if at_body + size > file.size:
            refuse(file, at, f"it ends at byte {file.size}, within the member", COPY_AGAIN, name)
        yield Member(name, at_body, size)
        at = at_body + in_whole_blocks(size)


def refuse(file: Reader, at: int, problem: str, cure: str, member: str | None = None) -> NoReturn:
    """Raise a DataError about a tar, or a member of it."""
    where = f"byte {at}" if member is None else f"member {shown_name(member)} at byte {at}"
    raise DataError(f"{file.name}, {where}: {problem}; {cure}").about(file=file.name, member=member)


def refuse_compressed(file: Reader) -> None:
    """Raise DataError if a tar is compressed, judged by its name and its first bytes."""
    head = file.read(0, min(file.size, 6))
    tool = next((tool for magic, tool in MAGICS.items() if head.startswith(magic)), None)
    tool = tool or next((tool for suffix, tool in SUFFIXES.items() if file.name.lower().endswith(suffix)), None)
    if tool is not None:
        refuse(file, 0, "it is compressed, so that no image can be read alone", f"decompress it once: {tool} FILE")


def read_bytes(file: Reader, at: int, size: int, where: str) -> bytes:
    """Read bytes of a tar; raise DataError if it ends before them. `where`: end of the sentence "the tar ends ..."."""
    if at + size > file.size:
        refuse(file, at, f"the tar ends at byte {file.size}, {where}: it is truncated", COPY_AGAIN)
    return file.read(at, size)


def in_whole_blocks(size: int) -> int:
    """Return the bytes that a member of `size` bytes takes in the tar: whole blocks."""
    return -(-size // BLOCK) * BLOCK


def check_zeros(file: Reader, at: int) -> None:
    """Raise DataError if there is anything but zeros from the end mark at byte `at` on."""
    if file.size - at > MOST_END:
        refuse(file, at, f"{file.size - at} bytes follow its end mark, most are {MOST_END}", COPY_AGAIN)
    while at < file.size:
        data = file.read(at, min(1 << 20, file.size - at))
        if data.count(0) < len(data):
            refuse(
                file, at, "data follow its end mark: of tars joined with cat, only the first would be read",
                "join them with tar --concatenate, or take it from its source again",
            )  # fmt: skip
        at += len(data)


def header_size(file: Reader, at: int, header: bytes) -> int:
    """Return the size of the member behind a header of 512 bytes. Raise DataError if its checksum or size is wrong."""
    checksum = parse_octal(header[148:156])
    # the checksum field itself counts as spaces
    if checksum != sum(header) - sum(header[148:156]) + 8 * 32:
        # some old programs summed signed bytes
        if checksum != sum(struct.unpack("512b", header)) - sum(struct.unpack("8b", header[148:156])) + 8 * 32:
            refuse(file, at, "no valid tar header is there (its checksum is wrong)", COPY_AGAIN)
    if header[124] == 0x80:  # GNU format: a binary number
        return int.from_bytes(header[125:136], "big")
    size = parse_octal(header[124:136])
    if size is None:
        refuse(file, at, "a header has no valid size", PACK_AGAIN)
    return size


def parse_octal(data: bytes) -> int | None:
    """Parse a number of octal digits padded with spaces and zero bytes; None if it has other bytes."""
    digits = data.partition(b"\0")[0].strip(b" ")
    return int(digits or b"0", 8) if not digits.strip(b"01234567") else None


def decode_name(file: Reader, at: int, data: bytes) -> str:
    """Decode a name in a header, which ends at its first zero byte; raise DataError if it is not UTF-8."""
    try:
        return (name := data.partition(b"\0")[0]).decode()
    except UnicodeDecodeError:
        refuse(file, at, f"the name {shown_name(name[:80])} is not UTF-8", f"{PACK_AGAIN}, with names in UTF-8")


def header_name(file: Reader, at: int, header: bytes) -> str:
    """Return the path of a member from its header of 512 bytes."""
    name = decode_name(file, at, header[:100])
    if header[257:263] == b"ustar\0" and header[345]:  # the GNU format has other fields where USTAR has the prefix
        return f"{decode_name(file, at, header[345:500])}/{name}"
    return name


def extra_values(file: Reader, at: int, kind: bytes, data: bytes) -> dict[str, str]:
    """Return what an extra header of the type `kind` (pax, or GNU's long name or long link target) says about the next
    member, or if it is a global pax header about all that follow, as {pax keyword: value}. `data`: content of the
    header, which begins at byte `at`."""
    if kind in (LONG_NAME, LONG_LINK):
        return {"path" if kind == LONG_NAME else "linkpath": decode_name(file, at, data)}
    values, start = {}, 0
    while start < len(data) and data[start] != 0:  # a pax entry is `LENGTH KEYWORD=VALUE` and a line break
        length, space, _ = data[start : start + 20].partition(b" ")
        end = start + int(length) if space and length.isdigit() else 0
        keyword, equals, value = data[start + len(length) + 1 : end - 1].partition(b"=")
        if not equals or end > len(data) or data[end - 1 : end] != b"\n":
            refuse(file, at, "a pax header is damaged", COPY_AGAIN)
        if keyword.startswith(b"GNU.sparse."):
            values[SPARSE_KEYWORD] = ""  # one for all: a header may have thousands, and is copied for each member
        elif keyword in (b"path", b"size"):
            values[keyword.decode()] = decode_name(file, at, value)
        start = end
    return values


def pax_size(file: Reader, at: int, name: str, values: dict[str, str], size: int) -> int:
    """Return the size of a member: that in its pax header (`values`) if there is one, else `size`, from its own
    header."""
    written = values.get("size")
    if written is None:
        return size
    if not (written.isascii() and written.isdigit() and len(written) < 20):
        refuse(file, at, f"its pax header has the size {shown_name(written)}", COPY_AGAIN, name)
    return int(written)


def check_kind(file: Reader, at: int, name: str, kind: bytes, values: dict[str, str]) -> None:
    """Raise DataError if a member of a tar is neither a file nor a folder, or has an absolute name or one with `..`.
    `at`: offset of its header in bytes; `kind`: type byte of the header; `values`: its pax keywords."""
    if kind == SPARSE or SPARSE_KEYWORD in values:
        refuse(file, at, "it is a sparse file, stored without its zeros", "pack it again without tar --sparse", name)
    if kind in NO_FILES:
        cure = "pack it again with tar --dereference --hard-dereference, which stores files instead of links"
        refuse(file, at, f"it is {NO_FILES[kind]}, which has no bytes of its own", cure, name)
    if kind not in (*FILES, FOLDER):
        refuse(file, at, f"it is of the unknown kind {kind!r}", PACK_AGAIN, name)
    if name.startswith("/") or ".." in name.split("/"):
        refuse(file, at, "its name is absolute or has ..", "pack it again with names below one folder", name)
