"""Make thumbnails of images as data: URLs, for HTML pages that consist of a single file."""

import base64
import contextlib
import io
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from llava_fsdp.data.images.check import open_checked, to_rgb
from llava_fsdp.data.images.video import read_frames
from llava_fsdp.data.records.record import is_video
from llava_fsdp.runtime.errors import DataError

SIDE = 208
"""Longest side of a thumbnail in pixels, twice the size shown on the page, for high-resolution screens."""
LARGEST = 24_000
"""Largest size of a thumbnail's JPEG in bytes; a larger one is saved again at lower quality."""


@lru_cache(200)
def thumbnail(path: str) -> str | None:
    """Return a thumbnail of an image file, or of a video's first frame, as the data URL of a JPEG; None if the file
    cannot be read, or if the JPEG has more than LARGEST bytes in any quality."""
    with contextlib.suppress(DataError, MemoryError), first_picture(Path(path)) as image:
        image.draft("RGB", (SIDE, SIDE))
        small = to_rgb(ImageOps.exif_transpose(image), path)
        small.thumbnail((SIDE, SIDE))
        for quality in (72, 40, 15):
            data = jpeg(small, quality)
            if len(data) <= LARGEST:
                return data_url(data)
    return None


def tile_thumbnail(tile: np.ndarray, side: int) -> str:
    """Return a thumbnail of pixels, uint8 [3, height, width], with at most `side` pixels a side, as a data: URL."""
    image = Image.fromarray(np.ascontiguousarray(tile.transpose(1, 2, 0)))
    image.thumbnail((side, side))
    return data_url(jpeg(image, 60))


def jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, optimize=True)
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def first_picture(path: Path) -> contextlib.AbstractContextManager[Image.Image]:
    """Context manager that gives the image in a file, or the first frame of a video file."""
    where = "a sample answer"
    return read_frames(path, where, lambda *_: [0])[0] if is_video(path) else open_checked(path, where)
