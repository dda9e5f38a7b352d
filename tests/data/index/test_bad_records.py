"""Every planted fault is found, each as what it is, and nothing else; and training goes on without them, or not."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from planted import ALSO, FAULTS, LINES_ONLY, turns, write_planted
from small import make_config, write_json
from test_build import open_again, plan_of

from llava_fsdp.config import Config, TooLong
from llava_fsdp.data.index import build as index_module
from llava_fsdp.data.index import dataset
from llava_fsdp.data.index import record_store as texts_module
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine import bad_records as door_module
from llava_fsdp.data.index.examine.bad_records import open_records, refuse_bad_records, remarks
from llava_fsdp.data.index.statistics import PAGE
from llava_fsdp.data.index.worker_pool import open_column
from llava_fsdp.data.problems import BITS, PROBLEMS, Kind, is_kept, mask
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.text.progress import watch_silently
from llava_fsdp.train import main as train


def config(parts: Path, path: Path, *overrides: str) -> Config:
    here = f"data.path={path}", f"data.images={path.parent / 'images'}"
    return make_config(parts, path.parent, path.parent / "output", *here, *overrides)


def kinds_found(records: Records) -> list[set[str]]:
    flags = records.index.flags(0, len(records.index))
    return [{str(kind) for kind in Kind if flag & BITS[kind]} for flag in flags.tolist()]


@pytest.fixture(scope="module", params=["json", "jsonl"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str | None]]:
    return write_planted(tmp_path_factory.mktemp(request.param), request.param == "jsonl")


def test_every_kind_is_planted() -> None:
    elsewhere = {"images_unset", "chat_template"}  # the last one needs a chat template (data/text)
    assert {kind for kind, _ in [*FAULTS, *LINES_ONLY]} | elsewhere == set(Kind) == set(PROBLEMS)


def test_every_fault_is_named_exactly(case: tuple[Path, list[str | None]], parts: Path) -> None:
    path, planted = case
    cfg = config(parts, path)
    records = open_again(cfg, parts)
    expected = [{kind, *ALSO.get(kind, ())} if kind else set() for kind in planted]
    assert kinds_found(records) == expected
    # and told with the record's number, its id and what to do
    rows = list(records.index.problems())
    assert [(r["record"], r["kind"]) for r in sorted(rows, key=lambda r: (r["record"], r["kind"]))] == sorted(
        (number, kind) for number, kinds in enumerate(expected) for kind in kinds
    )
    for row in rows:
        line = row["record"] + (1 if path.suffix == ".jsonl" else 2)
        assert row["reason"].startswith(f"{path}, line {line}, record {row['record']}"), row
        if row["id"] is not None:
            assert row["kind"] == "duplicate_id" or row["id"] in (
                f"{planted[row['record']]}-{row['record'] // 2}",
                "half \ud83d",
            )


def test_what_is_kept_and_what_is_not(case: tuple[Path, list[str | None]], parts: Path) -> None:
    path, planted = case
    cfg = config(parts, path, "data.bad_records=skip", "data.max_bad_records=99%")
    records = open_again(cfg, parts)
    kept = [n for n, kind in enumerate(planted) if kind is None or is_kept(Kind(kind), cfg.labels, cfg.data.too_long)]
    assert [records[n].index for n in range(len(records))] == kept
    assert {planted[n] for n in kept} == {None, "duplicate_id", "special_token", "too_long"}
    assert len(records) + records.num_wrong == len(planted)
    assert all(row["reason"].startswith(row["record"]) for row in records.left_out()), "one name everywhere"
    left_out = {row["record"] for row in records.left_out()}
    assert len(left_out) == records.num_wrong and all(str(path) in record for record in left_out)
    for number in range(len(records)):
        record = records[number]
        sample = plan_of(cfg, parts).encoder(record)
        assert sample is not None
        facts = len(sample.input_ids), sample.num_labels, len(sample.images), sample.positions_cut, sample.labels_cut
        columns = records.lengths, records.labels, records.images, records.positions_cut, records.labels_cut
        assert facts == tuple(int(column[number]) for column in columns)
        assert record.llava_length == records.words[number]
    refuse_bad_records(records, cfg.data)


COLUMNS = {
    "lengths": "length", "labels": "labels", "images": "images", "tiles": "tiles", "image_tokens": "image_tokens",
    "positions_cut": "positions_cut", "labels_cut": "labels_cut", "pictures": "pictures", "words": "words",
}  # fmt: skip


def test_columns_without_skipped_records_are_files_of_the_index(
    case: tuple[Path, list[str | None]], parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written once, mapped from then on; in memory where the index cannot be written. With either, all is the same."""
    path, _ = case
    monkeypatch.setattr(dataset, "BLOCK", 3)
    for too_long in TooLong:
        cfg = config(parts, path, f"data.too_long={too_long.value}")
        records = open_again(cfg, parts)
        index, numbers = records.index, records.kept_samples
        bits = mask(*records.dropped_kinds)
        flags = index.flags(0, len(index))
        assert numbers is not None and numbers.tolist() == np.flatnonzero((flags & bits) == 0).tolist()
        assert isinstance(numbers, np.memmap) and numbers.dtype == np.int64
        folder = Path(str(numbers.filename)).parent
        assert folder.parent == index.encoded.parent
        for name, column in COLUMNS.items():
            whole = open_column(index.records if name in ("pictures", "words") else index.encoded, column)
            values = getattr(records, name)
            assert isinstance(values, np.memmap) and values.dtype == whole.dtype
            assert values.tolist() == whole[numbers].tolist()
        whole = hashlib.sha256(index.store.fingerprint.encode() + numbers.tobytes())
        assert records.fingerprint == whole.hexdigest()[:32]
        before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
        again = open_again(cfg, parts)
        mapped = {name: getattr(again, name).tolist() for name in COLUMNS}
        assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before
        aside = folder.rename(tmp_path / folder.name)
        folder.write_bytes(b"a file where the folder should be")
        unwritten = open_again(cfg, parts)
        assert not isinstance(unwritten.kept_samples, np.memmap) and unwritten.fingerprint == records.fingerprint
        assert {name: getattr(unwritten, name).tolist() for name in COLUMNS} == mapped
        assert unwritten.source_counts == records.source_counts
        folder.unlink()
        shutil.move(aside, folder)


