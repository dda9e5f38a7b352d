"""Precision x activation checkpointing x offload: all that go together train; the last two change no bit.

In the fast tier, two precisions with two combinations of every pair of choices; in the slow one, the whole product.
"""

from itertools import combinations, product

import pytest
from harness import RankPool
from small import Configure
from steps import begin, digest_of_state, run_steps
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError

PRECISIONS = ("bf16", "fp32", "fp16", "bf16_pure", "bf16 precision.moment_dtype=int8")
CHECKPOINTING = ("none", "full", "selective", "offload")
OFFLOAD = ("none", "optimizer", "params", "nvme")
Way = tuple[str, str, str]
Trace = tuple[list[float], str]


def is_offered(way: Way) -> bool:
    """What is rounded by the row is not updated in stretches (config.Config.check_offload)."""
    return way[2] in ("none", "params") or way[0] in PRECISIONS[:3]


OFFERED = [way for way in product(PRECISIONS, CHECKPOINTING, OFFLOAD) if is_offered(way)]


def pairs(way: Way) -> set[tuple[tuple[int, str], ...]]:
    return set(combinations(enumerate(way), 2))


def pairwise() -> list[Way]:
    """Ways that have every pair of choices that any way has: the one with most of what is missing, again and again."""
    missing = set().union(*map(pairs, OFFERED))
    found: list[Way] = []
    while missing:
        found.append(max(OFFERED, key=lambda way: len(pairs(way) & missing)))
        missing -= pairs(found[-1])
    return found


QUICK = pairwise()


def traces(world: World, configs: list[Config]) -> list[Trace]:
    """Five losses of each, and a digest of this rank's masters and moments behind them."""
    found = []
    for cfg in configs:
        state = begin(world, cfg)
        found.append(([result.loss for result in run_steps(state, cfg)], digest_of_state(state)))
    return found


def config(way: Way, configure: Configure) -> Config:
    values = "precision={} activation_checkpointing={} offload={}".format(*way).split()
    common = "sharding=zero3 global_batch_size=4 micro_batch_size=1 max_steps=5 optim.warmup_ratio=0".split()
    return configure(*values, *common)


def check(ways: list[Way], configure: Configure, pools: dict[int, RankPool]) -> None:
    """Compare all ways with the first one, on two ranks."""
    configs = [config(way, configure) for way in ways]
    by_rank = pools[2].run(traces, configs, timeout=60 + 60 * len(ways))
    for found in by_rank:
        losses = found[0][0]
        assert len(losses) == 5 and losses[-1] < losses[0]
        for way, trace in zip(ways, found, strict=True):
            assert trace == found[0], way


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_pair_of_choices_trains_to_the_same_bits(
    precision: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    plain = (precision, "none", "none")
    check([plain, *(w for w in QUICK if w[0] == precision and w != plain)], configure, pools)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_combination_trains_to_the_same_bits(
    precision: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    ways = [w for w in OFFERED if w[0] == precision]
    assert ways[0] == (precision, "none", "none")
    check(ways, configure, pools)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("precision", PRECISIONS)
def test_offload_changes_no_bit_of_compiled_blocks(
    precision: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    """How far these are from activation_checkpointing=none is test_activation_checkpointing's."""
    ways = [way for mode in OFFLOAD if is_offered(way := (precision, "budget", mode))]
    check(ways, configure, pools)


@pytest.mark.parametrize(
    "way", slow_after(4, [(w,) for w in product(PRECISIONS, CHECKPOINTING, OFFLOAD) if not is_offered(w)]), ids=str
)
def test_what_is_not_offered_is_refused_at_the_door(way: Way, configure: Configure) -> None:
    with pytest.raises(ConfigError, match="choose offload=params"):
        config(way, configure)
