"""Rows of a run's files: what a step's row says, which rows a resumed run keeps, and what is read from them."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from llava_fsdp.data.batching.batch import SkippedSample, StepFacts
from llava_fsdp.model.flops import Flops
from llava_fsdp.plan.time.mfu import Utilization
from llava_fsdp.report.charts.downsample import MOST_SKIPS, MOST_SOURCES, SUMS, VALUES, WINDOW, RunHistory, mean_loss
from llava_fsdp.report.run_reader import RunRecord, own_overrides, thin_out, validations_until
from llava_fsdp.runtime.files import jsonl
from llava_fsdp.runtime.files.jsonl import RowWriter
from llava_fsdp.runtime.text.humanize import duration
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.reporting import metrics
from llava_fsdp.train.events.reporting.console import Console
from llava_fsdp.train.events.reporting.lost_rows import due_between, skipped_in
from llava_fsdp.train.events.reporting.metrics import MetricsFile, drop_later_rows, metrics_row
from llava_fsdp.train.events.reporting.reports import Reports
from llava_fsdp.train.events.reporting.skipped_records import SkippedRecords, begin_skipped_records
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.events.reporting.step_warnings import FEWEST, CompileWarnings, LossWarnings, SampleWarnings
from llava_fsdp.train.state import StepResult


def test_a_row_has_every_number_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "peak_memory", lambda: 77)
    facts = StepFacts(
        6, samples=5, tokens=300, token_pairs=2, label_tokens=90, images=4, tiles=9, truncated=3, labels_cut=1,
        unlabelled=["a", "b"], source_labels={"x": 80, "y": 10, "z": 0},
    )  # fmt: skip
    losses = {"x": 1.5, "y": float("nan"), "z": None}
    result = StepResult(
        facts, 2.5, 0.01, float("inf"), 1.5, skipped=True, skipped_steps=8, loss_scale=64.0, recompiles=2,
        own_loss_is_finite=False, source_losses=losses, data_seconds=0.5,
    )  # fmt: skip
    row = {
        "step": 7, "loss": 2.5, "lr": 0.01, "grad_norm": None, "skipped": True, "skipped_steps": 8, "loss_scale": 64.0,
        "sources": {"x": {"loss": 1.5, "label_tokens": 80}, "y": {"loss": None, "label_tokens": 10},
                    "z": {"loss": None, "label_tokens": 0}},
        "label_tokens": 90, "tokens": 300, "samples": 5, "images": 4, "tiles": 9, "truncated": 3, "labels_cut": 1,
        "unlabelled": 2, "skipped_records": 0, "seconds": 1.5, "data_seconds": 0.5, "tokens_per_second": 200.0,
        "flops": None, "mfu": None, "hfu": None, "recompiles": 2, "peak_memory_bytes": 77,
    }  # fmt: skip
    assert metrics_row(result) == row
    known = Utilization(Flops(1, 0, 0, 0), LlamaConfig(), Flops(1, 0, 0, 0), 400.0, "")
    assert metrics_row(result, known) == row | {"flops": 300, "mfu": 0.5, "hfu": 1.0}
    changing = Utilization(Flops(1, 0, 0, 0), LlamaConfig(), None, 400.0, "")
    assert metrics_row(result, changing) == row | {"flops": 300, "mfu": 0.5, "hfu": None}


def put(path: Path, *steps: int) -> None:
    path.write_text("".join(f'{{"step": {step}}}\n' for step in steps) + '{"step": 1, "lo')


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_keeps_the_rows_of_the_steps_before(tmp_path: Path) -> None:
    """Those of its own step too, which is done; what it does again goes, and a line that was cut."""
    path = tmp_path / "metrics.jsonl"
    put(path, 1, 2, 3, 4, 5)
    drop_later_rows(path, 3)
    assert steps_of(path) == [1, 2, 3]
    drop_later_rows(path, 0)
    assert steps_of(path) == []
    drop_later_rows(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


def test_records_left_out_before_the_first_step_are_listed_anew(tmp_path: Path) -> None:
    path = tmp_path / "skipped_records.jsonl"
    put(path, 0, 0, 1, 3, 3, 4)
    begin_skipped_records(path, 3, [{"record": "a"}])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 0, "record": "a"}, {"step": 1}, {"step": 3}, {"step": 3}]
    begin_skipped_records(path, 0, [])
    assert not path.exists(), "an empty file says that something was left out"


def test_curves_and_sums_of_a_history() -> None:
    assert set(VALUES) == {
        "loss", "lr", "grad_norm", "tokens_per_second", "mfu", "hfu", "peak_memory_bytes", "seconds", "data_seconds",
        "loss_scale", "balance_loss", "expert_load_max", "experts_idle", "accuracy", "margin",
        "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected",
    }  # fmt: skip
    assert set(SUMS) == {
        "samples", "tokens", "label_tokens", "images", "seconds", "data_seconds", "truncated", "skipped_records",
        "unlabelled",
    }  # fmt: skip
    history = RunHistory()
    for step in range(1, 4):
        history.add({"step": step, **{name: step * (n + 1) for n, name in enumerate(SUMS)}})
    assert history.sums == {name: 6 * (n + 1) for n, name in enumerate(SUMS)}


def test_the_lowest_loss_is_that_of_a_whole_window() -> None:
    """The first of equal ones; before there is a window, the mean of what there is."""
    history = RunHistory()
    for step in range(1, WINDOW):
        history.add({"step": step, "loss": 1.0 if step < WINDOW - 1 else 2.0})
    assert history.lowest is None and history.lowest_loss == (history.loss, WINDOW - 1)
    for step in range(WINDOW, 4 * WINDOW):
        history.add({"step": step, "loss": 3.0 if step < 2 * WINDOW else 0.5})
    assert history.lowest_loss == (0.5, 3 * WINDOW - 1)


def test_steps_and_sources_that_are_named_have_an_end() -> None:
    history = RunHistory()
    many = {f"s{n}": {"loss": 1.0, "label_tokens": n} for n in range(MOST_SOURCES + 3)}
    for step in range(1, MOST_SKIPS + 4):
        history.add({"step": step, "skipped": True, "sources": many})
    assert history.skipped == list(range(1, MOST_SKIPS + 1)) and history.skipped_steps == MOST_SKIPS + 3
    assert list(history.sources) == list(history.source_labels) == list(many)[:MOST_SOURCES]
    assert history.source_labels["s7"] == 7 * (MOST_SKIPS + 3)
    last = MOST_SOURCES - 1
    assert [name for name, _ in history.largest_sources(2)] == [f"s{last - 1}", f"s{last}"]


def test_a_mean_is_of_the_second_half() -> None:
    history = RunHistory()
    for step, value in enumerate((9.0, 8.0, 1.0, 2.0, 3.0), 1):
        history.add({"step": step, "seconds": value})
    assert history.mean("seconds") == 2.0 and history.most("seconds") == 9.0
    assert history.mean("loss") is None and history.most("loss") is None


def test_validations_of_a_resumed_run() -> None:
    rows = [{"step": n, "loss": place} for place, n in enumerate((2, 4, 6, 4, 5, 8))]
    assert validations_until(rows, 6) == [rows[0], rows[3], rows[4], rows[2]]
    numbers = [{"step": n} for n in range(1, 8)]
    assert [[row["step"] for row in thin_out(numbers, most)] for most in (7, 6, 3, 2, 1)] == [
        [1, 2, 3, 4, 5, 6, 7], [1, 3, 5, 7], [1, 4, 7], [3, 7], [7],
    ]  # fmt: skip
    assert thin_out([], 3) == []


def test_steps_without_a_row_are_counted_from_the_first_start() -> None:
    run = RunRecord(Path("run"), "run", starts=[{"step": 4}, {"step": 2}])
    for step in (3, 4, 7):
        run.history.add({"step": step})
    assert run.num_lost == 2 and RunRecord(Path("run"), "run", run.history).num_lost == 0


def test_the_end_of_a_run_is_that_of_its_last_start_with_a_step() -> None:
    before = {"status": "failed", "reason": "old"}
    ends = {
        status: RunRecord(Path("run"), "run", status={"status": status, "before": before}).state
        for status in ("running", "stopping", "done", "config", "stopped")
    }
    assert ends == {
        "running": "running",
        "stopping": "stopping",
        "done": "done",
        "config": "failed",
        "stopped": "failed",
    }


def test_overrides_that_tell_jobs_apart() -> None:
    jobs = [["a=1", "b=2"], ["a=1", "b=3", "b=3"], ["a=1", "c=4"]]
    assert own_overrides(jobs) == [["b=2"], ["b=3", "b=3"], ["c=4"]]
    assert own_overrides(jobs[:1]) == [["a=1", "b=2"]]


def test_a_sweep_compares_the_loss_of_label_tokens() -> None:
    assert mean_loss([(1.0, 3), (5.0, 1)]) == 2.0 and mean_loss([(0.1, 1)] * 3) == 0.1
    assert mean_loss([(1.0, 0), (2.0, 0)]) == 1.5, "without label tokens every step counts the same"


def test_validations_that_were_due_between_two_steps() -> None:
    """After the first, and before the second: its own may be under way."""
    facts = {"config": {"val": {"every": 5}}}
    found = {pair: list(due_between(*pair, facts)) for pair in [(0, 15), (5, 16), (4, 11), (10, 15), (14, 15), (3, 3)]}
    assert found == {(0, 15): [5, 10], (5, 16): [10, 15], (4, 11): [5, 10], (10, 15): [], (14, 15): [], (3, 3): []}
    for every in (None, 0, -5, True, 5.0):
        assert not due_between(0, 15, {"config": {"val": {"every": every}}})
    assert (
        skipped_in({"skipped_records": 3, "unlabelled": 2}) == 5
        and skipped_in({"skipped_records": True, "unlabelled": "2"}) == 0
    )


def test_rows_that_a_disk_refuses_wait_and_are_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning when it begins, one when it ends; of too many the oldest are lost, and counted."""
    said: list[str] = []
    told = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(jsonl, "log", lambda: told)  # what other tests of this process do to loggers does not count
    rows = RowWriter(tmp_path / "rows.jsonl")
    rows.add({"step": 1})
    append = jsonl.append

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl, "append", full)
    monkeypatch.setattr(jsonl, "MOST_WAITING", 2)
    for step in range(2, 6):
        rows.add({"step": step})
    assert len(said) == 1 and "cannot be written (No space left" in said[0]
    rows.close()
    assert "lacks 4 rows" in said[-1]
    monkeypatch.setattr(jsonl, "append", append)
    rows.add({"step": 6})
    assert steps_of(rows.path) == [1, 5, 6] and "can be written again" in said[-1]
    rows.close()
    assert "lacks 3 rows" in said[-1] and "too many waited" in said[-1]


