"""Divide the layers of a model on the meta device as tensor parallelism does (`parallel/tensor/tensor_parallel.py`),
without other ranks: collectives only allocate what real ones would."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.loss import VocabularyPart, chunked_loss
from llava_fsdp.parallel.memory.memory import Weight, divided_weights
from llava_fsdp.parallel.pipeline.stages import chains_of_blocks
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.parallel.tensor.tensor_parallel import Positions, divide_positions, siblings_of
from llava_fsdp.parallel.tensor.tensor_plan import tensor_plan


def divide_on_meta(model: Architecture, size: int, chunk_tokens: int) -> None:
    """Divide the layers of a model on the meta device among `size` ranks, in place, and keep the parts of the first
    one. The loss computes the logits of `chunk_tokens` labels at a time."""
    plan = tensor_plan(model, size)
    whole = {name: Weight(tuple(p.shape), p.requires_grad, False, False) for name, p in model.named_parameters()}
    # only `shape` and `trainable` of these Weight objects are used here
    divided = divided_weights(whole, plan, size, 0)
    tied = model.is_tied
    for name, weight in divided.items():
        if weight.shape != whole[name].shape:
            parent, _, leaf = name.rpartition(".")
            part = torch.empty(weight.shape, dtype=model.get_parameter(name).dtype, device="meta")
            model.get_submodule(parent).register_parameter(leaf, nn.Parameter(part, weight.trainable))
    if tied:
        model.tie()
    for name, cut in plan.items():
        if cut is Cut.PARAMETER:  # a single parameter, not a layer: nothing is exchanged for it
            continue
        # what ranks exchange at this layer, as in `tensor_parallel.py`, with memory for the results alone
        module = model.get_submodule(name)
        # ROWWISE layers have a part of the inputs (ROWWISE_SPLIT ones take it from all), and their outputs are summed
        if cut is Cut.ROWWISE_SPLIT:
            module.register_forward_pre_hook(lambda _, args: (OwnPart.apply(args[0], size), *args[1:]))
        if cut in (Cut.ROWWISE, Cut.ROWWISE_SPLIT):
            module.register_forward_hook(lambda _, args, output: OwnPositions.apply(output, size, True))
        if cut is Cut.EMBEDDING:
            module.register_forward_hook(lambda _, args, output: Sum.apply(output))
        if cut is Cut.COLWISE_GATHERED:
            module.register_forward_hook(lambda _, args, output: Gather.apply(output, size))
    # between the layers of a block, a rank has only its own positions
    divide_positions(MetaPositions(size), chains_of_blocks(model), siblings_of(model, plan))
    # the copies stand for collectives, whose results take as much memory
    part = VocabularyPart(0, torch.clone, torch.clone)
    model.set_label_loss(partial(chunked_loss, chunk_tokens=chunk_tokens, part=part))


class MetaPositions(Positions):
    """The first rank's positions, without other ranks."""

    def __init__(self, size: int):
        self.size = size
        self.length = 0

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        return OwnPositions.apply(whole, self.size, False)

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        return AllPositions.apply(own, self.length, False)

    def summed(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def gathered(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = AllPositions.apply(own, self.length, True)
        return whole, whole


class OwnPositions(torch.autograd.Function):
    """The first rank's positions of [rows, positions, channels], which are summed over ranks if `is_sum`; the gradient
    has the positions of all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, size: int, is_sum: bool) -> torch.Tensor:
        ctx.length = whole.shape[1]
        return take(whole, math.ceil(ctx.length / size), is_sum)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return allocate_gathered(grad_outputs[0], ctx.length), None, None


class AllPositions(torch.autograd.Function):
    """All ranks' positions, [rows, positions, channels]; the gradient is the first rank's, summed if `is_sum`."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, length: int, is_sum: bool) -> torch.Tensor:
        ctx.own, ctx.is_sum = own.shape[1], is_sum
        return allocate_gathered(own, length)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return take(grad_outputs[0], ctx.own, ctx.is_sum), None, None


def take(whole: torch.Tensor, size: int, is_sum: bool) -> torch.Tensor:
    """Return the first `size` positions of `whole`, [rows, positions, channels], in new memory, as the rank that has
    them would hold them. `is_sum`: whether they result from a reduce-scatter, which sums over ranks, and first copies
    the whole tensor in the order of the ranks."""
    copy = torch.empty_like(whole) if is_sum else None
    taken = whole[:, :size].clone()
    del copy
    return taken


def allocate_gathered(part: torch.Tensor, length: int) -> torch.Tensor:
    """Allocate what an all-gather of positions allocates, so that its memory is counted, and copy nothing: a real one
    gathers into a buffer in the order of ranks, and copies this into a second one in the order of rows. Return the
    second, [rows, length, width], without values.

    Args:
        part: this rank's positions, [rows, own positions, width].
        length: number of positions of all ranks.
    """
    gathered = part.new_empty(part.shape[0], length, part.shape[2])
    in_rows = torch.empty_like(gathered)
    del gathered
    return in_rows


class Sum(torch.autograd.Function):
    """A sum over ranks, whose result takes new memory; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        return own.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


class Gather(torch.autograd.Function):
    """The parts of all ranks, one after another in the last dimension; the gradient is this rank's part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return torch.cat([own] * size, -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].chunk(ctx.size, -1)[0].contiguous(), None


class OwnPart(torch.autograd.Function):
    """This rank's part of the last dimension; the gradient has the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return whole.chunk(size, -1)[0].contiguous()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return torch.cat([grad_outputs[0]] * ctx.size, -1), None
