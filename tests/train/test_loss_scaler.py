"""fp16: the loss scale is DeepSpeed's, an overflow skips the step on every rank alike, and nothing of it is lost."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from small import Configure
from steps import begin, held_masters, run_steps
from tiers import slow_after
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from llava_fsdp.config import Config, ScalerConfig
from llava_fsdp.parallel.local_shards import whole
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import NumericError
from llava_fsdp.train import main as train
from llava_fsdp.train.gradients import clip_gradients
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.loss_scaler import build_scaler

FP16 = ["precision=fp16", "optim.schedule=constant", "global_batch_size=4", "micro_batch_size=2"]
HIGH = 40
"""2 ** 40 times the loss of the small model has gradients that fp16 has no number for; 2 ** 16 times it has not."""


def scales(cfg: ScalerConfig, overflows: str) -> list[float]:
    """The scale of every step, of which those marked x overflow."""
    scaler = build_scaler(cfg)
    found = []
    for number, mark in enumerate(overflows, start=1):
        found.append(scaler.scale)
        scaler.update(mark == "x", number)
    return found


# settings; which steps overflow; the scale of each step
RULES = {
    "scale": (ScalerConfig(scale=8.0, window=1), "xx...", [8, 8, 8, 8, 8]),
    "initial_power": (ScalerConfig(initial_power=5), "...", [32, 32, 32]),
    "hysteresis": (ScalerConfig(initial_power=5), "xx.x", [32, 32, 16, 16]),
    "hysteresis of 1": (ScalerConfig(initial_power=5, hysteresis=1), "xx.x", [32, 16, 8, 8]),
    "hysteresis of 3": (ScalerConfig(initial_power=5, hysteresis=3), "x.x.xx.", [32, 32, 32, 32, 32, 16, 8]),
    # DeepSpeed's count: the step after an overflow does not belong to the window
    "window": (ScalerConfig(initial_power=5, window=2), ".......", [32, 32, 32, 64, 64, 128, 128]),
    "window after an overflow": (
        ScalerConfig(initial_power=5, window=2, hysteresis=1), ".x.....", [32, 32, 16, 16, 16, 32, 32],
    ),
    "a doubling fills the hysteresis": (
        ScalerConfig(initial_power=5, window=1, hysteresis=2), "xx..xx", [32, 32, 16, 16, 32, 32],
    ),
    "minimum": (ScalerConfig(initial_power=5, minimum=12.0, hysteresis=1), "xx.", [32, 16, 12]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    cfg, overflows, expected = RULES[name]
    assert scales(cfg, overflows) == expected


def test_an_overflow_at_the_minimum_ends_the_run() -> None:
    with pytest.raises(NumericError, match=r"step 3: .* precision\.scaler\.minimum=16 already"):
        scales(ScalerConfig(initial_power=5, minimum=16.0, hysteresis=1), "x.x")
    assert scales(ScalerConfig(scale=1.0), "xxx") == [1, 1, 1]


@pytest.mark.slow
def test_rules_are_deepspeeds() -> None:
    """Against its own class, step for step, over drawn settings and overflows."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    import deepspeed.comm
    from deepspeed.runtime.fp16 import loss_scaler

    dice = random.Random(0)
    theirs_at_rank = deepspeed.comm.get_rank
    deepspeed.comm.get_rank = lambda *_: 1  # quiet
    try:
        for _ in range(300):
            cfg = ScalerConfig(
                initial_power=dice.randrange(2, 12),
                window=dice.randrange(1, 6),
                hysteresis=dice.randrange(1, 4),
                minimum=float(dice.choice([1, 2, 3, 4])),
            )
            ours = build_scaler(cfg)
            theirs = loss_scaler.DynamicLossScaler(
                init_scale=2.0**cfg.initial_power, scale_window=cfg.window, min_scale=cfg.minimum,
                delayed_shift=cfg.hysteresis, consecutive_hysteresis=False,
            )  # fmt: skip
            for step in range(60):
                overflowed = dice.random() < 0.3
                ended = []
                for scaler, arguments in ((ours, (overflowed, step)), (theirs, (overflowed,))):
                    try:
                        scaler.update(*arguments) if scaler is ours else scaler.update_scale(*arguments)
                        ended.append(False)
                    except Exception:
                        ended.append(True)
                assert ended[0] == ended[1]
                assert ours.scale == theirs.cur_scale
                if ended[0]:
                    break
    finally:
        deepspeed.comm.get_rank = theirs_at_rank


# overrides; the loss scale of every step as a power of two; which steps were skipped
FORCED = {
    "scale": (["scale=1.1e12"], [40, 40, 40], "xxx"),
    "initial_power": (["initial_power=16"], [16, 16, 16], "..."),
    "hysteresis": ([f"initial_power={HIGH}", "hysteresis=3"], [40, 40, 40, 39], "xxxx"),
    "window": (["initial_power=10", "window=1"], [10, 10, 11, 12], "...."),
    "minimum": ([f"initial_power={HIGH}", "hysteresis=1", f"minimum={2**39}"], [40, 39], "xx"),
}


