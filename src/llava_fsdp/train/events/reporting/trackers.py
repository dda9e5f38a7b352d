"""Log a training to the trackers, TensorBoard and Weights & Biases, on rank 0.

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
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config, TrackConfig, WandbMode
from llava_fsdp.config.command_line.tree import dotted, written
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.redact import redact, redact_values, secrets_of
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.state import StepResult

FOLDER = "tensorboard"
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


def check_installed(cfg: TrackConfig) -> None:
    """Raise ConfigError if the package of an enabled tracker is not installed."""
    is_wanted = {"tensorboard": cfg.tensorboard, "wandb": cfg.wandb is not WandbMode.off}
    for name, on in is_wanted.items():
        if on and importlib.util.find_spec(name) is None:
            value = "true" if name == "tensorboard" else cfg.wandb.value
            raise ConfigError(
                f"track.{name}={value} needs the package {name}: pip install 'llava-fsdp[{name}]', or leave it out"
            )


def values_of_step(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a row of `metrics.jsonl` by their names in the trackers."""
    found = {name: row[key] for key, name in NAMES.items() if row.get(key) is not None}
    sources = row.get("sources") or {}
    if len(sources) > 1:
        found |= {f"loss_by_source/{name}": own["loss"] for name, own in sources.items() if own["loss"] is not None}
    return found


def values_of_validation(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a row of `validation.jsonl` by their names in the trackers."""
    found = {f"validation/{key}": row.get(key) for key in ("loss", "score", "seconds")}
    sources = row.get("sources") or {}
    if len(sources) > 1:
        for key in ("loss", "score"):
            found |= {f"validation_{key}_by_source/{name}": own.get(key) for name, own in sources.items()}
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
        self.first_step = first_step
        self.name = run
        self.about = about
        self.values = {
            key: value if isinstance(value, int | float) else written(value)
            for key, value in redact_values(values, secrets_of()).items()
        }
        self.queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self.thread: threading.Thread | None = None
        self.is_enabled = cfg.track.tensorboard or cfg.track.wandb is not WandbMode.off
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
        """Body of the thread: open the trackers, log the queued values until `end` queues None, and close the
        trackers."""
        trackers: list[TensorBoard | WeightsAndBiases] = []
        with logged_errors("TensorBoard cannot log this run"):
            trackers += [TensorBoard(self)] if self.cfg.track.tensorboard else []
        with logged_errors("Weights & Biases cannot log this run"):
            trackers += [WeightsAndBiases(self)] if self.cfg.track.wandb is not WandbMode.off else []
        while (queued := self.queue.get()) is not None:
            step, values = queued
            for tracker in list(trackers):
                with logged_errors(f"{type(tracker).__name__} is closed") as good:
                    tracker.log(step, values)
                if not good:
                    trackers.remove(tracker)
        for tracker in trackers:
            with logged_errors(f"{type(tracker).__name__} was not closed"):
                tracker.close(self.exit_code)

    def end(self, exit_code: int = 0, patience: float = PATIENCE) -> None:
        """Wait at most `patience` seconds until the queued values are logged and the trackers (TensorBoard, Weights &
        Biases) are closed. `exit_code` is the training's exit code, which Weights & Biases shows."""
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
            log().warning("tracking was not finished after %d seconds; `wandb sync` sends what is missing", patience)
        self.thread = None


@contextlib.contextmanager
def logged_errors(what: str) -> Iterator[list[None]]:
    """Context manager in which an exception becomes a logged warning that begins with `what`.

    Yields:
        A list with one item, which is emptied if there is an exception.
    """
    without_error = [None]
    try:
        yield without_error
    except Exception as error:
        without_error.clear()
        log().warning("%s (%s: %s)", what, type(error).__name__, " ".join(str(error).split())[:500])


class TensorBoard:
    """Writes event files of TensorBoard. If a resumed run repeats steps, TensorBoard shows the repetition."""

    def __init__(self, run: Trackers):
        """Open an event file for the steps after `run.first_step`, and log the run's settings in it as text."""
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(run.cfg.output_dir) / FOLDER
        self.writer = SummaryWriter(str(folder), purge_step=run.first_step + 1, flush_secs=10)
        text = "\n".join(f"    {key}: {value}" for key, value in {**run.values, **flat_about(run.about)}.items())
        self.writer.add_text("run", text, run.first_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values of a step, by their names in TensorBoard."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, exit_code: int) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases. A training that resumes continues its run there. Local files are in
    `output_dir/wandb`."""

    def __init__(self, run: Trackers):
        """Create the run, or continue it under its id. wandb is imported here because it is optional."""
        import wandb

        cfg, folder = run.cfg.track, Path(run.cfg.output_dir)
        self.run = wandb.init(
            project=cfg.project,
            name=cfg.name or folder.resolve().name,
            id=run.name,
            dir=str(folder),
            mode=cfg.wandb.value,  # pyright: ignore[reportArgumentType]
            resume="allow" if cfg.wandb is WandbMode.online else None,
            config={**run.values, **flat_about(run.about)},
            # wandb's own metadata would contain the command line, the user and the machine
            settings=wandb.Settings(console="off", silent=True, save_code=False, x_disable_meta=True, host="-"),
        )
        self.run.define_metric("validation/step")
        self.run.define_metric("validation*", step_metric="validation/step")
        self.teardown = wandb.teardown

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values of a step. Those of a validation are logged at the current step, because Weights & Biases drops
        values of earlier steps."""
        if any(name.startswith("validation") for name in values):
            self.run.log({"validation/step": step, **values})
        else:
            self.run.log(values, step=step)

    def close(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
        self.teardown()  # waits for wandb's process, which writes the last rows and is killed together with this one


def flat_about(about: dict[str, Any]) -> dict[str, str]:
    """Flatten the description of a start of a run to {dotted key: text}, without lists. Secrets are hidden."""
    known = secrets_of()
    entries = {key: value for key, value in about.items() if not isinstance(value, list) and value is not None}
    return {f"about.{key}": redact(written(value), known) for key, value in dotted(entries).items()}
