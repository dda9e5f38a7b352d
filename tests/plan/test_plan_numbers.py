"""Arithmetic of a plan: sizes of samples, splits of a step, what machines have, and what moves."""

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small import config_of, make_config

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    AspectRatio,
    ContextHow,
    DType,
    MasterDType,
    OffloadMode,
    PatchMerge,
    PrecisionConfig,
    SamplerName,
    ShardingConfig,
    Source,
    Strategy,
)
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.parallel.memory.memory import OUTPUT, Weight
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.plan.memory.activations import Live, PassSegment
from llava_fsdp.plan.memory.fsdp_units import Unit, unit_of
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.memory.simulate import (
    FsdpRank,
    Ledger,
    States,
    interpolate,
    simulate_step,
    simulate_unsharded_step,
)
from llava_fsdp.plan.planner import Planner
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.search import (
    checkpointing_modes,
    choices,
    distinct_strategies,
    largest_that_fits,
    plan_rows,
)
from llava_fsdp.plan.show.scaling_page import node_counts
from llava_fsdp.plan.time.hardware import (
    CUDA_CONTEXT_BYTES,
    DEVICES,
    GPUS,
    MIB,
    NCCL,
    NCCL_MORE,
    PROCESS_BYTES,
    Machine,
    machine_for,
    machine_named,
)
from llava_fsdp.plan.time.step_time import (
    RECOMPUTED,
    StepWork,
    Volume,
    added_bytes,
    context_volume,
    recomputed_share,
    step_time,
    volume,
)
from llava_fsdp.plan.workload import (
    Samples,
    configured_split,
    likely_most_tokens,
    micro_batch,
    possible_splits,
    samples_of,
    samples_of_report,
)
from llava_fsdp.runtime.errors import ConfigError

CPU, H100 = machine_for("cpu", 1), machine_named("h100", 8)
SAMPLES = Samples(tokens=100.0, tiles=0.5, labels=30.0, spread=10.0, source="", tile_tokens=24.0)


ONE_TILE = ImageTokens(AspectRatio.pad, tile=28, features=24)
TILED = ImageTokens(AspectRatio.anyres, tile=28, features=25, sizes=((56, 56), (84, 28)))
"""A photo is in a grid of 2 x 2 tiles, so that it has 5 tiles and 125 tokens."""


def test_what_the_report_of_an_index_says_of_a_sample() -> None:
    report = {
        "kept": 8,
        "lengths": {"histogram": [{"from": 0, "to": 20, "records": 6}, {"from": 40, "to": 80, "records": 2}]},
        "sources": [
            {"tokens": 100, "pictures": 3, "label_tokens": 40},
            {"tokens": 60, "pictures": 1, "label_tokens": 8},
        ],
    }
    found = samples_of_report(report, Path("report.json"), 50, ONE_TILE)
    assert (found.tokens, found.tiles, found.labels) == (20.0, 0.5, 6.0)
    assert found.spread == pytest.approx(((6 * 10**2 + 2 * 30**2) / 8) ** 0.5), "a bar ends at the longest sample"
    assert likely_most_tokens(SAMPLES, 4) == 400 + 3 * 10 * 2


@pytest.mark.parametrize(
    ("counts", "tiles", "tile_tokens"),
    [
        ([{"tiles": 13, "image_tokens": 70}, {"tiles": 3, "image_tokens": 10}], 2.0, 5.0),
        ([{"tiles": 13, "image_tokens": None}, {"tiles": 3, "image_tokens": 10}], 2.0, 25.0),
        ([{}, {}], 4 * 5 / 8, 25.0),
        ([{"tiles": 0, "image_tokens": 0}] * 2, 0.0, 25.0),
    ],
    ids=["counted", "an index without image tokens", "a report without tiles", "no image"],
)
def test_tiles_and_image_tokens_of_a_report(counts: list[dict], tiles: float, tile_tokens: float) -> None:
    sources = [{"tokens": 400, "pictures": 3, "label_tokens": 40}, {"tokens": 60, "pictures": 1, "label_tokens": 8}]
    merged = [source | count for source, count in zip(sources, counts, strict=True)]
    report = {"kept": 8, "lengths": {"histogram": []}, "sources": merged}
    found = samples_of_report(report, Path("report.json"), 500, TILED)
    assert (found.tiles, found.tile_tokens, found.image_tokens) == (tiles, tile_tokens, tiles * tile_tokens)


def test_a_report_of_another_model_has_this_models_image_tokens() -> None:
    """Its samples had 5 tokens for each of 16 images, and this model has 24."""
    source = {"tokens": 400, "pictures": 16, "label_tokens": 40, "tiles": 16, "image_tokens": 80}
    report = {"kept": 8, "lengths": {"histogram": []}, "sources": [source]}
    found = samples_of_report(report, Path("report.json"), 500, ONE_TILE)
    assert (found.tokens, found.image_tokens) == (50 + 2 * 19, 48)
    source["image_tokens"] = 16 * 24 - 3  # some were truncated
    assert samples_of_report(report, Path("report.json"), 500, ONE_TILE).tokens == 50