def test_training_stops_at_the_door(case: tuple[Path, list[str | None]], parts: Path) -> None:
    path, planted = case
    records = open_again(config(parts, path), parts)
    with pytest.raises(DataError) as caught:
        refuse_bad_records(records, config(parts, path).data)
    said = str(caught.value)
    assert said.startswith(f"{path}: {records.num_wrong} of {len(planted)} records are wrong\n  ")
    assert f"\n  path_outside: 3 ({PROBLEMS[Kind.path_outside].meaning})\n" in said and "too_long" not in said
    first = said.rpartition("report.html; fix them, or leave them out: ")[2].split()
    assert first == ["data.bad_records=skip", f"data.max_bad_records={records.num_wrong}"]
    too_few = "data.bad_records=skip", f"data.max_bad_records={records.num_wrong - 1}"
    with pytest.raises(DataError, match=rf"which allows {records.num_wrong - 1}: ") as caught:
        refuse_bad_records(records, config(parts, path, *too_few).data)
    second = str(caught.value).rpartition(": ")[2]
    refuse_bad_records(records, config(parts, path, *first).data)
    refuse_bad_records(records, config(parts, path, *too_few, second).data)
    with pytest.raises(DataError, match=r"leave them out: data\.bad_records=skip$"):
        refuse_bad_records(records, config(parts, path, second).data)
    with pytest.raises(DataError, match=r"2 of \d+ records are too long"):
        refuse_bad_records(records, config(parts, path, "data.bad_records=skip", "data.too_long=fail").data)


