"""Log a training to the trackers (TensorBoard, Weights & Biases, MLflow, Trackio), on rank 0.

A tracker must neither slow training down nor end it. Therefore rows are put into a queue, and a thread sends them to
the trackers; after an error a tracker is closed with a warning. The thread is started with the first row, which is
after the training's data workers were forked. The data workers of a validation are forked while the thread runs. They
must not use this module, because its locks may be held when they are forked.
"""

import contextlib
import importlib.util
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from llava_fsdp.config import Config, TrackConfig, WandbMode
from llava_fsdp.config.command_line.tree import dotted, written
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.redact import redact, redact_values, secrets_of
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.events.reporting.tracker_classes import CLASSES, TrackedRun, Tracker
from llava_fsdp.train.state import StepResult

MOST_WAITING = 20_000
"""Maximum number of rows in the queue. Further rows are dropped."""
PATIENCE = 15
"""Maximum seconds that a run waits at its end until the queued rows are logged."""
HURRY = 4
"""Maximum seconds of this wait if other ranks wait for this process to end."""
NAMES = {
    "loss": "train/loss", "lr": "train/learning_rate", "grad_norm": "train/gradient_norm",
    "loss_scale": "train/loss_scale", "skipped_steps": "train/skipped_steps",
    "tokens_per_second": "speed/tokens_per_second", "mfu": "speed/mfu", "hfu": "speed/hfu",
    "seconds": "speed/step_seconds", "data_seconds": "speed/data_seconds",
    "peak_memory_bytes": "memory/peak_bytes",
}  # fmt: skip
"""Column of metrics.jsonl -> its name in the trackers."""


def chosen(cfg: TrackConfig) -> list[str]:
    """Return the keys of the trackers that are on."""
    on = {
        "tensorboard": cfg.tensorboard, "wandb": cfg.wandb is not WandbMode.off, "mlflow": cfg.mlflow is not None,
        "trackio": cfg.trackio,
    }  # fmt: skip
    return [key for key, is_on in on.items() if is_on]


def check_installed(cfg: TrackConfig) -> None:
    """Raise ConfigError if the package of an enabled tracker is not installed."""
    for key in chosen(cfg):
        if importlib.util.find_spec(key) is None:
            value = written(getattr(cfg, key)) if key != "wandb" else cfg.wandb.value
            raise ConfigError(
                f"track.{key}={value} needs the package {key}: pip install 'llava-fsdp[{key}]', or leave it out"
            )


def values_of_step(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a row of `metrics.jsonl` by their names in the trackers."""
    found = {name: row[key] for key, name in NAMES.items() if row.get(key) is not None}
    sources = row.get("sources") or {}
    if len(sources) > 1:
        found |= {
            f"loss_by_source/{name}": source_row["loss"]
            for name, source_row in sources.items()
            if source_row["loss"] is not None
        }
    return found


def values_of_validation(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a row of `validation.jsonl` by their names in the trackers."""
    found = {f"validation/{key}": row.get(key) for key in ("loss", "score", "seconds")}
    sources = row.get("sources") or {}
    if len(sources) > 1:
        for key in ("loss", "score"):
            found |= {f"validation_{key}_by_source/{name}": source_row.get(key) for name, source_row in sources.items()}
    return {name: value for name, value in found.items() if value is not None}


class Trackers(StepReport):
    """The enabled trackers, and the thread that sends metrics to them."""

    def __init__(self, cfg: Config, first_step: int, run: str, about: dict[str, Any], values: dict[str, Any]):
        """Prepare the enabled trackers, which are opened with the first row.

        Args:
            first_step: number of steps that were finished when this start of the run began.
            run: identifier of the run, which is kept when the run resumes.
            about: description of this start of the run, from `run_info.py`.
            values: the configuration: dotted key -> value.
        """
        self.cfg = cfg
        shown = {
            key: value if isinstance(value, int | float) else written(value)
            for key, value in redact_values(values, secrets_of()).items()
        }
        self.run = TrackedRun(run, first_step, {**shown, **flat_about(about)})
        self.queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self.thread: threading.Thread | None = None
        self.is_enabled = bool(chosen(cfg.track))
        self.exit_code = 0
        self.num_dropped = 0

    def step(self, row: dict[str, Any], result: StepResult | None = None) -> None:
        self.put(row["step"], values_of_step(row))

    def validation(self, row: dict[str, Any]) -> None:
        self.put(row["step"], values_of_validation(row))

    def put(self, step: int, values: dict[str, float]) -> None:
        """Queue values of a step. If the queue is full, they are dropped."""
        if not self.is_enabled:
            return
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name="tracking", daemon=True)
            self.thread.start()
        try:
            self.queue.put_nowait((step, values))
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                log().warning(
                    "the trackers are %d rows behind; more rows are dropped until they catch up", MOST_WAITING
                )

    def work(self) -> None:
        """Body of the thread: open the trackers, log the queued values until `end` queues None, and close them."""
        trackers: list[Tracker] = []
        for key in chosen(self.cfg.track):
            with logged_errors(f"{CLASSES[key].__name__} cannot log this run"):
                trackers.append(CLASSES[key](self.cfg, self.run))
        while (queued := self.queue.get()) is not None:
            step, values = queued
            for tracker in list(trackers):
                with logged_errors(f"{type(tracker).__name__} is closed") as good:
                    tracker.log(step, values)
                if not good:  # `logged_errors` empties this list if there was an exception
                    trackers.remove(tracker)
        for tracker in trackers:
            with logged_errors(f"{type(tracker).__name__} was not closed"):
                tracker.close(self.exit_code)

    def end(self, exit_code: int = 0, patience: float = PATIENCE) -> None:
        """Wait at most `patience` seconds until the queued values are logged and the trackers are
        closed. `exit_code` is the training's exit code, which some of them show."""
        if self.thread is None:
            return
        self.exit_code = exit_code
        until = time.monotonic() + patience
        try:
            self.queue.put(None, timeout=patience)
            self.thread.join(max(0.0, until - time.monotonic()))
        except queue.Full:
            pass
        if self.thread.is_alive():
            log().warning(
                "tracking was not finished after %d seconds; trackers may lack the last rows (`wandb sync` sends those "
                "of Weights & Biases)",
                patience,
            )
        self.thread = None


@contextlib.contextmanager
def logged_errors(what: str) -> Iterator[list[None]]:
    """Context manager in which an exception becomes a logged warning that begins with `what`. Yields a list with one
    item, which is emptied if there is an exception, so that the caller can tell."""
    without_error = [None]
    try:
        yield without_error
    except Exception as error:
        without_error.clear()
        log().warning("%s (%s: %s)", what, type(error).__name__, " ".join(str(error).split())[:500])


def flat_about(about: dict[str, Any]) -> dict[str, str]:
    """Flatten the description of a start of a run to {dotted key: text}, without lists. Secrets are hidden."""
    known = secrets_of()
    entries = {key: value for key, value in about.items() if not isinstance(value, list) and value is not None}
    return {f"about.{key}": redact(written(value), known) for key, value in dotted(entries).items()}