def test_samples_without_a_dataset_have_photos() -> None:
    """Of one tile they are as they always were; of several they have as many tokens as a photo has."""
    cfg = config_of(["data.max_length=8192"])
    plain = samples_of(cfg, ImageTokens(AspectRatio.pad, tile=336, features=576))
    assert (plain.tokens, plain.tiles, plain.tile_tokens) == (300 + 0.94 * 576, 0.94, 576)
    rule = ImageTokens(
        AspectRatio.anyres_max, 384, 729, tuple(grid_sizes([], 384, AspectRatio.anyres_max)), PatchMerge.spatial_unpad
    )
    tiled = samples_of(cfg, rule)
    tokens = 729 + 40 * (54 + 1)  # a photo fills 3 quarters of the height of 2 x 2 tiles, 40 of 54 lines
    assert tiled.tiles == pytest.approx(0.94 * 5) and tiled.tokens == pytest.approx(300 + 0.94 * tokens)
    assert tiled.image_tokens == pytest.approx(0.94 * tokens) and tiled.spread == plain.spread


@pytest.mark.parametrize(
    "damage",
    [
        {}, {"kept": 0}, {"kept": "8"}, {"lengths": {}}, {"lengths": {"histogram": [{"from": 1}]}}, {"sources": None},
        {"sources": [{"tokens": 1}]},
    ],
)  # fmt: skip
def test_a_plan_takes_the_report_of_an_index_if_it_can(damage: dict, tmp_path: Path) -> None:
    """Else it takes the means of LLaVA's data, for captions those of captions; the embedded dataset has no report."""
    sources = [{"tokens": 100, "pictures": 3, "label_tokens": 40}]
    report = {"kept": 5, "lengths": {"histogram": []}, "sources": sources} | damage
    cfg = config_of(["data.max_length=300"])
    data = replace(cfg.data, source=Source.llava_json, index=str(tmp_path))
    read = replace(cfg, data=data)
    captions = replace(read, model=replace(cfg.model, train=["projector"]))
    means = samples_of(cfg, ONE_TILE)
    assert samples_of(read, ONE_TILE) == means and means.labels == 180
    assert (samples_of(captions, ONE_TILE).tokens, samples_of(captions, ONE_TILE).labels) == (20 + 24, 20)
    (tmp_path / "report.json").write_text(json.dumps(report))
    found: Any = None
    with contextlib.suppress(ArithmeticError):
        found = samples_of(read, ONE_TILE)
    assert found == means if damage else (found.tokens, found.labels, found.tiles) == (20, 8, 0.6)
    assert samples_of(replace(cfg, data=replace(cfg.data, index=str(tmp_path))), ONE_TILE) == means
    (tmp_path / "report.json").write_text("{")
    assert samples_of(read, ONE_TILE) == means


def test_a_shrunk_image_has_more_tiles_than_its_tokens_fill() -> None:
    """Tiles are limited by the samples, and in a short row by the tokens."""
    samples = replace(SAMPLES, tiles=8.0, tile_tokens=10.5, tokens=120.0)
    assert micro_batch(samples, 1, 700, 6) == MicroBatchSizes(1, 700, 6, 48, 180, 504)
    assert micro_batch(samples, 1, 400, 6) == MicroBatchSizes(1, 400, 6, 38, 180, 399)


def test_how_a_rank_s_part_of_a_step_is_cut() -> None:
    """16 samples on 3 ranks are 5 and a third each."""
    cfg = replace(
        config_of(["data.max_length=200"]), global_batch_size=16, micro_batch_size=3, tokens_per_micro_batch=None
    )
    padded = replace(cfg, pack=False)
    assert configured_split(padded, SAMPLES, 3) == [MicroBatchSizes(3, 200, 3, 2, 90, 48)] * 2
    assert configured_split(padded, SAMPLES, 9) == [MicroBatchSizes(2, 200, 2, 1, 60, 24)]
    ways = possible_splits(padded, SAMPLES, 3)
    assert [(len(way), way[0].rows) for way in ways] == [(1, 6), (2, 3), (3, 2), (6, 1)]
    original = replace(padded, sampler=replace(cfg.sampler, name=SamplerName.llava_v1_5), micro_batch_size=1)
    assert [(len(way), way[0].rows) for way in possible_splits(original, SAMPLES, 4)] == [(1, 4), (2, 2), (4, 1)]
    with pytest.raises(ConfigError):
        possible_splits(original, SAMPLES, 3)
    assert configured_split(cfg, SAMPLES, 4) == [MicroBatchSizes(1, 460, 5, 3, 150, 72)]
    assert [(len(way), way[0].length, way[0].samples) for way in possible_splits(cfg, SAMPLES, 4)] == [
        (1, 512, 5), (2, 256, 3),
    ]  # fmt: skip
    rows = replace(original, pack=True, micro_batch_size=2)
    assert configured_split(rows, SAMPLES, 4) == [MicroBatchSizes(1, 243, 2, 1, 60, 24)] * 2


