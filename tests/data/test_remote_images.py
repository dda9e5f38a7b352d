"""Images that lie in a remote folder, each a file of its own: read as those of a local folder are."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from fake_hub import COMMIT, TOKEN, FakeHub
from faulty_proxy import FaultyProxy
from harness import CPU
from PIL import Image
from s3 import s3_server
from small import make_config
from test_build import FITS, open_again, plan_of
from test_containers import check_equal, rows_of, steps_of

from llava_fsdp.config import Config
from llava_fsdp.config.paths import paths_read
from llava_fsdp.data.containers.data_files import CacheFolder, DataFiles, RemoteFolder
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.containers.remote import LONGEST_URL, RemoteStorage
from llava_fsdp.data.images.check import HEAD_BYTES, image_in, read_file, read_size
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.verify import verify_index
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.evaluate.check_images import check_images, folder_of
from llava_fsdp.evaluate.main import with_paths
from llava_fsdp.evaluate.read_questions import first_question
from llava_fsdp.runtime.errors import DataError, ImageError, RemoteAway, RemoteForbidden, RemoteGone, SourceError
from llava_fsdp.runtime.text.progress import watch_silently

SKIP = ("data.bad_records=skip", "data.max_bad_records=100%")


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with s3_server() as made:
        yield made


@pytest.fixture(scope="module")
def bucket(proxy: FaultyProxy, dataset: Path) -> Any:
    """The bucket `bkt` with the images of the dataset below `a/images`."""
    found = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{proxy.upstream}").Bucket("bkt")
    found.create()
    for file in (dataset / "images").iterdir():
        found.put_object(Key=f"a/images/{file.name}", Body=file.read_bytes())
    found.put_object(Key="a/secret.jpg", Body=b"not for everybody")
    return found


@pytest.fixture(autouse=True)
def without_faults(request: pytest.FixtureRequest) -> None:
    if "proxy" in request.fixturenames:
        proxy = request.getfixturevalue("proxy")
        proxy.spoil("", 0)
        proxy.seen.clear()


def write_records(folder: Path, rows: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mixed.json").write_text(json.dumps(rows))
    return folder / "mixed.json"


def config(
    parts: Path, dataset: Path, output: Path, images: str, *values: str, rows: list[Any] | None = None
) -> Config:
    path = write_records(output, rows_of(dataset) if rows is None else rows)
    own = f"data.path={path}", f"data.images={images}", f"data.cache={output / 'cache'}"
    return make_config(parts, dataset, output, *own, *values)


def row(name: str, identity: str = "x") -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>\nwhich?"}, {"from": "gpt", "value": "red"}]
    return {"id": identity, "image": name, "conversations": turns}


def problems(records: Records) -> list[tuple[int, str]]:
    return [(own["record"], own["kind"]) for own in records.index.problems()]


def fetched(proxy: FaultyProxy) -> set[str]:
    """Return the paths of the objects whose bytes were asked for."""
    return {request.path.split("?")[0] for request in proxy.seen if "range" in request.headers}


@pytest.fixture(scope="module")
def expected(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("expected")
    return steps_of(config(parts, dataset, folder, str(dataset / "images")), parts)


def test_equal_tensors(
    expected: Any, proxy: FaultyProxy, bucket: Any, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Also through answers that fail; the second run has each image's bytes from the cache."""
    cfg = config(parts, dataset, tmp_path, "s3://bkt/a/images/")
    proxy.spoil("503", 3)
    check_equal(steps_of(cfg, parts), expected)
    proxy.spoil("", 0)
    assert fetched(proxy)
    proxy.seen.clear()
    check_equal(steps_of(cfg, parts), expected)
    assert not fetched(proxy) and {request.method for request in proxy.seen} == {"HEAD"}
    assert paths_read(cfg).keys() >= {"data.path"} and "data.images" not in paths_read(cfg)


def test_records_and_images_of_the_hub(expected: Any, hub: FakeHub, parts: Path, dataset: Path, tmp_path: Path) -> None:
    hub.files |= {f"images/{file.name}": file.read_bytes() for file in (dataset / "images").iterdir()}
    hub.files |= {"train.json": json.dumps(rows_of(dataset)).encode()}
    words = "data.path=hf://datasets/org/set/train.json", f"data.index={tmp_path / 'index'}"
    cfg = config(parts, dataset, tmp_path, "hf://datasets/org/set/images", *words)
    check_equal(steps_of(cfg, parts), expected)
    facts = next((tmp_path / "index").glob("*/texts/done.json")).read_text()
    assert f"hf://datasets/org/set@{COMMIT}/images" in facts and TOKEN not in facts
    image = next(file for file in sorted((dataset / "images").iterdir()) if file.stat().st_size > 100)
    found = RemoteStorage().stat(f"hf://datasets/org/set@{COMMIT}/images/{image.name}")
    (listed,) = RemoteStorage().list_files(f"hf://datasets/org/set/images/{image.name}")
    assert found == listed


