"""Every planted fault is found, each as what it is, and nothing else; and training goes on without them, or not."""

import json
from pathlib import Path

import pytest
from planted import ALSO, FAULTS, LINES_ONLY, turns, write_planted
from small import make_config, write_json
from test_index import open_again, plan_of

from llava_fsdp import train
from llava_fsdp.config import Config
from llava_fsdp.data import door as door_module
from llava_fsdp.data import index as index_module
from llava_fsdp.data.door import check_door, open_records, remarks
from llava_fsdp.data.problems import BITS, PROBLEMS, Kind, is_kept
from llava_fsdp.data.progress import watch_silently
from llava_fsdp.data.records import Records
from llava_fsdp.errors import DataError


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
    assert {kind for kind, _ in [*FAULTS, *LINES_ONLY]} | {"images_unset"} == set(Kind) == set(PROBLEMS)


def test_every_fault_is_named_exactly(case: tuple[Path, list[str | None]], parts: Path) -> None:
    path, planted = case
    cfg = config(parts, path)
    records = open_again(cfg, parts)
    expected = [{kind, *ALSO.get(kind, ())} if kind else set() for kind in planted]
    assert kinds_found(records) == expected
    # and told with the record's number, its id and what to do
    rows = list(records.index.rows())
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
    cfg = config(parts, path, "data.bad=quarantine", "data.bad_budget=99%")
    records = open_again(cfg, parts)
    kept = [n for n, kind in enumerate(planted) if kind is None or is_kept(Kind(kind), cfg.labels, cfg.data.too_long)]
    assert [records[n].index for n in range(len(records))] == kept
    assert {planted[n] for n in kept} == {None, "duplicate_id", "special_token", "too_long"}
    assert len(records) + records.out == len(planted)
    assert all(row["reason"].startswith(row["record"]) for row in records.left_out()), "one name everywhere"
    left_out = {row["record"] for row in records.left_out()}
    assert len(left_out) == records.out and all(str(path) in record for record in left_out)
    for number in range(len(records)):
        record = records[number]
        sample = plan_of(cfg, parts).encoder(record)
        assert sample is not None
        facts = len(sample.input_ids), sample.num_labels, len(sample.images), sample.positions_cut, sample.labels_cut
        columns = records.lengths, records.labels, records.images, records.positions_cut, records.labels_cut
        assert facts == tuple(int(column[number]) for column in columns)
        assert record.signed_words == records.words[number]
    check_door(records, cfg.data)


def test_training_stops_at_the_door(case: tuple[Path, list[str | None]], parts: Path) -> None:
    path, planted = case
    records = open_again(config(parts, path), parts)
    with pytest.raises(DataError) as caught:
        check_door(records, config(parts, path).data)
    said = str(caught.value)
    assert said.startswith(f"{path}: {records.out} of {len(planted)} records are wrong\n  ")
    assert f"\n  path_outside: 3 ({PROBLEMS[Kind.path_outside].meaning})\n" in said and "too_long" not in said
    assert "report.html; mend them, or leave them out: data.bad=quarantine" in said
    with pytest.raises(DataError, match=rf"raise data\.bad_budget={records.out - 1}, which allows {records.out - 1}$"):
        check_door(records, config(parts, path, "data.bad=quarantine", f"data.bad_budget={records.out - 1}").data)
    check_door(records, config(parts, path, "data.bad=quarantine", f"data.bad_budget={records.out}").data)
    with pytest.raises(DataError, match=r"2 of \d+ records are too long"):
        check_door(records, config(parts, path, "data.bad=quarantine", "data.too_long=fail").data)


def test_training_goes_on_without_them(case: tuple[Path, list[str | None]], parts: Path, tmp_path: Path) -> None:
    """An epoch of all that are kept and of nothing else, and a list of the others."""
    path, planted = case
    said = f"output_dir={tmp_path}", "epochs=1", "max_steps=null", "data.bad=quarantine", "data.bad_budget=99%"
    cfg = config(parts, path, *said)
    train.train(cfg)
    kept = sum(kind is None or is_kept(Kind(kind), cfg.labels, cfg.data.too_long) for kind in planted)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["samples"] for step in steps) == kept and not any(step["quarantined"] for step in steps)
    rows = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0} and len({row["record"] for row in rows}) == len(planted) - kept
    with pytest.raises(DataError, match=r"mend them, or leave them out: data\.bad=quarantine"):
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
    own = index_module.mended_chunks
    monkeypatch.setattr(index_module, "mended_chunks", lambda *a: looks.append(1) or own(*a))
    path, _ = write_planted(tmp_path, lines=False)
    cfg = config(parts, path)
    plan = plan_of(cfg, parts)
    before = index_module.last_look(plan)
    for expected in (0, 1):
        with pytest.raises(DataError, match="records are wrong"):
            open_records(cfg, plan.encoder, plan.reader, watch_silently)
        assert len(looks) == expected
    index_module.open_index(plan, watch_silently, look_again=True, since=before)
    assert len(looks) == 1, "who came before it and waited"
    monkeypatch.setattr(index_module, "locked", denied)
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


def test_a_whole_dataset_without_its_pictures_is_no_secret(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Its key is called images: exact labels refuse it, the original's train on its text and say so."""
    rows = [{"id": n, "images": "0.jpg", "conversations": turns()} for n in range(4)]
    path = tmp_path / "a.json"
    write_json(path, [*rows, {"id": 9, "conversations": turns("what is it")}])
    cfg = config(parts, path, f"data.images={dataset / 'images'}")
    with pytest.raises(DataError, match=r"4 of 5 records are wrong\n  tag_without_picture: 4 (.|\n)*is the key called"):
        check_door(open_again(cfg, parts), cfg.data)
    original = config(parts, path, f"data.images={dataset / 'images'}", "labels=llava_v1_5")
    said = remarks(open_again(original, parts))
    assert "of 5 records, 4 have <image> in their text and no picture" in said
    assert f"no record of {path} has a picture, and {dataset / 'images'} is set" in said
    assert remarks(open_again(make_config(parts, dataset, tmp_path, f"data.index={tmp_path / 'i'}"), parts)) == ""
