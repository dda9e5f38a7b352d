"""Which samples a step has."""

import math

import pytest
import torch
from small import config_of
from torch.utils.data import RandomSampler

from llava_fsdp.config import SourceConfig
from llava_fsdp.data.batching.llava_samplers import ACCELERATE_SEED, LlavaSampler
from llava_fsdp.data.batching.sampler import Shuffle, open_sampler, shares_of
from llava_fsdp.runtime.errors import ConfigError


def test_shuffle_has_every_record_once_an_epoch() -> None:
    order = Shuffle(44, seed=42, global_batch_size=12)
    assert order.per_epoch == 4
    for epoch in range(2):
        steps = [order.samples(epoch * 4 + s) for s in range(4)]
        assert [len(s) for s in steps] == [12, 12, 12, 8]
        assert sorted(i for s in steps for i in s) == list(range(44))
    assert order.samples(0) != order.samples(4)


def test_shuffle_is_a_function_of_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    first = Shuffle(100, 42, 100).samples(0)
    torch.manual_seed(2)
    assert first == Shuffle(100, 42, 100).samples(0)
    assert first != Shuffle(100, 43, 100).samples(0) and first != Shuffle(100, 42, 100).samples(1)


def shares(counts: list[int], **sources: dict) -> tuple:
    named = {name: SourceConfig(path=f"{name}.json", **own) for name, own in sources.items()}
    return shares_of(named, counts)


def test_one_plain_source_has_the_order_of_a_single_file() -> None:
    alone = Shuffle(44, 42, 12)
    named = Shuffle(44, 42, 12, shares([44], a={}))
    for step in range(2 * alone.per_epoch):
        assert named.samples(step) == alone.samples(step)


def test_sources_are_seen_as_often_as_they_say() -> None:
    order = Shuffle(20, 1, 8, shares([8, 12], a={"epochs": 2}, b={"epochs": 0.25}))
    assert order.samples_per_epoch == 16 + 3 and order.per_epoch == 3
    epochs = [sorted(i for s in range(3) for i in order.samples(e * 3 + s)) for e in range(4)]
    for epoch in epochs:
        assert [i for i in epoch if i < 8] == sorted([*range(8), *range(8)])
    assert sorted(i for epoch in epochs for i in epoch if i >= 8) == list(range(8, 20)), "fractions rotate"
    assert order.epoch(3).tolist() == Shuffle(20, 1, 5, order.shares).epoch(3).tolist(), "whatever the steps"


def test_which_records_a_share_takes_depends_on_its_seed_and_name() -> None:
    def taken(seed: int, name: str) -> set[int]:
        return set(Shuffle(100, seed, 10, shares([100], **{name: {"epochs": 0.2}})).epoch(0).tolist())

    assert len({frozenset(taken(seed, name)) for seed in (1, 2) for name in ("a", "b")}) == 4


def test_weights_share_out_as_many_samples_as_there_are_records() -> None:
    order = Shuffle(100, 1, 10, shares([90, 3, 7], a={"weight": 1}, b={"weight": 1}, c={"weight": 1.5}))
    assert [s.samples for s in order.shares] == [29, 28, 43] and order.samples_per_epoch == 100
    epoch = order.epoch(0)
    assert ((epoch >= 90) & (epoch < 93)).sum() == 28
    counts = [(epoch == n).sum() for n in range(93, 100)]
    assert max(counts) - min(counts) <= 1


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
        open_sampler([1] * 64, cfg, 3)
    with pytest.raises(ConfigError, match="global_batch_size=16 is not a multiple of micro_batch_size=5"):
        config_of(["compat=llava_v1_5", "global_batch_size=16", "micro_batch_size=5"])
    with pytest.raises(ConfigError, match="an epoch has 1 micro-batches for each rank, fewer than the 2 of a step"):
        LlavaSampler([1] * 4, 4, 2, 1, seed=1, grouped=False)
