"""Run a training from the command line of its process: the entry point of `python -m llava_fsdp.train`, and of programs
that give a training Python code of their own.

The training itself is in main.py, which is imported only after the command line has been checked, because importing
torch takes seconds.
"""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_fsdp.config import Config
from llava_fsdp.config.command_line import cli
from llava_fsdp.report.run_reader import REPORT_FILE
from llava_fsdp.runtime.files.status_file import Outcome, log_write_errors, write_ending
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.process.imports import importing

if TYPE_CHECKING:
    from llava_fsdp.train.events.held_out.answer_metric import ScoreFunction
    from llava_fsdp.train.events.run_events import RunEvents
    from llava_fsdp.train.main import RunParts


def run(metric: "ScoreFunction | None" = None, events: "Sequence[RunEvents]" = ()) -> None:
    """Run the training that the command line (`sys.argv`) describes, as one rank of it, and end this process with the
    exit code if the training fails. To be called once, by a program that torchrun starts:

        torchrun --standalone --nproc-per-node 2 my_training.py stage=finetune val.every=100 ...

    It returns at once in processes that the training itself has started, which import the program again.

    Args:
        metric: function that scores an answer of a validation, used in place of `val.metric` and shown under its own
            name: (question, model's answer, record's answer), all texts -> number from 0 to 1.
        events: observers of the run, called behind those of the trainer, in this order.
    """
    if multiprocessing.parent_process() is not None:
        return
    cli.start_process("train", Config)
    parts: RunParts | None = None

    def task(cfg: Config) -> None:
        with importing():
            from llava_fsdp.train.main import RunParts, train

        nonlocal parts
        parts = RunParts()
        train(cfg, parts, metric, events)

    def on_exit(folder: Path, outcome: Outcome) -> dict[str, Any] | None:
        return end_run(folder, outcome, parts)

    cli.run("train", Config, task, on_exit)


def end_run(folder: Path, outcome: Outcome, parts: "RunParts | None") -> dict[str, Any] | None:
    """Record in the run's folder how this rank ended (`outcome`), and write the final report page. `parts`: None if
    the training ended before its parts were built.

    Returns:
        The recorded status of the rank that failed first, if that is another rank; else None.
    """
    first = write_ending(folder, outcome)
    with log_write_errors(folder / REPORT_FILE):
        if parts is not None and parts.reports is not None:
            parts.reports.end()
        elif env_rank() == 0:
            from llava_fsdp.train.events.reporting.live_page import rewrite_page

            rewrite_page(folder)
    return first
