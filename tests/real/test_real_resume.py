"""A training of published weights that is killed and started again has the losses of one that was not, to the bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lives import Run
from real_parts import PRETRAINED
from runs import checkpoints, saved_tensors

STEPS = 4


def losses(run: Run) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in run.rows]


@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_killed_training_continues_to_the_bit(
    precision: str, short: Path, start: Callable[..., Run], tmp_path: Path
) -> None:
    """Two ranks in processes of their own, killed behind their first checkpoint. On the first 4 blocks."""
    words = [*PRETRAINED, f"precision={precision}", "global_batch_size=2", "micro_batch_size=1", f"max_steps={STEPS}"]
    words += ["checkpoint.every=2", "sharding=zero3", f"data.index={tmp_path / 'index'}"]

    words += [f"model.{part}={short / part}" for part in ("language", "vision")]

    def begin(name: str, **how: object) -> Run:
        return start(*words, folder=tmp_path / name, **how)

    whole = begin("whole")
    assert whole.wait(400) == 0, whole.said
    killed = begin("killed", pace=1.0)
    killed.until(lambda: "step-000002" in killed.checkpoints)
    killed.end()
    assert len(killed.rows) < STEPS
    again = begin("killed")
    assert again.wait(400) == 0, again.said
    assert losses(again) == losses(whole) and len(again.rows) == STEPS
    saved = [saved_tensors(checkpoints(one.output)[-1]) for one in (again, whole)]
    for (name, tensor), (its_name, expected) in zip(*saved, strict=True):
        assert name == its_name and torch.equal(tensor, expected), name
