"""Refuse image files that would take Pillow far more time or memory than others of their size, before it reads them.

A file can refer to the same bytes thousands of times, or consist of thousands of tiny parts. These checks look at the
structure of a file alone: the directories of TIFF and EXIF, the segments and scans of a JPEG, the chunks of a PNG, the
blocks of a GIF, the compression of a BMP. The limits are far above what cameras and programs write. A structure that
ends early or makes no sense is left to Pillow, which reports it.

Sources: the formats' specifications (see broken_images.py), and what Pillow 12 does with each part (its
*ImagePlugin.py).
"""

import itertools
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llava_fsdp.data.images.broken_images import BIG_TIFF, BMP, GIF, JPEG, JPEG_SEGMENT, PNG, RIFF, read_number

KiB, MiB = 1 << 10, 1 << 20
EXIF = b"Exif\0\0"
SEGMENTS = 2048
"""Greatest number of segments before the first scan of a JPEG."""
TABLE_BYTES = 64 * KiB
"""Most bytes of frame headers and tables before the first scan of a JPEG. Pillow reads them in Python."""
JUNK = 64 * KiB
"""Most bytes between the segments before the first scan of a JPEG. Pillow skips them one by one."""
EXIF_SEGMENTS = 64
"""Greatest number of EXIF segments of a JPEG. Pillow joins them, each time copying what it has."""
EXIF_NAMES = 8
"""Greatest number of times that the name of EXIF stands before its content. Pillow copies the rest after each."""
SCANS = 100
"""Greatest number of scans of a JPEG. Progressive ones have about 10; libtiff has the same limit."""
FEW_SCANS = 16
SCANNED_PIXELS = 1_000_000_000
"""Most pixels times scans of a JPEG with more than FEW_SCANS scans: each scan passes over the whole image."""
CHUNKS = 200_000
"""Greatest number of chunks of a PNG."""
OTHER_CHUNKS = 2000
"""Greatest number of chunks of a PNG without image data."""
PROFILES = 4
"""Greatest number of color profiles (iCCP) of a PNG, of which each may take a megabyte; the format allows one."""
FRAMES = (b"IDAT", b"fdAT", b"fcTL")
"""Types of the PNG chunks that have image data, or begin a frame of an animation."""
RAW_EXIF = b"Raw profile type exif\0"
"""Beginning of a text in a PNG that holds EXIF in hexadecimal digits, as ImageMagick writes it."""
BLOCKS = 1 << 17
"""Greatest number of blocks before the first frame of a GIF."""
COMMENT_BYTES = MiB
"""Most bytes of comments before the first frame of a GIF. Pillow copies a comment for each block of 255 bytes."""
RUN_LENGTH = 8 * MiB
"""Most pixels, and most bytes, of a BMP with run-length encoding, which Pillow decodes in Python."""
RUN_WIDTH = 1 << 16
"""Most pixels in a row of such a BMP. One step in its code skips up to 255 rows."""
ENTRIES = 1024
"""Greatest number of entries of the directories of a TIFF or EXIF together."""
FIELD_BYTES = 64 * MiB
"""Most bytes of all fields of a TIFF or EXIF, which Pillow copies up to four times."""
VALUES = 1 << 18
"""Greatest number of numbers in all fields of a TIFF or EXIF: offsets and sizes of tiles are the most."""
FRACTIONS = 1 << 13
"""Greatest number of fractions in all fields of a TIFF or EXIF, which are Python objects in Pillow."""
TILE_PIXELS = 1 << 24
"""Most pixels of a tile of a TIFF, if the image itself is smaller."""
REPEATED = 8
"""A TIFF may have so many times the strips or tiles that cover its image."""


class TooMuchWork(Exception):
    """The message says what an image file has too much of."""


def require_at_most(count: int, limit: int, what: str) -> None:
    """Raise TooMuchWork if an image has more than `limit` of something, which `what` names in the message."""
    if count > limit:
        raise TooMuchWork(f"it has {count} {what}, over the limit of {limit}")


def check_work(data: bytes) -> None:
    """Raise TooMuchWork if an image file, or its beginning if Pillow reads no more, breaks a limit of its format."""
    try:
        if data.startswith(JPEG):
            check_jpeg(data)
        elif data.startswith(PNG):
            check_png(data)
        elif data.startswith((b"II", b"MM")):
            check_tiff(data)
        elif data.startswith(GIF):
            check_gif(data)
        elif data.startswith(BMP):
            check_bmp(data)
        elif data.startswith(RIFF) and data[8:12] == b"WEBP":
            check_webp(data)
    except (IndexError, struct.error):  # it ends early, or is broken
        pass


