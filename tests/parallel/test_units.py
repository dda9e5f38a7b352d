"""How many blocks are gathered together, and how far ahead, changes when bytes travel and no bit of a training."""

from pathlib import Path

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from small import Configure, changed_parts
from steps import begin
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import Config, ShardingConfig, Strategy
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.parallel.fsdp.unit_settings import count_reduced, describe_units, useless_settings
from llava_fsdp.parallel.fsdp.units import block_names, gather_ahead, reduce_at_once, units_of_blocks
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.comm_volume import CollectiveBytes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, ShardPlan, begin_micro_batch
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step

Trace = tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, dict[str, int]], list[list[str]]]
TOWER = "model.train=[projector,language,vision]"
WAYS = [
    [],
    ["sharding.prefetch=2"],
    ["sharding.blocks_per_unit=2"],
    ["sharding.blocks_per_unit=2", "sharding.prefetch=1"],
    ["sharding.reductions=2"],
    ["sharding.reductions=3"],
]


def traces(world: World, configs: list[Config]) -> list[Trace]:
    """Losses and norms, weights, bytes of collectives, and the blocks of each unit."""
    found = []
    for cfg in configs:
        state = begin(world, cfg)
        with CollectiveBytes() as counter:
            results = [train_step(state, step, cfg, 0.0) for step in agreed_steps(state.loader)]
        weights = {name: local(p).clone() for name, p in state.masters.named.items()}
        assert limits(state.model) == {cfg.sharding.reductions}
        found.append(([(r.loss, r.grad_norm) for r in results], weights, counter.moved, units(state.model)))
    return found


def units(model: torch.nn.Module) -> list[list[str]]:
    """Names of the modules of each unit."""
    together: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            together.setdefault(id(module._get_fsdp_state()), []).append(name)
    return list(together.values())


def limits(model: torch.nn.Module) -> set[int]:
    """How many reduce-scatters FSDP keeps the inputs of, as it resolved it for the units together."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return {state._comm_ctx.reduce_scatter_max_input_buffers for state in states}


def reduced_before_blocks(world: World, configs: list[Config]) -> list[tuple[list[list[str]], set[str]]]:
    """The units of each model, and which weights have a reduced gradient when the last block's backward pass begins."""
    found = []
    for cfg in configs:
        state = begin(world, cfg)
        reduced: list[set[str]] = []

        def note(block: torch.nn.Module, args: object, output: torch.Tensor) -> None:
            named = state.masters.named  # noqa: B023  used before the next configuration
            output.register_hook(lambda _: reduced.append({n for n, p in named.items() if p.grad is not None}))  # noqa: B023

        state.model.blocks()[0][-1].register_forward_hook(note)
        (micro, *_) = next(iter(agreed_steps(state.loader))).micro_batches
        begin_micro_batch(state.model, state.parallelism.plan, is_last=True)
        state.model(**state.loader.to_device(micro).inputs).backward()
        found.append((units(state.model), reduced[0]))
    return found


@pytest.mark.ranks
def test_the_output_layer_is_reduced_first(
    configure: Configure, pools: dict[int, RankPool], parts: Path, tmp_path: Path
) -> None:
    """Unless it is frozen, or has the weight of the embeddings."""
    tied = changed_parts(parts, tmp_path / "tied", {"tie_word_embeddings": True})
    zero3 = "sharding=zero3", "pack=true", "tokens_per_micro_batch=256"
    configs = [
        configure(*zero3), configure(*zero3, "model.train=[projector]"),
        configure("sharding=zero2", *zero3[1:], "model.train=[projector]"),
        configure(*zero3, f"model.language={tied / 'language'}"),
    ]  # fmt: skip
    for found in pools[2].run(reduced_before_blocks, configs):
        assert [(["lm_head"] in of_model, reduced) for of_model, reduced in found] == [
            (True, {"lm_head.weight"}), (True, set()), (False, set()), (False, set()),
        ]  # fmt: skip


