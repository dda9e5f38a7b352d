"""What `prepare` examines, where it reports it, and what it prints, without a dataset."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import config_of
from tiers import slow_after

from llava_fsdp.config import Format
from llava_fsdp.prepare import main as module
from llava_fsdp.runtime.errors import ConfigError, DataError

REPORT = {
    "records": 1100, "kept": 1098,
    "sources": [{"name": "a", "records": 1100, "left_out": 2, "text_only": 3, "pictures": 4, "tokens": 5000,
                 "label_tokens": 600, "label_weight": 600, "taught": {"split": 0, "repeated": 0}}],
    "files": [{"name": "a", "file": name, "records": 550, "left_out": 1, "text_only": 1, "pictures": 2, "tokens": 2500,
               "label_tokens": 300} for name in ("a.json", "b.json")],
    "lengths": {"samples": 1098, "mean": 45.25, "percentiles": {"50": 40, "100": 1234}},
    "examined": {"summary": "7 of 8 images were decoded"},
    "truncation": [{"max_length": 2048, "records_cut": 11, "positions_lost": 12, "label_tokens_lost": 13,
                    "left_without_labels": 14}],
    "unread_keys": {"a": {"messages[].name": 12}},
    "problems": {
        "url": {"records": 2, "kept": False, "meaning": "is a URL", "first": [{"reason": "record 9 is one"}]},
        "duplicate_id": {"records": 5, "kept": True, "meaning": "comes twice", "first": [{"reason": "record 8 does"}]},
    },
}  # fmt: skip


def test_tables_of_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    module.show(REPORT, Path("there"))
    text = capsys.readouterr().out
    lines = [line.replace("│", "").split() for line in text.splitlines()]
    rows = {line[0]: line for line in lines if line}
    assert rows["a"] == ["a", "(of", "2", "files)", "1,100", "2", "3", "4", "5,000", "600"]
    assert rows["b.json"] == ["b.json", "550", "1", "1", "2", "2,500", "300"]
    assert rows["2,048"] == ["2,048", "11", "12", "13", "14"]
    assert rows["url"][:3] == ["url", "2", "skipped"] and rows["duplicate_id"][:3] == ["duplicate_id", "5", "kept"]
    assert "mean 45.2; up to 50 % 40, 100 % 1,234" in text and "7 of 8 images were decoded" in text
    assert "url, for example: record 9 is one" in text
    assert "source a has keys that are not read: messages[].name (12 records)" in text
    assert "1,098 of 1,100 records are kept; everything is in there/" in " ".join(text.split())
    module.show({**REPORT, "problems": {}, "examined": None, "lengths": {"samples": 0}}, Path("there"))
    text = capsys.readouterr().out
    assert "no problems" in text and "mean" not in text


def config(tmp_path: Path, **values: Any) -> Any:
    """A configuration with a validation set, each with an index folder of its own."""
    data, held = (SimpleNamespace(index_folder=tmp_path / name) for name in ("index", "val-index"))
    val: Any = SimpleNamespace(data=held, prepare=SimpleNamespace(workers=None), format=Format.json)
    defaults = {
        "data": data, "model": None, "precision": SimpleNamespace(param_dtype=None), "verify": False, "report": None,
        "val": SimpleNamespace(every=5), "held_out": val, "format": Format.json, "prepare": SimpleNamespace(workers=3),
    }  # fmt: skip
    return SimpleNamespace(**(defaults | values))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is called of the parts that read data and models."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "DTYPES", {None: None})
    monkeypatch.setattr(module, "find_parts", lambda _: SimpleNamespace(language_folder=None, vision_folder=None))
    monkeypatch.setattr(module, "with_template", lambda cfg, parts: cfg)
    for name in ("draw_shapes", "check_paths", "build_architecture", "open_encoding", "shape_of", "warn_if_refused"):
        monkeypatch.setattr(module, name, lambda *_: "encoding")
    monkeypatch.setattr(module, "sources_of", lambda data, group="data": found.append(("sources", data, group)))
    monkeypatch.setattr(module, "read_host", lambda: SimpleNamespace(usable_cores=9))
    return found


@pytest.mark.parametrize("report", [None, "report"])
def test_both_datasets_are_examined_and_reported(
    report: str | None, tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Into the folder that is named, that of validation within it; else into their indexes."""
    folders: list[tuple[Any, Path]] = []

    def examine(cfg: Any, encoding: Any, folder: Path) -> dict[str, Any]:
        folders.append((cfg, folder))
        return {"records": len(folders), "kept": 1}

    monkeypatch.setattr(module, "examine", examine)
    cfg = config(tmp_path, report=None if report is None else str(tmp_path / report))
    module.prepare(cfg)
    own = (tmp_path / "report", tmp_path / "report" / "val") if report else (tmp_path / "index", tmp_path / "val-index")
    assert folders == [(cfg, own[0]), (cfg.held_out, own[1])]
    assert [call[1:] for call in calls] == [(cfg.data, "data"), (cfg.held_out.data, "val")]
    assert json.loads(capsys.readouterr().out) == {
        "records": 1, "kept": 1, "report": str(own[0]), "val": {"records": 2, "kept": 1, "report": str(own[1])},
    }  # fmt: skip
    module.prepare(config(tmp_path, val=SimpleNamespace(every=None)))
    assert json.loads(capsys.readouterr().out) == {
        "records": 3, "kept": 1, "report": str(tmp_path / "index"),
    }  # fmt: skip


