"""Detect broken image and video files: those that are truncated, by the structure of their formats.

Pillow's errors do not distinguish truncation: for a truncated file it raises OSError, SyntaxError or ValueError, partly
with the same messages as for files that are not images. Sources: ITU-T T.81 B.1, PNG 5.2, and the specifications of
GIF89a, BMP, TIFF 6, WebP, AVI (RIFF), ISO/IEC 14496-12 4.2 (MP4) and RFC 8794 4 (Matroska).
"""

import re
import struct
from typing import BinaryIO

JPEG = b"\xff\xd8\xff"
PNG = b"\x89PNG\r\n\x1a\n"
RIFF = b"RIFF"
GIF = b"GIF87a", b"GIF89a"
BMP = b"BM"
TIFF = b"II*\0", b"MM\0*"
BIG_TIFF = b"II+\0", b"MM\0+"


def ends_early(data: bytes) -> bool:
    """Return whether `data` is an image file whose end is missing; False for data that is no image."""
    magics = (JPEG, PNG, RIFF, *GIF, BMP, *TIFF, *BIG_TIFF)
    if any(len(data) < len(magic) and magic.startswith(data) for magic in magics):
        return True
    try:
        if data.startswith(JPEG):
            return jpeg_ends_early(data)
        if data.startswith(PNG):
            return png_ends_early(data)
        if data.startswith(RIFF):
            return len(data) < 12 or (data[8:12] == b"WEBP" and len(data) < 8 + read_number("<I", data, 4))
        if data.startswith(GIF):
            return gif_ends_early(data)
        if data.startswith(BMP):
            return len(data) < max(read_number("<I", data, 2), bmp_needs(data))
        if data.startswith((*TIFF, *BIG_TIFF)):
            return len(data) < tiff_needs(data)
    except (IndexError, struct.error):  # the structure continues after the last byte
        return True
    return False


def read_number(form: str, data: bytes, at: int) -> int:
    return struct.unpack_from(form, data, at)[0]


JPEG_SEGMENT = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)
"""A marker that begins a segment of a JPEG, or ends it (D9): no fill byte, byte of data, or restart."""
MOST_SEGMENTS = 100_000
"""No JPEG has so many segments; one that does is not read to its end."""
SHORT_BLOCK = 32
"""A GIF whose blocks have fewer bytes than this on average is not read to its end; most blocks have 255."""


def jpeg_ends_early(data: bytes) -> bool:
    """Return whether a JPEG lacks its end-of-image marker. Markers inside its segments, where thumbnails may be
    embedded, do not count."""
    at = 2
    for _ in range(MOST_SEGMENTS):
        found = JPEG_SEGMENT.search(data, at)
        if found is None:
            return True
        if found[1] == b"\xd9":
            return False
        at = found.end() + read_number(">H", data, found.end())
    return False  # broken, not truncated


def png_ends_early(data: bytes) -> bool:
    """Return whether the file ends before its IEND chunk; False if it has something that is no chunk."""
    at = len(PNG)
    while True:
        length, kind = struct.unpack_from(">I4s", data, at)
        if not kind.isalpha():  # not a chunk: the file is broken, not truncated
            return False
        at += 12 + length
        if at > len(data):
            return True
        if kind == b"IEND":
            return False


def gif_ends_early(data: bytes) -> bool:
    """Return False if a GIF has its trailer, has an unknown block, or has more blocks than are looked at. If it ends
    before its trailer, reading past its end raises IndexError, which `ends_early` takes for True."""

    def behind_palette(at: int, flags: int) -> int:
        return at + (3 << (flags & 7) + 1 if flags & 0x80 else 0)

    def behind_blocks(at: int) -> int:
        """Return the offset behind the data blocks that begin at `at`, and count them."""
        nonlocal blocks
        while data[at] and blocks < most:
            blocks, at = blocks + 1, at + 1 + data[at]
        return at + 1

    # a GIF with more blocks than `most` has very short ones, and is not read to its end, because that would take long
    blocks, most = 0, 4096 + len(data) // SHORT_BLOCK
    at = behind_palette(13, data[10])
    while data[at] != 0x3B and blocks < most:
        blocks += 1
        if data[at] == 0x21:
            at = behind_blocks(at + 2)
        elif data[at] == 0x2C:
            at = behind_blocks(behind_palette(at + 10, data[at + 9]) + 1)
        else:  # no known block: the file is broken, not truncated
            return False
    return False


