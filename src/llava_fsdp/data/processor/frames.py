"""Which frames of a video are used, as the processor of a whole model chooses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from llava_fsdp.data.images.video import NoFrameError
from llava_fsdp.data.processor.image_template import NO_VIDEO
from llava_fsdp.data.processor.processor import FAILURES, Processor
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.chat_template.message_parts import VIDEO
from llava_fsdp.runtime.text.log import log


class FrameRule(Exception):
    """Carries the function by which a processor samples the frames of a video."""

    def __init__(self, rule: Callable[..., Any] | None):
        super().__init__()
        self.rule = rule


@dataclass(frozen=True)
class ProcessorFrames:
    """Selects the frames of a video that `processor.apply_chat_template` takes of its file. If they are more than
    `most`, that many of them are used, at equal distances from the first one to the last one."""

    processor: Processor
    fps: float | None
    """`data.video_fps`, the argument `fps` of `apply_chat_template`; None: what the processor does by itself. Some
    processors take all frames then."""
    most: int | None
    """`data.video_frames`; None: no limit."""
    keeps_size: ClassVar[bool] = True

    def __reduce__(self) -> tuple:
        return ProcessorFrames, (self.processor, self.fps, self.most)

    def __str__(self) -> str:
        return f"processor {self.processor.fingerprint} {self.fps} {self.most}"

    @cached_property
    def rule(self) -> Callable[..., Any] | None:
        """The processor's function from the metadata of a video to the numbers of its frames; None: all frames.

        It is taken where the processor would read the video's file, so that the defaults of its `apply_chat_template`
        and of its settings are in it.
        """

        def fetch_videos(videos: Any, sample_indices_fn: Callable[..., Any] | None = None) -> Any:
            raise FrameRule(sample_indices_fn)

        # `fetch_videos` takes the place of the method that reads a video's file; FrameRule brings its argument out of
        # the call
        opened = self.processor.opened
        part = {"type": "video", "path": "a video"}
        options = {} if self.fps is None else {"fps": self.fps}
        opened.video_processor.fetch_videos = fetch_videos
        try:
            opened.apply_chat_template([{"role": "user", "content": [part]}], tokenize=True, processor_kwargs=options)
        except FrameRule as found:
            return found.rule
        finally:
            del opened.video_processor.fetch_videos
        raise ValueError("the processor does not read a video")

    def numbers(self, frames: int, rate: float) -> list[int]:
        """Return the numbers, from 0, of the frames that are used of a video with `frames` frames, `rate` a second, in
        ascending order. If the processor's rule chooses more than `most`, that many of them are used, at equal
        distances. Raise NoFrameError if the processor fails, or chooses none or in another order."""
        from transformers.video_utils import VideoMetadata

        metadata = VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)
        try:
            found = range(frames) if self.rule is None else self.rule(metadata=metadata)
        except FAILURES as error:
            why = " ".join(str(error).split())[:200]
            raise NoFrameError(f"the model's processor chooses no frames of {frames}: {why}") from error
        chosen = np.asarray(found).astype(int)
        if not len(chosen) or (np.diff(chosen) < 0).any():
            raise NoFrameError(f"the model's processor chooses the frames {chosen.tolist()[:9]} of {frames}")
        if self.most is not None and len(chosen) > self.most:
            chosen = chosen[np.linspace(0, len(chosen) - 1, self.most, dtype=int)]
        return chosen.tolist()


def open_frames(
    template: ChatTemplate, processor: Processor, fps: float | None, most: int | None
) -> ProcessorFrames | None:
    """Return what selects the frames of videos; None, with a message in the log, if the model's processor or its chat
    template takes no videos, or if the processor cannot prepare videos of unlike lengths together. `fps`, `most`:
    `data.video_fps` and `data.video_frames`."""
    if not processor.takes_videos:
        return None
    frames = ProcessorFrames(processor, fps, most)
    try:
        if template.placeholders[VIDEO] == NO_VIDEO:
            raise ValueError("its chat template writes no text of its own for a video")
        _ = processor.needs, frames.rule  # computed now, so that a failure is noticed here
    except FAILURES as error:
        log().info("%s: no videos are read: %s", processor.folder, " ".join(str(error).split())[:200])
        return None
    return frames
