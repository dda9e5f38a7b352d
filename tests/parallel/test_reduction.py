"""Gradients with every strategy are sums over micro-batches and ranks, and their norm is of the whole."""

import logging
from collections.abc import Callable

import pytest
import torch
from harness import RankPool
from small import Configure
from tiers import slow_after
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from llava_fsdp.config import Config
from llava_fsdp.parallel.apply import parallelize
from llava_fsdp.parallel.fsdp.parts import ModelParts
from llava_fsdp.parallel.local_shards import whole
from llava_fsdp.parallel.memory.offload import Offload
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, begin_micro_batch
from llava_fsdp.train.gradients import clip_gradients, gradient_norm
from llava_fsdp.train.sums.source_sums import sum_over_ranks

MICRO_BATCHES = 3


class Stack(nn.Module):
    """Two blocks and a root of odd sizes, whose gradients are small whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        self.last = nn.Linear(5, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


def inputs(rank: int, micro: int) -> torch.Tensor:
    """[2, 5], another on every rank and in every micro-batch."""
    return torch.arange(10.0).view(2, 5) % 3 + rank + 4 * micro


def run_backward(
    world: World, cfg: Config, make: Callable[[], nn.Module], weight: float, inputs: Callable[[int, int], torch.Tensor]
) -> MasterWeights:
    """Shard a model whose weights are all `weight`, and run all micro-batches forward and backward."""
    parallelism = Parallelism.of(cfg, world)
    with torch.device("meta"):
        model = make()
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    masters = parallelize(model, ModelParts([blocks]), cfg, parallelism, Offload(cfg, world.device))
    with torch.no_grad():
        for parameter in masters.named.values():
            parameter.fill_(weight)
    for micro in range(MICRO_BATCHES):
        begin_micro_batch(model, parallelism.plan, is_last=micro == MICRO_BATCHES - 1)
        model(inputs(world.rank, micro)).backward()
    return masters


def reduced(world: World, cfg: Config) -> tuple[dict[str, torch.Tensor], float, float]:
    """Gradients in full, their norm, and a number of each rank added up."""
    masters = run_backward(world, cfg, Stack, 1, inputs)
    gradients = {name: whole(parameter.grad) for name, parameter in masters.named.items() if parameter.grad is not None}
    assert gradients.keys() == masters.named.keys()
    norm = clip_gradients(masters, None)
    return gradients, float(norm), float(sum_over_ranks(torch.tensor(world.rank + 1.0)))


@pytest.mark.ranks
@pytest.mark.parametrize("row", slow_after(3, [plan.zero for plan in SHARD_PLANS.values()]))
def test_gradients_are_sums_over_micro_batches_and_ranks(
    row: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    plain = Stack()
    for parameter in plain.parameters():
        nn.init.ones_(parameter)
    for rank in range(4):
        for micro in range(MICRO_BATCHES):
            plain(inputs(rank, micro)).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    size = 2 if row.startswith("hybrid") else "null"
    cfg = configure(f"sharding={row}", f"sharding.shard_size={size}")
    for gradients, norm, total in pools[4].run(reduced, cfg):
        assert gradients.keys() == expected.keys() and total == 10
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name
        assert norm == pytest.approx(float(torch.stack([g.norm() for g in expected.values()]).norm()), rel=1e-6)


def clipped_on_two_meshes(world: World, scale: float) -> tuple[float, list[torch.Tensor]]:
    """Norm and clipped gradients of four weights [8, 3]: cut on a (2, 2) mesh in two ways, on one of all ranks, and
    rows of the first cut again."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    ways = [
        (pair, [Shard(0), Shard(1)]), (pair, [Shard(0), Replicate()]), (line, [Shard(0)]),
        (pair, [_StridedShard(0, split_factor=2), Shard(0)]),
    ]  # fmt: skip
    named = {}
    for number, (mesh, placements) in enumerate(ways):
        values = torch.arange(24.0).view(8, 3) + number
        box, offset = compute_local_shape_and_global_offset(values.shape, mesh, placements)
        own = values[tuple(slice(at, at + size) for at, size in zip(offset, box, strict=True))].clone()
        weight = DTensor.from_local(own, mesh, placements, run_check=False, shape=values.shape, stride=(3, 1))
        named[f"{number}"] = parameter = nn.Parameter(weight)
        parameter.grad = weight.clone() * scale
    norm = clip_gradients(MasterWeights(named, torch.float32), 1.5, scale)
    return float(norm), [whole(p.grad) for p in named.values() if p.grad is not None]


