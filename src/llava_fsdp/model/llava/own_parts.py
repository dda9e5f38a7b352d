"""Parts of a model that a program gives to a training: a loss and a projector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llava_fsdp.config import Config, LossConfig, LossKernel
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.loss import Labels, LossCollector, factors
from llava_fsdp.runtime.errors import ConfigError

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of the logits of some labels, float32 [labels, vocabulary], and of the labels, int64 [labels], that returns
the loss of each, [labels]. It gets `loss.chunk_tokens` labels at a time, and is called again in the backward pass."""
ProjectorFactory = Callable[[int, int], nn.Module]
"""Function of the width of the vision tower's features and of the language model's embeddings that makes a projector: a
module that maps [tiles, features, vision width] to [tiles, features / factor**2, language width]. `factor` is that of
the pixel shuffle of `model.projector_type`, mostly 1."""


@dataclass(frozen=True)
class OwnParts:
    """The parts that a program gives; None: those of the configuration."""

    loss: TokenLoss | None = None
    projector: ProjectorFactory | None = None

    @property
    def names(self) -> dict[str, str]:
        """Names of the functions or classes that a program gives as "loss" and "projector", for the checkpoint."""
        given = {"loss": self.loss, "projector": self.projector}
        return {key: str(getattr(own, "__name__", type(own).__name__)) for key, own in given.items() if own is not None}

    def check(self, cfg: Config) -> None:
        """Raise ConfigError if the configuration does not go together with a loss or a projector of the program."""
        for key in self.names:
            for kind in ("tensor", "pipeline"):
                if getattr(cfg.parallel, kind) > 1:
                    raise ConfigError(
                        f"parallel.{kind}={getattr(cfg.parallel, kind)} divides the model, and the program's {key} is "
                        f"not divided; set parallel.{kind}=1"
                    )
        if self.loss is not None and cfg.loss.kernel is not LossKernel.auto:
            raise ConfigError(
                f"loss.kernel={cfg.loss.kernel.value} and the program's loss are both given; leave one out"
            )
        if self.projector is None:
            return
        if cfg.export.enabled:
            raise ConfigError(
                "export.enabled=true: no other program knows the program's projector, so the model cannot be exported; "
                "set export.enabled=false"
            )
        if cfg.model.lora.enabled:
            raise ConfigError("model.lora writes LLaVA's projector beside the adapter, not the program's projector")
        if cfg.model.checkpoint is not None or cfg.model.projector != "random":
            raise ConfigError("the program's projector begins with random weights; set model.projector=random")


NONE = OwnParts()
"""All parts are those of the configuration."""


def make_projector(make: ProjectorFactory, features: int, hidden: int, factor: int) -> nn.Module:
    """Make a program's projector on the meta device, and check the shape of its output.

    Args:
        make: the program's function of both widths, which returns the projector.
        features, hidden: widths of the vision tower and the language model.
        factor: factor of the pixel shuffle.

    Raises:
        ConfigError: `make` returns no module, or one with buffers (they would have no values) or another output shape.
    """
    name = getattr(make, "__name__", type(make).__name__)
    with torch.device("meta"):
        projector: Any = make(features, hidden)
        if not isinstance(projector, nn.Module):
            raise ConfigError(f"the program's projector {name} has returned {projector!r}, which is no nn.Module")
        buffers = [name for name, _ in projector.named_buffers()]
        if buffers:
            raise ConfigError(f"the program's projector {name} has the buffer {buffers[0]}; make it a parameter")
        count = 4 * factor**2  # features of a tile, of which the pixel shuffle leaves 2 x 2
        shape = tuple(projector(torch.empty(2, count, features)).shape)
    if shape != (2, 4, hidden):
        raise ConfigError(
            f"the program's projector {name} maps [2, {count}, {features}] to {list(shape)}; it must give "
            f"[2, 4, {hidden}]"
        )
    return projector


def own_loss(function: TokenLoss, cfg: LossConfig) -> Any:
    """Return a loss function of the model (`LabelLoss` in loss.py) that sums the losses of a program's function."""
    name = getattr(function, "__name__", type(function).__name__)

    def of_chunk(
        hidden: torch.Tensor, weight: torch.Tensor, labels: Labels, logit_change: LogitChange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of a chunk's losses, each times its weight, and the single losses without gradients."""
        ids, weights = labels.ids, labels.weights
        losses: Any = function(logit_change.apply(functional.linear(hidden, weight).float()), ids)
        if not isinstance(losses, torch.Tensor) or losses.shape != ids.shape:
            shape = list(losses.shape) if isinstance(losses, torch.Tensor) else repr(losses)[:100]
            raise ConfigError(
                f"the program's loss {name} has returned {shape}; it must return a tensor {list(ids.shape)}"
            )
        wide = losses.float()
        return (wide if weights is None else wide * factors(weights)).sum(), wide.detach()

    def loss(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: Labels,
        *,
        collector: LossCollector | None = None,
        logit_change: LogitChange,
    ) -> torch.Tensor:
        """Return the sum of all losses, float32 scalar, computed in chunks that the backward pass computes again."""
        total = hidden.new_zeros((), dtype=torch.float32)
        if not len(labels.ids):  # every rank needs a gradient to reduce, also without labels
            return total + (hidden.sum() + weight.sum()).float() * 0.0
        for chunk, part in zip(hidden.split(cfg.chunk_tokens), labels.split(cfg.chunk_tokens), strict=True):
            loss_of_chunk, losses = checkpoint(of_chunk, chunk, weight, part, logit_change, use_reentrant=False)
            total = total + loss_of_chunk
            if collector is not None:
                collector.chunks.append(losses.detach())
        return total

    return loss
