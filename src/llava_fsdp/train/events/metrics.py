"""Report the progress of a training: a row of `metrics.jsonl` per step, a progress bar or log lines, warnings, and an
HTML page."""

import contextlib
import itertools
import json
import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TextColumn

from llava_fsdp.config import Config
from llava_fsdp.config.command_line.renamed import rename_old_files
from llava_fsdp.plan.time.mfu import Utilization
from llava_fsdp.report.run_reader import METRICS_FILE
from llava_fsdp.runtime.errors import StorageError
from llava_fsdp.runtime.files.jsonl import Rows, replace_lines
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.humanize import duration
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.live_page import LivePage
from llava_fsdp.train.events.lost_rows import SKIPPED_FILE, lost_rows
from llava_fsdp.train.events.trackers import PATIENCE, Trackers
from llava_fsdp.train.state import StepResult

WINDOW = 128
"""Maximum number of preceding losses with which a loss is compared to decide whether it is a spike."""
FEWEST = 16
"""Minimum number of preceding losses that are needed to decide whether a loss is a spike."""
MOST_IDLE = 0.5
"""Share of idle experts above which a step counts as collapsed."""
COLLAPSED_STEPS = 50
"""Number of consecutive collapsed steps after which a warning is logged."""


class Reporter:
    """Writes the metrics of a training and shows its progress after every step, on rank 0. On other ranks it only logs
    warnings."""

    def __init__(
        self,
        cfg: Config,
        first_step: int,
        total_steps: int,
        is_first_rank: bool,
        left_out: Iterable[dict[str, Any]] = (),
        utilization: Utilization | None = None,
        run: str = "",
        about: dict[str, Any] | None = None,
    ):
        """Open the files, the HTML page and the trackers (TensorBoard, Weights & Biases) to which a training reports.

        Args:
            first_step: number of steps that were finished when this start of the run began.
            total_steps: number of steps of the whole run.
            is_first_rank: whether this is rank 0, which alone writes.
            left_out: records of the dataset that were skipped before training, each with the keys record, kind and
                reason. They are listed with step 0.
            utilization: computes the share of the device's FLOPs that is used; None: unknown.
            run: identifier of the run.
            about: description of this start of the run (hardware, versions, ...), from `run_info.py`.
        """
        self.cfg = cfg
        self.enabled = is_first_rank
        self.total_steps = total_steps
        self.utilization = utilization
        folder = Path(cfg.output_dir)
        self.spikes = Spikes(cfg.numeric.spike_sigma)
        self.progress: Progress | None = None
        self.recompiles = 0
        self.collapsed_steps = 0
        """Number of collapsed steps up to the last one, without a gap."""
        self.recent: deque[float] = deque(maxlen=20)  # seconds of the last steps, to estimate the remaining time
        if not self.enabled:
            return
        self.metrics, self.skipped_records = Rows(folder / METRICS_FILE), Rows(folder / SKIPPED_FILE)
        with storage_errors(folder):
            rename_old_files(folder)
            for message in lost_rows(folder, first_step) if first_step else ():
                log().warning(
                    "%s: %s: the file was truncated or damaged, and curves and sums lack these rows", folder, message
                )
            drop_later_rows(self.metrics.path, first_step)
            begin_skipped_records(self.skipped_records.path, first_step, left_out)
        about = {**(about or {}), "run": run, "total_steps": total_steps}
        self.page = LivePage(cfg, first_step, about)
        self.trackers = Trackers(cfg, first_step, run, about, self.page.run.config)
        if sys.stderr.isatty():
            columns = *Progress.get_default_columns(), TextColumn("{task.fields[shown]}")
            self.progress = Progress(*columns, console=TextConsole(on_stderr=True))
            self.task = self.progress.add_task(cfg.stage.name, total=total_steps, completed=first_step, shown="")
            self.progress.start()

    def close(self) -> None:
        if self.enabled:
            self.metrics.close()
            self.skipped_records.close()
        if self.progress is not None:
            self.progress.stop()

    def note(self, text: str) -> None:
        """Show a text next to the training's progress bar, if there is a progress bar."""
        if self.progress is not None:
            self.progress.update(self.task, shown=text)

    def end(self, patience: float = PATIENCE) -> None:
        """Write the training's final HTML page, and close the trackers (TensorBoard, Weights & Biases) within
        `patience` seconds. To be called after `run_status.json` is written."""
        if self.enabled:
            self.page.write()
            if not self.page.failed:
                log().info("report: %s", self.page.path)
            self.trackers.close(int(self.page.run.status.get("exit_code") or 0), patience)

    def __call__(self, result: StepResult) -> None:
        """Report the result of a training step: write its metrics, show progress and log warnings."""
        self.warn_of_compiling(result)
        if not self.enabled:
            return
        row = metrics_row(result, self.utilization)
        self.metrics.add(row)
        self.page.add(row)
        self.trackers.step(row)
        for sample in result.facts.skipped:
            skipped = {"step": row["step"], "record": sample.record, "kind": sample.kind, "reason": sample.reason}
            self.skipped_records.add(skipped)
            log().warning("step %d is trained without %s", row["step"], sample.reason)
        for where in result.facts.unlabelled:
            self.skipped_records.add({"step": row["step"], "record": where, "kind": "no_labels", "reason": "no label"})
        self.warn(result)
        self.show(row)

    def validated(self, row: dict[str, Any]) -> None:
        """Pass the results of a validation, a row of `validation.jsonl`, to the trackers (TensorBoard, Weights &
        Biases). Called on rank 0; the HTML page has the results from the file."""
        self.trackers.validation(row)

    def warn_of_compiling(self, result: StepResult) -> None:
        """Log a warning if torch.compile compiled graphs again in the training step whose result is given. Any rank may
        log this warning, because all ranks wait for a rank that compiles."""
        if result.recompiles > self.recompiles:
            log().warning(
                "step %d: %d graphs were compiled again, which should happen only in the first steps "
                "(TORCH_LOGS=recompiles shows why; compile=false turns compilation off)",
                result.facts.step + 1, result.recompiles - self.recompiles,
            )  # fmt: skip
        self.recompiles = result.recompiles

    def warn(self, result: StepResult) -> None:
        """Log a warning if a step's update of the weights was skipped, if its loss is far above the preceding ones, or
        if most experts have been idle for many steps."""
        step = result.facts.step + 1
        load = result.expert_load
        self.collapsed_steps = self.collapsed_steps + 1 if load is not None and load.experts_idle > MOST_IDLE else 0
        if self.collapsed_steps == COLLAPSED_STEPS:
            log().warning(
                "step %d: for %d steps more than half of the experts have had less than a tenth of an equal share of "
                "the tokens (experts_idle in metrics.jsonl); a larger model.balance_loss spreads the tokens",
                step, COLLAPSED_STEPS,
            )  # fmt: skip
        if result.skipped and result.loss_scale is None:
            log().warning(
                "step %d: loss %s, gradient norm %s; the weights were not updated",
                step, result.loss, result.grad_norm,
            )  # fmt: skip
        elif (before := self.spikes.stands_out(result.loss)) is not None:
            log().warning(
                "step %d: loss %.4f stands out from the steps before (%.4f +- %.4f)", step, result.loss, *before
            )

    def show(self, row: dict) -> None:
        """Show the result of a training step, a row of `metrics.jsonl`, on the terminal, with warnings about its
        samples."""
        if row["label_tokens"] == 0 or row["grad_norm"] == 0:
            log().warning(
                "step %d has trained nothing: %d samples, %d label tokens, gradient norm %g (%d samples truncated at "
                "data.max_length, %d skipped); see data.max_length, data.template and model.train",
                *(row[k] for k in ("step", "samples", "label_tokens", "grad_norm", "truncated", "skipped_records")),
            )
        elif 2 * row["unlabelled"] > row["samples"]:
            log().warning("step %d: %d of %d samples have no label", row["step"], row["unlabelled"], row["samples"])
        self.recent.append(row["seconds"])
        shown = f"loss {number(row['loss'], '.4f')}  {row['tokens_per_second']:,.0f} tokens/s"
        used = [f"{name.upper()} {row[name]:.1%}" for name in ("mfu", "hfu") if row[name] is not None]
        shown += f"  {', '.join(used)}" if used else ""
        shown += f"  {row['skipped_steps']} skipped" if row["skipped_steps"] else ""
        if self.progress is not None:
            self.progress.update(self.task, completed=row["step"], shown=shown)
        elif row["step"] % self.cfg.log_every == 0 or row["step"] == self.total_steps:
            left = (self.total_steps - row["step"]) * sum(self.recent) / len(self.recent)
            log().info(
                "step %d/%d  %s  lr %.3g  grad norm %s  %s left",
                row["step"], self.total_steps, shown, row["lr"], number(row["grad_norm"], ".3g"), duration(left),
            )  # fmt: skip