@pytest.mark.ranks
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_one_norm_clips_gradients_of_several_meshes(scale: float, pools: dict[int, RankPool]) -> None:
    expected = [torch.arange(24.0).view(8, 3) + number for number in range(4)]
    norm = float(torch.cat(expected).norm())
    found = pools[4].run(clipped_on_two_meshes, scale)
    assert len({of_rank for of_rank, _ in found}) == 1
    for of_rank, gradients in found:
        assert of_rank == pytest.approx(norm, rel=1e-6)
        for gradient, values in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, values * (1.5 / norm), rtol=1e-5, atol=0)


def clipped_by_both(world: World, placements: list[Placement]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Norms, and clipped gradients, of 16 times 5 random weights of odd sizes on a (2, 2) mesh: torch's and ours."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    draw = torch.Generator().manual_seed(7)
    pairs = []
    for _ in range(16):
        theirs, ours = {}, {}
        for number in range(5):
            values = distribute_tensor(torch.randn(5 + number % 3, 7, generator=draw), mesh, placements)
            for weights in (theirs, ours):
                weights[f"{number}"] = nn.Parameter(torch.zeros_like(values))
                weights[f"{number}"].grad = values.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.5)
        assert isinstance(norm, DTensor)
        pairs.append((norm.full_tensor(), clip_gradients(MasterWeights(ours, torch.float32), 1.5)))
        pairs += [(whole(theirs[name].grad), whole(ours[name].grad)) for name in theirs]
    return pairs


@pytest.mark.ranks
@pytest.mark.parametrize(
    "placements",
    slow_after(
        2,
        [
            pytest.param([Replicate(), Shard(0)], id="hybrid"),
            pytest.param([Shard(0), Shard(1)], id="rows_and_columns"),
            pytest.param([Shard(1), Shard(0)], id="columns_and_rows"),
            pytest.param([Replicate(), Replicate()], id="whole"),
        ],
    ),
)
def test_norm_and_clipping_are_torchs_to_the_bit(placements: list[Placement], pools: dict[int, RankPool]) -> None:
    """Although ours multiply plain shards, and torch's DTensors."""
    for pairs in pools[4].run(clipped_by_both, placements):
        assert len(pairs) == 96
        for number, (theirs, ours) in enumerate(pairs):
            assert torch.equal(theirs, ours), number


class Alone(nn.Module):
    """One block, whose weight's gradient is the sum of its inputs' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 7, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x).sum()


def added_in_bf16(world: World, cfg: Config) -> torch.Tensor:
    def inputs(rank: int, micro: int) -> torch.Tensor:
        return torch.full((1, 5), 256.0 if (rank, micro) == (0, 0) else 1.0, dtype=torch.bfloat16)

    masters = run_backward(world, cfg, Alone, 0, inputs)
    gradient = masters.named["blocks.0.weight"].grad
    assert gradient is not None and gradient.dtype == torch.float32
    return whole(gradient)


@pytest.mark.ranks
@pytest.mark.parametrize("row", slow_after(3, [plan.zero for plan in SHARD_PLANS.values()]))
def test_gradients_in_bf16_are_added_in_fp32(row: str, configure: Configure, pools: dict[int, RankPool]) -> None:
    """256 + 1 is 256 in bf16, and here it is 256 and eleven times 1, over ranks and micro-batches."""
    size = 2 if row.startswith("hybrid") else "null"
    cfg = configure("precision=bf16", f"sharding={row}", f"sharding.shard_size={size}")
    for gradient in pools[4].run(added_in_bf16, cfg):
        assert torch.equal(gradient, torch.full((7, 5), 267.0))


def norm_and_warnings(world: World) -> tuple[float, int]:
    """The norm of a gradient whose rows and columns are divided, and how many messages torch logs about it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    gradient = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0), Shard(1)])
    logger, records = logging.getLogger("torch.distributed.tensor"), logging.Handler(logging.WARNING)
    seen: list[logging.LogRecord] = []
    records.emit = seen.append  # type: ignore[method-assign]
    logger.addHandler(records)
    try:
        return float(gradient_norm([gradient] * 2, [gradient.to_local()] * 2)), len(seen)
    finally:
        logger.removeHandler(records)


@pytest.mark.ranks
def test_torch_has_nothing_to_say_about_the_norm_of_divided_rows_and_columns(pools: dict[int, RankPool]) -> None:
    expected = float(torch.linalg.vector_norm(torch.arange(24.0)) * 2**0.5)
    assert pools[4].run(norm_and_warnings) == [(pytest.approx(expected), 0)] * 4
