"""Compute the loss from hidden states and the output layer's weight, a chunk of labels (tokens to predict) at a time.

The logits of all labels together would be the largest tensor of a training step. The loss and the gradients of each
chunk are computed in the forward pass, so that the chunk's logits are computed only once (as in Liger Kernel's fused
linear cross entropy, arXiv 2410.10989). There are no collectives here, because FSDP has gathered the weight for the
model's forward pass. Therefore ranks may have different numbers of chunks. The exception is a vocabulary that ranks
divide among them (`VocabularyPart`): there are collectives for each chunk, and these ranks have the same labels.

The loss functions have these arguments in common:
    hidden: last hidden states at the labels, [labels, width].
    weight: weight of the output layer, [vocabulary, width].
    labels: the label of each row of `hidden`.
    chunk_tokens: largest number of labels whose logits are in memory at a time.
    collector: gets the loss of every single label; None: these losses are not kept.
    part: which rows of the output layer `weight` has; None: all.
    logit_change: how logits are made from the output of the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llava_fsdp.config import FULL_WEIGHT, LossConfig, LossKernel
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.runtime.errors import ConfigError

UNCHANGED = LogitChange()
"""The logits are the output of the output layer."""


class LossCollector:
    """Losses of single labels, without gradients, which the loss function appends. This is a class and not a list,
    because FSDP passes copies of lists to the model."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []
        """Losses of the labels of each chunk, float32 [labels]; empty if the loss kernel computes only the sum."""


