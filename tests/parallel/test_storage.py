"""Storage that FSDP occupies on 8 ranks (the `fake` group): uneven shards with their padding, frozen parts, and small
trainable weights among large frozen ones."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from small import Configure
from tiers import slow_after
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from llava_fsdp.config import Config, Strategy
from llava_fsdp.parallel.apply import parallelize
from llava_fsdp.parallel.fsdp.parts import ModelParts
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.memory.memory import bytes_per_rank
from llava_fsdp.parallel.memory.offload import Offload
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch

RANKS = 8


class Block(nn.Module):
    """A frozen square beside a trainable pair of narrow ones, as LoRA has them, and a frozen norm."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.norm = nn.LayerNorm(width)
        for frozen in (self.base, self.norm):
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(self.norm(x)) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(37, 3), Block(37, 11)])
        self.head = nn.Linear(37, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().sum()


@pytest.fixture(params=[0, 4, 7])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of 8 ranks whose peers answer with whatever is in the buffers."""
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def size(tensors: list[torch.Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def storage(tensors: list[torch.Tensor]) -> int:
    """Of all storages, each once: gradients of a unit are views of one."""
    found = {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors) if s.nbytes()}
    return sum(found.values())


def train_a_step(cfg: Config, world: World) -> tuple[nn.Module, MasterWeights, torch.optim.Optimizer]:
    parallelism = Parallelism.of(cfg, world)
    with torch.device("meta"):
        model = Model()
    masters = parallelize(model, ModelParts([model.layers]), cfg, parallelism, Offload(cfg, world.device))
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).fill_(0.01)
    optimizer = torch.optim.AdamW(masters.named.values(), fused=True)
    for is_last in (False, True):
        begin_micro_batch(model, parallelism.plan, is_last)
        model(torch.ones(2, 37, dtype=torch.bfloat16)).backward()
    for parameter in masters.named.values():
        assert parameter.grad is not None
        local(parameter.grad).zero_()  # the peers' parts are whatever memory held
    optimizer.step()
    return model, masters, optimizer


@pytest.mark.parametrize("row", slow_after(3, ["zero3", "zero2", "hybrid", "zero0", "zero1", "hybrid2"]))
def test_storage_equals_the_formulas(row: str, rank: int, configure: Configure) -> None:
    shard_size = 4 if row.startswith("hybrid") else "null"
    cfg = configure(f"sharding={row}", f"sharding.shard_size={shard_size}", "precision=bf16")
    with torch.device("meta"):
        shapes = Model()
    weights = list(weights_of(shapes, ModelParts([shapes.layers]), cfg.precision).values())
    world = World(rank, RANKS, rank, RANKS, torch.device("cpu"))
    model, masters, optimizer = train_a_step(cfg, world)
    of = weights, cfg.sharding.strategy, cfg.precision, RANKS, 4, rank
    exact, stored = bytes_per_rank(*of), bytes_per_rank(*of, padded=True)
    parameters = list(model.parameters())
    gradients = [p.grad for p in masters.named.values() if p.grad is not None]
    moments = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    assert (size(parameters), size(gradients), size(moments)) == (exact.parameters, exact.gradients, exact.optimizer)
    assert storage(moments) == stored.optimizer
    assert storage(parameters) == stored.parameters
    assert storage(gradients) == stored.gradients
    if cfg.sharding.strategy is Strategy.FULL_SHARD and rank == 7:
        assert exact.gradients < stored.gradients, "the last rank has fewer rows than it has room for"
