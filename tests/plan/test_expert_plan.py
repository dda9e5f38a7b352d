"""Memory and communication of ranks that share the experts of a mixture, planned and measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from live import measure_step
from mixtures import mixture_parts
from small import changed_parts, make_config
from tiers import slow_after

from llava_fsdp.config import ActivationCheckpointing, Config
from llava_fsdp.data.synthetic import fullest
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.plan.memory import fsdp_units
from llava_fsdp.plan.memory.fsdp_units import unit_of
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import Choice, peak
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.search import checkpointing_modes, ways_to_share_experts
from llava_fsdp.plan.time.hardware import machine_named
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.setup.build_model import build_model, shape_of
from llava_fsdp.train.setup.dry_run import measure, planned_memory_of
from llava_fsdp.train.state import TrainState

CLOSE = 0.05
"""Share of the most bytes alive."""
CASES = [("zero3", 2, "none"), ("zero3", 2, "full"), ("zero2", 2, "none"), ("zero0", 4, "full"), ("zero1", 2, "none"),
         ("zero3", 4, "full"), ("hybrid", 2, "full"), ("hybrid2", 4, "none")]  # fmt: skip
FEWER = [("zero3", 2, "full"), ("zero3", 1, "none"), ("zero2", 2, "none"), ("zero1", 1, "full"), ("hybrid", 1, "none"),
         ("hybrid2", 1, "full")]  # fmt: skip
"""Cases with fewer experts than ranks that shard them."""


def configure(
    strategy: str,
    expert: int,
    mode: str,
    parts: Path,
    dataset: Path,
    folder: Path,
    *more: str,
    kind: str = "mixtral",
    experts: int = 8,
) -> Config:
    """A configuration of a mixture of 8 experts, or of two, which are cut by columns if four ranks shard them."""
    values = (
        f"sharding={strategy}", f"parallel.expert={expert}", f"activation_checkpointing={mode}", "pack=true",
        "global_batch_size=12", "tokens_per_micro_batch=256", *more,
    )  # fmt: skip
    values += (f"sharding.shard_size={2 if experts > 2 else 4}",) if strategy.startswith("hybrid") else ()
    width = {} if experts > 2 else {"width": 128}
    return make_config(mixture_parts(kind, parts, folder / "parts", experts, **width), dataset, folder / "run", *values)


@pytest.mark.parametrize(
    ("strategy", "expert", "mode", "experts"),
    [*slow_after(1, [(*case, 8) for case in CASES]), *slow_after(1, [(*case, 2) for case in FEWER])],
)
@pytest.mark.parametrize("stage", slow_after(1, ["model.train=[projector,language]", "model.train=[projector]"]))
def test_a_dry_run_sends_and_holds_what_is_planned(
    strategy: str, expert: int, mode: str, experts: int, stage: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Bytes at rest, of all-gathers, reduce-scatters and all-reduces, and of exchanges of tokens."""
    keys = ("dry_run=8" if experts == 2 else "dry_run=4", "format=json", stage)
    cfg = configure(strategy, expert, mode, parts, dataset, tmp_path, *keys, experts=experts)
    with distributed(cfg) as world:
        report = measure(cfg, world)
        contents = fullest(cfg, shape_of(build_model(cfg, find_parts(cfg.model), world.device)), None)
        planned = planned_memory_of(cfg, world, contents)
    assert all(own["measured"] == own["planned"] for own in report["bytes"].values())
    sent = {kind: own["sent"] for kind, own in report["collectives"].items()}
    assert sent.get("all_to_all", 0) == planned.sent.experts
    if expert > 1:
        assert report["collectives"]["all_to_all"]["calls"] == planned.sent.expert_exchanges
    of_weights = [report["collectives"][kind] for kind in ("all_gather", "reduce_scatter")]
    assert sum(own["sent"] for own in of_weights) == pytest.approx(planned.sent.sharded, rel=1e-4)
    assert sum(own["calls"] for own in of_weights) == planned.sent.gathers
    few = 4000  # losses, norms and counts
    assert planned.sent.replicated <= sent["all_reduce"] <= planned.sent.replicated + few


