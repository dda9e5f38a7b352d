"""Files of every kind give the same samples in the same order, local and remote."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from containers import HOLD_IMAGES, write_container
from fake_hub import COMMIT, TOKEN, FakeHub
from faulty_proxy import FaultyProxy
from harness import CPU
from runs import Runs, metrics
from s3 import SECRET, s3_server
from small import make_config
from test_build import FITS, open_again
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.data.containers import remote
from llava_fsdp.data.loader import build_loader
from llava_fsdp.runtime.errors import ConfigError, RemoteAway, RemoteChanged, RemoteGone, SourceError

BY_LIKELIHOOD = ("tar", "parquet with images", "gzip", "json", "lines", "zstd", "parquet with paths",
                 "parquet with compressed images")  # fmt: skip
"""The kinds of files; the first ones are in the fast tier."""


def rows_of(dataset: Path) -> list[dict[str, Any]]:
    """The dataset's records, one with two images more."""
    rows = json.loads((dataset / "mixed.json").read_text())
    turns = [{"from": "human", "value": "<image> and <image>\nwhich?"}, {"from": "gpt", "value": "both"}]
    system = {"from": "system", "value": "Be brief."}
    rows[5] = {"id": "two", "image": ["3.png", "8.jpg"], "conversations": turns}
    rows[6]["conversations"].insert(0, system)
    return rows


def config(parts: Path, dataset: Path, output: Path, path: str, holds_images: bool, *values: str) -> Config:
    images = "data.images=null" if holds_images else f"data.images={dataset / 'images'}"
    index = f"data.index={output / 'index'}"
    return make_config(
        parts, dataset, output, f"data.path='{path}'", images, index, f"data.cache={output / 'cache'}", *values
    )


def steps_of(cfg: Config, parts: Path, count: int = 3) -> list[Any]:
    """All tensors of the first steps, and the names of the records in them."""
    open_again(cfg, parts)  # in this process; with several files, the loader would start others for each pass
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    made = []
    for number in range(count):
        step = steps[number]
        if isinstance(step, Exception):
            raise step
        ids = [steps.records[n].id for n in steps.sampler.samples(number)]
        made.append((ids, [m.input_ids for m in step.micro_batches], [m.label_ids for m in step.micro_batches],
                     [m.images["tiles"] for m in step.micro_batches]))  # fmt: skip
    return made


def check_equal(found: list[Any], expected: list[Any]) -> None:
    for (ids, *tensors), (known_ids, *known) in zip(found, expected, strict=True):
        assert ids == known_ids
        for own, other in zip(tensors, known, strict=True):
            assert all(map(torch.equal, own, other))


