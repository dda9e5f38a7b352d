"""What a run says while it trains: one JSON object a step, a progress bar or plain lines, and how it ended."""

import contextlib
import itertools
import json
import math
import os
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from llava_fsdp.config import Config
from llava_fsdp.errors import ConfigError, ExitCode, StorageError
from llava_fsdp.log import log
from llava_fsdp.redact import redact, secrets_of
from llava_fsdp.rows import Rows, replace_lines
from llava_fsdp.state import StepResult
from llava_fsdp.untrusted import is_open_to_others

METRICS_FILE = "metrics.jsonl"
QUARANTINE_FILE = "quarantine.jsonl"
STATUS_FILE = "run_status.json"
FIRST_FAILURE = ".run_failed"


def begin_status(cfg: Config) -> None:
    """Make `output_dir` and say in it that a run is under way; what is killed leaves that word behind.

    On rank 0, before the ranks meet: none can have failed by then.

    Raises:
        ConfigError: `output_dir` cannot be written.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    folder = Path(cfg.output_dir)
    try:
        make_run_folder(folder, cfg.private)
        (folder / FIRST_FAILURE).unlink(missing_ok=True)
        put_status(folder, {"status": "running", "exit_code": None, "reason": "", "rank": 0})
    except OSError as error:
        raise ConfigError(f"output_dir={cfg.output_dir} cannot be written ({error}); give another folder") from error


def make_run_folder(folder: Path, private: bool) -> None:
    """A new one is the user's alone with `private`; one that exists stays as it is, with a word if others may write."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    elif is_open_to_others(folder):
        log().warning(
            "output_dir=%s can be written by every user of this machine, and a run continues from what it finds there; "
            "chmod o-w %s", folder, folder,
        )  # fmt: skip


def write_status(folder: Path, code: ExitCode, reason: str) -> str | None:
    """Say in `run_status.json` how the run ended; torchrun's own exit code does not tell.

    The first rank that fails writes, the others fail because it did.

    Returns:
        The first failure, where another rank was it.
    """
    rank = int(os.environ.get("RANK", "0"))
    if not folder.is_dir() or (code == ExitCode.DONE and rank != 0):
        return None
    status = {"status": code.name.lower(), "exit_code": int(code), "reason": reason, "rank": rank}
    try:
        if code != ExitCode.DONE:
            (folder / FIRST_FAILURE).open("x").close()  # exclusive: one rank of all creates it
        put_status(folder, status)
    except FileExistsError:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            first = json.loads((folder / STATUS_FILE).read_text())
            if first["rank"] != rank:
                return f"rank {first['rank']} failed first: {first['reason']}"
    except OSError as error:
        log().warning("cannot write %s: %s", folder / STATUS_FILE, error)
    return None


def put_status(folder: Path, status: dict) -> None:
    staged = folder / f"{STATUS_FILE}.{os.getpid()}.tmp"
    staged.write_text(json.dumps({**status, "reason": redact(status["reason"], secrets_of())}) + "\n")
    os.replace(staged, folder / STATUS_FILE)


def watch_loading(is_first_rank: bool) -> Callable[[Iterable[str]], Iterable[str]]:
    """Shows the loading of weights as it goes, on rank 0's terminal."""

    def watch(names: Iterable[str]) -> Iterable[str]:
        if not (is_first_rank and sys.stderr.isatty()):
            return names
        return track(list(names), description="weights", console=Console(stderr=True), transient=True)

    return watch


