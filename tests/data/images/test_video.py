"""Frames of videos: which are taken, that they are a player's, and what is refused."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from videos import CODECS, turn, write_sound, write_video

from llava_fsdp.config import AspectRatio, PatchMerge, Pixels
from llava_fsdp.data.images import video
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, Preprocessor
from llava_fsdp.data.images.thumbnails import thumbnail
from llava_fsdp.data.images.video import VideoSampling, examine_video, read_frames
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import Record
from llava_fsdp.runtime.errors import ImageError

SAMPLING = VideoSampling(2, 5)


def taken(frames: int, rate: float, fps: float, most: int) -> list[int]:
    """As LLaVA-NeXT train.py, `process_video_with_decord`, numbers them."""
    step = max(1, round(rate / fps))
    numbers = [i for i in range(0, frames, step)]
    return numbers if len(numbers) <= most else np.linspace(0, frames - 1, most, dtype=int).tolist()


def test_which_frames_are_taken() -> None:
    dice = random.Random(0)
    for _ in range(500):
        frames, rate = dice.randrange(1, 3000), dice.choice([0.2, 1, 23.976, 25, 29.97, 60, dice.random() * 90])
        fps, most = dice.choice([0.25, 1, 3]), dice.randrange(1, 65)
        found = VideoSampling(fps, most).numbers(frames, rate)
        assert found == taken(frames, rate, fps, most) and len(found) <= most
    assert VideoSampling(1, 4).numbers(100, 30) == [0, 30, 60, 90]
    assert VideoSampling(1, 3).numbers(100, 30) == [0, 49, 99]
    assert VideoSampling().numbers(1, 30) == [0] and VideoSampling().numbers(0, 0.0) == []


@pytest.mark.parametrize(("name", "codec"), CODECS.items())
def test_frames_are_those_of_a_whole_decoding(name: str, codec: str, tmp_path: Path) -> None:
    """For any numbers, whatever key frames they lie between, and the same on every read."""
    path, dice = tmp_path / name, random.Random(0)
    write_video(path, 24, 10, codec=codec)
    with av.open(str(path)) as file:
        whole = [np.asarray(frame.to_image()) for frame in file.decode(video=0)]
    facts = examine_video(path, "here", SAMPLING, full=True)
    assert (facts.frames, facts.rate, facts.size) == (len(whole), 10, (48, 32)) and len(whole) == 24
    assert facts.digest == video.video_digest(path, "here")
    assert len({frame.tobytes() for frame in whole}) == 24
    for count in (24, 1, 2, 3, 5, 9):
        numbers = sorted(dice.sample(range(24), count))
        for _ in range(2):
            found = read_frames(path, "here", lambda *_: numbers)  # noqa: B023
            assert [np.array_equal(f, whole[n]) for f, n in zip(found, numbers, strict=True)] == [True] * count
    assert examine_video(path, "here", SAMPLING, full=False).frames == 24


def test_a_frame_of_a_time_without_one_is_the_last_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a packet that shows nothing. Before the first frame, it is the first one."""
    write_video(tmp_path / "a.mp4", 12)
    whole = read_frames(tmp_path / "a.mp4", "here", lambda *_: range(12))

    def between(container: Any, stream: Any) -> video.Timeline:
        found = read_timeline(container, stream)
        return replace(found, times=np.array([found.times[0] - 1, found.times[3] + 1, found.times[-1] + 9]))

    read_timeline = video.read_timeline
    monkeypatch.setattr(video, "read_timeline", between)
    found = read_frames(tmp_path / "a.mp4", "here", lambda *_: [0, 1, 2])
    assert [np.array_equal(f, whole[n]) for f, n in zip(found, (0, 3, 11), strict=True)] == [True] * 3


def test_frames_between_are_not_decoded(tmp_path: Path) -> None:
    """Three frames of 60, with a key frame every five frames."""
    write_video(tmp_path / "a.mp4", 60)
    decoded = 0

    def counting(*args: object) -> object:
        nonlocal decoded
        for frame in frames_from(*args):  # pyright: ignore[reportArgumentType]
            decoded += 1
            yield frame

    frames_from = video.frames_from
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video, "frames_from", counting)
        read_frames(tmp_path / "a.mp4", "here", lambda *_: [0, 30, 59])
    assert 3 <= decoded <= 15


def test_a_frame_is_turned_as_a_player_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_video(path)
    before = read_frames(path, "here", lambda *_: [3])[0]
    turn(path)
    after = read_frames(path, "here", lambda *_: [3])[0]
    assert after.size == (32, 48)
    assert np.array_equal(after, before.transpose(Image.Transpose.ROTATE_270))


def test_a_frame_is_squeezed_to_the_tile(tmp_path: Path) -> None:
    """Also by a vision tower that crops images; of one frame in two seconds, and of one frame in all."""
    rule = ImageTokens(AspectRatio.anyres_max, 28, 4, ((28, 28),), PatchMerge.spatial_unpad)
    own = Preprocessor(28, True, Image.Resampling.NEAREST, (0.5,) * 3, (0.5,) * 3)
    reader = ImageReader(None, own, rule, Pixels.exact, VideoSampling(0.5, 9))
    for frames, numbers in ((24, [0, 20]), (1, [0])):
        write_video(tmp_path / "a.mp4", frames)
        tiles = reader.load(tmp_path / "a.mp4", "here")
        expected = [
            f.resize((28, 28), Image.Resampling.BICUBIC)
            for f in read_frames(
                tmp_path / "a.mp4",
                "here",
                lambda *_: numbers,  # noqa: B023
            )
        ]
        assert torch.equal(torch.from_numpy(tiles).permute(0, 2, 3, 1), torch.tensor(np.stack(expected)))
        assert reader.frames_of(tmp_path / "a.mp4", "here") == len(numbers)


