"""A training whose ranks are killed goes on with other layouts of ranks, and ends like one that nobody killed."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lives import Run, gone
from mixtures import mixture_parts
from reference import assert_near, trained
from small import changed_parts

from llava_fsdp.runtime.exit_codes import ExitCode

LAYOUTS = {
    "model": [
        (4, "sharding=zero3 parallel.pipeline=2 parallel.tensor=2"),
        (2, "sharding=zero2 parallel.tensor=2"),
        (2, "sharding=zero0 parallel.pipeline=2 parallel.schedule=interleaved"),
        (4, "sharding=hybrid sharding.shard_size=2"),
        (2, "sharding=zero1 parallel.context=2"),
    ],
    "mixture": [
        (2, "sharding=zero3 parallel.expert=2"),
        (4, "sharding=zero2 parallel.pipeline=2 parallel.expert=2"),
        (4, "sharding=hybrid parallel.tensor=2 parallel.expert=2"),
        (4, "sharding=zero0 parallel.expert=4"),
        (4, "sharding=zero3 parallel.pipeline=2 parallel.expert=2 parallel.schedule=interleaved"),
    ],
}  # fmt: skip
STEPS = 24


@pytest.mark.faults
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_kills_between_layouts_change_nothing(
    kind: str, start: Callable[..., Run], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """One rank is killed at a random moment of each layout, after a step that no earlier layout has reached."""
    if kind == "model":
        sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 52}
        model = changed_parts(parts, tmp_path / "deep", {**sizes, "num_hidden_layers": 5, "vocab_size": 611})
    else:
        small = mixture_parts("qwen3_moe", parts, tmp_path / "mixture", 4)
        model = changed_parts(small, tmp_path / "deep", {"num_hidden_layers": 4})
    words = (
        "global_batch_size=8", "pack=true", "tokens_per_micro_batch=256", f"max_steps={STEPS}", "checkpoint.every=1",
        f"model.language={model / 'language'}",
    )  # fmt: skip
    calm = start(*words, folder=tmp_path / "calm", ranks=0)
    assert calm.wait(300) == ExitCode.DONE, calm.said

    dice = random.Random(kind)
    reached = 0
    for ranks, layout in LAYOUTS[kind]:
        run = start(*words, *layout.split(), folder=tmp_path / "hurt", ranks=ranks, pace=0.1)
        run.until_step(reached + 1)
        time.sleep(dice.uniform(0, 0.5))
        pids = run.pids()
        os.kill(run.pids(dice.randrange(ranks))[0], signal.SIGKILL)
        assert run.wait() != ExitCode.DONE
        assert gone(pids, seconds=30), layout
        reached = run.rows[-1]["step"]
        assert reached < STEPS, "killed before the end"
    run = start(*words, "sharding=zero3", folder=tmp_path / "hurt", ranks=3)
    assert run.wait(300) == ExitCode.DONE, run.said
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert_near(trained(run.output), trained(calm.output), 10**9, kind)
    for key in ("samples", "tokens", "label_tokens"):
        assert [row[key] for row in run.rows] == [row[key] for row in calm.rows]
