"""What users' data, models and files of others say is shown as text: it steers no terminal and forges no line."""

import json
import re
import sys
import traceback
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from commands import command
from imagined import imagine
from rich.progress import Progress
from rich.table import Table
from small import config_of, make_config

from llava_fsdp import status
from llava_fsdp.data.batching.workers import WorkerStatus
from llava_fsdp.data.records.record import name_record
from llava_fsdp.prepare.main import prepare
from llava_fsdp.report import main as report
from llava_fsdp.runtime.errors import DataError, ImageError
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log, setup_logging
from llava_fsdp.runtime.text.terminal_text import Guarded, guard_streams, shown_name, shown_text
from llava_fsdp.train import main as train

FORGED = "ERROR forged: all is lost"
ODD = f"a\x1b]0;title\x07\x1b[2J\n{FORGED}\r{FORGED}\x9b31m\x7f\u202eb\u2066\u200b\u2028{FORGED}\U000e0041\u061c"
SEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e0fff]"
)


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    """A guard stays on the streams of the test that set it."""
    before = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = before


def check(said: str) -> None:
    """Nothing in it is obeyed by a terminal, and no line begins as the name wishes."""
    assert not SEEN.search(said), said
    assert not re.search(f"^{FORGED}", said, re.MULTILINE), said


def test_a_name_is_one_line_of_what_can_be_seen() -> None:
    codes = [*range(0x20), *range(0x7F, 0xA0), 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F)]
    codes += [*range(0x2060, 0x2070), 0xFEFF, 0xD800, 0xDFFF]
    for code in codes:
        assert shown_name(f"a{chr(code)}b") == f"a\\u{code:04x}b"
    assert shown_name("\U000e0001\U000e007f") == "\\U000e0001\\U000e007f"


def test_what_stays() -> None:
    for text in (
        "",
        "abc é ß 中文 \xa0 \u3000 عربي 🙂 ❤\ufe0f \\u001b [bold] </b>",
        "a\nb\tc\r\n",
        "\u0646\u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f4bb",
    ):
        assert shown_text(text) == text
    assert shown_text("a\rb\x1b[A") == "a\\u000db\\u001b[A"


def test_a_stream_with_a_guard() -> None:
    below = StringIO()
    stream = Guarded(below)
    assert print(ODD, 1, sep="\n", file=stream) is None and stream.write("\x1bab") == 3
    stream.writelines(["\x1b", "a\n"])
    said = below.getvalue()
    assert not SEEN.search(said) and said.endswith("\n1\n\\u001bab\\u001ba\n")
    for drawn in ("\r 50%|###  |", "\n\x1b[A", "\x1b[A\x1b[A", "\r"):  # as bars of tqdm's are
        below.seek(0), below.truncate()
        stream.write(drawn)
        assert below.getvalue() == drawn
    below.seek(0), below.truncate()
    stream.write("\x1b[Ax")
    assert below.getvalue() == "\\u001b[Ax"


def test_a_line_of_json_stays_one() -> None:
    below = StringIO()
    print(json.dumps({"id": ODD}), file=Guarded(below))
    assert json.loads(below.getvalue()) == {"id": ODD}


def test_streams_are_guarded_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    guard_streams()
    assert isinstance(sys.stderr, Guarded) and not isinstance(sys.stderr.unguarded, Guarded)
    assert sys.stdout.encoding and not sys.stdout.isatty()
    log().error("%s", ODD)
    print(ODD)
    try:
        raise ValueError(ODD)
    except ValueError:
        traceback.print_exc()
    said = capsys.readouterr()
    assert not SEEN.search(said.out + said.err) and "\\u001b]0;title" in said.out and "\\u001b]0;title" in said.err


def test_tables_and_bars_have_colours_and_no_one_else_s(monkeypatch: pytest.MonkeyPatch) -> None:
    below = StringIO()
    monkeypatch.setattr(sys, "stdout", Guarded(below))
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = TextConsole(force_terminal=True, width=200, color_system="standard")
    table = Table("name", title=ODD)
    table.add_row(f"{ODD} [/nothing] :smile:", style="red")
    console.print(table)
    console.print(f"{ODD} [bold]")
    with Progress(console=console) as progress:
        progress.add_task(ODD)
    said = below.getvalue()
    assert "\x1b[31m" in said and "\x1b[?25l" in said  # ours: a colour, a cursor that is hidden
    assert "[/nothing] :smile:" in said and "[bold]" in said
    ours = re.sub(r"\x1b\[(?:[\d;]*m|\?25[hl]|\d*[AK]|1A|2K)|\r", "", said)
    assert not SEEN.search(ours), ours


