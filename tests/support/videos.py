"""Small videos, and a dataset of text, images and videos."""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image
from small import write_json
from tiled import write_pictures

CODECS = {
    "a.mp4": "mpeg4",
    "a.m4v": "mpeg4",
    "b.mov": "libx264",
    "b.mkv": "libx264",
    "a.avi": "mpeg4",
    "c.webm": "libvpx",
}
"""Names of video files, and codecs for them. Frames of mpeg4 and libx264 are not stored in the order they are shown."""


def write_video(
    path: Path, frames: int = 24, rate: int = 10, size: tuple[int, int] = (48, 32), codec: str = "", key_every: int = 5
) -> None:
    """Write a video in which a bright square moves; every frame differs from the others."""
    with av.open(str(path), "w", format="mp4" if path.suffix == ".m4v" else None) as file:
        codec = codec or {".webm": "libvpx", ".mkv": "libx264"}.get(path.suffix, "mpeg4")
        stream: Any = file.add_stream(codec, rate=rate, options={} if codec == "libvpx" else {"bf": "2"})
        stream.width, stream.height = size
        stream.pix_fmt, stream.gop_size, stream.codec_context.thread_count = "yuv420p", key_every, 1
        for number in range(frames):
            picture = np.full((size[1], size[0], 3), (number * 37 % 200, 60, number * 11 % 250), dtype=np.uint8)
            picture[number % size[1] : number % size[1] + 9, :15] = 250
            file.mux(stream.encode(av.VideoFrame.from_image(Image.fromarray(picture))))
        file.mux(stream.encode(None))


def write_sound(path: Path) -> None:
    """Write a file that has sound and no video."""
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("aac", rate=44100, layout="mono")
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        silence.sample_rate = 44100
        file.mux(stream.encode(silence))
        file.mux(stream.encode(None))


def turn(path: Path) -> None:
    """Change an MP4 file so that players turn its frames by 90 degrees clockwise."""
    data = path.read_bytes()
    begin = data.index(b"tkhd") + 4 + 40  # version 0: the matrix of nine numbers of 32 bits, 16.16 or 2.30
    upright = b"".join(n.to_bytes(4, "big") for n in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
    assert data[begin : begin + 36] == upright
    turned = b"".join((n % 2**32).to_bytes(4, "big") for n in (0, 1 << 16, 0, -1 << 16, 0, 0, 32 << 16, 0, 1 << 30))
    path.write_bytes(data[:begin] + turned + data[begin + 36 :])


def write_mixed(folder: Path, times: int = 1) -> Path:
    """Write a dataset: a picture of several tiles, one of a single pixel, two in a sample, a text; a video alone, one
    beside a picture, two videos of different lengths, one beside two pictures, and two texts. All of it so many
    times."""
    write_pictures(folder)
    write_video(folder / "images" / "long.mp4", 24, 8)
    write_video(folder / "images" / "short.webm", 7, 5, (32, 48))
    asked: list[tuple[dict[str, Any], str]] = [
        ({"video": "long.mp4"}, "<image>\nwhat is left"),
        ({"image": "wide.png", "video": "short.webm"}, "is <video> right of <image>"),
        ({"video": ["short.webm", "long.mp4"]}, "<video> is <video>"),
        ({"image": ["high.png", "long.mp4", "dot.png"]}, "<image> the <image> <image>"),
        ({}, "how many"),
        ({}, "the small circle"),
    ]
    records = json.loads((folder / "mixed.json").read_text())
    for keys, text in asked:
        turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "the blue square is small"}]
        records.append({**keys, "conversations": turns})
    write_json(folder / "mixed.json", [record | {"id": str(n)} for n, record in enumerate(records * times)])
    return folder
