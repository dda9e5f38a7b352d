"""Predict the memory of a rank that has some stages of the model (`parallel.pipeline`): which segments of a forward and
backward pass it runs, and what the micro-batches under way keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llava_fsdp.config import ParallelConfig, ShardingConfig
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.memory.memory import Weight
from llava_fsdp.parallel.pipeline.pipeline import Pass as StagePass
from llava_fsdp.parallel.pipeline.stages import StagePlan, children_of, stage_of
from llava_fsdp.parallel.ranks.rank_layout import place_of_group
from llava_fsdp.parallel.sharding_strategies import ShardPlan
from llava_fsdp.plan.memory.activations import Live, PassSegment
from llava_fsdp.plan.memory.fsdp_units import Unit
from llava_fsdp.plan.memory.simulate import FsdpRank, Ledger, Pass, States


@dataclass(frozen=True)
class StageSegments:
    """The segments that a stage runs of one micro-batch's passes, with the bytes of tensors on the stage's rank."""

    forward: tuple[PassSegment, ...]
    backward: tuple[PassSegment, ...]
    output: Live
    """By how many bytes the stage's output is larger than that of a block inside a stage: not 0 only with
    `parallel.tensor`, where a stage sends all positions and a block returns this rank's."""
    sent: tuple[Live, Live]
    """Messages to other stages: the stage's output, and the gradient of its input."""

    @property
    def kept(self) -> Live:
        """What the forward pass of the stage keeps until its backward pass, the stage's output included."""
        return self.forward[-1].end + self.output


def names_of_stages(model: Architecture, plan: StagePlan) -> list[set[str]]:
    """Return, for each stage of a pipeline, the names that its parameters have in the whole model."""
    children = children_of(model.language)
    assert children is not None, "checked when the stages were planned"
    last = len(plan.blocks) - 1
    stages = [stage_of(model, children, part, n == 0, n == last) for n, part in enumerate(plan.blocks)]
    return [{name for name, _ in stage.named_parameters()} for stage in stages]


def weights_of_groups(
    model: Architecture, weights: Mapping[str, Weight], plan: StagePlan, parallel: ParallelConfig
) -> list[list[Weight]]:
    """Return, for each group of ranks of a pipeline, the parameters of its stages. `model` is whole and on the meta
    device; `weights`: its parameters' properties by name; `plan`: the blocks of each stage."""
    names = names_of_stages(model, plan)
    found = []
    for group in range(parallel.pipeline):
        # `own`: numbers of the group's stages
        names_of_group = set[str]().union(*(names[stage] for stage in place_of_group(parallel, group).own))
        found.append([weight for name, weight in weights.items() if name in names_of_group])
    return found


def segments_of_stage(
    segments: Pass, stack: str, blocks: range, is_first: bool, is_last: bool, hidden: int,
    local_hidden_bytes: int, keeps_local_input: bool,
) -> StageSegments:  # fmt: skip
    """Return the segments that a stage of a pipeline runs of a micro-batch's passes. Their bytes are those of the rank
    that has the stage: its tensors, and the hidden states that it has received from the stage before.

    Args:
        segments: the forward and backward pass of the whole model.
        stack: name of the list of the language model's blocks.
        blocks: numbers of the stage's blocks.
        hidden: bytes of the hidden states that stages send to each other.
        local_hidden_bytes: bytes of the hidden states that this rank has between two blocks: with `parallel.tensor`
            only a part of the positions, else as many as `hidden`.
        keeps_local_input: whether the stage's first block keeps for the backward pass, beside what the stage received,
            also this rank's positions of it.
    """
    first, last = f"{stack}.{blocks.start}", f"{stack}.{blocks.stop - 1}"

    def cut(backward: bool, begin: str, end: str) -> list[PassSegment]:
        """Return the segments of one pass from the block `begin` to `end`; empty: from the first, to the last one."""
        one_pass = [s for s in segments if s.backward is backward]
        places = {s.block: number for number, s in enumerate(one_pass)}
        return one_pass[places[begin] if begin else 0 : places[end] + 1 if end else len(one_pass)]

    forward = cut(False, "" if is_first else first, "" if is_last else last)
    backward = cut(True, "" if is_last else last, "" if is_first else first)
    # before its first block, a stage holds the hidden states that it received, and not what earlier stages keep
    before = forward[0].begin
    shift = (
        Live()
        if is_first
        else Live(hidden + local_hidden_bytes * keeps_local_input - before.activations, -before.logits)
    )
    kept = Live() if is_last else Live(activations=hidden)  # a stage keeps its output until its backward pass ends
    # the stage's last block returns all positions, and its backward pass begins with the gradient of all
    extra_output = Live() if is_last else Live(activations=hidden - local_hidden_bytes)
    return StageSegments(
        tuple(s.shifted(shift, s.block) for s in forward),
        tuple(s.shifted(shift + kept + (extra_output if s.block == last else Live()), s.block) for s in backward),
        extra_output,
        # what the stage sends to others: its output, and the gradient of its input
        (kept, Live() if is_first else Live(activations=hidden)),
    )


