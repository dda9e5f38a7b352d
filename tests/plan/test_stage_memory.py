"""Which messages of a pipeline take memory although other stages have received them."""

from typing import Any

from llava_fsdp.config import ParallelConfig
from llava_fsdp.config.keys.enums import PipelineSchedule
from llava_fsdp.parallel.pipeline.pipeline import passes_of
from llava_fsdp.plan.memory.activations import Live
from llava_fsdp.plan.memory.stage_memory import StageSegments, kept_messages


def order_of(parallel: ParallelConfig, group: int, micro_batches: int) -> list[tuple[Any, StageSegments]]:
    """The passes of a group; micro-batch n sends an output of 10 ** n bytes and a gradient of 2 * 10 ** n bytes."""

    def segments(number: int) -> StageSegments:
        return StageSegments((), (), Live(), (Live(activations=10**number), Live(activations=2 * 10**number)))

    return [(one, segments(one.micro_batch)) for one in passes_of(parallel, group, micro_batches)]


def test_a_pipeline_keeps_the_last_messages() -> None:
    """The first of three groups sends two outputs before its first backward pass, 1F 1F 1F 1B 1F 1B 1B 1B."""
    parallel = ParallelConfig(pipeline=3)
    order = order_of(parallel, 0, 4)
    assert [one.is_forward for one, _ in order] == [True, True, True, False, True, False, False, False]
    # the second output counts among what its backward pass needs until that pass, which is behind the last forward pass
    assert [live.activations for live in kept_messages(order)] == [0, 0, 0, 2, 2, 20, 200, 2000]
    order = order_of(parallel, 1, 4)
    assert [one.is_forward for one, _ in order] == [True, True, False, True, False, True, False, False]
    assert [live.activations for live in kept_messages(order)] == [0, 0, 3, 3, 21, 21, 200, 2000]


def test_the_interleaved_schedule_keeps_no_message() -> None:
    parallel = ParallelConfig(pipeline=2, schedule=PipelineSchedule.interleaved)
    assert set(kept_messages(order_of(parallel, 0, 4))) == {Live()}