# ---------------------------------------------------------------------------------------------------------------- JPEG


@dataclass
class JpegHeader:
    """What the header of a JPEG says."""

    pixels: int = 0
    components: int = 0
    progressive: bool = False


HEADER_MARKER = re.compile(rb"\xff([\x02-\xc7\xc9-\xcf\xda-\xef\xfe])", re.DOTALL)
"""A marker that begins a segment for Pillow; before the first scan it skips others like bytes that are no marker."""
FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
TABLE_MARKERS = {*range(0xC0, 0xD0), *range(0xDB, 0xE0)}


def check_jpeg(data: bytes) -> None:
    """Raise TooMuchWork if decoding this JPEG would take more work than the limits allow."""
    frame, exif, tables, components, end = JpegHeader(), [], 0, 0, 0
    # at: offset of a segment's length field; size: the value of that field
    for seen, (marker, at, size) in enumerate(segments(data)):
        require_at_most(seen, SEGMENTS, "or more segments before its first scan")
        if marker == 0xC4 or marker == 0xDB:  # tables: the most frequent segments
            tables += size
        elif marker == 0xE1 and data.startswith(EXIF, at + 2):
            exif.append(data[at + 8 : at + size])
            require_at_most(len(exif), EXIF_SEGMENTS, "or more EXIF segments")
        # an index of several pictures, which has the form of EXIF data
        elif marker == 0xE2 and data.startswith(b"MPF\0", at + 2):
            check_exif(data[at + 6 : at + size])
        elif marker in TABLE_MARKERS:
            require_at_most(tables := tables + size, TABLE_BYTES, "or more bytes of tables before its first scan")
            if marker in FRAME_MARKERS and len(data) >= at + 8:
                height, width, components = struct.unpack_from(">HHB", data, at + 3)
                frame = JpegHeader(width * height, components, marker in (0xC2, 0xC6, 0xCA, 0xCE))
        elif marker == 0xDA:  # the first scan, and for how many components it has data
            components = int.from_bytes(data[at + 2 : at + 3], "big")
        end = at + size
    require_at_most(tables, TABLE_BYTES, "or more bytes of tables before its first scan")
    if exif:
        check_exif(b"".join(exif))
    if frame.progressive or components != frame.components:  # otherwise libjpeg reads one scan only
        check_scans(data, end, frame)


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the segments of a JPEG up to and including the header of the first scan: (marker, offset, bytes). The
    offset is that of the segment's length, which counts as two of its bytes."""
    at, junk = 2, 0
    while (found := HEADER_MARKER.search(data, at)) is not None:
        if found.start() > at:
            require_at_most(junk := junk + found.start() - at, JUNK, "or more bytes between its segments")
        at, marker = found.end(), found[1][0]
        if marker < 0xC0 or at + 2 > len(data):  # reserved marker or end of the file: nothing is decoded behind it
            return
        size = read_number(">H", data, at)
        yield marker, at, size
        if marker == 0xDA:
            return
        at += size
    require_at_most(junk + len(data) - at, JUNK, "bytes between its segments")


