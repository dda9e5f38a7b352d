"""Read frames of video files with PyAV, for models that take videos.

Which frames are used: for a model with a processor, those that the processor chooses. For LLaVA-OneVision (LLaVA-NeXT
train.py, `process_video_with_decord`) every n-th, where n is the number of frames in a second divided by
`data.video_fps`, rounded, and at least 1. If these are more than `data.video_frames`, that many
at equal distances from the first frame to the last one are used instead.

A file is opened as an object without a name, in the format that its suffix names. So a playlist, or a file in another
format, cannot make the library open other files.
"""

import errno
import itertools
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np
from PIL import Image
from xxhash import xxh3_64

from llava_fsdp.config import AspectRatio, DataConfig
from llava_fsdp.data.images.broken_images import video_ends_early
from llava_fsdp.data.images.check import MAX_PIXELS, ImageFacts, with_file
from llava_fsdp.data.images.video_limits import check_mov
from llava_fsdp.data.images.work_limits import TooMuchWork
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import VIDEO_FORMATS
from llava_fsdp.runtime.errors import ImageError

BLOCK = 1 << 20
"""Number of bytes that are read at once for a checksum."""


MOST_PIXELS = 1 << 30
"""Greatest number of pixels in all used frames of a video together, where they are not resized when they are read."""


class FrameChoice(Protocol):
    """Selects the frames of a video that are used. The text of it changes with its rule."""

    keeps_size: ClassVar[bool]
    """Whether frames are not resized when they are read. The size of the frames as they are shown is then needed, and
    limited."""

    def numbers(self, frames: int, rate: float) -> list[int]:
        """Return the numbers, from 0, of the used frames of a video of `frames` frames, ascending; `rate` is its frames
        per second. Raise NoFrameError if no frame can be chosen."""
        ...


@dataclass(frozen=True)
class VideoSampling:
    """Selects the frames of a video that LLaVA-OneVision uses."""

    fps: float = 1.0
    """`data.video_fps`: number of frames that are used of each second."""
    frames: int = 32
    """`data.video_frames`: greatest number of frames that are used."""
    keeps_size: ClassVar[bool] = False

    @classmethod
    def of_config(cls, cfg: DataConfig) -> "VideoSampling | None":
        """Return the rule of a configuration; None if videos are not read: only anyres_max takes them."""
        is_read = cfg.trained_aspect is AspectRatio.anyres_max
        return cls.of_limits(cfg.video_fps, cfg.video_frames) if is_read else None

    @classmethod
    def of_limits(cls, fps: float | None, frames: int | None) -> "VideoSampling":
        """Return the rule for values of `data.video_fps` and `data.video_frames`; None: LLaVA-NeXT's value."""
        return cls(cls.fps if fps is None else fps, cls.frames if frames is None else frames)

    def numbers(self, frames: int, rate: float) -> list[int]:
        """Return the numbers, from 0, of the used frames of a video of `frames` frames, `rate` a second; ascending."""
        spaced = range(0, frames, max(1, round(rate / self.fps)))
        if len(spaced) <= self.frames:
            return list(spaced)
        return np.linspace(0, frames - 1, self.frames, dtype=int).tolist()


@dataclass(frozen=True)
class GivenFrames:
    """Selects frames that were chosen before."""

    given: Sequence[int]
    keeps_size: ClassVar[bool] = True

    def numbers(self, frames: int, rate: float) -> list[int]:
        return list(self.given)


@dataclass(frozen=True)
class Timeline:
    """Times of the frames of a video, read from its packets without decoding."""

    times: np.ndarray
    """Time of each frame in ascending order, int64 [frames], in units of the stream's time base."""
    keys: np.ndarray
    """Times of the key frames in ascending order, int64 [key frames]. Decoding can begin at each of them."""
    seeks: np.ndarray
    """For each key frame, the time to seek to in the file (the frame's decoding time), int64 [key frames]."""
    rate: float
    """Frames per second."""

    def key_before(self, time: int) -> int:
        """Return the index of the last key frame at or before a time; 0 for a time before all key frames."""
        return max(0, int(np.searchsorted(self.keys, time, side="right")) - 1)


class NoFrameError(Exception):
    """Frames of a video file cannot be decoded, or it has none."""