def measure_equal_loads(world: World, cfg: Config) -> tuple[int, list[MicroBatchSizes]]:
    """`measure_step` with routers that send token t to the experts t and t + 4 of 8, modulo 8, or to both of two."""
    build = train.build_state

    def choose(router: torch.nn.Module, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        places, experts = torch.arange(len(outputs[-1]))[:, None], outputs[0].shape[-1]
        return (*outputs[:-1], (places + torch.tensor([0, experts // 2])) % experts)

    def build_equal(*args: Any) -> TrainState:
        state = build(*args)
        assert state.routers is not None
        for router in state.routers.routers:
            router.module.register_forward_hook(choose)
        return state

    train.build_state = build_equal
    try:
        return measure_step(world, cfg)
    finally:
        train.build_state = build


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "expert", "mode", "experts"), [*((*case, 8) for case in CASES), *((*case, 2) for case in FEWER)]
)
def test_the_worst_moment_is_that_of_real_steps(
    strategy: str, expert: int, mode: str, experts: int, wide_parts: Path, dataset: Path, pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Of steps in which all experts have the same load."""
    cfg = configure(strategy, expert, mode, wide_parts, dataset, tmp_path, "precision=fp32", experts=experts)
    for rank, (most, micros) in enumerate(pools[4].run(measure_equal_loads, cfg)):
        planned = peak(cfg, 4, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.peak_moment)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "expert"), [("zero2", 1), ("zero3", 2)])
def test_the_worst_moment_of_large_experts(
    strategy: str, expert: int, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Their weights are larger than the activations of so few tokens, so that FSDP's copies of weights and gradients
    that are sharded along dimension 1 count at the worst moment."""
    model = changed_parts(
        mixture_parts("mixtral", parts, tmp_path / "parts", 2, 512), tmp_path / "large", {"hidden_size": 1024}
    )
    cfg = make_config(
        model, dataset, tmp_path / "run", f"sharding={strategy}", f"parallel.expert={expert}", "pack=true",
        "activation_checkpointing=full", "global_batch_size=4", "tokens_per_micro_batch=64", "data.max_length=64",
        "data.bad_records=skip", "data.max_bad_records=20%",
    )  # fmt: skip
    ranks = pools[4].run(measure_equal_loads, cfg)
    found = [(peak(cfg, 4, "cpu", micros, rank).bytes["total"], most) for rank, (most, micros) in enumerate(ranks)]
    assert [planned for planned, _ in found] == pytest.approx([most for _, most in found], rel=4e-3)
    monkeypatch.setattr(
        fsdp_units, "unit_of",
        lambda *args: replace(own := unit_of(*args), second_copy=0, is_copied=(False,) * len(own.is_copied)),
    )  # fmt: skip
    assert peak(cfg, 4, "cpu", ranks[0][1], 0).bytes["total"] < (1 - 2e-3) * ranks[0][0]


def test_sharing_experts_saves_their_part(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """At rest, under a strategy that shards nothing: half of the experts."""
    cfg = configure("zero0", 2, "none", parts, dataset, tmp_path)
    alone = replace(cfg, parallel=replace(cfg.parallel, expert=1))
    shared, whole = peak(cfg, 2, "cpu"), peak(alone, 2, "cpu")
    assert shared.sent.experts > 0 == whole.sent.experts
    assert whole.at_rest["optimizer"] - shared.at_rest["optimizer"] == 3 * 8 * 3 * 40 * 56 * 8 // 2


def test_ways_under_which_ranks_can_share_experts(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Four ranks do not share experts evenly where six shard the other weights."""
    cfg = configure("zero2", 4, "none", parts, dataset, tmp_path)
    ways = [Choice(strategy, cfg.activation_checkpointing, cfg.offload.mode) for strategy in SHARD_PLANS]
    names = [choice.zero for choice in ways_to_share_experts(cfg, ways, RankCounts(12, 6, 6))]
    assert names == ["zero0", "zero1", "zero2", "zero3"]
    assert len(ways_to_share_experts(cfg, ways, RankCounts(16, 8, 8))) == len(ways)
    with pytest.raises(ConfigError):
        ways_to_share_experts(cfg, ways[-1:], RankCounts(12, 6, 6))
    modes = checkpointing_modes(cfg, machine_named("h100", 8))
    assert all(mode.mode is not ActivationCheckpointing.budget for mode in modes)
