"""The loss from hidden states and the output layer's weight, a chunk of labels at a time.

The logits of all labels together are the largest tensor of a training step, and nothing needs them at once. Each
chunk's loss and gradients are made in the forward pass, while its logits are there, so that they are made once (the
idea of Liger Kernel's fused linear cross entropy, arXiv 2410.10989). Nothing here is a collective: the weight is
whole while the model's forward runs, however many chunks a rank has.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llava_fsdp.config import LossConfig, LossKernel
from llava_fsdp.runtime.errors import ConfigError


class Each:
    """Every label's own loss, without a gradient, beside their sum, which is made as if nobody asked.

    A class of its own, because FSDP hands on copies of lists.
    """

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []
        """float32 [labels of a chunk]; none where the kernel knows the sum alone."""


class LabelLoss(Protocol):
    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, label_ids: torch.Tensor, *, each: Each | None = None
    ) -> torch.Tensor:
        """hidden [labels, width], weight [vocabulary, width], label ids int64 [labels] -> float32 scalar, the sum of
        their losses."""
        ...


def choose_loss(cfg: LossConfig, compute_dtype: torch.dtype) -> LabelLoss:
    """What `loss.kernel` names; `auto` is the chunked one, which was the faster wherever both ran (docs/memory.md).

    Raises:
        ConfigError: torch's cannot be had, or would round the loss.
    """
    if cfg.kernel is not LossKernel.torch:
        loss = recomputed_loss if compute_dtype == torch.float16 else chunked_loss
        return partial(loss, chunk_tokens=cfg.chunk_tokens)
    if not hasattr(functional, "linear_cross_entropy"):
        raise ConfigError(
            f"loss.kernel=torch: torch {torch.__version__} has no linear_cross_entropy (2.13 has); set loss.kernel=auto"
        )
    if compute_dtype != torch.float32:
        raise ConfigError(
            f"loss.kernel=torch: torch gives the sum of losses in the compute dtype, and in "
            f"{str(compute_dtype).removeprefix('torch.')} that is a number of two or three digits; set "
            "loss.kernel=auto, or precision=fp32"
        )
    return partial(torch_loss, chunk_tokens=cfg.chunk_tokens)


def whole_loss(
    hidden: torch.Tensor, weight: torch.Tensor, label_ids: torch.Tensor, each: Each | None = None
) -> torch.Tensor:
    """Of all logits at once."""
    logs = functional.log_softmax(functional.linear(hidden, weight).float(), dim=-1)
    note_each(each, logs, label_ids)
    return functional.nll_loss(logs, label_ids, reduction="sum")


def note_each(each: Each | None, logs: torch.Tensor, label_ids: torch.Tensor) -> None:
    """Every label's own loss, of the logarithms [labels, vocabulary] that the sum is made of."""
    if each is not None:
        each.chunks.append(-logs.detach().gather(1, label_ids[:, None])[:, 0])


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    label_ids: torch.Tensor,
    chunk_tokens: int,
    each: Each | None = None,
):
    """Sum of the labels' cross entropies, float32, of logits in the compute dtype that are cast to float32.

    With one chunk it is `whole_loss` to the bit.
    """
    if not torch.is_grad_enabled():
        return ChunkedLoss.forward_alone(hidden, weight, label_ids, chunk_tokens, each)
    return ChunkedLoss.apply(hidden, weight, label_ids, chunk_tokens, each)