def metrics_row(result: StepResult, utilization: Utilization | None = None) -> dict:
    """Return the row of `metrics.jsonl` for a training step.

    Args:
        utilization: computes the share of the device's FLOPs that is used; None: unknown.
    """
    facts = result.facts
    experts = {} if result.expert_load is None else asdict(result.expert_load)
    used = dict.fromkeys(("flops", "mfu", "hfu")) if utilization is None else utilization.of(facts, result.seconds)
    return {
        "step": facts.step + 1,
        "loss": finite(result.loss),
        "sources": {
            name: {"loss": None if loss is None else finite(loss), "label_tokens": facts.source_labels[name]}
            for name, loss in result.source_losses.items()
        },
        "lr": result.lr,
        "grad_norm": finite(result.grad_norm),
        "skipped": result.skipped,
        "skipped_steps": result.skipped_steps,
        "loss_scale": result.loss_scale,
        "label_tokens": facts.label_tokens,
        "tokens": facts.tokens,
        "samples": facts.samples,
        "images": facts.images,
        "tiles": facts.tiles,
        "truncated": facts.truncated,
        "labels_cut": facts.labels_cut,
        "unlabelled": len(facts.unlabelled),
        "skipped_records": len(facts.skipped),
        "seconds": result.seconds,
        "data_seconds": result.data_seconds,
        "tokens_per_second": facts.tokens / result.seconds,
        **used,
        "recompiles": result.recompiles,
        "peak_memory_bytes": peak_memory(),
        **{key: finite(value) for key, value in experts.items()},
    }


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError to a StorageError, whose message names the file or folder `path`, which
    cannot be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({why(error, path)})") from error


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite: JSON has only finite numbers."""
    return value if math.isfinite(value) else None


def peak_memory() -> int:
    """Return the peak memory of this rank in bytes: of the memory allocated on the GPU or, without a GPU, of the
    resident memory of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def drop_later_rows(path: Path, step: int) -> None:
    """Remove the rows whose entry `step` is greater than `step` from a JSON Lines file, because a resumed run repeats
    these steps."""
    if path.is_file():
        replace_lines(path, rows_of(path, range(step + 1)))


