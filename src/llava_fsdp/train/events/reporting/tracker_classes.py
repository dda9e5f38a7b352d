"""The trackers to which a training can be logged, one class each.

Each takes the configuration and a `TrackedRun`; `log` gets the values of a step, and `close` the exit code of the
training. The packages are imported when a tracker is opened, because each is optional.
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llava_fsdp.config import Config, WandbMode

FOLDER = "tensorboard"
RUN_TAG = "llava_fsdp.run"
"""Tag of a run in MLflow with the id of the training, by which a training that resumes finds its run."""
MOST_PARAMETERS, LONGEST_PARAMETER = 100, 500
"""Maximum number of parameters in one request of MLflow, and characters of a value."""


@dataclass(frozen=True)
class TrackedRun:
    """A start of a training, as trackers show it.

    Attributes:
        id: identifier of the training, which is kept when it resumes.
        first_step: number of steps that were finished when this start began.
        settings: the configuration and the description of this start, by dotted key; secrets are hidden.
    """

    id: str
    first_step: int
    settings: dict[str, Any]


class Tracker(Protocol):
    """What a class of this module has."""

    def __init__(self, cfg: Config, run: TrackedRun) -> None: ...

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self, exit_code: int) -> None: ...


def name_of(cfg: Config) -> str:
    """Return the name of a run in the trackers."""
    return cfg.track.name or Path(cfg.output_dir).resolve().name


class TensorBoard:
    """Writes event files of TensorBoard. If a resumed run repeats steps, TensorBoard shows the repetition."""

    def __init__(self, cfg: Config, run: TrackedRun):
        """Open an event file for the steps after `run.first_step`, and log the run's settings in it as text."""
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(cfg.output_dir) / FOLDER
        self.writer = SummaryWriter(str(folder), purge_step=run.first_step + 1, flush_secs=10)
        text = "\n".join(f"    {key}: {value}" for key, value in run.settings.items())
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

    def __init__(self, cfg: Config, run: TrackedRun):
        """Create the run, or continue it under its id. wandb is imported here because it is optional."""
        import wandb

        self.run = wandb.init(
            project=cfg.track.project,
            name=name_of(cfg),
            id=run.id,
            dir=cfg.output_dir,
            mode=cfg.track.wandb.value,  # pyright: ignore[reportArgumentType]
            resume="allow" if cfg.track.wandb is WandbMode.online else None,
            config=run.settings,
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


class MLflow:
    """Logs to an MLflow server. A training that resumes continues its run there."""

    def __init__(self, cfg: Config, run: TrackedRun):
        """Create the run, or continue that with the id of the training. Environment variables of MLflow have the
        credentials."""
        # a training asks no other server than the user's; mlflow reads this when it is imported
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(tracking_uri=cfg.track.mlflow)
        project = self.client.get_experiment_by_name(cfg.track.project)
        project_id = project.experiment_id if project else self.client.create_experiment(cfg.track.project)
        found = self.client.search_runs([project_id], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        if found:
            self.run_id = found[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return  # MLflow keeps the settings of the first start, and refuses others
        made = self.client.create_run(project_id, run_name=name_of(cfg), tags={RUN_TAG: run.id})
        self.run_id = made.info.run_id
        settings = [Param(mlflow_name(key), str(value)[:LONGEST_PARAMETER]) for key, value in run.settings.items()]
        for begin in range(0, len(settings), MOST_PARAMETERS):
            self.client.log_batch(self.run_id, params=settings[begin : begin + MOST_PARAMETERS])

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values of a step in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, exit_code: int) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if exit_code else "FINISHED")


def mlflow_name(name: str) -> str:
    """Return a name without what MLflow refuses in names of metrics and parameters."""
    return re.sub(r"[^\w\-./ ]", "_", name).replace("..", "._")


class Trackio:
    """Logs to Trackio: into its folder on this machine, or where its environment variables say. A training that resumes
    continues the run of its name."""

    def __init__(self, cfg: Config, run: TrackedRun):
        """Create or continue the run. Nothing of the machine is logged, and no page is opened."""
        import trackio

        self.run = trackio.init(
            project=cfg.track.project,
            name=f"{name_of(cfg)}-{run.id}",
            config=run.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self, exit_code: int) -> None:
        self.run.finish()


CLASSES: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip
"""The class of each tracker, by its key below `track`, which is also the name of its package."""
