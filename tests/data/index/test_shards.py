"""A data source of many files of records: the same samples as one file, and only new files are examined."""

import errno
import gzip
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from small import make_config
from test_build import open_again
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.find_files import find_files
from llava_fsdp.data.records.packed_text import copy_name, is_copied, refused
from llava_fsdp.runtime.errors import ConfigError, DataError, SourceError

COLUMNS = ("lengths", "labels", "images", "pictures", "tiles", "words")


def rows_of(dataset: Path) -> list[dict]:
    return json.loads((dataset / "mixed.json").read_text())


def write_shards(dataset: Path, folder: Path, size: int = 7) -> list[Path]:
    """The records in JSON, JSON Lines and Parquet files by turns."""
    rows, made = rows_of(dataset), []
    for number, begin in enumerate(range(0, len(rows), size)):
        own, name = rows[begin : begin + size], folder / f"part-{number:03d}"
        folder.mkdir(exist_ok=True)
        if number % 3 == 0:
            made.append(name.with_suffix(".json"))
            made[-1].write_text(json.dumps(own))
        elif number % 3 == 1:
            made.append(name.with_suffix(".jsonl"))
            made[-1].write_text("".join(json.dumps(row) + "\n" for row in own))
        else:
            made.append(name.with_suffix(".parquet"))
            parquet.write_table(pyarrow.Table.from_pylist(own), made[-1])
    return made


def config(parts: Path, dataset: Path, tmp_path: Path, path: object, *values: str) -> Config:
    named = "data.path=null" if path is None else f"data.path='{path}'"
    return make_config(parts, dataset, tmp_path, named, f"data.index={tmp_path / 'index'}", *values)


def samples(records: Records) -> list:
    return [(records[n].id, records[n].images, records[n].turns, records[n].sizes) for n in range(len(records))]


