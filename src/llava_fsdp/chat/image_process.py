"""Read the images of a conversation in a process with limits on time and memory, so that an image of unknown origin
cannot hold up the page that shows it to a model."""

import base64
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.check import ImageFacts, read_size
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.images.video import GivenFrames, examine_video, read_frames, stacked
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import is_video
from llava_fsdp.runtime.errors import ImageError
from llava_fsdp.runtime.process.limited_process import Answer, LimitBroken, LimitedProcess, Work

MOST_SECONDS = 5
"""Processor time that reading an image or video may take."""
MOST_MIB = 512
"""MiB of memory that this may take: enough for a photograph of 50 million pixels. With transparency an image is copied
several times, and may have 15 to 30 million pixels, as its format decides."""


class ImageProcess:
    """Reads images and videos as `ImageSource.load` does, in another process."""

    def __init__(self, reader: ImageSource):
        self.process = LimitedProcess(make_work, MOST_SECONDS, MOST_MIB)
        self._reader = base64.b64encode(pickle.dumps(reader)).decode()  # only this program's own objects

    def start(self) -> None:
        """Start the process now, instead of with the first image."""
        self.process.start()

    def stop(self) -> None:
        """End the process, also while it reads; may be called in a signal handler."""
        self.process.stop()

    def examine(self, path: Path, where: str) -> ImageFacts:
        """Return the facts about a video file. Raises ImageError as `load` does."""
        answer, _ = self.ask({"path": str(path), "where": where, "frames": []})
        return ImageFacts(**answer["facts"])

    def frames(self, path: Path, where: str, numbers: Sequence[int]) -> np.ndarray:
        """Return the frames `numbers` (ascending) of a video, uint8 [frames, height, width, 3]. Error messages begin
        with `where`. Raises ImageError if the file cannot be read, or takes too much time or memory."""
        answer, content = self.ask({"path": str(path), "where": where, "frames": list(numbers)})
        return np.frombuffer(content, dtype=np.uint8).reshape(answer["shape"]).copy()

    def load(self, path: Path, where: str, images: int) -> tuple[np.ndarray, Size | None]:
        """Return an image or video as `ImageSource.load` does, and the size in pixels of an image if the number of its
        tokens depends on it. Error messages begin with `where`; `images` is the number of images of
        the conversation. Raises ImageError if the file cannot be read, or takes too much time or memory."""
        answer, content = self.ask({"reader": self._reader, "path": str(path), "where": where, "images": images})
        tiles = np.frombuffer(content, dtype=np.uint8).reshape(answer["shape"]).copy()
        return tiles, None if answer["size"] is None else tuple(answer["size"])

    def ask(self, request: dict[str, Any]) -> Answer:
        """Send a request to the other process, and return its answer: a dict of facts, and bytes. Raises ImageError if
        the file cannot be read, or takes too much time or memory."""
        try:
            answer, content = self.process(request)
        except LimitBroken as error:
            raise ImageError(
                f"{request['where']}: image {request['path']} would take too much time or memory: it {error}; convert "
                "it",
                Kind.image_bomb,
            ) from error
        if "error" in answer:
            raise ImageError(answer["error"], Kind(answer["kind"]))
        return answer, content


def make_work() -> Work:
    """Return the function that the other process calls for each request. It answers a request with facts as a dict, and
    pixels as bytes. If a file cannot be read, the dict has the error."""
    pickled, reader = "", None

    def work(request: dict[str, Any]) -> Answer:
        """Answer one request. If it has the key `frames`, it asks for frames of a video or, with an empty list, for the
        facts about the video. Else it asks for an image or a video as its image reader prepares it. The reader is sent
        as a pickle, and unpickled again only if it differs from that of the last request."""
        nonlocal pickled, reader
        if "frames" in request:
            return video(Path(request["path"]), request["where"], request["frames"])
        if reader is None or request["reader"] != pickled:
            pickled = request["reader"]
            reader = pickle.loads(base64.b64decode(pickled))
        path, where, images = Path(request["path"]), request["where"], request["images"]
        try:
            tiles = reader.load(path, where, images)
            needs_size = not is_video(path) and reader.needs_size(images)
            size = read_size(path, where) if needs_size else None
        except ImageError as error:
            return {"error": str(error), "kind": error.kind}, b""
        return {"shape": tiles.shape, "size": size}, tiles.tobytes()

    def video(path: Path, where: str, numbers: list[int]) -> Answer:
        """Return the frames of a video with these numbers, or without numbers the facts about the video."""
        try:
            if not numbers:
                return {"facts": asdict(examine_video(path, where, GivenFrames([0]), full=False))}, b""
            frames = stacked(read_frames(path, where, lambda *_: numbers), f"{where}: video {path}")
        except ImageError as error:
            return {"error": str(error), "kind": error.kind}, b""
        return {"shape": frames.shape}, frames.tobytes()

    return work