def examine_video(path: Path, where: str, sampling: FrameChoice, full: bool) -> ImageFacts:
    """Check that a video can be read, and return its number of frames, its frames per second, the size of its frames,
    and with `full` its checksum.

    Args:
        where: names the record in errors.
        sampling: chooses the used frames. With `sampling.keeps_size`, the model gets frames in the video's own size, so
            their size is returned as a player shows them, after rotation, and may not be too large; else as stored.
        full: whether to decode the used frames. If false, none is decoded; with `sampling.keeps_size` the first one is.

    Raises:
        ImageError: the video cannot be read, or PyAV is not installed; its `kind` says why.
    """

    def read(file: BinaryIO) -> ImageFacts:
        """Examine the open file, as the arguments `sampling` and `full` say."""
        with opening(file, path, where) as (container, stream):
            width, height = stream.codec_context.width, stream.codec_context.height
            timeline = read_timeline(container, stream)
            count = len(timeline.times)
            numbers = sampling.numbers(count, timeline.rate) if full or sampling.keeps_size else []
            if sampling.keeps_size:
                check_work(len(numbers), width, height, path, where)
            for frame in decoded(container, stream, timeline, numbers if full else numbers[:1]):
                if sampling.keeps_size and frame.rotation % 180:
                    width, height = frame.height, frame.width
            facts = ImageFacts(width, height, stored_height=height, frames=count, rate=timeline.rate)
        return replace(facts, digest=digest_of(file)) if full else facts

    return with_file(path, f"{where}: video {path}", read)


def read_frames(path: Path, where: str, choose: Callable[[int, float], Sequence[int]]) -> list[Image.Image]:
    """Return frames of a video as RGB images, rotated as a video player shows them.

    Args:
        choose: function (number of the video's frames, frames per second) -> numbers of the frames to read, ascending.

    Raises:
        ImageError: the video cannot be read, or PyAV is not installed; its `kind` says why.
    """

    def read(file: BinaryIO) -> list[Image.Image]:
        with opening(file, path, where) as (container, stream):
            timeline = read_timeline(container, stream)
            numbers = choose(len(timeline.times), timeline.rate)
            return [shown(frame) for frame in decoded(container, stream, timeline, numbers)]

    return with_file(path, f"{where}: video {path}", read)


def stacked(frames: Sequence[Image.Image], what: str) -> np.ndarray:
    """Return the frames of a video as one array, uint8 [frames, height, width, 3]. Raise ImageError if their sizes
    differ."""
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        raise ImageError(f"{what} has frames of several sizes, {sizes}; convert it", Kind.image_unreadable)
    return np.stack([np.asarray(frame) for frame in frames])


def video_digest(path: Path, where: str) -> int:
    """Return the xxh3 checksum of a video file's bytes; raise ImageError if it cannot be read."""
    return with_file(path, f"{where}: video {path}", digest_of)


def digest_of(file: BinaryIO) -> int:
    """Return the xxh3 checksum of the bytes of an open file."""
    file.seek(0)
    digest = xxh3_64()
    for block in iter(partial(file.read, BLOCK), b""):
        digest.update(block)
    return digest.intdigest()


@contextmanager
def opening(file: BinaryIO, path: Path, where: str) -> Iterator[tuple[Any, Any]]:
    """Context manager that opens a video file as PyAV's (container, video stream), which decodes in one thread. Errors
    of PyAV in the `with` block become ImageErrors."""
    try:
        import av
        import av.error
    except ImportError as error:
        raise ImageError(
            f"{where}: video {path} is not read without PyAV: pip install 'llava-fsdp[video]'", Kind.media_not_read
        ) from error
    size, form = os.fstat(file.fileno()).st_size, VIDEO_FORMATS[path.suffix.lower()]
    if not size:
        raise ImageError(f"{where}: video {path} is empty (0 bytes); take it from its source again", Kind.image_empty)
    try:
        if form == "mov":
            check_mov(file, size)
    except TooMuchWork as error:
        raise ImageError(
            f"{where}: video {path} would take too much time or memory: {error}; convert it, or take it out",
            Kind.image_bomb,
        ) from error
    if video_ends_early(file, form, size):
        raise ImageError(
            f"{where}: video {path} is truncated after {size} bytes; take it from its source again",
            Kind.image_truncated,
        )
    file.seek(0)
    try:
        # `io_open=refuse`: a video may not make FFmpeg open other files
        with av.open(file, format=form, io_open=refuse, metadata_errors="replace") as container:
            stream = next((s for s in container.streams.video if not s.disposition & s.disposition.attached_pic), None)
            if stream is None:
                raise NoFrameError("it holds no video")
            decoder = stream.codec_context
            check_frame(decoder.width, decoder.height, path, where)
            decoder.thread_count, decoder.thread_type, decoder.options = 1, "NONE", {"max_pixels": str(2 * MAX_PIXELS)}
            yield container, stream
    except (av.error.FFmpegError, NoFrameError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError(
            f"{where}: video {path} cannot be read as {form}: {reason}; take it from its source again, or convert it",
            Kind.image_unreadable,
        ) from error


def refuse(name: str, *_: object) -> BinaryIO:
    raise PermissionError(errno.EACCES, "a video may not open other files", name)


def check_frame(width: int, height: int, path: Path, where: str) -> None:
    """Raise ImageError if the frames of a video have more than MAX_PIXELS."""
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{where}: video {path} has frames of {width} x {height} pixels, over the limit of {MAX_PIXELS}; make it "
            "smaller",
            Kind.image_bomb,
        )


