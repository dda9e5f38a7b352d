"""From a picture file to the square of bytes that the vision tower's normalisation takes.

The arithmetic is CLIPImageProcessor's on Pillow, as LLaVA train.py:692-718 uses it. Pictures stay bytes until they
are on the device: a quarter of the memory and of the copying, and the same numbers (`pixel_table`).
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from llava_fsdp.config import AspectRatio, Parity, PatchMerge
from llava_fsdp.data.anyres import Size, cut_tiles, feature_rows
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.source import Record
from llava_fsdp.errors import ModelError, PictureError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # no decoder that starts another program
MAX_PIXELS = 50_000_000


@dataclass(frozen=True)
class Preprocessor:
    """A tower's `preprocessor_config.json`, as far as it concerns the size and the values of pixels."""

    size: int
    """Height and width that the tower takes."""
    keep_ratio: bool
    """Resize the short side and cut the centre (CLIP), or resize both sides to the square (SigLIP)."""
    resample: Image.Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def pixel_table(self) -> np.ndarray:
        """float32 [3, 256]: the normalised value of every byte, by channel, as the processor computes it."""
        scaled = (np.arange(256, dtype=np.uint8) * (1 / 255)).astype(np.float32)
        mean, std = np.array(self.mean, dtype=np.float32), np.array(self.std, dtype=np.float32)
        return (scaled[None, :] - mean[:, None]) / std[:, None]


def preprocessor_fields(folder: Path) -> dict[str, Any]:
    """The folder's `preprocessor_config.json`, or what transformers 5 writes into `processor_config.json` instead."""
    path, within = folder / "preprocessor_config.json", folder / "processor_config.json"
    if path.is_file():
        return json.loads(path.read_text())
    return json.loads(within.read_text()).get("image_processor", {}) if within.is_file() else {}


def read_preprocessor(folder: Path) -> Preprocessor:
    """Read how a folder prepares pictures; sizes may be numbers (older files) or objects.

    Raises:
        ModelError: the folder does not say, or describes no square picture.
    """
    path = folder / "preprocessor_config.json"
    config = preprocessor_fields(folder)
    if not config:
        raise ModelError(f"{folder} has no preprocessor_config.json; copy it from the vision tower's release")
    return parse_preprocessor(config, path)


def parse_preprocessor(config: dict[str, Any], path: Path) -> Preprocessor:
    size, crop = config.get("size"), config.get("crop_size")
    edge = size if isinstance(size, int) else (size or {}).get("shortest_edge")
    keep_ratio = edge is not None
    square = crop if config.get("do_center_crop", False) and keep_ratio else size
    height = square if isinstance(square, int) else (square or {}).get("height", edge)
    width = square if isinstance(square, int) else (square or {}).get("width", edge)
    if height is None or height != width:
        raise ModelError(f"{path}: size={size} and crop_size={crop} describe no square picture")
    return Preprocessor(
        size=height,
        keep_ratio=keep_ratio,
        resample=Image.Resampling(config.get("resample", Image.Resampling.BICUBIC)),
        mean=tuple(config["image_mean"]),
        std=tuple(config["image_std"]),
    )


