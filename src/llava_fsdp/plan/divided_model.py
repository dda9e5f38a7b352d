"""Divide the layers of a model on the meta device as tensor parallelism does (`distributed/tensor_parallel.py`),
without other ranks: collectives only allocate what real ones would. And count what they move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from llava_fsdp.distributed.memory import Weight, divided_weights
from llava_fsdp.distributed.tensor_parallel import SharedInput, siblings_of
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.loss import VocabularyPart, chunked_loss
from llava_fsdp.model.tensor_plan import tensor_plan
from llava_fsdp.runtime.tensor_cut import Cut


def divide_on_meta(model: Llava, size: int, chunk_tokens: int) -> None:
    """Divide the layers of a model on the meta device among `size` ranks, in place, and keep the parts of the first
    one.

    Args:
        chunk_tokens: number of labels whose logits the loss computes at a time.
    """
    plan = tensor_plan(model, size)
    whole = {name: Weight(tuple(p.shape), p.requires_grad, False, False) for name, p in model.named_parameters()}
    own = divided_weights(whole, plan, size, 0)
    tied = model.lm_head.weight is model.language_model.get_input_embeddings().weight
    for name, weight in own.items():
        if weight.shape != whole[name].shape:
            parent, _, leaf = name.rpartition(".")
            part = torch.empty(weight.shape, dtype=model.get_parameter(name).dtype, device="meta")
            model.get_submodule(parent).register_parameter(leaf, nn.Parameter(part, weight.trainable))
    if tied:
        model.lm_head.weight = model.language_model.get_input_embeddings().weight
    for name, cut in plan.items():
        if cut is Cut.PARAMETER:
            continue
        module = model.get_submodule(name)
        if cut is Cut.ROWWISE_SPLIT:
            module.register_forward_pre_hook(lambda _, args: (OwnPart.apply(args[0], size), *args[1:]))
        if cut in (Cut.ROWWISE, Cut.ROWWISE_SPLIT, Cut.EMBEDDING):
            module.register_forward_hook(lambda _, args, output: Sum.apply(output))
        if cut in (Cut.COLWISE_GATHERED, Cut.OUTPUT):
            module.register_forward_hook(lambda _, args, output: Gather.apply(output, size))
    for siblings in siblings_of(model, plan):
        shared = SharedInput(SumOfGradients.apply, len(siblings))
        for module in siblings:
            module.register_forward_pre_hook(shared, prepend=True)
    part = VocabularyPart(0, torch.clone, torch.clone)
    model.label_loss = partial(chunked_loss, chunk_tokens=chunk_tokens, part=part)


class Sum(torch.autograd.Function):
    """A sum over ranks, whose result takes new memory; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        return own.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


class SumOfGradients(torch.autograd.Function):
    """The identity, whose gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].clone()


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


@dataclass(frozen=True)
class Moved:
    """Bytes that a rank receives in collectives, and the number of these collectives."""

    bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.calls + other.calls)

    def __mul__(self, times: float) -> Moved:
        return Moved(self.bytes * times, self.calls * times)


def layer_volume(
    model: Llava, plan: Mapping[str, Cut], blocks: int, size: int, tokens: int, labels: int, chunk_tokens: int,
    recomputed: float,
) -> Moved:  # fmt: skip
    """Count what ranks that compute layers together exchange in the forward and backward pass of a micro-batch.

    Args:
        model: the model on the meta device, not divided.
        plan: how the weights that these ranks have are divided.
        blocks: number of the language model's blocks that they have.
        size: number of ranks.
        tokens: positions of the micro-batch.
        labels: labels of the micro-batch.
        chunk_tokens: number of labels whose logits the loss computes at a time.
        recomputed: share of the blocks' forward pass that runs again in the backward pass.
    """
    width = model.compute_dtype.itemsize

    def gather(channels: int, rows: int = tokens, item: int = width) -> Moved:
        return Moved((size - 1) / size * rows * channels * item, 1)

    def reduce(channels: int, rows: int = tokens, item: int = width) -> Moved:
        return Moved(2 * gather(channels, rows, item).bytes, 1)

    forward, backward = Moved(), Moved()
    for name, cut in plan.items():
        layer: Any = model.get_submodule(name) if cut is not Cut.PARAMETER else None
        if cut in (Cut.ROWWISE, Cut.ROWWISE_SPLIT):
            forward += reduce(layer.out_features)
        if cut is Cut.ROWWISE_SPLIT:
            backward += gather(layer.in_features)
        if cut is Cut.COLWISE_GATHERED:
            forward += gather(layer.out_features)
        if cut is Cut.COLWISE and "lora_" in name:
            backward += reduce(layer.in_features)
        if cut is Cut.SUMMED and any(p.requires_grad for p in layer.parameters()):
            backward += reduce(1, sum(p.numel() for p in layer.parameters()))
    for siblings in siblings_of(model, plan):
        first: Any = siblings[0]
        backward += reduce(first.in_features)
    hidden = model.parts.language.hidden_size
    # the last sum of a block does not run again, because nothing needs it but an adapter, which comes behind it
    last = reduce(hidden) * (0 if model.adapted else blocks)
    moved = forward + backward + (forward + last * -1) * recomputed
    if Cut.EMBEDDING in plan.values():
        moved += reduce(hidden)
    if Cut.OUTPUT in plan.values():  # the loss
        moved += reduce(hidden, labels) + Moved(reduce(3, labels, 4).bytes, 2 * math.ceil(labels / chunk_tokens))
    return moved