@pytest.mark.parametrize("name", slow_after(2, FORCED))
def test_every_setting_by_a_forced_overflow(name: str, configure: Configure) -> None:
    """In training. A skipped step leaves weights, moments and the schedule as they were; the loss is without scale."""
    overrides, powers, marks = FORCED[name]
    cfg = configure(*FP16, f"max_steps={len(powers)}", *(f"precision.scaler.{value}" for value in overrides))
    state = begin(single_world(), cfg)
    first = held_masters(state)
    if name == "minimum":
        with pytest.raises(NumericError, match=r"step 2: .*precision\.scaler\.minimum"):
            run_steps(state, cfg)
        return
    results = run_steps(state, cfg)
    assert [round(torch.tensor(r.loss_scale).log2().item()) for r in results] == powers
    assert "".join("x" if r.skipped else "." for r in results) == marks
    assert [r.skipped_steps for r in results] == [marks[: n + 1].count("x") for n in range(len(marks))]
    assert state.consecutive == (3 if name == "scale" else 0), "a scale that is lowered has its own limit"
    assert state.step == len(marks) and state.samples == 4 * len(marks)
    assert all(0 < r.loss < 20 for r in results)
    good = marks.count(".")
    assert [r.lr for r in results] == [results[0].lr if n < 1 or not good else cfg.optim.lr for n in range(len(marks))]
    moved = [not torch.equal(p, first[n]) for n, p in state.masters.named.items()]
    assert any(moved) if good > 1 else not any(moved)
    assert all(("step" not in s) or int(s["step"]) == good for s in state.optimizer.state.values())


@pytest.mark.parametrize(
    ("largest", "expected"), [(None, [3.0, 0.0, 4.0]), (9.0, [3.0, 0.0, 4.0]), (1.0, [0.6, 0.0, 0.8])]
)
def test_gradients_are_divided_by_the_scale_and_then_clipped(largest: float | None, expected: list[float]) -> None:
    """AdamW hardly notices a constant factor, so gradients themselves are looked at."""
    parameter = nn.Parameter(torch.zeros(3))
    masters = MasterWeights({"a": parameter})
    parameter.grad = 1024 * torch.tensor([3.0, 0.0, 4.0])
    assert clip_gradients(masters, largest, 1024.0).item() == 5
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.tensor(expected))


def one_rank_overflows(world: World, cfg: Config, who: int) -> dict[str, Any]:
    """A step in which rank `who` alone has a loss that overflows, then one without."""
    state = begin(world, cfg)
    before = {n: whole(p).clone() for n, p in state.masters.named.items()}
    step = state.loader.steps.prepare(0)
    if world.rank == who:
        for micro in step.micro_batches:
            micro.scale *= 2.0**30
    with CommDebugMode() as counted:
        first = train_step(state, step, cfg, 0.0)
    assert state.scaler is not None
    scale = state.scaler.scale
    equal = all(torch.equal(before[n], whole(p)) for n, p in state.masters.named.items())
    second = train_step(state, state.loader.steps.prepare(1), cfg, 0.0)
    return {
        "skipped": (first.skipped, second.skipped),
        "unchanged": equal,
        "scale": scale,
        "norm": second.grad_norm,
        "collectives": counted.get_total_counts(),
    }


def collectives(world: World, cfg: Config) -> int:
    state = begin(world, cfg)
    with CommDebugMode() as counted:
        train_step(state, state.loader.steps.prepare(0), cfg, 0.0)
    return counted.get_total_counts()


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", [pytest.param("zero0", marks=pytest.mark.slow), "zero3"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    sharding: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    """Told by the norm, which is reduced anyway: as many collectives as in bf16."""
    values = [*FP16, f"sharding={sharding}", "precision.scaler.hysteresis=1"]
    cfg = configure(*values)
    mine, other = pools[2].run(one_rank_overflows, cfg, 1)
    for found in (mine, other):
        assert found["skipped"] == (True, False) and found["unchanged"] and found["scale"] == 2**15
    assert mine["norm"] == other["norm"] > 0
    bf16 = configure(*values[1:-1], "precision=bf16")
    assert mine["collectives"] == pools[2].run(collectives, bf16)[0] > 0


@pytest.mark.slow
def test_scale_and_skipped_steps_are_continued(configure: Configure, tmp_path: Path) -> None:
    """To the bit, and the rows of metrics.jsonl say what happened."""
    values = [*FP16, "max_steps=5", "checkpoint.every=3", "checkpoint.keep=9", "precision.scaler.initial_power=19"]
    values.append("precision.scaler.hysteresis=1")
    cfg = configure(*values, to=tmp_path / "whole")
    train.train(cfg)
    rows = read(tmp_path / "whole")
    assert 0 < sum(r["skipped"] for r in rows) < 5 and rows[-1]["skipped_steps"] == sum(r["skipped"] for r in rows)
    assert all((r["grad_norm"] is None) == r["skipped"] for r in rows)
    kept = "checkpoints/step-000003"
    shutil.copytree(tmp_path / "whole" / kept, tmp_path / "again" / kept)
    train.train(configure(*values, to=tmp_path / "again"))
    for row, expected in zip(read(tmp_path / "again"), rows[3:], strict=True):
        for key in ("step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "skipped_steps"):
            assert row[key] == expected[key], key


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
