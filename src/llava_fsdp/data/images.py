"""From a picture file to the square of bytes that the vision tower's normalisation takes.

The arithmetic is CLIPImageProcessor's on Pillow, as LLaVA train.py:692-718 uses it. Pictures stay bytes until they
are on the device: a quarter of the memory and of the copying, and the same numbers (`pixel_table`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from llava_fsdp.config import AspectRatio
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


def load_image(path: Path, preprocessor: Preprocessor, aspect: AspectRatio, where: str) -> np.ndarray:
    """The picture as uint8 [3, size, size].

    Raises:
        PictureError: the file is missing, no picture, cut short, or too large; `where` names the record.
    """
    try:
        with Image.open(path, formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise PictureError(
                    f"{where}: {path} has {opened.width} x {opened.height} pixels, over the limit of {MAX_PIXELS}"
                )
            check_enlarged(opened.size, preprocessor, aspect, f"{where}: {path}")
            picture = to_rgb(opened, f"{where}: {path}")
    except FileNotFoundError as error:
        raise PictureError(f"{where}: picture {path} does not exist; is data.images right?") from error
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise PictureError(f"{where}: picture {path} cannot be read: {error}") from error
    return prepare(picture, preprocessor, aspect)


def check_enlarged(shape: tuple[int, int], preprocessor: Preprocessor, aspect: AspectRatio, what: str) -> None:
    """A few bytes can hold a picture so narrow that a square around it, or its enlargement, would fill the memory."""
    short, long = sorted(shape)
    enlarged = long * long if aspect is AspectRatio.pad else preprocessor.size * preprocessor.size * long // short
    if enlarged > MAX_PIXELS:
        raise PictureError(f"{what} is {shape[0]} x {shape[1]}; as a {aspect.value} it would need {enlarged} pixels")


def to_rgb(picture: Image.Image, what: str) -> Image.Image:
    """Pillow's conversion, except where it would clip to white or black without a word."""
    if picture.mode.startswith("I"):  # 16 bits a pixel, or such a file read as 32
        values = np.asarray(picture).astype(np.int64)
        eight_bits = values >> 8 if values.max(initial=0) > 255 else values
        picture = Image.fromarray(eight_bits.clip(0, 255).astype(np.uint8))
    if picture.mode == "F":
        raise PictureError(f"{what} holds floating point numbers, whose black and white are not known; convert it")
    return picture.convert("RGB")


def prepare(picture: Image.Image, preprocessor: Preprocessor, aspect: AspectRatio) -> np.ndarray:
    """An RGB picture as uint8 [3, size, size]."""
    if aspect is AspectRatio.pad:
        picture = pad_to_square(picture, tuple(int(m * 255) for m in preprocessor.mean))
    size = preprocessor.size
    if preprocessor.keep_ratio:
        short, long = sorted(picture.size)
        new_long = int(size * long / short)
        shape = (size, new_long) if picture.width <= picture.height else (new_long, size)
        pixels = np.asarray(picture.resize(shape, preprocessor.resample))
        top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
        pixels = pixels[top : top + size, left : left + size]
    else:
        pixels = np.asarray(picture.resize((size, size), preprocessor.resample))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def pad_to_square(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The picture in the middle of a square of the mean colour (LLaVA mm_utils.py:152-163)."""
    side = max(picture.size)
    if picture.width == picture.height:
        return picture
    square = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square
