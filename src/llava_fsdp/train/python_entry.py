"""The functions with which a Python program composes a configuration and trains: `compose` and `train` of the package
llava_fsdp."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_fsdp.config import Config
from llava_fsdp.config.command_line import cli
from llava_fsdp.report.run_reader import METRICS_FILE
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ENDINGS
from llava_fsdp.runtime.files.jsonl import read_rows
from llava_fsdp.runtime.files.status_file import Outcome
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.run import end_run
from llava_fsdp.train.state import StepResult

if TYPE_CHECKING:
    from llava_fsdp.model.llava.own_parts import ProjectorFactory, TokenLoss
    from llava_fsdp.train.events.held_out.answer_metric import ScoreFunction
    from llava_fsdp.train.main import RunParts
    from llava_fsdp.train.setup.own_source import RecordSource


@dataclass(frozen=True)
class TrainResult:
    """What a training has left."""

    folder: Path
    """The run's folder, `output_dir`."""
    step: int
    """Number of the last step."""
    loss: float | None
    """Loss of the last step; None if the run had already finished before."""
    export: Path | None
    """Folder of the exported model; None with `export.enabled=false`."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one a step."""
        return read_rows(self.folder / METRICS_FILE)


def compose(stage: str, words: Sequence[str] = ()) -> Config:
    """Return the configuration of a training: what `llava-fsdp train stage=STAGE WORDS...` would use.

    Args:
        stage: name of the stage, such as `finetune`.
        words: further keys, each as `key=value`, such as `model=tiny` or `optim.lr=1e-4`.

    Raises:
        ConfigError: a key, a choice or a value is wrong, or values do not go together.
    """
    return cli.configure([f"stage={stage}", *words], "train", Config)


class LastLoss(RunEvents):
    """Keeps the loss of the last step."""

    loss: float | None = None

    def after_step(self, result: StepResult) -> None:
        self.loss = result.loss


def train(
    cfg: Config,
    *,
    events: Sequence[RunEvents] = (),
    metric: ScoreFunction | None = None,
    loss: TokenLoss | None = None,
    projector: ProjectorFactory | None = None,
    source: RecordSource | None = None,
) -> TrainResult:
    """Run a training in this process, or as one rank of it in a program that torchrun has started. Every rank calls
    this with the same configuration, and with observers and functions of its own.

    The process is left as it was: umask, signal handlers and standard streams are restored, and no log handler is added
    (the messages are those of the logger `llava_fsdp`). Without torchrun, Ctrl-C stops the run with a checkpoint while
    steps run (`Stopped` is raised), and raises KeyboardInterrupt otherwise. What stays is torch's: the state of its
    random numbers, and `deterministic=true`. The run's folder is as after the command, with `run_status.json`.

    In a program's file the call stands below `if __name__ == "__main__":`, because worker processes import the file.

    Args:
        events: observers of the run, called behind those of the trainer, in this order.
        metric: function that scores answers of validations, in place of `val.metric`: (question, the model's answer,
            the record's answer) -> number from 0 to 1.
        loss: function that computes the loss of each label from its logits, in place of the cross entropy, also in
            validations.
        projector: function that makes the projector from the widths of its input and output.
        source: records by number, in place of `data.path`.

    Raises:
        LlavaFsdpError: one of its subclasses in `llava_fsdp.runtime.errors` says why the run ended. Under torchrun the
            other ranks end then, as after an error of the command; a program should end, too.
    """
    if cfg.dry_run is not None:
        raise ConfigError("dry_run=N prints a report and trains nothing; leave it out, or use `llava-fsdp train`")
    from llava_fsdp.model.llava.own_parts import OwnParts
    from llava_fsdp.train import main
    from llava_fsdp.train.final_export import folder_of

    parts, last = main.RunParts(ends_process="TORCHELASTIC_RUN_ID" in os.environ), LastLoss()
    folder = Path(cfg.output_dir)
    try:
        main.train(cfg, parts, metric, [*events, last], OwnParts(loss, projector), source)
    except BaseException as error:
        if not isinstance(error, LlavaFsdpError) or error.may_be_recorded:
            record(outcome_of(error), folder, parts)
        raise
    record(Outcome(ENDINGS["done"]), folder, parts)
    assert parts.state is not None
    return TrainResult(folder, parts.state.step, last.loss, folder_of(cfg))


def record(outcome: Outcome, folder: Path, parts: RunParts) -> None:
    """Record in the run's folder how the run ended, unless another launch uses the folder."""
    outcome = replace(outcome, step=parts.state.step if parts.state is not None else None)
    cli.write_outcome(folder, outcome, lambda folder, own: end_run(folder, own, parts))


def outcome_of(error: BaseException) -> Outcome:
    """Return how a run ended by an exception, for `run_status.json`."""
    if isinstance(error, LlavaFsdpError):
        return Outcome(ENDINGS[error.ending], str(error), error.culprit)
    if isinstance(error, KeyboardInterrupt):
        return Outcome(ENDINGS["interrupted"], "interrupted")
    return Outcome(ENDINGS["bug"], f"{type(error).__name__}: {error}")