def test_training_goes_on_without_them(case: tuple[Path, list[str | None]], parts: Path, tmp_path: Path) -> None:
    """An epoch of all that are kept and of nothing else, and a list of the others."""
    path, planted = case
    said = f"output_dir={tmp_path}", "epochs=1", "max_steps=null", "data.bad_records=skip", "data.max_bad_records=99%"
    cfg = config(parts, path, *said)
    train.train(cfg)
    kept = sum(kind is None or is_kept(Kind(kind), cfg.labels, cfg.data.too_long) for kind in planted)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["samples"] for step in steps) == kept and not any(step["skipped_records"] for step in steps)
    rows = [json.loads(line) for line in (tmp_path / "skipped_records.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0} and len({row["record"] for row in rows}) == len(planted) - kept
    with pytest.raises(DataError, match=r"fix them, or leave them out: data\.bad_records=skip"):
        train.train(config(parts, path, f"output_dir={tmp_path / 'other'}"))
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_no_folder_of_pictures(parts: Path, tmp_path: Path) -> None:
    path, planted = write_planted(tmp_path, lines=False)
    found = kinds_found(open_again(config(parts, path, "data.images=null"), parts))
    pictures = [
        {k for k in kinds if k.startswith("image_") and k not in ("images_unset", "image_count")} for kinds in found
    ]
    assert not any(pictures)
    with_pictures = [n for n, kind in enumerate(planted) if kind is not None and kind.startswith("image_")]
    assert all("images_unset" in found[n] for n in with_pictures)


def test_links_may_be_allowed(parts: Path, tmp_path: Path) -> None:
    path, planted = write_planted(tmp_path, lines=False)
    found = kinds_found(open_again(config(parts, path, "data.allow_links=true"), parts))
    linked = [n for n, kind in enumerate(planted) if kind == "path_outside" and not found[n]]
    assert len(linked) == 1


def test_heads_alone_show_no_cut_ends(parts: Path, tmp_path: Path) -> None:
    path, planted = write_planted(tmp_path, lines=False)
    found = kinds_found(open_again(config(parts, path, "data.examine=head"), parts))
    missed = {kind for kind, kinds in zip(planted, found, strict=True) if kind and kind not in kinds}
    assert missed == {"image_truncated"}, "and sizes, bombs and missing files are still found"


def test_bad_pictures_are_looked_at_again_once(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by who has just looked, nor by who waited meanwhile; and never in vain where nothing can be written."""
    looks = []
    own = index_module.fixed_chunks
    monkeypatch.setattr(index_module, "fixed_chunks", lambda *a: looks.append(1) or own(*a))
    path, _ = write_planted(tmp_path, lines=False)
    cfg = config(parts, path)
    plan = plan_of(cfg, parts)
    before = index_module.last_look(plan)
    for expected in (0, 1):
        with pytest.raises(DataError, match="records are wrong"):
            open_records(cfg, plan.encoder, plan.reader, watch_silently)
        assert len(looks) == expected
        report = cfg.data.index_folder / PAGE
        assert report.is_file(), "the message names it"
        report.unlink()
    index_module.open_index(plan, watch_silently, look_again=True, since=before)
    assert len(looks) == 1, "who came before it and waited"
    monkeypatch.setattr(index_module, "holding_lock", denied)
    monkeypatch.setattr(door_module, "write_report", denied)
    with pytest.raises(DataError, match="records are wrong"):
        open_records(cfg, plan.encoder, plan.reader, watch_silently)


def test_one_file_twice_is_said(parts: Path, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(dataset / "text.json")
    sources = f"+data.sources.a.path={dataset / 'text.json'}", f"+data.sources.b.path={tmp_path / 'link.json'}"
    here = "data.path=null", f"data.index={tmp_path / 'index'}", "data.images=null"
    records = open_again(make_config(parts, dataset, tmp_path, *here, *sources), parts)
    assert remarks(records).endswith(f"sources a and b are the same file, {dataset / 'text.json'}")


def denied(*_: object) -> None:
    raise PermissionError(30, "Read-only file system")


@pytest.mark.parametrize(
    ("key", "kind", "refused", "kept"),
    [
        (
            "image_path",
            "media_not_read",
            "from the record's keys image and images",
            "name video, audio or images in a key",
        ),
        ("file_name", "tag_without_image", "is the key called", "have <image> in their text but no image"),
    ],
)
def test_a_whole_dataset_without_its_pictures_is_no_secret(
    key: str, kind: str, refused: str, kept: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Its key has another name: exact labels refuse it, the original's train on its text and say so."""
    rows = [{"id": n, key: "0.jpg", "conversations": turns()} for n in range(4)]
    path = tmp_path / "a.json"
    write_json(path, [*rows, {"id": 9, "conversations": turns("what is it")}])
    cfg = config(parts, path, f"data.images={dataset / 'images'}")
    with pytest.raises(DataError, match=rf"4 of 5 records are wrong\n  {kind}: 4 (.|\n)*{refused}"):
        refuse_bad_records(open_again(cfg, parts), cfg.data)
    original = config(parts, path, f"data.images={dataset / 'images'}", "labels=llava_v1_5")
    said = remarks(open_again(original, parts))
    assert f"of 5 records, 4 {kept}" in said
    assert f"no record of {path} has an image, but {dataset / 'images'} is set" in said
    assert remarks(open_again(make_config(parts, dataset, tmp_path, f"data.index={tmp_path / 'i'}"), parts)) == ""


MEDIA = {
    "video": ({"video": "a.mp4"}, True),
    "another case": ({"Audios": ["a.wav"]}, True),
    "a struct": ({"image_url": {"url": "https://example.org"}}, True),
    "beside its image": ({"image": "0.jpg", "pictures": ["0.jpg", "1.png"]}, True),
    "null": ({"video": None, "images": [], "audio": "", "image_url": {"url": None}, "videos": [None]}, False),
    "about it": ({"image_id": 7, "video_length": 3, "imagery": "x", "image_sizes": [3, 4], "imageCaption": "x"}, False),
    "a number": ({"image_2": "0.jpg"}, True),
    "base64": ({"imageBase64": "aGVsbG8="}, True),
    "frames": ({"video_frames": ["0.jpg"]}, True),
    "wide letters": ({"\uff36ideo\0": "a.mp4"}, True),
    "other words": ({"PNG-path": "0.png"}, True),
}


@pytest.mark.parametrize("case", MEDIA)
def test_keys_that_name_media(case: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    keys, is_media = MEDIA[case]
    write_json(tmp_path / "a.json", [{"conversations": turns("<image>\nwhat" if "image" in keys else "what"), **keys}])
    records = open_again(config(parts, tmp_path / "a.json", f"data.images={dataset / 'images'}"), parts)
    assert kinds_found(records) == [{"media_not_read"} if is_media else set()]


@pytest.mark.parametrize(
    ("text", "is_media"),
    [
        ("<video>\nwhat happens", True),
        ("compare <Audio> and the text", True),
        ("why does <video> not show?\n<video src='a'></video>", False),
        ("a < video > b", False),
    ],
)
def test_tags_of_media_in_questions(text: str, is_media: bool, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of an answer they are text."""
    answer = [{"from": "human", "value": "how"}, {"from": "gpt", "value": text}]
    write_json(tmp_path / "a.json", [{"conversations": turns(text)}, {"conversations": answer}])
    records = open_again(config(parts, tmp_path / "a.json", f"data.images={dataset / 'images'}"), parts)
    assert kinds_found(records) == [{"media_not_read"} if is_media else set(), set()]


def test_a_duplicate_keeps_its_other_problems(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = [{"id": "a", "conversations": turns("what")} for _ in range(2)]
    rows[1] |= MEDIA["video"][0]
    write_json(tmp_path / "a.json", rows)
    records = open_again(config(parts, tmp_path / "a.json", f"data.images={dataset / 'images'}"), parts)
    assert kinds_found(records) == [set(), {"media_not_read", "duplicate_id"}]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_record_that_is_too_large_is_never_parsed(
    suffix: str, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named and counted, those around it are read; another limit is another index."""
    rows = [{"id": n, "conversations": turns("what")} for n in range(3)]
    rows[1]["conversations"] = turns("w" * 5000)
    texts = [json.dumps(row) for row in rows]
    path = tmp_path / f"a.{suffix}"
    path.write_text("\n".join(texts) if suffix == "jsonl" else f"[{', '.join(texts)}]")
    parsed: list[int] = []
    own = texts_module.parse_text
    monkeypatch.setattr(texts_module, "parse_text", lambda p, n, *a: (parsed.append(n), own(p, n, *a))[1])
    small = config(
        parts, path, f"data.images={dataset / 'images'}", "data.max_record_bytes=2000", "data.bad_records=skip"
    )
    records = open_again(small, parts)
    assert kinds_found(records) == [set(), {"record_too_large"}, set()] and set(parsed) == {0, 2}
    (row,) = records.index.problems()
    line = 2 if suffix == "jsonl" else 1
    assert row["reason"].startswith(f"{path}, line {line}, record 1 has {len(texts[1]):,} bytes, over data.max_record")
    assert [r.id for r in map(records.__getitem__, range(2))] == ["0", "2"] and records.fingerprint
    whole = config(parts, path, f"data.images={dataset / 'images'}", "data.max_length=512")
    assert "too_long" in kinds_found(open_again(whole, parts))[1], "it has been read"


def test_special_tokens_are_counted_and_no_fault(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = [{"conversations": turns("end </s>")}, {"conversations": turns("no end")}]
    write_json(tmp_path / "a.json", rows)
    made = {}
    for how in ("text", "parse"):
        cfg = config(parts, tmp_path / "a.json", f"data.special_tokens={how}", f"data.images={dataset / 'images'}")
        records = open_again(cfg, parts)
        refuse_bad_records(records, cfg.data)
        assert kinds_found(records) == [{"special_token"}, set()] and len(records) == 2
        assert "1 have a special token in their text" in remarks(records)
        made[how] = records
    assert made["text"].index.encoded != made["parse"].index.encoded
    assert made["text"].lengths[0] > made["parse"].lengths[0] and made["text"].lengths[1] == made["parse"].lengths[1]
    with pytest.raises(ConfigError, match=r"data\.special_tokens=text: labels=llava_v1_5"):
        config(parts, tmp_path / "a.json", "labels=llava_v1_5", "data.special_tokens=text")
