"""The search among layouts of ranks against trying everything, and what becomes of its choice."""

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mixtures import mixture_parts
from small import changed_parts, make_config
from test_plan import of_parts, printed
from tiers import slow_after

from llava_fsdp.config import ActivationCheckpointing, Config, ParallelConfig
from llava_fsdp.config.keys.enums import PipelineSchedule
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import Planner
from llava_fsdp.plan.search import auto
from llava_fsdp.plan.search.auto import decide, ways_for
from llava_fsdp.plan.search.layouts import (
    NEAR,
    Candidate,
    LayoutChoices,
    Planned,
    Search,
    Searcher,
    candidates,
    fastest,
    fastest_that_fits,
    layouts,
    why_not,
)
from llava_fsdp.plan.time.hardware import Machine, machine_named
from llava_fsdp.plan.workload import Samples
from llava_fsdp.runtime.errors import ConfigError

SAMPLES = Samples(120, 0.6, 12, 30, "test", 4)
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 128}
SIZES |= {"intermediate_size": 312, "num_hidden_layers": 4, "vocab_size": 611, "pad_token_id": 2}
WORDS = (
    "pack=true", "sharding.strategy=auto", "activation_checkpointing.mode=auto", "tokens_per_micro_batch=auto",
    "global_batch_size=64", "micro_batch_size=8", "data.max_length=256",
)  # fmt: skip