def recomputed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    label_ids: torch.Tensor,
    chunk_tokens: int,
    each: Each | None = None,
):
    """As `chunked_loss`, for fp16: each chunk's logits are made again in the backward pass.

    Gradients for an upstream gradient of 1 would be out of fp16's range, small and large: probabilities of rare words
    vanish below 6e-8, and a frequent word's sum over its labels ends at 65504. The loss scale is there to prevent
    both, and is known in the backward pass alone.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    if not len(label_ids):  # of no label too: every rank reduces a gradient
        return total + (hidden.sum() + weight.sum()).float() * 0.0
    for shown, ids in zip(hidden.split(chunk_tokens), label_ids.split(chunk_tokens), strict=True):
        own = Each()  # of this pass: the backward pass fills it once more
        total = total + checkpoint(
            whole_loss, shown, weight, ids, own if each is not None else None, use_reentrant=False
        )
        if each is not None:
            each.chunks += own.chunks
    return total


class ChunkedLoss(torch.autograd.Function):
    """Gradients for an upstream gradient of 1 are made in the forward pass, and scaled in the backward pass.

    A weight's gradient of several chunks is added up in float32 (each chunk's product is rounded to the compute dtype
    once, the sum once more): added in bf16, a chunk that is small beside what came before would be lost. With one
    chunk it is the product itself. The hidden states' gradient, of which each row belongs to one chunk, is in the
    compute dtype. A frozen weight has no gradient and costs none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        label_ids: torch.Tensor,
        chunk_tokens: int,
        each: Each | None,
    ):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        several = len(label_ids) > chunk_tokens
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = None
        if needs_weight and (several or not len(label_ids)):  # of no label too: every rank reduces a gradient
            of_weight = torch.zeros_like(weight, dtype=torch.float32 if several else weight.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(label_ids), chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            shown, ids = hidden[rows], label_ids[rows]
            loss, of_logits = loss_and_gradient(shown, weight, ids, needs_hidden or needs_weight, each)
            total += loss
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[rows])
            if needs_weight:
                of_weight = add_product(of_weight, of_logits.t(), shown)
            del of_logits  # before the next chunk's are made
        ctx.gradients = of_hidden, of_weight
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (scale,) = grad_outputs
        assert ctx.gradients is not None, "the gradients of a chunked loss are scaled in place: one backward pass"
        of_hidden, of_weight = ctx.gradients
        ctx.gradients = None
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(scale)
        if of_weight is not None:
            of_weight = of_weight.mul_(scale).to(ctx.dtype)
        return of_hidden, of_weight, None, None, None

    @staticmethod
    def forward_alone(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        label_ids: torch.Tensor,
        chunk_tokens: int,
        each: Each | None,
    ):
        """The loss without any gradient."""
        total = hidden.new_zeros((), dtype=torch.float32)
        for shown, ids in zip(hidden.split(chunk_tokens), label_ids.split(chunk_tokens), strict=True):
            total += loss_and_gradient(shown, weight, ids, False, each)[0]
        return total


def loss_and_gradient(
    shown: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, differentiate: bool, each: Each | None = None
) -> tuple[torch.Tensor, Any]:
    """Sum of the rows' cross entropies, and its gradient with respect to their logits, in the compute dtype."""
    logits = functional.linear(shown, weight)
    wide = logits.float()
    del logits  # no two steps of this are needed at once, and each is as large as a chunk gets
    logs = functional.log_softmax(wide, dim=-1)
    del wide
    loss = functional.nll_loss(logs, ids, reduction="sum")
    note_each(each, logs, ids)
    if not differentiate:
        return loss, None
    gradient = logs.exp_()
    gradient[torch.arange(len(ids), device=ids.device), ids] -= 1
    return loss, gradient.to(weight.dtype)


def add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """total + left @ right, in place where there is a total."""
    if total is None:
        return left @ right
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def torch_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    label_ids: torch.Tensor,
    chunk_tokens: int,
    each: Each | None = None,
) -> torch.Tensor:
    """The same through torch's own kernel, which also makes gradients in the forward pass, and gives the sum alone."""
    if not len(label_ids):  # it divides by the number of labels
        return (hidden.sum() + weight.sum()) * 0.0
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
    found = functional.linear_cross_entropy(hidden, weight, label_ids, reduction="sum", options=options)
    assert isinstance(found, torch.Tensor)
    return found