def test_what_machines_have() -> None:
    assert {name for name, gpu in GPUS.items() if gpu.bf16 is None} == {"v100", "t4"}
    assert {name for name, gpu in GPUS.items() if gpu.fp8} == {"h100", "h200", "b200", "l40s", "4090"}
    assert all(gpu.bf16 in (None, gpu.fp16) and gpu.fp32 < gpu.fp16 for gpu in GPUS.values())
    assert all(gpu.link >= gpu.pcie and 0 < gpu.efficiency < 1 for gpu in GPUS.values())
    assert set(DEVICES.values()) <= set(GPUS)
    gpu = GPUS["v100"]
    assert (gpu.peak(DType.fp16), gpu.peak(DType.fp32)) == (125e12, 15.7e12)
    with pytest.raises(ConfigError):
        gpu.peak(DType.bf16)
    machine = Machine(gpu, "v100", 10_000 * MIB, 0.0)
    assert machine.usable(0) == 9600 * MIB - CUDA_CONTEXT_BYTES and machine.usable(1) == machine.usable(0) - NCCL
    assert machine.usable(3) == machine.usable(1) - 2 * NCCL_MORE and replace(machine, memory=MIB).usable(1) == 0
    cores = Machine(None, "2 CPU cores", 1000 * MIB, 60e9)
    assert cores.usable(2) == 1000 * MIB - PROCESS_BYTES and (cores.peak(DType.fp32), cores.peak(DType.bf16)) == (
        60e9,
        84e9,
    )
    counts = {2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 7: [1, 2, 4, 7], 8: [1, 2, 4, 8]}
    assert {nodes: node_counts(nodes) for nodes in counts} == counts


def sharding(**keys: int) -> ShardingConfig:
    """Settings of FSDP units; the strategy is not looked at."""
    return ShardingConfig(strategy=Strategy.FULL_SHARD, shard_size=None, **keys)


def precision() -> PrecisionConfig:
    return config_of(["precision=bf16"]).precision


def test_what_fsdp_allocates_for_a_unit() -> None:
    """Two weights of 7 rows on 3 ranks, padded to 9; one of them frozen. bf16, with fp32 masters and reductions."""
    weights = [Weight((7, 4), True, False, False, unit="a"), Weight((7, 2), False, False, False, unit="a")]
    found = unit_of("a", weights, precision(), 3, False, False)
    assert (found.gathered, found.buffer) == (2 * 9 * (4 + 2),) * 2
    assert (found.reduce_input, found.reduce_output, found.shard_gradients) == (4 * 36, 4 * 12, 4 * 12)
    assert (found.kept_gradients, found.backward_gradients) == ((4 * 28,), (2 * 28,)) and found.cast == 2 * 12
    through = unit_of("a", weights, precision(), 3, True, True)
    assert through.shard_gradients == 0 and through.cast == (4 + 2) * 12 + 2 * 6
    alone = unit_of("a", weights, precision(), 1, False, False)
    assert (
        alone.buffer == 0
        and alone.reduce_output == 2 * alone.reduce_input == 2 * alone.waiting_output
        and alone.cast == 2 * 28
    )


def test_what_fsdp_allocates_for_experts_sharded_along_dimension_1() -> None:
    """Two experts of 128 x 8 on 4 ranks, and a bias of 7 numbers, which is cut as usual."""
    weights = [Weight((2, 128, 8), True, False, False, unit="a"), Weight((7,), True, False, False, unit="a")]
    found = unit_of("a", weights, precision(), 4, False, False)
    assert found.gathered == found.buffer == 2 * (2048 + 8) and found.second_copy == 2 * 2048
    assert (found.reduce_input, found.shard_gradients) == (4 * (2048 + 8), 4 * (512 + 2))
    assert found.is_copied == (True, False)
    assert unit_of("a", weights, precision(), 2, False, False).second_copy == 0
    frozen = [replace(weight, trainable=False) for weight in weights]
    found = unit_of("a", frozen, precision(), 4, False, False)
    assert (found.second_copy, found.is_copied) == (2 * 2048, ())


@pytest.mark.parametrize(
    ("gradients", "reduce_input", "reduce_output", "most"),
    [
        ((15, 5), 40, 11, 20 + 40 + 5), ((5, 15), 40, 11, 20 + 40 + 15),
        ((15, 5), 1, 0, 20 + 15), ((15, 5), 40, 100, 40 + 100 + 5),
    ],
)  # fmt: skip
def test_weights_sharded_along_dimension_1_are_copied(
    gradients: tuple[int, ...], reduce_input: int, reduce_output: int, most: int
) -> None:
    """All of a unit in an all-gather; one gradient after the other before a reduce-scatter, of which the last stays."""
    sizes = {"backward_gradients": gradients, "reduce_input": reduce_input, "reduce_output": reduce_output}
    own = replace(unit("a", 1, True), second_copy=7, is_copied=(True, True), shard_gradients=0, **sizes)
    rank = FsdpRank(Ledger(), {"a": own}, SHARD_PLANS[Strategy.FULL_SHARD], {"a": "a"}, sharding())
    rank.prefetch("a")
    rank.copy_out("a", "gather")
    assert rank.ledger.most == 20 + 20 + 7
    rank = FsdpRank(Ledger(), {"a": own}, SHARD_PLANS[Strategy.FULL_SHARD], {"a": "a"}, sharding())
    rank.finish_unit("a", 20, True, "reduce")
    assert rank.ledger.most == most and rank.ledger.held["reducing"] == reduce_input
    waiting = replace(own, backward_gradients=(0, 0), kept_gradients=gradients, is_copied=(False, True))
    rank = FsdpRank(Ledger(), {"a": waiting}, SHARD_PLANS[Strategy.SHARD_OPTIMIZER], {"a": "a"}, sharding())
    rank.finish_unit("a", 0, False, "wait")
    rank.finish_unit("a", 0, True, "reduce")
    last = gradients[1]
    assert rank.ledger.most == max(20 + last, 20 + reduce_input + last, reduce_input + reduce_output + last)


