"""Count what ranks that compute layers together (`parallel.tensor`) exchange in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.parallel.tensor.tensor_parallel import siblings_of
from llava_fsdp.plan.memory.micro_batches import MicroBatches


@dataclass(frozen=True)
class Moved:
    """What a rank receives in collectives, and the number of these."""

    bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.calls + other.calls)

    def __mul__(self, times: float) -> Moved:
        return Moved(self.bytes * times, self.calls * times)


@dataclass(frozen=True)
class LayerVolume:
    """What ranks that compute layers together exchange in a micro-batch."""

    of_token: float
    """Bytes for each position."""
    of_label: float
    of_sample: float
    """Bytes for each sample, and once more for each micro-batch's padding."""
    of_pass: Moved
    """For each micro-batch, whatever its size."""
    of_reduction: Moved
    """Whenever FSDP reduces gradients: then those of weights that every rank has whole are summed."""

    def of(self, micros: MicroBatches, chunk_tokens: int, reductions: int) -> Moved:
        """Return what the ranks exchange in a step.

        Args:
            chunk_tokens: number of labels whose logits the loss computes at a time.
            reductions: how often FSDP reduces gradients.
        """
        labels = sum(labels * times for labels, times in micros.labels.items())
        chunks = sum(math.ceil(labels / chunk_tokens) * times for labels, times in micros.labels.items())
        # the loss of each chunk has two all-reduces over the vocabulary: of the maximum, and of the sums
        sized = Moved(micros.tokens * self.of_token + labels * self.of_label, 2 * chunks * (self.of_label > 0))
        sized += Moved((micros.samples + len(micros)) * self.of_sample)
        return sized + self.of_pass * len(micros) + self.of_reduction * reductions


def layer_volume(
    model: Architecture, plan: Mapping[str, Cut], blocks: int, chains: int, size: int, recomputed: float, counted: int
) -> LayerVolume:
    """Count what `size` ranks that compute layers together exchange.

    Args:
        model: the model on the meta device, not divided.
        plan: how the weights that these ranks have are divided.
        blocks: number of the language model's blocks that they have, without those that end with experts.
        chains: number of lists of consecutive blocks that they have.
        recomputed: share of the blocks' forward pass that runs again in the backward pass.
        counted: number of experts, of all layers together, whose tokens are counted for each sample.
    """
    width = model.compute_dtype.itemsize

    def gather(channels: int, item: int = width) -> Moved:
        return Moved((size - 1) / size * channels * item, 1)

    def reduce(channels: int, item: int = width) -> Moved:
        return Moved(2 * gather(channels, item).bytes, 1)

    forward, backward = Moved(), Moved()  # for each position
    summed = Moved()  # for each reduction of gradients
    for name, cut in plan.items():
        layer: Any = model.get_submodule(name) if cut is not Cut.PARAMETER else None
        if cut in (Cut.ROWWISE, Cut.ROWWISE_SPLIT):
            forward += gather(layer.out_features)
            backward += gather(layer.out_features)
        if cut is Cut.ROWWISE_SPLIT:
            backward += gather(layer.in_features)
        if cut is Cut.COLWISE_GATHERED:
            forward += gather(layer.out_features)
        if cut is Cut.COLWISE and "lora_" in name:
            backward += reduce(layer.in_features)
        if cut is Cut.SUMMED and any(p.requires_grad for p in layer.parameters()):
            own = list(layer.parameters(recurse=False))
            # norms compute in fp32 unless precision.norm_dtype says otherwise
            item = width if any(weight.dim() > 1 for weight in own) else 4
            summed += reduce(sum(weight.numel() for weight in own), item)
    for siblings in siblings_of(model, plan).values():
        first: Any = siblings[0]
        forward += gather(first.in_features)
        backward += gather(first.in_features)
    hidden = model.language_config.hidden_size
    # the last sum of a block does not run again, because nothing needs it but an adapter or a norm behind it; such
    # norms, as in Gemma 2, are not counted here
    last = gather(hidden) * (0 if model.adapted else blocks)
    moved = forward + backward + (forward + last * -1) * recomputed
    moved += gather(hidden) * (2 * chains)  # before and behind consecutive blocks
    if Cut.EMBEDDING in plan.values():
        moved += reduce(hidden)
    of_label, calls = 0.0, moved.calls + (counted > 0)
    if Cut.OUTPUT in plan.values():  # the loss: its gradient and, in fp32, a maximum, a sum and the label's logit
        of_label, calls = reduce(hidden).bytes + reduce(3, item=4).bytes, calls + 1
    return LayerVolume(moved.bytes, of_label, reduce(counted, item=4).bytes, Moved(0, calls), summed)
