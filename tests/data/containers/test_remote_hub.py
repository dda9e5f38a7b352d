"""Datasets of the Hugging Face hub: listed and pinned by commit, and read in spite of faults, from a hub on this
machine."""

import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Iterator

import pytest
from fake_hub import COMMIT, TOKEN, FakeHub
from huggingface_hub import constants
from tiers import slow_after

from llava_fsdp.data.containers.remote import RemoteStorage
from llava_fsdp.data.containers.remote_file import RemoteFile
from llava_fsdp.runtime.errors import RemoteAway, RemoteForbidden, RemoteGone, SourceError

CONTENT = random.Random(0).randbytes(20_001)
FILES = {
    "README.md": b"# set",
    "data/train-1 of 2.parquet": CONTENT,
    "data/train-2 of 2.parquet": CONTENT[:5000],
    "data/deep/more.parquet": CONTENT[:300],
}
NAME = f"hf://datasets/org/set@{COMMIT}/data/train-1 of 2.parquet"
PIN = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    made = FakeHub(dict(FILES))
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield made
    made.close()


@pytest.fixture
def storage(hub: FakeHub) -> RemoteStorage:
    return RemoteStorage(deadline=20, idle=5)


@pytest.fixture
def file() -> RemoteFile:
    return RemoteFile(NAME, len(CONTENT), PIN)


ALL = ["README.md", "data/deep/more.parquet", "data/train-1 of 2.parquet", "data/train-2 of 2.parquet"]


@pytest.mark.parametrize(
    "url, paths",
    [
        ("hf://datasets/org/set", ALL),
        ("hf://datasets/org/set@v1.0/", ALL),
        (f"hf://datasets/org/set@{COMMIT}/data", ALL[1:]),
        ("hf://datasets/org/set/data/train-1 of 2.parquet", ALL[2:3]),
        ("hf://datasets/org/set@refs/convert/parquet/data/*.parquet", ALL[2:]),
        ("hf://datasets/org/set@refs%2Fconvert%2Fparquet/data/tr*-2*", ALL[3:]),
        ("hf://datasets/org/set/**/*.parquet", ALL[1:]),
    ],
)
def test_files_are_listed_by_commit(url: str, paths: list[str], storage: RemoteStorage) -> None:
    found = storage.list_files(url)
    assert [file.name for file in found] == [f"hf://datasets/org/set@{COMMIT}/{path}" for path in paths]
    assert [file.size for file in found] == [len(FILES[path]) for path in paths]
    for file, path in zip(found, paths, strict=True):
        is_small = path == "README.md"
        expected = hashlib.sha1(FILES[path]) if is_small else hashlib.sha256(FILES[path])
        assert file.pin == f"{'git' if is_small else 'sha256'}:{expected.hexdigest()}"
        assert (file.content == file.pin) is not is_small


@pytest.mark.parametrize(
    "url, kind",
    [
        ("hf://datasets/org/set/none.parquet", RemoteGone),
        ("hf://datasets/org/set/*.tar", RemoteGone),
        ("hf://datasets/org/set@none/data", RemoteGone),
        ("hf://datasets/org/none/data", RemoteGone),
        ("hf://datasets/set", SourceError),
        ("hf://org/set/data", SourceError),
        ("hf://datasets/o*/set/data", SourceError),
    ],
)
def test_what_does_not_exist(url: str, kind: type[SourceError], storage: RemoteStorage) -> None:
    with pytest.raises(SourceError) as caught:
        storage.list_files(url)
    assert type(caught.value) is kind
    assert url.startswith(caught.value.culprit["file"])


@pytest.mark.parametrize("offset, size", [(0, 1), (0, 20_001), (20_000, 1), (77, 5000), (20_001, 0)])
def test_a_range_is_read(offset: int, size: int, file: RemoteFile, storage: RemoteStorage) -> None:
    assert storage.read_range(file, offset, size) == CONTENT[offset : offset + size]


def test_the_address_of_a_file_is_kept(file: RemoteFile, hub: FakeHub, storage: RemoteStorage) -> None:
    for offset in (100, 5000, 9000):
        assert storage.read_range(file, offset, 50) == CONTENT[offset : offset + 50]
    assert hub.paths() == ["datasets", "cdn", "cdn", "cdn"]
    assert [request.headers["range"] for request in hub.seen[1:]] == [
        "bytes=100-149",
        "bytes=5000-5049",
        "bytes=9000-9049",
    ]
    hub.expire()
    assert storage.read_range(file, 7, 9) == CONTENT[7:16]
    assert hub.paths()[4:] == ["cdn", "datasets", "cdn"]


