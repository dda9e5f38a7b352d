"""Small JSON files of a run, a sweep, a checkpoint, an export and an index, with everything in them that is none."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from imagined import imagine

from llava_fsdp import status
from llava_fsdp.checkpoint.manifest import Manifest
from llava_fsdp.checkpoint.manifest import parse as parse_manifest
from llava_fsdp.checkpoint.state_json import parse_facts
from llava_fsdp.data.index.integrity import read_json
from llava_fsdp.data.index.source_state import KNOWN, read_known
from llava_fsdp.report import main as report
from llava_fsdp.report.run_reader import JOB_FILE
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, DamagedError, DamagedModel
from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.files.digests import with_digest
from llava_fsdp.runtime.files.heartbeat import read_beat
from llava_fsdp.runtime.files.provenance import NOTES, files_of, read_notes
from llava_fsdp.runtime.files.run_dir import BEGUN_FILE, LOCK_FILE, begun_at, claiming_folder, held_by
from llava_fsdp.runtime.files.small_json import BadJson, MissingJson, parse_object, read_object
from llava_fsdp.runtime.files.status_file import (
    FIRST_FAILURE,
    STATUS_FILE,
    Outcome,
    final_status,
    first_failure,
    read_status,
    write_ending,
)
from llava_fsdp.sweep.job import Job, read_jobs
from llava_fsdp.sweep.results import write_page

DEEP = 100_000
HOSTILE = {
    "nothing": b"",
    "half": b'{"status": "done", "exit',
    "no JSON": b"\x1b]0;title\x07",
    "not UTF-8": b'{"status": "\xff\xfe"}',
    "UTF-16": '{"status": "done"}'.encode("utf-16"),
    "a list": b"[]",
    "null": b"null",
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"status": "done", "exit_code": ' + b'{"a": ' * DEEP,
    "deep, and read by the parser": b'{"status": "done", "culprit": ' + b"[" * 300 + b"]" * 300 + b"}",
    "not a number": b'{"status": "done", "exit_code": NaN}',
    "infinite": b'{"status": "done", "time": 1e999}',
    "digits": b'{"status": "done", "exit_code": ' + b"9" * 5000 + b"}",
    "a key twice": b'{"status": "done", "status": "done"}',
    "large": b'{"status": "' + b"x" * (2 << 20) + b'"}',
    "no key": b"{}",
    "zeros": b"\0" * 4096,
}
WORDS = {
    "status": [1, None, ["done"], {"a": 1}],
    "exit_code": ["0", 2.5, True, -1, 256, 1 << 40, 10**30],
    "reason": [5, ["x"]],
    "class": [["config"], {}],
    "time": ["now", [], True],
    "launch": [7, {}],
    "attempt": ["1", "one"],
    "before": ["done", [], {"status": 5}, {"status": "done", "exit_code": "x"}, 1],
    "refused": ["x", {"reason": 3}, {"status": "failed", "reason": [], "exit_code": 2}],
}
WRONG = {f"{key}={value!r:.40}": {key: value} for key, values in WORDS.items() for value in values}
STATUS = {"status": "failed", "class": "data", "exit_code": 2, "reason": "why", "culprit": {}, "step": 3, "time": 1.0}
FAILURE = {"incarnation": f"process {os.getpid()}", "rank": 1, "class": "data", "exit_code": 2, "reason": "why"}
contents = pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in HOSTILE.items()])


def test_the_command_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STATUS_FILE).write_bytes(HOSTILE["deep objects"])
    monkeypatch.setattr(sys, "argv", ["status", f"output_dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        status.main()
    assert ended.value.code == ExitCode.BUG and f"{STATUS_FILE} cannot be read" in capsys.readouterr().err


@contents
def test_there_is_one_error_for_all_of_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(BadJson, match=r"some\.json cannot be read") as told:
        read_object(path, {"status": (str,)})
    assert not isinstance(told.value, MissingJson)


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe that nobody writes into would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "loop", "."):
        with pytest.raises(BadJson) as told:
            read_object(tmp_path / name)
        assert not isinstance(told.value, MissingJson)
    with pytest.raises(MissingJson):
        read_object(tmp_path / "nothing")


def test_numbers_and_levels_have_an_end() -> None:
    kinds = {"count": (int,), "seconds": (float,)}
    assert parse_object('{"count": 3, "seconds": 4, "more": [[1]]}', kinds)["count"] == 3
    for wrong in ('{"count": 9223372036854775808, "seconds": 1}', '{"count": true, "seconds": 1}', '{"count": 1}'):
        with pytest.raises(BadJson):
            parse_object(wrong, kinds)
    parse_object('{"a": ' + "[" * 39 + "]" * 39 + "}")
    with pytest.raises(BadJson):
        parse_object('{"a": ' + "[" * 40 + "]" * 40 + "}")


@contents
def test_a_status_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    """It stops no start, no page and no question after it; the page names the file."""
    run = imagine(tmp_path / "run", 12)
    (run / STATUS_FILE).write_bytes(content)
    assert read_status(run) is None
    assert final_status(run) is None
    page = report.write([str(run)]).read_text()
    assert "unknown" in page and f"{STATUS_FILE} cannot be read" in page
    with claiming_folder(run, 0):
        assert (read_status(run) or {})["status"] == "running"


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_a_status_of_other_types(wrong: dict, tmp_path: Path) -> None:
    run = imagine(tmp_path / "run", 3)
    (run / STATUS_FILE).write_text(json.dumps({**STATUS, **wrong}))
    assert read_status(run) is None
    assert "unknown" in report.write([str(run)]).read_text()
    assert final_status(run) is None
    with claiming_folder(run, 0):
        pass


@contents
def test_a_failure_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    """The start that finds it goes on, says so, and can leave its own word in its place."""
    (tmp_path / FIRST_FAILURE).write_bytes(content)
    assert first_failure(tmp_path) is None
    with claiming_folder(tmp_path, 0):
        pass
    assert not (tmp_path / FIRST_FAILURE).exists()
    (tmp_path / FIRST_FAILURE).write_bytes(content)
    assert write_ending(tmp_path, Outcome(ENDINGS["data"], "why")) is None
    assert (first_failure(tmp_path) or {})["exit_code"] == ExitCode.USER
    assert (read_status(tmp_path) or {})["status"] == "failed"


@pytest.mark.parametrize("code", [0, -1, 256, "2", None, True])
def test_a_failure_has_the_exit_code_of_one(code: object, tmp_path: Path) -> None:
    """Else a rank that follows it would end as if all were well."""
    (tmp_path / FIRST_FAILURE).write_text(json.dumps(FAILURE))
    assert first_failure(tmp_path) == FAILURE
    (tmp_path / FIRST_FAILURE).write_text(json.dumps({**FAILURE, "exit_code": code}))
    assert first_failure(tmp_path) is None


@contents
def test_files_that_inform_a_run(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun, who holds the folder, what a rank is at."""
    (tmp_path / ".heartbeats").mkdir()
    for path in (tmp_path / BEGUN_FILE, tmp_path / LOCK_FILE, tmp_path / ".heartbeats" / "rank-0.json"):
        path.write_bytes(content)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-job")
    assert begun_at(tmp_path, "never") is None
    assert held_by(tmp_path) is None
    assert read_beat(tmp_path, 0) is None
    with claiming_folder(tmp_path, 0):
        pass
    (tmp_path / KNOWN).write_bytes(content)
    assert read_known(tmp_path) == {}


