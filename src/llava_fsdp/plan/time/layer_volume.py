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
    """Bytes that a rank receives in collectives (`bytes`), and the number of these collectives (`calls`)."""

    bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.calls + other.calls)

    def __mul__(self, times: float) -> Moved:
        return Moved(self.bytes * times, self.calls * times)


@dataclass(frozen=True)
class LayerVolume:
    """What a rank receives from those with which it computes layers together, by what it grows with."""

    of_token: float
    """Bytes for each position of the rows that these ranks process, padding included."""
    of_label: float
    """Bytes for each label."""
    of_sample: float
    """Bytes for each sample, and once more for each micro-batch's padding."""
    of_pass: Moved
    """For each micro-batch, whatever its size."""
    of_reduction: Moved
    """For each time that FSDP reduces gradients: then those of weights that every rank has whole are summed."""

    def of(self, micros: MicroBatches, chunk_tokens: int, reductions: int) -> Moved:
        """Return the bytes that the rank receives in a step with these micro-batches, and the number of collectives.

        Args:
            chunk_tokens: number of labels whose logits the loss computes at a time.
            reductions: how often FSDP reduces gradients.
        """
        # `micros.labels`: number of labels of a micro-batch -> number of such micro-batches
        labels = sum(count * times for count, times in micros.labels.items())
        chunks = sum(math.ceil(count / chunk_tokens) * times for count, times in micros.labels.items())
        # the loss of each chunk has two all-reduces over the vocabulary: of the maximum, and of the sums
        sized = Moved(micros.tokens * self.of_token + labels * self.of_label, 2 * chunks * (self.of_label > 0))
        # tokens of experts are counted for each sample, and for the padding of each micro-batch
        sized += Moved((micros.samples + len(micros)) * self.of_sample)
        return sized + self.of_pass * len(micros) + self.of_reduction * reductions


def layer_volume(
    model: Architecture, plan: Mapping[str, Cut], blocks: int, chains: int, size: int, recomputed: float, counted: int
) -> LayerVolume:
    """Count what each of `size` ranks that compute layers together receives from the others.

    Args:
        model: the model on the meta device, not divided.
        plan: how the weights that these ranks have are divided, by name of a module or parameter. COLWISE: outputs;
            ROWWISE: inputs (`_SPLIT`: each rank takes its own of all inputs); SUMMED: whole, with a summed gradient.
        blocks: number of the language model's blocks that they have and that end with a sum over the ranks. Blocks that
            end with experts do not: experts process only the rank's own positions.
        chains: number of lists of consecutive blocks that they have.
        recomputed: share of the blocks' forward pass that runs again in the backward pass.
        counted: number of experts of all layers whose tokens of each sample the ranks sum up; 0: they count nothing.
    """
    width = model.compute_dtype.itemsize

    # for one position, with the bytes of `channels` numbers; each is one collective of a micro-batch

    def gather(channels: int, item: int = width) -> Moved:
        return Moved((size - 1) / size * channels * item, 1)

    def reduce(channels: int, item: int = width) -> Moved:
        return Moved(2 * gather(channels, item).bytes, 1)

    forward, backward = Moved(), Moved()  # bytes for each position, calls for each micro-batch
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
            weights = list(layer.parameters(recurse=False))
            # norms compute in fp32 unless precision.norm_dtype says otherwise
            item = width if any(weight.dim() > 1 for weight in weights) else 4
            summed += reduce(sum(weight.numel() for weight in weights), item)
    # layers that read one input, such as queries, keys and values, gather it once, and sum its gradient once
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
    return LayerVolume(
        of_token=moved.bytes,
        of_label=of_label,
        of_sample=reduce(counted, item=4).bytes,
        of_pass=Moved(calls=calls),
        of_reduction=summed,
    )