@dataclass(frozen=True)
class Labels:
    """The labels of some positions."""

    ids: torch.Tensor
    """int64 [labels]."""
    weights: torch.Tensor | None = None
    """Factor of each label's loss in units of 1 / FULL_WEIGHT, int32 [labels]; None: all are 1. They are integers,
    because FSDP casts the floating-point arguments of a model to the compute dtype."""

    def split(self, size: int) -> Iterator[Labels]:
        """Yield the labels in chunks of at most `size`."""
        yield from (self.at(slice(begin, begin + size)) for begin in range(0, len(self.ids), size))

    def at(self, rows: slice) -> Labels:
        return Labels(self.ids[rows], None if self.weights is None else self.weights[rows])


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output layer that this rank has, if several ranks divide the vocabulary among them."""

    first: int
    """Token id of the first row."""
    largest: Callable[[torch.Tensor], torch.Tensor]
    """Elementwise maximum over the ranks, without gradients."""
    total: Callable[[torch.Tensor], torch.Tensor]
    """Elementwise sum over the ranks, without gradients."""


@dataclass(frozen=True)
class LogitSettings:
    """How the logits of labels are computed."""

    chunk_tokens: int
    """Largest number of labels whose logits are in memory at a time."""
    part: VocabularyPart | None = None
    """Which rows of the output layer this rank has; None: all."""
    logit_change: LogitChange = UNCHANGED
    """How logits are made from the output of the output layer."""


class LabelLoss(Protocol):
    """Function that computes the sum of the cross entropies of all labels of a micro-batch."""

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: Labels,
        *,
        collector: LossCollector | None = None,
        logit_change: LogitChange = UNCHANGED,
    ) -> torch.Tensor:
        """Return the sum of the labels' cross entropies, float32 scalar, from `hidden` [labels, width] and the output
        layer's `weight` [vocabulary, width]. `collector` gets the loss of each label, before it is multiplied by its
        factor. `logit_change`: how the logits are made from the product of `hidden` and `weight`."""
        ...


class OutputLayer(nn.Linear):
    """Linear layer from hidden states to the logits of the vocabulary, which also computes the loss. The loss is
    computed inside of the module that has the weight, because FSDP gathers a weight before its module's forward pass
    and reduces its gradient after the module's backward pass."""

    def __init__(self, hidden: int, vocabulary: int, label_loss: LabelLoss, logit_change: LogitChange = UNCHANGED):
        super().__init__(hidden, vocabulary, bias=False)
        self.label_loss = label_loss
        self.logit_change = logit_change

    def forward(
        self,
        hidden: torch.Tensor,
        label_ids: torch.Tensor | None = None,
        *,
        collector: LossCollector | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the losses of all labels, each times its weight, float32 scalar or, without `label_ids`,
        the logits, float32 [labels, vocabulary]. `hidden`: [labels, width]; `collector` gets the loss of each label."""
        # `logit_change`: what the language model does to the product, such as scaling or capping the logits
        if label_ids is None:
            return self.logit_change.apply(super().forward(hidden).float())
        labels = Labels(label_ids, weights)
        return self.label_loss(hidden, self.weight, labels, collector=collector, logit_change=self.logit_change)


def choose_loss(cfg: LossConfig, compute_dtype: torch.dtype, logit_change: LogitChange = UNCHANGED) -> LabelLoss:
    """Return the loss function that `loss.kernel` names: torch's, or the one of this module that computes the logits of
    a chunk at a time. `auto` is the one of this module, which was faster in all measurements. `compute_dtype` is the
    dtype of the hidden states. Raises ConfigError with `loss.kernel=torch`, if the installed torch has no such kernel
    or would round the loss to 16 bits, or if the language model caps its logits (`logit_change`)."""
    if cfg.kernel is not LossKernel.torch:
        loss = recomputed_loss if compute_dtype == torch.float16 else chunked_loss
        return partial(loss, chunk_tokens=cfg.chunk_tokens)
    if not hasattr(functional, "linear_cross_entropy"):
        raise ConfigError(
            f"loss.kernel=torch: torch {torch.__version__} has no linear_cross_entropy (2.13 has); set loss.kernel=auto"
        )
    if compute_dtype != torch.float32:
        raise ConfigError(
            f"loss.kernel=torch: torch returns the sum of losses in the compute dtype, and "
            f"{str(compute_dtype).removeprefix('torch.')} has only two or three digits; set loss.kernel=auto, or "
            "precision=fp32"
        )
    if logit_change.cap is not None:
        raise ConfigError(
            f"loss.kernel=torch: the language model caps its logits at {logit_change.cap:g}, which torch's kernel "
            "cannot do; set loss.kernel=auto"
        )
    return partial(torch_loss, chunk_tokens=cfg.chunk_tokens)


def whole_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: Labels,
    collector: LossCollector | None = None,
    logit_change: LogitChange = UNCHANGED,
) -> torch.Tensor:
    """Compute the sum of the cross entropies of all labels, float32 scalar, from the logits of all labels at once:
    `hidden` [labels, width], the output layer's `weight` [vocabulary, width]. `collector` gets the loss of each label.
    `logit_change` says how logits are made from the product of `hidden` and `weight`."""
    logs = functional.log_softmax(logit_change.apply(functional.linear(hidden, weight).float()), dim=-1)
    record_losses(collector, logs, labels.ids)
    return summed_losses(logs, labels)


def summed_losses(logs: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Return the sum of labels' losses times their factors, float32 scalar. `logs`: log-probabilities [labels,
    vocabulary]."""
    if labels.weights is None:
        return functional.nll_loss(logs, labels.ids, reduction="sum")
    return (functional.nll_loss(logs, labels.ids, reduction="none") * factors(labels.weights)).sum()


def factors(weights: torch.Tensor) -> torch.Tensor:
    """Return weights, int32 in units of 1 / FULL_WEIGHT, as float32, in which each is exact."""
    return weights.float() / FULL_WEIGHT


def record_losses(collector: LossCollector | None, logs: torch.Tensor, label_ids: torch.Tensor) -> None:
    """Append each label's loss to the collector, if there is one. `logs`: log-probabilities [labels, vocabulary]."""
    if collector is not None:
        collector.chunks.append(-logs.detach().gather(1, label_ids[:, None])[:, 0])


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: Labels,
    chunk_tokens: int,
    collector: LossCollector | None = None,
    part: VocabularyPart | None = None,
    logit_change: LogitChange = UNCHANGED,
):
    """Compute the sum of the cross entropies of all labels, float32 scalar, a chunk at a time. The output layer
    computes in the compute dtype, and its output is cast to float32. `hidden` is [labels, width]; `weight`,
    [vocabulary, width], is the output layer's or, with `part`, this rank's rows of it: all ranks that divide it must
    then call this with the same labels. `collector` gets the loss of each label. `logit_change` makes logits of that
    output.

    If there are not more labels than `chunk_tokens`, the result equals that of `whole_loss`, which computes the logits
    of all labels at once, bit for bit.
    """
    settings = LogitSettings(chunk_tokens, part, logit_change)
    if torch.is_grad_enabled():
        return ChunkedLoss.apply(hidden, weight, labels, settings, collector)
    return ChunkedLoss.forward_alone(hidden, weight, labels, settings, collector)