class Reporter:
    """Writes and shows every step on rank 0; quiet elsewhere."""

    def __init__(
        self,
        cfg: Config,
        first_step: int,
        total_steps: int,
        is_first_rank: bool,
        left_out: Iterable[dict[str, Any]] = (),
    ):
        """
        Args:
            left_out: records that training never sees (record, kind, reason), listed as of step 0.
        """
        self.cfg = cfg
        self.enabled = is_first_rank
        self.total_steps = total_steps
        self.folder = Path(cfg.output_dir)
        self.progress: Progress | None = None
        self.recent: deque[float] = deque(maxlen=20)  # seconds a step, for the time left
        if not self.enabled:
            return
        self.metrics, self.quarantine = Rows(self.folder / METRICS_FILE), Rows(self.folder / QUARANTINE_FILE)
        try:
            cut_back(self.metrics.path, first_step)
            begin_quarantine(self.quarantine.path, first_step, left_out)
        except OSError as error:
            raise StorageError(f"output_dir={cfg.output_dir} cannot be written ({error}); make room there") from error
        if sys.stderr.isatty():
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.progress.add_task(cfg.stage.name, total=total_steps, completed=first_step, shown="")
            self.progress.start()

    def close(self) -> None:
        if self.enabled:
            self.metrics.close()
            self.quarantine.close()
        if self.progress is not None:
            self.progress.stop()

    def __call__(self, result: StepResult) -> None:
        if not self.enabled:
            return
        row = metrics_row(result)
        self.metrics.add(row)
        for sample in result.facts.left_out:
            said = {"step": row["step"], "record": sample.record, "kind": sample.kind, "reason": sample.reason}
            self.quarantine.add(said)
            log().warning("step %d goes without %s", row["step"], sample.reason)
        for where in result.facts.unlabelled:
            self.quarantine.add({"step": row["step"], "record": where, "kind": "no_labels", "reason": "no label"})
        self.show(row)

    def show(self, row: dict) -> None:
        if row["label_tokens"] == 0 or row["grad_norm"] == 0:
            log().warning(
                "step %d taught nothing: %d samples, %d label tokens, gradient norm %g (%d samples cut at "
                "data.max_length, %d left out); see data.max_length, data.template and model.train",
                *(row[k] for k in ("step", "samples", "label_tokens", "grad_norm", "truncated", "quarantined")),
            )
        elif 2 * row["unlabelled"] > row["samples"]:
            log().warning("step %d: %d of %d samples have no label", row["step"], row["unlabelled"], row["samples"])
        self.recent.append(row["seconds"])
        shown = f"loss {number(row['loss'], '.4f')}  {row['tokens_per_second']:,.0f} tokens/s"
        shown += f"  {row['skipped_steps']} skipped" if row["skipped_steps"] else ""
        if self.progress is not None:
            self.progress.update(self.task, completed=row["step"], shown=shown)
        elif row["step"] % self.cfg.log_every == 0 or row["step"] == self.total_steps:
            left = (self.total_steps - row["step"]) * sum(self.recent) / len(self.recent)
            log().info(
                "step %d/%d  %s  lr %.3g  grad norm %s  %s left",
                row["step"], self.total_steps, shown, row["lr"], number(row["grad_norm"], ".3g"), duration(left),
            )  # fmt: skip


def metrics_row(result: StepResult) -> dict:
    facts = result.facts
    return {
        "step": facts.step + 1,
        "loss": finite(result.loss),
        "lr": result.lr,
        "grad_norm": finite(result.grad_norm),
        "skipped": result.skipped,
        "skipped_steps": result.skipped_steps,
        "loss_scale": result.loss_scale,
        "label_tokens": facts.label_tokens,
        "tokens": facts.tokens,
        "samples": facts.samples,
        "images": facts.images,
        "truncated": facts.truncated,
        "labels_cut": facts.labels_cut,
        "unlabelled": len(facts.unlabelled),
        "quarantined": len(facts.left_out),
        "seconds": result.seconds,
        "tokens_per_second": facts.tokens / result.seconds,
        "peak_memory_bytes": peak_memory(),
    }


def finite(value: float) -> float | None:
    """JSON has no word for a number that is none."""
    return value if math.isfinite(value) else None


def peak_memory() -> int:
    """Most bytes this rank has held: on the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cut_back(path: Path, step: int) -> None:
    """Drop the rows of steps after `step`: a resumed run does them again."""
    if path.is_file():
        replace_lines(path, rows_of(path, range(step + 1)))


def begin_quarantine(path: Path, step: int, left_out: Iterable[dict[str, Any]]) -> None:
    """What was left out before the first step, and what the steps to `step` left out."""
    before = (json.dumps({"step": 0, **row}) for row in left_out)
    later = rows_of(path, range(1, step + 1)) if path.is_file() else []
    replace_lines(path, itertools.chain(before, later))
    if not path.stat().st_size:
        path.unlink()


def rows_of(path: Path, steps: range) -> list[str]:
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # a line that a crash cut short
            if json.loads(line)["step"] in steps:
                kept.append(line)
    return kept


def number(value: float | None, form: str) -> str:
    return "overflowed" if value is None else format(value, form)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
