"""Load of each expert and load-balance loss of a training step of a mixture of experts, summed over all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llava_fsdp.model.experts import RouterOutput, RouterOutputs, balance_loss, count_choices, samples_of_tokens
from llava_fsdp.train.state import ExpertLoad

if TYPE_CHECKING:
    from llava_fsdp.data.batching.batch import MicroBatch, StepFacts

IDLE = 0.1
"""An expert is idle if its load is less than this part of the equal share."""


class ExpertSums:
    """Sums of a training step over its micro-batches, which stay on the device until the host reads the step's loss.
    Without routers, nothing is computed and no collective runs."""

    def __init__(self, outputs: RouterOutputs | None, facts: StepFacts, coefficient: float):
        """Begin a step.

        Args:
            outputs: keeps what the routers return; None: there are none, or they are not watched.
            facts: counts of the step over all ranks.
            coefficient: factor of the load-balance loss in the loss that is trained (`model.balance_loss`).
        """
        assert outputs is None or outputs.with_gradients is (coefficient > 0), "the loss would have no gradient"
        self.outputs = outputs
        self.coefficient = coefficient
        if outputs is not None:
            self.share = 1 / (len(outputs.routers) * max(1, facts.tokens))
            """Factor that makes the sum over layers and samples a mean over layers and tokens."""
            self.sums = torch.zeros(0)
            """The load-balance loss, then the load of each expert of each layer; float32 [1 + layers * experts]. Empty
            before the first micro-batch."""

    def keep(self) -> AbstractContextManager[list[RouterOutput]]:
        """Context manager for one forward pass: it yields the list to which each router adds its output."""
        return self.outputs.keep() if self.outputs is not None else nullcontext([])

    def add(self, micro: MicroBatch, kept: list[RouterOutput], loss: torch.Tensor) -> torch.Tensor:
        """Add one forward pass to the sums, and return the loss to train: `loss` plus the load-balance loss.

        Args:
            kept: what the routers returned in this forward pass.
            loss: the loss of the labels.
        """
        if self.outputs is None:
            return loss
        assert len(kept) == len(self.outputs.routers), "each router runs once in a forward pass"
        lengths, loads = micro.sample_lengths, []
        samples = samples_of_tokens(lengths, micro.input_ids.shape, bool(micro.lengths))
        total = torch.zeros((), device=loss.device)
        with torch.set_grad_enabled(self.coefficient > 0):
            for output in kept:
                counts = count_choices(output, samples, len(lengths))
                total = total + balance_loss(output, samples, lengths, counts)
                loads.append(counts[:-1].sum(0))
            total = total * self.share
        own = torch.cat([total.detach()[None], *loads])
        self.sums = self.sums + own if len(self.sums) else own
        return loss + self.coefficient * total if self.coefficient > 0 else loss

    def summed(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum over all ranks. A collective if there are routers.

        Returns:
            (The numbers of `ExpertLoad`, float32 [3], or [0] without routers; the load of each expert: number of
            (token, choice) pairs, float32 [layers, experts], or None.)
        """
        if self.outputs is None:
            return torch.zeros(0), None
        if dist.is_initialized():
            dist.all_reduce(self.sums)
        loads = self.sums[1:].view(len(self.outputs.routers), -1)
        relative = loads / loads.mean(1, keepdim=True)
        return torch.stack([self.sums[0], relative.max(), (relative < IDLE).float().mean()]), loads


def expert_load(numbers: list[float]) -> ExpertLoad | None:
    """Return the numbers of `ExpertSums.summed`, read by the host; None without routers."""
    return ExpertLoad(*numbers) if numbers else None
