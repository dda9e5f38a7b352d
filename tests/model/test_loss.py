"""The loss of chunks of labels is that of all logits at once, and so are its gradients."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from loss_bytes import loss_bytes
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from llava_fsdp.config import FULL_WEIGHT, LossConfig, LossKernel, Normalize
from llava_fsdp.model.llava.own_parts import own_loss
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.loss import (
    UNCHANGED,
    Labels,
    LossCollector,
    VocabularyPart,
    choose_loss,
    chunked_loss,
    recomputed_loss,
    torch_loss,
    whole_loss,
)
from llava_fsdp.runtime.errors import ConfigError

LABELS, VOCABULARY, WIDTH = 23, 57, 12


def drawn(dtype: torch.dtype, labels: int = LABELS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    hidden = torch.randn((labels, WIDTH), generator=dice).to(dtype).requires_grad_()
    weight = torch.randn((VOCABULARY, WIDTH), generator=dice).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (labels,), generator=dice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [True, False])
def test_one_chunk_is_the_whole_loss_to_the_bit(dtype: torch.dtype, gradients: bool) -> None:
    hidden, weight, ids = drawn(dtype)
    with torch.set_grad_enabled(gradients):
        for chunk in (LABELS, LABELS + 1, 10**6):
            found = chunked_loss(hidden, weight, Labels(ids), chunk)
            assert found.dtype == torch.float32 and found.requires_grad == gradients
            assert torch.equal(found, whole_loss(hidden, weight, Labels(ids)))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("chunk", [1, 5, 22, LABELS])
def test_gradients_are_those_of_fp64(dtype: torch.dtype, bound: float, chunk: int) -> None:
    """Relative to the norm, of what the same rounded inputs give in float64, through a scale that is no power of 2.

    The fp64 case casts nothing but the probabilities, which are fp32 by contract, so its bound is fp32's.
    """
    hidden, weight, ids = drawn(dtype)
    (chunked_loss(hidden, weight, Labels(ids), chunk) / 7).backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    (functional.cross_entropy(exact[0] @ exact[1].t(), ids, reduction="sum") / 7).backward()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == dtype
        allowed = max(bound, 3e-7)
        assert (ours.grad.double() - theirs.grad).norm() < allowed * theirs.grad.norm()


def test_the_sum_over_chunks_is_in_fp32() -> None:
    """In bf16 the part of a chunk below 1/256 of what came before would be lost; a thousand such are not."""
    hidden = torch.ones((1001, 1), dtype=torch.bfloat16)
    hidden[1:] = 2.0**-10
    weight = torch.zeros((2, 1), dtype=torch.bfloat16, requires_grad=True)
    chunked_loss(hidden, weight, Labels(torch.zeros(1001, dtype=torch.int64)), 1).backward()
    assert weight.grad is not None
    assert float(weight.grad[0, 0]) == pytest.approx(-(1 + 1000 * 2.0**-10) / 2, rel=1 / 256)


def test_a_micro_batch_without_a_label_has_a_gradient_of_zeros() -> None:
    """Every rank reduces one."""
    for kernel in (LossKernel.chunked, LossKernel.torch):
        hidden, weight, ids = drawn(torch.float32, labels=0)
        loss = choose_loss(LossConfig(normalize=Normalize.step, chunk_tokens=4, kernel=kernel), torch.float32)
        found = loss(hidden, weight, Labels(ids))
        found.backward()
        assert found.item() == 0
        assert weight.grad is not None and not weight.grad.any()
        assert hidden.grad is not None and hidden.grad.shape == (0, WIDTH)


@pytest.mark.parametrize("kernel", [LossKernel.auto, LossKernel.chunked, LossKernel.torch])
def test_kernels_agree(kernel: LossKernel) -> None:
    hidden, weight, ids = drawn(torch.float32)
    loss = choose_loss(LossConfig(normalize=Normalize.step, chunk_tokens=5, kernel=kernel), torch.float32)
    found = loss(hidden, weight, Labels(ids))
    gradients = torch.autograd.grad(found / 3, (hidden, weight))
    expected = whole_loss(hidden, weight, Labels(ids))
    exact = torch.autograd.grad(expected / 3, (hidden, weight))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(gradients, exact, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_torchs_kernel_is_refused_where_it_would_round_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LossConfig(normalize=Normalize.step, chunk_tokens=4, kernel=LossKernel.torch)
    with pytest.raises(ConfigError, match="bfloat16 has only two or three digits"):
        choose_loss(asked, torch.bfloat16)
    monkeypatch.delattr(functional, "linear_cross_entropy")
    with pytest.raises(ConfigError, match="has no linear_cross_entropy"):
        choose_loss(asked, torch.float32)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [LossKernel.auto, LossKernel.chunked])
def test_losses_of_single_labels_are_collected_once(kernel: LossKernel, dtype: torch.dtype, gradients: bool) -> None:
    """In order, positive, in fp32 and without gradients; also where the backward pass computes them again. The kernel
    of this project takes every dtype."""
    hidden, weight, ids = drawn(dtype)
    loss = choose_loss(LossConfig(normalize=Normalize.step, chunk_tokens=5, kernel=kernel), dtype)
    collector = LossCollector()
    with torch.set_grad_enabled(gradients):
        found = loss(hidden, weight, Labels(ids), collector=collector)
    if gradients:
        found.backward()
    assert [len(chunk) for chunk in collector.chunks] == [5, 5, 5, 5, 3]
    each = torch.cat(collector.chunks)
    logits = functional.linear(hidden, weight).detach().float()
    torch.testing.assert_close(each, functional.cross_entropy(logits, ids, reduction="none"))
    assert not each.requires_grad


class Alive(TorchDispatchMode):
    """Bytes of what is made under it, as far as it is still there: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        self.held = {key: kept for key, kept in self.held.items() if not kept[0].expired()}
        return sum(size for _, size in self.held.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now)
        return found