def test_indexes_are_compared_with_their_files(
    tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Any] = []

    def verify_index(plan: Any, watch: Any) -> tuple[int, int]:
        plans.append((plan.cfg, plan.workers))
        return 1000 * len(plans), len(plans)

    monkeypatch.setattr(module, "verify_index", verify_index)
    monkeypatch.setattr(module, "open_encoding", lambda *_: ("encoder", "reader"))
    cfg = config(tmp_path, verify=True)
    module.prepare(cfg)
    assert plans == [(cfg.data, 3), (cfg.held_out.data, 3)] and [call[2] for call in calls[1:]] == ["data", "val"]
    own = {"index": str(tmp_path / "index"), "records": 1000, "images": 1}
    val = {"index": str(tmp_path / "val-index"), "records": 2000, "images": 2}
    assert json.loads(capsys.readouterr().out) == own | {"val": val}
    module.prepare(config(tmp_path, verify=True, format=Format.text, val=SimpleNamespace(every=None)))
    assert capsys.readouterr().out.startswith("3,000 records and 3 images are what the index ")


def test_bad_records_are_said_and_no_error(
    tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The index is looked at again; of the message of a training, the first line and the cure are said."""
    opened: list[Any] = []

    def refuse(records: Any, cfg: Any) -> None:
        raise DataError("2 of 9 records are wrong\n  url: 2\nAll of them are in x; fix them")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "open_index", lambda plan, watch, look_again: opened.append((plan.workers, look_again)))
    monkeypatch.setattr(module, "Records", lambda *_: "records")
    monkeypatch.setattr(module, "describe_same_files", lambda _: "sources a and b are the same file")
    monkeypatch.setattr(module, "refuse_bad_records", refuse)
    monkeypatch.setattr(module, "write_report", lambda records, cfg, encoding, folder: {"folder": folder})
    cfg = config(tmp_path, prepare=SimpleNamespace(workers=None), labels=None)
    cfg.data.too_long = None
    with caplog.at_level("WARNING"):
        assert module.examine(cfg, ("encoder", "reader"), tmp_path) == {"folder": tmp_path}  # type: ignore[arg-type]
    assert opened == [(9, True)]
    assert "2 of 9 records are wrong. All of them are in x; fix them" in caplog.text and "url" not in caplog.text
    assert "sources a and b are the same file" in caplog.text
    monkeypatch.setattr(module, "write_report", full)
    with pytest.raises(ConfigError, match=r"report cannot be written to .*report=DIR"):
        module.examine(cfg, ("encoder", "reader"), tmp_path)  # type: ignore[arg-type]


ALLOWED: list[list[str]] = [[], ["data.bad_records=skip", "data.max_bad_records=100%"], ["data.too_long=skip"]]


@pytest.mark.parametrize(
    ("form", "keys"),
    slow_after(4, [*(("text", keys) for keys in ALLOWED), *(("json", keys) for keys in ALLOWED)]),
)
def test_without_a_record_left_the_reasons_are_shown_and_it_is_a_mistake(
    form: str, keys: list[str], parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if all are too long, or are skipped as the configuration allows."""
    long = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "the red circle " * 150}]
    wrong = {"conversations": [{"from": "gpt", "value": "a"}]}
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps(own) + "\n" for own in [{"conversations": long} if "too_long" in str(keys) else wrong] * 3)
    )
    words = [f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}", "stage=finetune"]
    words += [f"data.path={path}", "data.max_length=64", f"format={form}", *keys]
    with pytest.raises(DataError, match="none of 3 records is left to train on"):
        module.prepare(config_of(words, "prepare"))
    kind = "too_long" if "too_long" in str(keys) else "odd_turns"
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out)["problems"][kind]["records"] == 3
    else:
        assert f"{kind}, for example: " in out and "0 of 3 records are kept" in out
    assert (tmp_path / "a.jsonl.index" / "problems.jsonl").read_text().count(f'"kind": "{kind}"') == 3


def test_a_dataset_is_examined_as_it_would_be_trained_on(
    tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the template that a training chooses for the model. Bundled data is written first, then paths are checked,
    and what a training would refuse is told of the keys that were typed. What only `train` needs is said at the end."""
    typed, chosen = config(tmp_path), config(tmp_path, val=SimpleNamespace(every=None))
    done: list[tuple[str, Any]] = []
    for name in ("draw_shapes", "check_paths", "warn_if_refused"):
        monkeypatch.setattr(module, name, lambda given, name=name: done.append((name, given)) or "no projector yet")
    monkeypatch.setattr(module, "with_template", lambda cfg, parts: chosen)
    monkeypatch.setattr(module, "open_encoding", lambda cfg, *_: done.append(("open_encoding", cfg)))

    def examine(cfg: Any, *_: object) -> dict[str, int]:
        done.append(("examine", cfg))
        assert "no projector yet" not in caplog.text
        return {"kept": 1}

    monkeypatch.setattr(module, "examine", examine)
    with caplog.at_level("INFO"):
        module.prepare(typed)
    assert caplog.messages == ["no projector yet"]
    assert [name for name, _ in done] == ["draw_shapes", "check_paths", "open_encoding", "warn_if_refused", "examine"]
    assert [given for _, given in done] == [typed.data, typed, chosen, typed, chosen]