def recomputed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: Labels,
    chunk_tokens: int,
    collector: LossCollector | None = None,
    logit_change: LogitChange = UNCHANGED,
):
    """Compute the sum of the cross entropies of all labels in fp16, float32 scalar, a chunk at a time: `hidden` is
    [labels, width], `weight` [vocabulary, width]. The backward pass computes the logits again.

    In fp16 the gradients cannot be computed in the forward pass, because the loss scale is known only in the backward
    pass. Without the loss scale, gradients would leave the range of fp16: probabilities of rare words below 6e-8 would
    become 0, and the sum over the labels of a frequent word would overflow at 65504.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    if not len(labels.ids):  # every rank needs a gradient to reduce, also without labels
        return total + (hidden.sum() + weight.sum()).float() * 0.0
    for chunk, chunk_labels in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
        # the backward pass calls `whole_loss` again, which then adds the losses to this collector a second time
        chunk_collector = LossCollector() if collector is not None else None
        total = total + checkpoint(
            whole_loss, chunk, weight, chunk_labels, chunk_collector, logit_change, use_reentrant=False
        )
        if collector is not None and chunk_collector is not None:
            collector.chunks += chunk_collector.chunks
    return total


class ChunkedLoss(torch.autograd.Function):
    """Autograd function of the summed cross entropy, which computes the logits of some labels (a chunk) at a time. The
    forward pass computes the gradients for an upstream gradient of 1, and the backward pass multiplies them by the
    actual upstream gradient.

    The gradient of the output layer's weight is summed over chunks in float32 and then rounded, because a sum in bf16
    would lose the contributions of small chunks. With a single chunk there is no sum. The gradient of the hidden states
    is in the compute dtype, because each row belongs to one chunk. For a frozen weight no gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: Labels,
        settings: LogitSettings,
        collector: LossCollector | None,
    ):
        """Return the sum of the labels' cross entropies, float32 scalar, a chunk of labels at a time. `hidden`:
        [labels, width]; `weight`: [vocabulary, width], this rank's rows. The gradients for an upstream gradient of 1
        are computed here, so that no logits are kept; `backward` scales them."""
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        chunk_tokens, part = settings.chunk_tokens, settings.part
        count = len(labels.ids)
        several = count > chunk_tokens
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = None
        if needs_weight and (several or not count):  # every rank reduces a gradient, also without labels
            of_weight = torch.zeros_like(weight, dtype=torch.float32 if several else weight.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, count, chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            chunk = hidden[rows]
            differentiate = needs_hidden or needs_weight
            loss, of_logits = loss_and_gradient(chunk, weight, labels.at(rows), settings, collector, differentiate)
            total += loss
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[rows])
            if needs_weight:
                of_weight = add_product(of_weight, of_logits.t(), chunk)
            del of_logits  # freed before the gradient of the next chunk's logits is allocated
        if part is not None and of_hidden is not None and count:
            of_hidden = part.total(of_hidden)  # the sum over the ranks that divide the vocabulary
        ctx.gradients = of_hidden, of_weight
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        """Return the gradients of `hidden` and `weight` from `forward`, scaled in place by the upstream gradient."""
        (scale,) = grad_outputs
        assert ctx.gradients is not None, "a chunked loss has one backward pass: its gradients are scaled in place"
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
        labels: Labels,
        settings: LogitSettings,
        collector: LossCollector | None,
    ):
        """Compute the sum of the cross entropies of all labels, float32 scalar, and no gradients."""
        total = hidden.new_zeros((), dtype=torch.float32)
        chunk_tokens = settings.chunk_tokens
        for chunk, chunk_labels in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
            total += loss_and_gradient(chunk, weight, chunk_labels, settings, collector, differentiate=False)[0]
        return total


