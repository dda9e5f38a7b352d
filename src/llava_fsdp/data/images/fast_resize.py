"""Pixels in fewer operations, near to the exact ones and not equal (`data.pixels=fast`).

It differs from `exact` in four things. A JPEG is decoded at a half, a quarter or an eighth of its size where that is
still no smaller than what is needed. What is more than twice too large is averaged over whole blocks before it is
resized (Pillow's `reducing_gap`). What is clearly reduced is so with Pillow's Hamming filter, half as wide as the
bicubic one. And nothing is resized that is not shown: padding comes after resizing, so that the picture does not blend
into the colour around it and a line that it fills in part has that colour, and of a picture that is cut to a square the
square alone is resized. A picture that is not resized gives the exact path's very bytes.

Functions take the file as Pillow opened it, not yet decoded, and give RGB; `what` is what an error calls it.
"""

import math
from dataclasses import dataclass

from PIL import ExifTags, Image, ImageOps
from PIL.Image import Resampling

from llava_fsdp.data.images.anyres import Size, best_size, cut_grid, fitted_shape, on_black
from llava_fsdp.data.images.check import shown_size, to_rgb

GAP = 2.0
NARROW = 1.25
"""From this reduction on the narrower filter; nearer to the full size it would blur."""
Box = tuple[float, float, float, float]
"""left, top, right, bottom"""


@dataclass(frozen=True)
class Decoded:
    """A picture as shown, perhaps at a fraction of its size; boxes are in pixels of the full one."""

    picture: Image.Image
    full: Size
    scale: int
    """Pixels of the full size on a side of one of these; those at the edge may lie beyond it in part."""
    left: float
    top: float
    """Where the full picture begins: not at 0 where its last, partial pixels were turned to the front."""

    def resize(self, shape: Size, resample: Resampling, box: Box | None = None) -> Image.Image:
        left, top, right, bottom = (n / self.scale for n in box or (0, 0, *self.full))
        reduction = min((right - left) / shape[0], (bottom - top) / shape[1])
        if reduction >= NARROW and resample is Resampling.BICUBIC:
            resample = Resampling.HAMMING
        right, bottom = min(self.left + right, self.picture.width), min(self.top + bottom, self.picture.height)
        return self.picture.resize(shape, resample, (self.left + left, self.top + top, right, bottom), GAP)


def decode(file: Image.Image, needed: tuple[float, float], what: str) -> Decoded:
    """The picture, no smaller than `needed` (width, height) unless the file is."""
    full, turn = shown_size(file), file.getexif().get(ExifTags.Base.Orientation, 1)
    wide, high = (math.ceil(n) for n in needed)
    stored = file.width
    drafted = file.draft(None, (high, wide) if turn in (5, 6, 7, 8) else (wide, high))  # None: no JPEG
    scale = round(stored / drafted[1][2]) if drafted else 1
    picture = to_rgb(ImageOps.exif_transpose(file), what)
    left = picture.width - full[0] / scale if turn in (2, 3, 6, 7) else 0
    top = picture.height - full[1] / scale if turn in (3, 4, 7, 8) else 0
    return Decoded(picture, full, scale, left, top)


def padded(file: Image.Image, size: int, resample: Resampling, colour: tuple[int, ...], what: str) -> Image.Image:
    """The whole picture in the middle of a square, every pixel where the exact path has it."""
    width, height = shown_size(file)
    side = max(width, height)
    picture = decode(file, (width * size / side, height * size / side), what)
    (left, right, x, end_x), (top, bottom, y, end_y) = (lines_within(n, side, size) for n in (width, height))
    inside = picture.resize((right - left, bottom - top), resample, (x, y, end_x, end_y))
    if inside.size == (size, size):
        return inside
    square = Image.new("RGB", (size, size), colour)
    square.paste(inside, (left, top))
    return square


def lines_within(length: int, side: int, size: int) -> tuple[int, int, float, float]:
    """Of `size` lines that show `side`, those that `length` in its middle fills, and the part of `length` on them.

    Lines that it fills in part are left out; one that would be lost altogether is squeezed into one line.
    """
    before = (side - length) // 2
    first, end = -(-before * size // side), (before + length) * size // side
    if end <= first:
        middle = (2 * before + length) * size // (2 * side)
        return middle, middle + 1, 0.0, float(length)
    return first, end, first * side / size - before, min(end * side / size - before, length)


def cut_square(file: Image.Image, size: int, resample: Resampling, what: str) -> Image.Image:
    """The centre of the picture whose short side is `size`."""
    width, height = shown_size(file)
    short = min(width, height)
    shape = int(size * width / short), int(size * height / short)
    left, top = (shape[0] - size) // 2, (shape[1] - size) // 2
    across, down = width / shape[0], height / shape[1]
    box = left * across, top * down, (left + size) * across, (top + size) * down
    return decode(file, shape, what).resize((size, size), resample, box)


def squeezed(file: Image.Image, size: int, resample: Resampling, what: str) -> Image.Image:
    """The whole picture, both sides resized to the square's."""
    return decode(file, (size, size), what).resize((size, size), resample)


def tiles(file: Image.Image, tile: int, sizes: list[Size], what: str) -> list[Image.Image]:
    """As `anyres.cut_tiles`, in the grid that the picture's full size asks for."""
    size = best_size(shown_size(file), sizes)
    shape = fitted_shape(shown_size(file), size)
    picture = decode(file, (max(tile, shape[0]), max(tile, shape[1])), what)
    fitted = on_black(picture.resize(shape, Resampling.BICUBIC), size)
    return [picture.resize((tile, tile), Resampling.BICUBIC), *cut_grid(fitted, tile)]