def simulate_pipeline(
    order: Sequence[tuple[StagePass, StageSegments]],
    units: dict[str, Unit],
    plan: ShardPlan,
    states: States,
    unit_names: dict[str, str],
    sharding: ShardingConfig,
) -> Ledger:
    """Simulate the device memory of one rank of a pipeline in a training step under FSDP.

    Args:
        order: the passes that the rank runs, in order, each with the memory segments of its stage and micro-batch.
        units: the FSDP units by name.
        plan: what FSDP shards, and whether it frees gathered weights after the forward pass.
        states: bytes that the rank holds throughout a step, such as its shards.
        unit_names: block name -> name of its FSDP unit.
        sharding: says how many units are gathered ahead of their use, and reduced at the same time.
    """
    ledger = states.open_ledger()
    rank = FsdpRank(ledger, units, plan, unit_names, sharding)
    left = Counter(one.stage for one, _ in order if not one.is_forward)  # stage -> backward passes still to run
    messages = kept_messages(order)  # for each pass, bytes of sent tensors that torch's schedule still holds after it
    under_way = Live()  # what forward passes have kept whose backward passes have not run yet
    states.begin_pass(ledger, 0)
    for (one, segments), kept in zip(order, messages, strict=True):
        if one.is_forward:
            rank.run_forward(segments.forward)
            under_way += segments.kept
        else:
            left[one.stage] -= 1
            rank.kept_by_other_micro_batches -= (
                segments.kept
            )  # the segments of the backward pass count these bytes themselves
            rank.run_backward(segments.backward, is_last=not left[one.stage])
            under_way -= segments.kept
        rank.kept_by_other_micro_batches = under_way + kept
        ledger.set_live(rank.kept_by_other_micro_batches)
    ledger.finish(states)
    return ledger


def kept_messages(order: Sequence[tuple[StagePass, StageSegments]]) -> list[Live]:
    """Return, for each pass of a rank in `order`, the bytes of outputs and gradients that torch's schedule still holds
    after the pass although they were sent to other stages.

    With the schedule 1F1B, local variables of `Schedule1F1B._step_microbatches`
    (torch/distributed/pipelining/schedules.py) hold the gradient that was sent last. Until the last forward pass they
    also hold one output: that of the second-last forward pass before the first backward pass. With the interleaved
    schedule (several stages on a rank) nothing is counted: it waits for its sends when the step ends, and what gloo
    keeps until then is left out.
    """
    if len({one.stage for one, _ in order}) > 1:  # the interleaved schedule
        return [Live()] * len(order)
    # number of forward passes before the first backward pass; place of the last forward pass
    ahead = next(number for number, (one, _) in enumerate(order) if not one.is_forward)
    last = max(number for number, (one, _) in enumerate(order) if one.is_forward)
    found, output, gradient = [], Live(), Live()
    for number, (one, segments) in enumerate(order):
        if not one.is_forward:
            gradient = segments.sent[1]  # `sent`: (the stage's output, the gradient of its input)
            if one.micro_batch == ahead - 2:  # until then, it counts among what the backward pass needs
                output = segments.sent[0]
        found.append(gradient + (output if number <= last else Live()))
    return found
