"""Faster image resizing (`data.pixels=fast`), whose pixels are close but not equal to those of `data.pixels=exact`.

It differs from `exact` in four ways:
- A JPEG is decoded at a half, a quarter or an eighth of its size, if that is still large enough.
- An image more than twice as large as needed is first averaged over whole blocks (Pillow's `reducing_gap`).
- For clear reductions, Pillow's Hamming filter is used, which is half as wide as the bicubic one.
- Padding is added after resizing, and cropping to a square is done before. So the image does not blend into the
  padding, and a line of pixels that the image fills only in part has the padding's colour.
An image that needs no resizing has exactly the pixels of `exact`.

All functions take an image as Pillow opened it, not yet decoded, and return RGB; `what` names the image in error
messages, and lengths are in pixels.
"""

import math
from dataclasses import dataclass

from PIL import ExifTags, Image, ImageOps
from PIL.Image import Resampling

from llava_fsdp.data.images.anyres import Size, best_size, cut_grid, fitted_shape, on_black
from llava_fsdp.data.images.check import shown_size, to_rgb

GAP = 2.0
"""Pillow's `reducing_gap`: an image is averaged over whole blocks down to this many times its final size."""
NARROW = 1.25
"""Factor of shrinking from which the Hamming filter is used; at smaller factors it would blur the image."""
Box = tuple[float, float, float, float]
"""(left, top, right, bottom)"""


@dataclass(frozen=True)
class Decoded:
    """An image decoded at its full size or a fraction of it, and turned by its EXIF orientation."""

    image: Image.Image
    full_size: Size
    scale: int
    """Full size divided by decoded size. The edge pixels of the decoded image may be partly outside the full image."""
    left: float
    top: float
    """`left` and `top` say where the full image begins, in pixels of the decoded image. They are not 0 if turning moved
    an edge pixel that lies partly outside the full image to the left or to the top."""

    def resize(self, shape: Size, resample: Resampling, box: Box | None = None) -> Image.Image:
        """Return the image, or the part of it in `box` (in pixels of the full size), resized. The bicubic filter is
        replaced by a narrower one if the image is clearly reduced."""
        left, top, right, bottom = (n / self.scale for n in box or (0, 0, *self.full_size))
        reduction = min((right - left) / shape[0], (bottom - top) / shape[1])
        if reduction >= NARROW and resample is Resampling.BICUBIC:
            resample = Resampling.HAMMING
        # `self.left` and `self.top` say where the full image begins in the decoded one
        right, bottom = min(self.left + right, self.image.width), min(self.top + bottom, self.image.height)
        return self.image.resize(shape, resample, (self.left + left, self.top + top, right, bottom), GAP)


def decode(file: Image.Image, least_shape: tuple[float, float], what: str) -> Decoded:
    """Decode an image, and turn it by its EXIF orientation. A JPEG is decoded at a half, a quarter or an eighth of its
    size if that is at least `least_shape`, (width, height) after turning. `what` names the image in errors."""
    full, orientation = shown_size(file), file.getexif().get(ExifTags.Base.Orientation, 1)
    wide, high = (math.ceil(n) for n in least_shape)
    stored = file.width
    drafted = file.draft(None, (high, wide) if orientation in (5, 6, 7, 8) else (wide, high))  # None: not a JPEG
    scale = round(stored / drafted[1][2]) if drafted else 1
    image = to_rgb(ImageOps.exif_transpose(file), what)
    # the decoder rounds sizes up; turning may move the pixels that are too many to the left or to the top
    left = image.width - full[0] / scale if orientation in (2, 3, 6, 7) else 0
    top = image.height - full[1] / scale if orientation in (3, 4, 7, 8) else 0
    return Decoded(image, full, scale, left, top)


def pad_and_resize(
    file: Image.Image, size: int, resample: Resampling, colour: tuple[int, ...], what: str
) -> Image.Image:
    """Return a square of `size` pixels a side with the resized image in its middle and padding of one color around it.
    `file` is not decoded yet; `what` names the image in errors."""
    width, height = shown_size(file)
    side = max(width, height)
    # a JPEG may be decoded smaller, but not below its size in the square
    image = decode(file, (width * size / side, height * size / side), what)
    # per axis: range of lines in the square that the image fills completely, and the part of the image that they show
    (left, right, x, end_x), (top, bottom, y, end_y) = (lines_within(n, side, size) for n in (width, height))
    inside = image.resize((right - left, bottom - top), resample, (x, y, end_x, end_y))
    if inside.size == (size, size):
        return inside
    square = Image.new("RGB", (size, size), colour)
    square.paste(inside, (left, top))
    return square


def lines_within(length: int, side: int, size: int) -> tuple[int, int, float, float]:
    """Compute which lines (rows or columns of pixels) an image fills completely after padding to a square and resizing,
    and which part of the image they show.

    A line that the image fills only in part becomes padding. An image that fills no line completely gets one line.

    Args:
        length: width or height of the image, which is in the middle of a square.
        side: width of the square before resizing.
        size: width of the square after resizing.

    Returns:
        (first line, end of the lines, begin and end of the shown part), the last two in pixels of the image.
    """
    before = (side - length) // 2
    first, end = -(-before * size // side), (before + length) * size // side
    if end <= first:
        middle = (2 * before + length) * size // (2 * side)
        return middle, middle + 1, 0.0, float(length)
    return first, end, first * side / size - before, min(end * side / size - before, length)


def resize_centre(file: Image.Image, size: int, resample: Resampling, what: str) -> Image.Image:
    """Return the central square of an image, resized to `size` pixels a side. `file` is not decoded yet; `what` names
    the image in errors."""
    width, height = shown_size(file)
    short = min(width, height)
    shape = int(size * width / short), int(size * height / short)
    left, top = (shape[0] - size) // 2, (shape[1] - size) // 2
    across, down = width / shape[0], height / shape[1]
    box = left * across, top * down, (left + size) * across, (top + size) * down
    return decode(file, shape, what).resize((size, size), resample, box)


def squeeze(file: Image.Image, size: int, resample: Resampling, what: str) -> Image.Image:
    """Return the image resized to a square, without keeping its aspect ratio."""
    return decode(file, (size, size), what).resize((size, size), resample)


def resize_tiles(file: Image.Image, tile: int, sizes: list[Size], what: str) -> list[Image.Image]:
    """Return the square tiles of an image for the vision tower: the whole image, then row by row the tiles of the grid
    that fits it best (anyres).

    Args:
        file: the image, not decoded yet.
        tile: width of a tile in pixels.
        sizes: sizes in pixels of the grids to choose from.
        what: names the image in errors.
    """
    size = best_size(shown_size(file), sizes)
    shape = fitted_shape(shown_size(file), size)
    image = decode(file, (max(tile, shape[0]), max(tile, shape[1])), what)
    fitted = on_black(image.resize(shape, Resampling.BICUBIC), size)
    return [image.resize((tile, tile), Resampling.BICUBIC), *cut_grid(fitted, tile)]