@pytest.mark.parametrize(("sharded", "kept"), [(True, 5), (False, 0)])
def test_the_last_gradient_of_a_unit_stays_until_the_end_of_its_reduction(sharded: bool, kept: int) -> None:
    """If more than one rank shards: without another rank FSDP has no loop over gradients whose variable holds it."""
    own = replace(unit("a", 1, sharded), reduce_input=1, reduce_output=100)
    rank = FsdpRank(Ledger(), {"a": own}, SHARD_PLANS[Strategy.FULL_SHARD], {"a": "a"}, sharding())
    rank.finish_unit("a", 20, True, "reduce")
    assert rank.ledger.most == 1 + 100 + kept and rank.ledger.held["reducing"] == 1


def test_what_a_step_waits_for() -> None:
    """What hides behind nine tenths of the arithmetic costs nothing; each way to offload moves other bytes."""
    machine = Machine(GPUS["a100-80gb"], "a100", 0, 0.0)
    steps = {
        mode: step_time(machine, precision(), StepWork(1.5e14, 0.5e14, 4e10, 5e8, 3), Volume(), mode)
        for mode in OffloadMode
    }
    plain = steps[OffloadMode.none]
    assert plain.compute == pytest.approx(2e14 / (312e12 * 0.6)) and plain.exposed == 0
    assert plain.copies == pytest.approx(4e10 / (0.8 * 2039e9))
    assert (plain.contention, plain.host) == (0, 0.005)
    assert plain.update == pytest.approx(28 * 5e8 / (0.8 * 2039e9))
    assert steps[OffloadMode.optimizer].update == pytest.approx(plain.update + 16 * 5e8 / 32e9)
    assert steps[OffloadMode.params].exposed == steps[OffloadMode.nvme].exposed == pytest.approx(3 * 12 * 5e8 / 32e9)
    assert steps[OffloadMode.params].update == pytest.approx(28 * 5e8 / 12e9)
    assert steps[OffloadMode.nvme].update == pytest.approx(28 * 5e8 / 12e9 + 40 * 5e8 / 2e9)
    slow = Volume(sharded=1e12, shards=4)
    waits = step_time(machine, precision(), StepWork(2e14, 0.0, 1e9, 5e8, 3), slow, OffloadMode.none)
    assert waits.exposed == pytest.approx(slow.seconds(300e9, 25e9) - 0.9 * waits.compute)
    assert waits.contention == pytest.approx(20 / 132 * 0.9 * waits.compute), "only what runs beside the computation"
    parts = waits.compute + waits.copies + waits.exposed + waits.update + waits.contention + waits.host
    assert waits.seconds == pytest.approx(parts)
    assert {mode.name: share for mode, share in RECOMPUTED.items()} == {
        "none": 0.0, "full": 1.0, "selective": 0.15, "offload": 1.0, "dynamic": 1.0,
    }  # fmt: skip
    assert ActivationCheckpointing.budget not in RECOMPUTED
    budget = ActivationCheckpointingConfig(mode=ActivationCheckpointing.budget, budget=0.3)
    assert recomputed_share(budget) == 0.7


def test_what_a_step_on_cpu_cores_waits_for() -> None:
    machine, sent = Machine(None, "2 CPU cores", 0, 30e9), Volume(sharded=1e12, replicated=3e11, shards=2, replicas=2)
    work = StepWork(6e10, 3e10, 4e10, 5e8, 3)
    step = step_time(machine, precision(), work, sent, OffloadMode.none)
    assert (step.compute, step.update) == pytest.approx((9e10 / 42e9, 28 * 5e8 / 10e9))
    assert step.copies == pytest.approx(4e10 / 10e9) and step.host == step.contention == 0
    assert step.communication == pytest.approx((1e12 + 3e11) / 0.78 / 0.55e9)
    assert step.exposed == step.communication, "gloo runs on the cores that compute"
    offloaded = step_time(machine, precision(), work, sent, OffloadMode.optimizer)
    assert offloaded.update == pytest.approx((28 + 16) * 5e8 / 10e9)
    calls = Volume(gathers=1, reductions=2, exchanges=4, sums=8, expert_exchanges=16, messages=32)
    started = step_time(machine, precision(), work, calls, OffloadMode.none)
    on_gpu = calls.seconds(1.0, 1.0) + calls.attention_seconds(1.0, 1.0) + calls.expert_seconds(1.0, 1.0)
    assert started.exposed == pytest.approx(63e-3 + on_gpu), "gloo starts each collective anew"
    assert [replace(machine, cores=n).with_idle(1.5) for n in (0.5, 0.75, 1, 4)] == [1, 1.125, 1.5, 1.5]
    assert H100.with_idle(1.5) == 1.5, "no other rank uses its GPU"