def bmp_needs(data: bytes) -> int:
    """Return the size in bytes of an uncompressed BMP by its width, height and depth; 0 if it is compressed."""
    start, header = struct.unpack_from("<II", data, 10)
    if header < 40:
        return 0
    width, height, _, depth, compression = struct.unpack_from("<iiHHI", data, 18)
    return start + (width * depth + 31) // 32 * 4 * abs(height) if compression == 0 else 0


TIFF_TYPES = {
    1: "B", 2: "B", 3: "H", 4: "I", 5: "Q", 6: "B", 7: "B", 8: "H", 9: "I", 10: "Q", 11: "I", 12: "Q", 13: "I",
    16: "Q", 17: "Q", 18: "Q",
}  # fmt: skip
"""For each TIFF field type, the format character of Python's struct module."""
PIECES = {273: 279, 324: 325}
"""{TIFF tag of the offsets of image data (strips or tiles): tag of their sizes in bytes}."""


def tiff_needs(data: bytes) -> int:
    """Return the smallest size in bytes of a TIFF file: the end of the last data to which the directory of its first
    image refers."""
    order, is_big = "<" if data.startswith(b"II") else ">", data.startswith(BIG_TIFF)
    # formats of an offset and of the number of entries; bytes of an entry, and of the values that fit into it
    offset, count, width, inline = ("Q", "Q", 20, 8) if is_big else ("I", "H", 12, 4)
    at = read_number(order + offset, data, 8 if is_big else 4)
    first_entry = at + struct.calcsize(order + count)
    needs = first_entry + read_number(order + count, data, at) * width
    offsets_and_sizes: dict[int, tuple[str, int]] = {}
    for entry in range(first_entry, needs, width):
        tag, kind, length = struct.unpack_from(order + "HH" + offset, data, entry)
        place, size = entry + width - inline, length * struct.calcsize(TIFF_TYPES.get(kind, ""))
        if size > inline:
            place = read_number(order + offset, data, place)
        needs = max(needs, place + size)
        if tag in (*PIECES, *PIECES.values()):
            offsets_and_sizes[tag] = f"{order}{length}{TIFF_TYPES.get(kind, 'I')}", place
    if needs > len(data):
        return needs
    # PIECES: tags with the offsets of the strips or tiles of the image, and with their sizes in bytes
    for begin, size in PIECES.items():
        if begin in offsets_and_sizes and size in offsets_and_sizes:
            starts, sizes = (
                struct.unpack_from(form, data, place)
                for form, place in (offsets_and_sizes[begin], offsets_and_sizes[size])
            )
            needs = max(needs, *(a + b for a, b in zip(starts, sizes, strict=False)), 0)
    return needs


BOXES = (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
"""Types of the boxes with which MP4 and QuickTime files begin."""
EBML = b"\x1a\x45\xdf\xa3"


def video_ends_early(file: BinaryIO, form: str, size: int) -> bool:
    """Return whether the end of a video file is missing, judged by the sizes that its parts claim; False for a file of
    another format. `form` is PyAV's name of the format: mov, matroska or avi."""
    head = read_at(file, 0, 64)
    try:
        if form == "mov":
            return head[4:8] in BOXES and mov_needs(file, size) > size
        if form == "avi":
            return head.startswith(RIFF) and 8 + read_number("<I", head, 4) > size
        return head.startswith(EBML) and matroska_needs(head) > size
    except (IndexError, struct.error):
        return True


def read_at(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def mov_needs(file: BinaryIO, size: int) -> int:
    """Return the number of bytes that an MP4 file of `size` bytes must have: the end of its last box or, if it lacks
    the box `moov`, which lists the frames, more than it has."""
    at, lists_frames = 0, False
    while at + 8 <= size:
        head = read_at(file, at, 16)
        length = read_number(">I", head, 0)
        length = read_number(">Q", head, 8) if length == 1 else length
        lists_frames |= head[4:8] == b"moov"
        if length < 8:
            break
        at += length
    return at if lists_frames else size + 1


def matroska_needs(head: bytes) -> int:
    """Return the bytes that a Matroska file must have; 0 if the size of its segment, which holds the video, is
    unknown."""
    length, at = vint(head, len(EBML))  # the number there, and the place behind it: the header's length
    at += length + len(EBML)  # the segment has an id of four bytes, too
    length, begin = vint(head, at)
    unknown = length == (1 << 7 * (begin - at)) - 1  # all bits are set
    return 0 if unknown else begin + length


def vint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at offset `at` of an EBML file, and the offset after it."""
    width = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return value, at + width
