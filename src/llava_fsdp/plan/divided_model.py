"""Divide the layers of a model on the meta device as tensor parallelism does (`distributed/tensor_parallel.py`),
without other ranks: collectives only allocate what real ones would."""

from __future__ import annotations

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
