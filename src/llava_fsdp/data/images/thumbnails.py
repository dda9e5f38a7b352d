"""Make thumbnails of images as data: URLs, for HTML pages that must be a single file."""

import base64
import contextlib
import io
from functools import lru_cache
from pathlib import Path

from PIL import ImageOps

from llava_fsdp.data.images.check import opened, to_rgb
from llava_fsdp.runtime.errors import DataError

SIDE = 208
"""Longest side of a thumbnail in pixels. It is twice the size shown on the page, for high-resolution screens."""
LARGEST = 24_000
"""Largest size of a thumbnail's JPEG in bytes; a larger JPEG is saved again at lower quality."""


@lru_cache(200)
def thumbnail(path: str) -> str | None:
    """Return the thumbnail of an image file as a data: URL; None if the image cannot be read."""
    with contextlib.suppress(DataError, MemoryError), opened(Path(path), "a sample answer") as image:
        image.draft("RGB", (SIDE, SIDE))
        small = to_rgb(ImageOps.exif_transpose(image), path)
        small.thumbnail((SIDE, SIDE))
        for quality in (72, 40, 15):
            held = io.BytesIO()
            small.save(held, "JPEG", quality=quality)
            if held.tell() <= LARGEST:
                return f"data:image/jpeg;base64,{base64.b64encode(held.getvalue()).decode()}"
    return None
