"""Picture files: read, opened, and what is wrong with one.

`PictureError.kind` is one of image_missing, image_empty, image_truncated, image_unreadable, image_bomb, image_shape.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image
from xxhash import xxh3_64_intdigest

from llava_fsdp.config import Examine
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.truncation import JPEG, ends_early
from llava_fsdp.data.records.problems import Kind
from llava_fsdp.data.records.record import CURES
from llava_fsdp.runtime.errors import PictureError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # no decoder that starts another program
MAX_PIXELS = 50_000_000
MAX_BYTES = 16 * MAX_PIXELS  # four values of four bytes each
# What a network file system says when its server is away for a moment.
TRANSIENT = frozenset({
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN, errno.EREMOTEIO,
})  # fmt: skip
WAITS = (0.1, 0.5, 2.0)
"""Seconds before each new try to read a file."""
# What Pillow raises of files that are broken; never AssertionError or MemoryError, which are not the file's fault.
BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, OverflowError, struct.error, zlib.error,
    Image.DecompressionBombError,
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """What looking at a file found."""

    width: int
    """As shown: its EXIF orientation heeded."""
    height: int
    stored_height: int
    """As the original reads it."""
    digest: int = 0
    """xxh3 of the file's bytes; 0: they were not all read."""

    @property
    def size(self) -> Size:
        return self.width, self.height


def examine(path: Path, where: str, full: bool, scaled: bool = True) -> Picture:
    """A picture that can be read.

    Args:
        full: decode all of it; a JPEG at an eighth of its size, which reads every coefficient and costs a third.
            Otherwise the head alone is looked at, which finds neither cut nor broken files.
        scaled: black and white of a picture of more than 8 bits must be known.

    Raises:
        PictureError: with its `kind`; `where` names the record.
    """
    if not full:
        with contextlib.suppress(*BROKEN), open_regular(path) as file, opening(file) as picture:
            check_pixels(picture, path, where)
            return Picture(*shown_size(picture), picture.height)
    data = read_file(path, where)
    with decoded(data, path, where) as picture:
        found = Picture(*shown_size(picture), picture.height, xxh3_64_intdigest(data) if full else 0)
        if full:
            picture.draft(None, (1, 1))  # of a JPEG; others have none
            picture.load()
            if scaled:
                check_values(picture, f"{where}: {path}")
    return found


def picture_size(path: Path, where: str) -> Size:
    """(width, height) as shown; reads the file's head only, where that tells."""
    return examine(path, where, full=False).size


def shown_size(picture: Image.Image) -> Size:
    if picture.format == "TIFF":  # of these Pillow reports the size as shown
        return picture.size
    turned = picture.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (picture.height, picture.width) if turned else picture.size


@contextlib.contextmanager
def opening(file: BinaryIO | io.BytesIO) -> Iterator[Image.Image]:
    """Pillow's warnings would only say again, without naming the record, what is checked or decoded here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(file, formats=FORMATS) as picture:
            yield picture


def opened(path: Path, where: str) -> contextlib.AbstractContextManager[Image.Image]:
    """The open picture; whatever Pillow raises while it is used becomes one error."""
    return decoded(read_file(path, where), path, where)


@contextlib.contextmanager
def decoded(data: bytes, path: Path, where: str) -> Iterator[Image.Image]:
    """The same of a file's bytes."""
    try:
        # a copy that broke off may leave zeros for the rest, which are valid data to a JPEG decoder
        if data.startswith(JPEG) and data.endswith(bytes(64)) and ends_early(data):
            raise OSError("image file is truncated: its end holds zeros only")
        with opening(io.BytesIO(data)) as picture:
            check_pixels(picture, path, where)
            yield picture
    except Image.DecompressionBombError as error:
        found = re.search(r"\((\d+) pixels\)", str(error))
        raise PictureError(
            f"{where}: picture {path} has {found[1] if found else 'far more'} pixels, over the limit of {MAX_PIXELS}; "
            "make it smaller",
            Kind.image_bomb,
        ) from error
    except BROKEN as error:
        said = re.sub(r"<_io\.BytesIO object at \w+>", "the file", str(error)) or type(error).__name__
        if "truncated" in said.lower() or ends_early(data):
            raise PictureError(
                f"{where}: picture {path} is truncated after {len(data)} bytes ({said}); copy it again",
                Kind.image_truncated,
            ) from error
        reason = f"it is none of {', '.join(FORMATS)}" if isinstance(error, Image.UnidentifiedImageError) else said
        raise PictureError(
            f"{where}: picture {path} cannot be read: {reason}; take it from its source again, or convert it",
            Kind.image_unreadable,
        ) from error