CASES = [(torch.float32, 8), (torch.float32, 100), (torch.bfloat16, 8), (torch.bfloat16, 100), (torch.bfloat16, 1)]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("dtype", "chunk"), CASES)
def test_bytes_are_what_the_formula_says(dtype: torch.dtype, chunk: int, trains: bool) -> None:
    """Counted tensor by tensor; beyond the formula there are only vectors: a loss, ids, a place for each label."""
    hidden, weight, ids = drawn(dtype)
    weight.requires_grad_(trains)
    with Alive() as alive:
        loss = chunked_loss(hidden, weight, Labels(ids), chunk)
    peak, held = loss_bytes(LABELS, VOCABULARY, WIDTH, dtype.itemsize, trains, chunk)
    vectors = 40 * LABELS + 64
    assert 0 <= alive.now - held <= vectors
    assert 0 <= alive.most - peak <= vectors
    assert loss.requires_grad


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    hidden, weight, ids = drawn(torch.float32)
    frozen = weight.detach()
    chunked_loss(hidden, frozen, Labels(ids), 5).backward()
    assert frozen.grad is None and hidden.grad is not None
    with torch.no_grad(), Alive() as alive:
        chunked_loss(hidden, weight, Labels(ids), 5)
    assert alive.most <= 8 * 5 * VOCABULARY + 40 * LABELS + 64
    assert math.isfinite(chunked_loss(hidden, weight, Labels(ids), 5).item())


@pytest.mark.parametrize("labels", [0, 2000])
@pytest.mark.parametrize("chunk", [512, 2000])
def test_fp16_never_holds_an_unscaled_gradient(chunk: int, labels: int) -> None:
    """2000 labels of one word: their sum is beyond 65504, what is wanted of it is not; rare words are seen too."""
    cfg = LossConfig(normalize=Normalize.step, chunk_tokens=chunk, kernel=LossKernel.auto)
    loss = choose_loss(cfg, torch.float16)
    dice = torch.Generator().manual_seed(0)
    hidden = (60 + torch.rand((labels, 2), generator=dice)).half().requires_grad_()
    weight = torch.tensor([[0.0, 0.0], [0.0, 0.01], [-0.06, -0.06]]).half().requires_grad_()
    (loss(hidden, weight, Labels(torch.zeros(labels, dtype=torch.int64))) * 64 / 2000).backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = exact[0] @ exact[1].t()
    (functional.cross_entropy(logits, torch.zeros(labels, dtype=torch.int64), reduction="sum") * 64 / 2000).backward()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == torch.float16
        assert (ours.grad.double() - theirs.grad).norm() <= 5e-3 * theirs.grad.norm()