def test_the_token_is_for_the_hub_alone(file: RemoteFile, hub: FakeHub, storage: RemoteStorage) -> None:
    hub.private = True
    for offset in (0, 10):
        storage.read_range(file, offset, 10)
    tokens = {request.path.split("/")[1]: request.headers.get("authorization") for request in hub.seen}
    assert tokens == {"datasets": f"Bearer {TOKEN}", "cdn": None}


def test_a_small_file_comes_from_the_hub(hub: FakeHub, storage: RemoteStorage) -> None:
    (small,) = storage.list_files("hf://datasets/org/set/README.md")
    hub.seen.clear()
    assert storage.read_range(small, 2, 3) == b"set"
    assert hub.paths() == ["datasets"]


@pytest.mark.parametrize(
    "where, status", slow_after(2, [("cdn", 0), ("datasets", 429), ("datasets", 500), ("cdn", 503)])
)
def test_a_fault_that_passes_costs_requests(
    where: str, status: int, file: RemoteFile, hub: FakeHub, storage: RemoteStorage
) -> None:
    hub.spoil(where, status, 2)
    assert storage.read_range(file, 100, 50) == CONTENT[100:150]
    assert hub.paths().count(where) == 3


def test_a_listing_is_repeated(hub: FakeHub, storage: RemoteStorage) -> None:
    hub.spoil("api", 500, 1)
    assert len(storage.list_files("hf://datasets/org/set")) == 4


@pytest.mark.parametrize("where, status", [("cdn", 503), ("cdn", 0), ("datasets", 429)])
def test_a_fault_that_stays_ends_at_the_deadline(where: str, status: int, file: RemoteFile, hub: FakeHub) -> None:
    hub.spoil(where, status)
    with pytest.raises(RemoteAway) as caught:
        RemoteStorage(deadline=0.5).read_range(file, 100, 50)
    assert caught.value.culprit["file"] == NAME


def test_no_answer_is_away(file: RemoteFile, hub: FakeHub) -> None:
    hub.delay = 3
    with pytest.raises(RemoteAway):
        RemoteStorage(deadline=0.5, idle=0.2).read_range(file, 100, 50)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("where", ["cdn", "datasets"])
def test_a_refusal_is_not_repeated(
    where: str, status: int, file: RemoteFile, hub: FakeHub, storage: RemoteStorage
) -> None:
    hub.spoil(where, status)
    with pytest.raises(RemoteForbidden):
        storage.read_range(file, 100, 50)
    assert hub.paths().count(where) == 1


def test_a_private_dataset_without_a_token_is_forbidden(
    hub: FakeHub, storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrongwrongwrong012345")
    with pytest.raises(RemoteForbidden):
        storage.list_files("hf://datasets/org/set")


def test_offline_is_not_repeated(hub: FakeHub, storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    with pytest.raises(RemoteForbidden):
        storage.list_files("hf://datasets/org/set")
    assert hub.seen == []


def test_a_deleted_file_is_gone(file: RemoteFile, hub: FakeHub, storage: RemoteStorage) -> None:
    del hub.files["data/train-1 of 2.parquet"]
    with pytest.raises(RemoteGone):
        storage.read_range(file, 0, 10)


def test_another_size_is_a_change(file: RemoteFile, hub: FakeHub, storage: RemoteStorage) -> None:
    """The hub keeps commits as they are; a mirror may not."""
    hub.files["data/train-1 of 2.parquet"] = CONTENT[:-1]
    with pytest.raises(SourceError) as caught:
        storage.read_range(file, 0, 10)
    assert type(caught.value).__name__ == "RemoteChanged"


@pytest.mark.parametrize("where, status", [("cdn", 403), ("cdn", 503), ("cdn", 0), ("datasets", 401)])
def test_no_signature_or_token_is_shown(
    where: str, status: int, file: RemoteFile, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.spoil(where, status)
    with caplog.at_level(logging.DEBUG), pytest.raises(SourceError) as caught:
        RemoteStorage(deadline=0.3).read_range(file, 0, 10)
    error = caught.value
    assert error.__cause__ is None and error.__context__ is None
    shown = "".join(traceback.format_exception(error)) + caplog.text
    assert hub.signature not in shown and TOKEN not in shown and "cdn" not in shown


READ = """
import json, sys
from llava_fsdp.data.containers.remote import RemoteStorage
storage = RemoteStorage()
(file,) = storage.list_files("hf://datasets/org/set/data/train-2*")
print(json.dumps([file.name, storage.read_range(file, 10, 20).hex()]))
"""


def test_the_endpoint_is_that_of_the_hubs_own_variable(hub: FakeHub) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ], check=False, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    name = f"hf://datasets/org/set@{COMMIT}/data/train-2 of 2.parquet"
    assert json.loads(done.stdout) == [name, CONTENT[10:30].hex()]
