"""Files of S3: listed, pinned, and read in spite of faults. A proxy before moto's server spoils its answers."""

import hashlib
import logging
import multiprocessing
import pickle
import random
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from faulty_proxy import FaultyProxy
from s3 import SECRET, s3_server
from tiers import slow_after

from llava_fsdp.data.containers.range_cache import RangeCache
from llava_fsdp.data.containers.read_ahead import ReadAhead, RemoteReader
from llava_fsdp.data.containers.remote import RemoteStorage, shown_url, split_pattern
from llava_fsdp.data.containers.remote_file import RemoteFile
from llava_fsdp.runtime.errors import (
    ConfigError,
    ImageError,
    RemoteAway,
    RemoteChanged,
    RemoteForbidden,
    RemoteGone,
    SourceError,
)

CONTENT = random.Random(0).randbytes(100_003)
KEYS = {"a.tar": CONTENT, "data/x-1.tar": b"x1", "data/x-é.tar": b"xe", "data/x-10.tar": b"x10", "data/sub/y.tar": b"y"}


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with s3_server() as made:
        yield made


@pytest.fixture(autouse=True)
def without_faults(proxy: FaultyProxy) -> None:
    proxy.spoil("", 0)
    proxy.delay = 0
    proxy.seen.clear()


@pytest.fixture(scope="module")
def bucket(proxy: FaultyProxy) -> Any:
    """The bucket `bkt` with `KEYS`, not behind the proxy."""
    found = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{proxy.upstream}").Bucket("bkt")
    found.create()
    for key, content in KEYS.items():
        found.put_object(Key=key, Body=content)
    found.put_object(Key="data/", Body=b"")  # as consoles make a folder
    return found


@pytest.fixture(scope="module")
def storage() -> RemoteStorage:
    return RemoteStorage(deadline=20, idle=5)


@pytest.fixture(scope="module")
def impatient() -> RemoteStorage:
    return RemoteStorage(deadline=0.7, idle=0.3)


@pytest.fixture(scope="module")
def file(bucket: Any, storage: RemoteStorage) -> RemoteFile:
    (found,) = storage.list_files("s3://bkt/a.tar")
    return found


@pytest.mark.parametrize(
    "url, keys",
    [
        ("s3://bkt/a.tar", ["a.tar"]),
        ("s3://bkt/data", ["data/sub/y.tar", "data/x-1.tar", "data/x-10.tar", "data/x-é.tar"]),
        ("s3://bkt/data/", ["data/sub/y.tar", "data/x-1.tar", "data/x-10.tar", "data/x-é.tar"]),
        ("s3://bkt/data/x-?.tar", ["data/x-1.tar", "data/x-é.tar"]),
        ("s3://bkt/data/x-[0-9]*", ["data/x-1.tar", "data/x-10.tar"]),
        ("s3://bkt/d*/*.tar", ["data/x-1.tar", "data/x-10.tar", "data/x-é.tar"]),
        ("s3://bkt/**/y.tar", ["data/sub/y.tar"]),
        ("s3://bkt/*", ["a.tar"]),
    ],
)
def test_files_are_listed_in_order(url: str, keys: list[str], bucket: Any, storage: RemoteStorage) -> None:
    found = storage.list_files(url)
    assert [(file.name, file.size) for file in found] == [(f"s3://bkt/{key}", len(KEYS[key])) for key in keys]
    assert [file.pin for file in found] == [f'etag:"{hashlib.md5(KEYS[key]).hexdigest()}"' for key in keys]


@pytest.mark.parametrize("url", ["s3://bkt/none", "s3://bkt/a", "s3://bkt/*.gz", "s3://none/a.tar"])
def test_no_file_is_gone(url: str, bucket: Any, storage: RemoteStorage) -> None:
    with pytest.raises(RemoteGone) as caught:
        storage.list_files(url)
    assert caught.value.culprit["file"] == url


@pytest.mark.parametrize("url", ["ftp://bkt/a.tar", "/bkt/a.tar", "s3://", "s3://b*/a.tar", "s3://bkt/a**b"])
def test_a_wrong_url_is_refused(url: str, proxy: FaultyProxy, storage: RemoteStorage) -> None:
    with pytest.raises(SourceError):
        storage.list_files(url)
    assert proxy.seen == []


def test_a_listing_is_repeated(bucket: object, proxy: FaultyProxy, storage: RemoteStorage) -> None:
    proxy.spoil("503", 1)
    proxy.with_listings = True
    assert len(storage.list_files("s3://bkt/a.tar")) == 1
    proxy.with_listings = False
    assert len(proxy.seen) == 3  # the second asks for the folder a.tar/, the third for the object


