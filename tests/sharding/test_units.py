"""How many blocks are gathered together, and how far ahead, changes when bytes travel and no bit of a training."""

from pathlib import Path

import pytest
import torch
from harness import RankPool
from small import make_config
from torch.distributed.fsdp import FSDPModule

from llava_fsdp import train
from llava_fsdp.config import Config
from llava_fsdp.loop import train_step
from llava_fsdp.sharding.mesh import World, make_mesh
from llava_fsdp.sharding.shards import local
from llava_fsdp.sharding.traffic import CollectiveBytes
from llava_fsdp.sharding.zero import SHARD_PLANS

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
        plan = SHARD_PLANS[cfg.sharding.strategy]
        state = train.build_state(cfg, world, plan, make_mesh(world, plan, cfg))
        state.model.train()
        with CollectiveBytes() as counter:
            results = [train_step(state, step, plan, cfg, 0.0) for step in state.loader.from_step(0)]
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


@pytest.mark.ranks
@pytest.mark.parametrize(("row", "recompute"), [("zero3", "full"), ("zero2", "none")])
def test_units_change_no_bit(
    row: str, recompute: str, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Losses, gradient norms, weights and bytes sent, in bf16 beside fp32 norms, the tower training too."""
    common = [f"sharding={row}", f"recompute={recompute}", "precision=bf16", TOWER, "micro_batch_size=3", "max_steps=2"]
    configs = [make_config(parts, dataset, tmp_path, *common, *way) for way in WAYS]
    for plain, *others in pools[2].run(traces, configs):
        assert plain[0][0] != plain[0][1]
        for other in others:
            assert other[0] == plain[0]
            assert all(torch.equal(other[1][n], plain[1][n]) for n in plain[1])
            assert all(other[2][kind]["bytes"] == plain[2][kind]["bytes"] for kind in plain[2])
        language = [[n for n in unit if "language_model.layers." in n] for unit in others[1][3]]
        assert sorted(map(len, filter(None, language))) == [1, 2]
        assert others[1][2]["all_gather"]["calls"] < plain[2]["all_gather"]["calls"]
