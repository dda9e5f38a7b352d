"""Small image files that would take Pillow minutes or gigabytes are refused at once; unusual sound ones are read."""

import contextlib
import io
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llava_fsdp.data.images.broken_images import ends_early
from llava_fsdp.data.images.check import examine, open_checked
from llava_fsdp.data.images.work_limits import TooMuchWork, check_work
from llava_fsdp.data.problems import Kind
from llava_fsdp.runtime.errors import ImageError

NOISE = np.random.default_rng(0).integers(0, 255, (61, 47, 3), dtype=np.uint8)


def saved(form: str, image: Image.Image | None = None, **options: object) -> bytes:
    file = io.BytesIO()
    (image or Image.fromarray(NOISE)).save(file, form, **options)
    return file.getvalue()


def directory(entries: list[tuple[int, int, int, int]], order: str = "<", at: int = 8) -> bytes:
    """A TIFF directory: (tag, type, count, value or offset)."""
    body = b"".join(struct.pack(order + "HHII", *entry) for entry in entries)
    return struct.pack(order + "H", len(entries)) + body + bytes(4)


def tiff(entries: list[tuple[int, int, int, int]], content: bytes = b"", order: str = "<") -> bytes:
    """A TIFF whose content, at offset 8, comes before its directory."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "I", 8 + len(content)) + content + directory(entries, order)


def grey(width: int, height: int, *more: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    fields = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1)]
    return sorted([*fields, *more])


def shared(kind: int, tags: range, size: int, content: int) -> bytes:
    """An image whose many fields all refer to the same content."""
    own = grey(8, 8, (273, 4, 1, 8), (279, 4, 1, 64))
    return tiff(own + [(tag, kind, size, 8) for tag in tags], bytes(content))


def exif(block: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(block) + 8) + b"Exif\0\0" + block


def jpeg_with(head: bytes, **options: object) -> bytes:
    plain = saved("JPEG", **options)
    return plain[:2] + head + plain[2:]


def scans(count: int, side: int = 64) -> bytes:
    """A progressive JPEG that ends with the same scan many times."""
    data = saved("JPEG", Image.new("L", (side, side)), progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_with(*chunks: bytes) -> bytes:
    plain = saved("PNG")
    return plain[:33] + b"".join(chunks) + plain[33:]


def png_in_pieces(size: int) -> bytes:
    """A sound PNG whose image data is in chunks of so many bytes."""
    plain = saved("PNG")
    length = int.from_bytes(plain[33:37], "big")
    data = plain[41 : 41 + length]
    pieces = [chunk(b"IDAT", data[at : at + size]) for at in range(0, length, size)]
    return plain[:33] + b"".join(pieces) + plain[45 + length :]


def webp_with(block: bytes) -> bytes:
    return saved("WEBP", exif=b"Exif\0\0" + block)


def gif_with(blocks: bytes) -> bytes:
    plain = saved("GIF")
    at = plain.index(b",", 13 + 768)
    return plain[:at] + blocks + plain[at:]


def run_length(width: int, height: int, content: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(content), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(content), 0, 0, 54 + 1024) + head + bytes(1024) + content


BLOCK = tiff([(40000 + n, 3, 20000, 8) for n in range(1500)], bytes(40000))
"""EXIF of 58 kB whose 1,500 fields share an array of 40 kB: 50 MB once read, 0.3 GB once converted."""
COMMENT = b"!\xfe" + b"\x01a" * 900_000 + b"\0"
HOSTILE: dict[str, Callable[[], bytes]] = {
    "tiff: offsets": lambda: shared(4, range(273, 274), 450_000, 1_800_000)[:-4] + bytes(4),
    "tiff: one array for all": lambda: shared(3, range(1000, 60_000), 900_000, 1_800_000),
    "tiff: one array for few": lambda: shared(7, range(40_000, 40_400), 1_800_000, 1_800_000),
    "tiff: big-endian": lambda: tiff([(n, 7, 1_000_000, 8) for n in range(1, 900)], bytes(1_000_000), ">"),
    "tiff: fractions": lambda: shared(5, range(40_000, 40_001), 200_000, 1_600_000),
    "tiff: exif directory": lambda: (
        lambda inner: b"II*\0" + struct.pack("<I", 8 + len(inner)) + inner + directory(
            grey(8, 8, (273, 4, 1, 8), (279, 4, 1, 64), (34665, 4, 1, 8 + 100_000))
        )
    )(bytes(100_000) + directory([(n, 7, 100_000, 8) for n in range(1, 1020)])),
    "tiff: huge tile": lambda: tiff(
        grey(8, 8, (322, 4, 1, 60_000), (323, 4, 1, 8_000), (324, 4, 1, 8), (325, 4, 1, 64)), bytes(64)
    ),
    "tiff: tiles over each other": lambda: tiff(
        grey(7000, 7000, (322, 4, 1, 6992), (323, 4, 1, 7008), (324, 4, 50_000, 8), (325, 4, 50_000, 8)),
        bytes(200_000),
    ),
    "tiff: a big one": lambda: (
        b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 60_000)
        + b"".join(struct.pack("<HHQQ", n % 65535, 7, 1_000_000, 16) for n in range(60_000))
    ),
    "jpeg: exif": lambda: jpeg_with(exif(BLOCK)),
    "jpeg: exif in pieces": lambda: jpeg_with(exif(BLOCK[:30_000]) + exif(BLOCK[30_000:])),
    "jpeg: many pieces of exif": lambda: jpeg_with(exif(bytes(60_000)) * 100),
    "jpeg: names of exif": lambda: jpeg_with(exif(b"Exif\0\0" * 10_000) * 20),
    "jpeg: index of images": lambda: jpeg_with(b"\xff\xe2" + struct.pack(">H", len(BLOCK) + 6) + b"MPF\0" + BLOCK),
    "jpeg: junk": lambda: jpeg_with(b"\xff\x00" * 1_000_000),
    "jpeg: fill bytes": lambda: jpeg_with(b"\xff" * 2_000_000),
    "jpeg: end marks and junk": lambda: jpeg_with(b"\xff\xd9" + bytes(2_000_000)),
    "jpeg: segments": lambda: jpeg_with(b"\xff\xfe\0\x02" * 500_000),
    "jpeg: tables": lambda: jpeg_with((b"\xff\xdb\xff\xc5" + (b"\0" * 65) * 1007) * 50),
    "jpeg: scans": lambda: scans(600),
    "jpeg: scans of a large image": lambda: scans(60, 6000),
    "png: chunks": lambda: png_with(chunk(b"teSt", b"") * 300_000),
    "png: empty image data": lambda: png_with(chunk(b"IDAT", b"") * 300_000),
    "png: profiles": lambda: png_with(chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(900_000))) * 500),
    "png: exif": lambda: png_with(chunk(b"eXIf", BLOCK)),
    "png: names of exif": lambda: png_with(chunk(b"eXIf", b"Exif\0\0" * 200_000)),
    "png: raw exif": lambda: png_with(
        chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n 9\n" + BLOCK.hex().encode()))
    ),
    "png: raw exif in Unicode": lambda: png_with(
        chunk(b"iTXt", b"Raw profile type exif\0\0\0a\0b\0" + b"\nexif\n 9\n" + BLOCK.hex().encode())
    ),
    "webp: exif": lambda: webp_with(BLOCK),
    "gif: a comment": lambda: gif_with(COMMENT * 3),
    "gif: comments": lambda: gif_with(b"!\xfe\x01a\0" * 900_000),
    "gif: junk": lambda: gif_with(b"\0" * 2_000_000),
    "bmp: far steps": lambda: run_length(40_000_000, 1, b"\0\x02\xff\xff" * 100),
    "bmp: far steps in few rows": lambda: run_length(8_000_000, 1, b"\0\x02\xff\xff"),
    "bmp: many bytes": lambda: run_length(1000, 1000, b"\0\0" * 6_000_000),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_takes_too_much_work_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(HOSTILE[case]())
    began = time.process_time()
    with pytest.raises(ImageError, match="too much time or memory") as caught, open_checked(path, "record 7"):
        pass
    assert caught.value.kind is Kind.image_bomb and "record 7" in str(caught.value)
    with pytest.raises(ImageError) as caught:
        examine(path, "x", full=True)
    assert caught.value.kind is Kind.image_bomb
    with contextlib.suppress(ImageError):  # the size alone may need no more than the head
        examine(path, "x", full=False)
    ends_early(path.read_bytes())
    assert time.process_time() - began < 2


SOUND: dict[str, Callable[[], bytes]] = {
    "jpeg with a large profile": lambda: saved("JPEG", icc_profile=np.random.default_rng(1).bytes(10_000_000)),
    "jpeg with EXIF": lambda: jpeg_with(exif(tiff([(40000 + n, 3, 9, 8) for n in range(400)], bytes(9000)))),
    "jpeg of several images": lambda: saved("MPO", save_all=True, append_images=[Image.fromarray(NOISE[::-1])]),
    "jpeg of a hundred scans": lambda: scans(90),
    "jpeg with scan marks in comments": lambda: jpeg_with(b"\xff\xfe\x27\x12" + b"\xff\xda" * 5000, progressive=True),
    "png in bytes": lambda: png_in_pieces(1),
    "png with texts": lambda: png_with(*[chunk(b"tEXt", b"key\0value")] * 1000),
    "gif with a comment": lambda: gif_with(b"!\xfe" + (b"\xff" + b"a" * 255) * 1000 + b"\0"),
    "tiff of rows": lambda: saved("TIFF", Image.fromarray(np.zeros((40_000, 3), np.uint8)), tiffinfo={278: 1}),
    "tiff of small tiles": lambda: saved("TIFF", compression="tiff_deflate"),
    "big tiff": lambda: saved("TIFF", big_tiff=True, exif=Image.Exif()),
    "bmp with runs": lambda: run_length(200, 100, (b"\xc8\x07\0\0") * 100 + b"\0\x01"),
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND)
def test_unusual_files_are_read_as_pillow_reads_them(case: str, tmp_path: Path) -> None:
    path, data = tmp_path / "a.bin", SOUND[case]()
    path.write_bytes(data)
    with open_checked(path, "x") as ours, Image.open(io.BytesIO(data)) as theirs:
        assert ours.size == theirs.size and ours.tobytes() == theirs.tobytes()
    assert examine(path, "x", full=True).size == theirs.size


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "TIFF", "BMP", "WEBP"])
def test_damaged_files_are_never_an_error_of_ours(form: str) -> None:
    """Bytes changed and left out anywhere; only TooMuchWork is ever raised."""
    dice = np.random.default_rng(3)
    whole = saved(form, exif=BLOCK) if form in ("JPEG", "PNG", "WEBP") else saved(form)
    for _ in range(300):
        data = bytearray(whole)
        for place in dice.integers(0, min(len(data), 900), 4):
            data[place] = dice.choice((0, 1, 0x2C, 0x7F, 0xDA, 0xE1, 0xFF))
        try:
            check_work(bytes(data[: dice.integers(1, len(data))]))
        except TooMuchWork:
            continue
