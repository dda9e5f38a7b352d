"""Load of each expert and load-balance loss of a step of a mixture of experts, summed over all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from llava_fsdp.model.experts import RouterOutput, RouterOutputs, balance_loss, count_choices, samples_of_tokens
from llava_fsdp.train.state import ExpertLoad

if TYPE_CHECKING:
    from llava_fsdp.data.batching.batch import MicroBatch, StepFacts

IDLE = 0.1
"""An expert is idle if its load is less than this part of the equal share."""


class ExpertSums:
    """Sums of a step over its micro-batches, which stay on the device until the host reads the step's loss. Without
    routers, nothing is computed and no collective runs."""

    def __init__(self, outputs: RouterOutputs | None, facts: StepFacts, coefficient: float, device: torch.device):
        """Begin a step.

        Args:
            outputs: keeps what the routers return, one for each layer with experts; None: there is nothing to watch.
            facts: has the number of tokens of the step on all ranks.
            coefficient: factor of the load-balance loss in the trained loss (`model.balance_loss`).
        """
        assert outputs is None or outputs.with_gradients is (coefficient > 0), "the loss would have no gradient"
        self.outputs = outputs
        self.coefficient = coefficient
        if outputs is not None:
            self.share = 1 / (outputs.count * max(1, facts.tokens))
            """Factor that makes the sum of a loss over layers and samples a mean over layers and tokens."""
            self.total = torch.zeros((), device=device)
            """The load-balance loss, float32 []."""
            self.loads = torch.zeros(outputs.count, outputs.experts, device=device)
            """Number of tokens that each expert of each layer gets, float32 [layers, experts]; 0 for layers that this
            rank does not have."""

    def keep(self) -> AbstractContextManager[list[RouterOutput]]:
        """Context manager for a forward pass: it yields the list to which each router adds its output."""
        return self.outputs.keep() if self.outputs is not None else nullcontext([])

    def add(self, micro: MicroBatch, kept: list[RouterOutput], loss: torch.Tensor) -> torch.Tensor:
        """Add a forward pass to the sums. Return the loss to train: `loss`, that of the labels, plus the load-balance
        loss. Empty `kept`, what the routers returned, so that it takes no memory in the backward pass."""
        if self.outputs is None:
            return loss
        # whether this rank has the routers of all layers; otherwise others are in stages on other ranks
        is_whole = len(self.outputs.routers) == self.outputs.count
        assert not is_whole or len(kept) == self.outputs.count, "each router runs once in a forward pass"
        balance = self.add_balance(micro, kept)
        return loss if balance is None else loss + balance

    def add_to_hidden(
        self, micro: MicroBatch, kept: list[RouterOutput], hidden: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Add the forward pass of a stage without a loss of labels to the sums. Return its output `hidden`, whose
        backward pass also trains the load-balance loss. `kept` is emptied. `scale`: the loss scale."""
        balance = self.add_balance(micro, kept) if self.outputs is not None else None
        return hidden if balance is None else WithLoss.apply(hidden, balance * scale)

    def add_balance(self, micro: MicroBatch, kept: list[RouterOutput]) -> torch.Tensor | None:
        """Add the outputs of routers in one forward pass to the sums, and empty `kept`, the list of these outputs.
        Return the load-balance loss times its coefficient, float32 []; None if it is not trained. If each rank
        processes other positions of a row (`positions`), the loads of the whole row are summed over these ranks."""
        assert self.outputs is not None
        is_trained = self.coefficient > 0 and bool(kept)
        lengths = micro.sample_lengths
        samples = samples_of_tokens(lengths, micro.input_ids.shape, bool(micro.lengths))
        positions = self.outputs.positions
        if positions is not None:
            samples = positions.of(samples, micro.input_ids.shape)
        loss_sum = torch.zeros_like(self.total)
        with torch.set_grad_enabled(self.coefficient > 0):
            # for each router, how often the tokens of each sample chose each expert: [samples + 1, experts]
            counts = counts_of_row = [count_choices(output, samples, len(lengths)) for output in kept]
            if positions is not None and counts:  # other ranks have the other positions of the row
                counts_of_row = list(positions.summed(torch.stack(counts)).unbind())
            for output, own_count, row_count in zip(kept, counts, counts_of_row, strict=True):
                loss_sum = loss_sum + balance_loss(output, samples, lengths, row_count)
                # the last row counts the padding
                self.loads[self.outputs.places[output.router.name]] += own_count[:-1].sum(0)
            loss_sum = loss_sum * self.share  # a mean over layers and tokens
        kept.clear()
        self.total += loss_sum.detach()
        return self.coefficient * loss_sum if is_trained else None

    def summed(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sums of a step over all ranks. A collective if there are routers.

        Returns:
            (The numbers of `ExpertLoad`, float32 [3]: load-balance loss, largest load relative to an equal share, share
            of idle experts; of shape [0] without routers. The load of each expert: number of (token, choice) pairs,
            float32 [layers, experts]; None without routers.)
        """
        if self.outputs is None:
            return torch.zeros(0), None
        sums = torch.cat([self.total[None], self.loads.flatten()])
        if dist.is_initialized():
            dist.all_reduce(sums)
        loads = sums[1:].view_as(self.loads)
        relative = loads / loads.mean(1, keepdim=True)
        return torch.stack([sums[0], relative.max(), (relative < IDLE).float().mean()]), loads


class WithLoss(torch.autograd.Function):
    """Returns its first argument unchanged. The backward pass also begins at the second one, a loss."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return `hidden`, as a new tensor of the autograd graph."""
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of (hidden states, loss): that of the hidden states unchanged, and 1 for the loss."""
        (gradient,) = gradients
        return gradient, torch.ones((), dtype=torch.float32, device=gradient.device)


def expert_load(numbers: list[float]) -> ExpertLoad | None:
    """Return an ExpertLoad of the three numbers from `ExpertSums.summed`; None without routers, when there are no
    numbers."""
    if not numbers:
        return None
    balance_loss, load_max, idle = numbers
    return ExpertLoad(balance_loss, load_max, idle)