def told(world: World, configs: list[Config]) -> list[list[str]]:
    """What is said of settings that do nothing."""
    found = []
    for cfg in configs:
        parallelism = Parallelism.of(cfg, world)
        model = train.build_state(cfg, parallelism).model
        assert isinstance(model, Llava)
        found.append(useless_settings(cfg.sharding, model.blocks(), parallelism.shards, count_reduced(model)))
    return found


MANY = ["sharding.blocks_per_unit=9", "sharding.reductions=99", "sharding.prefetch=9"]


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
             "sharding.reductions=99 is as 4: 4 units have gradients",
             "sharding.prefetch=9 is as 1: blocks that are sharded make 2 units"],
            ["sharding.blocks_per_unit=9 is as 3: no stack of the model has more blocks",
             "sharding.reductions=99 takes memory and does nothing else: every rank has whole weights, and the "
             "backward pass waits for no reduction",
             "sharding.prefetch=9 does nothing: every rank has whole weights"],
            [],
        ]  # fmt: skip
    alone = told(single_world(), [configure(*MANY)])
    assert [said.partition(" does nothing on one rank")[0] for said in alone[0]] == MANY


def test_what_is_set_is_on_the_screen(configure: Configure) -> None:
    assert describe_units(configure().sharding) == ""
    cfg = configure(*MANY)
    assert describe_units(cfg.sharding) == (
        "9 blocks gathered together, 9 gathers begun ahead, gradients of 99 units reduced at once"
    )


class Unit(FSDPModule, torch.nn.Linear):
    """A module that notes what FSDP is told of it, as `fully_shard` would have made it."""

    def __new__(cls, *args: int) -> "Unit":
        return object.__new__(cls)

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.told: dict[str, object] = {}

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        self.told["forward"] = modules

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        self.told["backward"] = modules

    def set_requires_gradient_sync(self, value: bool, *, recurse: bool = True) -> None:
        self.told["reduces"] = value

    def set_requires_all_reduce(self, value: bool, *, recurse: bool = True) -> None:
        self.told["reduces over replicas"] = value

    def set_reshard_after_backward(self, value: bool, *, recurse: bool = True) -> None:
        self.told["frees"] = value


def stacks(*sizes: int) -> list[torch.nn.ModuleList]:
    return [torch.nn.ModuleList(Unit() for _ in range(size)) for size in sizes]


@pytest.mark.parametrize(
    ("size", "ahead", "shards", "expected"),
    [
        (1, None, None, []),
        (2, None, None, ["sharding.blocks_per_unit=2 does nothing on one rank"]),
        (3, None, 4, []),
        (4, None, 4, ["sharding.blocks_per_unit=4 is as 3: "]),
        (1, 4, 4, []),
        (1, 5, 4, ["sharding.prefetch=5 is as 4: blocks that are sharded make 5 units"]),
        (2, 2, 4, []),
        (2, 3, 4, ["sharding.prefetch=3 is as 2: blocks that are sharded make 3 units"]),
        (1, 1, 2, []),
        (1, 1, 1, ["sharding.prefetch=1 does nothing: every rank has whole weights"]),
        (9, 1, None, ["sharding.blocks_per_unit=9 does nothing on one rank",
                      "sharding.prefetch=1 does nothing on one rank"]),
    ],
)  # fmt: skip
def test_settings_without_effect(size: int, ahead: int | None, shards: int | None, expected: list[str]) -> None:
    """A language model of three blocks, and a tower of two."""
    sharding = ShardingConfig(strategy=Strategy.FULL_SHARD, shard_size=None, prefetch=ahead, blocks_per_unit=size)
    found = useless_settings(sharding, stacks(3, 2), shards, 5)
    assert len(found) == len(expected)
    assert all(said.startswith(begin) for said, begin in zip(found, expected, strict=True)), found


