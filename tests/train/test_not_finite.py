"""Steps whose loss or gradients are not finite: skipped alike on every rank, and how many in a row are too many."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from small import Configure
from steps import Calls, begin
from tiers import slow_after
from torch._inductor.exc import InductorError

from llava_fsdp.checkpoint.commit import Committer
from llava_fsdp.checkpoint.saver import Saver
from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import Step
from llava_fsdp.parallel import local_shards
from llava_fsdp.parallel.compile import Compilations
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.consensus import Votes
from llava_fsdp.parallel.ranks.mesh import own_rank
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import CheckpointError, CompileError, NumericError, Stopped
from llava_fsdp.runtime.files.heartbeat import Beat, Phase
from llava_fsdp.runtime.process.watchdog import BEAT, Watchdog, WatchedRun
from llava_fsdp.train import loop
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints.resume import resume
from llava_fsdp.train.events.reporting.step_warnings import FEWEST, Spikes
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.state import StepResult, TrainState

TrainStep = Callable[..., StepResult]
do_step, clip_gradients = loop.train_step, loop.clip_gradients


def poison_loss(state: TrainState, step: Step) -> None:
    step.micro_batches[0].scale = float("inf")


def poison_gradient(state: TrainState, step: Step) -> None:
    """FSDP has no hook between the sum over ranks and the norm: what one rank's part of the sum is then counts."""

    def poisoned(masters: MasterWeights, *rest: object) -> torch.Tensor:
        loop.clip_gradients = clip_gradients
        gradient = next(p.grad for p in masters.named.values() if p.grad is not None)
        local_shards.local(gradient).view(-1)[:1] = float("nan")
        return clip_gradients(masters, *rest)

    loop.clip_gradients = poisoned


def run(cfg: Config, world: World, change: TrainStep) -> tuple[TrainState, list[StepResult]]:
    state = begin(world, cfg)
    return state, [change(state, step, cfg, 0.0) for step in agreed_steps(state.loader)]


def kept(state: TrainState) -> dict[str, torch.Tensor]:
    local = {f"w {n}": p for n, p in state.masters.named.items()}
    for name, parameter in state.masters.named.items():
        local |= {f"{moment} {name}": value for moment, value in state.optimizer.state[parameter].items()}
    return {n: (v.to_local() if hasattr(v, "to_local") else v).detach().clone() for n, v in local.items()}


def skipped_or_left_out(world: World, cfg: Config, poison: Callable, at: int) -> bool:
    """A run with a poisoned step on the last rank, and one that never updates there."""

    def poisoned(state: TrainState, step: Step, *rest: object) -> StepResult:
        if state.step == at and world.rank == world.size - 1:
            poison(state, step)
        before = kept(state) if state.step == at else {}
        result = do_step(state, step, *rest)
        assert result.skipped == (step.facts.step == at) and all(
            torch.equal(v, kept(state)[n]) for n, v in before.items()
        )
        return result

    def left_out(state: TrainState, step: Step, *rest: object) -> StepResult:
        if state.step != at:
            return do_step(state, step, *rest)
        state.step += 1
        state.samples += step.facts.samples
        state.skipped += 1
        return StepResult(step.facts, 0.0, 0.0, 0.0, 0.0)

    (one, mine), (other, theirs) = run(cfg, world, poisoned), run(cfg, world, left_out)
    assert (one.step, one.samples, one.skipped, one.consecutive) == (other.step, other.samples, 1, 0)
    assert [r.loss for r in mine[at + 1 :]] == [r.loss for r in theirs[at + 1 :]]
    first, second = kept(one), kept(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "poison"),
    slow_after(1, [("zero1", poison_gradient), ("zero3", poison_loss)]),
    ids=["zero1-poison_gradient", "zero3-poison_loss"],
)
def test_a_step_that_is_skipped_never_was(
    strategy: str, poison: Callable, configure: Configure, pools: dict[int, RankPool]
) -> None:
    """On one rank only; all ranks continue alike, to the bit as if they had left that update out."""
    values = [f"sharding={strategy}", "optim.clip=null", "micro_batch_size=3", "max_steps=4"]
    cfg = configure(*values)
    assert all(pools[2].run(skipped_or_left_out, cfg, poison, 1, timeout=90))


def train_poisoned(world: World, cfg: Config, steps: range) -> tuple[str, dict]:
    """A whole run whose loss is infinite on the last rank in some steps; how it ends."""

    def poisoned(state: TrainState, step: Step, *rest: object) -> StepResult:
        if state.step in steps and own_rank() == world.size - 1:
            poison_loss(state, step)
        return do_step(state, step, *rest)

    loop.train_step = poisoned
    try:
        train.train(cfg)
    except NumericError as error:
        return str(error), error.culprit
    finally:
        loop.train_step = do_step
    return "", {}


