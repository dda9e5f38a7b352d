"""The loss of the pairs of a step's micro-batches (`data.pairs`), and the log-probabilities of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from llava_fsdp.config import PairReference
from llava_fsdp.model.adapters.lora import without_adapters
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.eval_mode import forget_order, units_of
from llava_fsdp.train.sums.pair_sums import PairSums
from llava_fsdp.train.sums.preference import answers_of, preference_losses

if TYPE_CHECKING:
    from llava_fsdp.config import Config
    from llava_fsdp.data.batching.batch import MicroBatch


class PairStep:
    """Computes the losses of pairs from those of their labels, and sums up what is reported of them."""

    def __init__(self, cfg: Config, device: torch.device, stored: torch.Tensor | None = None):
        """Begin a step. `stored`: log-probabilities of the chosen and the rejected answer of each sample by the
        reference model, float32 [samples, 2] (`TrainState.pair_reference`, or that of the held-out samples)."""
        self.cfg = cfg.pref
        self.uses_adapters = cfg.pair_reference is PairReference.adapters
        self.stored = stored if cfg.pair_reference is PairReference.stored else None
        self.sums = PairSums(len(cfg.data.source_names), device)

    def reference(self, model: nn.Module, micro: MicroBatch) -> torch.Tensor | None:
        """Return the log-probability of each answer by the reference model, float32 [2 * pairs]; None if the loss has
        no reference. If the reference is the model without its adapters, run its forward pass, which is collective."""
        if self.stored is not None:  # computed before the training, for each pair of the dataset
            return self.stored[micro.pair_numbers].flatten()
        if not self.uses_adapters:
            return None
        assert isinstance(model, Architecture)
        with torch.no_grad(), without_adapters(model):
            losses = model(**micro.inputs)
        forget_order(units_of(model))  # or the backward pass would gather the weights of this pass, too
        return answers_of(losses, micro.label_answers, len(micro.pair_sources)).sums

    def evaluate(self, model: nn.Module, micro: MicroBatch) -> None:
        """Add the pairs of a micro-batch, which is on the device, to the sums, without gradients. Collective."""
        reference = self.reference(model, micro)
        self.loss(micro, model(**micro.inputs), reference)

    def loss(self, micro: MicroBatch, losses: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the losses of a micro-batch's pairs, float32 [], and add the pairs to `self.sums`.

        Args:
            losses: loss of each label of the micro-batch, float32 [labels].
            reference: each answer's log-probability by the reference model, float32 [2 * pairs]; None without one.
        """
        answers = answers_of(losses, micro.label_answers, len(micro.pair_sources))
        pair_losses, rewards = preference_losses(answers, reference, self.cfg)
        self.sums.add(micro, answers, pair_losses, rewards)
        return pair_losses.sum()