def loss_and_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: Labels,
    settings: LogitSettings,
    collector: LossCollector | None,
    differentiate: bool,
) -> tuple[torch.Tensor, Any]:
    """Compute the sum of the cross entropies of labels from the logits of all of them at once, float32 scalar: `hidden`
    [labels, width], `weight` [vocabulary, width]. If `differentiate` is set, also return its gradient with respect to
    the output of the output layer, [labels, vocabulary] in the dtype of `weight`; else None. With `settings.part`,
    `weight` has this rank's rows of the vocabulary. `settings.logit_change`: how logits are made from that layer's
    output."""
    output = functional.linear(hidden, weight)
    wide = output.float()
    # each of these tensors is large; only one is kept at a time, and with a cap its slope
    del output
    settings.logit_change.apply_in_place(wide)
    slope = settings.logit_change.slope(wide) if differentiate else 1.0
    if settings.part is not None:
        loss, gradient = loss_and_gradient_of_part(wide, labels, settings.part, collector, differentiate)
        return loss, None if gradient is None else times(gradient, slope).to(weight.dtype)
    logs = functional.log_softmax(wide, dim=-1)
    del wide
    ids = labels.ids
    loss = summed_losses(logs, labels)
    record_losses(collector, logs, ids)
    if not differentiate:
        return loss, None
    gradient = logs.exp_()
    gradient[torch.arange(len(ids), device=ids.device), ids] -= 1
    if labels.weights is not None:
        gradient *= factors(labels.weights)[:, None]
    return loss, times(gradient, slope).to(weight.dtype)


def times(gradient: torch.Tensor, slope: torch.Tensor | float) -> torch.Tensor:
    """Multiply a gradient by a factor in place, and return it."""
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient.mul_(slope)