def job(folder: Path, content: bytes | str) -> Path:
    folder.mkdir(parents=True)
    (folder / JOB_FILE).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@contents
def test_a_job_of_a_sweep(content: bytes, tmp_path: Path) -> None:
    """The other jobs have their table; the page names the file."""
    job(tmp_path / "0", content)
    assert read_jobs(tmp_path) == []
    with pytest.raises(ConfigError, match=JOB_FILE):
        report.write([str(tmp_path), f"out={tmp_path / 'page.html'}"])
    write_page(tmp_path)


def test_jobs_of_other_types(tmp_path: Path) -> None:
    whole = asdict(Job(number=0, overrides=["seed=1"], folder=str(tmp_path)))
    job(tmp_path / "good", json.dumps(whole))
    wrong = {"number": "1", "overrides": "x", "reason": None, "numbers": [], "value": "low", "exit_code": None}
    for key, value in wrong.items():
        job(tmp_path / key, json.dumps({**whole, key: value}))
    job(tmp_path / "inner", json.dumps({**whole, "numbers": {**whole["numbers"], "loss": "low"}}))
    job(tmp_path / "strange", json.dumps({**whole, "another": 1}))
    assert [own.overrides for own in read_jobs(tmp_path)] == [["seed=1"]]


@contents
def test_files_that_are_trusted(content: bytes, tmp_path: Path) -> None:
    """What a checkpoint, an export and an index say of themselves: refused by name, also under a digest that fits."""
    for own in (content, with_digest(content.removesuffix(b"}"))):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            parse_manifest(own)
        with pytest.raises(CheckpointError, match=r"state\.json"):
            parse_facts(own, Manifest(1, {}, {}))
    if content in (HOSTILE["no key"], HOSTILE["large"]):  # notes of an earlier version, which say nothing of that
        return
    (tmp_path / NOTES).write_bytes(content)
    with pytest.raises(DamagedModel, match=NOTES):
        read_notes(tmp_path)
    with pytest.raises(DamagedError, match="done"):
        (tmp_path / "done").write_bytes(content)
        read_json(tmp_path / "done")


@pytest.mark.parametrize(
    "wrong",
    [{"files": []}, {"files": {"a": 5}}, {"files": {"../a": {}}}, {"step": "3"}, {"template": ["v1"]}, {"lora": [1]},
     {"max_length": 1.5}, {"seed": "one"}, {"grid_pinpoints": "x"}],
)  # fmt: skip
@pytest.mark.parametrize("is_sealed", [False, True])
def test_notes_of_other_types(wrong: dict, is_sealed: bool, tmp_path: Path) -> None:
    content = json.dumps(wrong).encode()
    (tmp_path / NOTES).write_bytes(with_digest(content[:-1]) if is_sealed else content)
    with pytest.raises(DamagedModel, match=NOTES):
        files_of(read_notes(tmp_path), tmp_path)
