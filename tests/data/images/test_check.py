"""What is wrong with a picture file is told by its kind, wherever the file was cut."""

import contextlib
import errno
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from llava_fsdp.config import AspectRatio, Pixels
from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.containers.location import ImageLocation, Page
from llava_fsdp.data.images import check as examining
from llava_fsdp.data.images.broken_images import ends_early, video_ends_early
from llava_fsdp.data.images.check import ImageInContainer, check_links, examine, open_checked
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, read_preprocessor
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import Record
from llava_fsdp.runtime.errors import ImageError

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 12, 3), dtype=np.uint8)).resize((90, 70))
FILES = {
    "jpeg": ("JPEG", {"quality": 90}),
    "progressive jpeg": ("JPEG", {"progressive": True}),
    "jpeg with restarts": ("JPEG", {"restart_marker_blocks": 2}),
    "jpeg with a thumbnail in its head": ("JPEG", {"comment": b"\xff\xd8\xff\xd9"}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {}),
    "lossless webp": ("WEBP", {"lossless": True}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "big tiff": ("TIFF", {"big_tiff": True}),
    "tiff with lzw": ("TIFF", {"compression": "tiff_lzw"}),
    "tiff with jpeg": ("TIFF", {"compression": "jpeg"}),
    "tiff with packbits": ("TIFF", {"compression": "packbits"}),
}


def encoded(name: str) -> bytes:
    kind, options = FILES[name]
    file = io.BytesIO()
    PICTURE.save(file, kind, **options)
    return file.getvalue()


def decode(path: Path) -> bytes:
    with open_checked(path, "x") as picture:
        return picture.convert("RGB").tobytes()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of directories that were cut
@pytest.mark.parametrize("name", FILES)
def test_cut_anywhere(name: str, tmp_path: Path) -> None:
    """A file that was cut is empty, or truncated, or lacks nothing but its end mark and gives every pixel."""
    data, path = encoded(name), tmp_path / "a.bin"
    path.write_bytes(data)
    assert not ends_early(data) and examine(path, "x", full=True).size == (90, 70)
    whole = decode(path)
    points = {*range(0, len(data), max(1, len(data) // 60)), *range(1, 12), *range(len(data) - 12, len(data))}
    for length in sorted(points):
        path.write_bytes(data[:length])
        assert ends_early(data[:length])
        kind = "image_truncated" if length else "image_empty"
        examined, decoded = (outcome(f) for f in (lambda: examine(path, "x", full=True), lambda: decode(path)))
        if length >= len(data) - 24 and decoded == whole:
            assert examined.size == (90, 70)
        else:
            assert (examined, decoded) == (kind, kind), length


def outcome(look: Callable[[], object]) -> object:
    """What it gives, or the kind of what is wrong."""
    try:
        return look()
    except ImageError as error:
        return error.kind


def test_zeros_in_place_of_the_end(tmp_path: Path) -> None:
    """What a copy that broke off leaves of a file whose size was set first; a JPEG decoder makes grey of it."""
    data, path = encoded("jpeg"), tmp_path / "a.jpg"
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    with pytest.raises(ImageError, match=r"truncated.*zeros only") as caught:
        examine(path, "x", full=True)
    assert caught.value.kind == "image_truncated"
    path.write_bytes(data + bytes(100))
    assert examine(path, "x", full=True).size == (90, 70)


def planted(folder: Path) -> dict[str, tuple[bytes | None, str]]:
    png = bytearray(encoded("png"))
    png[len(png) // 2] ^= 0xFF
    thick = io.BytesIO()
    Image.new("1", (9000, 9000)).save(thick, "PNG")
    huge = io.BytesIO()
    Image.new("1", (20000, 10000)).save(huge, "PNG")
    values = io.BytesIO()
    Image.fromarray(np.full((8, 8), -1, dtype=np.float32)).save(values, "TIFF")
    return {
        "missing.png": (None, "image_missing"),
        "file/below.png": (None, "image_missing"),
        "empty.png": (b"", "image_empty"),
        "page.jpg": (b"<html>not found</html>", "image_unreadable"),
        "sound.webp": (b"RIFF\x10\0\0\0WAVEfmt " + bytes(8), "image_unreadable"),
        "vector.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image_unreadable"),
        "flipped.png": (bytes(png), "image_unreadable"),
        "bomb.png": (thick.getvalue(), "image_bomb"),
        "huge.png": (huge.getvalue(), "image_bomb"),
        "negative.tiff": (values.getvalue(), "image_unreadable"),
    }


PLANTED = [*planted(Path())]


@pytest.mark.parametrize("name", PLANTED)
def test_kinds(name: str, tmp_path: Path) -> None:
    content, kind = planted(tmp_path)[name]
    (tmp_path / "file").write_bytes(b"x")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError) as caught:
        examine(tmp_path / name, "a.json, record 5 (id q)", full=True)
    assert caught.value.kind == kind and str(caught.value).startswith("a.json, record 5 (id q): ")
    assert name in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.kind, str(again)) == (kind, str(caught.value))


@pytest.mark.parametrize("full", [True, False])
def test_what_is_no_regular_file_is_refused_at_once(full: bool, tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for without end."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "folder.png", "/dev/zero"):
        with pytest.raises(ImageError, match="not a regular file") as caught:
            examine(tmp_path / name, "x", full)
        assert caught.value.kind == "image_unreadable"


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tiff", "gif", "bmp"])
def test_size_as_shown(ending: str, full: bool, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    path = tmp_path / f"a.{ending}"
    PICTURE.save(path, **({} if ending in ("gif", "bmp") else {"exif": exif}))
    assert examine(path, "x", full).size == ((90, 70) if ending in ("gif", "bmp") else (70, 90))


def test_head_alone_finds_what_is_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    data = encoded("jpeg")
    path.write_bytes(data[: len(data) // 2])
    assert examine(path, "x", full=False).size == (90, 70)
    for content, kind in ((b"", "image_empty"), (b"hello there", "image_unreadable"), (data[:50], "image_truncated")):
        path.write_bytes(content)
        with pytest.raises(ImageError) as caught:
            examine(path, "x", full=False)
        assert caught.value.kind == kind


@pytest.mark.parametrize(("failures", "code"), [(2, errno.EIO), (2, errno.ESTALE), (9, errno.EIO), (1, errno.EACCES)])
def test_a_file_system_that_is_away_for_a_moment(
    failures: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read again a few times; what stays is reported, and what waiting cannot mend at once."""
    path = tmp_path / "a.png"
    path.write_bytes(encoded("png"))
    tries: list[int] = []
    real = examining.open_regular

    def fail(asked: Path) -> object:
        tries.append(1)
        if len(tries) <= failures:
            raise OSError(code, os.strerror(code))
        return real(asked)

    monkeypatch.setattr(examining, "open_regular", fail)
    monkeypatch.setattr(examining, "WAITS", (0, 0, 0))
    if failures == 2:
        assert len(examining.read_file(path, "x")) == path.stat().st_size
        assert len(tries) == 3
        return
    with pytest.raises(ImageError, match=r"cannot be read: .*(Input/output|Permission)") as caught:
        examining.read_file(path, "x")
    assert caught.value.kind == "image_unreadable" and len(tries) == (4 if code == errno.EIO else 1)


def test_messages_are_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No address of an object, no number of an error; a bomb's size is said."""
    path = tmp_path / "a.png"
    path.write_bytes(encoded("png"))

    def fail(*_: object) -> object:
        raise OSError(f"cannot load {io.BytesIO()!r}")

    with monkeypatch.context() as patch, pytest.raises(ImageError, match="cannot load the file; take it from its"):
        patch.setattr(examining, "open_bytes", fail)
        examine(path, "x", full=True)
    huge = io.BytesIO()
    Image.new("1", (20000, 10000)).save(huge, "PNG")
    path.write_bytes(huge.getvalue())
    with pytest.raises(ImageError, match="has 200000000 pixels, over the limit of 50000000; make it smaller"):
        examine(path, "x", full=True)
    with pytest.raises(ImageError, match=r"cannot be read: it is a folder, not a regular file; put an image there"):
        examine(tmp_path, "x", full=True)


def test_a_link_leads_within_the_folder_or_is_refused(tmp_path: Path) -> None:
    """A folder whose name only begins like it is another one; below `/` is everything."""
    images, other = tmp_path / "images", tmp_path / "images_private"
    for folder in (images / "inner", other):
        folder.mkdir(parents=True)
    for number, (target, inside) in enumerate(
        [(images / "inner" / "a.png", True), (images, True), (other / "a.png", False), (other, False),
         (tmp_path, False), (tmp_path / "image", False)]
    ):  # fmt: skip
        link = images / f"{number}.png"
        link.symlink_to(target)
        with contextlib.nullcontext() if inside else pytest.raises(ImageError, match=r"outside data\.images"):
            check_links(link, "x", str(images), False)
        check_links(link, "x", str(images), True)
        check_links(link, "x", "/", False)


def test_too_narrow_for_a_tower(parts: Path, tmp_path: Path) -> None:
    Image.new("L", (1, 65000)).save(tmp_path / "thin.png")
    own = read_preprocessor(parts / "vision")
    reader = ImageReader(tmp_path, own, ImageTokens(AspectRatio.pad, own.size, 4), Pixels.exact)
    record = Record("a.json", 3, "q", ("thin.png",), (), True)
    with pytest.raises(ImageError, match=r"record 3 \(id q\): .*thin\.png is 1 x 65000") as caught:
        reader.tiles(record, "thin.png")
    assert caught.value.kind == "image_shape"
    PICTURE.save(tmp_path / "a.png")
    assert reader.tiles(record, "a.png").shape[0] == 1


def cut_points(data: bytes) -> range:
    return range(1, len(data), 1 + len(data) // 97)


def test_rare_parts_of_files_are_no_end() -> None:
    """Fill bytes, extensions, headers of other versions; and what follows no format is broken, not truncated."""
    jpeg = encoded("jpeg")
    table = jpeg.index(b"\xff\xdb")
    filled = jpeg[:table] + b"\xff\xff" + jpeg[table:]
    file = io.BytesIO()
    PICTURE.save(file, "GIF", comment=b"a;b" * 99, save_all=True, append_images=[PICTURE.rotate(90)], loop=3)
    animated = file.getvalue()
    for data in (filled, animated):
        assert not ends_early(data)
        assert all(ends_early(data[:end]) for end in cut_points(data))
    broken = {
        "chunk": encoded("png")[:8] + b"\0\0\0\4\0\0\0\0" + bytes(30), "block": animated[:-1] + b"\x77" + bytes(9),
        "other riff": b"RIFF\xff\0\0\0WAVE", "text": b"hello",
    }  # fmt: skip
    assert not any(map(ends_early, broken.values()))
    old = b"BM" + struct.pack("<IHHIIHHHH", 40, 0, 0, 26, 12, 3, 3, 1, 24) + bytes(14)
    assert (len(old), ends_early(old), ends_early(old[:-1])) == (40, False, True)
    bmp = encoded("bmp")
    assert not ends_early(bmp[:2] + bytes(4) + bmp[6:]) and ends_early(bmp[:2] + bytes(4) + bmp[6:-1])


def box(kind: bytes, size: int, long: bool = False) -> bytes:
    head = struct.pack(">I4sQ", 1, kind, size) if long else struct.pack(">I4s", size, kind)
    return head + bytes(size - len(head))


EBML = b"\x1a\x45\xdf\xa3\x84" + bytes(4) + b"\x18\x53\x80\x67"
VIDEOS = {
    "boxes": ("mov", box(b"ftyp", 20) + box(b"moov", 40) + box(b"mdat", 99)),
    "long boxes": ("mov", box(b"ftyp", 20) + box(b"mdat", 99, long=True) + box(b"moov", 40)),
    "avi": ("avi", b"RIFF" + struct.pack("<I", 40) + bytes(40)),
    "matroska": ("matroska", EBML + b"\x40\x64" + bytes(100)),
    "wide matroska": ("matroska", EBML + b"\x01" + (100).to_bytes(7, "big") + bytes(100)),
}


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_that_end_early(name: str) -> None:
    form, data = VIDEOS[name]
    assert not video_ends_early(io.BytesIO(data), form, len(data))
    assert not video_ends_early(io.BytesIO(data + bytes(5)), form, len(data) + 5)
    assert video_ends_early(io.BytesIO(data[:-1]), form, len(data) - 1)


def test_videos_whose_end_is_unknown() -> None:
    """A segment without a size, as a stream has it; a box without one lasts to the end; files of other formats."""
    for size in (b"\xff", b"\x01" + b"\xff" * 7):
        assert not video_ends_early(io.BytesIO(EBML + size), "matroska", len(EBML) + len(size))
    last = box(b"ftyp", 20) + box(b"moov", 40) + struct.pack(">I4s", 0, b"mdat") + bytes(30)
    assert not video_ends_early(io.BytesIO(last), "mov", len(last))
    lacking = box(b"ftyp", 20) + box(b"mdat", 99)
    assert video_ends_early(io.BytesIO(lacking), "mov", len(lacking)), "without moov no frame is found"
    for form in ("mov", "avi", "matroska"):
        assert not video_ends_early(io.BytesIO(b"hello there, no video"), form, 21)


def test_files_of_too_many_bytes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files, and as part of a file; the head of one in a page is its page."""
    data = encoded("png")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    container = ImageInContainer(ImageLocation(str(path), 0, len(data)), DataFiles())
    monkeypatch.setattr(examining, "MAX_BYTES", len(data))
    assert examining.read_file(path, "x") == examining.read_file(container, "x") == data
    monkeypatch.setattr(examining, "MAX_BYTES", len(data) - 1)
    for image in (path, container):
        with pytest.raises(ImageError) as caught:
            examining.read_file(image, "x")
        assert caught.value.kind == "image_bomb"
    monkeypatch.setattr(examining, "HEAD_BYTES", 50)
    paged = ImageLocation("a", 7, 99, Page(0, 10, "ZSTD", 200))
    assert examining.head_of(paged) == paged
    assert [examining.head_of(ImageLocation("a", 0, size)).size for size in (49, 51, None)] == [49, 50, 50]


@pytest.mark.parametrize(("orientation", "is_turned"), [(n, n > 4) for n in range(1, 9)])
def test_which_orientations_turn(orientation: int, is_turned: bool, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    PICTURE.save(tmp_path / "a.jpg", exif=exif)
    facts = examine(tmp_path / "a.jpg", "x", full=False)
    assert (facts.size, facts.stored_height, facts.digest) == ((70, 90) if is_turned else (90, 70), 70, 0)


def test_an_image_in_a_container_keeps_the_kind_of_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too large is not read at all; one without bytes is empty."""
    read: list[ImageLocation] = []

    def missing(location: ImageLocation) -> bytes:
        read.append(location)
        raise ImageError("gone", Kind.image_missing)

    files: Any = SimpleNamespace(read=missing)
    monkeypatch.setattr(examining, "MAX_BYTES", 9)
    for size, kind in ((10, Kind.image_bomb), (9, Kind.image_missing), (None, Kind.image_missing)):
        image = examining.ImageInContainer(ImageLocation("a.tar", 0, size), files)
        with pytest.raises(ImageError) as caught:
            examining.read_file(image, "record 5")
        assert caught.value.kind == kind and "record 5" in str(caught.value)
    assert [location.size for location in read] == [9, None]
    files.read = lambda location: b""
    with pytest.raises(ImageError) as caught:
        examining.read_file(examining.ImageInContainer(ImageLocation("a.tar", 0, 0), files), "record 5")
    assert caught.value.kind == Kind.image_empty


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises((ImageError, ValueError)) as caught:
        examining.read_file(tmp_path / "a\0.png", "record 5")
    assert isinstance(caught.value, ImageError) and caught.value.kind == Kind.image_unreadable
