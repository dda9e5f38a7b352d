"""Write what a training's steps take into `plan.json`, by which later plans are corrected."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.config.command_line.tree import tree_of
from llava_fsdp.plan.measured_runs import MeanSample, MeasuredRun
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.run_dir import PLAN_FILE
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.state import StepResult
from llava_fsdp.version import __version__

WARM_UP = 3
"""Number of first steps of a start that are not measured: they load kernels, compile, and fill the allocator."""
FEWEST = 4
"""Fewest measured steps of which the file is written."""
COUNTS = ("samples", "tokens", "token_pairs", "label_tokens", "tiles")
"""Fields of StepFacts that are summed over the measured steps."""


class MeasuredSteps(StepReport):
    """Measures the steps of this start of a run, and writes `plan.json` when their number reaches 4, 8, 16, ..., and as
    the run ends in any way. A killed run so leaves at least half of its steps. The file of an earlier start stays until
    this one has measured four steps.

    Not measured: first steps, those that skip their update or compile again, and each step behind a validation or a
    checkpoint. An error of the disk is only logged.
    """

    def __init__(self, cfg: Config, about: dict[str, Any], width: int, is_lost: Callable[[], bool]):
        """Measure a start of a run.

        Args:
            about: description of this start (`about_run`).
            width: channels of the language model's hidden states.
            is_lost: whether the run's folder may belong to another run now.
        """
        self.cfg = cfg
        self.about = about
        self.width = width
        self.is_lost = is_lost
        self.seconds: list[float] = []
        self.sums: Counter[str] = Counter()
        self.num_steps = 0
        self.recompiles = 0
        self.is_disturbed = False
        """Whether a validation or a checkpoint came behind the last step."""
        self.written = 0
        """Number of measured steps in the file."""

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        self.num_steps += 1
        is_steady = self.num_steps > WARM_UP and result.recompiles == self.recompiles and not result.skipped
        if is_steady and not self.is_disturbed:
            self.seconds.append(result.seconds - result.data_seconds)
            self.sums.update({name: getattr(result.facts, name) for name in COUNTS})
            count = len(self.seconds)
            if count >= FEWEST and count & (count - 1) == 0:
                self.write()
        every = self.cfg.checkpoint.every
        self.recompiles, self.is_disturbed = result.recompiles, every is not None and row["step"] % every == 0

    def validation(self, row: dict[str, Any]) -> None:
        self.is_disturbed = True

    def end(self, exit_code: int, patience: float) -> None:
        """Write the file if steps were measured since. Both arguments are unused; other reports need them."""
        if len(self.seconds) >= FEWEST and len(self.seconds) > self.written:
            self.write()

    def write(self) -> None:
        """Write `plan.json` atomically, unless the run's folder may belong to another run now."""
        if self.is_lost():
            return
        path = Path(self.cfg.output_dir) / PLAN_FILE
        try:
            replace_file(path, (json.dumps(asdict(self.measured()), indent=1) + "\n").encode())
        except OSError as error:  # it is read by later plans alone, so that the training goes on
            log().warning("%s cannot be written: %s", path, error)
        self.written = len(self.seconds)

    def measured(self) -> MeasuredRun:
        """Return the content of the file: the median of the steps that were measured until now, and their mean
        sample."""
        count, cfg = max(1, self.sums["samples"]), self.cfg
        tokens, pairs, labels, tiles = (self.sums[name] / count for name in COUNTS[1:])
        first, middle, third = statistics.quantiles(self.seconds, n=4)
        return MeasuredRun(
            version=__version__,
            device=self.about["device"],
            width=self.width,
            ranks=self.about["ranks"],
            nodes=self.about["nodes"],
            strategy=cfg.sharding.strategy.value,
            precision=cfg.precision.param_dtype.value,
            steps=len(self.seconds),
            seconds=middle,
            quartiles=[first, third],
            samples=asdict(MeanSample(tokens, math.sqrt(max(0.0, pairs - tokens**2)), tiles, labels)),
            config=tree_of(cfg),
        )