@pytest.mark.parametrize("offset, size", [(0, 1), (0, 100_003), (100_002, 1), (7, 12_345), (100_003, 0), (0, 0)])
def test_a_range_is_read(offset: int, size: int, file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage) -> None:
    assert storage.read_range(file, offset, size) == CONTENT[offset : offset + size]
    requests = proxy.seen
    assert len(requests) == (size > 0)
    assert all(request.headers["if-match"] == file.pin.removeprefix("etag:") for request in requests)


@pytest.mark.parametrize("fault", slow_after(2, ["503", "cut", "reset", "short"]))
def test_a_fault_that_passes_costs_requests(
    fault: str, file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage
) -> None:
    proxy.spoil(fault, 2)
    assert storage.read_range(file, 1000, 30) == CONTENT[1000:1030]
    assert len(proxy.seen) == 3


def test_a_request_without_an_answer_is_repeated(
    file: RemoteFile, proxy: FaultyProxy, impatient: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impatient, "deadline", 20)
    proxy.spoil("hang", 1)
    assert impatient.read_range(file, 1000, 30) == CONTENT[1000:1030]


@pytest.mark.parametrize("fault", slow_after(3, ["503", "hang", "trickle", "cut", "reset", "short"]))
def test_a_fault_that_stays_ends_at_the_deadline(
    fault: str, file: RemoteFile, proxy: FaultyProxy, impatient: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.spoil(fault)  # a trickle never stops for `idle` seconds, and takes 5 s in all
    begin = time.monotonic()
    with pytest.raises(RemoteAway) as caught:
        impatient.read_range(file, 1000, 50)
    assert time.monotonic() - begin < 3
    assert caught.value.culprit["file"] == "s3://bkt/a.tar"
    assert caught.value.ending == "communication"
    assert not isinstance(caught.value, ImageError)
    proxy.left = 0
    monkeypatch.setattr(impatient, "deadline", 20)
    assert impatient.read_range(file, 1000, 50) == CONTENT[1000:1050]  # the client is still of use


@pytest.mark.parametrize("fault, kind", [("forbidden", RemoteForbidden), ("expired", RemoteForbidden)])
def test_a_refusal_is_not_repeated(
    fault: str, kind: type[Exception], file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage
) -> None:
    proxy.spoil(fault)
    with pytest.raises(kind):
        storage.read_range(file, 0, 10)
    assert len(proxy.seen) == 1


@pytest.mark.parametrize("content", [bytes(100_003), CONTENT[:2000], CONTENT + b"!"])
def test_a_changed_file_is_found(
    content: bytes, bucket: Any, file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage
) -> None:
    bucket.put_object(Key="a.tar", Body=content)
    with pytest.raises(RemoteChanged):
        storage.read_range(file, 50_000, 10)
    assert len(proxy.seen) == 1
    bucket.put_object(Key="a.tar", Body=CONTENT)
    assert storage.read_range(file, 50_000, 10) == CONTENT[50_000:50_010]


def test_a_deleted_file_is_gone(bucket: Any, file: RemoteFile, storage: RemoteStorage) -> None:
    bucket.Object("a.tar").delete()
    with pytest.raises(RemoteGone):
        storage.read_range(file, 0, 10)
    bucket.put_object(Key="a.tar", Body=CONTENT)


def test_a_version_is_read_after_the_file_was_replaced(bucket: Any, storage: RemoteStorage) -> None:
    bucket.Versioning().enable()
    version = bucket.put_object(Key="v.tar", Body=b"the old one").version_id
    bucket.put_object(Key="v.tar", Body=b"the new content")
    (old,) = storage.list_files(f"s3://bkt/v.tar?versionId={version}")
    (new,) = storage.list_files("s3://bkt/v.tar")
    assert storage.read_range(old, 0, 11) == b"the old one" and storage.read_range(new, 4, 11) == b"new content"
    assert old.content != new.content
    bucket.object_versions.filter(Prefix="v.tar").delete()


def test_no_server_is_away(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteAway):
        RemoteStorage(deadline=0.3).list_files("s3://bkt/a.tar")


def test_without_credentials_nothing_is_repeated(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RemoteForbidden):
        RemoteStorage().list_files("s3://bkt/a.tar")
    assert proxy.seen == []


@pytest.mark.parametrize("scheme, package", [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*llava-fsdp\[cloud\]"):
        RemoteStorage().list_files(f"{scheme}://bkt/a.tar")


def test_ranges_are_read_at_once_and_in_order(file: RemoteFile, proxy: FaultyProxy) -> None:
    storage = RemoteStorage(deadline=30, in_flight=8)
    proxy.most_running = 0
    proxy.delay = 0.05
    ranges = [(n * 777, 700 + n) for n in range(64)]
    futures = [storage.submit(storage.read_range, file, *own) for own in ranges]
    assert [future.result() for future in futures] == [CONTENT[offset : offset + size] for offset, size in ranges]
    assert 4 <= proxy.most_running <= 8


def test_a_missing_file_is_named(bucket: Any, file: RemoteFile, storage: RemoteStorage) -> None:
    gone = RemoteFile("s3://bkt/gone.tar", 10, file.pin)
    with pytest.raises(RemoteGone) as caught:
        storage.read_range(gone, 0, 10)
    assert caught.value.culprit["file"] == gone.name


def read_in_child(storage: RemoteStorage, file: RemoteFile, answers: multiprocessing.Queue) -> None:
    answers.put([storage.read_range(file, 10, 20), storage.read_range(file, 40, 5)])


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_process_has_a_client_of_its_own(start: str, file: RemoteFile, storage: RemoteStorage) -> None:
    assert storage.read_range(file, 0, 5) == CONTENT[:5]  # the parent has one already
    context = multiprocessing.get_context(start)
    answers = context.Queue()
    child = context.Process(target=read_in_child, args=(storage, file, answers))
    child.start()
    assert answers.get(timeout=60) == [CONTENT[10:30], CONTENT[40:45]]
    child.join(20)
    assert child.exitcode == 0
    assert storage.read_range(file, 0, 5) == CONTENT[:5]


@pytest.mark.parametrize("fault", ["503", "forbidden", "cut"])
def test_no_credential_is_shown(
    fault: str, file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.spoil(fault)
    with caplog.at_level(logging.DEBUG), pytest.raises(SourceError) as caught:
        RemoteStorage(deadline=0.5).read_range(file, 0, 10)
    error = caught.value
    assert error.__cause__ is None and error.__context__ is None
    shown = "".join(traceback.format_exception(error)) + caplog.text + repr(pickle.dumps(error))
    assert SECRET not in shown and "Signature" not in shown and "Authorization" not in shown


def test_queries_are_cut_from_messages() -> None:
    assert shown_url("https://host/a.tar?X-Amz-Signature=abc&x=1") == "https://host/a.tar"
    assert shown_url("s3://bkt/a.tar?versionId=abc") == "s3://bkt/a.tar"
    assert "geheim" not in shown_url("s3://me:geheim@bkt/a.tar")
    assert shown_url("s3://bkt/a\nb-?.tar") == "s3://bkt/a\\u000ab-?.tar"
    assert split_pattern("s3://bkt/v.tar?versionId=abc") == ("s3://bkt/v.tar?versionId=abc", "", None)


def test_a_step_is_fetched_ahead_once(file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage, tmp_path) -> None:
    source = ReadAhead(storage, RangeCache(tmp_path / "cache", gib=1), most_ahead=2500)
    ranges = [(file, 0, 1000), (file, 5000, 1000), (file, 0, 1000), (file, 9000, 1000)]  # the last is too much
    source.fetch_ahead(ranges)
    deadline = time.monotonic() + 10
    while source.cache.misses < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    reader = RemoteReader(source, file)
    assert [reader.read(offset, size) for _, offset, size in ranges] == [CONTENT[o : o + n] for _, o, n in ranges]
    assert len(proxy.seen) == 3
    assert not source._ahead and not source._uses
    source.fetch_ahead(ranges)
    assert [source.read(*own) for own in ranges] == [CONTENT[o : o + n] for _, o, n in ranges]
    assert len(proxy.seen) == 3  # all from the cache
    assert (reader.name, reader.size) == (file.name, file.size)


def test_an_error_of_a_range_fetched_ahead_is_raised_when_it_is_read(
    file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage
) -> None:
    source = ReadAhead(storage)
    proxy.spoil("forbidden", 1)
    source.fetch_ahead([(file, 0, 10)])
    with pytest.raises(RemoteForbidden):
        source.read(file, 0, 10)
    assert source.read(file, 0, 10) == CONTENT[:10]


def read_ahead_in_child(source: ReadAhead, file: RemoteFile, answers: multiprocessing.Queue) -> None:
    answers.put(source.read(file, 0, 10))


def test_a_forked_child_does_not_wait_for_what_its_parent_fetches(
    file: RemoteFile, proxy: FaultyProxy, storage: RemoteStorage
) -> None:
    source = ReadAhead(storage)
    proxy.delay = 0.3
    source.fetch_ahead([(file, 0, 10)])
    answers = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=read_ahead_in_child, args=(source, file, answers))
    child.start()
    assert answers.get(timeout=30) == CONTENT[:10]
    child.join(20)
    source.forget()