def check_scans(data: bytes, at: int, frame: JpegHeader) -> None:
    """Raise TooMuchWork if a JPEG has too many scans. `at`: offset of the data of the first one."""
    allowed = min(SCANS, max(FEW_SCANS, SCANNED_PIXELS // max(frame.pixels, 1)))
    if data.count(b"\xff\xda", at) < allowed:  # each scan has this marker, so there cannot be too many
        return
    scans = 1
    for seen in itertools.count():
        require_at_most(seen, SEGMENTS, "or more segments behind its first scan")
        found = JPEG_SEGMENT.search(data, at)
        if found is None or found[1] == b"\xd9":
            return
        scans += found[1] == b"\xda"
        require_at_most(scans, allowed, f"or more scans of {frame.pixels} pixels")
        at = found.end() + read_number(">H", data, found.end())


# ----------------------------------------------------------------------------------------------------------------- PNG


def check_png(data: bytes) -> None:
    """Raise TooMuchWork if a PNG has too many chunks or color profiles, or too much EXIF data."""
    at, others, profiles = len(PNG), 0, 0
    for chunks in itertools.count():
        require_at_most(chunks, CHUNKS, "or more chunks")
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return
        if kind not in FRAMES:
            require_at_most(others := others + 1, OTHER_CHUNKS, "or more chunks without image data")
            is_raw_exif = kind in (b"tEXt", b"zTXt", b"iTXt") and data.startswith(RAW_EXIF, at + 8)
            if kind == b"iCCP" or is_raw_exif:
                require_at_most(profiles := profiles + 1, PROFILES, "or more color profiles")
            if is_raw_exif:
                check_exif(hexadecimal(kind, data[at + 8 + len(RAW_EXIF) : at + 8 + length]))
            elif kind == b"eXIf":
                check_exif(data[at + 8 : at + 8 + length])
        at += 12 + length


def hexadecimal(kind: bytes, content: bytes) -> bytes:
    """Return the bytes that a PNG's text chunk (tEXt, zTXt or iTXt) holds behind its keyword, in hexadecimal digits
    after three lines; empty if it is broken."""
    try:
        is_compressed = kind == b"zTXt" or (kind == b"iTXt" and content[0] != 0)
        if kind == b"iTXt":
            content = content[2:].split(b"\0", 2)[2]  # behind the language and the translated keyword
        elif is_compressed:
            content = content[1:]  # behind the number of the compression method
        text = zlib.decompressobj().decompress(content, MiB) if is_compressed else content
        return bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("ascii"))
    except (ValueError, IndexError, zlib.error):
        return b""


# ------------------------------------------------------------------------------------------------------ GIF, BMP, WebP


def check_gif(data: bytes) -> None:
    """Raise TooMuchWork if a GIF has too many blocks or bytes of comments before its first frame."""
    # 13 bytes of header, and a palette if bit 0x80 is set; 0x2C begins a frame, 0x3B ends the file, 0x21 0xFE begins a
    # comment, 0x21 another extension, of sub-blocks that begin with their size
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    blocks = comments = 0
    while data[at] != 0x2C and data[at] != 0x3B:
        is_extension, is_comment = data[at] == 0x21, data[at + 1] == 0xFE
        require_at_most(blocks := blocks + 1, BLOCKS, "or more blocks before its first frame")
        at += 2 if is_extension else 1
        while is_extension and data[at]:
            require_at_most(blocks := blocks + 1, BLOCKS, "or more blocks before its first frame")
            require_at_most(comments := comments + is_comment * data[at], COMMENT_BYTES, "or more bytes of comments")
            at += 1 + data[at]
        at += is_extension


def check_bmp(data: bytes) -> None:
    """Raise TooMuchWork if a BMP with run-length encoding has too many pixels or bytes."""
    # only headers of 40 bytes or more have a compression method: 1 and 2 are run-length encodings
    if read_number("<I", data, 14) < 40 or read_number("<I", data, 30) not in (1, 2):
        return
    width, height = struct.unpack_from("<ii", data, 18)
    require_at_most(abs(width), RUN_WIDTH, "pixels in a row with run-length encoding")
    require_at_most(abs(width * height), RUN_LENGTH, "pixels with run-length encoding")
    require_at_most(len(data), RUN_LENGTH, "bytes with run-length encoding")


def check_webp(data: bytes) -> None:
    """Raise TooMuchWork if a WebP has too many chunks or too much EXIF data."""
    at = 12
    for chunks in itertools.count():
        require_at_most(chunks, CHUNKS, "or more chunks")
        length = read_number("<I", data, at + 4)
        if data.startswith(b"EXIF", at):
            check_exif(data[at + 8 : at + 8 + length])
        at += 8 + length + length % 2


# -------------------------------------------------------------------------------------------------------- TIFF and EXIF

SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""{type of a TIFF field: bytes of a value}."""
OPAQUE = (1, 2, 7)
"""Types of TIFF fields that Pillow keeps as bytes or text."""
FRACTION = (5, 10)
WHOLE = {3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
"""{type of TIFF fields of whole numbers without sign: its character for `struct`}."""
DIRECTORIES = (34665, 34853, 40965)
"""Tags whose value is the offset of another directory that Pillow reads: EXIF, GPS and interoperability."""
WIDTH, LENGTH, PLANAR, SAMPLES, ROWS, TILE_WIDTH, TILE_LENGTH = 256, 257, 284, 277, 278, 322, 323
OFFSETS = (273, 324)


class Field(NamedTuple):
    """An entry of a directory of a TIFF file."""

    tag: int
    kind: int
    """Type of its values."""
    count: int
    place: int
    """Offset of its values in the file."""


def check_exif(data: bytes) -> None:
    """Raise TooMuchWork if EXIF data, which may begin with the name `Exif`, has too much in its directories."""
    begin = 0
    while data.startswith(EXIF, begin):
        begin += len(EXIF)
    require_at_most(begin // len(EXIF), EXIF_NAMES, "names of EXIF before its content")
    try:
        check_tiff(data[begin:])
    except (IndexError, struct.error):  # it ends early
        pass


def check_tiff(data: bytes) -> None:
    """Raise TooMuchWork if the directories that Pillow reads, of a TIFF file or EXIF data, have too much in them."""
    order, total = "<" if data.startswith(b"II") else ">", Total()
    for is_big in {data[2] == 43, data.startswith(BIG_TIFF)}:  # as Pillow and as libtiff decide
        # offsets of the directories to read, and of those that were read
        places, places_read = [read_number(order + ("Q" if is_big else "I"), data, 8 if is_big else 4)], set()
        while places:
            place = places.pop()
            if place not in places_read:
                places_read.add(place)
                first_values = check_directory(data, fields(data, order, is_big, place), order, total)
                places += [first_values[tag] for tag in DIRECTORIES if tag in first_values]


@dataclass
class Total:
    """What the directories of a TIFF file hold together."""

    entries: int = 0
    size: int = 0
    """Bytes of all fields; bytes to which two fields refer count twice."""
    values: int = 0
    fractions: int = 0


def check_directory(data: bytes, entries: Iterable[Field], order: str, total: Total) -> dict[int, int]:
    """Raise TooMuchWork if a directory of a TIFF file, added to what other directories hold, has too much in it.

    Args:
        order: byte order, as for `struct`.
        total: what the directories of the file before this one hold. This one is added to it.

    Returns:
        {tag of a field with whole numbers: its first number}.
    """
    first_values: dict[int, int] = {}
    offset_counts: dict[int, int] = dict.fromkeys(OFFSETS, 0)
    # fields may refer to the same bytes: even a small file could name many gigabytes of values
    most_bytes = min(FIELD_BYTES, 2 * len(data) + KiB)
    for tag, kind, count, place in entries:
        width = SIZES.get(kind, 0)
        total.entries += 1
        total.size += max(0, min(count * width, len(data) - place))
        if kind in FRACTION:
            total.fractions += count
            require_at_most(total.fractions, FRACTIONS, "or more fractions in its fields")
        # OPAQUE: Pillow keeps these values as bytes or text, so they become no numbers in Python
        elif width and kind not in OPAQUE:
            total.values += count
            require_at_most(total.values, VALUES, "or more numbers in its fields")
        if total.entries > ENTRIES or total.size > most_bytes:
            require_at_most(total.entries, ENTRIES, "or more fields")
            require_at_most(total.size, most_bytes, "or more bytes in its fields")
        if kind in WHOLE and count and place + width <= len(data):
            first_values[tag] = read_number(order + WHOLE[kind], data, place)
        if tag in offset_counts:
            offset_counts[tag] = max(offset_counts[tag], count)
    check_tiles(first_values, offset_counts)
    return first_values


def fields(data: bytes, order: str, is_big: bool, place: int) -> Iterator[Field]:
    """Yield the entries of a TIFF directory at the offset `place`. An entry has its values in itself or, if they do not
    fit, their offset (`is_far`). `order`: byte order, as for `struct`; a BigTIFF (`is_big`) has offsets of 8 bytes."""
    form = order + ("HHQ" if is_big else "HHI")
    inline, width = (8, 20) if is_big else (4, 12)
    count = read_number(order + ("Q" if is_big else "H"), data, place)
    first = place + (8 if is_big else 2)
    for at in range(first, min(first + count * width, len(data) - width + 1), width):
        tag, kind, length = struct.unpack_from(form, data, at)
        inside = at + width - inline
        is_far = length * SIZES.get(kind, 0) > inline
        yield Field(
            tag, kind, length, read_number(order + ("Q" if is_big else "I"), data, inside) if is_far else inside
        )


def check_tiles(first_values: dict[int, int], offset_counts: dict[int, int]) -> None:
    """Raise TooMuchWork if a TIFF's strips or tiles are too large, or too many for its size. `first_values`: {tag of a
    field: its first number}. `offset_counts`: {tag of OFFSETS: number of offsets}, of strips and of tiles."""
    width, height = first_values.get(WIDTH, 0), first_values.get(LENGTH, 0)
    tile_width, tile_height = first_values.get(TILE_WIDTH, width), first_values.get(TILE_LENGTH, height)
    require_at_most(tile_width * tile_height, max(TILE_PIXELS, 2 * width * height), "pixels in a tile")
    # with 2, each color channel has strips or tiles of its own
    layers = max(first_values.get(SAMPLES, 1), 1) if first_values.get(PLANAR) == 2 else 1
    for tag, (across, down) in zip(
        OFFSETS, ((width, first_values.get(ROWS, height)), (tile_width, tile_height)), strict=True
    ):
        if min(across, down) > 0:
            needed = -(-width // across) * -(-height // down) * layers
            require_at_most(offset_counts[tag], REPEATED * needed, "strips or tiles")
