"""Places name what they are, and reads of them give exactly the bytes or one typed error."""

import contextlib
import os
from pathlib import Path

import pyarrow
import pytest

from llava_fsdp.data.containers import read_image as module
from llava_fsdp.data.containers.file_reader import LocalFile
from llava_fsdp.data.containers.location import ImageLocation, Page
from llava_fsdp.data.containers.read_image import PageCache, read_image
from llava_fsdp.data.problems import Kind
from llava_fsdp.runtime.errors import ImageError, SourceError

CONTENT = bytes(range(256)) * 5


@pytest.fixture
def file(tmp_path: Path) -> LocalFile:
    path = tmp_path / "a.bin"
    path.write_bytes(CONTENT)
    return LocalFile(path)


def packed(codec: str, content: bytes) -> bytes:
    return pyarrow.Codec(codec.lower()).compress(content, asbytes=True)


def test_ranges_of_a_local_file(file: LocalFile) -> None:
    pages = PageCache()
    assert read_image(file, ImageLocation(file.name), pages) == CONTENT
    for offset, size in ((0, 0), (0, 1), (255, 3), (1279, 1), (1280, 0)):
        assert read_image(file, ImageLocation(file.name, offset, size), pages) == CONTENT[offset : offset + size]
    for offset, size in ((1280, 1), (1, 1280), (1 << 60, 1)):
        with pytest.raises(SourceError, match=r"a\.bin"):
            read_image(file, ImageLocation(file.name, offset, size), pages)
    assert str(ImageLocation("x/y.jpg")) == "x/y.jpg"
    assert "byte 7" in str(ImageLocation("x.tar", 7, 3))
    assert "byte 99" in str(ImageLocation("x.parquet", 7, 3, Page(99, 5, "ZSTD", 10)))


def test_a_file_that_shrank(file: LocalFile) -> None:
    os.truncate(file.name, 100)
    assert file.read(0, 100) == CONTENT[:100]
    with pytest.raises(SourceError):
        read_image(file, ImageLocation(file.name), PageCache())


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent"):
        with pytest.raises(SourceError, match=path.name):
            LocalFile(path)


def test_an_image_larger_than_the_limit(file: LocalFile) -> None:
    os.truncate(file.name, 1 << 33)  # of holes
    with LocalFile(file.name) as large, pytest.raises(ImageError) as error:
        read_image(large, ImageLocation(file.name), PageCache())
    assert error.value.kind == Kind.image_bomb


class Counted:
    """A reader that counts the reads."""

    name = "memory"

    def __init__(self, data: bytes):
        self.data, self.size, self.reads = data, len(data), 0

    def read(self, offset: int, size: int, /) -> bytes:
        self.reads += 1
        return self.data[offset : offset + size]


@pytest.mark.parametrize("codec", ["SNAPPY", "ZSTD"])
def test_pages_are_kept_within_a_bound(codec: str) -> None:
    contents = [bytes([n]) * 999 + bytes(range(n)) for n in range(5)]
    data, places = b"", []
    for content in contents:
        body = packed(codec, content)
        page = Page(len(data), len(body), codec, len(content))
        places.append(ImageLocation("memory", 998, len(content) - 998, page))
        data += body
    shard, cache = Counted(data), PageCache(3100)
    order = [0, 0, 1, 2, 0, 3, 0, 1, 4]
    for number in order:
        assert read_image(shard, places[number], cache) == contents[number][998:]
        assert cache.size == sum(map(len, cache.pages.values())) <= 3100
    assert shard.reads == 6, "0 was used again in time, 1 was dropped for 3"
    small = PageCache(998)
    assert read_image(shard, places[0], small) == contents[0][998:]
    assert not small.pages and small.size == 0


@pytest.mark.parametrize("codec", ["SNAPPY", "ZSTD"])
def test_damaged_pages(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(500) + bytes(500)
    body = packed(codec, content)
    shard = Counted(body)
    for page in (
        Page(0, len(body), codec, 999),
        Page(0, len(body), codec, 1001),
        Page(0, len(body), codec, 1 << 40),
        Page(0, len(body) - 1, codec, 1000),
        Page(1, len(body) - 1, codec, 1000),
        Page(0, 0, codec, 1000),
    ):
        with pytest.raises(ImageError) as error:
            read_image(shard, ImageLocation("memory", 0, 10, page), PageCache())
        assert error.value.kind == Kind.image_unreadable
    whole = Page(0, len(body), codec, 1000)
    assert read_image(shard, ImageLocation("memory", 990, 10, whole), PageCache()) == bytes(10)
    with pytest.raises(SourceError):
        read_image(shard, ImageLocation("memory", 991, 10, whole), PageCache())
    with pytest.raises(SourceError):
        read_image(shard, ImageLocation("memory", 0, 10, Page(1, len(body), codec, 1000)), PageCache())
    monkeypatch.setattr(module, "MOST_BYTES", 999)
    with pytest.raises(ImageError):
        read_image(shard, ImageLocation("memory", 0, 10, whole), PageCache())


@pytest.mark.parametrize("codec", ["SNAPPY", "ZSTD"])
def test_the_best_compression_is_within_its_bound(codec: str) -> None:
    content = bytes(1 << 24)
    body = packed(codec, content)
    page = Page(0, len(body), codec, len(content))
    assert read_image(Counted(body), ImageLocation("memory", 5, 100, page), PageCache()) == bytes(100)
    with pytest.raises(module.DamagedPage):
        module.check_page(Page(0, 10, codec, 1 << 29))


@pytest.mark.parametrize("codec", ["SNAPPY", "ZSTD"])
def test_a_page_of_nothing_is_empty(codec: str) -> None:
    """Writers may leave out the bytes of a page without values; both methods need some even for nothing."""
    found = None
    with contextlib.suppress(module.DamagedPage):
        found = module.unpack(Page(0, 0, codec, 0), b"")
    assert found == b""