@pytest.fixture(scope="module")
def expected(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("expected")
    (path,) = write_container("json", folder, rows_of(dataset), dataset / "images")
    return steps_of(config(parts, dataset, folder, str(path), False), parts)


@pytest.mark.parametrize("files", slow_after(1, [3, 1]))
@pytest.mark.parametrize("kind", slow_after(3, BY_LIKELIHOOD))
def test_local_files(kind: str, files: int, expected: Any, parts: Path, dataset: Path, tmp_path: Path) -> None:
    write_container(kind, tmp_path / "shards", rows_of(dataset), dataset / "images", files)
    cfg = config(parts, dataset, tmp_path, str(tmp_path / "shards"), kind in HOLD_IMAGES)
    check_equal(steps_of(cfg, parts), expected)


@pytest.mark.slow
def test_a_mixture_of_containers(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """With weights and without; and each source has the records of its file alone."""
    kinds, rows = ("lines", "parquet with images", "tar", "zstd"), rows_of(dataset)
    weights = [f"+data.sources.s{n}.weight={weight}" for n, weight in enumerate((1, 3, 0.5, 2))]
    for name, more in (("plain", []), ("weighted", weights)):
        found = []
        for how in (("json",) * 4, kinds):
            folder = tmp_path / f"{name} {how[0]}"
            values = ["data.path=null", f"data.images={dataset / 'images'}", f"data.index={folder / 'index'}", *more]
            for number, kind in enumerate(how):
                own = rows[number * 11 : number * 11 + 11]
                (path,) = write_container(kind, folder / str(number), own, dataset / "images")
                values.append(f"+data.sources.s{number}.path='{path}'")
            found.append(steps_of(make_config(parts, dataset, tmp_path, *values), parts))
        check_equal(found[1], found[0])


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with s3_server() as made:
        boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{made.upstream}").Bucket("bkt").create()
        yield made


def upload(proxy: FaultyProxy, files: list[Path], prefix: str) -> None:
    bucket = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{proxy.upstream}").Bucket("bkt")
    for file in files:
        bucket.put_object(Key=f"{prefix}/{file.name}", Body=file.read_bytes())


@pytest.fixture(autouse=True)
def without_faults(request: pytest.FixtureRequest) -> None:
    if "proxy" in request.fixturenames:
        proxy = request.getfixturevalue("proxy")
        proxy.spoil("", 0)
        proxy.seen.clear()


@pytest.mark.parametrize("kind", slow_after(1, BY_LIKELIHOOD))
def test_files_of_s3(kind: str, expected: Any, proxy: FaultyProxy, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """With answers that fail now and then; the second run reads images from the cache."""
    name = kind.replace(" ", "-")
    upload(proxy, write_container(kind, tmp_path / "shards", rows_of(dataset), dataset / "images", 2), name)
    cfg = config(parts, dataset, tmp_path, f"s3://bkt/{name}", kind in HOLD_IMAGES)
    proxy.spoil("503", 3)
    check_equal(steps_of(cfg, parts), expected)
    proxy.spoil("", 0)
    proxy.seen.clear()
    check_equal(steps_of(cfg, parts), expected)
    assert {request.method for request in proxy.seen} <= {"GET", "HEAD"}
    assert not [request for request in proxy.seen if "range" in request.headers], "every image is in the cache"
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(SECRET.encode() in content for content in written)


def test_a_dataset_of_the_hub(expected: Any, hub: FakeHub, parts: Path, dataset: Path, tmp_path: Path) -> None:
    files = write_container("parquet with images", tmp_path / "shards", rows_of(dataset), dataset / "images", 2)
    hub.files |= {f"data/{file.name.replace('part', 'train')}": file.read_bytes() for file in files}
    hub.files |= {"README.md": b"# set", "dataset_infos.json": b"{}"}
    cfg = config(parts, dataset, tmp_path, "hf://datasets/org/set", True)
    check_equal(steps_of(cfg, parts), expected)
    facts = next((tmp_path / "index").glob("*/texts/done.json")).read_text()
    assert f"hf://datasets/org/set@{COMMIT}/data/train-0000.parquet" in facts
    assert not any(TOKEN.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    hub.files["data/test-0000.parquet"] = files[0].read_bytes()
    with pytest.raises(
        ConfigError, match=r"not for training, such as .*test-0000\.parquet; .* 'hf://.*/data/train-\*'"
    ):
        steps_of(cfg, parts)
    cfg = config(parts, dataset, tmp_path, "hf://datasets/org/set/data/train-*", True)
    check_equal(steps_of(cfg, parts), expected)


def test_a_bucket_that_is_away(
    proxy: FaultyProxy, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record is at fault; the run ends with a message that names the object, and goes on when the bucket is back."""
    upload(proxy, write_container("tar", tmp_path / "shards", rows_of(dataset), dataset / "images"), "away")
    skip = "data.bad_records=skip", "data.max_bad_records=100%"
    cfg = config(parts, dataset, tmp_path, "s3://bkt/away", True, "data.cache_gb=0", *skip)
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    steps.records.index.store.data_files._ahead.storage.deadline = 0.5
    proxy.spoil("503", 1 << 30)
    error = steps[0]
    assert isinstance(error, RemoteAway) and "s3://bkt/away/part-0000.tar could not be read" in str(error)
    proxy.spoil("", 0)
    step = steps[0]
    assert not isinstance(step, Exception) and not step.facts.skipped


def test_an_object_that_was_replaced(proxy: FaultyProxy, parts: Path, dataset: Path, tmp_path: Path) -> None:
    files = write_container("tar", tmp_path / "shards", rows_of(dataset), dataset / "images")
    upload(proxy, files, "replaced")
    skip = "data.bad_records=skip", "data.max_bad_records=100%"
    cfg = config(parts, dataset, tmp_path, "s3://bkt/replaced", True, "data.cache_gb=0", *skip)
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    content = bytearray(files[0].read_bytes())
    content[600] ^= 1
    files[0].write_bytes(content)
    upload(proxy, files, "replaced")
    step = steps[0]
    assert isinstance(step, RemoteChanged) and "s3://bkt/replaced/part-0000.tar" in str(step)
    assert step.exit_code == 2


@pytest.mark.parametrize("path, error", [
    ("s3://bkt/nothing", RemoteGone), ("s3://bkt/nothing-*.tar", RemoteGone), ("hf://models/a/b", SourceError),
    ("https://example.com/a.tar", ConfigError), ("s3://bkt/folder", ConfigError),
])  # fmt: skip
def test_urls_without_records(
    path: str, error: type[Exception], proxy: FaultyProxy, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    readme, other = tmp_path / "README.md", tmp_path / "x.txt"
    readme.write_text("a")
    other.write_text("b")
    upload(proxy, [readme, other], "folder")
    with pytest.raises(error):
        steps_of(config(parts, dataset, tmp_path, path, True), parts)
    assert remote.CLIENTS.keys() == {"s3", "gs", "hf"}


def test_the_index_of_remote_files_has_a_place_of_its_own(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    one, other = (make_config(parts, dataset, tmp_path, f"data.path=s3://bkt/{name}").data for name in ("a/d", "b/d"))
    assert one.index_folder.parent == tmp_path / "x" / "llava_fsdp" / "index" == other.index_folder.parent
    assert one.index_folder != other.index_folder and one.index_folder.name.startswith("d-")
    assert make_config(parts, dataset, tmp_path, "data.path=s3://b/a", "data.cache=c").data.cache_folder == Path("c")
    assert os.path.isabs(one.cache_folder)


def many_rows(dataset: Path, count: int) -> list[dict[str, Any]]:
    """Records of all kinds: text, one and several images, one and several turns, system turns."""
    dice, rows = random.Random(5), rows_of(dataset)
    made = []
    for number in range(count):
        row = json.loads(json.dumps(dice.choice(rows)))
        row["id"] = f"n{number}"
        if dice.random() < 0.2 and row["conversations"][0]["from"] != "system":
            row["conversations"].insert(0, {"from": "system", "value": dice.choice(["Be brief.", "You see images."])})
        made.append(row)
    return made


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path / "shapes")
    yield made
    made.close()


def losses_of(runs: Runs, folder: Path, *words: str) -> list[float]:
    ended = runs.run("data=llava_json", "max_steps=10", *words, folder=folder, timeout=300)
    assert ended.code == 0, ended.stderr[-3000:]
    return [row["loss"] for row in metrics(folder / "out") if "loss" in row]


@pytest.mark.slow
def test_500_records_train_alike_from_every_container(
    proxy: FaultyProxy, runs: Runs, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Ten steps on two ranks: the losses are equal to the bit, also of a mixture of four containers."""
    rows, images = many_rows(dataset, 500), dataset / "images"
    folder = f"data.images={images}"
    write_container("json", tmp_path / "json", rows, images)
    expected = losses_of(runs, tmp_path / "run json", f"data.path={tmp_path / 'json'}", folder, "log_every=1")
    assert len(expected) == 10 and len(set(expected)) == 10
    for kind in ("gzip", "parquet with images", "parquet with compressed images", "tar"):
        own = tmp_path / kind.replace(" ", "-")
        write_container(kind, own, rows, images, 7)
        found = losses_of(runs, tmp_path / f"run {own.name}", f"data.path={own}", folder, "log_every=1")
        assert found == expected, kind
    for kind in ("parquet with images", "tar"):
        own = tmp_path / kind.replace(" ", "-")
        upload(proxy, sorted(own.iterdir()), f"500-{own.name}")
        words = f"data.path=s3://bkt/500-{own.name}", f"data.cache={tmp_path / 'cache'}", "log_every=1"
        assert losses_of(runs, tmp_path / f"run s3 {own.name}", *words) == expected, kind
    found = []
    for name, kinds in (("plain", ("json",) * 4), ("mixed", ("lines", "parquet with images", "tar", "zstd"))):
        words = ["data.path=null", folder, f"data.index={tmp_path / name / 'index'}", "log_every=1"]
        for number, kind in enumerate(kinds):
            own = write_container(kind, tmp_path / name / str(number), rows[number * 125 : number * 125 + 125], images)
            words += [f"+data.sources.s{number}.path={own[0]}", f"+data.sources.s{number}.weight={number + 1}"]
        found.append(losses_of(runs, tmp_path / f"run {name}", *words))
    assert found[0] == found[1]