def read_file(path: Path, where: str) -> bytes:
    """All of a file, tried again where the file system may only be away for a moment."""
    for wait in (*WAITS, None):
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_BYTES:
                    raise PictureError(
                        f"{where}: picture {path} has {size} bytes; most are {MAX_BYTES}: make it smaller",
                        Kind.image_bomb,
                    )
                data = file.read()
            break
        except (FileNotFoundError, NotADirectoryError) as error:
            message = f"{where}: picture {path} does not exist; is data.images right?"
            raise PictureError(message, Kind.image_missing) from error
        except (OSError, ValueError) as error:  # ValueError: a zero character in the path
            if wait is None or getattr(error, "errno", None) not in TRANSIENT:
                said = getattr(error, "strerror", None) or str(error)
                cure = CURES.get(
                    getattr(error, "errno", None) or 0, "put a picture there, or take it out of the record"
                )
                raise PictureError(
                    f"{where}: picture {path} cannot be read: {said}; {cure}", Kind.image_unreadable
                ) from error
            time.sleep(wait)
    if not data:
        raise PictureError(f"{where}: picture {path} is empty (0 bytes); copy it again", Kind.image_empty)
    return data


def open_regular(path: Path) -> BinaryIO:
    """Raises OSError where it is no regular file: reading a pipe or a device may never end."""
    try:
        file = open(path, "rb", buffering=0, opener=without_waiting)
    except IsADirectoryError:
        raise OSError("it is a folder, not a regular file") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def without_waiting(path: str, flags: int) -> int:
    """Opening a pipe that nobody writes to would wait for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_pixels(picture: Image.Image, path: Path, where: str) -> None:
    if picture.width * picture.height > MAX_PIXELS:
        size = f"{picture.width} x {picture.height}"
        raise PictureError(
            f"{where}: picture {path} has {size} pixels, over the limit of {MAX_PIXELS}; make it smaller",
            Kind.image_bomb,
        )


def check_values(picture: Image.Image, what: str) -> None:
    """Raises PictureError where black and white of a picture of more than 8 bits are not known."""
    if picture.mode == "F" or picture.mode.startswith("I"):
        white_of(picture.mode, np.asarray(picture).astype(np.float64), what)


def to_rgb(picture: Image.Image, what: str) -> Image.Image:
    """The image in RGB, transparency on white: transformers' `convert_to_rgb`, to the bit.

    Except for more than 8 bits a value, which Pillow would clip to white or black without a word: they are scaled.
    """
    if picture.mode == "F" or picture.mode.startswith("I"):
        values = np.asarray(picture).astype(np.float64)
        white = white_of(picture.mode, values, what)
        values[values == picture.info.get("transparency")] = white  # a PNG names one grey that is transparent
        return Image.fromarray((values * (255 / white)).astype(np.uint8)).convert("RGB")
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    elif picture.mode == "RGB":
        return picture
    return picture.convert("RGB")


def white_of(mode: str, values: np.ndarray, what: str) -> float:
    """The value that is white: of 16 bits 65535; of 32 and of floating point the usual one that holds all values."""
    least, most = values.min(initial=0), values.max(initial=0)
    known = (65535.0,) if mode.startswith("I;16") else (1.0, 255.0, 65535.0) if mode == "F" else (255.0, 65535.0)
    for white in known:
        if least >= 0 and most <= white:
            return white
    raise PictureError(
        f"{what} holds values from {least:g} to {most:g}, of which black and white are not known; convert it",
        Kind.image_unreadable,
    )


def look_at(folder: Path, name: str, real_folder: str, how: Examine, scaled: bool, allow_links: bool) -> Picture:
    """The picture's size, from its head, or from decoding all of it.

    Args:
        real_folder: the folder without symbolic links.

    Raises:
        PictureError: of a kind, without naming a record.
    """
    path = folder / name
    check_links(path, real_folder, allow_links)
    return examine(path, name, how is Examine.decode, scaled)


def real(folder: str) -> str:
    """The folder without symbolic links."""
    return os.path.realpath(folder)


def check_links(path: Path, real_folder: str, allow_links: bool) -> None:
    if allow_links:
        return
    target = real(str(path))
    if os.path.commonpath([target, real_folder]) != real_folder:
        raise PictureError(
            f"picture {path} is a link to {target}, outside data.images; set data.allow_links=true if that is meant, "
            "or copy it",
            Kind.path_outside,
        )
