"""What reads the images of a dataset for one kind of model.

`where` and `what` name a record and an image in error messages. A number is the index of an image or video in its
record.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np

from llava_fsdp.config import Pixels
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.check import ImageFile, check_links, image_in, inline_image, read_size
from llava_fsdp.data.images.video import FrameChoice
from llava_fsdp.data.records.record import Record


class ReadingStatus(Protocol):
    """Where a data worker notes what it is reading (`WorkerStatus` in batching/workers.py)."""

    def at(self, record: str, image: ImageFile | None = None) -> None: ...


class SizeRule(Protocol):
    """Says whether the number of tokens of an image depends on its size."""

    @property
    def cause(self) -> str:
        """What makes the number depend on the size, in words for a message."""
        ...

    def needs_size(self, images: int) -> bool: ...


class ImageSource(ABC):
    """Finds and reads the images of one dataset, and knows how much of the model's input each is."""

    folder: Path | None
    """Local folder that the image paths are relative to, for records that have no folder of their own. Those of an
    index have one."""
    pixels: Pixels
    sampling: FrameChoice | None
    """None: videos are not read."""
    allow_links: bool
    """Whether symbolic links in the folder may lead to images outside of it."""
    status: ReadingStatus | None
    """Where a data worker notes the image that it is reading, for error messages."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Text that changes with every setting that affects pixel values or the order of vision features."""

    @property
    @abstractmethod
    def form(self) -> str:
        """Name of the way in which images become inputs of the model."""

    @property
    @abstractmethod
    def cause(self) -> str:
        """What makes the number of tokens of an image depend on its size, in words for a message."""

    @abstractmethod
    def needs_size(self, images: int) -> bool:
        """Return whether the number of tokens of an image depends on its size, in a record with `images` images."""

    @abstractmethod
    def has_image_facts(self, record: Record) -> bool:
        """Return whether the number of tokens of each image and video can be computed from the index. This is not so if
        it depends on the size of an image or the length of a video that cannot be read."""

    @abstractmethod
    def count_tiles(self, record: Record, number: int, tokens: int = 0) -> int:
        """Return how much work an image or video is for the vision part: the number of tiles into which it is cut. A
        model with a processor has no tiles: its work is counted in tokens, so `tokens`, the image's number of them, is
        returned. `number`: index of the image or video in its record. Raise ImageError if the image's size is needed
        and cannot be read."""

    @abstractmethod
    def check_shape(self, size: Size, stored_height: int, num_images: int, what: str) -> None:
        """Raise DataError if an image of this shape cannot be prepared.

        Args:
            stored_height: height in pixels before turning by the EXIF orientation.
            num_images: number of images of its record.
            what: names the image in the error.
        """

    @abstractmethod
    def tiles(self, record: Record, name: str) -> np.ndarray:
        """Read an image or a video of a record, by its name, as the array from which the model's image inputs are made:
        its tiles, uint8 [tiles, 3, size, size]; for a model with a processor the image itself, uint8 [height, width,
        3].

        Raises:
            ImageError: the image cannot be read, has another size than was found before training, or the video is not
                as long as it was then.
        """

    @abstractmethod
    def load(self, path: ImageFile, where: str, num_images: int = 1, sizes: Collection[Size] = ()) -> np.ndarray:
        """Read an image file or a video as its tiles, uint8 [tiles, 3, size, size]; for a model with a processor as the
        image itself, uint8 [height, width, 3].

        Args:
            where: names the record in errors.
            num_images: number of the record's images, without videos. Some models cut only a single one into tiles.
            sizes: the sizes (width, height) for which the image's tokens were counted; an image with another size is
                refused if the number of its tokens depends on the size.
        """

    def path(self, record: Record, name: str) -> ImageFile:
        """Return one of a record's images or videos, by its name."""
        if name in record.inline:
            return inline_image(name, record.inline[name], record.data_files)
        folder = record.folder or self.folder
        assert folder is not None, "checked when the records were opened"
        return image_in(folder, name)

    def checked_path(self, record: Record, name: str) -> ImageFile:
        """Like `path`, but raise ImageError for a symbolic link that is not allowed. Links are checked at each reading,
        because an image may not have been opened before training."""
        path = self.path(record, name)
        if isinstance(path, Path):
            check_links(path, record.where, os.path.realpath(str(record.folder or self.folder)), self.allow_links)
        return path

    def size(self, record: Record, number: int) -> Size:
        """Return (width, height) in pixels of the image with the index `number` in a record, after turning by the EXIF
        orientation. It comes from the record's index or, if that does not have it, from the file."""
        if record.sizes is not None and min(record.sizes[number]) > 0:
            return record.sizes[number]
        return read_size(self.path(record, record.images[number]), record.where)

    def begin_reading(self, record: Record, name: str) -> tuple[ImageFile, set[Size]]:
        """Return the file of an image, and the sizes that the index has of it, for which its tokens were counted.
        Before that, note in `status` that the image is being read, and raise ImageError if it is a link that is not
        allowed."""
        path = self.checked_path(record, name)
        if self.status is not None:
            self.status.at(record.where, path)
        sizes = zip(record.images, record.sizes or (), strict=False)
        return path, {size for listed, size in sizes if listed == name}
