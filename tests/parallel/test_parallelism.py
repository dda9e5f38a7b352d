"""What a rank shares with others by arithmetic is what its meshes say."""

from dataclasses import replace

import pytest
from harness import CPU, RankPool, alone
from small import Configure

from llava_fsdp.config import Config, ParallelConfig
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.parallel.ranks.world import World

PACKED = "pack=true", "tokens_per_micro_batch=256"
LAYOUTS = [
    [], ["parallel.pipeline=2"], ["parallel.tensor=2"], ["parallel.pipeline=2", "parallel.tensor=2"],
    ["parallel.context=2", *PACKED], ["parallel.context=2", "parallel.tensor=2", *PACKED],
    ["parallel.context=2", "parallel.pipeline=2", *PACKED], ["parallel.expert=2"],
    ["sharding=hybrid", "sharding.shard_size=2"],
]  # fmt: skip


def compare(world: World, configs: list[Config]) -> list[int | None]:
    """Compare with the meshes of each configuration; over how many ranks it shards at most."""
    found = []
    for cfg in configs:
        own = Parallelism.of(cfg, world)
        meshes, layout = own.meshes, own.layout
        assert meshes.states is not None and own.is_sharded
        number = 0
        for place, size in zip(meshes.states.get_coordinate() or (), meshes.states.shape, strict=True):
            number = number * size + place
        assert layout.copy_of_layers(world.rank) == (number, meshes.states.size())
        stages = meshes.pipeline
        assert (stages is not None) == (cfg.parallel.pipeline > 1) == (own.pipeline_group is not None)
        if stages is None:
            assert own.equal_ranks is None and own.place.index == 0
        else:
            assert (own.place.index, own.place.size) == (stages.get_local_rank("pipeline"), stages["pipeline"].size())
            assert own.equal_ranks == (stages.get_local_rank("stage"), stages["stage"].size())
            assert own.pipeline_group is not None and own.pipeline_group.size() == cfg.parallel.pipeline
        assert own.context_index == (meshes.context.get_local_rank("context") if meshes.context is not None else 0)
        assert own.layer_parts == own.ranks_per_loss == (meshes.tensor.size() if meshes.tensor is not None else 1)
        found.append(own.shards)
    return found


@pytest.mark.ranks
def test_places_of_a_rank_are_those_in_its_meshes(configure: Configure, pools: dict[int, RankPool]) -> None:
    configs = [configure(*layout) for layout in LAYOUTS]
    assert pools[4].run(compare, configs) == [[4, 2, 2, 1, 4, 2, 2, 4, 2]] * 4


def test_one_rank_has_no_meshes(configure: Configure) -> None:
    own = alone(configure())
    assert (own.row_group, own.seed_rank, own.pipeline_group, own.equal_ranks, own.shards) == (
        (0, 1),
        0,
        None,
        None,
        None,
    )
    assert not own.is_sharded and own.is_first


@pytest.mark.parametrize("values", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}])
def test_of_ranks_with_the_same_random_numbers_one_is_the_lowest(values: dict[str, int]) -> None:
    """Ranks with other stages and those of a layer draw alike; a copy of the model is told of once."""
    layout = RankLayout(ParallelConfig(**values), 8)
    seeds = [layout.seed_rank(rank) for rank in range(8)]
    lowest = [layout.seed_rank(rank) for rank in range(8) if layout.is_lowest_of_copy(rank)]
    assert sorted(lowest) == sorted(set(seeds)) == list(range(layout.num_copies))
    assert all(seeds.count(seed) == 8 // layout.num_copies for seed in seeds)


def test_rows_are_divided_as_the_world_says(configure: Configure) -> None:
    """The last of eight ranks; the numbers follow the world that is given."""
    own = replace(alone(configure()), world=World(7, 8, 7, 8, CPU), parallel=ParallelConfig(tensor=2, pipeline=2))
    assert (own.row_group, own.seed_rank, own.place.index) == ((1, 2), 1, 1)
