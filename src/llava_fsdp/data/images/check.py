"""Open and check image files safely with Pillow, and report what is wrong with a file.

`where` and `what` name a record and an image in error messages. `ImageError.kind` is one of image_missing, image_empty,
image_truncated, image_unreadable, image_bomb, image_shape.
"""

import contextlib
import errno
import io
import os
import re
import stat
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import ExifTags, Image
from xxhash import xxh3_64_intdigest

from llava_fsdp.data.containers.data_files import DataFiles, RemoteFolder
from llava_fsdp.data.containers.file_reader import CURES
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.broken_images import JPEG, ends_early
from llava_fsdp.data.images.near_name import near_name
from llava_fsdp.data.images.work_limits import TooMuchWork, check_work
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import Record
from llava_fsdp.runtime.errors import ImageError
from llava_fsdp.runtime.files.safe_load import LFS_HEAD, LFS_POINTER
from llava_fsdp.runtime.text.terminal_text import shown_name

T = TypeVar("T")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # only decoders that start no other program
MAX_PIXELS = 50_000_000
HEAD_BYTES = 1 << 16
"""Number of bytes of an image in a Parquet file or tar that are read to find its size in pixels. If they are too few,
the whole image is read."""
MAX_BYTES = 8 * MAX_PIXELS  # a pixel has at most four values of two bytes
# Errors of a network file system whose server does not answer for a moment.
TRANSIENT = frozenset({
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN, errno.EREMOTEIO,
})  # fmt: skip
WAITS = (0.1, 0.5, 2.0)
"""Seconds to wait before each new attempt to read a file."""
# Errors that Pillow raises for broken files; AssertionError and MemoryError have causes other than the file.
BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, OverflowError, struct.error, zlib.error,
    Image.DecompressionBombError,
)  # fmt: skip


@dataclass(frozen=True)
class ImageBytes:
    """The content of an image file in memory; used instead of a path."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ImageInContainer:
    """An image inside a Parquet file or a tar, or in a remote folder; used instead of a path."""

    location: ImageLocation
    data_files: DataFiles

    def __str__(self) -> str:
        return str(self.location)


ImageFile = Path | ImageBytes | ImageInContainer


def image_in(folder: Path | RemoteFolder, name: str) -> Path | ImageInContainer:
    """Return an image in a folder of images, by its path relative to the folder."""
    if isinstance(folder, RemoteFolder):
        return ImageInContainer(folder.location(name), folder.data_files)
    return folder / name


def inline_images(record: Record) -> dict[str, ImageFile]:
    """Return the images that are embedded in a record or in its file (Parquet or tar), by their names in the record."""
    return {name: inline_image(name, content, record.data_files) for name, content in record.inline.items()}


def inline_image(name: str, content: bytes | ImageLocation, data_files: DataFiles | None) -> ImageFile:
    """Return an image that a record holds as bytes, or as their location in a container, which `data_files` reads."""
    if isinstance(content, bytes):
        return ImageBytes(name, content)
    assert data_files is not None, "set by the reader of the records"
    return ImageInContainer(content, data_files)


@dataclass(frozen=True)
class ImageFacts:
    width: int
    """Width in pixels after turning the image by its EXIF orientation; `height` likewise."""
    height: int
    stored_height: int
    """Height before turning by the EXIF orientation, which LLaVA ignores."""
    digest: int = 0
    """xxh3 checksum of the file's bytes; 0 if the file was not read completely."""
    frames: int = 0
    """Number of frames of a video; 0 for an image."""
    rate: float = 0.0
    """Frames per second of a video; 0 for an image."""

    @property
    def size(self) -> Size:
        return self.width, self.height


def examine(path: ImageFile, where: str, full: bool, scaled: bool = True) -> ImageFacts:
    """Check that an image can be read, and return its size after and its height before turning by the EXIF orientation,
    and with `full` its file's checksum.

    Args:
        where: names the record in errors.
        full: whether to decode the whole image. If false, only the beginning of the file is read if that contains the
            size; then a truncated or broken rest is not noticed.
        scaled: with `full`, also check that an image with more than 8 bits per value can be scaled to 8 bits.

    Raises:
        ImageError: the image cannot be read; its `kind` says why.
    """
    if not full:
        with contextlib.suppress(*BROKEN), open_bytes(read_head(path, where), path, where) as image:
            check_pixels(image, path, where)
            width, height = shown_size(image)
            return ImageFacts(width, height, image.height)
    data = read_file(path, where)
    with open_checked_bytes(data, path, where) as image:
        width, height = shown_size(image)
        facts = ImageFacts(width, height, image.height, xxh3_64_intdigest(data) if full else 0)
        if full:
            image.draft(None, (1, 1))  # a JPEG at an eighth of its size: a third of the time
            image.load()
            if scaled:
                check_values(image, f"{where}: {path}")
    return facts