@pytest.mark.ranks
def test_too_many_in_a_row_stop_with_their_samples(
    configure: Configure, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """What was saved before them stays, and nothing is saved among them; the samples of that rank alone are named."""
    values = ["max_steps=8", "checkpoint.every=1", "numeric.max_consecutive_skips=2", "micro_batch_size=3"]
    cfg = configure(*values, to="stops")
    (said, culprit), (again, _) = pools[2].run(train_poisoned, cfg, range(3, 8), timeout=90)
    assert said == again
    assert said.startswith("step 4 to 6: loss inf") and "the weights are those of step 3" in said
    assert f"the last checkpoint is {tmp_path}/stops/checkpoints/step-000003" in said
    assert "those of step 6 on rank 1: " in said and len(culprit["records"]) == 6
    assert all("mixed.json" in record and "(id r" in record for record in culprit["records"])
    assert saved(tmp_path / "stops") == ["step-000002", "step-000003"]


@pytest.mark.slow
def test_a_resume_continues_behind_skipped_steps(configure: Configure, tmp_path: Path) -> None:
    """To the bit as if there had been no end: the schedule waited for skipped steps, and the loss scale was lowered."""
    values = ["max_steps=6", "precision=fp16", "precision.scaler.initial_power=4", "precision.scaler.hysteresis=1"]
    values += ["checkpoint.every=3", "numeric.max_consecutive_skips=9"]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    assert train_poisoned(single_world(), configure(*values, to=whole), range(1, 3)) == ("", {})
    begun = whole / "checkpoints" / "step-000003"
    train.train(configure(*values, f"checkpoint.resume={begun}", to=rest))
    names = "step", "loss", "lr", "grad_norm", "loss_scale", "skipped_steps"
    expected, found = (
        [[json.loads(line)[name] for name in names] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, rest)
    )
    assert found == expected[3:] and [row[-1] for row in expected] == [0, 1, 2, 2, 2, 2]
    assert expected[3][2] == expected[1][2] > expected[4][2] and expected[3][4] == expected[0][4] / 4
    facts = [json.loads((folder / "checkpoints/step-000006/state.json").read_text()) for folder in (whole, rest)]
    for name in ("step", "samples", "skipped", "scaler", "broken", "run"):
        assert facts[0][name] == facts[1][name], name


@pytest.mark.slow
def test_a_checkpoint_that_is_due_at_a_skipped_step_is_saved_after_the_next(
    configure: Configure, tmp_path: Path
) -> None:
    cfg = configure("max_steps=6", "checkpoint.every=3", "checkpoint.keep=9")
    assert train_poisoned(single_world(), cfg, range(2, 4)) == ("", {})
    assert saved(tmp_path) == ["step-000005", "step-000006"]


def test_a_resume_knows_the_records_that_broke(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count against the limit on bad records, and none of them twice."""

    def breaking(state: TrainState, *rest: object) -> StepResult:
        state.loader.broken |= {3, 5}
        return do_step(state, *rest)

    cfg = configure("max_steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", breaking)
        train.train(cfg)
    state = begin(single_world(), cfg)
    assert resume(state, cfg) is not None
    assert state.loader.broken == {3, 5}


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_a_loss_that_is_not_finite_skips_the_step_whatever_the_gradients_are(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure("micro_batch_size=6", "optim.warmup_ratio=0")
    state = begin(single_world(), cfg)
    step = state.loader.steps.prepare(0)
    step.micro_batches[-1].scale = float("inf")
    monkeypatch.setattr(loop, "clip_gradients", lambda *_: torch.ones(()))
    before = {name: master.detach().clone() for name, master in state.masters.named.items()}
    assert loop.train_step(state, step, cfg, 0.0).skipped and state.skipped == 1
    for name, master in state.masters.named.items():
        assert torch.equal(master, before[name]) and (master.grad is None or not master.grad.any())


def cast(world: World) -> list[Votes]:
    asked = [Votes(), Votes(stop=world.rank == 1), Votes(save=world.rank == 0, failed=world.rank == 1)]
    return [votes.agreed() for votes in asked]


@pytest.mark.ranks
def test_what_one_rank_asks_for_all_do(pools: dict[int, RankPool]) -> None:
    assert pools[4].run(cast) == [[Votes(), Votes(stop=True), Votes(save=True, failed=True)]] * 4
    assert Votes(stop=True).agreed() == Votes(stop=True)


def asked_to_stop(state: TrainState, *rest: object) -> StepResult:
    """The second step is asked to stop, as by a signal."""
    (watchdog,) = (own for own in rest if isinstance(own, Watchdog))
    watchdog.stop = "SIGTERM" if state.step == 1 else ""
    return do_step(state, *rest)


def test_a_stop_is_saved_once(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a step that is on disk already nothing is written again; and the same command continues after it."""
    written: list[int] = []
    save = Saver.save

    def counted(saver: Saver) -> None:
        written.append(saver.state.facts()["step"])
        save(saver)

    monkeypatch.setattr(Saver, "save", counted)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", asked_to_stop)
        cfg = configure("checkpoint.every=2", "max_steps=3")
        with pytest.raises(Stopped, match="SIGTERM: stopped after step 2"):
            train.train(cfg)
        assert written == [2]
    train.train(cfg)
    assert written == [2, 3]


@pytest.mark.slow
def test_a_stop_in_the_last_step_leaves_the_export_to_the_next_start(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure("max_steps=2", "export.enabled=true", "export.verify=false")
    with monkeypatch.context() as patched, pytest.raises(Stopped, match="after the last step"):
        patched.setattr(loop, "train_step", asked_to_stop)
        train.train(cfg)
    assert (tmp_path / "checkpoints" / "step-000002").is_dir() and not (tmp_path / "export").exists()
    train.train(cfg)
    assert (tmp_path / "export" / "config.json").is_file()


def test_a_stop_does_not_promise_what_could_not_be_written(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Path:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(loop, "train_step", asked_to_stop)
    monkeypatch.setattr(Committer, "write", refused)
    cfg = configure("max_steps=4", "checkpoint.every=2", "checkpoint.on_save_error=warn")
    with pytest.raises(Stopped, match="after step 2; the same command continues from the checkpoint before"):
        train.train(cfg)


@pytest.mark.parametrize("exports", [False, True])
def test_a_last_checkpoint_that_could_not_be_written_is_an_error_if_nothing_is_exported(
    exports: bool, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Path:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(Committer, "write", refused)
    words = "max_steps=2", "checkpoint.every=1", "checkpoint.on_save_error=warn", "model.random_weights=true"
    cfg = configure(*words, f"export.enabled={str(exports).lower()}")
    with nullcontext() if exports else pytest.raises(CheckpointError, match="the disk is full"):
        train.train(cfg)
    assert (tmp_path / "export" / "config.json").is_file() == exports


@pytest.mark.slow
def test_a_compiler_that_dies_of_the_stop_is_no_bug(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to the process group ends the compiler of a later step too."""

    def compiling(*_: object) -> StepResult:
        raise InductorError(RuntimeError("g++ was ended"), None)

    cfg = configure("max_steps=2", "data.workers=0")
    state = begin(single_world(), cfg)
    watchdog = Watchdog()
    watchdog.stop = "SIGTERM"
    said: list[str] = []
    monkeypatch.setattr(loop, "log", lambda: SimpleNamespace(info=said.append))
    monkeypatch.setattr(loop, "train_step", compiling)
    with pytest.raises(Stopped, match="SIGTERM: stopped in step 1, while it compiled"):
        loop.fit(state, cfg, RunEvents(), watchdog)
    assert not said, "nothing is to be compiled"
    state.compilations = Compilations()
    with pytest.raises(CompileError, match=r"RuntimeError: g\+\+ was ended"):
        loop.fit(state, cfg, RunEvents())
    assert len(said) == 1 and said[0].startswith("compiling the language model's blocks")


def test_a_rank_that_reports_a_step_is_behind_those_that_go_on(configure: Configure) -> None:
    """Its disk or terminal may hang: it must not look as if it waited for them."""
    cfg = configure("max_steps=2")
    state = begin(single_world(), cfg)
    watchdog = Watchdog()
    seen: list[Beat] = []

    def look() -> None:
        seen.append(Beat(0, "", 0, watchdog.step, watchdog.phase.value, 0, "", 0))

    loop.fit(state, cfg, Calls(lambda _: look(), look), watchdog)
    assert [beat.place for beat in seen] == sorted({beat.place for beat in seen})


@pytest.mark.slow
def test_a_watchdog_that_cannot_watch_handles_signals(tmp_path: Path) -> None:
    class Broken(WatchedRun):
        def data_position(self) -> str:
            raise ValueError("no such place")

    with Watchdog(tmp_path, run=Broken()) as watchdog, watchdog.steps():
        watchdog.at(Phase.DATA)
        time.sleep(2 * BEAT)
        os.kill(os.getpid(), signal.SIGUSR1)
        until = time.monotonic() + 10
        while not (heard := watchdog.wants_save()) and time.monotonic() < until:
            time.sleep(0.05)
        assert heard and not watchdog.wants_save()
        watchdog.at(Phase.COMPUTE)


def test_losses_that_stand_out() -> None:
    dice = random.Random(0)
    spikes = Spikes(6.0)
    found = [spikes.mean_and_deviation_before(9.0 if n == 3 else 1.0) for n in range(FEWEST)]
    assert found == [None] * FEWEST, "too early to say"
    calm = Spikes(6.0)
    assert not any(calm.mean_and_deviation_before(2 + dice.gauss(0, 0.1)) for _ in range(300))
    found = calm.mean_and_deviation_before(3.0)
    assert found is not None and found[0] == pytest.approx(2, abs=0.05) and found[1] == pytest.approx(0.1, abs=0.03)
    assert calm.mean_and_deviation_before(float("nan")) is None and Spikes(None).mean_and_deviation_before(1e9) is None
    assert calm.mean_and_deviation_before(3.0) is not None, "a loss that is no number is not one of those before"