def begin_skipped_records(path: Path, step: int, left_out: Iterable[dict[str, Any]]) -> None:
    """Write the JSON Lines file of skipped records (records of the dataset that could not be used) anew, from its
    present rows and those of records that were skipped before training.

    Args:
        step: present rows of later steps are dropped, because a resumed run repeats these steps.
        left_out: the records that were skipped before training, which become the first rows, with step 0.
    """
    before = (json.dumps({"step": 0, **row}) for row in left_out)
    later = rows_of(path, range(1, step + 1)) if path.is_file() else []
    replace_lines(path, itertools.chain(before, later))
    if not path.stat().st_size:
        path.unlink()


def rows_of(path: Path, steps: range) -> list[str]:
    """Return the lines of a JSON Lines file whose entry `step` is one of the given steps. Incomplete lines are left
    out."""
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # an incomplete line, cut by a crash
            if json.loads(line)["step"] in steps:
                kept.append(line)
    return kept


def number(value: float | None, form: str) -> str:
    """Format a number by the format specification `form`; None stands for a number that is not finite."""
    return "overflowed" if value is None else format(value, form)


class Spikes:
    """Finds losses of a training that are far above the preceding ones."""

    def __init__(self, sigma: float | None):
        self.sigma = sigma
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def stands_out(self, loss: float) -> tuple[float, float] | None:
        """Return the mean and the standard deviation of the preceding losses if `loss` is far above them (by more than
        `self.sigma` standard deviations), else None. Then count `loss` as a preceding loss, so that losses which stay
        high are reported only for a while."""
        found = None
        if self.sigma is not None and math.isfinite(loss):
            if len(self.losses) >= FEWEST:
                mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
                found = (mean, deviation) if loss > mean + self.sigma * deviation else None
            self.losses.append(loss)
        return found
