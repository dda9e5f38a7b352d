"""Which samples a step has."""

import hashlib
import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import config_of
from torch.utils.data import RandomSampler

from llava_fsdp.config import SourceConfig
from llava_fsdp.data.batching import sampler
from llava_fsdp.data.batching.llava_samplers import ACCELERATE_SEED, LlavaSampler
from llava_fsdp.data.batching.sampler import LARGE, ComputedShuffle, Shuffle, open_sampler, shares_of
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.seeds import derive


class FakeRecords:
    """Records of which only their number in each source is known."""

    def __init__(self, counts: list[int]):
        self.source_counts = counts
        self.words = [1] * len(self)
        self.index = SimpleNamespace(folder=Path("index"))

    def __len__(self) -> int:
        return sum(self.source_counts)


def records_of(counts: list[int]) -> Any:
    return FakeRecords(counts)


BOTH = pytest.mark.parametrize("kind", [Shuffle, ComputedShuffle])


def epoch_of(order: Shuffle | ComputedShuffle, number: int) -> list[int]:
    steps = range(number * order.per_epoch, (number + 1) * order.per_epoch)
    return [record for step in steps for record in order.samples(step)]


@BOTH
def test_shuffle_has_every_record_once_an_epoch(kind: type[Shuffle | ComputedShuffle]) -> None:
    order = kind(44, seed=42, global_batch_size=12)
    assert order.per_epoch == 4
    for epoch in range(2):
        steps = [order.samples(epoch * 4 + s) for s in range(4)]
        assert [len(s) for s in steps] == [12, 12, 12, 8]
        assert sorted(i for s in steps for i in s) == list(range(44))
    assert order.samples(0) != order.samples(4)


@BOTH
def test_shuffle_is_a_function_of_seed_and_epoch_alone(kind: type[Shuffle | ComputedShuffle]) -> None:
    torch.manual_seed(1)
    first = kind(100, 42, 100).samples(0)
    torch.manual_seed(2)
    assert first == kind(100, 42, 100).samples(0)
    assert first != kind(100, 43, 100).samples(0) and first != kind(100, 42, 100).samples(1)


def shares(counts: list[int], **sources: dict) -> tuple:
    named = {name: SourceConfig(path=f"{name}.json", **own) for name, own in sources.items()}
    return shares_of(named, counts)


@BOTH
def test_one_plain_source_has_the_order_of_a_single_file(kind: type[Shuffle | ComputedShuffle]) -> None:
    alone = kind(44, 42, 12)
    named = kind(44, 42, 12, shares([44], a={}))
    for step in range(2 * alone.per_epoch):
        assert named.samples(step) == alone.samples(step)


@BOTH
def test_sources_are_seen_as_often_as_they_say(kind: type[Shuffle | ComputedShuffle]) -> None:
    order = kind(20, 1, 8, shares([8, 12], a={"epochs": 2}, b={"epochs": 0.25}))
    assert order.samples_per_epoch == 16 + 3 and order.per_epoch == 3
    epochs = [sorted(i for s in range(3) for i in order.samples(e * 3 + s)) for e in range(4)]
    for epoch in epochs:
        assert [i for i in epoch if i < 8] == sorted([*range(8), *range(8)])
    assert sorted(i for epoch in epochs for i in epoch if i >= 8) == list(range(8, 20)), "fractions rotate"
    assert epoch_of(order, 3) == epoch_of(kind(20, 1, 5, order.shares), 3), "whatever the steps"


@BOTH
def test_which_records_a_share_takes_depends_on_its_seed_and_name(kind: type[Shuffle | ComputedShuffle]) -> None:
    def taken(seed: int, name: str) -> set[int]:
        return set(epoch_of(kind(100, seed, 10, shares([100], **{name: {"epochs": 0.2}})), 0))

    assert len({frozenset(taken(seed, name)) for seed in (1, 2) for name in ("a", "b")}) == 4


