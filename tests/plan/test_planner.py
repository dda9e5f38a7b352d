"""What a planner says of one group of a pipeline, and of ranks that process rows together."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from small import make_config

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, OffloadMode, Strategy
from llava_fsdp.model.flops import count_flops
from llava_fsdp.parallel.pipeline.stages import plan_stages
from llava_fsdp.plan.memory.micro_batches import MicroBatches, MicroBatchSizes
from llava_fsdp.plan.planner import Choice, Group, Planner
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import machine_named
from llava_fsdp.plan.time.step_time import LATENCY, LINK_EFFICIENCY, Volume, context_volume
from llava_fsdp.plan.workload import Samples

SAMPLES = Samples(120, 0.6, 12, 30, "test", 4)
MICROS = MicroBatches([MicroBatchSizes(1, 128, 2, 1, 9, 4), MicroBatchSizes(1, 96, 2, 1, 9, 4)])
RANKS = RankCounts(6, 6, 6)


def choice_of(mode: str, budget: float | None = None) -> Choice:
    checkpointing = ActivationCheckpointingConfig(mode=ActivationCheckpointing(mode), budget=budget)
    return Choice(Strategy.FULL_SHARD, checkpointing, OffloadMode.none)


@pytest.fixture(scope="module")
def planner(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Planner:
    cfg = make_config(parts, dataset, tmp_path_factory.mktemp("out"), "pack=true", "tokens_per_micro_batch=256")
    return Planner(cfg, machine_named("h100", 6), SAMPLES)


def laid_out(planner: Planner, **kinds: int) -> Planner:
    return planner.with_layout(replace(planner.cfg, parallel=replace(planner.cfg.parallel, **kinds)))


@pytest.mark.parametrize(
    ("stages", "neighbours"), [((0,), 1), ((1,), 2), ((3,), 1), ((0, 2), 3), ((1, 3), 3), ((0, 1, 2, 3), 6)]
)
def test_stages_send_to_those_before_and_behind(stages: tuple[int, ...], neighbours: int, planner: Planner) -> None:
    """Of four stages: the first has none before it, and the last none behind it. 36 fp32 numbers for each token."""
    group = Group(0, [], {stage: range(1) for stage in stages}, 4)
    sent = planner.with_messages(Volume(sharded=7.0), RANKS, MICROS, group)
    assert (sent.pipeline, sent.messages, sent.sharded) == (neighbours * 224 * 36 * 4, neighbours * 2, 7.0)
    assert sent.stages_on_one_node
    assert not planner.with_messages(Volume(), replace(RANKS, node_size=3), MICROS, group).stages_on_one_node


@pytest.mark.parametrize(("on_one_node", "bandwidth"), [(False, 25e9), (True, 300e9)])
def test_messages_between_stages_cross_nodes_if_there_are_several(on_one_node: bool, bandwidth: float) -> None:
    plain = Volume(shards=4, node_size=8)
    sent = replace(plain, pipeline=6e9, messages=5, stages_on_one_node=on_one_node)
    expected = plain.seconds(300e9, 25e9) + 5 * LATENCY + 6e9 / bandwidth / LINK_EFFICIENCY
    assert sent.seconds(300e9, 25e9) == pytest.approx(expected) and sent.total == 6e9
    assert replace(sent, context=1.0, tensor=2.0, experts=4.0, sharded=8.0, replicated=16.0).total == 6e9 + 31


def test_weights_and_work_are_divided_among_the_groups(planner: Planner) -> None:
    """Each weight is in one group; with checkpointing, shares are those of the work with what runs again."""
    divided = laid_out(planner, pipeline=3)
    groups = divided.groups_of(recomputes=False)
    assert [group.stages for group in groups] == [{n: range(n, n + 1)} for n in range(3)]
    assert sum(len(group.weights) for group in groups) == len(planner.weights)
    assert sum(w.numel for group in groups for w in group.weights) == sum(w.numel for w in planner.weights)
    assert [(group.has_first, group.has_last) for group in groups] == [(True, False), (False, False), (False, True)]
    for recomputes, choice in ((False, choice_of("none")), (True, choice_of("full")), (True, choice_of("selective"))):
        plan = plan_stages(planner.model, count_flops(planner.model, recomputes), SAMPLES.counts, 3)
        shares = [group.share for group in divided.groups(choice)]
        assert shares == pytest.approx([cost / sum(plan.costs) for cost in plan.costs])
    assert sum(shares) == pytest.approx(1)
    (whole,) = planner.groups(choice_of("none"))
    assert whole.stages == {0: range(3)} and whole.has_first and whole.has_last and whole.share == 1


def test_a_pipeline_waits_less_with_more_micro_batches(planner: Planner) -> None:
    """Its idle time is that of its micro-batches, or of the number that is given."""
    choice = choice_of("none")
    (whole,) = planner.groups(choice)
    busy = planner.step(choice, RankCounts(2, 2, 2), MICROS, whole)[0].compute

    def compute(most: int | None = None) -> float:
        own = laid_out(planner, pipeline=3)
        group = replace(own.groups(choice)[1], share=1 / 3)
        return own.step(choice, RANKS, MICROS, group, most)[0].compute

    assert compute() == pytest.approx(busy / 3 * (1 + 2 / 2)) and compute(8) == pytest.approx(busy / 3 * (1 + 2 / 8))


@pytest.mark.parametrize(
    ("mode", "budget", "share"),
    [("none", None, 0.0), ("full", None, 1.0), ("offload", None, 1.0), ("selective", None, 1.0), ("budget", 0.3, 0.0)],
)
def test_which_exchanges_of_attention_run_again(
    mode: str, budget: float | None, share: float, planner: Planner
) -> None:
    """Selective checkpointing keeps products and no collectives; the compiler keeps all collectives."""
    shared, choice = laid_out(planner, context=3), choice_of(mode, budget)
    language = shared.parts.language
    moved, count = context_volume(shared.how, 3, language, 4, 224, share)
    (whole,) = shared.groups(choice)
    sent = shared.with_context(Volume(), choice, MICROS, whole)
    assert (sent.context, sent.exchanges, sent.context_size) == (pytest.approx(moved), 2 * count, 3)
    third = replace(whole, stages={1: range(1, 2)}, num_stages=3)
    part = shared.with_context(Volume(), choice, MICROS, third)
    assert part.context == pytest.approx(moved / 3) and part.exchanges == 2 * round(count / 3)
    (alone,) = planner.groups(choice)
    assert planner.with_context(Volume(), choice, MICROS, alone) == Volume()


def test_what_one_more_micro_batch_adds_is_added_for_each() -> None:
    """Collectives of weights and gradients; the rest stays as it is."""
    one = Volume(5.0, 3.0, 2, 1, context=9.0, shards=4)
    two = Volume(8.0, 3.0, 4, 2, context=100.0, shards=4)
    assert one.extrapolated(two, 3) == Volume(14.0, 3.0, 8, 4, context=9.0, shards=4)


def test_ranks_that_hold_the_same_parts_of_layers(planner: Planner) -> None:
    """Of 24 ranks on nodes of 8, with three groups of a pipeline and layers on two ranks."""
    ranks = RankCounts(24, 8, 8)
    assert planner.ranks_of_same_part(ranks) == RankCounts(24, 8, 8)
    assert laid_out(planner, pipeline=3).ranks_of_same_part(ranks) == RankCounts(8, 8, 8)
    assert laid_out(planner, pipeline=3).ranks_of_same_part(RankCounts(6, 8, 8)) == RankCounts(2, 2, 2)
    layers = copy.copy(laid_out(planner, pipeline=3))
    layers.cfg = replace(layers.cfg, parallel=replace(layers.cfg.parallel, tensor=2))
    assert layers.ranks_of_same_part(ranks) == RankCounts(4, 4, 4)
    assert layers.ranks_of_same_part(RankCounts(24, 2, 4)) == RankCounts(4, 2, 2)