def test_a_row_is_appended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    jsonl.append(path, b"one\n")

    def half(handle: int, content: memoryview) -> None:
        os.write(handle, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(jsonl, "write_all", half)
        jsonl.append(path, b"another\n")
    jsonl.append(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def console(log_every: int = 5) -> Console:
    cfg: Any = SimpleNamespace(log_every=log_every, stage=SimpleNamespace(name="s"))
    return Console(cfg, 0, 12)


class Seen(StepReport):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        self.rows.append(row)


def test_every_record_that_a_step_lacks_has_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that are skipped, of which a warning is logged, and those without a label; while the run's folder is lost
    nothing is written."""
    log().propagate = True
    seen, lost = [Seen(), Seen()], [True]
    own = Reports([MetricsFile(tmp_path, 0), *seen, SkippedRecords(tmp_path, 0)], is_lost=lambda: lost[0])
    lacks = StepFacts(6, samples=1)
    skipped = [SkippedSample(number, f"r{number}", "image_missing", f"reason {number}", lacks) for number in (4, 9)]
    facts = StepFacts(6, samples=5, tokens=9, label_tokens=5, skipped=skipped, unlabelled=["a", "b"])
    result = StepResult(facts, 1.0, 0.1, 1.5, 1.0)
    own.after_step(result)
    assert not seen[0].rows and not list(tmp_path.iterdir())
    lost[0] = False
    own.after_step(result)
    (row,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [each.rows for each in seen] == [[row], [row]] and (
        row["step"],
        row["skipped_records"],
        row["unlabelled"],
    ) == (7, 2, 2)
    rows = [json.loads(line) for line in (tmp_path / "skipped_records.jsonl").read_text().splitlines()]
    assert [(own["step"], own["record"], own["kind"]) for own in rows] == [
        (7, "r4", "image_missing"), (7, "r9", "image_missing"), (7, "a", "no_labels"), (7, "b", "no_labels"),
    ]  # fmt: skip
    assert len([said for said in dict.fromkeys(caplog.messages) if "reason" in said]) == 2


ROW: dict[str, Any] = {
    "step": 5, "loss": 2.5, "lr": 0.001, "grad_norm": 1.5, "label_tokens": 7, "samples": 4, "truncated": 1,
    "skipped_records": 2, "unlabelled": 2, "seconds": 2.0, "tokens_per_second": 1234.5, "mfu": None, "hfu": None,
    "skipped_steps": 0,
}  # fmt: skip


def shown(caplog: pytest.LogCaptureFixture, own: StepReport, **values: Any) -> str:
    caplog.clear()
    log().propagate = True
    own.step({**ROW, **values}, result_of(4))
    return "\n".join(dict.fromkeys(caplog.messages))


def test_a_step_is_shown_every_so_often_and_the_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "llava_fsdp")
    own = console()
    assert [step for step in range(1, 13) if shown(caplog, own, step=step)] == [5, 10, 12]
    assert "tokens/s  MFU 50.0%  lr" in shown(caplog, own, mfu=0.5, hfu=None)
    own.recent_seconds.clear()
    line = shown(caplog, own, mfu=0.5, hfu=0.625, skipped_steps=3)
    assert line.startswith(
        "step 5/12  loss 2.5000  1,234 tokens/s  MFU 50.0%, HFU 62.5%  3 skipped  lr 0.001  grad norm 1.5"
    )
    assert line.endswith(f"  {duration(14.0)} left"), "seven steps of two seconds"
    line = shown(caplog, own, loss=None, grad_norm=None, seconds=4.0)
    assert "loss overflowed " in line and line.endswith(f"grad norm overflowed  {duration(21.0)} left")


def test_steps_that_train_little_are_told(caplog: pytest.LogCaptureFixture) -> None:
    own = SampleWarnings()
    assert shown(caplog, own) == "", "half of the samples have labels"
    assert shown(caplog, own, unlabelled=3) == "step 5: 3 of 4 samples have no label"
    for values in ({"label_tokens": 0}, {"grad_norm": 0.0}):
        said = shown(caplog, own, unlabelled=3, **values)
        assert said.startswith("step 5 has trained nothing: 4 samples, ") and "(1 samples truncated" in said
        assert ", 2 skipped)" in said


def result_of(step: int, loss: float = 1.0, **values: Any) -> StepResult:
    facts = StepFacts(step, samples=4, tokens=9, token_pairs=2, label_tokens=5, images=1, tiles=1)
    return StepResult(facts, loss, 0.1, 1.5, 1.0, **values)


def test_what_is_unlike_the_steps_before_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A skipped step, but in fp16, where the scaler tells; a loss that stands out; and new graphs, each once."""
    log().propagate = True
    own, compiling = LossWarnings(6.0), CompileWarnings()
    for step in range(FEWEST):
        own.step({}, result_of(step, 1.0 + step % 2))
    own.step({}, result_of(16, float("inf"), skipped=True, loss_scale=64.0))
    assert not caplog.messages
    own.step({}, result_of(17, 4.51))
    assert set(caplog.messages) == {"step 18: loss 4.5100 stands out from the steps before (1.5000 +- 0.5000)"}
    own.step({}, result_of(18, 4.4, skipped=True))
    assert "step 19: loss 4.4, gradient norm 1.5; the weights were not updated" in caplog.messages
    caplog.clear()
    for recompiles, told in ((2, "2 graphs"), (2, None), (5, "3 graphs")):
        before = len(caplog.messages)
        compiling.after_step(result_of(20, recompiles=recompiles))
        assert (len(caplog.messages) > before) is (told is not None)
        assert told is None or caplog.messages[-1].startswith(f"step 21: {told} were compiled again")


def test_lines_that_a_crash_has_left_are_passed_over(tmp_path: Path) -> None:
    """And what is no object; a file that is not there has no rows."""
    path = tmp_path / "rows.jsonl"
    assert jsonl.read_rows(path) == []
    lines = ['{"step": 1}', "[1]", '{"step"', "7", "null", "[" * 100_000, '{"step": 2}', '{"step": 3']
    path.write_bytes("\n".join(lines).encode() + b"\xff")
    assert jsonl.read_rows(path) == [{"step": 1}, {"step": 2}]
