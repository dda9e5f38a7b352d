"""The plan's worst moment of the run that begins, for its page."""

from pathlib import Path

import pytest
from harness import single_world
from small import make_config

from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import without_repeats
from llava_fsdp.plan.search.auto import expected_peak
from llava_fsdp.plan.workload import Samples


@pytest.mark.slow
def test_more_in_a_row_is_more_memory(parts: Path, dataset: Path, tmp_path: Path) -> None:
    samples, found = Samples(100, 0.7, 20, 30, "imagined", 4), []
    for tokens in (256, 1024):
        cfg = make_config(parts, dataset, tmp_path, f"tokens_per_micro_batch={tokens}", "global_batch_size=64")
        found.append(expected_peak(cfg, single_world(), find_parts(cfg.model), samples))
    assert 0 < found[0] < found[1]


def test_a_second_micro_batch_is_planned_beside_the_gradients_of_the_first() -> None:
    """Though it is equal to it; more that are equal to the second are not."""
    one, other = MicroBatchSizes(1, 70, 70, 1, 20, 4), MicroBatchSizes(1, 30, 30, 0, 9, 0)
    assert without_repeats([one, one]) == [one, one]
    assert without_repeats([one, other, one, other]) == [one, other, one]
    assert without_repeats([one]) == [one]
