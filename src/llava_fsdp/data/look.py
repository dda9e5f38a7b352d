"""A record's picture looked at before training: it lies in its folder, it is whole, and what size it has."""

import os
from pathlib import Path

from llava_fsdp.config import Examine
from llava_fsdp.data.examine import Picture, examine
from llava_fsdp.data.problems import Kind
from llava_fsdp.errors import PictureError


def look_at(folder: Path, name: str, real_folder: str, how: Examine, scaled: bool, allow_links: bool) -> Picture:
    """The picture's size, from its head, or from decoding all of it.

    Args:
        real_folder: the folder without symbolic links.

    Raises:
        PictureError: of a kind, without naming a record.
    """
    path = folder / name
    check_links(path, real_folder, allow_links)
    return examine(path, name, how is Examine.decode, scaled)


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
