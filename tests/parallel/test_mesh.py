"""How ranks are laid out."""

import os

import pytest

from llava_fsdp.config import Strategy
from llava_fsdp.parallel.malloc import extend_segments, limit_kernel_cache
from llava_fsdp.parallel.ranks.rank_layout import mesh_shape
from llava_fsdp.parallel.ranks.world import read_world
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Mesh, Sync
from llava_fsdp.runtime.errors import ConfigError

SHAPES = {
    Strategy.NO_SHARD: (8, 1),
    Strategy.SHARD_OPTIMIZER: (1, 8),
    Strategy.SHARD_GRAD_OP: (1, 8),
    Strategy.FULL_SHARD: (1, 8),
    Strategy.HYBRID_SHARD: (2, 4),
    Strategy._HYBRID_SHARD_ZERO2: (2, 4),
}


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.auto])
def test_every_strategy_has_a_row_and_a_shape(strategy: Strategy) -> None:
    assert mesh_shape(SHARD_PLANS[strategy], 8, 4) == SHAPES[strategy]


def test_shard_size_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"sharding\.shard_size=3 does not divide the 8 ranks.*\[1, 2, 4, 8\]"):
        mesh_shape(SHARD_PLANS[Strategy.HYBRID_SHARD], 8, 3)


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = read_world()
    assert (world.rank, world.size, world.local_size, world.is_first) == (0, 1, 1, True)


def test_a_cpu_keeps_few_kernels_unless_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    for given, expected in ((None, "256"), ("33", "33")):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
        limit_kernel_cache()
        assert os.environ[name] == expected


def test_the_table_is_zero_as_published() -> None:
    """ZeRO-1 and -2 keep weights whole in a step, ZeRO-3 frees them; frozen weights cost rows that keep them whole no
    communication; gradients are sharded from ZeRO-2 on."""
    plans = list(SHARD_PLANS.values())
    assert {p.zero for p in plans if p.reshard_after_forward} == {"zero3", "hybrid"}
    assert {p.zero for p in plans if p.shards_frozen} == {"zero3", "hybrid"}
    assert {p.zero for p in plans if not p.reshard_every_micro_batch} == {"zero0", "zero1"}
    assert {p.zero for p in plans if p.gradient_sync is Sync.LAST_MICRO_BATCH} == {"zero0", "zero1"}
    assert {p.zero for p in plans if p.gradient_sync is Sync.SCATTER_EVERY_REDUCE_LAST} == {"hybrid", "hybrid2"}
    assert [p.mesh for p in plans] == [Mesh.REPLICATE, *[Mesh.SHARD] * 3, *[Mesh.HYBRID] * 2]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_the_allocator_is_set_where_the_user_has_not(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    for other in names:
        monkeypatch.setenv(other, "")  # so that it is restored
        monkeypatch.delenv(other)
    if name is not None:
        monkeypatch.setenv(name, "backend:native")
    extend_segments()
    found = {other: os.environ[other] for other in names & os.environ.keys()}
    assert found == ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name is None else {name: "backend:native"})
