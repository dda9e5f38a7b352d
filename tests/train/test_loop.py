"""A step of the loop is AdamW over the gradients of that step alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import CPU, alone, single_world
from small import Configure
from steps import Calls
from tiers import slow_after
from torch import nn

from llava_fsdp.config import ParallelConfig
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.seeds import derive
from llava_fsdp.train import loop
from llava_fsdp.train import main as train
from llava_fsdp.train.gradients import clip_gradients, norm_over_stages
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.state import StepResult


def added(own: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if own is None or new is None:
        return new if own is None else own
    return own + new


@pytest.mark.parametrize("precision", slow_after(1, ["fp32", "bf16", "bf16_pure"]))
def test_gradients_are_gone_after_a_step(precision: str, configure: Configure) -> None:
    """Of masters and of working copies."""
    cfg = configure(f"precision={precision}", "micro_batch_size=6")
    state = train.build_state(cfg, alone(cfg))
    state.model.train()
    before = {name: master.detach().clone() for name, master in state.masters.named.items()}
    for number in range(2):
        train_step(state, state.loader.steps.prepare(number), cfg, 0.0)
        assert torch.initial_seed() == derive("step", cfg.seed, number, 0), "for a model that has dropout of its own"
        held = [*state.model.parameters(), *state.masters.named.values()]
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in held)
    assert any(not torch.equal(before[name], master) for name, master in state.masters.named.items())


def test_two_steps_are_adamw_over_the_gradients_of_each(configure: Configure) -> None:
    """To the bit: gradients are taken anew for every step, and added over its micro-batches."""
    values = ["micro_batch_size=6", "optim.clip=null", "optim.schedule=constant", "optim.warmup_ratio=0"]
    cfg = configure(*values, "pack=false")
    ours, theirs = (train.build_state(cfg, alone(cfg)) for _ in range(2))
    theirs.model.train()
    ours.model.train()
    weights = list(theirs.masters.named.values())
    optim = cfg.optim
    assert optim.weight_decay == 0
    optimizer = torch.optim.AdamW(
        weights, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0, fused=True
    )
    for number in range(2):
        train_step(ours, ours.loader.steps.prepare(number), cfg, 0.0)
        step = theirs.loader.steps.prepare(number)
        assert len(step.micro_batches) == 2
        total: list[torch.Tensor | None] = [None] * len(weights)
        for micro in map(theirs.loader.to_device, step.micro_batches):
            loss = micro.scale * theirs.model(**micro.inputs)
            found = torch.autograd.grad(loss, weights, allow_unused=True)
            total = [added(own, new) for own, new in zip(total, found, strict=True)]
        for weight, gradient in zip(weights, total, strict=True):
            weight.grad = gradient
        optimizer.step()
        for name, master in ours.masters.named.items():
            assert torch.equal(master, theirs.masters.named[name]), (number, name)


def test_ranks_that_compute_layers_together_count_once(configure: Configure, dataset: Path) -> None:
    """The last of eight ranks, each two of which compute layers together, in two groups with other stages: they have
    the same random numbers, and each has the whole loss of its rows, in total and by source."""
    sources = [f"++data.sources.{name}.path={dataset / f'{name}.json'}" for name in ("mixed", "captions")]
    cfg = configure("data.path=null", *sources)
    state = train.build_state(cfg, alone(cfg))
    weights = {name: weight.detach().clone() for name, weight in state.masters.named.items()}
    of_one = train_step(state, state.loader.steps.prepare(0), cfg, 0.0)
    state.step = 0
    with torch.no_grad():
        for name, weight in state.masters.named.items():
            weight.copy_(weights[name])
    last = World(7, 8, 7, 8, CPU)
    state.parallelism = replace(state.parallelism, world=last, parallel=ParallelConfig(tensor=2, pipeline=2))
    found = train_step(state, state.loader.steps.prepare(0), cfg, 0.0)
    assert torch.initial_seed() == derive("step", cfg.seed, 0, 1)
    assert found.loss == of_one.loss / 2 and of_one.source_losses.keys() == {"mixed", "captions"}
    for name, loss in of_one.source_losses.items():
        assert loss is not None and found.source_losses[name] == pytest.approx(loss / 2, rel=1e-6)


def test_a_step_knows_how_long_it_waited_for_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that data move by 3 seconds, a step by 10 and what is done behind it by 100. A request to stop is
    looked at when the data are there; every module that is called trains."""
    clock, told = [0.0], []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])

    def move(seconds: float, *what: object) -> None:
        clock[0] += seconds
        told.append(what)

    def steps_from(first: int, wants_stop: object) -> Iterator[int]:
        for number in range(first, 6):
            move(3, "data", number)
            yield number

    def step(state: Any, agreed: int, cfg: object, started: float, *rest: object) -> StepResult:
        assert agreed == -state.step and clock[0] - started == 3
        move(10, "step", state.step)
        state.step += 1
        return StepResult(StepFacts(state.step - 1), 1.0, 0.1, 1.0, 10.0)

    monkeypatch.setattr(loop, "train_step", step)
    loader = SimpleNamespace(steps_from=steps_from, agree=lambda step: -step, total_steps=6)
    roots = [nn.Linear(1, 1).eval() for _ in range(2)]
    values: dict[str, Any] = {"step": 4, "compilations": None, "dynamic": None, "ends_early": False}
    state: Any = SimpleNamespace(
        roots=roots, loader=loader, parallelism=SimpleNamespace(world=single_world()), **values
    )
    waited: list[float] = []

    def after(result: StepResult) -> None:
        waited.append(result.data_seconds)
        move(100, "after", state.step)

    cfg: Any = SimpleNamespace(output_dir="")
    loop.fit(state, cfg, Calls(after, lambda: move(0, "between")))
    assert waited == [3, 3] and all(root.training for root in roots)
    assert told == [
        own for number in (4, 5) for own in (("data", number), ("between",), ("step", number), ("after", number + 1))
    ]


