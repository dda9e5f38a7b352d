"""Read images for the processor of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from llava_fsdp.config import Pixels
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.data.images.image_source import ImageSource, ReadingStatus
from llava_fsdp.data.images.preprocess import check_size, open_image
from llava_fsdp.data.processor.processor import Processor
from llava_fsdp.data.records.record import Record
from llava_fsdp.data.text.encode import Sample

Positions = Callable[[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], torch.Tensor]
"""Function (token ids of a sample, int64 [length]; types of its tokens by name, int64 [length]; inputs of the vision
part for its images) -> position ids, int64 [axes, length]."""

Row = tuple[Sample, list[np.ndarray]]
"""A sample, and its images, uint8 [height, width, 3]."""


@dataclass(frozen=True)
class ProcessorImages(ImageSource):
    """Reads the images of one dataset as RGB images, which a processor turns into inputs of the vision part."""

    folder: Path | None
    processor: Processor
    pixels: Pixels
    blank: Row | None = None
    """The sample, without labels, that a micro-batch without images gets, so that the vision part runs on every rank;
    None: no micro-batch gets one."""
    positions: Positions | None = None
    """None: the positions of a sample's tokens count from 0."""
    allow_links: bool = True
    status: ReadingStatus | None = field(default=None, compare=False)

    sampling = None

    @property
    def form(self) -> str:
        return "processor"

    @property
    def cause(self) -> str:
        return "the model's own processor"

    @property
    def fingerprint(self) -> str:
        return f"processor {self.processor.fingerprint} {self.pixels.value}"

    def needs_size(self, images: int) -> bool:
        return True

    def has_image_facts(self, record: Record) -> bool:
        assert record.sizes is not None
        return all(min(size) > 0 for size in record.sizes)

    def count_tiles(self, record: Record, number: int, tokens: int = 0) -> int:
        return tokens

    def check_shape(self, size: Size, stored_height: int, num_images: int, what: str) -> None:
        """Do nothing: the encoder asks the processor about each size."""

    def tiles(self, record: Record, name: str) -> np.ndarray:
        path, sizes = self.begin_reading(record, name)
        return self.load(path, record.where, record.num_images, sizes)

    def load(self, path: ImageFile, where: str, num_images: int = 1, sizes: Collection[Size] = ()) -> np.ndarray:
        image = open_image(path, where, self.pixels)
        check_size(image.size, sizes, f"{where}: image {path}")
        return np.asarray(image)