def test_a_mixture_of_local_and_remote_images(
    expected: Any, bucket: Any, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Each source has its own folder, and `data.images` is that of the others."""
    rows, found = rows_of(dataset), []
    for images in (str(dataset / "images"), "s3://bkt/a/images"):
        folder = tmp_path / images.replace("/", "_")
        folder.mkdir()
        (folder / "one.json").write_text(json.dumps(rows[:20]))
        (folder / "two.json").write_text(json.dumps(rows[20:]))
        words = [
            "data.path=null", f"data.index={folder / 'index'}", f"data.images={images}",
            f"+data.sources.one.path={folder / 'one.json'}", f"+data.sources.one.images={dataset / 'images'}",
            f"+data.sources.two.path={folder / 'two.json'}",
        ]  # fmt: skip
        found.append(steps_of(make_config(parts, dataset, folder, f"data.cache={folder / 'cache'}", *words), parts))
    check_equal(found[1], found[0])


def test_what_is_wrong_with_images(proxy: FaultyProxy, bucket: Any, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Names never leave the folder, and each problem is that of a local image. No request is made for a name that no
    object can have."""
    good = next(iter(sorted((dataset / "images").iterdir())))
    bucket.put_object(Key="a/images/empty.jpg", Body=b"")
    bucket.put_object(Key="a/images/cut.png", Body=good.read_bytes()[:-20])
    long, version = "x" * LONGEST_URL, f"{good.name}?versionId=1"
    names = [
        good.name, f"./{good.name}", "../secret.jpg", "s3://bkt/a/secret.jpg", "/a/secret.jpg", "nothing.jpg",
        "empty.jpg", "cut.png", long, version, "%2e%2e/secret.jpg", "a?b#c d%.jpg",
    ]  # fmt: skip
    bucket.put_object(Key="a/images/a?b#c d%.jpg", Body=good.read_bytes())
    kinds = [
        None, None, Kind.path_outside, Kind.url, Kind.path_outside, Kind.image_missing, Kind.image_empty,
        Kind.image_truncated, Kind.image_missing, Kind.image_missing, Kind.image_missing, None,
    ]  # fmt: skip
    rows = [row(name, str(number)) for number, name in enumerate(names)]
    cfg = config(parts, dataset, tmp_path, "s3://bkt/a/images", *SKIP, rows=rows)
    records = open_again(cfg, parts)
    assert sorted(problems(records)) == [(n, kind.value) for n, kind in enumerate(kinds) if kind is not None]
    assert not any("secret.jpg" in path and "images" not in path for path in fetched(proxy))
    assert not any("xxx" in request.path or "versionId" in request.path for request in proxy.seen)
    bucket.put_object(Key="a/images/nothing.jpg", Body=good.read_bytes())
    bucket.put_object(Key="a/images/cut.png", Body=good.read_bytes())
    again = open_again(cfg, parts, look_again=True)
    assert {n for n, _ in problems(records)} - {n for n, _ in problems(again)} == {5, 7}, "those that were mended"


@pytest.mark.parametrize("how", ["sample", "lazy", "head"])
def test_nothing_is_fetched_but_what_is_examined(
    how: str, proxy: FaultyProxy, bucket: Any, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    Image.effect_noise((401, 399), 90).save(noise := io.BytesIO(), "JPEG", quality=95)  # of a PNG all is read
    assert len(noise.getvalue()) > HEAD_BYTES
    bucket.put_object(Key="a/images/noise.jpg", Body=noise.getvalue())
    rows = [*rows_of(dataset), row("noise.jpg", "noise")]
    words = f"data.examine={how}", "data.examine_images=2", "data.cache_gb=0"
    records = open_again(config(parts, dataset, tmp_path, "s3://bkt/a/images", *words, rows=rows), parts)
    asked = {request.path.split("?")[0] for request in proxy.seen}
    sent = [request.headers["range"] for request in proxy.seen if "range" in request.headers]
    if how == "head":
        assert max(int(own.partition("-")[2]) for own in sent) < HEAD_BYTES, sent
        assert len(fetched(proxy)) > 9
        assert records.index.store and not problems(records)
    else:
        assert len(asked) <= {"sample": 5, "lazy": 0}[how] and asked == fetched(proxy)


def test_an_image_that_changes(proxy: FaultyProxy, bucket: Any, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Its new bytes are read, as those of a local file are, and not the old ones of the cache; `verify` names it."""
    one, other = sorted((dataset / "images").iterdir())[:2]
    rows = [row("changing.png", str(number)) for number in range(5)]
    bucket.put_object(Key="a/images/changing.png", Body=one.read_bytes())
    cfg = config(parts, dataset, tmp_path, "s3://bkt/a/images", rows=rows)
    records = open_again(cfg, parts)
    folder = records[0].folder
    assert isinstance(folder, RemoteFolder) and read_file(image_in(folder, "changing.png"), "") == one.read_bytes()
    assert verify_index(plan_of(cfg, parts), watch_silently) == (5, 5)
    bucket.put_object(Key="a/images/changing.png", Body=other.read_bytes())
    assert read_file(image_in(folder, "changing.png"), "") == other.read_bytes()
    with pytest.raises(DataError, match=r"image s3://bkt/a/images/changing\.png is not what it was"):
        verify_index(plan_of(cfg, parts), watch_silently)


def test_an_image_that_is_deleted_in_training(
    proxy: FaultyProxy, bucket: Any, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Its records are skipped as those of a broken image are; a bucket that is away is no fault of a record."""
    image = next(iter(sorted((dataset / "images").iterdir())))
    rows = [row(f"gone-{number}.png", str(number)) for number in range(3)]
    for own in rows:
        bucket.put_object(Key=f"a/images/{own['image']}", Body=image.read_bytes())
    words = "data.cache_gb=0", "global_batch_size=3", *SKIP
    cfg = config(parts, dataset, tmp_path, "s3://bkt/a/images", *words, rows=rows)
    open_again(cfg, parts)
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    bucket.Object("a/images/gone-1.png").delete()
    step = steps[0]
    assert not isinstance(step, Exception)
    assert [(own.number, own.kind) for own in step.facts.skipped] == [(1, Kind.image_missing)]
    steps.records.index.store.data_files._ahead.storage.deadline = 0.5
    proxy.spoil("503")
    assert isinstance(steps[0], RemoteAway)
    proxy.spoil("", 0)
    bucket.put_object(Key="a/images/gone-1.png", Body=image.read_bytes())
    step = steps[0]
    assert not isinstance(step, Exception) and not step.facts.skipped


def test_credentials_that_are_refused(bucket: Any, proxy: FaultyProxy) -> None:
    """An answer to HEAD has no word for what is wrong."""
    proxy.spoil("expired")
    proxy.with_heads = True
    try:
        with pytest.raises(RemoteForbidden):
            RemoteStorage().stat("s3://bkt/a/images/x.jpg")
    finally:
        proxy.with_heads = False


def test_sizes_of_missing_and_large_images(bucket: Any, tmp_path: Path) -> None:
    """What is fetched ahead is read; a head is no longer than its object."""
    Image.new("RGB", (37, 11)).save(small := io.BytesIO(), "PNG")
    bucket.put_object(Key="b/small.png", Body=small.getvalue())
    shards = DataFiles(cache=CacheFolder(tmp_path / "cache", 1))
    folder = RemoteFolder("s3://bkt/b", shards)
    images = [image_in(folder, name) for name in ("small.png", "none.png")]
    shards.fetch_ahead([ImageLocation("s3://bkt/b/small.png", 0, HEAD_BYTES), ImageLocation("s3://bkt/b/none.png")])
    assert read_size(images[0], "x") == (37, 11)
    with pytest.raises(ImageError) as missing:
        read_size(images[1], "record 7")
    assert missing.value.kind == Kind.image_missing and str(missing.value).startswith("record 7: image s3://bkt/b/none")


@pytest.mark.parametrize("url, error", [
    ("s3://", SourceError), ("'s3://bkt/a?versionId=1'", SourceError), ("hf://models/a/b", SourceError),
    ("hf://datasets/org/other/images", RemoteGone),
])  # fmt: skip
def test_urls_of_no_folder(
    url: str, error: type[Exception], hub: FakeHub, bucket: Any, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(error):
        open_again(config(parts, dataset, tmp_path, url), parts)


def test_questions_of_a_benchmark(bucket: Any, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Their images are found and read below the folder; a missing one is named before a model is loaded."""
    image = sorted((dataset / "images").iterdir())[0]
    data = config(parts, dataset, tmp_path, "s3://bkt/a/images").data
    asked = [first_question(parse_record("q.json", n, row(name))) for n, name in enumerate([image.name, "none-1.png"])]
    check_images(asked[:1], data)
    (file,) = with_paths(asked[0], folder_of(data)).images
    assert read_file(file, "") == image.read_bytes()
    with pytest.raises(DataError, match=r"record 1 .*image s3://bkt/a/images/none-1\.png does not exist"):
        check_images(asked, data)