@BOTH
def test_weights_share_out_as_many_samples_as_there_are_records(kind: type[Shuffle | ComputedShuffle]) -> None:
    order = kind(100, 1, 10, shares([90, 3, 7], a={"weight": 1}, b={"weight": 1}, c={"weight": 1.5}))
    assert [s.samples for s in order.shares] == [29, 28, 43] and order.samples_per_epoch == 100
    epoch = np.array(epoch_of(order, 0))
    assert ((epoch >= 90) & (epoch < 93)).sum() == 28
    counts = [(epoch == n).sum() for n in range(93, 100)]
    assert max(counts) - min(counts) <= 1


MIXTURES = [
    {"a": {"epochs": 2}, "b": {"epochs": 0.25}, "c": {"epochs": 1.5}},
    {"a": {"weight": 1}, "b": {"weight": 0.3}, "c": {"weight": 2.5}},
    {"a": {}, "b": {"epochs": 3}, "c": {"epochs": 1 / 3}},
]


@pytest.mark.parametrize("sources", MIXTURES)
def test_both_shuffles_have_as_much_of_each_source(sources: dict[str, dict]) -> None:
    """In each epoch; and each record of a source as often, up to which ones come first in a pass over the source."""
    counts = [31, 12, 60]
    drawn, computed = (kind(103, 5, 16, shares(counts, **sources)) for kind in (Shuffle, ComputedShuffle))
    assert drawn.per_epoch == computed.per_epoch
    ends = np.cumsum(counts)
    seen = np.zeros((2, 103), dtype=np.int64)
    for epoch in range(12):
        records = np.array([epoch_of(drawn, epoch), epoch_of(computed, epoch)])
        by_source = [Counter(np.searchsorted(ends, own, side="right").tolist()) for own in records]
        assert by_source[0] == by_source[1] == {n: share.samples for n, share in enumerate(drawn.shares)}
        seen += [np.bincount(own, minlength=103) for own in records]
        for share in drawn.shares:
            own = seen[:, share.first : share.first + share.count]
            passes, rest = divmod((epoch + 1) * share.samples, share.count)
            assert set(own.ravel().tolist()) <= {passes, passes + 1}, "no record comes again before all others"
            assert ((own == passes + 1).sum(axis=1) == rest).all()
            if share.samples % share.count == 0:
                assert np.array_equal(own[0], own[1])


def test_sources_are_mixed_within_an_epoch() -> None:
    epoch = np.array(epoch_of(ComputedShuffle(2000, 5, 16, shares([1000, 1000], a={}, b={"epochs": 0.5})), 0))
    for part in np.split(epoch, 3):
        assert 0.6 < (part < 1000).mean() < 0.74


RECORDED = {
    (Shuffle, False): ("fce3b3cafb0ccf1a", [75, 107, 638, 918, 276, 985]),
    (Shuffle, True): ("4e0742ccb002e3b0", [512, 95, 458, 368, 510, 545]),
    (ComputedShuffle, False): ("00b028a9fa58db73", [611, 892, 65, 773, 629, 64]),
    (ComputedShuffle, True): ("4da8fd6563875bd0", [910, 60, 110, 129, 156, 572]),
}


@pytest.mark.parametrize(("kind", "mixes"), RECORDED)
def test_orders_stay_what_they_were(kind: type[Shuffle | ComputedShuffle], mixes: bool) -> None:
    """A run is resumed by them. A change of the computed one needs another VERSION; that of Shuffle must not change."""
    sources = shares([700, 300], a={"epochs": 2}, b={"epochs": 0.25}) if mixes else ()
    order = kind(1000, 42, 64, sources)
    records = [record for epoch in range(5) for record in epoch_of(order, epoch)]
    found = hashlib.sha256(np.array(records, dtype="<i8").tobytes()).hexdigest()[:16]
    assert (found, order.samples(order.per_epoch)[:6]) == RECORDED[kind, mixes]


def test_the_computed_order_takes_no_memory_of_many_records() -> None:
    order = ComputedShuffle(10**11, 1, 256, shares([6 * 10**10, 4 * 10**10], a={"epochs": 0.3}, b={"epochs": 2}))
    tracemalloc.start()
    samples = order.samples(order.per_epoch + 12_345_678)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(samples)) == 256 and max(samples) < 10**11 and peak < 1 << 20


