"""Sums over all ranks: of a value, and of the losses of a step by data source."""

import math

import torch
import torch.distributed as dist

from llava_fsdp.config import FULL_WEIGHT
from llava_fsdp.data.batching.batch import MicroBatch, StepFacts
from llava_fsdp.model.loss import LossCollector, factors


class SourceSums:
    """Sums of a step's losses by data source, which stay on the device until the host reads the step's loss.

    The loss of a single data source is the loss of the step, and nothing is computed here. Several sources need one
    more small collective.
    """

    def __init__(self, facts: StepFacts, device: torch.device):
        """Begin a step with sums of 0. `facts` has the names of the data sources, and counts of their label tokens."""
        self.labels, self.weights = facts.source_labels, facts.source_weights
        self.sums = torch.zeros(len(self.labels) if len(self.labels) > 1 else 0, device=device)
        """Sum of the losses of each data source, each loss times its weight, float32 [sources]; of shape [0] for a
        single one."""

    def collector(self) -> LossCollector | None:
        """Return a collector of the loss of each token in one forward pass; None for a single data source."""
        return LossCollector() if len(self.sums) else None

    def add(self, micro: MicroBatch, collector: LossCollector | None) -> None:
        """Add the losses of one forward pass to the sums of their data sources. `collector` is the result of
        `self.collector()`, with which the forward pass was called: None for a single source, whose loss is that of the
        step. If the loss kernel gave it no losses of single labels, all sums become nan."""
        if collector is None or not len(micro.label_sources):
            return
        losses = torch.cat(collector.chunks) if collector.chunks else self.sums.new_full((1,), math.nan)
        if len(micro.label_weights):
            losses = losses * factors(micro.label_weights)
        numbers = torch.arange(len(self.sums), device=losses.device)
        # not `index_add`, because the order of its additions is not fixed on CUDA
        self.sums += torch.where(micro.label_sources == numbers[:, None], losses, 0.0).sum(1)

    def sum_over_ranks(self) -> torch.Tensor:
        """Sum the losses of each data source over all ranks: float32 [sources]; [0] for a single one. A collective if
        there are several sources."""
        return sum_over_ranks(self.sums) if len(self.sums) else self.sums

    def means(self, loss: float, sums: list[float]) -> dict[str, float | None]:
        """Return the mean loss per label token (a token that is in the loss) of each data source, weighted as in the
        step's mean `loss`. None for a source without label tokens; nan if the loss kernel returns only the sum over all
        sources. `sums`: the sum of the losses of each source over all ranks; empty if there is only one source."""
        if not sums:
            return {name: loss if labels else None for name, labels in self.labels.items()}
        counts: dict[str, float] = dict(self.labels)
        if self.weights is not None:
            counts = {name: weight / FULL_WEIGHT for name, weight in self.weights.items()}
        found = zip(counts.items(), sums, strict=True)
        return {name: total / count if count else None for (name, count), total in found}


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place, and return it. Collective."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
