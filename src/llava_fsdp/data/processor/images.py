"""Read images and videos for the processor of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from llava_fsdp.config import Pixels
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.check import ImageFacts, ImageFile
from llava_fsdp.data.images.image_source import ImageSource, ReadingStatus
from llava_fsdp.data.images.preprocess import check_size, open_image
from llava_fsdp.data.images.video import NoFrameError, examine_video, read_frames, stacked
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.processor.frames import ProcessorFrames
from llava_fsdp.data.processor.processor import Processor
from llava_fsdp.data.records.clip import Clip, Shape
from llava_fsdp.data.records.record import VIDEOS_NEED, Record, is_video
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.runtime.errors import ImageError

Positions = Callable[[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], torch.Tensor]
"""Function (token ids of a sample, int64 [length]; types of its tokens by name, int64 [length]; inputs of the vision
part for its images) -> position ids, int64 [axes, length]."""

Row = tuple[Sample, list[np.ndarray]]
"""A sample, and its images, uint8 [height, width, 3], and videos, uint8 [frames, height, width, 3]."""


@dataclass(frozen=True)
class ProcessorImages(ImageSource):
    """Reads the images and videos of one dataset in RGB, which a processor turns into inputs of the vision part."""

    folder: Path | None
    processor: Processor
    pixels: Pixels
    sampling: ProcessorFrames | None = None
    blanks: Mapping[str, Row] = field(default_factory=dict)
    """{kinds of media, as the letters of `media_of`: the sample, without labels, that a micro-batch without any of
    them gets}, so that the vision part runs equally often on every rank. Empty: no micro-batch gets one."""
    positions: Positions | None = None
    """None: the positions of a sample's tokens count from 0."""
    allow_links: bool = True
    status: ReadingStatus | None = field(default=None, compare=False)

    @property
    def form(self) -> str:
        return "processor"

    @property
    def cause(self) -> str:
        return "the model's own processor"

    @property
    def fingerprint(self) -> str:
        return f"processor {self.processor.fingerprint} {self.pixels.value} {self.sampling}"

    def needs_size(self, images: int) -> bool:
        return True

    def has_image_facts(self, record: Record) -> bool:
        assert record.sizes is not None and record.frames is not None
        known = zip(record.images, record.sizes, record.frames, strict=True)
        return all(min(size) > 0 and (count > 0 or not is_video(name)) for name, size, (count, _) in known)

    def count_tiles(self, record: Record, number: int, tokens: int = 0) -> int:
        return tokens

    def check_shape(self, size: Size, stored_height: int, num_images: int, what: str) -> None:
        """Do nothing: the encoder asks the processor about each size."""

    def shape(self, record: Record, number: int) -> Shape:
        """Return what the tokens of the image or video with the index `number` in a record depend on: the size of an
        image, or a Clip with the size, length and used frames of a video, and a function (`read`) that reads these
        frames. It comes from the record's index or else from the file. Raise ImageError if the file cannot be read."""
        name = record.images[number]
        if not is_video(name):
            return self.size(record, number)
        read = partial(self.tiles, record, name)
        if record.sizes is None or record.frames is None:
            path = self.path(record, name)
            assert isinstance(path, Path), "a video is never in the record itself"
            return replace(self.clip(path, record.where), read=read)
        (width, height), (frames, rate) = record.sizes[number], record.frames[number]
        facts = ImageFacts(width, height, stored_height=0, frames=frames, rate=rate)
        return replace(self.clip_of(facts, f"{record.where}: video {name}"), read=read)

    def clip(self, path: Path, where: str) -> Clip:
        """Return what the tokens of a video file depend on. Raise ImageError if it cannot be read."""
        facts = examine_video(path, where, self.frame_rule_or_raise(where), full=False)
        return replace(self.clip_of(facts, f"{where}: video {path}"), read=partial(self.load, path, where))

    def clip_of(self, facts: ImageFacts, what: str) -> Clip:
        """Return what the tokens of a video depend on: size, length, and numbers of the frames that the processor
        uses. `what` names it in messages. Raise ImageError if no frame is chosen, or videos are not read at all."""
        try:
            numbers = self.frame_rule_or_raise(what).numbers(facts.frames, facts.rate)
        except NoFrameError as error:
            raise ImageError(f"{what} cannot be used: {error}; take it out", Kind.image_unreadable) from error
        return Clip(facts.size, facts.frames, facts.rate, tuple(numbers))

    def frame_rule_or_raise(self, where: str) -> ProcessorFrames:
        """Return what selects frames; raise ImageError if no videos are read."""
        if self.sampling is None:
            raise ImageError(f"{where} has a video, and {VIDEOS_NEED}", Kind.media_not_read)
        return self.sampling

    def tiles(self, record: Record, name: str) -> np.ndarray:
        """Read an image of a record, uint8 [height, width, 3], or the used frames of a video, uint8 [frames, height,
        width, 3]. Raise ImageError if it cannot be read, or has changed since the dataset was examined."""
        path, sizes = self.begin_reading(record, name)
        made = self.load(path, record.where, record.num_images, sizes)
        if is_video(name) and record.frames is not None:
            shape = self.shape(record, record.images.index(name))
            assert isinstance(shape, Clip)
            if len(made) != len(shape.numbers):
                raise ImageError(
                    f"{record.where}: {len(made)} frames of video {path} are used, and {len(shape.numbers)} were when "
                    "the dataset was examined; take it from its source again, or examine the dataset again",
                    Kind.image_unreadable,
                )
        return made

    def load(self, path: ImageFile, where: str, num_images: int = 1, sizes: Collection[Size] = ()) -> np.ndarray:
        """Read an image as uint8 [height, width, 3], or a video's used frames as uint8 [frames, height, width, 3].

        Args:
            where: names the record in errors.
            num_images: not used, because no image is cut into tiles.
            sizes: the sizes (width, height) for which its tokens were counted; another size raises ImageError.
        """
        if isinstance(path, Path) and is_video(path):
            what = f"{where}: video {path}"
            frames = stacked(read_frames(path, where, self.frame_rule_or_raise(where).numbers), what)
            check_size((frames.shape[2], frames.shape[1]), sizes, what)
            return frames
        image = open_image(path, where, self.pixels)
        check_size(image.size, sizes, f"{where}: image {path}")
        return np.asarray(image)
