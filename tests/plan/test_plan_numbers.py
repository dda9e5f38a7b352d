"""Arithmetic of a plan: sizes of samples, splits of a step, what machines have, and what moves."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small import config_of

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    AspectRatio,
    DType,
    OffloadMode,
    PatchMerge,
    PrecisionConfig,
    SamplerName,
)
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.distributed.memory import Weight
from llava_fsdp.plan.activations import MicroBatch
from llava_fsdp.plan.fsdp_units import unit_of
from llava_fsdp.plan.hardware import CONTEXT, DEVICES, GPUS, MIB, NCCL, PROCESS, Machine
from llava_fsdp.plan.scaling_page import node_counts
from llava_fsdp.plan.search import largest_that_fits
from llava_fsdp.plan.step_time import RECOMPUTED, Volume, recomputed_share, step_time
from llava_fsdp.plan.workload import (
    Samples,
    configured_split,
    micro_batch,
    most_tokens,
    possible_splits,
    samples_of,
    samples_of_report,
)
from llava_fsdp.runtime.errors import ConfigError

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
    assert most_tokens(SAMPLES, 4) == 400 + 3 * 10 * 2


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


def test_a_shrunk_image_has_more_tiles_than_its_tokens_fill() -> None:
    """Tiles are limited by the samples, and in a short row by the tokens."""
    samples = replace(SAMPLES, tiles=8.0, tile_tokens=10.5, tokens=120.0)
    assert micro_batch(samples, 1, 700, 6) == MicroBatch(1, 700, 6, 48, 180, 504)
    assert micro_batch(samples, 1, 400, 6) == MicroBatch(1, 400, 6, 38, 180, 399)


def test_how_a_rank_s_part_of_a_step_is_cut() -> None:
    """16 samples on 3 ranks are 5 and a third each."""
    cfg = replace(
        config_of(["data.max_length=200"]), global_batch_size=16, micro_batch_size=3, tokens_per_micro_batch=None
    )
    padded = replace(cfg, pack=False)
    assert configured_split(padded, SAMPLES, 3) == [MicroBatch(3, 200, 3, 2, 90, 48)] * 2
    assert configured_split(padded, SAMPLES, 9) == [MicroBatch(2, 200, 2, 1, 60, 24)]
    ways = possible_splits(padded, SAMPLES, 3)
    assert [(len(way), way[0].rows) for way in ways] == [(1, 6), (2, 3), (3, 2), (6, 1)]
    original = replace(padded, sampler=replace(cfg.sampler, name=SamplerName.llava_v1_5), micro_batch_size=1)
    assert [(len(way), way[0].rows) for way in possible_splits(original, SAMPLES, 4)] == [(1, 4), (2, 2), (4, 1)]
    with pytest.raises(ConfigError):
        possible_splits(original, SAMPLES, 3)
    assert configured_split(cfg, SAMPLES, 4) == [MicroBatch(1, 460, 5, 3, 150, 72)]
    assert [(len(way), way[0].length, way[0].samples) for way in possible_splits(cfg, SAMPLES, 4)] == [
        (1, 512, 5), (2, 256, 3),
    ]  # fmt: skip
    rows = replace(original, pack=True, micro_batch_size=2)
    assert configured_split(rows, SAMPLES, 4) == [MicroBatch(1, 243, 2, 1, 60, 24)] * 2


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
    assert machine.usable(1) == 9600 * MIB - CONTEXT and machine.usable(2) == machine.usable(1) - NCCL
    assert replace(machine, memory=MIB).usable(1) == 0
    cores = Machine(None, "2 CPU cores", 1000 * MIB, 60e9)
    assert cores.usable(2) == 1000 * MIB - PROCESS and cores.peak(DType.bf16) == 60e9
    counts = {2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 7: [1, 2, 4, 7], 8: [1, 2, 4, 8]}
    assert {nodes: node_counts(nodes) for nodes in counts} == counts


def precision() -> PrecisionConfig:
    return config_of([]).precision


def test_what_fsdp_allocates_for_a_unit() -> None:
    """Two weights of 7 rows on 3 ranks, padded to 9; one of them frozen. bf16, with fp32 masters and reductions."""
    weights = [Weight((7, 4), True, False, False, unit="a"), Weight((7, 2), False, False, False, unit="a")]
    found = unit_of("a", weights, precision(), 3, False, False)
    assert (found.gathered, found.buffer) == (2 * 9 * (4 + 2),) * 2
    assert (found.reduce_input, found.reduce_output, found.shard_gradients) == (4 * 36, 4 * 12, 4 * 12)
    assert (found.widened, found.narrow) == ((4 * 28,), (2 * 28,)) and found.cast == 2 * 12
    through = unit_of("a", weights, precision(), 3, True, True)
    assert through.shard_gradients == 0 and through.cast == (4 + 2) * 12 + 2 * 6
    alone = unit_of("a", weights, precision(), 1, False, False)
    assert alone.buffer == 0 and alone.reduce_output == 2 * alone.reduce_input and alone.cast == 2 * 28


def test_what_a_step_waits_for() -> None:
    """What hides behind nine tenths of the arithmetic costs nothing; each way to offload moves other bytes."""
    machine = Machine(GPUS["a100-80gb"], "a100", 0, 0.0)
    steps = {
        mode: step_time(machine, precision(), 1.5e14, 0.5e14, Volume(), 1e9, 5e8, 3, 4, mode) for mode in OffloadMode
    }
    plain = steps[OffloadMode.none]
    assert plain.compute == pytest.approx(2e14 / (312e12 * 0.6)) and plain.exposed == 0
    assert plain.copies == pytest.approx(38 * 1e9 * 3 / (0.8 * 2039e9))
    assert plain.update == pytest.approx(28 * 5e8 / (0.8 * 2039e9))
    assert steps[OffloadMode.optimizer].update == pytest.approx(plain.update + 16 * 5e8 / 32e9)
    assert steps[OffloadMode.params].exposed == steps[OffloadMode.nvme].exposed == pytest.approx(3 * 12 * 5e8 / 32e9)
    assert steps[OffloadMode.params].update == pytest.approx(28 * 5e8 / 12e9)
    assert steps[OffloadMode.nvme].update == pytest.approx(28 * 5e8 / 12e9 + 40 * 5e8 / 2e9)
    slow = Volume(sharded=1e12, shards=4)
    waits = step_time(machine, precision(), 2e14, 0.0, slow, 1e9, 5e8, 3, 4, OffloadMode.none)
    assert waits.exposed == pytest.approx(slow.seconds(300e9, 25e9) - 0.9 * waits.compute)
    assert step_time(machine, precision(), 1.0, 0.0, Volume(), 1e9, 5e8, 3, 1, OffloadMode.none).copies == 0
    assert {mode.name: share for mode, share in RECOMPUTED.items()} == {
        "none": 0.0, "full": 1.0, "selective": 0.15, "offload": 1.0,
    }  # fmt: skip
    assert ActivationCheckpointing.budget not in RECOMPUTED
    budget = ActivationCheckpointingConfig(mode=ActivationCheckpointing.budget, budget=0.3)
    assert recomputed_share(budget) == 0.7


def test_what_a_step_on_cpu_cores_waits_for() -> None:
    machine, sent = Machine(None, "2 CPU cores", 0, 60e9), Volume(sharded=1e12, replicated=3e11, shards=2, replicas=2)
    step = step_time(machine, precision(), 6e10, 3e10, sent, 1e9, 5e8, 3, 4, OffloadMode.none)
    assert (step.compute, step.update) == pytest.approx((1.5, 28 * 5e8 / 10e9))
    assert step.copies == pytest.approx(38 * 1e9 * 3 / 10e9)
    assert step.communication == pytest.approx((1e12 + 3e11) / 0.78 / 2e9)
    assert step.exposed == pytest.approx(step.communication - 0.9 * 1.5)
    offloaded = step_time(machine, precision(), 6e10, 3e10, sent, 1e9, 5e8, 3, 4, OffloadMode.optimizer)
    assert offloaded.update == pytest.approx((28 + 16) * 5e8 / 10e9)


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
    splits = [[MicroBatch(1, length, 1, 1, 1, 1)] for length in (70, 60, 50, 40, 30)]
    for limit in (30, 45, 60, 69, 29):
        row = partial(fitting_row, limit)
        found: Any = largest_that_fits(
            cast(Any, SimpleNamespace(row=row)), cast(Any, None), cast(Any, None), splits, []
        )
        assert found.split == next((split for split in splits if split[0].length <= limit), splits[-1])


def fitting_row(limit: int, choice: Any, ranks: Any, split: list[MicroBatch], ends: Any) -> SimpleNamespace:
    return SimpleNamespace(split=split, fits=split[0].length <= limit)