def test_records_without_ids_are_no_duplicates(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The first records of two files, which are named by their places alone."""
    (tmp_path / "two").mkdir()
    turns = [{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "a square"}]
    for name in ("a.json", "b.json"):
        (tmp_path / "two" / name).write_text(json.dumps([{"conversations": turns}]))
    records = open_again(config(parts, dataset, tmp_path, tmp_path / "two"), parts)
    assert len(records) == 2 and not records.counts["duplicate_id"]


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.json", "a.jsonl", "sub/c.parquet", "sub/.d.json", "x.txt", "a.json.index/known.json", ".e/f.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]")

    def found(value: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in find_files(value, "data.path")]

    assert found(str(tmp_path)) == ["a.jsonl", "b.json", "sub/c.parquet"]
    assert found(f"{tmp_path}/*.json*") == ["a.jsonl", "b.json"]
    assert found(f"{tmp_path}/**/*.parquet") == ["sub/c.parquet"]
    assert found(f"{tmp_path}/b.json,{tmp_path}/a.jsonl") == ["b.json", "a.jsonl"]
    assert found(f"[{tmp_path}/b.json, {tmp_path}/sub]") == ["b.json", "sub/c.parquet"]
    (tmp_path / "x,y[1].json").write_text("[]")
    assert found(f"{tmp_path}/x,y[1].json") == ["x,y[1].json"], "a file that exists is itself"
    (tmp_path / "a.json.index" / "rows.jsonl").write_text("[]")
    assert found(f"{tmp_path}/**/*.jsonl") == ["a.jsonl"], "the files of an index are no records"
    (tmp_path / "dataset_info.json").write_text("{}")
    assert "dataset_info.json" not in found(str(tmp_path))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "gone.json").symlink_to(tmp_path / "nothing")
    (tmp_path / "links" / "same.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "empty").mkdir()
    wrong = {
        "none": "is not a file or a folder", "empty": "a folder without a file of records",
        "*.tar": "a pattern that no file matches", f"b.json,{tmp_path}/links/same.json": "twice",
        "links": "no regular file, or a link to none", f"a.jsonl,{tmp_path}/*.jsonl": "twice",
    }  # fmt: skip
    for value, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            found(f"{tmp_path}/{value}")


@pytest.mark.slow
def test_many_files_are_as_one(parts: Path, dataset: Path, tmp_path: Path) -> None:
    files = write_shards(dataset, tmp_path / "shards")
    whole = open_again(config(parts, dataset, tmp_path / "one", dataset / "mixed.json"), parts)
    for path in (tmp_path / "shards", tmp_path / "shards" / "part-*", ",".join(map(str, files))):
        records = open_again(config(parts, dataset, tmp_path, path), parts)
        assert samples(records) == samples(whole)
        assert all(np.array_equal(getattr(records, name), getattr(whole, name)) for name in COLUMNS)
        assert records.source_counts == [len(whole)] and len(records.index.store.parts) == len(files)
    last = records[len(records) - 1]
    assert last.file == str(files[-1]) and last.index == (len(whole) - 1) % 7


def test_a_list_of_files_of_other_forms_is_one_source(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """LLaVA's turns, OpenAI's messages and the Cauldron's texts, in a list of YAML, under a name with a comma too. A
    record that is wrong is named in its own file, and a file that is added is examined alone."""
    said = [{"user": "what", "assistant": "a square"}]
    conversation = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "a square"}]
    messages = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "a square"}]
    one, two, three = tmp_path / "a.json", tmp_path / "b, c.jsonl", tmp_path / "d.parquet"
    one.write_text(json.dumps([{"id": f"a{n}", "conversations": conversation} for n in range(3)]))
    two.write_text("".join(json.dumps({"id": f"b{n}", "messages": messages}) + "\n" for n in range(2)))
    parquet.write_table(pyarrow.Table.from_pylist([{"id": "c0", "texts": said}]), three)

    def listed(*files: Path) -> Config:
        named = f"data.path={json.dumps([str(file) for file in files])}"  # a list in Hydra's grammar, as from YAML
        return make_config(parts, dataset, tmp_path, named, f"data.index={tmp_path / 'index'}")

    before = open_again(listed(one, two), parts)
    made = made_of(tmp_path / "index")
    records = open_again(listed(one, two, three), parts)
    assert [records[n].id for n in range(len(records))] == ["a0", "a1", "a2", "b0", "b1", "c0"]
    assert len({records[n].turns for n in range(len(records))}) == 1 and len(before) == 5
    assert [source.name for source in records.index.store.sources] == ["a.json"]
    assert made.items() <= made_of(tmp_path / "index").items(), "what was examined is examined again"
    with two.open("a") as file:
        file.write('{"id": "bad", "messages": [{"role": "user"}]}\n')
    (wrong,) = open_again(listed(one, two, three), parts).index.problems()
    assert wrong["record"] == 5 and f"{two}, line 3, record 2 (id bad)" in wrong["reason"]


def made_of(index: Path) -> dict[str, int]:
    """When each file of a chunk was made."""
    return {str(p.relative_to(index)): p.stat().st_mtime_ns for p in index.glob("chunks/*/*.npz")}


def test_only_new_and_changed_files_are_examined(parts: Path, dataset: Path, tmp_path: Path) -> None:
    files = write_shards(dataset, tmp_path / "shards")
    taken = files[2].rename(tmp_path / "later.parquet")
    cfg = config(parts, dataset, tmp_path, tmp_path / "shards")
    first = open_again(cfg, parts)
    before, passes = made_of(tmp_path / "index"), 4  # positions, records, images and tokens
    taken.rename(files[2])
    added = open_again(cfg, parts)
    after = made_of(tmp_path / "index")
    assert {name: after[name] for name in before} == before and len(after) == len(before) + passes
    fresh = open_again(config(parts, dataset, tmp_path / "fresh", tmp_path / "shards"), parts)
    assert samples(added) == samples(fresh) and list(added.index.problems()) == list(fresh.index.problems())
    assert all(np.array_equal(getattr(added, name), getattr(fresh, name)) for name in COLUMNS)
    rows = json.loads(files[0].read_text())
    files[0].write_text(json.dumps(rows[:-1]))
    assert len(open_again(cfg, parts)) == len(added) - 1
    changed = made_of(tmp_path / "index")
    assert {name: changed[name] for name in after} == after and len(changed) == len(after) + passes
    files[0].write_text(json.dumps(rows))
    files[2].unlink()
    again = open_again(cfg, parts)
    assert made_of(tmp_path / "index") == changed and samples(again) == samples(first)
    assert again.fingerprint == first.fingerprint != added.fingerprint


def test_a_file_beside_the_only_one_is_examined_alone(parts: Path, dataset: Path, tmp_path: Path) -> None:
    _, *others = write_shards(dataset, tmp_path / "shards")
    taken = [other.rename(tmp_path / other.name) for other in others]
    cfg = config(parts, dataset, tmp_path, tmp_path / "shards")
    open_again(cfg, parts)
    before = made_of(tmp_path / "index")
    taken[0].rename(others[0])
    open_again(cfg, parts)
    after = made_of(tmp_path / "index")
    assert {name: after[name] for name in before} == before and len(after) == 2 * len(before) == 8


def test_problems_are_numbered_in_all_files_and_named_in_their_own(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = rows_of(dataset)[:6]
    rows[4]["image"], rows[5]["id"] = "none.png", rows[0]["id"]
    (tmp_path / "shards").mkdir()
    for number in range(3):
        (tmp_path / "shards" / f"{number}.json").write_text(json.dumps(rows[2 * number : 2 * number + 2]))
    cfg = config(parts, dataset, tmp_path, tmp_path / "shards", "data.bad_records=skip", "data.max_bad_records=1")
    records = open_again(cfg, parts)
    found = {row["kind"]: row for row in records.index.problems()}
    assert {kind: row["record"] for kind, row in found.items()} == {"image_missing": 4, "duplicate_id": 5}
    assert f"{tmp_path}/shards/2.json, line 1, record 0 " in found["image_missing"]["reason"]
    assert f"record 0 on line 1 of {tmp_path}/shards/0.json has the same id" in found["duplicate_id"]["reason"]
    assert len(records) == 5 and records[4].index == 1


@pytest.mark.parametrize("text", ["[]", '[{"id": 1}', ""])
def test_a_broken_file_is_named(text: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    files = write_shards(dataset, tmp_path / "shards")
    files[0].write_text(text)
    with pytest.raises((DataError, SourceError), match=r"part-000\.json"):
        open_again(config(parts, dataset, tmp_path, tmp_path / "shards"), parts)
    assert len(made_of(tmp_path / "index")) <= len(files), "the other files are done"


def test_sources_of_several_files(parts: Path, dataset: Path, tmp_path: Path) -> None:
    files = write_shards(dataset, tmp_path / "shards")
    half = len(files) // 2
    named = [
        f"++data.sources.{name}.path='{','.join(map(str, own))}'"
        for name, own in (("a", files[:half]), ("b", files[half:]))
    ]
    cfg = config(parts, dataset, tmp_path, None, *named)
    records = open_again(cfg, parts)
    counts = [len(json.loads(f.read_text())) if f.suffix == ".json" else 7 for f in files]
    assert records.source_counts[0] == sum(counts[:half]) and [s.name for s in records.index.store.sources] == [
        "a",
        "b",
    ]


def write_packed(path: Path, text: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text))
    else:
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(text)
    return path


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_compressed_file_is_as_its_content(suffix: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows_of(dataset))
    path = write_packed(tmp_path / f"a{suffix}", text)
    records = open_again(config(parts, dataset, tmp_path, path), parts)
    whole = open_again(config(parts, dataset, tmp_path / "one", dataset / "mixed.json"), parts)
    assert samples(records) == samples(whole) and np.array_equal(records.lengths, whole.lengths)
    assert records[3].file == str(path) and records[3].line == 4
    assert open_again(config(parts, dataset, tmp_path, path), parts).fingerprint == records.fingerprint


@pytest.mark.parametrize("suffix", slow_after(1, [".jsonl.gz", ".jsonl.zst"]))
def test_a_damaged_or_hostile_compressed_file_is_named(suffix: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    whole = write_packed(tmp_path / f"whole{suffix}", b'{"id": 1}\n' * 999).read_bytes()
    bomb = write_packed(tmp_path / f"bomb{suffix}", b" " * (300 << 20)).read_bytes()
    cases = {"cut": whole[:-9], "other": b'{"id": 1}\n', "bomb": bomb}
    for name, content in cases.items():
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.jsonl.* (cannot be unpacked|unpacks to more than 200 times)"):
            open_again(config(parts, dataset, tmp_path / name, path), parts)
        assert not list((tmp_path / name / "index").glob("rows/*/*.jsonl"))


@pytest.mark.parametrize(
    ("path", "is_text", "name"),
    [
        ("a.jsonl.gz", True, "copy.jsonl"), ("A.JSONL.ZST", True, "copy.jsonl"), ("s3://b/a.JSON", True, "copy.json"),
        ("gs://b/a.jsonl", True, "copy.jsonl"), ("hf://datasets/o/n/a.jsonl.gz", True, "copy.jsonl"),
        ("a.json", False, "copy.json"), ("s3://b/a.parquet", False, "copy.jsonl"),
    ],
)  # fmt: skip
def test_which_text_files_are_copied_into_the_index(path: str, is_text: bool, name: str) -> None:
    """Those that are compressed, and those that are far away; the suffix says how the copy is read."""
    assert (is_copied(path), copy_name(path)) == (is_text, name)


@pytest.mark.parametrize("error", [gzip.BadGzipFile("x"), EOFError("x"), zlib.error("x"), OSError("pyarrow's own")])
def test_errors_of_unpacking_name_the_file(error: Exception) -> None:
    """Those of the system, such as of a full disk, stay what they are."""
    raised: Exception | None = None
    try:
        with refused("a.jsonl.gz"):
            raise error
    except Exception as own:
        raised = own
    assert isinstance(raised, DataError) and "a.jsonl.gz" in str(raised)
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space") as caught, refused("a.jsonl.gz"):
        raise full
    assert caught.value is full