def test_an_update_ends_a_series_of_skipped_steps() -> None:
    """Working copies are made of the weights that the optimizer has changed; a skipped step changes neither."""
    told: list[object] = []
    state: Any = SimpleNamespace(
        scaler=None, skipped=4, consecutive=2, step=9,
        optimizer=SimpleNamespace(step=lambda: told.append("step")),
        masters=SimpleNamespace(
            refresh=lambda: told.append("refresh"), free_gradients=lambda: told.append("free gradients")
        ),
        average=None,
    )  # fmt: skip
    loop.update_or_skip(state, False)
    assert told == ["free gradients"] and (state.skipped, state.consecutive) == (5, 3)
    told.clear()
    loop.update_or_skip(state, True)
    assert told == ["step", "refresh", "free gradients"] and (state.skipped, state.consecutive) == (5, 0)


def test_the_norm_of_gradients_in_bf16_is_not_rounded_to_bf16() -> None:
    named = {f"{number}": nn.Parameter(torch.zeros(300, dtype=torch.bfloat16)) for number in range(2)}
    for parameter in named.values():
        parameter.grad = torch.linspace(-1, 1, 300).bfloat16()
    gradients = [parameter.grad.float() for parameter in named.values() if parameter.grad is not None]
    norm = clip_gradients(MasterWeights(named, torch.bfloat16), None)
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-6)


def test_the_norm_of_stages_is_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares are added over the stages of a line; lines may round in other ways, and all take the largest norm."""
    reduced: list[tuple[float, object, object]] = []

    def all_reduce(value: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: object = None) -> None:
        reduced.append((float(value), op, group))
        value.copy_(value + 11 if op == dist.ReduceOp.SUM else value + 1)

    monkeypatch.setattr("llava_fsdp.train.gradients.dist.all_reduce", all_reduce)
    line: Any = object()
    norm = norm_over_stages([torch.tensor(3.0), torch.tensor(4.0)], line)
    assert reduced == [(25.0, dist.ReduceOp.SUM, line), (6.0, dist.ReduceOp.MAX, None)] and float(norm) == 7
    reduced.clear()
    norm_over_stages([], line)
    assert reduced[0] == (0.0, dist.ReduceOp.SUM, line), "a rank whose stages train nothing"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_rank_writes_the_page_of_a_run_without_reports(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(train.ranks, "own_rank", lambda: rank)
    monkeypatch.setattr(train, "rewrite_page", written.append)
    train.RunParts(folder=tmp_path).report_end()
    assert written == ([tmp_path] if rank == 0 else [])
