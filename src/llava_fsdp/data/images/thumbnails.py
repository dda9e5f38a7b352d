"""Thumbnails as data: URLs, for pages without files beside them."""

import base64
import contextlib
import io
from pathlib import Path

from PIL import ImageOps

from llava_fsdp.data.images.check import opened, to_rgb
from llava_fsdp.runtime.errors import DataError

SIDE = 208
"""Most pixels on a side, twice those on a page."""
QUALITY = 72
LARGEST = 24_000
"""Most bytes of a JPEG; larger ones are saved at lower quality."""
MOST_KEPT = 200


class Thumbnails:
    """Caches the thumbnails of the last `MOST_KEPT` images."""

    def __init__(self) -> None:
        self.made: dict[str, str | None] = {}

    def __call__(self, path: str) -> str | None:
        """Data: URL of an image's thumbnail; None if the image cannot be read."""
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
