"""Split an image of any resolution into square tiles for the vision tower (anyres).

The first tile is the whole image, shrunk. The others are cut from the image after it was resized to a grid of tiles. Of
several configured grids, the one that fits the image's shape best is used (LLaVA mm_utils.py:10-149; LLaVA-NeXT).
"""

import math

from PIL import Image

from llava_fsdp.config import AspectRatio

GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""LLaVA-NeXT's default grids, as (width, height) in tiles."""
MAX_GRIDS = tuple((width, height) for height in range(1, 7) for width in range(1, 7))
"""LLaVA-OneVision's default grids, as (width, height) in tiles."""
Size = tuple[int, int]
"""(width, height) in pixels."""


def grid_sizes(pinpoints: list[list[int]], tile: int, aspect: AspectRatio = AspectRatio.anyres) -> list[Size]:
    """Return the sizes to which an image may be resized before it is cut into square tiles.

    Args:
        pinpoints: the configured sizes [width, height] in pixels. If there are any, they are returned; otherwise the
            default grids of LLaVA-NeXT (anyres) or LLaVA-OneVision (anyres_max).
        tile: width of a tile in pixels.
        aspect: the setting `data.image_aspect_ratio`, which selects the default grids.
    """
    grids = MAX_GRIDS if aspect is AspectRatio.anyres_max else GRIDS
    return [(w, h) for w, h in pinpoints] or [(w * tile, h * tile) for w, h in grids]


def best_size(image_size: Size, sizes: list[Size]) -> Size:
    """Return the size in which an image keeps the most pixels when it is resized to fit inside. Among equal ones, the
    size with the least padding is returned, then the first."""

    def rank(size: Size) -> tuple[int, int]:
        """Return (pixels that the image keeps, minus the pixels of padding); the greatest is the best."""
        width, height = image_size
        scale = min(size[0] / width, size[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=rank)


def cut_tiles(image: Image.Image, tile: int, sizes: list[Size]) -> list[Image.Image]:
    """Return the square tiles of an image for the vision tower: the whole image resized to one tile, then the tiles of
    the grid, out of `sizes`, that fits it best, row by row."""
    return [image.resize((tile, tile)), *cut_grid(fit(image, best_size(image.size, sizes)), tile)]


def fit(image: Image.Image, size: Size) -> Image.Image:
    """Return the image resized to fit into `size`, in the middle of a black canvas of that size."""
    return on_black(image.resize(fitted_shape(image.size, size)), size)


def fitted_shape(image_size: Size, size: Size) -> Size:
    """Return the largest size within `size` that has the aspect ratio of `image_size`."""
    scale_w, scale_h = size[0] / image_size[0], size[1] / image_size[1]
    if scale_w < scale_h:
        return size[0], min(math.ceil(image_size[1] * scale_w), size[1])
    return min(math.ceil(image_size[0] * scale_h), size[0]), size[1]


def on_black(image: Image.Image, size: Size) -> Image.Image:
    """Return an image in the middle of a black canvas of `size`."""
    canvas = Image.new("RGB", size, (0, 0, 0))
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return canvas


def cut_grid(canvas: Image.Image, tile: int) -> list[Image.Image]:
    """Cut an image that fills its grid into square tiles of `tile` pixels a side, row by row."""
    corners = [(x, y) for y in range(0, canvas.height, tile) for x in range(0, canvas.width, tile)]
    return [canvas.crop((x, y, x + tile, y + tile)) for x, y in corners]
