"""A training of two ranks whose images lie in tars on S3, while answers fail, objects change and credentials expire."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from containers import write_container
from faulty_proxy import FaultyProxy
from runs import Run, Runs
from s3 import SECRET, s3_server
from test_disk import small_disk  # noqa: F401  a fixture
from test_kills import records_read
from test_secrets import everything_in
from traps import note_samples

from llava_fsdp.runtime.errors import ConfigError, RemoteAway, RemoteChanged, RemoteForbidden, RemoteGone, SourceError

pytestmark = pytest.mark.ranks
FAULTS = ("503", "cut", "", "short", "reset", "")
SIGNATURES = (b"X-Amz-Signature", b"AWS4-HMAC-SHA256")


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with s3_server() as made:
        yield made


@pytest.fixture
def bucket(proxy: FaultyProxy) -> Any:
    proxy.spoil("", 0)
    made = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{proxy.upstream}").Bucket("bkt")
    made.create()
    return made


Start = Callable[..., Run]


@pytest.fixture
def begin(runs: Runs, bucket: Any, dataset: Path, tmp_path: Path) -> Start:
    """Starts a run on two tars in the bucket, or on the same in a folder; nothing is kept of what it reads."""
    rows = json.loads((dataset / "mixed.json").read_text())
    files = write_container("tar", tmp_path / "shards", rows, dataset / "images", 2)
    for file in files:
        bucket.put_object(Key=f"set/{file.name}", Body=file.read_bytes())

    def started(path: str, folder: Path, *words: str) -> Run:
        data = "data=llava_json", f"data.path={path}", "data.images=null", f"data.index={folder / 'index'}"
        more = f"data.cache={folder / 'cache'}", "data.cache_gb=0", "epochs=9", "data.bad_records=skip"
        return runs.start(*data, *more, *words, folder=folder, trap=note_samples, notes=str(folder))

    return started


def spoil_now_and_then(proxy: FaultyProxy, stop: threading.Event) -> None:
    for fault in itertools.cycle(FAULTS):
        proxy.spoil(fault, 1 if fault else 0)
        proxy.delay = 0.05 if fault else 0
        if stop.wait(0.1):
            break
    proxy.spoil("", 0)
    proxy.delay = 0


def check_secrets(folder: Path) -> None:
    written = everything_in(folder)
    assert SECRET.encode() not in written
    assert not any(sign in written for sign in SIGNATURES)


@pytest.mark.faults
def test_faults_that_pass_change_nothing(begin: Start, proxy: FaultyProxy, tmp_path: Path) -> None:
    """No sample is lost, none is seen twice, and every number is that of a run on local files."""
    local = begin(str(tmp_path / "shards"), tmp_path / "local", "max_steps=8")
    assert local.wait().code == 0
    stop = threading.Event()
    spoiler = threading.Thread(target=spoil_now_and_then, args=(proxy, stop))
    spoiler.start()
    try:
        run = begin("s3://bkt/set", tmp_path / "remote", "max_steps=8")
        ended = run.wait()
    finally:
        stop.set()
        spoiler.join()
    assert ended.code == 0, ended.stderr
    keys = ("step", "loss", "grad_norm", "samples", "tokens", "label_tokens", "images")
    assert [[row[key] for key in keys] for row in run.rows()] == [[row[key] for key in keys] for row in local.rows()]
    assert len(run.rows()) == 8 and records_read(tmp_path / "remote") == records_read(tmp_path / "local")
    assert not (run.out / "skipped_records.jsonl").exists()
    check_secrets(tmp_path / "remote")


def ends(begin: Start, folder: Path, hurt: Callable[[], object], kind: type[SourceError]) -> None:
    """A run that is hurt behind its third step ends soon, with an error of this kind that names the object."""
    run = begin("s3://bkt/set", folder, "max_steps=90")
    run.until(lambda: run.last_step() >= 3, "three steps")
    hurt()
    ended = run.wait(within=90)
    assert ended.code == 1 and not ended.left
    assert ended.status["exit_code"] == kind("").exit_code
    assert ended.status["culprit"]["file"].startswith("s3://bkt/set/part-000")
    assert f"{kind.__name__}: s3://bkt/set/part-000" in ended.stderr
    assert not (run.out / "skipped_records.jsonl").exists(), "no record is at fault"
    check_secrets(folder)


@pytest.mark.faults
def test_an_object_that_is_changed(begin: Start, bucket: Any, tmp_path: Path) -> None:
    def change() -> None:
        for own in bucket.objects.all():
            content = bytearray(own.get()["Body"].read())
            content[600] ^= 1
            bucket.put_object(Key=own.key, Body=bytes(content))

    ends(begin, tmp_path / "run", change, RemoteChanged)


@pytest.mark.faults
def test_an_object_that_is_deleted(begin: Start, bucket: Any, tmp_path: Path) -> None:
    ends(begin, tmp_path / "run", lambda: bucket.objects.all().delete(), RemoteGone)


@pytest.mark.faults
def test_credentials_that_expire(begin: Start, proxy: FaultyProxy, tmp_path: Path) -> None:
    ends(begin, tmp_path / "run", lambda: proxy.spoil("expired"), RemoteForbidden)


@pytest.mark.faults
def test_a_bucket_that_stays_away(begin: Start, proxy: FaultyProxy, tmp_path: Path) -> None:
    """The wait has a bound, and the run continues when the bucket is back."""
    ends(begin, tmp_path / "run", lambda: proxy.spoil("503"), RemoteAway)
    proxy.spoil("", 0)
    again = begin("s3://bkt/set", tmp_path / "run", "max_steps=90")
    assert again.wait().code == 0 and [row["step"] for row in again.rows()] == list(range(1, 91))


def numbers(run: Run) -> list[list[float]]:
    return [[row[key] for key in ("step", "loss", "samples", "tokens", "images")] for row in run.rows()]


@pytest.mark.faults
def test_two_runs_share_a_cache(begin: Start, proxy: FaultyProxy, tmp_path: Path) -> None:
    """At once, and a third one behind them, which needs nothing more."""
    words = "max_steps=22", f"data.cache={tmp_path / 'cache'}", "data.cache_gb=1"
    two = [begin("s3://bkt/set", tmp_path / name, *words) for name in "ab"]
    assert [run.wait().code for run in two] == [0, 0], two[0].said() + two[1].said()
    local = begin(str(tmp_path / "shards"), tmp_path / "local", "max_steps=22")
    assert local.wait().code == 0
    assert numbers(two[0]) == numbers(two[1]) == numbers(local)
    proxy.seen.clear()
    third = begin("s3://bkt/set", tmp_path / "c", *words, f"data.index={tmp_path / 'a' / 'index'}")
    assert third.wait().code == 0 and numbers(third) == numbers(local)
    assert not [request for request in proxy.seen if "range" in request.headers]
    check_secrets(tmp_path)


@pytest.mark.faults
def test_a_cache_on_a_full_disk(begin: Start, small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    """Costs requests alone; a warning says so."""
    (small_disk / "other").write_bytes(bytes(270_000))
    words = "max_steps=8", f"data.cache={small_disk / 'cache'}", "data.cache_gb=1"
    run = begin("s3://bkt/set", tmp_path / "run", *words)
    assert run.wait().code == 0 and "data.cache: an entry cannot be written" in run.said()
    local = begin(str(tmp_path / "shards"), tmp_path / "local", "max_steps=8")
    assert local.wait().code == 0 and numbers(run) == numbers(local)


@pytest.mark.faults
def test_a_cache_that_cannot_be_written(begin: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = "max_steps=2", f"data.cache={tmp_path / 'file' / 'x'}", "data.cache_gb=1"
    run = begin("s3://bkt/set", tmp_path / "run", *words)
    ended = run.wait(within=90)
    assert ended.code == 1 and not ended.left
    assert ended.status["exit_code"] == ConfigError("").exit_code and "ConfigError: data.cache=" in ended.stderr
