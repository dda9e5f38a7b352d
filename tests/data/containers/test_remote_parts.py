"""Parts of the clients of remote storages that need no server: what an answer means, and which bytes are asked for."""

import asyncio
import logging
import os
import pickle
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from llava_fsdp.data.containers import data_files, hub_client, remote
from llava_fsdp.data.containers.data_files import BlockReader, CacheFolder, DataFiles, without_excess
from llava_fsdp.data.containers.hub_client import HubClient
from llava_fsdp.data.containers.location import ImageLocation, Page
from llava_fsdp.data.containers.object_store import GsClient, files_in_listing, s3_failure
from llava_fsdp.data.containers.range_cache import RangeCache
from llava_fsdp.data.containers.read_ahead import ReadAhead
from llava_fsdp.data.containers.remote_file import Failure, RemoteFile, check_answer, check_length, failure
from llava_fsdp.runtime.errors import RemoteAway, RemoteChanged, RemoteForbidden, RemoteGone

FILE = RemoteFile("s3://b/a.tar", 100, "etag:1")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, RemoteForbidden), (403, RemoteForbidden), (404, RemoteGone), (410, RemoteGone), (412, RemoteChanged),
     (416, RemoteChanged), (400, RemoteAway), (429, RemoteAway), (500, RemoteAway), (None, RemoteAway)],
)  # fmt: skip
def test_what_a_status_means(status: int | None, kind: type) -> None:
    found = failure(status, "Why")
    assert found.kind is kind and found.detail == ("Why" if status is None else f"HTTP {status} Why")


def test_an_answer_of_other_bytes_is_a_failure() -> None:
    check_answer(FILE, 10, 10, "bytes 0-9/100")
    check_answer(FILE, 100, 100, None)
    for length, content_range, kind in ((10, "bytes 0-9/101", RemoteChanged), (11, "bytes 0-9/100", RemoteAway),
                                        (None, "bytes 0-9/100", RemoteAway), (9, None, RemoteAway)):  # fmt: skip
        with pytest.raises(Failure) as caught:
            check_answer(FILE, 10, length, content_range)
        assert caught.value.kind is kind
    assert check_length(b"abc", 3) == b"abc"
    for size in (2, 4):
        with pytest.raises(Failure) as caught:
            check_length(b"abc", size)
        assert caught.value.kind is RemoteAway


def test_only_a_digest_names_content_alone() -> None:
    """Files of one size at different places may have the same ETag."""
    digest = [RemoteFile(name, 100, "sha256:1").content for name in ("s3://b/a", "s3://b/c")]
    other = [RemoteFile(name, 100, "etag:1").content for name in ("s3://b/a", "s3://b/c")]
    assert digest[0] == digest[1] and other[0] != other[1]
    assert RemoteFile("s3://b/a", 99, "etag:1").content != other[0]


def test_a_file_that_is_read_on_comes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "BLOCK", 10)
    content, asked = bytes(range(100)), list[tuple[int, int]]()

    def read_range(file: RemoteFile, offset: int, size: int) -> bytes:
        assert file == FILE and 0 <= offset and 0 < size and offset + size <= 100
        asked.append((offset, size))
        return content[offset : offset + size]

    storage: Any = SimpleNamespace(read_range=read_range)
    blocks = BlockReader(storage, FILE)
    for offset, size in ((0, 3), (3, 7), (8, 4), (97, 3), (91, 2), (5, 25), (29, 1), (30, 1)):
        assert blocks.read(offset, size) == content[offset : offset + size]
    assert asked == [(0, 10), (8, 10), (90, 10), (5, 25), (30, 10)]


def test_the_local_file_of_longest_ago_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MOST_OPEN", 2)
    paths = [str(tmp_path / name) for name in "abc"]
    for path in paths:
        Path(path).write_text(path)
    files = DataFiles()
    opened = [files.open(paths[n]) for n in (0, 1, 0, 2)]
    assert opened[0] is opened[2] and files.open(paths[0]) is opened[0], "used since the other"
    assert files.open(paths[2]) is opened[3]
    assert files.open(paths[1]) is not opened[1]


