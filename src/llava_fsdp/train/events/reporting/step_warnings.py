"""Warn of steps that are unlike those before: compilations, skipped updates, spikes of the loss, idle experts, and
samples without labels."""

import math
import statistics
from collections import deque
from typing import Any

from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.state import StepResult

WINDOW = 128
"""Maximum number of preceding losses with which a loss is compared."""
FEWEST = 16
"""Minimum number of preceding losses that are needed to find a spike."""
MOST_IDLE = 0.5
"""Share of idle experts above which a step counts as collapsed."""
COLLAPSED_STEPS = 50
"""Number of consecutive collapsed steps after which a warning is logged."""


class CompileWarnings(RunEvents):
    """Warns, on every rank, if torch.compile compiled graphs again. Any rank may compile again, and all ranks wait for
    that rank."""

    def __init__(self) -> None:
        self.recompiles = 0

    def after_step(self, result: StepResult) -> None:
        """Warn if graphs were compiled since the step before. `result.recompiles` counts those of all steps so far."""
        if result.recompiles > self.recompiles:
            log().warning(
                "step %d: %d graphs were compiled again, which should happen only in the first steps "
                "(TORCH_LOGS=recompiles shows why; compile=false turns compilation off)",
                result.facts.step + 1, result.recompiles - self.recompiles,
            )  # fmt: skip
        self.recompiles = result.recompiles


class ExpertWarnings(StepReport):
    """Warns once if most experts have been idle for many steps."""

    def __init__(self) -> None:
        self.collapsed_steps = 0
        """Number of collapsed steps up to the last one, without a gap."""

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        """Count successive steps with most experts idle; warn once, at `COLLAPSED_STEPS` of them. `row` is unused."""
        load = result.expert_load
        self.collapsed_steps = self.collapsed_steps + 1 if load is not None and load.experts_idle > MOST_IDLE else 0
        if self.collapsed_steps == COLLAPSED_STEPS:
            log().warning(
                "step %d: for %d steps more than half of the experts have had less than a tenth of an equal share of "
                "the tokens (experts_idle in metrics.jsonl); a larger model.balance_loss spreads the tokens",
                result.facts.step + 1, COLLAPSED_STEPS,
            )  # fmt: skip


class LossWarnings(StepReport):
    """Warns if the update of the weights was skipped, or if the loss is far above the preceding ones."""

    def __init__(self, sigma: float | None):
        """Begin without losses. `sigma`: standard deviations above the mean from which a loss stands out; None:
        never."""
        self.spikes = Spikes(sigma)

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        """Warn of a skipped update, unless a loss scale makes it normal, or a spike of the loss. `row` is not used."""
        step = result.facts.step + 1
        if result.skipped and result.loss_scale is None:
            log().warning(
                "step %d: loss %s, gradient norm %s; the weights were not updated",
                step, result.loss, result.grad_norm,
            )  # fmt: skip
        elif (before := self.spikes.mean_and_deviation_before(result.loss)) is not None:
            log().warning(
                "step %d: loss %.4f stands out from the steps before (%.4f +- %.4f)", step, result.loss, *before
            )


class SampleWarnings(StepReport):
    """Warns of a step that has trained nothing, or in which most samples have no label."""

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        """Warn if the step, with this row of `metrics.jsonl`, has trained nothing, or if most samples have no label."""
        if row["label_tokens"] == 0 or row["grad_norm"] == 0:
            log().warning(
                "step %d has trained nothing: %d samples, %d label tokens, gradient norm %g (%d samples truncated at "
                "data.max_length, %d skipped); see data.max_length, data.template and model.train",
                *(row[k] for k in ("step", "samples", "label_tokens", "grad_norm", "truncated", "skipped_records")),
            )
        elif 2 * row["unlabelled"] > row["samples"]:
            log().warning("step %d: %d of %d samples have no label", row["step"], row["unlabelled"], row["samples"])


class Spikes:
    """Finds losses that are far above the preceding ones."""

    def __init__(self, sigma: float | None):
        self.sigma = sigma
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def mean_and_deviation_before(self, loss: float) -> tuple[float, float] | None:
        """Return mean and standard deviation of the preceding losses if `loss` is more than `sigma` deviations above,
        else None. Then count `loss` as a preceding one, so that losses that stay high are soon no longer reported."""
        found = None
        if self.sigma is not None and math.isfinite(loss):
            if len(self.losses) >= FEWEST:
                mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
                found = (mean, deviation) if loss > mean + self.sigma * deviation else None
            self.losses.append(loss)
        return found
