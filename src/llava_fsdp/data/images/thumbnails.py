"""Make thumbnails of images as data: URLs, for HTML pages that must be a single file."""

import base64
import contextlib
import io
from pathlib import Path

from PIL import ImageOps

from llava_fsdp.data.images.check import opened, to_rgb
from llava_fsdp.runtime.errors import DataError

SIDE = 208
"""Longest side of a thumbnail in pixels, twice that on the page (for high-resolution screens)."""
QUALITY = 72
LARGEST = 24_000
"""Size limit of a thumbnail's JPEG in bytes; larger ones are saved at lower quality."""
MOST_KEPT = 200


class Thumbnails:
    """Makes thumbnails, and caches at most `MOST_KEPT` of them."""

    def __init__(self) -> None:
        self.made: dict[str, str | None] = {}

    def __call__(self, path: str) -> str | None:
        """Return the thumbnail of an image file as a data: URL; None if the image cannot be read."""
        if path not in self.made:
            if len(self.made) >= MOST_KEPT:
                self.made.clear()
            self.made[path] = thumbnail(Path(path))
        return self.made[path]


def thumbnail(path: Path) -> str | None:
    with contextlib.suppress(DataError, MemoryError), opened(path, "a sample answer") as image:
        image.draft("RGB", (SIDE, SIDE))
        small = to_rgb(ImageOps.exif_transpose(image), str(path))
        small.thumbnail((SIDE, SIDE))
        for quality in (QUALITY, 40, 15):
            held = io.BytesIO()
            small.save(held, "JPEG", quality=quality)
            if held.tell() <= LARGEST:
                return f"data:image/jpeg;base64,{base64.b64encode(held.getvalue()).decode()}"
    return None