def test_the_sampler_is_chosen_by_name_and_is_one_on_all_ranks() -> None:
    records = records_of([60, 40])
    mixture = "+data.sources.a.path=a.json", "+data.sources.b.path=b.json", "+data.sources.b.epochs=3"
    for name, kind in (("shuffle", Shuffle), ("computed_shuffle", ComputedShuffle)):
        cfg = config_of(["data=llava_json", *mixture, f"sampler={name}", "seed=3"])
        made: list[Any] = [open_sampler(records, cfg, size) for size in (1, 2, 3)]
        assert made[0] == made[1] == made[2] and type(made[0]) is kind
        assert (made[0].count, made[0].seed, made[0].global_batch_size) == (100, 3, cfg.global_batch_size)
        assert [share.samples for share in made[0].shares] == [60, 120]
        assert kind is ComputedShuffle or made[0].folder == Path("index") / "orders", "all processes share it"
    original = config_of(["compat=llava_v1_5", "seed=3"])
    for grouped in (True, False):
        cfg = replace(original, sampler=replace(original.sampler, group_by_modality_length=grouped))
        order: Any = open_sampler(records_of([600]), cfg, 1)
        assert (type(order), order.grouped) == (LlavaSampler, grouped)
        assert order.batch_size * order.accumulation * order.world_size == cfg.global_batch_size
    assert Shuffle.shape == "" and ComputedShuffle.shape == "computed_shuffle, version 1"


def test_int32_holds_the_same_permutation() -> None:
    generator = torch.Generator().manual_seed(derive("order", 1, 0))
    expected = torch.randperm(LARGE + 3, generator=generator).numpy()
    order = Shuffle(LARGE + 3, 1, 64).epoch(0)
    assert order.dtype == np.int32 and np.array_equal(order, expected)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_large_epoch_is_drawn_once_and_mapped(mixes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = shares([LARGE, 3], a={}, b={"epochs": 2}) if mixes else ()
    own = [Shuffle(LARGE + 3, 1, 64, sources, tmp_path / "orders") for _ in range(2)]
    expected = Shuffle(LARGE + 3, 1, 64, sources).epoch(1)
    assert np.array_equal(own[0].epoch(1), expected)
    monkeypatch.setattr(sampler, "permutation", lambda *_: pytest.fail("drawn again"))
    assert np.array_equal(own[1].epoch(1), expected) and isinstance(own[1].epoch(1), np.memmap)
    assert len(list((tmp_path / "orders").glob("*.npy"))) == 1


def test_a_small_epoch_makes_no_file(tmp_path: Path) -> None:
    Shuffle(1000, 1, 64, (), tmp_path / "orders").epoch(0)
    assert not (tmp_path / "orders").exists()


@pytest.mark.parametrize("other", [(LARGE + 1, 1, (), 0), (LARGE, 2, (), 0), (LARGE, 1, (), 1), (LARGE, 1, "twice", 0)])
def test_files_of_other_orders_are_others(other: tuple, tmp_path: Path) -> None:
    def names(count: int, seed: int, sources: tuple | str, epoch: int) -> set[Path]:
        if sources:
            sources = shares([LARGE - 4, 4], a={}, b={"epochs": 2})
        Shuffle(count, seed, 64, sources, tmp_path / "orders").epoch(epoch)
        return set((tmp_path / "orders").glob("*.npy"))

    assert len(names(LARGE, 1, (), 0)) == 1 and len(names(*other)) == 2


def test_sources_that_give_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\.b: b\.json would give less than one sample"):
        shares([10, 10], a={"weight": 1}, b={"weight": 0.001})
    with pytest.raises(ConfigError, match=r"data\.sources\.b: no record of b\.json is left"):
        shares([10, 0], a={}, b={})
    sources = ["data=llava_json", "+data.sources.a.path=a.json", "+data.sources.a.epochs=2"]
    for entry in ("train", "prepare"):
        with pytest.raises(ConfigError, match=r"sampler=llava_v1_5 has every record once an epoch"):
            config_of([*sources, "compat=llava_v1_5"], entry)


LENGTHS = [n % 7 + 1 if n % 3 else -(n % 5 + 1) for n in range(50)]


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 3), (2, 2), (4, 1)])
def test_original_order_is_one_stream_of_micro_batches(world_size: int, accumulation: int, grouped: bool) -> None:
    """Steps take the epochs' micro-batches one after the other, also those that an epoch has left over."""
    order = LlavaSampler(LENGTHS, 4, accumulation, world_size, seed=1, grouped=grouped)
    batches = math.ceil(math.ceil(50 / 4) / world_size)
    assert order.per_epoch == batches // accumulation
    steps = [order.assignment(s) for s in range(2 * order.per_epoch)]
    for rank in range(world_size):
        stream = [batch for step in steps for batch in step[rank]]
        epochs = order.epoch(0)[rank] + order.epoch(1)[rank]
        assert stream == epochs[: len(stream)] and len(epochs) - len(stream) < 2 * accumulation
    seen = {i for rank in order.epoch(0) for batch in rank for i in batch}
    assert seen == set(range(50))
    assert LlavaSampler(LENGTHS, 4, accumulation, world_size, seed=1, grouped=grouped).assignment(3) == steps[3]