@pytest.mark.parametrize(
    ("at_once", "shards", "reduced", "expected"),
    [
        (1, 4, 5, ""), (5, 4, 5, ""), (6, 4, 5, "sharding.reductions=6 is as 5: 5 units have gradients"),
        (2, 4, 0, "sharding.reductions=2 is as 1: 0 units"), (1, 4, 0, ""), (1, None, 0, ""), (1, 1, 5, ""),
        (2, None, 0, "sharding.reductions=2 does nothing on one rank"),
        (2, 1, 5, "sharding.reductions=2 takes memory and does nothing else: every rank has whole weights"),
    ],
)  # fmt: skip
def test_reductions_without_effect(at_once: int, shards: int | None, reduced: int, expected: str) -> None:
    sharding = ShardingConfig(strategy=Strategy.FULL_SHARD, shard_size=None, reductions=at_once)
    found = useless_settings(sharding, stacks(3, 2), shards, reduced)
    assert len(found) == bool(expected) and all(said.startswith(expected) for said in found), found


def test_an_older_torch_is_refused_but_for_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_max_input_buffers", raising=False)
    reduce_at_once(made := Unit(), 1)
    assert made.told == {}
    with pytest.raises(ConfigError, match=r"^sharding\.reductions=3 needs torch 2\.13 .*: set it to 1, or install"):
        reduce_at_once(made, 3)


def test_a_single_unit_has_none_to_gather_ahead() -> None:
    """Blocks that are not sharded, as frozen ones, make no unit."""
    sharding = ShardingConfig(strategy=Strategy.FULL_SHARD, shard_size=None, prefetch=1)
    made = [*stacks(1), torch.nn.ModuleList([torch.nn.Linear(1, 1)])]
    (said,) = useless_settings(sharding, made, 2, 1)
    assert said.startswith("sharding.prefetch=1 does nothing: fewer than two units")
    sharding.blocks_per_unit = 2
    partly = torch.nn.ModuleList([torch.nn.Linear(1, 1), Unit()])
    assert useless_settings(sharding, [partly, *stacks(1)], 2, 2) == []


def test_the_next_units_are_gathered_ahead() -> None:
    """Forward the two behind a unit, and backward the two before it, the nearest first; none of modules without
    shards."""
    a, b, c, d = made = [Unit() for _ in range(4)]
    gather_ahead([made[0], torch.nn.Linear(1, 1), *made[1:]], 2)
    assert [unit.told["forward"] for unit in made] == [[b, c], [c, d], [d], []]
    assert [unit.told["backward"] for unit in made] == [[], [a], [b, a], [c, b]]


def test_a_unit_has_the_name_of_its_first_block() -> None:
    model = torch.nn.ModuleDict({"language": stacks(3)[0], "tower": stacks(2)[0]})
    own = [model["language"], model["tower"]]
    names = {"language.0", "language.1", "language.2", "tower.0", "tower.1"}
    assert {*block_names(model, own).values()} == names  # type: ignore[arg-type]
    assert units_of_blocks(model, own, 2) == {  # type: ignore[arg-type]
        "language.0": "language.0", "language.1": "language.0", "language.2": "language.2",
        "tower.0": "tower.0", "tower.1": "tower.0",
    }  # fmt: skip


@pytest.mark.parametrize("plan", SHARD_PLANS.values(), ids=[plan.zero for plan in SHARD_PLANS.values()])
def test_micro_batches_before_the_last_send_and_free_what_the_table_says(plan: ShardPlan) -> None:
    waits = {
        "zero0": {"reduces", "frees"}, "zero1": {"reduces", "frees"}, "zero2": set(), "zero3": set(),
        "hybrid": {"reduces over replicas"}, "hybrid2": {"reduces over replicas"},
    }  # fmt: skip
    for is_last in (False, True):
        begin_micro_batch(unit := Unit(), plan, is_last)
        assert unit.told == dict.fromkeys(waits[plan.zero], is_last)
    begin_micro_batch(torch.nn.Linear(1, 1), plan, True)


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