def test_errors_of_a_record_are_one_line() -> None:
    where = name_record(Path(f"/data/{ODD}.json"), 3, 4, ODD)
    for error in (DataError(f"{where}: {ODD}", "bad_form"), ImageError(f"{where}: image {ODD}")):
        assert "\n" not in str(error) and not SEEN.search(str(error))
        assert error.kind in ("bad_form", "image_unreadable")
    assert str(DataError("a list:\n  of lines")) == "a list:\n  of lines"
    assert "\n" not in where and not SEEN.search(where)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A dataset whose ids and names of images, roles and keys are hostile, and mostly wrong."""
    turns = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "red"}]
    asked = [{"from": "human", "value": "<image>\nwhat"}, {"from": "gpt", "value": "red"}]
    records = [
        {"id": ODD, "conversations": turns},
        {"id": ODD, "conversations": turns},
        {"id": f"1{ODD}", "image": f"{ODD.replace('/', '')}.jpg", "conversations": asked},
        {"id": f"2{ODD}", "image": f"../{ODD}", "conversations": asked},
        {"id": f"3{ODD}", "image": 5, "conversations": [ODD]},
        {"id": f"4{ODD}", "conversations": [{"from": ODD, "value": ODD}]},
        {"id": f"5{ODD}", f"video{ODD}": ODD, "video": ODD, "conversations": turns},
        {"id": f"6{ODD}", "conversations": [{ODD: 1}]},
    ]
    (tmp_path / "images").mkdir()
    (tmp_path / "mixed.json").write_text(json.dumps(records))
    return tmp_path


def test_what_prepare_says(hostile: Path, parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = make_config(parts, hostile, hostile / "out")
    setup_logging()
    words = ["data=llava_json", f"data.path={cfg.data.path}", f"data.images={cfg.data.images}", "data.max_length=256"]
    words += [f"model.{part}={parts / part}" for part in ("language", "vision")] + ["model.random_weights=true"]
    prepare(config_of([*words, f"data.index={hostile / 'index'}", f"report={hostile / 'report'}"], "prepare"))
    said = capsys.readouterr()
    check(said.out + said.err)
    assert "id 3a\\u001b]0;title" in said.out and "duplicate_id" in said.out
    assert not SEEN.search((hostile / "report" / "report.html").read_text())
    rows = [json.loads(line) for line in (hostile / "report" / "problems.jsonl").read_text().splitlines()]
    assert {row["id"] for row in rows} >= {f"3{ODD}"}  # as it is: programs read it
    for row in rows:
        check(row["reason"])


def test_a_start_that_fails(hostile: Path, parts: Path) -> None:
    with pytest.raises(DataError) as told:
        train.train(make_config(parts, hostile, hostile / "out"))
    check(str(told.value))
    assert "\\u001b]0;title" in str(told.value)


def test_what_a_rank_waits_for() -> None:
    watch = WorkerStatus(1)
    watch.steps[0] = 2
    watch.current[0].value = shown_name(ODD).encode()[:100]
    check(watch.describe_worker(0))


def test_a_status_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imagine(tmp_path / "run", 5)
    said = {"status": f"failed{ODD}", "exit_code": 2, "reason": ODD.replace("\n", ""), "time": 1.0}
    (run / "run_status.json").write_text(json.dumps({**said, "before": {"status": ODD}}))
    monkeypatch.setattr(sys, "argv", ["status", f"output_dir={run}"])
    with pytest.raises(SystemExit):
        status.main()
    printed = capsys.readouterr()
    check(printed.out + printed.err)
    assert not SEEN.search(report.write([str(run)]).read_text())


@pytest.mark.slow  # three processes that import torch, one of them under torchrun
@pytest.mark.parametrize("entry", ["prepare", "train"])
def test_commands(entry: str, hostile: Path, parts: Path) -> None:
    words = ["model.random_weights=true", "data.max_length=256", "data=llava_json"]
    words += [f"model.{part}={parts / part}" for part in ("language", "vision")]
    words += [f"data.path={hostile / 'mixed.json'}", f"data.images={hostile / 'images'}"]
    words += ["prepare.workers=2"] if entry == "prepare" else ["stage=finetune", f"output_dir={hostile / 'out'}"]
    ended = command(f"llava_fsdp.{entry}", *words, cwd=hostile, ranks=1)
    check(ended.stdout + ended.stderr)
    assert "\\u001b]0;title" in ended.stdout + ended.stderr
    assert (ended.returncode == 0) == (entry == "prepare"), ended.stderr
    if entry == "train":
        said = json.loads((hostile / "out" / "run_status.json").read_text())
        assert said["exit_code"] == 2 and said["class"] == "data"
        check(said["reason"])