@pytest.mark.parametrize(
    ("shards", "replicas", "ring", "replica_ring", "crossing"),
    [
        (4, 2, 300e9, 300e9, (0, 0)),  # one node
        (8, 3, 300e9, 25e9, (0, 3)),  # a copy of the model on each of three nodes: eight rings share the ports
        (2, 8, 300e9, 100e9, (0, 2)),  # four copies on each of two nodes: two rings share the ports
        (16, 1, 200e9, 25e9, (2, 2)),  # a ring over two nodes takes all their ports
    ],
)
def test_seconds_of_communication(
    shards: int, replicas: int, ring: float, replica_ring: float, crossing: tuple[int, int]
) -> None:
    sent = Volume(8e9, 6e9, gathers=5, reductions=7, shards=shards, replicas=replicas, node_size=8)
    latency = 5 * (20e-6 + 3e-6 * (shards - 1) + 8e-6 * crossing[0])
    latency += 7 * (20e-6 + 3e-6 * (replicas - 1) + 8e-6 * crossing[1])
    assert sent.seconds(300e9, 25e9) == pytest.approx(latency + (8e9 / ring + 6e9 / replica_ring) / 0.78, rel=1e-12)


def test_the_largest_split_that_fits_is_taken() -> None:
    """Splits are sorted: if one fits, all after it do."""
    splits = [[MicroBatchSizes(1, length, 1, 1, 1, 1)] for length in (70, 60, 50, 40, 30)]
    for limit in (30, 45, 60, 69, 29):
        row = partial(fitting_row, limit)
        found: Any = largest_that_fits(
            cast(Any, SimpleNamespace(row=row)), cast(Any, None), cast(Any, None), splits, []
        )
        assert found.split == next((split for split in splits if split[0].length <= limit), splits[-1])


def fitting_row(limit: int, choice: Any, ranks: Any, split: list[MicroBatchSizes], ends: Any) -> SimpleNamespace:
    return SimpleNamespace(split=split, fits=split[0].length <= limit)


def unit(name: str, size: int, sharded: bool) -> Unit:
    return Unit(
        name, gathered=20 * size, buffer=20 * size * sharded, cast=10 * size, reduce_input=40 * size,
        reduce_output=11 * size, waiting_output=10 * size, shard_gradients=12 * size,
        kept_gradients=(30 * size, 10 * size), backward_gradients=(15 * size, 5 * size),
        second_copy=0, is_copied=(False, False),
    )  # fmt: skip


BLOCKS = "a", "b", "c", "d"