def test_another_number_of_frames_than_was_counted_is_refused(tmp_path: Path) -> None:
    """Of the video that is read, also if another image of the record comes before it."""
    write_video(tmp_path / "a.mp4", 24)
    rule = ImageTokens(AspectRatio.anyres_max, 28, 4, ((28, 28),), PatchMerge.spatial_unpad)
    own = Preprocessor(28, True, Image.Resampling.NEAREST, (0.5,) * 3, (0.5,) * 3)
    reader = ImageReader(tmp_path, own, rule, Pixels.exact, VideoSampling(1, 9))
    record = Record("a.json", 0, "q", ("0.jpg", "a.mp4"), (), True, sizes=((0, 0), (48, 32)))
    assert reader.tiles(replace(record, frames=((0, 0.0), (24, 10.0))), "a.mp4").shape == (3, 3, 28, 28)
    with pytest.raises(ImageError) as caught:
        reader.tiles(replace(record, frames=((0, 0.0), (44, 10.0))), "a.mp4")
    assert caught.value.kind == Kind.image_unreadable
    assert reader.has_image_facts(replace(record, sizes=((3, 3), (0, 0)), frames=((0, 0.0), (24, 10.0))))
    assert not reader.has_image_facts(replace(record, sizes=((3, 3), (0, 0)), frames=((0, 0.0), (0, 0.0))))
    assert not reader.has_image_facts(replace(record, frames=((0, 0.0), (24, 10.0)))), "the size of one image is needed"


def broken(kind: str, folder: Path) -> Path:
    path = folder / ("a.avi" if kind == "avi cut" else "a.mkv" if kind == "mkv cut" else "a.MP4")
    whole = folder / f"whole{path.suffix.lower()}"
    write_video(whole, size=(96, 96))
    data = whole.read_bytes()
    made = {
        "text": b"this is no video\n" * 99, "empty": b"", "cut": data[: len(data) // 2],
        "cut early": data[:30], "avi cut": data[: len(data) * 3 // 4], "mkv cut": data[: len(data) // 2],
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nwhole.mp4\n#EXT-X-ENDLIST\n",
        "concat": b"ffconcat version 1.0\nfile whole.mp4\n",
        "another format": (folder / "whole.mkv").read_bytes() if (folder / "whole.mkv").is_file() else b"",
        "damaged": data[:2044] + bytes(3000) + data[5044:],
    }  # fmt: skip
    if kind == "folder":
        path.mkdir()
    elif kind == "sound":
        write_sound(folder / "sound.mp4")
        (folder / "sound.mp4").rename(path)
    elif kind != "missing":
        path.write_bytes(made[kind])
    return path


FAULTS = {
    "missing": Kind.image_missing, "empty": Kind.image_empty, "cut": Kind.image_truncated,
    "cut early": Kind.image_truncated, "avi cut": Kind.image_truncated, "mkv cut": Kind.image_truncated,
    "text": Kind.image_unreadable, "playlist": Kind.image_unreadable, "concat": Kind.image_unreadable,
    "another format": Kind.image_unreadable, "sound": Kind.image_unreadable, "folder": Kind.image_unreadable,
    "damaged": Kind.image_unreadable,
}  # fmt: skip


@pytest.mark.parametrize(("fault", "kind"), FAULTS.items())
def test_what_is_refused(fault: str, kind: Kind, tmp_path: Path) -> None:
    if fault == "another format":
        write_video(tmp_path / "whole.mkv")
    path = broken(fault, tmp_path)
    with pytest.raises(ImageError) as reading:
        read_frames(path, "here", SAMPLING.numbers)
    assert reading.value.kind == kind and str(path) in str(reading.value)
    with pytest.raises(ImageError) as examining:
        examine_video(path, "here", SAMPLING, full=True)
    assert examining.value.kind == kind
    assert thumbnail(str(path)) is None or fault == "damaged", "a later frame is"


def test_a_frame_of_too_many_pixels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4", size=(48, 32))
    monkeypatch.setattr(video, "MAX_PIXELS", 48 * 32)
    examine_video(tmp_path / "a.mp4", "here", SAMPLING, full=False)
    monkeypatch.setattr(video, "MAX_PIXELS", 48 * 32 - 1)
    with pytest.raises(ImageError) as raised:
        examine_video(tmp_path / "a.mp4", "here", SAMPLING, full=False)
    assert raised.value.kind == Kind.image_bomb


def test_without_pyav_and_without_onevision_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4")
    assert str(thumbnail(str(tmp_path / "a.mp4"))).startswith("data:image/jpeg")
    reader = ImageReader(None, Preprocessor(28, False, Image.Resampling.BICUBIC, (0.5,) * 3, (0.5,) * 3),
                         ImageTokens(AspectRatio.pad, 28, 4), Pixels.exact)  # fmt: skip
    with pytest.raises(ImageError, match="=anyres_max") as refused:
        reader.load(tmp_path / "a.mp4", "here")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImageError, match=r"llava-fsdp\[video\]") as missing:
        read_frames(tmp_path / "a.mp4", "here", SAMPLING.numbers)
    assert refused.value.kind == missing.value.kind == Kind.media_not_read
