"""What `prepare` finds is told once in full: report.json, report.html, problems.jsonl and a summary."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import write_planted
from small import config_of, make_config
from test_build import open_again, plan_of

from llava_fsdp.config import PrepareConfig
from llava_fsdp.data.index import statistics as report_module
from llava_fsdp.data.index.statistics import bar_width, make_report, median, problem_rows, write_report
from llava_fsdp.data.text.encode import truncate
from llava_fsdp.prepare import main as prepare
from llava_fsdp.runtime.files.jsonl import RowWriter
from llava_fsdp.runtime.text.terminal_text import OBEYED
from llava_fsdp.train.events.reporting.lost_rows import SKIPPED_FILE
from llava_fsdp.train.events.reporting.skipped_records import SkippedRecords


def test_the_report_counts_what_is_there(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path, "data.max_length=80", f"data.index={tmp_path / 'index'}")
    records = open_again(cfg, parts)
    report = make_report(records, cfg)
    raw = json.loads((dataset / "mixed.json").read_text())
    (own,) = report["sources"]
    kept = [records[n] for n in range(len(records))]
    assert own["records"] == len(raw) == own["left_out"] + len(kept)
    assert own["text_only"] == sum(not r.images for r in kept) and own["pictures"] == sum(len(r.images) for r in kept)
    assert own["tokens"] == records.lengths.sum() and own["label_tokens"] == records.labels.sum()
    # lengths, and what every maximum length costs, by the code that cuts in training
    whole = [encoder_of(cfg, parts)(open_record) for open_record in all_records(records)]
    full = sorted(len(sample.input_ids) for sample in whole)
    assert report["lengths"]["mean"] == pytest.approx(sum(full) / len(full))
    assert report["lengths"]["percentiles"]["50"] == full[len(full) // 2 - 1] and report["lengths"]["samples"] == 44
    assert report["lengths"]["percentiles"]["100"] == full[-1]
    assert sum(bar["records"] for bar in report["lengths"]["histogram"]) == 44
    row = report["truncation"][0]
    assert row["max_length"] == 80
    cut = [truncate(sample, 80) for sample in whole if len(sample.input_ids) > 80]
    assert row["records_cut"] == len(cut) > 5
    assert row["positions_lost"] == sum(c.positions_cut for c in cut)
    assert row["label_tokens_lost"] == sum(c.labels_cut for c in cut)
    assert row["left_without_labels"] == sum(c.num_labels == 0 for c in cut)
    assert all(row["records_cut"] == 0 for row in report["truncation"][1:])


def encoding_of(cfg, parts: Path):
    plan = plan_of(cfg, parts)
    return plan.encoder, plan.reader


@pytest.mark.parametrize("block", [2, 1 << 20])
def test_every_file_is_counted_by_itself(
    block: int, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums, medians and problems of files are those of an index of each file alone, and add up to their source's."""
    raw = json.loads((dataset / "mixed.json").read_text())
    raw[3]["image"] = raw[20]["image"] = "gone.jpg"
    raw[21]["conversations"].pop()
    for number, own in enumerate((raw[:9], raw[9:20], raw[20:])):
        (tmp_path / f"{number}.json").write_text(json.dumps(own))
    others = tmp_path / "other.json"
    others.write_text(json.dumps(raw[30:37]))

    def report(index: str, *words: str) -> dict[str, Any]:
        cfg = make_config(parts, dataset, tmp_path, "data.path=null", f"data.index={tmp_path / index}", *words)
        return make_report(open_again(cfg, parts), cfg)

    monkeypatch.setattr(report_module, "BLOCK", block)
    files = [str(tmp_path / f"{number}.json") for number in range(3)]
    both = f'+data.sources.a.path="{",".join(files)}"', f"+data.sources.b.path={others}"
    whole = report("all", *both)
    assert [(own["name"], own["file"]) for own in whole["files"]] == [
        *(("a", file) for file in files),
        ("b", str(others)),
    ]
    for number, own in enumerate(whole["files"]):
        alone = report(f"{number}", f"data.path={own['file']}")
        plain = {"name": "", "taught": {}}
        assert own | plain == alone["sources"][0] | plain == alone["files"][0] | plain
        assert own["problems"] == {kind: row["records"] for kind, row in alone["problems"].items()}
    a, b = whole["sources"]
    for key in ("records", "left_out", "pictures", "tokens", "label_tokens", "tiles", "image_tokens", "text_only"):
        assert a[key] == sum(own[key] for own in whole["files"][:3]) and b[key] == whole["files"][3][key]
    assert a["problems"]["image_missing"] == 2 and a["problems"]["odd_turns"] == 1 and not b["problems"]
    assert a["longest"] == max(own["longest"] for own in whole["files"][:3]) and a["left_out"] == 3


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_a_median_is_the_least_length_that_half_do_not_exceed(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "BLOCK", block)
    lengths = np.array([9, 9, 5, 1, 4, 4, 7, 2, 9], dtype=np.int32)
    for begin, end in ((2, 3), (2, 4), (2, 7), (2, 8), (0, 9)):
        own = sorted(lengths[begin:end].tolist())
        assert median(lengths, begin, end, 9) == own[(len(own) - 1) // 2]


def encoder_of(cfg, parts: Path):
    encoder = plan_of(cfg, parts).encoder
    return type(encoder)(**{**vars(encoder), "max_length": 1 << 40})


def all_records(records) -> list:
    return [records.index.store.record(n) for n in range(len(records.index))]


def test_every_problem_is_listed(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, planted = write_planted(tmp_path, lines=True)
    cfg = make_config(parts, tmp_path, tmp_path, f"data.path={path}", f"data.images={tmp_path / 'images'}")
    records = open_again(cfg, parts)
    monkeypatch.setattr(report_module, "SHOWN", 2)
    report = write_report(records, cfg, encoding_of(cfg, parts), tmp_path / "report")
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == report
    rows = [json.loads(line) for line in (tmp_path / "report" / "problems.jsonl").read_text().splitlines()]
    assert rows == list(problem_rows(records))
    assert {r["kind"] for r in rows} == {kind for kind in planted if kind} == set(report["problems"])
    for kind, own in report["problems"].items():
        assert own["records"] == sum(r["kind"] == kind for r in rows) == len(own["first"]) + own["not_shown"]
        assert len(own["first"]) <= 2
        assert own["kept"] is (kind in ("duplicate_id", "special_token", "too_long"))
    assert {"source", "file", "line", "index", "id", "reason"} == set(report["problems"]["url"]["first"][0])


def test_the_page_escapes_what_came_from_the_data(parts: Path, tmp_path: Path) -> None:
    """Names of records that are wrong, and of those that are shown as samples."""
    evil = "<script>alert(1)</script>\u202e'\x1b"
    turns = [{"from": evil, "value": "a"}]
    right = [{"from": "human", "value": evil}, {"from": "gpt", "value": evil}]
    records = [{"id": evil, "conversations": turns}, {"id": f"{evil}2", "conversations": right}]
    (tmp_path / "a.json").write_text(json.dumps(records))
    cfg = make_config(parts, tmp_path, tmp_path, f"data.path={tmp_path / 'a.json'}", "data.images=null")
    write_report(open_again(cfg, parts), cfg, encoding_of(cfg, parts), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "http:" not in page and "https:" not in page
    assert not re.search(f"[{OBEYED}]", page) and not re.search("<i> ?<(?!/i>)", page), (
        "a token is <, or begins with it"
    )


def test_bars_are_few_and_round() -> None:
    for longest in (1, 47, 48, 119, 2048, 100_000):
        assert 1 <= longest // bar_width(longest) + 1 <= 48
        assert str(bar_width(longest)).rstrip("0") in ("1", "2", "5")


def test_the_same_keys_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["stage=pretrain", "model=tiny", "data=shapes"]
    train, own = config_of(overrides), config_of(overrides, "prepare")
    assert isinstance(own, PrepareConfig)
    assert (own.data, own.model, own.labels) == (train.data, train.model, train.labels)


@pytest.mark.slow
@pytest.mark.e2e
def test_as_a_user_runs_it(parts: Path, tmp_path: Path) -> None:
    path, planted = write_planted(tmp_path, lines=False)
    command = [
        sys.executable, "-m", "llava_fsdp.prepare", "data=llava_json", f"data.path={path}",
        f"data.images={tmp_path / 'images'}", f"report={tmp_path / 'told'}", "data.max_length=300",
    ]  # fmt: skip
    held_out, few = write_planted(tmp_path / "held", lines=True)
    val = ["val.every=5", f"val.path={held_out}", f"val.images={tmp_path / 'held' / 'images'}"]
    both = json.loads(
        subprocess.run([*command, *val, "format=json"], capture_output=True, text=True, check=True).stdout
    )
    assert (both["records"], both["val"]["records"]) == (len(planted), len(few))
    assert both["report"] == str(tmp_path / "told")
    again = subprocess.run([*command, *val], capture_output=True, text=True, check=True)
    assert again.stdout.count("image_truncated, for example") == 2 and "report.html" in again.stdout
    assert json.loads((tmp_path / "told" / "val" / "report.json").read_text())["records"] == len(few)
    wrong = subprocess.run([*command, "data.path=gone.json"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "data.path=gone.json is not a file" in wrong.stderr and not wrong.stdout


def test_what_is_left_out_is_listed_once(tmp_path: Path) -> None:
    """As of step 0, before what later steps leave out, however often the run goes on."""
    listed = [{"record": "a", "kind": "url", "reason": "b"}]
    path = tmp_path / SKIPPED_FILE
    SkippedRecords(tmp_path, 0, listed)
    assert path.read_text() == '{"step": 0, "record": "a", "kind": "url", "reason": "b"}\n'
    rows = RowWriter(path)
    rows.add({"step": 1, "record": "c"})
    rows.add({"step": 3, "record": "d"})
    SkippedRecords(tmp_path, 2, listed)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    SkippedRecords(tmp_path, 0)
    assert not path.exists()


def test_the_summary_is_short(parts: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cfg = make_config(parts, dataset, tmp_path, f"data.index={tmp_path / 'index'}")
    prepare.show(make_report(open_again(cfg, parts), cfg), tmp_path)
    said = capsys.readouterr().out
    assert "tokens after truncation to data.max_length" in said
    assert "mixed.json" in said and "no problems" in said and "44 of 44 records are kept" in said


def test_the_summary_has_an_example_of_every_kind(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, planted = write_planted(tmp_path, lines=True)
    cfg = make_config(parts, tmp_path, tmp_path, f"data.path={path}", f"data.images={tmp_path / 'images'}")
    report = make_report(open_again(cfg, parts), cfg)
    prepare.show(report, tmp_path)
    said = capsys.readouterr().out
    for kind in filter(None, planted):
        assert f"{kind}, for example: {report['problems'][kind]['first'][0]['reason']}" in said
    reasons = [row["reason"] for own in report["problems"].values() for row in own["first"]]
    for internal in ("NoneType", "object at 0x", "[Errno", "is a dict", "is a int", "is a str", "'from':", "nan,"):
        assert not [reason for reason in reasons if internal in reason], internal