def read_size(path: ImageFile, where: str) -> Size:
    """Return (width, height) in pixels after turning by the EXIF orientation. If the beginning of the file contains the
    size, only that is read."""
    return examine(path, where, full=False).size


def shown_size(image: Image.Image) -> Size:
    """Return (width, height) in pixels after turning by the EXIF orientation."""
    if image.format == "TIFF":  # Pillow reports the size after turning
        return image.size
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if turned else image.size


@contextlib.contextmanager
def open_bytes(data: bytes, path: ImageFile, where: str) -> Iterator[Image.Image]:
    """Context manager that opens an image from its file's bytes, or their beginning, with Pillow, whose warnings are
    turned off: the callers check for the same faults, such as too many pixels, and raise errors that name the record.
    Raises ImageError if the file would take far more time or memory than its size tells."""
    try:
        check_work(data)
    except TooMuchWork as error:
        raise ImageError(
            f"{where}: image {path} would take too much time or memory: {error}; convert it, or take it out",
            Kind.image_bomb,
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image


@contextlib.contextmanager
def open_checked_bytes(data: bytes, path: ImageFile, where: str) -> Iterator[Image.Image]:
    """Context manager that opens an image from its file's bytes. Errors of Pillow in the `with` block (BROKEN) become
    ImageErrors with a `kind`; `where` names the record in them."""
    try:
        # an interrupted copy may leave zeros at the end, which a JPEG decoder takes for data
        if data.startswith(JPEG) and data.endswith(bytes(64)) and ends_early(data):
            raise OSError("image file is truncated: its end holds zeros only")
        with open_bytes(data, path, where) as image:
            check_pixels(image, path, where)
            yield image
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\((\d+) pixels\)", str(error))
        raise ImageError(
            f"{where}: image {path} has {pixels[1] if pixels else 'far more'} pixels, over the limit of {MAX_PIXELS}; "
            "make it smaller",
            Kind.image_bomb,
        ) from error
    except BROKEN as error:
        message = re.sub(r"<_io\.BytesIO object at \w+>", "the file", str(error)) or type(error).__name__
        if "truncated" in message.lower() or ends_early(data):
            raise ImageError(
                f"{where}: image {path} is truncated after {len(data)} bytes ({message}); take it from its source "
                "again",
                Kind.image_truncated,
            ) from error
        if data.startswith(LFS_HEAD):
            raise ImageError(f"{where}: image {path} is {LFS_POINTER}", Kind.image_unreadable) from error
        reason = f"it is none of {', '.join(FORMATS)}" if isinstance(error, Image.UnidentifiedImageError) else message
        raise ImageError(
            f"{where}: image {path} cannot be read: {reason}; take it from its source again, or convert it",
            Kind.image_unreadable,
        ) from error


def open_checked(path: ImageFile, where: str) -> contextlib.AbstractContextManager[Image.Image]:
    """Context manager that reads an image file and opens it like `open_checked_bytes`."""
    return open_checked_bytes(read_file(path, where), path, where)


def read_file(path: ImageFile, where: str) -> bytes:
    """Return the bytes of an image file. After errors that a network file system may cause for a short time, try again.

    Raises:
        ImageError: the file is missing, empty, too large or unreadable; its `kind` says which.
        SourceError: the Parquet file or tar that contains the image cannot be read, or has become shorter.
    """
    if isinstance(path, ImageInContainer):
        data = read_in_container(path, where)
    else:
        data = path.data if isinstance(path, ImageBytes) else read_image_file(path, where)
    if not data:
        raise ImageError(f"{where}: image {path} is empty (0 bytes); take it from its source again", Kind.image_empty)
    return data


def read_in_container(image: ImageInContainer, where: str) -> bytes:
    """Read a whole image file in a Parquet file, a tar or a remote folder. `where` names the record in errors."""
    if (image.location.size or 0) > MAX_BYTES:
        raise ImageError(
            f"{where}: image {image} is too large; most are {MAX_BYTES} bytes: make it smaller", Kind.image_bomb
        )
    try:
        return image.data_files.read(image.location)
    except ImageError as error:
        raise ImageError(f"{where}: {error}", error.kind) from error


def read_image_file(path: Path, where: str) -> bytes:
    """Read a whole image file; raise ImageError if it has more than MAX_BYTES."""

    def read(file: BinaryIO) -> bytes:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise ImageError(
                f"{where}: image {path} has {size} bytes; most are {MAX_BYTES}: make it smaller",
                Kind.image_bomb,
            )
        return file.read()

    return with_file(path, f"{where}: image {path}", read)


def with_file(path: Path, what: str, read: Callable[[BinaryIO], T]) -> T:
    """Open a file and return the result of calling `read` with it. After errors that a network file system may cause
    for a short time, try again. Raise ImageError if the file is missing or unreadable; its `kind` says which."""
    for wait in (*WAITS, None):
        try:
            with open_regular(path) as file:
                return read(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            near = near_name(path)
            cure = "is data.images right?" if near is None else f"there is {shown_name(repr(near))}: name it exactly so"
            raise ImageError(f"{what} does not exist; {cure}", Kind.image_missing) from error
        except (OSError, ValueError) as error:  # ValueError: a zero character in the path
            if wait is None or getattr(error, "errno", None) not in TRANSIENT:
                reason = getattr(error, "strerror", None) or str(error)
                cure = CURES.get(getattr(error, "errno", None) or 0, "put an image there, or take it out of the record")
                raise ImageError(f"{what} cannot be read: {reason}; {cure}", Kind.image_unreadable) from error
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def read_head(path: ImageFile, where: str) -> bytes:
    """Read at least the beginning of an image file, in which its size in pixels mostly is."""
    if isinstance(path, ImageInContainer):
        return read_in_container(replace(path, location=head_of(path.location)), where)
    if isinstance(path, ImageBytes):
        return path.data
    with open_regular(path) as file:
        return file.read(HEAD_BYTES)


def head_of(location: ImageLocation) -> ImageLocation:
    """Return the location of the beginning of an image, from which its size in pixels is read: at most HEAD_BYTES, or
    the whole image if it is in a compressed page."""
    if location.page is not None:
        return location
    return replace(location, size=HEAD_BYTES if location.size is None else min(location.size, HEAD_BYTES))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raise OSError for a pipe or a device, because reading it might never end."""
    try:
        file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except IsADirectoryError:
        raise OSError("it is a folder, not a regular file") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def check_pixels(image: Image.Image, path: ImageFile, where: str) -> None:
    """Raise ImageError if an image has more than MAX_PIXELS."""
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(
            f"{where}: image {path} has {image.width} x {image.height} pixels, over the limit of {MAX_PIXELS}; make it "
            "smaller",
            Kind.image_bomb,
        )


def check_values(image: Image.Image, what: str) -> None:
    """Raise ImageError if an image with more than 8 bits per value cannot be scaled to 8 bits (`white_of`)."""
    if image.mode == "F" or image.mode.startswith("I"):
        white_of(image.mode, np.asarray(image).astype(np.float64), what)


def to_rgb(image: Image.Image, what: str) -> Image.Image:
    """Convert an image to RGB, white where it is transparent. The result is bit for bit that of transformers'
    `convert_to_rgb`, except that values of more than 8 bits are scaled; Pillow would silently clip them."""
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image).astype(np.float64)
        white = white_of(image.mode, values, what)
        values[values == image.info.get("transparency")] = white  # a PNG may have one transparent grey
        return Image.fromarray((values * (255 / white)).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode == "RGB":
        return image
    return image.convert("RGB")


def white_of(mode: str, values: np.ndarray, what: str) -> float:
    """Return the value of white in an image of more than 8 bits and Pillow's `mode`: 65535 with `I;16`; otherwise the
    smallest of 1.0 (floats, mode `F`, only), 255 and 65535 that no pixel exceeds. Raise ImageError if none fits."""
    least, greatest = values.min(initial=0), values.max(initial=0)
    if mode.startswith("I;16"):
        possible_whites: tuple[float, ...] = (65535.0,)
    else:
        possible_whites = (1.0, 255.0, 65535.0) if mode == "F" else (255.0, 65535.0)
    for white in possible_whites:
        if least >= 0 and greatest <= white:
            return white
    raise ImageError(
        f"{what} has values from {least:g} to {greatest:g}, whose black and white are unknown; convert it to 8 bits",
        Kind.image_unreadable,
    )


def check_links(path: Path, where: str, real_folder: str, allow_links: bool) -> None:
    """Raise ImageError if the path of an image leads out of the image folder through symbolic links. `real_folder` is
    that folder with its links resolved."""
    if allow_links:
        return
    target = os.path.realpath(path)
    if os.path.commonpath([target, real_folder]) != real_folder:
        raise ImageError(
            f"{where}: image {path} is a link to {target}, outside data.images; set data.allow_links=true if that is "
            "meant, or copy it",
            Kind.path_outside,
        )
