"""The samples of WebDataset tars give the records that JSON gives, with their images where they lie."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from harness import CPU
from small import make_config
from test_build import FITS, open_again
from test_verify_index import put, verify

from llava_fsdp.data.images.check import inline_images, read_file
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.find_files import find_files
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.records.forms.parse_record import NO_KEYS, RecordKeys
from llava_fsdp.data.records.record import LOCATION
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.runtime.errors import DataError, SourceError

ASKS = [{"from": "human", "value": "<image>\na"}, {"from": "gpt", "value": "b"}]
TEXT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def write(path: Path, members: dict[str, bytes | str | dict | list]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = (
                content
                if isinstance(content, bytes)
                else (content if isinstance(content, str) else json.dumps(content)).encode()
            )
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def read(path: Path, n: int, keys: RecordKeys = NO_KEYS) -> tuple[tuple[str, ...], list[bytes | None]]:
    """The id and questions of a record, and the bytes of its images."""
    record = RecordFile(path, keys=keys)[n]
    inline = inline_images(record)
    return (record.id, *(turn.text for turn in record.turns)), [
        read_file(inline[name], "") if name in inline else None for name in record.images
    ]


FORMS = {
    "no image key": {"conversations": ASKS},
    "an empty image key": {"conversations": ASKS, "image": None},
    "an extension": {"conversations": ASKS, "image": "jpg"},
    "a file name": {"conversations": ASKS, "image": "a.jpg"},
    "a path": {"conversations": ASKS, "images": ["coco/train2017/A.JPG"]},
    "another name": {"conversations": ASKS, "image": "coco/train2017/000000033471.jpg"},
    "messages": {"messages": [
        {"role": "user", "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "\na"}]},
        {"role": "assistant", "content": "b"},
    ]},
    "messages without names": {"messages": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\na"}]},
        {"role": "assistant", "content": "b"},
    ]},
    "texts": {"texts": [{"user": "a", "assistant": "b"}]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.tar", {"x/a.jpg": b"image", "x/a.json": FORMS[form], "x/b.json": {"conversations": TEXT}}
    )
    assert read(path, 0) == (("x/a", "<image>\na", "b"), [b"image"])
    assert read(path, 1) == (("x/b", "a", "b"), [])


def test_several_images_keep_their_order(tmp_path: Path) -> None:
    """That of the record or, where it names none, of the tar."""
    asks = [{"from": "human", "value": "<image><image>a"}, {"from": "gpt", "value": "b"}]
    members = {
        "a.10.png": b"ten", "a.2.jpg": b"two", "a.json": {"id": 7, "conversations": asks},
        "b.10.png": b"ten", "b.2.jpg": b"two", "b.json": {"conversations": asks, "images": ["b.2.jpg", "10.png"]},
    }  # fmt: skip
    path = write(tmp_path / "a.tar", members)
    assert read(path, 0) == (("7", "<image><image>a", "b"), [b"ten", b"two"])
    assert read(path, 1)[1] == [b"two", b"ten"]


def test_question_and_answer_may_be_members(tmp_path: Path) -> None:
    keys = RecordKeys("question.txt", "answer.txt", "jpg")
    members = {"a.jpg": b"one", "a.seg.png": b"two", "a.question.txt": "why?", "a.answer.txt": "so"}
    assert read(write(tmp_path / "a.tar", members), 0, keys) == (("a", "<image>\nwhy?", "so"), [b"one"])


def opened(path: Path, parts: Path, dataset: Path, *overrides: str) -> Records:
    values = ("data.bad_records=skip", "data.max_bad_records=100%", *overrides)
    return open_again(make_config(parts, dataset, path.parent, f"data.path={path}", *values), parts)


def test_hostile_samples_are_problems_of_their_kind(parts: Path, dataset: Path, tmp_path: Path) -> None:
    image = (dataset / "images" / "0.jpg").read_bytes()
    outside = {LOCATION: ["x", 0, 10**9, None]}
    members = {
        "good.jpg": image, "good.json": {"conversations": ASKS},
        "cut.jpg": image, "cut.json": '{"conversations": [\n',
        "line.json": '{"conversations": "a\nb"}',
        "bytes.json": b'{"conversations": "\xff"}',
        "none.jpg": image,
        "list.json": [],
        "wrong.json": {"conversations": ASKS, "image": {LOCATION: [0]}},
        "large.json": {"conversations": ASKS, "more": "a" * 3000},
        "film.mp4": b"0", "film.json": {"conversations": TEXT},
        "broken.jpg": image[:-99], "broken.json": {"conversations": ASKS},
        "empty.jpg": b"", "empty.json": {"conversations": ASKS},
        "far.json": {"conversations": ASKS, "image": outside},
    }  # fmt: skip
    records = opened(write(tmp_path / "a.tar", members), parts, dataset, "data.max_record_bytes=2000")
    found = {row["id"]: row["kind"] for row in records.index.problems()}
    assert found == {
        "none": "bad_form", "wrong": "bad_form", "large": "record_too_large", "film": "media_not_read",
        "broken": "image_truncated", "empty": "image_empty", "far": "bad_form", None: "bad_form",
    }  # fmt: skip
    kinds = [row["kind"] for row in records.index.problems() if row["id"] is None]
    assert sorted(kinds) == ["bad_form", "not_json", "not_json", "not_utf8"] and len(records) == 1


def test_tars_are_verified(parts: Path, dataset: Path, tmp_path: Path) -> None:
    image = (dataset / "images" / "0.jpg").read_bytes()
    path = write(
        tmp_path / "a.tar", {"a.jpg": image, "a.json": {"conversations": ASKS}, "b.json": {"conversations": TEXT}}
    )
    cfg = make_config(parts, dataset, tmp_path, f"data.path={path}", "data.images=null")

    open_again(cfg, parts)
    assert verify(cfg, parts) == (2, 1)
    content = path.read_bytes()
    put(path, content.replace(image, image[:400] + bytes([image[400] ^ 1]) + image[401:]))
    with pytest.raises(DataError, match=r"1 records or images (.|\n)*image a\.jpg in .* is not what it was"):
        verify(cfg, parts)
    put(path, content.replace(b'"value": "b"', b'"value": "c"'))
    with pytest.raises(DataError, match=r"2 records or images (.|\n)*record 0 \(id a\) is not what it was"):
        verify(cfg, parts)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst", "a.tar"])
def test_compressed_tars_are_refused(name: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    with tarfile.open(folder / name, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.json"))
    assert find_files(str(folder), "data.path") == [str(folder / name)]
    with pytest.raises(DataError, match="it is compressed, so that no image can be read alone"):
        open_again(make_config(parts, dataset, tmp_path, f"data.path={folder}"), parts)


def test_a_tar_that_ends_early(parts: Path, dataset: Path, tmp_path: Path) -> None:
    image = (dataset / "images" / "0.jpg").read_bytes()
    path = write(tmp_path / "a.tar", {"a.json": {"conversations": ASKS}, "a.jpg": image})
    content = path.read_bytes()
    for end in (300, 700, 1024, 2000):
        path.write_bytes(content[:end])
        with pytest.raises(DataError) as caught:
            opened(path, parts, dataset)
        assert caught.value.exit_code == 2 and str(path) in str(caught.value)
    path.write_bytes(content)
    cfg = make_config(parts, dataset, tmp_path, f"data.path={path}", "data.bad_records=skip")
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    path.write_bytes(content[:1600])
    with pytest.raises(SourceError, match=r"ends at byte 1600"):
        steps.read(0)