def test_ranges_that_are_fetched_ahead(tmp_path: Path) -> None:
    """The last byte of a file belongs to it; what is empty, or beyond its end, is not asked for."""
    page = Page(40, 20, "SNAPPY", 70)
    places = [(0, 100, None), (90, 11, None), (5, 0, None), (3, 9, page)]
    files = DataFiles({FILE.name: FILE})
    asked: list[Any] = []
    ahead = SimpleNamespace(
        forget=lambda: None, storage=SimpleNamespace(stat_files=lambda urls: {}), fetch_ahead=asked.extend
    )
    vars(files)["_ahead"] = ahead
    files.fetch_ahead(ImageLocation(FILE.name, *place) for place in places)
    assert asked == [(FILE, 0, 100), (FILE, 40, 20)]
    location = ImageLocation("s3://b/1.png", size=64)
    assert [without_excess(location, RemoteFile("s3://b/1.png", size, "")).size for size in (63, 65)] == [63, 64]


def test_files_of_the_step_before_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of images in a folder are asked for once, before they are read; and anew for the next step. The sizes
    of files of records are known."""
    asked: list[list[str]] = []
    events: list[str] = []
    urls = [f"s3://b/images/{name}.png" for name in "abc"]
    made = {url: RemoteFile(url, 9, "etag:2") for url in urls[:2]}

    def stat_files(names: Any) -> dict[str, RemoteFile | None]:
        asked.append(list(names))
        return {name: made.get(name) for name in asked[-1]}

    def refuse(url: str) -> RemoteFile:
        raise AssertionError(url)

    storage = SimpleNamespace(stat_files=stat_files, stat=refuse)
    files = DataFiles({FILE.name: FILE}, CacheFolder(Path("there"), 3))
    vars(files)["_ahead"] = SimpleNamespace(
        forget=lambda: events.append("forget"), storage=storage, read=lambda file, offset, size: b"x" * size,
        fetch_ahead=lambda ranges: events.append(" ".join(f"{file.name[-5:]}:{size}" for file, _, size in ranges)),
    )  # fmt: skip
    files.fetch_ahead([ImageLocation("local.png"), ImageLocation(FILE.name, 0, 5), *map(ImageLocation, urls[::2])])
    assert events == ["forget", "a.tar:5 a.png:9"] and asked == [urls[::2]]
    assert files.read(ImageLocation(urls[0])) == b"x" * 9 and files._files_in_remote_folders == {
        urls[0]: made[urls[0]],
        urls[2]: None,
    }
    files.fetch_ahead([ImageLocation(urls[1])])
    assert events[2:] == ["forget", "b.png:9"] and list(files._files_in_remote_folders) == [urls[1]]
    files.fetch_ahead([ImageLocation("local.png")])
    assert len(events) == 4, "nothing is asked for, and nothing forgotten"
    sent = pickle.loads(pickle.dumps(files))
    assert (sent.remote, sent.cache) == (files.remote, files.cache) and "_ahead" not in vars(sent)
    store = pickle.loads(pickle.dumps(remote.RemoteStorage(3.0, 2.0, 1)))
    assert (store.deadline, store.idle, store.in_flight) == (3.0, 2.0, 1)


def test_no_more_is_fetched_ahead_than_fits_in_memory() -> None:
    """What was begun earlier counts. A range that is read twice is kept for the second time, and what is forgotten is
    no longer waited for."""
    begun: list[tuple[Any, ...]] = []
    futures: list[Future[bytes]] = []

    def submit(function: Any, *wanted: Any) -> Future[bytes]:
        begun.append(wanted[1:])
        futures.append(Future())
        return futures[-1]

    storage: Any = SimpleNamespace(submit=submit, read_range=lambda file, offset, size: b"later")
    ahead = ReadAhead(storage, None, most_ahead=30)
    ahead.fetch_ahead([(FILE, 0, 10), (FILE, 0, 10), (FILE, 10, 10)])
    ahead.fetch_ahead([(FILE, 20, 10), (FILE, 30, 10)])
    assert begun == [(0, 10), (10, 10), (20, 10)]
    futures[0].set_result(b"first")
    assert [ahead.read(FILE, 0, 10) for _ in range(3)] == [b"first", b"first", b"later"]
    assert ahead.read(FILE, 30, 10) == b"later"
    ahead.forget()
    assert [future.cancelled() for future in futures] == [False, True, True]
    assert ahead.read(FILE, 10, 10) == b"later"
    ahead.fetch_ahead([(FILE, 10, 10)])
    assert len(begun) == 4 and ahead._uses == {(FILE, 10, 10): 1}


def test_what_is_read_is_cached_by_its_content(tmp_path: Path) -> None:
    """By whichever file it comes from, and in another process."""
    asked: list[str] = []

    def read_range(file: RemoteFile, offset: int, size: int) -> bytes:
        asked.append(file.name)
        return bytes([offset]) * size

    storage: Any = SimpleNamespace(read_range=read_range)
    same = [RemoteFile(name, 100, "sha256:1") for name in ("s3://b/a", "s3://b/c")]
    for file in same:
        assert ReadAhead(storage, RangeCache(tmp_path, 1)).read(file, 3, 5) == b"\x03" * 5
    assert asked == ["s3://b/a"]


@pytest.mark.parametrize(("gib", "is_cached"), [(0, False), (0.5, True)])
def test_a_cache_of_no_size_is_none(gib: float, is_cached: bool, tmp_path: Path) -> None:
    files = DataFiles(cache=CacheFolder(tmp_path / "cache", gib))
    assert isinstance(files._ahead.cache, RangeCache) is is_cached
    assert (tmp_path / "cache").exists() is is_cached


def test_folders_in_a_listing_are_no_files() -> None:
    listed = {
        "b/d/1.tar": {"type": "file", "size": 5, "ETag": "x"}, "b/d/": {"type": "file", "size": 0, "ETag": "y"},
        "b/d/more": {"type": "directory", "size": 0, "ETag": "z"},
    }  # fmt: skip
    found = files_in_listing("s3://b/d", listed, lambda info: f"etag:{info['ETag']}")
    assert found == {"1.tar": RemoteFile("s3://b/d/1.tar", 5, "etag:x")}


def test_requests_to_google_name_the_generation() -> None:
    """A fake file system stands for gcsfs."""
    asked: list[Any] = []
    info = {"type": "file", "size": 100, "generation": "7"}

    async def cat(path: str, **keys: Any) -> bytes:
        asked.append((path, keys))
        return bytes(20)

    async def get_info(path: str) -> dict[str, Any]:
        return info

    async def find(path: str, **keys: Any) -> dict[str, Any]:
        return {f"{path}/1.tar": info}

    client = GsClient.__new__(GsClient)
    client.fs = SimpleNamespace(_cat_file=cat, _info=get_info, _find=find)
    vars(client)["_finish"] = lambda request, seconds: asyncio.run(request())
    file = RemoteFile("gs://b/d/1.tar", 100, "generation:7")
    assert client.stat("gs://b/d/1.tar", 1) == file and client.find("gs://b/d", "", 1) == {"1.tar": file}
    assert client.fetch(file, 30, 20, 1) == bytes(20)
    assert asked == [("b/d/1.tar", {"start": 30, "end": 50, "generation": "7"})]
    info["type"] = "directory"
    with pytest.raises(Failure) as caught:
        client.stat("gs://b/d", 1)
    assert caught.value.kind is RemoteGone


def test_errors_of_s3_without_an_answer() -> None:
    from botocore.exceptions import NoCredentialsError, ParamValidationError

    cases = {
        FileNotFoundError("a"): RemoteGone, ParamValidationError(report="a"): RemoteGone,
        NoCredentialsError(): RemoteForbidden, OSError("a"): RemoteAway,
    }  # fmt: skip
    for error, kind in cases.items():
        assert s3_failure(error).kind is kind


def hub_file() -> RemoteFile:
    return RemoteFile("hf://datasets/o/n@c/a.tar", 100, "sha256:1")


def test_addresses_of_the_hub_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are allowed, the newest; each for some minutes; and none after too many redirects."""
    monkeypatch.setattr(hub_client, "MOST_ADDRESSES", 2)
    now = [1000.0]
    monkeypatch.setattr(hub_client.time, "monotonic", lambda: now[0])
    client = HubClient(5, 1)
    for name in "abc":
        client._keep(name, f"at {name}")
    assert client.addresses == {name: (f"at {name}", 1000.0 + hub_client.ADDRESS_SECONDS) for name in "bc"}
    asked: list[str] = []

    def get(url: str, file: RemoteFile, offset: int, size: int, end: float) -> tuple[bytes | None, str]:
        asked.append(url)
        return (None, "https://cdn/a") if url != "https://cdn/a" else (bytes(size), "")

    vars(client)["_get"] = get
    file, own = hub_file(), client._address(hub_file().name)
    for seconds, urls in ((0.0, [own, "https://cdn/a"]), (500.0, ["https://cdn/a"]), (500.0, [own, "https://cdn/a"])):
        now[0] += seconds
        asked.clear()
        assert client.fetch(file, 0, 5, 60) == bytes(5) and asked == urls
    vars(client)["_get"] = lambda *_: (None, "/again")
    client.addresses.clear()
    with pytest.raises(Failure) as caught:
        client.fetch(file, 0, 5, 60)
    assert caught.value.kind is RemoteAway and not client.addresses