@pytest.mark.parametrize("chunk", [1, 5, LABELS])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("change", [UNCHANGED, LogitChange(0.3), LogitChange(-0.7, 2.5)])
def test_parts_of_a_vocabulary_give_the_whole_loss(size: int, chunk: int, change: LogitChange) -> None:
    """Threads stand for ranks, which have unequal parts; the losses of single labels are collected."""
    hidden, weight, ids = drawn(torch.float32)
    whole = LossCollector()
    loss = chunked_loss(hidden, weight, Labels(ids), chunk, whole, logit_change=change) / 7
    loss.backward()
    barrier, given, each = threading.Barrier(size), [torch.zeros(0)] * size, -(-VOCABULARY // size)

    def rank(number: int) -> tuple[torch.Tensor, ...]:
        def reduced(how: str, own: torch.Tensor) -> torch.Tensor:
            given[number] = own
            barrier.wait(20)
            stacked = torch.stack(given)
            barrier.wait(20)
            return stacked.amax(0) if how == "max" else stacked.sum(0)

        part = VocabularyPart(number * each, lambda own: reduced("max", own), lambda own: reduced("sum", own))
        own = weight.detach()[number * each : (number + 1) * each].clone().requires_grad_()
        rows, collector = hidden.detach().clone().requires_grad_(), LossCollector()
        found = chunked_loss(rows, own, Labels(ids), chunk, collector, part, change) / 7
        found.backward()
        with torch.no_grad():
            assert torch.equal(chunked_loss(rows, own, Labels(ids), chunk, None, part, change) / 7, found)
        assert rows.grad is not None and own.grad is not None
        return found.detach(), rows.grad, own.grad, torch.cat(collector.chunks)

    with ThreadPoolExecutor(size) as pool:
        losses, of_hidden, of_weight, singles = zip(*pool.map(rank, range(size)), strict=True)
    assert hidden.grad is not None and weight.grad is not None
    for number in range(size):
        assert losses[number] == pytest.approx(float(loss.detach()), rel=1e-6)
        assert torch.allclose(of_hidden[number], hidden.grad, atol=1e-6)
        assert torch.allclose(singles[number], torch.cat(whole.chunks), atol=1e-5)
    assert torch.allclose(torch.cat(of_weight), weight.grad, atol=1e-6)


@pytest.mark.parametrize("change", [LogitChange(1 / 8), LogitChange(1.0, 3.0), LogitChange(-0.7, 2.5)])
@pytest.mark.parametrize(
    "function", [whole_loss, *(partial(each, chunk_tokens=4) for each in (chunked_loss, recomputed_loss, torch_loss))]
)
def test_factors_and_caps_have_the_loss_and_the_gradients_of_fp64(
    function: Callable[..., Any], change: LogitChange
) -> None:
    """torch's own kernel has factors alone; the configuration is refused for a cap."""
    hidden, weight, ids = drawn(torch.float32)
    if getattr(function, "func", None) is torch_loss and change.cap is not None:
        with pytest.raises(ConfigError):
            cfg = LossConfig(normalize=Normalize.step, chunk_tokens=4, kernel=LossKernel.torch)
            choose_loss(cfg, torch.float32, change)
        return
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = exact[0] @ exact[1].t() * change.factor
    logits = logits if change.cap is None else torch.tanh(logits / change.cap) * change.cap
    expected = functional.cross_entropy(logits, ids, reduction="sum")
    found = function(hidden, weight, Labels(ids), logit_change=change)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    pairs = zip(torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(expected, exact), strict=True)
    for ours, theirs in pairs:
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-6


WEIGHTED = [whole_loss, *(partial(each, chunk_tokens=4) for each in (chunked_loss, recomputed_loss))]
own = partial(own_loss, cfg=LossConfig(normalize=Normalize.step, chunk_tokens=5, kernel=LossKernel.auto))
WEIGHTED.append(partial(own(partial(functional.cross_entropy, reduction="none")), logit_change=UNCHANGED))


@pytest.mark.parametrize("function", WEIGHTED)
@pytest.mark.parametrize("chunk", [1, 5])
def test_weighted_losses_have_the_gradients_of_fp64(function: Callable[..., Any], chunk: int) -> None:
    """The losses of single labels are those without weights; a vocabulary of which one rank has all counts likewise."""
    hidden, weight, ids = drawn(torch.float32)
    units = torch.randint(1, FULL_WEIGHT + 1, (LABELS,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    singles = functional.cross_entropy(exact[0] @ exact[1].t(), ids, reduction="none")
    expected = (singles * units.double() / FULL_WEIGHT).sum()
    wanted = torch.autograd.grad(expected, exact)
    part = VocabularyPart(0, lambda own: own, lambda own: own)
    for own in (function, partial(chunked_loss, chunk_tokens=chunk, part=part)):
        collector = LossCollector()
        found = own(hidden, weight, Labels(ids, units), collector=collector)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        for ours, theirs in zip(torch.autograd.grad(found, (hidden, weight)), wanted, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 3e-6
        assert torch.allclose(torch.cat(collector.chunks).double(), singles.detach(), atol=1e-5)
        with torch.no_grad():
            assert own(hidden, weight, Labels(ids, units)).item() == pytest.approx(expected.item(), rel=1e-6)