def test_original_order_draws_every_epoch_as_torchs_sampler_does() -> None:
    """On several ranks accelerate gives torch's RandomSampler one generator for all epochs."""
    order = LlavaSampler(LENGTHS, 5, 1, 2, seed=1, grouped=False)
    sampler = RandomSampler(range(50), generator=torch.Generator().manual_seed(ACCELERATE_SEED))
    for number in range(3):
        ranks = order.epoch(number)
        assert [i for pair in zip(*ranks, strict=True) for batch in pair for i in batch] == list(sampler)


def test_original_order_needs_whole_micro_batches() -> None:
    cfg = config_of(["compat=llava_v1_5", "global_batch_size=16", "micro_batch_size=8"])
    with pytest.raises(ConfigError, match="16 is not a multiple of 8 x 3"):
        open_sampler(records_of([64]), cfg, 3)
    with pytest.raises(ConfigError, match="global_batch_size=16 is not a multiple of micro_batch_size=5"):
        config_of(["compat=llava_v1_5", "global_batch_size=16", "micro_batch_size=5"])
    with pytest.raises(ConfigError, match="an epoch has 1 micro-batches for each rank, fewer than the 2 of a step"):
        LlavaSampler([1] * 4, 4, 2, 1, seed=1, grouped=False)


SHARED = (2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2)
"""Samples of a micro-batch, micro-batches of a step, and ranks."""


def test_original_order_is_drawn_as_far_as_it_is_needed() -> None:
    """And no further: the generators are at the same place as in the original."""
    order = LlavaSampler([1] * 12, 2, 2, 1, seed=1, grouped=False)  # 6 micro-batches, 3 steps
    assert (order.per_epoch, len(order.epochs)) == (3, 1)
    for steps, epochs in ((3, 1), (4, 2), (6, 2), (7, 3)):
        order.draw(steps)
        assert len(order.epochs) == epochs
    assert order.samples(3) == [n for batch in order.epochs[1][0][:2] for n in batch]
    shapes = {LlavaSampler([1] * 12, *own, seed=1, grouped=False).shape for own in SHARED}
    assert len(shapes) == len(SHARED), "a run is not resumed with another one"


def test_original_order_of_edges() -> None:
    """An epoch may be one step; records without words matter only where lengths do, which may be of one sign."""
    assert LlavaSampler([1] * 8, 4, 2, 1, seed=1, grouped=False).per_epoch == 1
    assert LlavaSampler([0, 1], 1, 1, 1, seed=1, grouped=False).samples(0) in ([0], [1])
    with pytest.raises(ConfigError, match="record 1 has no words"):
        LlavaSampler([3, 0, -1], 1, 1, 1, seed=1, grouped=True)
    for sign in (1, -1):
        (order,) = LlavaSampler([sign * n for n in range(1, 9)], 8, 1, 1, seed=1, grouped=True).epoch(0)
        assert order == [[7, 6, 5, 4, 3, 2, 1, 0][::sign]]