@pytest.mark.parametrize(
    ("parts", "seconds"), [([bytes(5), bytes(6), bytes(1)], 0.0), ([bytes(4), bytes(4), bytes(2)], 100.0)]
)
def test_an_answer_of_the_hub_without_end_is_cut_off(
    parts: list[bytes], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its bytes, or by the time it takes."""
    now, left = [1000.0], list(parts)

    class Answer:
        has_redirect_location = False
        status_code = 206
        headers = MappingProxyType({"Content-Length": "10"})

        def __enter__(self) -> "Answer":
            return self

        def __exit__(self, *_: object) -> None: ...

        def iter_raw(self) -> Any:
            while left:
                yield left.pop(0)
                now[0] += seconds

    monkeypatch.setattr(hub_client.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(stream=lambda *_, **__: Answer()))
    with pytest.raises(Failure) as caught:
        HubClient(5, 1).fetch(hub_file(), 0, 10, 60)
    assert caught.value.kind is RemoteAway and left == parts[-1:], "no more is read"


class Faulty:
    """A client whose first requests fail."""

    def __init__(self, failures: int, kind: type):
        self.left, self.kind = failures, kind

    def fail(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise Failure(self.kind, "HTTP 503")

    def find(self, folder: str, start: str, seconds: float) -> dict[str, RemoteFile]:
        self.fail()
        return {name: RemoteFile(f"{folder}/{name}", 1, "etag:1") for name in ("b.tar", "a.tar", "\ufffd.tar", "é.tar")}

    def stat(self, url: str, seconds: float) -> RemoteFile:
        if url.endswith("gone"):
            raise Failure(RemoteGone, "HTTP 404")
        self.fail()
        return RemoteFile(url, 1, "etag:1")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which take no time."""
    found, now = list[float](), [1000.0]

    def sleep(seconds: float) -> None:
        found.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(remote, "JITTER", SimpleNamespace(uniform=lambda low, high: high))
    monkeypatch.setattr(remote.time, "sleep", sleep)
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    return found


def storage_of(client: Faulty, deadline: float = 60.0) -> remote.RemoteStorage:
    storage = remote.RemoteStorage(deadline=deadline)
    storage._objects[os.getpid(), "s3"] = client
    return storage


def test_pauses_double_and_a_long_silence_is_logged_once(
    pauses: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("llava_fsdp"), "propagate", True)
    found = storage_of(Faulty(4, RemoteAway)).list_files("s3://b/d/*.tar")
    assert [file.name.rpartition("/")[2] for file in found] == ["a.tar", "b.tar", "é.tar", "\ufffd.tar"]
    assert pauses == [0.2, 0.4, 0.8, 1.6] and not caplog.records
    pauses.clear()
    assert storage_of(Faulty(8, RemoteAway)).stat("s3://b/d").size == 1
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8, 8])
    assert len({record.getMessage() for record in caplog.records}) == 1 and "s3://b/d" in caplog.text
    pauses.clear()
    with pytest.raises(RemoteAway, match="HTTP 503; 4 requests in 1 s"):
        storage_of(Faulty(99, RemoteAway), 3.0).stat("s3://b/d")
    assert pauses == [0.2, 0.4, 0.8], "the next one would end after the deadline"


def test_what_does_not_exist_is_none_and_any_other_error_is_raised(pauses: list[float]) -> None:
    urls = ["s3://b/1", "s3://b/gone", "s3://b/1", "s3://b/2"]
    found = storage_of(Faulty(0, RemoteAway)).stat_files(urls)
    assert [(url, file and file.name) for url, file in found.items()] == [
        ("s3://b/1", "s3://b/1"), ("s3://b/gone", None), ("s3://b/2", "s3://b/2"),
    ]  # fmt: skip
    with pytest.raises(RemoteForbidden):
        storage_of(Faulty(9, RemoteForbidden)).stat_files(urls)
    assert not pauses
    for url in ("s3://b/a?versionId=1", f"s3://b/{'é' * 510}"):
        with pytest.raises(RemoteGone):
            storage_of(Faulty(0, RemoteAway)).stat(url)
    assert storage_of(Faulty(0, RemoteAway)).stat(f"s3://b/{'é' * 508}").size == 1
