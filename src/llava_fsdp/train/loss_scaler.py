"""Scale the loss so that fp16 gradients do not underflow to zero.

The algorithm is that of DeepSpeed's `LossScaler` and `DynamicLossScaler` (deepspeed/runtime/fp16/loss_scaler.py), with
the same five settings and with `consecutive_hysteresis` off.
"""

from dataclasses import dataclass
from typing import Any

from llava_fsdp.config import ScalerConfig
from llava_fsdp.runtime.errors import NumericError
from llava_fsdp.runtime.text.log import log

FACTOR = 2.0
"""Factor by which the scale is raised or lowered."""


@dataclass
class LossScaler:
    """The loss scale of fp16 training, the same on every rank, updated after every step, depending on whether gradients
    overflowed."""

    cfg: ScalerConfig
    scale: float
    hysteresis: int
    """Number of overflows until the scale is halved."""
    steps: int = 0
    """Number of updates so far."""
    last_overflow: int = -1
    """Index of the last update after an overflow; -1 before the first overflow."""

    @property
    def is_dynamic(self) -> bool:
        return self.cfg.scale is None

    def update(self, overflowed: bool, step: int) -> None:
        """Lower the scale if gradients overflowed in `step`, counted from 1; NumericError is raised if it is at its
        minimum already. Raise the scale after every `cfg.window` steps without overflow."""
        if overflowed:
            old_scale = self.scale
            self.lower(step)
            log().warning(
                "step %d: gradients overflow in fp16 at loss scale %g; the weights were not updated, and the scale is "
                "%g now", step, old_scale, self.scale,
            )  # fmt: skip
            self.last_overflow = self.steps
        elif self.is_dynamic:
            steps_without_overflow = self.steps - self.last_overflow - 1
            if steps_without_overflow > 0 and steps_without_overflow % self.cfg.window == 0:
                self.hysteresis = self.cfg.hysteresis  # number of overflows until the scale is halved
                self.scale *= FACTOR
        self.steps += 1

    def lower(self, step: int) -> None:
        """Count an overflow; from the `cfg.hysteresis`-th on, halve a dynamic scale. A fixed scale stays.
        Raises NumericError at the minimum."""
        if not self.is_dynamic:
            return
        if self.hysteresis > 1:
            self.hysteresis -= 1
            return
        if self.scale == self.cfg.minimum:
            raise NumericError(
                f"step {step}: gradients overflow in fp16, and the loss scale is at precision.scaler.minimum="
                f"{self.cfg.minimum:g} already; the weights were not updated. precision=bf16 has no such limit; a "
                "smaller optim.lr or optim.clip=1.0 may help"
            )
        self.scale = max(self.scale / FACTOR, self.cfg.minimum)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the scale."""
        return {name: getattr(self, name) for name in ("scale", "hysteresis", "steps", "last_overflow")}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with a scale as `state` returned it."""
        for name, value in state.items():
            setattr(self, name, value)


def build_scaler(cfg: ScalerConfig) -> LossScaler:
    """Return the loss scale with which a training begins."""
    return LossScaler(cfg, 2.0**cfg.initial_power if cfg.scale is None else cfg.scale, cfg.hysteresis)
