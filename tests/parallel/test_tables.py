"""Tables of what torch calls things: none of its names is left out, and none is there that it does not have."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from llava_fsdp.parallel.compile import WARM_UP, Compilations
from llava_fsdp.parallel.memory.activation_checkpoint import KEPT
from llava_fsdp.parallel.memory.offload import NO_ROOM
from llava_fsdp.parallel.precision.fp8 import takes_fp8
from llava_fsdp.parallel.ranks.comm_volume import Traffic
from llava_fsdp.parallel.ranks.mesh import is_lost_peer

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"}
PRODUCTS |= {"aten::_int_mm"}
OF_TORCHAO = {"torchao::scaled_int8_mm"}
OF_PACKED_ROWS = {
    "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out", "flash_attn::_flash_attn_varlen_forward",
}  # fmt: skip


def test_every_product_and_every_attention_of_torch_is_kept() -> None:
    """What is left out of the table runs again."""
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    attention = {
        name
        for name in known
        if name.startswith("aten::_scaled_dot_product_") and "math" not in name and not name.endswith("_backward")
    }
    assert len(attention) >= 5 and PRODUCTS <= known
    assert set(KEPT) == PRODUCTS | OF_TORCHAO | OF_PACKED_ROWS | attention


SAID = (
    "Connection closed by peer [10.0.0.1]:4711", "Connection reset by peer", "Connection refused",
    "[gloo/transport/tcp/pair.cc:553] error", "Broken pipe", "NCCL error", "wait timeout after 60000ms",
    "remote worker crashing", "Timed out waiting 60000ms", "DistBackendError", "DistNetworkError", "DistStoreError",
)  # fmt: skip


def behind(error: BaseException, cause: BaseException, is_told: bool) -> BaseException:
    """An error that was raised from another, or while it was handled."""
    if is_told:
        error.__cause__ = cause
    else:
        error.__context__ = cause
    return error


@pytest.mark.parametrize("said", SAID)
def test_errors_of_a_lost_rank(said: str) -> None:
    """Of torch's own kind, or with its words; as the error or behind it. A file's error may have the same words."""
    error = RuntimeError(f"something: {said}")
    assert is_lost_peer(error) and is_lost_peer(BaseException(f"rank 1 failed: {said}"))
    for is_told in (True, False):
        assert is_lost_peer(behind(ValueError("x"), behind(KeyError("y"), error, is_told), is_told))
    assert not is_lost_peer(OSError(said)) and not is_lost_peer(ValueError(said))


def test_other_errors_are_of_no_lost_rank() -> None:
    assert is_lost_peer(dist.DistError("anything")) and not is_lost_peer(None)
    for error in (RuntimeError("shape mismatch"), RuntimeError("connection"), ValueError("x")):
        assert not is_lost_peer(error)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory", True),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("[Errno 12] Cannot allocate memory", True),
        ("std::bad_alloc", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_words_of_full_memory(said: str, expected: bool) -> None:
    assert (NO_ROOM.search(said) is not None) is expected


@pytest.mark.parametrize(
    ("inward", "outward", "trains", "expected"),
    [
        (16, 48, True, True),
        (48, 16, True, True),
        (24, 48, True, False),
        (48, 24, True, False),
        (16, 8, True, False),
        (16, 48, False, False),
    ],
)
def test_layers_that_fp8_products_take(inward: int, outward: int, trains: bool, expected: bool) -> None:
    """Both sizes are multiples of 16, and the weight trains."""
    layer = nn.Linear(inward, outward)
    layer.weight.requires_grad_(trains)
    assert takes_fp8(layer) is expected
    assert not takes_fp8(nn.Embedding(inward, outward))
    assert not takes_fp8(type("Router", (nn.Linear,), {})(inward, outward))


def test_what_is_compiled_behind_the_first_steps_is_counted() -> None:
    """Of five steps nothing, of the sixth what it added."""
    count, told = Compilations(), []
    for _ in range(WARM_UP + 3):
        count.total += 1
        told.append(count.after_step())
    assert WARM_UP == 5 and told == [0] * 5 + [1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "ranks", "sent"),
    [("all_gather", 3, 20), ("reduce_scatter", 3, 20), ("all_reduce", 3, 40), ("all_reduce", 2, 30)],
)
def test_what_a_rank_sends_of_a_collective(kind: str, ranks: int, sent: int) -> None:
    """A ring over three ranks sends two thirds, an all-reduce twice; one rank sends nothing."""
    traffic = Traffic()
    traffic.add(kind, 30, 1)
    assert not any(sum(own.values()) for own in traffic.moved.values())
    for _ in range(2):
        traffic.add(kind, 30, ranks)
    assert traffic.moved[kind] == {"calls": 2, "bytes": 60, "sent": 2 * sent}
