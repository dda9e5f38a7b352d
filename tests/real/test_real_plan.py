"""The planner's bytes beside all tensors that are alive in real steps of published weights."""

import pytest
from harness import single_world
from live import measure_step
from small import Configure

from llava_fsdp.plan.planner import peak

CLOSE = 0.06
"""Share of the most bytes alive. On a CPU torch's kernels hold buffers that those of a GPU do not."""
CASES = {
    "full": ("finetune", ["pack=false", "micro_batch_size=2"]),
    "adapters": ("finetune_lora", ["tokens_per_micro_batch=256", "model.lora.r=8", "activation_checkpointing=full"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_most_bytes_are_those_that_are_planned(case: str, configure: Configure) -> None:
    """Of the second step, with the optimizer's moments; the whole models."""
    stage, values = CASES[case]
    cfg = configure("global_batch_size=4", *values, stage=stage)
    most, micros = measure_step(single_world(), cfg)
    planned = peak(cfg, 1, "cpu", micros, 0)
    assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (planned.moment, planned.bytes)
    assert most > 600e6, "the weights alone"
