"""How many blocks are gathered together, and how far ahead, changes when bytes travel and no bit of a training."""

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from small import Configure
from steps import begin
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import Config
from llava_fsdp.distributed.comm_volume import CollectiveBytes
from llava_fsdp.distributed.local_shards import local
from llava_fsdp.distributed.mesh import World, make_meshes
from llava_fsdp.distributed.parallelize import describe_units, useless_settings
from llava_fsdp.distributed.zero import SHARD_PLANS
from llava_fsdp.model.llava import Llava
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step

Trace = tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, dict[str, int]], list[list[str]]]
TOWER = "model.train=[projector,language,vision]"
WAYS = [
    [],
    ["sharding.prefetch=2"],
    ["sharding.blocks_per_unit=2"],
    ["sharding.blocks_per_unit=2", "sharding.prefetch=1"],
]


def traces(world: World, configs: list[Config]) -> list[Trace]:
    """Losses and norms, weights, bytes of collectives, and the blocks of each unit."""
    found = []
    for cfg in configs:
        state, plan = begin(world, cfg)
        with CollectiveBytes() as counter:
            results = [train_step(state, step, plan, cfg, 0.0) for step in agreed_steps(state.loader)]
        weights = {name: local(p).clone() for name, p in state.masters.named.items()}
        found.append(([(r.loss, r.grad_norm) for r in results], weights, counter.moved, units(state.model)))
    return found


def units(model: torch.nn.Module) -> list[list[str]]:
    """Names of the modules of each unit."""
    together: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            together.setdefault(id(module._get_fsdp_state()), []).append(name)
    return list(together.values())


def told(world: World, configs: list[Config]) -> list[list[str]]:
    """What is said of settings that do nothing."""
    found = []
    for cfg in configs:
        plan = SHARD_PLANS[cfg.sharding.strategy]
        meshes = make_meshes(world, plan, cfg)
        model = train.build_state(cfg, world, plan, meshes).model
        assert isinstance(model, Llava)
        shards = meshes.states["shard"].size() if meshes.states is not None else None
        found.append(useless_settings(cfg.sharding, model.blocks(), shards))
    return found


MANY = ["sharding.blocks_per_unit=9", "sharding.prefetch=9"]


@pytest.mark.slow
@pytest.mark.ranks
def test_settings_that_do_nothing_are_said(configure: Configure, pools: dict[int, RankPool]) -> None:
    """Three blocks in the language model and three in a tower that trains."""
    ways = [
        ["sharding=zero3", "sharding.prefetch=2"], ["sharding=zero3", "sharding.prefetch=3"],
        ["sharding=zero3", *MANY, TOWER], ["sharding=zero0", *MANY], ["sharding=zero3", "sharding.blocks_per_unit=3"],
    ]  # fmt: skip
    for found in pools[2].run(told, [configure(*way) for way in ways]):
        assert found == [
            [],
            ["sharding.prefetch=3 is as 2: blocks that are sharded make 3 units"],
            ["sharding.blocks_per_unit=9 is as 3: no stack of the model has more blocks",
             "sharding.prefetch=9 is as 1: blocks that are sharded make 2 units"],
            ["sharding.blocks_per_unit=9 is as 3: no stack of the model has more blocks",
             "sharding.prefetch=9 does nothing: every rank has whole weights"],
            [],
        ]  # fmt: skip
    alone = told(single_world(), [configure(*MANY)])
    assert [said.partition(" does nothing on one rank")[0] for said in alone[0]] == MANY


def test_what_is_set_is_on_the_screen(configure: Configure) -> None:
    assert describe_units(configure().sharding) == ""
    cfg = configure(*MANY)
    assert describe_units(cfg.sharding) == "9 blocks gathered together, 9 gathers begun ahead"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("row", "activation_checkpointing"), [("zero3", "full"), pytest.param("zero2", "none", marks=pytest.mark.slow)]
)
def test_units_change_no_bit(
    row: str, activation_checkpointing: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    """Losses, gradient norms, weights and bytes sent, in bf16 beside fp32 norms, the tower training too."""
    common = [
        f"sharding={row}",
        f"activation_checkpointing={activation_checkpointing}",
        "precision=bf16",
        TOWER,
        "micro_batch_size=3",
        "max_steps=2",
    ]
    configs = [configure(*common, *way) for way in WAYS]
    for plain, *others in pools[2].run(traces, configs):
        assert plain[0][0] != plain[0][1]
        for other in others:
            assert other[0] == plain[0]
            assert all(torch.equal(other[1][n], plain[1][n]) for n in plain[1])
            assert all(other[2][kind]["bytes"] == plain[2][kind]["bytes"] for kind in plain[2])
        language = [[n for n in unit if "language_model.layers." in n] for unit in others[1][3]]
        assert sorted(map(len, filter(None, language))) == [1, 2]
        assert others[1][2]["all_gather"]["calls"] < plain[2]["all_gather"]["calls"]
