"""What is chosen for `auto`, from rows whose numbers are given; no model is computed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from small import make_config

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    Attention,
    Config,
    ParallelConfig,
    PipelineSchedule,
    Strategy,
)
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.search import auto
from llava_fsdp.plan.workload import Samples
from llava_fsdp.runtime.errors import ConfigError, ModelError

SAMPLES = Samples(120, 0.6, 12, 30, "test", 4)
FULL = ActivationCheckpointingConfig(mode=ActivationCheckpointing.full, budget=None)
KEYS = (
    "parallel.context=auto",
    "pack=true",
    "sharding.strategy=auto",
    "tokens_per_micro_batch=128",
    "data.max_length=256",
)
Decide = Callable[..., auto.Decision]


def row(context: int, total: int, fits: bool) -> Any:
    choice = SimpleNamespace(strategy=Strategy.SHARD_GRAD_OP, activation_checkpointing=FULL, zero="zero2")
    step = SimpleNamespace(seconds=1.0)
    return SimpleNamespace(
        choice=choice, tokens=1000 + context, bytes={"total": total}, usable=7e9, step=step, fits=fits
    )


@pytest.fixture
def decided(parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decide:
    """Decides with the gigabytes that each value of `parallel.context` needs, of 50."""
    configs: dict[tuple[str, ...], Config] = {}
    monkeypatch.setattr(auto, "Planner", lambda cfg, *_: SimpleNamespace(cfg=cfg))

    def decide(needs: dict[int, int], ranks: int, *keys: str, continues: bool = False) -> auto.Decision:
        def rows(planner: Any, cfg: Config, world: World) -> list[Any]:
            context = cfg.parallel.num_context
            return [row(context, needs[context] * 10**9, needs[context] <= 50)]

        monkeypatch.setattr(auto, "rows_for", rows)
        cfg = configs.get(keys) or configs.setdefault(keys, make_config(parts, dataset, tmp_path, *KEYS, *keys))
        world = World(0, ranks, 0, ranks, torch.device("cpu"))
        return auto.decide(cfg, world, find_parts(cfg.model), SAMPLES, continues)

    return decide


def test_the_fewest_ranks_a_row_that_fit_are_taken(decided: Decide) -> None:
    """Also where more ranks need fewer bytes. The number of tokens is that of the row, if it is not configured."""
    found = decided({2: 60, 4: 50, 8: 10}, 8)
    assert (found.parallel.num_context, found.tokens, found.strategy) == (4, None, Strategy.SHARD_GRAD_OP)
    assert found.activation_checkpointing == FULL
    assert decided({2: 40, 4: 10, 8: 10}, 8).parallel.num_context == 2
    assert decided({1: 40}, 4, "tokens_per_micro_batch=auto", "parallel.context=1").tokens == 1001


@pytest.mark.parametrize(("needs", "nearest"), [({2: 90, 4: 70, 8: 80}, 4), ({2: 70, 4: 70, 8: 90}, 2)])
def test_what_nearly_fits_is_named(decided: Decide, needs: dict[int, int], nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"zero2, .* full, {1000 + nearest:,} tokens in .*: 70 of 7 GB"):
        decided(needs, 8)


def test_recorded_values_are_kept_where_they_are_possible_and_fit(decided: Decide, tmp_path: Path) -> None:
    """The number of ranks a row must divide the number of ranks. Else all is chosen anew."""
    text = "sharding: {strategy: FULL_SHARD}\ntokens_per_micro_batch: 128\nparallel: {context: 4}\n"
    (tmp_path / "config.yaml").write_text(text)
    needs = {2: 20, 3: 20, 4: 50, 6: 20, 8: 20}

    def found(ranks: int, needs: dict[int, int] = needs, *keys: str, continues: bool = True) -> tuple[int, Strategy]:
        decision = decided(needs, ranks, *keys, continues=continues)
        return decision.parallel.num_context, decision.strategy

    anew = 2, Strategy.SHARD_GRAD_OP
    assert found(8, continues=False) == found(8, needs | {4: 51}) == found(6) == anew
    assert found(8)[0] == 4
    assert found(8, needs, "parallel.context=8")[0] == 8, "a number that is configured counts"
    (tmp_path / "config.yaml").write_text(text.replace("FULL_SHARD", "auto"))
    assert found(8) == anew, "nothing is recorded of a run that ended before it was planned"
    for damaged in ("- 1", ": {", text.replace("FULL_SHARD", "zero9")):
        (tmp_path / "config.yaml").write_text(damaged)
        assert found(8) == anew
    (tmp_path / "config.yaml").unlink()
    assert found(8) == anew


def test_a_kept_value_is_reported_as_such(decided: Decide, tmp_path: Path) -> None:
    recorded = "activation_checkpointing: {mode: budget, budget: 0.3}\nsharding: {strategy: NO_SHARD}\n"
    (tmp_path / "config.yaml").write_text(f"{recorded}tokens_per_micro_batch: 277\n")
    words = "parallel.context=1", "activation_checkpointing.mode=auto", "tokens_per_micro_batch=auto"
    kept = decided({1: 10}, 4, *words, "compile=true", continues=True)
    budget = ActivationCheckpointingConfig(mode=ActivationCheckpointing.budget, budget=0.3)
    assert (kept.activation_checkpointing, kept.tokens, kept.parallel.num_context) == (budget, 277, 1)
    assert kept.reason == "as when this run began"
    (tmp_path / "config.yaml").write_text(recorded)
    assert decided({1: 10}, 4, *words, "compile=true", continues=True).activation_checkpointing == FULL, (
        "no number of tokens is recorded, and one is to be chosen"
    )


def test_the_recorded_layout_of_a_search_is_kept(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """All kinds of parallelism and the schedule; without a search, the number of ranks a row alone."""
    recorded = {
        "sharding": {"strategy": "FULL_SHARD"},
        "activation_checkpointing": {"mode": "full", "budget": None},
        "tokens_per_micro_batch": 256,
        "parallel": {"context": 3, "tensor": 2, "expert": 1, "pipeline": 2, "schedule": "interleaved"},
    }
    modes = "activation_checkpointing.mode=auto", "tokens_per_micro_batch=auto"
    searching = make_config(parts, dataset, tmp_path, *KEYS, *modes, "parallel.context=1", "parallel.search=true")
    sharing = make_config(parts, dataset, tmp_path, *KEYS, "sharding.strategy=NO_SHARD", "parallel.tensor=4")

    def found(cfg: Config, **changes: Any) -> auto.Decision | None:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded | changes))
        return auto.recorded_decision(cfg)

    own = found(searching)
    assert own is not None
    interleaved = PipelineSchedule.interleaved
    assert own.parallel == ParallelConfig(context=3, tensor=2, pipeline=2, schedule=interleaved)
    assert (own.strategy, own.activation_checkpointing, own.tokens) == (Strategy.FULL_SHARD, FULL, 256)
    plain = found(searching, parallel={})
    assert plain is not None and plain.parallel == ParallelConfig()
    own = found(sharing)
    assert own is not None and own.parallel == replace(sharing.parallel, context=3)
    assert own.strategy is Strategy.NO_SHARD and own.activation_checkpointing == sharing.activation_checkpointing
    for damaged in (
        {"parallel": {"tensor": "two"}}, {"parallel": {"context": "auto"}}, {"parallel": {"schedule": "zigzag"}},
        {"tokens_per_micro_batch": "auto"}, {"activation_checkpointing": {"mode": "auto"}},
    ):  # fmt: skip
        assert found(searching, **damaged) is None


def test_which_kinds_of_parallelism_were_chosen() -> None:
    shared = ParallelConfig(context=2)
    piped = ParallelConfig(context=2, tensor=4, pipeline=2, schedule=PipelineSchedule.interleaved)
    names = ["parallel.context=2", "parallel.tensor=4", "parallel.expert=1", "parallel.pipeline=2"]
    assert auto.chosen_overrides(ParallelConfig(search=True), piped) == [*names, "parallel.schedule=interleaved"]
    assert auto.chosen_overrides(ParallelConfig(search=True), replace(shared, tensor=4)) == [
        *names[:3], "parallel.pipeline=1",
    ]  # fmt: skip
    assert auto.chosen_overrides(replace(piped, context="auto"), piped) == names[:1]
    assert auto.chosen_overrides(piped, piped) == []


def test_every_chosen_value_is_printed(parts: Path, dataset: Path, tmp_path: Path) -> None:
    words = "activation_checkpointing.mode=auto", "tokens_per_micro_batch=auto"
    cfg = make_config(parts, dataset, tmp_path, *KEYS, *words)
    chosen = auto.Decision(Strategy.HYBRID_SHARD, FULL, 640, replace(cfg.parallel, context=4), "why")
    start = "auto: sharding=hybrid, parallel.context=4, activation_checkpointing=full, tokens_per_micro_batch="
    assert chosen.summary(cfg) == f"{start}640: why"
    assert replace(chosen, tokens=None).summary(cfg) == f"{start}null: why"
    applied = chosen.applied(cfg)
    assert (applied.parallel.num_context, applied.tokens_per_micro_batch) == (4, 640)
    plain = make_config(parts, dataset, tmp_path, "sharding.strategy=auto", "tokens_per_micro_batch=300")
    assert replace(chosen, parallel=plain.parallel).summary(plain) == "auto: sharding=hybrid: why"
    kept = replace(chosen, parallel=plain.parallel).applied(plain)
    assert kept.tokens_per_micro_batch == 300 and kept.sharding.strategy is Strategy.HYBRID_SHARD
    sized = make_config(parts, dataset, tmp_path, "sharding.strategy=HYBRID_SHARD", "sharding.shard_size=2")
    assert chosen.applied(replace(sized, pack=True)).sharding.shard_size == 2
    other = replace(chosen, strategy=Strategy.FULL_SHARD)
    assert other.applied(replace(sized, pack=True)).sharding.shard_size is None


def test_a_model_that_cannot_be_planned_gets_what_needs_little(
    decided: Decide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the planner itself ends the run."""

    def fails(cfg: Config, *_: Any) -> None:
        raise RuntimeError("no meta\nkernel")

    monkeypatch.setattr(auto, "Planner", fails)
    found = decided({}, 1, "parallel.context=1", "activation_checkpointing.mode=auto", "tokens_per_micro_batch=auto")
    assert found == auto.Decision(
        Strategy.FULL_SHARD,
        FULL,
        None,
        ParallelConfig(),
        "the planner cannot compute this model (RuntimeError: no meta kernel)",
    )
    assert decided({}, 8).parallel == ParallelConfig(context=8), "the largest number of ranks a row"
    searched = decided({}, 1, "parallel.context=1", "tokens_per_micro_batch=256", "parallel.search=true")
    assert searched.parallel == ParallelConfig()
    own = decided({}, 1, "parallel.context=1", "tokens_per_micro_batch=256", "sharding.strategy=SHARD_OPTIMIZER")
    assert own.strategy is Strategy.SHARD_OPTIMIZER
    assert own.activation_checkpointing.mode is ActivationCheckpointing.none

    def refuses(cfg: Config, *_: Any) -> None:
        raise ModelError("damaged")

    monkeypatch.setattr(auto, "Planner", refuses)
    with pytest.raises(ModelError, match="damaged"):
        decided({}, 1, "parallel.context=1", "tokens_per_micro_batch=256")