def loss_and_gradient_of_part(
    logits: torch.Tensor,
    labels: Labels,
    part: VocabularyPart,
    collector: LossCollector | None,
    differentiate: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the sum of the cross entropies of labels, float32 scalar, where ranks divide the vocabulary. If
    `differentiate` is set, also return its gradient with respect to the logits; else None. Collective for these ranks:
    `part.largest` and `part.total` return the maximum and the sum over them.

    `logits` are float32 [labels, this rank's part of the vocabulary] and are overwritten: the gradient takes their
    memory. `collector` gets the loss of each label, without the labels' weights; None: not wanted.
    """
    logits -= part.largest(logits.amax(1))[:, None]
    place = labels.ids - part.first
    here = (place >= 0) & (place < logits.shape[1])  # whether this rank has the label's logit
    place = place.clamp(0, logits.shape[1] - 1)[:, None]
    picked = logits.gather(1, place)[:, 0].masked_fill(~here, 0)
    exponentials = logits.exp_()
    totals, picked = part.total(torch.stack([exponentials.sum(1), picked]))
    losses = totals.log() - picked
    if collector is not None:
        collector.chunks.append(losses)
    if labels.weights is not None:
        losses = losses * factors(labels.weights)
    if not differentiate:
        return losses.sum(), None
    gradient = exponentials.div_(totals[:, None])
    gradient.scatter_add_(1, place, -here.float()[:, None])
    if labels.weights is not None:
        gradient *= factors(labels.weights)[:, None]
    return losses.sum(), gradient


def add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add the matrix product left @ right to `total` in place and return it; return left @ right if `total` is None."""
    if total is None:
        return left @ right
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def label_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: Labels,
    chunk_tokens: int,
    collector: LossCollector | None = None,
    logit_change: LogitChange = UNCHANGED,
) -> torch.Tensor:
    """Compute the cross entropy of each label, float32 [labels], a chunk at a time, for a loss of pairs of answers:
    `hidden` is [labels, width], `weight` [vocabulary, width]. The backward pass computes the logits again, because the
    factor of each label's gradient is known only then. `collector` gets nothing."""
    assert labels.weights is None, "a pair whose labels have weights is refused"
    return LabelLosses.apply(hidden, weight, labels.ids, chunk_tokens, logit_change)


class LabelLosses(torch.autograd.Function):
    """Autograd function of the cross entropy of each label, which computes the logits of some labels (a chunk) at a
    time. The gradient of the output layer's weight is summed over chunks in float32 and then rounded, as in
    `ChunkedLoss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        label_ids: torch.Tensor,
        chunk_tokens: int,
        logit_change: LogitChange,
    ) -> torch.Tensor:
        """Return the cross entropy of each label, float32 [labels], from the logits of one chunk at a time, which are
        not kept. `logit_change`: how logits are made from the output of the output layer."""
        ctx.save_for_backward(hidden, weight, label_ids)
        ctx.chunk_tokens, ctx.logit_change = chunk_tokens, logit_change
        collector = LossCollector()
        for chunk, ids in zip(hidden.split(chunk_tokens), label_ids.split(chunk_tokens), strict=True):
            if len(ids):
                whole_loss(chunk, weight, Labels(ids), collector, logit_change)
        return torch.cat([hidden.new_zeros(0, dtype=torch.float32), *collector.chunks])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        """Return the gradients of `hidden` and `weight`: the logits of each chunk are computed again, and the gradient
        of each label is multiplied by its upstream gradient."""
        (upstream,), (hidden, weight, label_ids) = grad_outputs, ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for begin in range(0, len(label_ids), ctx.chunk_tokens):
            rows = slice(begin, begin + ctx.chunk_tokens)
            of_logits = gradient_of_logits(hidden[rows], weight, label_ids[rows], upstream[rows], ctx.logit_change)
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight = add_product(of_weight, of_logits.t(), hidden[rows])
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None


def gradient_of_logits(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor, logit_change: LogitChange
) -> torch.Tensor:
    """Return the gradient of a sum of cross entropies, each times a factor, with respect to the output of the output
    layer, [labels, vocabulary] in the dtype of `weight`: `hidden` is [labels, width], `weight` [vocabulary, width],
    `ids` int64 [labels], and `upstream` are the factors, float32 [labels]. They are multiplied in before the gradient
    is rounded, because in fp16 they have the loss scale in them. `logit_change`: the model's factor and cap of the
    logits."""
    wide = functional.linear(hidden, weight).float()
    logit_change.apply_in_place(wide)
    slope = logit_change.slope(wide)
    gradient = torch.softmax(wide, dim=-1)
    gradient[torch.arange(len(ids), device=ids.device), ids] -= 1
    return times(gradient, slope).mul_(upstream[:, None]).to(weight.dtype)


def torch_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: Labels,
    chunk_tokens: int,
    collector: LossCollector | None = None,
    logit_change: LogitChange = UNCHANGED,
) -> torch.Tensor:
    """Compute the sum of the cross entropies of all labels with torch's linear_cross_entropy, from hidden states
    [labels, width] and the output layer's weight [vocabulary, width]. The kernel does not return the losses of single
    labels, so nothing is appended to `collector`. `logit_change` of the logits: it may have a factor, but no cap."""
    assert logit_change.cap is None, "refused by choose_loss"
    assert labels.weights is None, "a dataset with weights between 0 and 1 is refused before the first step"
    if logit_change.factor != 1.0:
        hidden = hidden * logit_change.factor
    if not len(labels.ids):  # the kernel divides by the number of labels
        return (hidden.sum() + weight.sum()) * 0.0
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
    loss = functional.linear_cross_entropy(hidden, weight, labels.ids, reduction="sum", options=options)
    assert isinstance(loss, torch.Tensor)
    return loss
