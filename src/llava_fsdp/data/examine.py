"""A picture file looked at before training: is it there, is it whole, what size is it."""

import os
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from llava_fsdp.config import Examine
from llava_fsdp.data.images import opened, shown_size, to_rgb
from llava_fsdp.data.problems import Kind
from llava_fsdp.errors import PictureError


@dataclass(frozen=True)
class Picture:
    width: int
    """As shown: its EXIF orientation heeded."""
    height: int
    stored_height: int
    """As the original reads it."""

    @classmethod
    def unknown(cls) -> "Picture":
        return cls(0, 0, 0)


def examine(folder: Path, name: str, real_folder: str, how: Examine, scaled: bool, allow_links: bool) -> Picture:
    """The picture's size, from its head, or from decoding all of it.

    Args:
        real_folder: the folder without symbolic links.

    Raises:
        PictureError: of a kind, without naming a record.
    """
    path = folder / name
    check_links(path, real_folder, allow_links)
    with opened(path, name) as picture:
        size, stored = shown_size(picture), picture.height
        if how is Examine.decode:
            decode(picture, path, scaled)
    return Picture(*size, stored)


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


def decode(picture: Image.Image, path: Path, scaled: bool) -> None:
    """Read every byte that training will; of a JPEG an eighth of the pixels shows whether it is whole."""
    if picture.format == "JPEG":
        picture.draft("RGB", (picture.width // 8, picture.height // 8))
    picture.load()
    if scaled and (picture.mode == "F" or picture.mode.startswith("I")):
        to_rgb(picture, str(path))