@dataclass(frozen=True)
class PictureReader:
    """Pictures of one dataset as tiles for one tower."""

    folder: Path | None
    """What the records' paths are relative to."""
    preprocessor: Preprocessor
    aspect: AspectRatio
    """`DataConfig.trained_aspect`"""
    pixels: Parity
    image_tokens: int
    """Features of a tile."""
    sizes: tuple[Size, ...] = ()
    """anyres: what a picture may be fitted into"""
    merge: PatchMerge = PatchMerge.flat

    @property
    def fingerprint(self) -> str:
        """Of everything that decides the values and the places of features, the pictures themselves apart."""
        return f"{self.preprocessor} {self.image_tokens} {self.sizes} {self.merge.value}"

    @property
    def in_tiles(self) -> bool:
        return self.aspect is AspectRatio.anyres

    def no_tiles(self) -> np.ndarray:
        return np.zeros((0, 3, self.preprocessor.size, self.preprocessor.size), dtype=np.uint8)

    def path(self, record: Record, name: str) -> Path:
        folder = record.folder or self.folder
        assert folder is not None, "checked when the records were opened"
        return folder / name

    def places(self, record: Record, number: int) -> np.ndarray:
        """Rows of the features of one of the record's pictures, in the order of its positions; int64 [positions].

        Raises:
            PictureError: anyres, whose number of positions depends on the picture's size, and it cannot be read.
        """
        if not self.in_tiles:
            return np.arange(self.image_tokens)
        path = self.path(record, record.images[number])
        size = picture_size(path, record.where) if record.sizes is None else record.sizes[number]
        side = math.isqrt(self.image_tokens)
        return feature_rows(size, list(self.sizes), self.preprocessor.size, side, self.merge)

    @property
    def most_positions(self) -> int:
        """Of any picture: one that fills a grid has nothing taken off."""
        if not self.in_tiles:
            return self.image_tokens
        side, tile = math.isqrt(self.image_tokens), self.preprocessor.size
        return max(len(feature_rows(size, [size], tile, side, self.merge)) for size in self.sizes)

    def tiles(self, record: Record, name: str) -> np.ndarray:
        """uint8 [tiles, 3, size, size].

        Raises:
            PictureError: as `load_image`.
        """
        return self.load(self.path(record, name), record.where)

    def load(self, path: Path, where: str) -> np.ndarray:
        """uint8 [tiles, 3, size, size] of a picture file."""
        if not self.in_tiles:
            return load_image(path, self.preprocessor, self.aspect, where, self.pixels)[None]
        picture = open_picture(path, where, self.pixels)
        size = self.preprocessor.size
        return np.stack([to_bytes(t) for t in cut_tiles(picture, size, list(self.sizes))])


def load_image(
    path: Path, preprocessor: Preprocessor, aspect: AspectRatio, where: str, pixels: Parity = Parity.exact
) -> np.ndarray:
    """The picture as one tile, uint8 [3, size, size].

    Raises:
        PictureError: the file is missing, no picture, cut short, or too large; `where` names the record.
    """
    picture = open_picture(path, where, pixels)
    check_enlarged(picture.size, preprocessor, aspect, f"{where}: {path}")
    if aspect is AspectRatio.pad:
        picture = pad_to_square(picture, tuple(int(m * 255) for m in preprocessor.mean))
    if pixels is Parity.llava_v1_5:
        picture = misread(picture, f"{where}: {path}")
    return resize(picture, preprocessor)


def open_picture(path: Path, where: str, pixels: Parity) -> Image.Image:
    """The picture in RGB, the way round that its EXIF orientation says, unless the original's pixels are wanted."""
    with opened(path, where) as picture:
        if pixels is Parity.llava_v1_5:
            return picture.convert("RGB")
        return to_rgb(ImageOps.exif_transpose(picture), f"{where}: {path}")


def picture_size(path: Path, where: str) -> Size:
    """(width, height) as shown; reads the file's head only."""
    with opened(path, where) as picture:
        return shown_size(picture)


def shown_size(picture: Image.Image) -> Size:
    """(width, height) of an open picture, turned as its EXIF orientation says."""
    if picture.format == "TIFF":  # of these Pillow reports the size as shown
        return picture.size
    turned = picture.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (picture.height, picture.width) if turned else picture.size


@contextlib.contextmanager
def opened(path: Path, where: str) -> Iterator[Image.Image]:
    """The open file; whatever Pillow raises while it is used becomes one error."""
    try:
        with Image.open(path, formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise PictureError(
                    f"{where}: {path} has {picture.width} x {picture.height} pixels, over the limit of {MAX_PIXELS}",
                    Kind.image_bomb,
                )
            yield picture
    except FileNotFoundError as error:
        raise PictureError(
            f"{where}: picture {path} does not exist; is data.images right?", Kind.image_missing
        ) from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"{where}: picture {path} cannot be read: {error}", Kind.image_bomb) from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise PictureError(f"{where}: picture {path} cannot be read: {error}", unreadable_kind(path)) from error


