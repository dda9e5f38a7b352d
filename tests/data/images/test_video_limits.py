"""Videos whose tables claim far more than the file has are refused before they take time or memory."""

import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from videos import write_video

from llava_fsdp.data.images.video import VideoSampling, examine_video
from llava_fsdp.data.images.video_limits import check_mov
from llava_fsdp.data.images.work_limits import TooMuchWork
from llava_fsdp.data.problems import Kind
from llava_fsdp.runtime.errors import ImageError


def box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def changed(video: bytes, kind: bytes, at: int, *numbers: int) -> bytes:
    """The video with other 32-bit numbers in a table, at an offset behind the table's type."""
    place, whole = video.index(kind) + 4 + at, bytearray(video)
    struct.pack_into(f">{len(numbers)}I", whole, place, *numbers)
    return bytes(whole)


def behind(video: bytes, *boxes: bytes) -> bytes:
    return video + b"".join(boxes)


def fragment(count: int) -> bytes:
    run = box(b"trun", bytes(4), struct.pack(">I", count))
    return box(b"moof", box(b"mfhd", bytes(8)), box(b"traf", box(b"tfhd", bytes(4), struct.pack(">I", 1)), run))


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "frames of one size": lambda video: changed(video, b"stsz", 4, 1, 2_000_000_000),
    "a fragment": lambda video: behind(video, fragment(200_000_000)),
    "fragments": lambda video: behind(video, *[fragment(100_000)] * 200),
    "edits": lambda video: changed(video, b"elst", 4, 3_000_000),
    "boxes": lambda video: behind(video, box(b"free") * 500_000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tables_that_claim_too_much(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, 24, 10)
    path.write_bytes(HOSTILE[case](path.read_bytes()))
    began = time.process_time()
    with pytest.raises(ImageError, match="too much time or memory") as caught:
        examine_video(path, "x", VideoSampling(), full=True)
    assert caught.value.kind is Kind.image_bomb and time.process_time() - began < 5


def test_frames_that_share_their_bytes(tmp_path: Path) -> None:
    """Ten thousand chunks of one frame each at the same place, which was read and kept for each of them: 10 GB."""
    path, count, size = tmp_path / "a.mp4", 10_000, 1_000_000
    write_video(path, 24, 10)
    video = path.read_bytes()
    at = video.index(b"stco") - 4
    old = struct.unpack_from(">I", video, at)[0]
    place = struct.unpack_from(">I", video, at + 16)[0]
    table = box(b"stco", bytes(4), struct.pack(">I", count), struct.pack(">I", place) * count)
    grown = bytearray(video[:at] + table + video[at + old :])
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        begin = grown.index(kind) - 4
        struct.pack_into(">I", grown, begin, struct.unpack_from(">I", grown, begin)[0] + len(table) - old)
    hostile = changed(bytes(grown), b"stsz", 4, size, count)
    hostile = changed(hostile, b"stsc", 4, 1, 1, 1, 1)
    hostile = changed(hostile, b"stts", 4, 1, count, 1)
    path.write_bytes(hostile + box(b"free", bytes(2 * size)))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ImageError, match="more than twice the bytes of the file"):
        examine_video(path, "x", VideoSampling(), full=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert time.process_time() - began < 5


def test_sound_tables_pass(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, 24, 10)
    video = path.read_bytes()
    path.write_bytes(behind(video, *[fragment(100)] * 1000))
    with open(path, "rb") as file:
        check_mov(file, path.stat().st_size)
    for cut in range(0, len(video), 37):
        path.write_bytes(video[:cut])
        with open(path, "rb") as file:
            check_mov(file, cut)
    path.write_bytes(changed(video, b"stsz", 4, 0, 10_000_001))
    with open(path, "rb") as file, pytest.raises(TooMuchWork):
        check_mov(file, len(video))