def check_work(frames: int, width: int, height: int, path: Path, where: str) -> None:
    """Raise ImageError if the used frames of a video would take too much memory."""
    if frames * width * height > MOST_PIXELS:
        raise ImageError(
            f"{where}: {frames} frames of video {path} are used, of {width} x {height} pixels; together they have more "
            f"than {MOST_PIXELS} pixels: set data.video_fps or data.video_frames to less, or make the video smaller",
            Kind.image_bomb,
        )


def read_timeline(container: Any, stream: Any) -> Timeline:
    """Read the times of the frames from the packets of a stream, without decoding them. Raise NoFrameError if there is
    no key frame, or if the packets have far more bytes than the file."""
    # `keys`: of each key frame its time, and the time to seek to (its decoding time); `left`: bytes that packets may
    # have
    found, keys, left = array("q"), list[tuple[int, int]](), 2 * container.size + BLOCK
    for packet in container.demux(stream):  # one at a time: together, packets may be larger than their file
        left -= packet.size
        if left < 0:
            raise NoFrameError("its frames together have more than twice the bytes of the file")
        time = time_of(packet)
        if packet.size and not packet.is_discard and time is not None:
            found.append(time)
            if packet.is_keyframe:
                keys.append((time, time if packet.dts is None else packet.dts))
    keys.sort()
    if not keys:
        raise NoFrameError("it holds no frame")
    times = np.sort(np.array(found, dtype=np.int64))
    seconds = float((times[-1] - times[0]) * stream.time_base)
    rate = float(stream.average_rate or 0) or ((len(times) - 1) / seconds if seconds else 1.0)
    key_times, seeks = np.array(keys, dtype=np.int64).T
    return Timeline(times, key_times, seeks, rate)


def time_of(timed: Any) -> Any:
    """Return the presentation time of a packet or frame of PyAV, an integer in units of its time base; if it is
    missing, its decoding time, or None."""
    return timed.dts if timed.pts is None else timed.pts


def decoded(container: Any, stream: Any, timeline: Timeline, numbers: Sequence[int]) -> Iterator[Any]:
    """Yield the frames with the given numbers, which ascend.

    Decoding continues behind the frame that was yielded last. If the next frame is at or behind a later key frame than
    that at which decoding began last, it begins anew at this key frame, so that fewer frames are decoded. If the
    decoder gives no frame at the time of a packet, the last frame before it is yielded.
    """
    frames: Iterator[Any] = iter(())
    # index of the key frame at which decoding began last; the last frame at or before the time; the one after it
    at, now, ahead = -1, None, None
    for time in timeline.times[list(numbers)].tolist():
        key = timeline.key_before(time)
        if key > at:
            frames, at, now, ahead = frames_from(container, stream, timeline, key), key, None, None
        while now is None or time_of(now) < time:
            ahead = ahead or next(frames, None)
            if ahead is None or (now is not None and time_of(ahead) > time):
                break
            now, ahead = ahead, None
        if now is None:
            raise NoFrameError("its frames cannot be decoded")
        if now.is_corrupt:
            raise NoFrameError("a frame of it is damaged")
        yield now


def frames_from(container: Any, stream: Any, timeline: Timeline, key: int) -> Iterator[Any]:
    """Yield the frames from the key frame with index `key` on. If seeking to it fails, begin at the first one."""
    for place in (key, 0):
        container.seek(int(timeline.seeks[place]), stream=stream)
        packets = container.demux(stream)
        first = next((packet for packet in packets if packet.is_keyframe and packet.size), None)
        if first is not None and (time_of(first) or 0) <= timeline.keys[key]:
            break
    else:
        raise NoFrameError("its first key frame is not found again")
    for packet in itertools.chain([first], packets):
        yield from (frame for frame in packet.decode() if time_of(frame) is not None)


def shown(frame: Any) -> Image.Image:
    """Return a frame as an RGB image, rotated by the multiple of 90 degrees that the file names, as a video player
    shows it."""
    return frame.to_image(threads=1).rotate(frame.rotation, expand=True)
