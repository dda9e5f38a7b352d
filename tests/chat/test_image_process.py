"""Images of the page are read in another process: the same tiles and errors, within limits, and an end at any time."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llava_fsdp.chat import image_process
from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.image_process import ImageProcess
from llava_fsdp.config import AspectRatio
from llava_fsdp.data.problems import Kind
from llava_fsdp.runtime.errors import ImageError


@pytest.fixture(scope="module")
def assistant(noise: Path) -> Assistant:
    return Assistant(str(noise), "v1", AspectRatio.pad)


def test_tiles_and_errors_are_those_of_the_reader(assistant: Assistant, dataset: Path, tmp_path: Path) -> None:
    reader = assistant.reader
    (tmp_path / "text.jpg").write_text("no image")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (301, 77, 4), np.uint8)).save(tmp_path / "a b ü.png")
    tiled = replace(reader, tokens=replace(reader.tokens, aspect=AspectRatio.anyres))
    process = ImageProcess(reader)
    for path in (dataset / "images" / "0.jpg", dataset / "images" / "1.png", tmp_path / "a b ü.png"):
        tiles, size = process.load(path, "x", 1)
        assert np.array_equal(tiles, reader.load(path, "x", 1)) and size is None and tiles.flags.writeable
    for path in (tmp_path / "text.jpg", tmp_path / "none.jpg"):
        with pytest.raises(ImageError) as ours:
            reader.load(path, "where", 1)
        with pytest.raises(ImageError) as theirs:
            process.load(path, "where", 1)
        assert (str(theirs.value), theirs.value.kind) == (str(ours.value), ours.value.kind)
    assert tiled.tokens.needs_size(1)
    tiles, size = ImageProcess(tiled).load(tmp_path / "a b ü.png", "x", 1)
    assert np.array_equal(tiles, tiled.load(tmp_path / "a b ü.png", "x", 1)) and size == (77, 301)


@pytest.mark.slow
def test_an_image_over_the_limit_is_refused_by_name(
    assistant: Assistant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_process, "MOST_MIB", 64)
    Image.new("RGB", (6000, 7000)).save(tmp_path / "large.png")
    Image.new("RGB", (60, 70)).save(tmp_path / "small.png")
    process = ImageProcess(assistant.reader)
    for _ in range(2):
        process.load(tmp_path / "small.png", "x", 1)
        with pytest.raises(ImageError, match=r"large\.png .*64 MiB") as caught:
            process.load(tmp_path / "large.png", "x", 1)
        assert caught.value.kind is Kind.image_bomb


def test_it_is_stopped_while_it_reads(assistant: Assistant, tmp_path: Path) -> None:
    """As SIGTERM does, from another thread than the one that waits for the image."""
    (tmp_path / "slow.gif").write_bytes(slow_gif())
    process = ImageProcess(assistant.reader)
    process.start()
    threading.Timer(0.2, process.stop).start()
    began = time.monotonic()
    with pytest.raises(ImageError):
        for _ in range(1000):
            process.load(tmp_path / "slow.gif", "x", 1)
    assert time.monotonic() - began < 10
    with pytest.raises(ImageError, match="the program ends"):
        process.load(tmp_path / "slow.gif", "x", 1)


def slow_gif() -> bytes:
    """A sound image with a comment in 60,000 blocks, which Pillow joins one by one."""
    head = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff"
    return head + b"!\xfe" + b"\x08aaaaaaaa" * 60_000 + b"\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