@pytest.fixture(scope="module")
def dense(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_parts(parts, tmp_path_factory.mktemp("dense"), SIZES)


@pytest.fixture(scope="module")
def mixture(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_parts("qwen3_moe", parts, tmp_path_factory.mktemp("mixture") / "parts", 4)


def machine_of(megabytes: float, ranks: int, network: float) -> Machine:
    found = machine_named("h100", ranks)
    assert found.gpu is not None
    return replace(found, memory=int(megabytes * 1e6), gpu=replace(found.gpu, network=network))


def searcher_of(machine: Machine, world: World) -> Searcher[Config]:
    return Searcher(lambda cfg: Planner(cfg, machine, SAMPLES), lambda planner, cfg: ways_for(planner, cfg, world))


@pytest.mark.slow
@pytest.mark.parametrize(("is_mixture", "ranks", "node", "megabytes", "network"), [
    (False, 4, 4, 10**4, 5e10), (False, 4, 4, 7500, 5e10), (False, 8, 4, 6600, 5e10), (False, 8, 2, 6600, 1e6),
    (True, 4, 4, 10**4, 5e10), (True, 4, 2, 6500, 1e7), (False, 2, 2, 6550, 5e10), (False, 16, 4, 6520, 1e7),
])  # fmt: skip
def test_a_search_finds_what_trying_everything_finds(
    is_mixture: bool, ranks: int, node: int, megabytes: float, network: float, dense: Path, mixture: Path,
    dataset: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """The fastest way to train that fits, and of those that are about as fast one with the fewest kinds."""
    cfg = make_config(mixture if is_mixture else dense, dataset, tmp_path, *WORDS, "parallel.search=true")
    machine, world = machine_of(megabytes, ranks, network), World(0, ranks, 0, node, torch.device("cuda"))
    found = searcher_of(machine, world).search(cfg, ranks, node)
    everything = []
    for tried in layouts(cfg, ranks, node):
        try:
            planner = found.rows[0].planner.with_layout(tried)
            ways = ways_for(planner, tried, world)
        except ConfigError:
            continue
        for choice in ways.choices:
            for split in ways.splits:
                try:
                    row = planner.row(choice, ways.ranks, split, planner.sizes_to_measure(ways.splits))
                except ConfigError:  # ranks cannot share experts under this strategy
                    continue
                everything.append(Planned(planner, ways.ranks, row))
    assert found.layouts == len({id(one.planner) for one in everything})
    assert found.measured < found.ways == len(everything)
    fitting = [one for one in everything if one.row.fits]
    if not fitting:
        assert not found.rows[0].row.fits
        return
    least = min(one.row.step.seconds for one in fitting)
    chosen = found.rows[0]
    assert chosen.row.fits and chosen.row.step.seconds <= NEAR * least
    assert chosen.kinds == min(one.kinds for one in fitting if one.row.step.seconds <= NEAR * least)


def test_what_one_layout_measures_does_not_change_another(mixture: Path, dataset: Path, tmp_path: Path) -> None:
    """Attention between ranks of a row, measured before and after that of whole rows; of a model with few blocks."""
    cfg = make_config(mixture, dataset, tmp_path, "pack=true", "data.max_length=256")
    shared = replace(cfg, parallel=replace(cfg.parallel, context=2))
    machine, mode = machine_of(10**4, 4, 5e10), ActivationCheckpointing.none
    first = Planner(cfg, machine, SAMPLES)
    second = first.with_layout(shared)
    one, two, three = (
        MicroBatchSizes(1, 128, 2, 1, 9, 4),
        *(MicroBatchSizes(1, n, 2, 1, 9, 4, 2, 1) for n in (128, 192)),
    )
    second.segments(mode, two)
    first.segments(mode, one)
    found = None
    with contextlib.suppress(RuntimeError):  # torch's, where a whole row's attention gets a part of it
        found = second.segments(mode, three)
    assert found == Planner(shared, machine, SAMPLES).segments(mode, three)


@pytest.mark.parametrize(("sign", "expected"), [(1, (2, 2, 2, 2)), (-1, (1,) * 8)])
def test_a_pipeline_s_micro_batches_fit_however_fast_larger_ones_are(sign: int, expected: tuple[int, ...]) -> None:
    """Micro-batches of one and two samples fit. The seconds grow with their number, or fall (`sign` -1)."""
    splits: Any = [[8], [4] * 2, [2] * 4, [1] * 8]
    planner: Any = SimpleNamespace(
        cfg=SimpleNamespace(parallel=ParallelConfig(pipeline=2)),
        sizes_to_measure=lambda splits: [],
        seconds=lambda choice, ranks, split: sign * len(split),
        row=lambda choice, ranks, split, ends: SimpleNamespace(fits=max(split) <= 2, micro_batches=tuple(split)),
    )
    nothing: Any = None
    found: Any = fastest_that_fits(LayoutChoices(planner, [], nothing, splits), nothing)
    assert found.fits and found.micro_batches == expected


@pytest.mark.parametrize("is_mixture", slow_after(1, [False, True]))
def test_a_bound_is_below_the_seconds_of_all_sizes_of_micro_batches(
    is_mixture: bool, dense: Path, mixture: Path, dataset: Path, tmp_path: Path
) -> None:
    """On a slow network, where communication counts most."""
    cfg = make_config(mixture if is_mixture else dense, dataset, tmp_path, *WORDS, "parallel.search=true")
    machine, world = machine_of(10**4, 8, 1e6), World(0, 8, 0, 2, torch.device("cuda"))
    whole, sizes = Planner(cfg, machine, SAMPLES), set()
    for tried in layouts(cfg, 8, 2):
        try:
            found = candidates(ways_for(whole.with_layout(tried), tried, world))
        except ConfigError:  # the model cannot be divided in this way
            continue
        for one in found:
            seconds = [one.ways.planner.seconds(one.choice, one.ways.ranks, split) for split in one.ways.splits]
            assert one.bound <= min(seconds) * (1 + 1e-9), (tried.parallel, one.choice)
            sizes.add((tried.parallel.pipeline, len(seconds)))
    assert {1, 2} <= {pipeline for pipeline, count in sizes if count > 2}


def imagined(
    name: str,
    seconds: tuple[float, ...],
    fits: tuple[bool, ...],
    total: int,
    bound: float = 0.0,
    measured: tuple[bool, ...] = (),
    **kinds: int,
) -> Candidate:
    """A way to train whose micro-batches take `seconds`, the largest first, with the layout of ranks `kinds`. If
    `measured` is given, it says whether they fit when their memory is measured."""
    splits: Any = [(len(seconds) - n,) * (n + 1) for n in range(len(seconds))]

    def row(choice: Any, ranks: Any, split: Any, sizes: Any = None) -> Any:
        number = len(split) - 1
        return SimpleNamespace(
            choice=choice, micro_batches=tuple(split), bytes={"total": total}, usable=10 * 10**9,
            fits=(fits if sizes is not None or not measured else measured)[number], is_measured=sizes is None,
            step=SimpleNamespace(seconds=seconds[number]),
        )  # fmt: skip

    planner: Any = SimpleNamespace(
        cfg=SimpleNamespace(parallel=ParallelConfig(**kinds)),
        sizes_to_measure=lambda splits: [splits[-1][0], splits[0][0]],
        seconds=lambda choice, ranks, split: seconds[len(split) - 1],
        row=row,
    )
    nothing: Any = None
    choice: Any = name
    return Candidate(LayoutChoices(planner, [choice], nothing, splits), choice, bound)


def names_of(search: Search) -> list[Any]:
    return [one.row.choice for one in search.rows]


def test_of_about_equally_fast_ways_the_one_with_the_fewest_kinds_is_chosen() -> None:
    fast = imagined("fast", (1.0,), (True,), 5, context=2, tensor=2)
    near = imagined("near", (1.02,), (True,), 5, tensor=2)
    plain = imagined("plain", (1.025,), (True,), 5, tensor=4)
    slow = imagined("slow", (1.04,), (True,), 5)
    found = fastest([slow, near, plain, fast], 1)
    assert names_of(found) == ["near", "fast", "plain"]
    assert [cast(Any, one.row).is_measured for one in found.rows] == [True, False, False]
    assert (found.layouts, found.ways, found.measured) == (4, 4, 3)
    assert names_of(fastest([slow, near, plain, fast], 4)) == ["near", "fast", "plain", "slow"]


def test_ways_that_do_not_fit_come_last_the_smallest_first() -> None:
    large = imagined("large", (1.0, 2.0), (False, False), 30)
    small = imagined("small", (1.5,), (False,), 20)
    fits = imagined("fits", (3.0,), (True,), 5)
    assert names_of(fastest([large, small, fits], 1)) == ["fits", "small", "large"]
    assert names_of(fastest([large, small], 1)) == ["small", "large"]


def test_a_way_that_does_not_fit_when_measured_is_not_chosen() -> None:
    first = imagined("first", (1.0,), (True,), 30, measured=(False,))
    near = imagined("near", (1.02, 1.5, 2.5), (True,) * 3, 20, measured=(False, False, True))
    fits = imagined("fits", (2.0,), (True,), 5)
    assert names_of(fastest([first, near, fits], 1)) == ["fits", "first"]
    found = fastest([first, near], 1)
    assert names_of(found) == ["near", "first"] and found.rows[0].row.micro_batches == (1, 1, 1)
    found = fastest([first], 1)
    assert names_of(found) == ["first"] and not found.rows[0].row.fits


def test_a_way_whose_bound_is_low_is_measured_only_if_it_may_be_fast() -> None:
    """Its own seconds count, with the largest micro-batches, or in a pipeline with the fastest."""
    misled = imagined("misled", (9.0,), (True,), 5, bound=0.1)
    fits = imagined("fits", (2.0,), (True,), 5, bound=1.9)
    far = imagined("far", (8.0,), (True,), 5, bound=7.0)
    found = fastest([misled, fits, far], 1)
    assert names_of(found) == ["fits"] and found.measured == 1
    piped = imagined("piped", (9.0, 1.0), (True, True), 5, pipeline=2)
    alone = imagined("alone", (3.0, 0.5), (True, True), 5)
    found = fastest([alone, piped], 2)
    assert [(one.row.choice, one.row.step.seconds) for one in found.rows] == [("piped", 1.0), ("alone", 3.0)]
    full = imagined("full", (4.0, 5.0), (False, True), 5, pipeline=2)
    assert fastest([full], 1).rows[0].row.step.seconds == 5.0


def test_layouts_are_products_of_divisors(
    dense: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are set are kept; what the configuration refuses, or leaves ranks without samples, is left out."""

    def found(*words: str, ranks: int = 8, node: int = 4) -> set[tuple[int, ...]]:
        cfg = make_config(dense, dataset, tmp_path, "pack=true", "parallel.search=true", *words)
        kinds = [one.parallel for one in layouts(cfg, ranks, node)]
        assert all(not one.search for one in kinds)
        return {
            (k.pipeline, k.tensor, k.expert, k.num_context, k.schedule is PipelineSchedule.interleaved) for k in kinds
        }

    assert {k[0] for k in found("global_batch_size=48", ranks=24, node=8)} >= {1, 2, 3, 8, 24}
    every = found("global_batch_size=64")
    assert {(1, 1, 1, 1, False), (2, 4, 1, 1, False), (2, 2, 1, 2, True), (8, 1, 1, 1, False)} <= every
    assert {(1, 2, 4, 1, False), (2, 2, 2, 2, True)} <= every
    assert max(tensor for _, tensor, *_ in every) == 4, "ranks of a layer are on one node"
    assert {one[1] for one in found("parallel.tensor=2", "global_batch_size=64")} == {2}
    assert all(p * t * c >= 4 for p, t, _, c, _ in found("global_batch_size=2"))
    assert found("offload=optimizer", "global_batch_size=64") == {(1, 1, 1, c, False) for c in (1, 2, 4, 8)}
    padded = found("pack=false", "global_batch_size=64")
    assert {context for *_, context, _ in padded} == {1}
    assert {one[4] for one in found("parallel.pipeline=2", "global_batch_size=64")} == {False}
    kept = found("parallel.pipeline=2", "parallel.schedule=interleaved", "global_batch_size=64")
    assert {one[4] for one in kept} == {True}
    assert (8, 1, 1, 1, False) in found("global_batch_size=1"), "all groups of a pipeline process the same samples"

    def refuse(setting: str = "") -> None:
        raise ConfigError("this torch is too old")

    monkeypatch.setattr("llava_fsdp.plan.search.layouts.check_torch", refuse)
    assert found("global_batch_size=64") == {(1, 1, 1, 1, False)}
    assert {one[1:4] for one in found("parallel.tensor=2", "global_batch_size=64")} == {(2, 1, 1)}


@pytest.mark.slow
def test_the_choice_is_applied_and_kept_by_a_resumed_run(
    dense: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(dense, dataset, tmp_path, *WORDS, "parallel=auto")
    assert cfg.parallel.search and cfg.has_auto
    monkeypatch.setattr(auto, "this_machine", lambda *_: machine_of(6600, 4, 1e6))
    world, parts = World(0, 4, 0, 2, torch.device("cuda")), find_parts(cfg.model)
    decision = decide(cfg, world, parts, SAMPLES)
    settled = decision.applied(cfg)
    assert not settled.has_auto and not settled.parallel.search and settled.parallel == decision.parallel
    text = (
        "sharding: {strategy: FULL_SHARD}\nactivation_checkpointing: {mode: full, budget: null}\n"
        "tokens_per_micro_batch: 256\n"
        "parallel: {context: 1, tensor: 2, expert: 1, pipeline: 2, schedule: interleaved}\n"
    )
    (tmp_path / "config.yaml").write_text(text)
    kept = decide(cfg, world, parts, SAMPLES, continues=True)
    assert (kept.parallel.tensor, kept.parallel.pipeline, kept.parallel.num_stages) == (2, 2, 4)
    (tmp_path / "config.yaml").write_text(text.replace("tensor: 2", "tensor: 3"))
    assert decide(cfg, world, parts, SAMPLES, continues=True).parallel == decision.parallel, "3 do not divide 4 ranks"


def test_layouts_without_a_possible_way_are_left_out(mixture: Path, dataset: Path, tmp_path: Path) -> None:
    """Three nodes of eight ranks: with two stages, twelve ranks cannot shard within eight."""
    words = "pack=true", "parallel.search=true", "global_batch_size=48"
    world = World(0, 24, 0, 8, torch.device("cuda"))
    for sharding in ("auto", "HYBRID_SHARD"):
        cfg = make_config(mixture, dataset, tmp_path, *words, f"sharding.strategy={sharding}")
        found = searcher_of(machine_of(10**5, 24, 5e10), world).search(cfg, 24, 8)
        assert found.rows[0].row.fits
        kinds = {one.parallel.pipeline for one in found.rows}
        assert kinds and all(24 % pipeline == 0 for pipeline in kinds)
    with pytest.raises(ConfigError, match="3 does not divide 8,"):
        cfg = make_config(mixture, dataset, tmp_path, *words, "parallel.tensor=3")
        searcher_of(machine_of(10**5, 8, 5e10), world).search(cfg, 8, 8)


@pytest.mark.slow
def test_a_plan_prints_the_layouts(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = *of_parts(dense), "gpus=4", "gpu=h100", "data.max_length=256", "parallel=auto", "rows=10"
    found = printed(capsys, *keys)
    search = found["search"]
    assert len(search["rows"]) == len(found["rows"]) >= 10 and search["rows"][0]["why_not"] is None
    assert all(one["why_not"] for one in search["rows"][1:])
    assert search["ways"] > search["layouts"] > 10
    assert "parallel.search" not in found["recommended"]["command"]
    for mode in ("dynamic", "budget"):  # which some layouts refuse
        again = printed(capsys, *keys, f"activation_checkpointing={mode}")
        assert again["search"] == search and again["recommended"] == found["recommended"]


def test_why_a_way_to_train_was_not_chosen() -> None:
    def planned(fits: bool = True, kinds: int = 0, **seconds: float) -> Any:
        parts = {"compute": 10.0, "exposed": 0.0, "copies": 0.0, "update": 0.0, "contention": 0.0} | seconds
        step = SimpleNamespace(seconds=sum(parts.values()), **parts)
        row = SimpleNamespace(fits=fits, bytes={"total": 30 * 10**9}, usable=20 * 10**9, step=step)
        return SimpleNamespace(row=row, kinds=kinds)

    chosen = planned(kinds=1)
    assert why_not(planned(fits=False), chosen) == "needs 30.0 of 20.0 GB"
    assert why_not(planned(kinds=2, exposed=0.2), chosen) == "about as fast, with more kinds of parallelism"
    assert why_not(planned(kinds=1), chosen) == "as fast"
    for part, said in (
        ("compute", "computation"), ("exposed", "communication"), ("copies", "copies"), ("update", "the update"),
        ("contention", "communication beside"),
    ):  # fmt: skip
        seconds = {"exposed": 0.1, "copies": 0.1, "update": 0.1} | {part: 12.0 if part == "compute" else 2.0}
        assert said in why_not(planned(kinds=1, **seconds), chosen)
    assert why_not(planned(kinds=1, exposed=0.2), chosen).startswith("2% slower: communication")