def test_what_is_tried_for_auto(parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes but `budget`, all strategies that differ; rows no longer than micro_batch_size samples."""
    monkeypatch.setattr(auto, "plan_rows", lambda planner, choices, ranks, splits, show: (choices, ranks, splits))
    splits = [[SimpleNamespace(tokens=tokens, context=1)] for tokens in (700, 600, 512, 400)]
    monkeypatch.setattr(auto, "splits_to_try", lambda planner, cfg, size, is_free: splits if is_free else splits[:1])
    kernel = SimpleNamespace(attention=None)
    planner = cast(Any, SimpleNamespace(machine=SimpleNamespace(device="cuda", has_compiler=True), kernel=kernel))
    world = World(0, 8, 0, 4, torch.device("cuda"))

    def tried(*words: str) -> Any:
        return auto.rows_for(planner, make_config(parts, dataset, tmp_path, *words), world)

    words = "sharding.strategy=auto", "activation_checkpointing.mode=auto", "tokens_per_micro_batch=auto"
    choices, ranks, lengths = tried(*words, "micro_batch_size=2", "data.max_length=256")
    assert (ranks.world_size, ranks.shard_size, ranks.node_size) == (8, 4, 4)
    assert [split[0].tokens for split in lengths] == [512, 400]
    assert {c.activation_checkpointing.mode.value for c in choices} == {"none", "selective", "full", "offload"}
    assert {c.zero for c in choices} == {"zero0", "zero1", "zero2", "zero3", "hybrid", "hybrid2"}
    assert [split[0].tokens for split in tried(*words, "micro_batch_size=1")[2]] == [400], "the shortest, at least"
    choices, ranks, lengths = tried(
        "sharding.strategy=HYBRID_SHARD", "sharding.shard_size=2", "tokens_per_micro_batch=300"
    )
    assert [(c.zero, c.activation_checkpointing.mode.value) for c in choices] == [("hybrid", "none")]
    assert (ranks.shard_size, len(lengths)) == (2, 1)
    assert tried("parallel.tensor=2")[1].shard_size == 2, "two ranks of each node hold the same parts of layers"
    splits[:] = [[SimpleNamespace(tokens=tokens, context=2)] for tokens in (300, 256, 200)]
    shared = *words, "pack=true", "micro_batch_size=2", "data.max_length=256", "parallel.context=2"
    assert [split[0].tokens for split in tried(*shared)[2]] == [256, 200], "of a row, all its ranks count"
    kernel.attention = Attention.sdpa
    for compiled, modes in (
        ("compile=false", {"none", "selective", "full", "offload"}),
        ("compile=true", {"none", "full", "offload"}),
    ):
        choices, _, _ = tried(*words, compiled)
        assert {c.activation_checkpointing.mode.value for c in choices} == modes
    choices, _, _ = tried(*words, "offload=optimizer")
    assert {(c.zero, c.offload.value) for c in choices} == {
        (zero, "optimizer") for zero in ("zero1", "zero2", "zero3", "hybrid", "hybrid2")
    }


def test_packing_that_a_model_refuses_is_left_out(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what needs packed rows: a number of ranks a row that was to be chosen is 1; one that is set is an error."""
    cfg = make_config(parts, dataset, tmp_path, "pack=auto", "parallel.context=auto")
    model = find_parts(cfg.model)
    settled, why = auto.settle_packing(cfg, model)
    assert settled.pack is True and settled.parallel == cfg.parallel and why is None
    monkeypatch.setattr(auto, "why_not_packed", lambda _: "it mixes samples")
    settled, why = auto.settle_packing(cfg, model)
    assert (settled.pack, settled.parallel.context) == (False, 1)
    assert why == "pack=false, rows are padded: it mixes samples"
    shared = make_config(parts, dataset, tmp_path, "pack=auto", "parallel.context=2")
    with pytest.raises(ConfigError, match="pack=auto: rows must be padded, as it mixes samples; "):
        auto.settle_packing(shared, model)
    assert auto.settle_packing(replace(cfg, pack=True), model) == (replace(cfg, pack=True), None)