def one_pass(gradients: int = 20, activations: int = 9) -> list[PassSegment]:
    """Four blocks of sizes 1 to 4, which make 20 bytes of gradients for each size, as the output layer does."""

    def segment(unit: str, backward: bool, activations: int, made: int = 0) -> PassSegment:
        worst, first, later = (Live(activations, 0, made // divisor) for divisor in (1, 2, 4))
        return PassSegment(unit, backward, Live(), Live(), worst, first, later, made, 2 * made)

    forward = [segment("", False, 1), *(segment(name, False, 2) for name in BLOCKS), segment("", False, 50)]
    sizes = [(name, gradients * size) for size, name in enumerate(BLOCKS, 1)]
    backward = [segment(name, True, activations, made) for name, made in reversed(sizes)]
    return [*forward, segment("", True, 40, gradients), *backward, segment("", True, 3, 4)]


@pytest.mark.parametrize(
    ("strategy", "micros", "blocks_per_unit", "key", "moment", "gradients", "gathered", "reducing", "activations"),
    [
        # gathered: the root unit (20), block c (60), the buffer of the next block b (40)
        # reducing: what is left of block d (160), gradients of the root unit (20) and of block c (60)
        ("FULL_SHARD", 1, 1, "", "c", 48, 120, 240, 9),
        ("FULL_SHARD", 2, 1, "", "c", 132, 120, 240, 9),
        ("FULL_SHARD", 2, 1, "prefetch=2", "c", 132, 140, 240, 9),  # and the buffer of block a
        ("FULL_SHARD", 2, 1, "reductions=2", "b", 132, 80, 340, 9),  # what is left of d (160) and c (120), and 40 of b
        ("FULL_SHARD", 2, 2, "", "c", 132, 80, 440, 0),  # units of blocks a and b, c and d
        ("FULL_SHARD", 2, 4, "", "a", 132, 20, 620, 0),
        ("HYBRID_SHARD", 2, 1, "", "c", 118, 120, 240, 9),  # 10 for each size until the last micro-batch, then 12
        ("SHARD_GRAD_OP", 1, 1, "", "c", 48, 140, 240, 9),
        ("SHARD_GRAD_OP", 2, 1, "", "d", 132, 140, 260, 0),
        ("_HYBRID_SHARD_ZERO2", 2, 1, "", "d", 110, 140, 260, 0),
        ("SHARD_OPTIMIZER", 2, 1, "", "d", 0, 140, 700, 0),  # all gradients wait, widened: 40 for each size
        ("SHARD_OPTIMIZER", 3, 2, "", "c", 0, 80, 880, 0),
        ("NO_SHARD", 1, 1, "", "c", 48, 140, 240, 9),
    ],
)
def test_worst_moment_of_a_step_on_imagined_units(
    strategy: str, micros: int, blocks_per_unit: int, key: str, moment: str,
    gradients: int, gathered: int, reducing: int, activations: int,
) -> None:  # fmt: skip
    """The input tensors are those of the micro-batch of that moment, the last one."""
    name, _, value = key.partition("=")
    of_units = sharding(**{name: int(value)} if key else {})
    names = {name: BLOCKS[n // blocks_per_unit * blocks_per_unit] for n, name in enumerate(BLOCKS)}
    sizes = {"": 1} | {first: 0 for first in names.values()}
    for size, name in enumerate(BLOCKS, 1):
        sizes[names[name]] += size
    units = {name: unit(name, size, strategy != "NO_SHARD") for name, size in sizes.items()}
    states = States(1000, 12 * 11, 2000, buffers=5, updating=7, inputs=tuple(range(100, 100 + micros)))
    found = simulate_step([one_pass()] * micros, units, SHARD_PLANS[Strategy(strategy)], states, names, of_units)
    assert found.moment == f"backward of {moment}"
    assert found.worst == {
        "parameters": 1000, "gradients": gradients, "optimizer": 2000, "gathered": gathered, "reducing": reducing,
        "activations": activations, "logits": 0, "buffers": 104 + micros,
    }  # fmt: skip


@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.SHARD_OPTIMIZER])
def test_the_output_layer_is_gathered_last_and_reduced_first(strategy: Strategy) -> None:
    """In two micro-batches; its gradient, of 20 bytes, is not one of the root unit's, which has none."""
    units = {name: unit(name, size, True) for size, name in enumerate(BLOCKS, 1)}
    units |= {"": unit("", 0, True), OUTPUT: unit(OUTPUT, 1, True)}
    rank = FsdpRank(Ledger(), units, SHARD_PLANS[strategy], {name: name for name in BLOCKS}, sharding())
    segments = one_pass()
    forward, backward = segments[:6], segments[6:]
    forward[-1] = replace(forward[-1], block=OUTPUT)
    backward[0] = replace(backward[0], block=OUTPUT)
    backward[-1] = replace(backward[-1], gradient_bytes=0)
    waits = strategy is Strategy.SHARD_OPTIMIZER
    rank.run_forward(forward[:5])
    assert OUTPUT not in rank.gathered
    rank.run_forward(forward[5:])
    assert OUTPUT in rank.gathered
    made: list[int] = []
    finish = rank.finish_unit
    rank.finish_unit = lambda name, size, *more: made.append(size) if name == "" else finish(name, size, *more)  # type: ignore[method-assign]
    for number, is_last in enumerate((False, True)):
        rank.run_backward(backward, is_last)
        assert (OUTPUT in rank.gathered) == (waits and not is_last)
        assert rank.shards.get(OUTPUT, 0) == (0 if waits and not is_last else 12)
        assert rank.waiting.get(OUTPUT, 0) == (40 if waits and not is_last else 0)
        assert made == [0] * (number + 1)
        rank.run_forward(forward)


def test_worst_moment_of_a_step_without_fsdp() -> None:
    """Gradients are cast at once, to twice their bytes, and kept; a second micro-batch adds a quarter at a time."""
    states = States(1000, 448, 2000, buffers=5, updating=7, inputs=(100, 200))
    for micros, activations, moment, gradients, buffers in (
        (1, 9, "optimizer step", 448, 112),
        (1, 100, "backward of a", 448 - 8 - 40 + 10, 105),
        (2, 9, "forward of between the blocks", 448, 205),
        (2, 100, "backward of d", 448 + 20, 205),
    ):
        found = simulate_unsharded_step([one_pass(activations=activations)] * micros, states)
        assert (found.moment, found.worst["gradients"], found.worst["buffers"]) == (moment, gradients, buffers)


def test_what_attention_exchanges_in_a_step() -> None:
    """Six heads of 4 on 4 ranks: with ulysses two heads of keys count as four; with gather the others' keys come."""
    language: Any = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2, hidden_size=24, num_hidden_layers=5)
    gathered = context_volume(ContextHow.gather, 4, language, 2, 100, 0.0)
    assert gathered == (5 * 2 * (2 * 2) * 3 * 4 * 2 * 100, 20)
    assert context_volume(ContextHow.gather, 4, language, 2, 100, 1.0) == (1.5 * gathered[0], 30)
    exchanged = context_volume(ContextHow.ulysses, 4, language, 2, 100, 0.5)
    assert exchanged == (5 * 2.5 * (2 * 6 + 2 * 4) * 3 / 4 * 4 * 2 * 100, 50)
    language.head_dim = 8
    assert context_volume(ContextHow.gather, 4, language, 2, 100, 0.0)[0] == 2 * gathered[0]
    sent = Volume(context=7.8e9, exchanges=10, context_size=4, node_size=4, shards=4)
    latency = 10 * (20e-6 + 3e-6 * 3)
    assert sent.attention_seconds(1e9, 1e8) == pytest.approx(latency + 10.0)
    assert replace(sent, node_size=2).attention_seconds(1e9, 1e8) == pytest.approx(latency + 100.0)
    assert replace(sent, sharded=1.0, replicated=2.0).total == 7.8e9 + 3


def test_what_is_sent_counts_units_and_micro_batches() -> None:
    """Weights of the root unit and those in fp32 are gathered once; frozen ones are sharded by zero3 alone."""
    weights = [
        Weight((8, 4), True, False, False, unit="a"), Weight((8, 2), False, False, False, unit="a"),
        Weight((8,), True, False, False, unit=""), Weight((8,), False, False, True, unit="b"),
    ]  # fmt: skip

    def sent(strategy: Strategy, micros: int, shard_size: int = 4) -> Volume:
        return volume(weights, strategy, precision(), RankCounts(4, shard_size, 4), micros)

    found = sent(Strategy.FULL_SHARD, 3)
    assert found.sharded == 3 * 3 / 4 * (2 * (32 + 16 + 8) + 4 * 8 + 2 * (32 + 16) + 4 * (32 + 8))
    assert (found.gathers, found.reductions) == (3 * (3 + 1) + 2 * 3, 0)  # unit a is gathered twice
    output = Weight((8, 4), True, False, False, unit=OUTPUT)  # not gathered again in the backward pass
    more = volume([*weights, output], Strategy.FULL_SHARD, precision(), RankCounts(4, 4, 4), 3)
    assert more.sharded - found.sharded == 3 * 3 / 4 * (2 * 32 + 4 * 32)
    assert more.gathers - found.gathers == 3 * 2
    norm = Weight((8,), True, False, True, unit="a")  # trainable norms in fp32 are one unit, here with that of unit b
    more = volume([*weights, norm], Strategy.FULL_SHARD, precision(), RankCounts(4, 4, 4), 3)
    assert more.gathers - found.gathers == 3
    assert (
        sent(Strategy.SHARD_OPTIMIZER, 3).gathers == 2 + 2 and sent(Strategy.SHARD_GRAD_OP, 3).gathers == 2 * 3 + 2 * 3
    )
    assert sent(Strategy.NO_SHARD, 3).gathers == 0 and sent(Strategy.NO_SHARD, 3).reductions == 2
    hybrid = sent(Strategy.HYBRID_SHARD, 3, 2)
    assert (hybrid.shards, hybrid.replicas, hybrid.reductions) == (2, 2, 2)
    assert volume(weights, Strategy.FULL_SHARD, precision(), RankCounts(1, 1, 1), 3) == Volume()


def test_which_strategies_differ_and_which_modes_there_are() -> None:
    """On one rank all are alike; hybrid needs several ranks of several that share a copy."""
    names = {size: [SHARD_PLANS[s].zero for s in distinct_strategies(RankCounts(8, size, 8))] for size in (1, 2, 8)}
    assert names[1] == names[8] == ["zero0", "zero1", "zero2", "zero3"]
    assert names[2] == [*names[1], "hybrid", "hybrid2"] and distinct_strategies(RankCounts(1, 1, 1)) == [
        Strategy.FULL_SHARD
    ]
    cfg = config_of([])
    assert {mode.mode.value for mode in checkpointing_modes(cfg, CPU)} == {"none", "selective", "full"}
    assert {mode.mode.value for mode in checkpointing_modes(cfg, replace(H100, has_compiler=False))} == {
        "none", "selective", "full", "offload",
    }  # fmt: skip
    budgets = {mode.mode.value: mode.budget for mode in checkpointing_modes(cfg, H100)}
    assert budgets == {"none": None, "selective": None, "full": None, "budget": 0.5, "offload": None}
    uncompiled = checkpointing_modes(config_of(["compile=false"]), H100)
    assert {mode.mode.value for mode in uncompiled} == {"none", "selective", "full", "offload"}
    own = ActivationCheckpointingConfig(mode=ActivationCheckpointing.budget, budget=0.2)
    own = replace(cfg, activation_checkpointing=own, compile=True)
    assert {m.budget for m in checkpointing_modes(own, H100)} == {None, 0.2}
    modes = {choice.offload.value for choice in choices(cfg, CPU, [Strategy.FULL_SHARD])}
    assert modes == {"none", "nvme"} and len(choices(cfg, H100, [Strategy.FULL_SHARD])) == 5 * 4


def test_the_best_way_comes_first_and_is_measured_again() -> None:
    """What fits, then the fastest; of equally fast ones that which recomputes less, then that of fewer bytes. One that
    does not fit when it is measured gets smaller micro-batches (`e`), or comes last (`f`)."""
    speeds = {
        "e": (True, 6, "none", 40),
        "f": (True, 7, "none", 50),
        "a": (True, 5, "full", 10),
        "b": (True, 5, "none", 30),
        "c": (False, 9, "none", 1),
        "d": (True, 5, "none", 20),
    }

    def row(way: str, ranks: Any, split: Any, sizes: Any = None) -> SimpleNamespace:
        fits, speed, mode, total = speeds[way]
        if sizes is None and (way == "f" or (way, split) == ("e", ("large",))):
            fits = False
        if split == ("small",):
            speed -= 2
        checkpointing = SimpleNamespace(mode=ActivationCheckpointing(mode))
        choice = SimpleNamespace(activation_checkpointing=checkpointing, name=way)
        return SimpleNamespace(
            fits=fits, samples_per_second=speed, choice=choice, bytes={"total": total}, micro_batches=split, sizes=sizes
        )

    def again(choice: Any, *rest: Any) -> SimpleNamespace:
        return row(choice if isinstance(choice, str) else choice.name, *rest)

    cfg = SimpleNamespace(parallel=SimpleNamespace(expert=1))
    planner: Any = SimpleNamespace(
        row=again, sizes_to_measure=lambda splits: ["small", "large"], cfg=cfg, ranks_of_same_part=lambda ranks: ranks
    )
    found: Any = plan_rows(planner, cast(Any, list(speeds)), cast(Any, None), cast(Any, [("large",), ("small",)]))
    assert [own.choice.name for own in found] == ["d", "b", "a", "e", "c", "f"]
    assert [own.micro_batches for own in found] == [("large",)] * 3 + [("small",)] * 3
    assert found[0].sizes is None and found[1].sizes == ["small", "large"]


@pytest.mark.parametrize(
    ("param", "master", "one", "three"),
    [
        (DType.bf16, MasterDType.fp32, 2 + 4, 2 + 4 + 2 * (4 + 2 + 4)),
        (DType.fp16, MasterDType.fp32, 2 + 4, 2 + 4 + 2 * (4 + 2 + 4)),
        (DType.fp32, MasterDType.fp32, 0, 2 * (4 + 4 + 4)),
        (DType.bf16, MasterDType.bf16, 0, 2 * (2 + 2 + 2)),
    ],
)
def test_bytes_that_adding_gradients_moves(param: DType, master: MasterDType, one: int, three: int) -> None:
    """Reads of the gradient and of the sum, and the write of the sum; the first gradient is only cast."""
    precision = replace(config_of([]).precision, param_dtype=param, master_dtype=master)
    assert [added_bytes(precision, count) for count in (1, 3)] == [one, three]


@pytest.mark.parametrize("pack", [True, False])
def test_memory_is_measured_at_few_sizes(pack: bool, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """At 16 times the tokens of the one before; samples in a packed row are as many as the mean length gives."""
    cfg = make_config(parts, dataset, tmp_path, f"pack={str(pack).lower()}", "data.max_length=256")
    planner = Planner(cfg, machine_named("h100", 8), Samples(100.0, 0.6, 12, 30.0, "test", 4))
    sizes = planner.sizes_to_measure(
        [[MicroBatchSizes(17, 256, 17, 9, 90, 36)], [MicroBatchSizes(1, 256, 3, 2, 33, 8)]]
    )
    found = [(size.rows, size.length, size.samples) for size in sizes]
    assert found[0] == (1, 256, 3)
    assert found[1:] == ([(1, 4096, 41), (1, 65536, 655)] if pack else [(16, 256, 16), (256, 256, 256)])
    assert (
        planner.sizes_to_measure([[MicroBatchSizes(1, 256, 2, 1, 9, 4)], [MicroBatchSizes(1, 256, 1, 1, 9, 4)]]) == []
    )


def test_memory_is_interpolated_between_the_nearest_sizes(parts: Path, dataset: Path, tmp_path: Path) -> None:
    planner = Planner(make_config(parts, dataset, tmp_path, "pack=true"), machine_named("h100", 8))
    sizes = [MicroBatchSizes(1, length, 1, 0, length, 0) for length in (256, 4096, 65536)]
    mode = ActivationCheckpointing.full
    measured = [planner.segments(mode, size, False) for size in sizes]
    for length, (small, large) in {1216: (0, 1), 20480: (1, 2)}.items():
        share = (length - sizes[small].length) / (sizes[large].length - sizes[small].length)
        [found] = planner.passes(mode, [MicroBatchSizes(1, length, 1, 0, length, 0)], sizes, False)
        pairs = zip(measured[small], measured[large], strict=True)
        assert found == [interpolate(first, second, share) for first, second in pairs]
    for length in (128, 4096, 70000):
        micro = MicroBatchSizes(1, length, 1, 0, length, 0)
        assert planner.passes(mode, [micro], sizes, False) == [planner.segments(mode, micro, False)]