def unreadable_kind(path: Path) -> Kind:
    """Why a file could not be read, from the file itself: it is empty, its end is missing, or something else."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.read(16)
            file.seek(max(0, length - 1024))
            tail = file.read()
    except (OSError, ValueError):
        return Kind.image_unreadable
    if not head:
        return Kind.image_empty
    return Kind.image_truncated if is_cut_short(head, tail, length) else Kind.image_unreadable


def is_cut_short(head: bytes, tail: bytes, length: int) -> bool:
    """Whether the mark of the end is missing, or the length that the head says; TIFF has neither."""
    if head.startswith(b"\xff\xd8"):  # JPEG
        return b"\xff\xd9" not in tail
    if head.startswith(b"\x89PNG"):
        return b"IEND" not in tail
    if head.startswith(b"GIF8"):
        return not tail.rstrip(b"\0").endswith(b";")
    if head.startswith(b"RIFF"):  # WebP
        return length < 8 + int.from_bytes(head[4:8], "little")
    return head.startswith(b"BM") and length < int.from_bytes(head[2:6], "little")


def check_enlarged(shape: Size, preprocessor: Preprocessor, aspect: AspectRatio, what: str) -> None:
    """A few bytes can hold a picture so narrow that a square around it, or its enlargement, would fill the memory."""
    short, long = sorted(shape)
    enlarged = long * long if aspect is AspectRatio.pad else preprocessor.size * preprocessor.size * long // short
    if enlarged > MAX_PIXELS:
        raise PictureError(
            f"{what} is {shape[0]} x {shape[1]}; as a {aspect.value} it would need {enlarged} pixels", Kind.image_shape
        )


def to_rgb(picture: Image.Image, what: str) -> Image.Image:
    """Pillow's conversion, except where it would clip to white or black without a word."""
    if picture.mode == "F" or picture.mode.startswith("I"):
        values = np.asarray(picture).astype(np.float64)
        picture = Image.fromarray((values * (255 / white_of(picture.mode, values, what))).astype(np.uint8))
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


def resize(picture: Image.Image, preprocessor: Preprocessor) -> np.ndarray:
    """An RGB picture as uint8 [3, size, size]."""
    size = preprocessor.size
    if not preprocessor.keep_ratio:
        return to_bytes(picture.resize((size, size), preprocessor.resample))
    short, long = sorted(picture.size)
    new_long = int(size * long / short)
    shape = (size, new_long) if picture.width <= picture.height else (new_long, size)
    resized = picture.resize(shape, preprocessor.resample)
    top, left = (resized.height - size) // 2, (resized.width - size) // 2
    return to_bytes(resized.crop((left, top, left + size, top + size)))


def misread(picture: Image.Image, what: str) -> Image.Image:
    """transformers 4.37 takes a height of 3 for the channels; a height of 1 it refuses."""
    check_height(picture.height, what)
    if picture.height == 3:
        return Image.fromarray(np.ascontiguousarray(np.asarray(picture).transpose(1, 2, 0)))
    return picture


def check_height(stored: int, what: str) -> None:
    if stored == 1:
        raise PictureError(
            f"{what} has height 1, at which the original stops; data.pixels=exact reads it", Kind.image_shape
        )


def to_bytes(picture: Image.Image) -> np.ndarray:
    """uint8 [3, height, width]"""
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def pad_to_square(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The picture in the middle of a square of the mean colour (LLaVA mm_utils.py:152-163)."""
    side = max(picture.size)
    if picture.width == picture.height:
        return picture
    square = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square
