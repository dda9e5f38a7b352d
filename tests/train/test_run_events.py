"""The observers of a training: their order, what each moment means, and errors of those that a program gives."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import Configure

from llava_fsdp.runtime.errors import ConfigError, EventError, LlavaFsdpError, NumericError
from llava_fsdp.train import main as train
from llava_fsdp.train.events.run_events import EventList, OwnEvent, RunEvents, RunStart, check_own_events
from llava_fsdp.train.state import StepResult

MOMENTS = ("on_start", "before_step", "after_step", "on_pause", "on_progress", "after_validation", "on_end", "close")


class Named(RunEvents):
    """Notes every moment, with its own name."""

    def __init__(self, name: str, told: list[tuple[str, str]], fails: str = ""):
        for moment in MOMENTS:
            setattr(self, moment, self.noting(name, moment, told, moment == fails))

    @staticmethod
    def noting(name: str, moment: str, told: list[tuple[str, str]], fails: bool) -> Callable[..., None]:
        def note(*given: object) -> None:
            told.append((name, moment))
            if fails:
                raise LookupError(f"in {moment}")

        return note


def call(events: RunEvents, moment: str) -> None:
    given: dict[str, Any] = {
        "on_start": RunStart.__new__(RunStart), "after_step": None, "on_progress": "text", "after_validation": {},
    }  # fmt: skip
    getattr(events, moment)(*([given[moment]] if moment in given else []))


@pytest.mark.parametrize("moment", MOMENTS)
def test_each_moment_reaches_all_observers_in_their_order(moment: str) -> None:
    """Closing goes backwards."""
    told: list[tuple[str, str]] = []
    call(EventList([Named("a", told), Named("b", told)]), moment)
    assert told == [(name, moment) for name in ("ba" if moment == "close" else "ab")]


def test_all_observers_are_closed_whatever_one_does(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, str]] = []
    EventList([Named("a", told), Named("b", told, "close"), Named("c", told)]).close()
    assert told == [("c", "close"), ("b", "close"), ("a", "close")]
    assert "Named was not closed (LookupError: in close)" in caplog.text


def test_the_order_of_the_observers(configure: Configure, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides which files a run has that ends in a step; `event_order.py` says why each stands where it does."""
    seen: list[str] = []

    def fit(state: object, cfg: object, events: EventList, watchdog: object) -> None:
        seen.extend(type(event.event if isinstance(event, OwnEvent) else event).__name__ for event in events.events)
        events.on_end()
        events.close()

    class Mine(RunEvents):
        pass

    monkeypatch.setattr(train, "fit", fit)
    held = f"val.path={dataset / 'captions.json'}", f"val.images={dataset / 'images'}", "val.every=2", "val.answers=0"
    train.train(configure(*held, "profile=true", "max_steps=2", "export.enabled=false"), events=[Mine()])
    assert seen == [
        "CompileWarnings", "Reports", "RunController", "Timeouts", "Validation", "Mine", "GarbageCollection",
        "StepProfiler",
    ]  # fmt: skip


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_an_observer_sees_every_moment_of_a_training(configure: Configure, tmp_path: Path) -> None:
    """What the trainer writes of a step is written before its observers learn of the step."""

    class Watching(RunEvents):
        def __init__(self) -> None:
            self.told: list[object] = []

        def on_start(self, run: RunStart) -> None:
            self.folder = run.folder
            self.told.append(("start", run.rank, run.step, run.last_step, gc.isenabled()))

        def before_step(self) -> None:
            self.told.append("before")

        def after_step(self, result: StepResult) -> None:
            (*_, row) = rows(self.folder, "metrics.jsonl")
            assert (row["step"], row["loss"]) == (result.facts.step + 1, result.loss)
            kept = sorted(path.name for path in (self.folder / "checkpoints").glob("step-00000?"))
            self.told.append((result.facts.step + 1, kept))

        def on_end(self) -> None:
            self.told.append(("end", (self.folder / "checkpoints" / "step-000002").is_dir()))

        def close(self) -> None:
            self.told.append("close")

    own = Watching()
    words = "max_steps=2", "checkpoint.every=1", "checkpoint.asynchronous=false", "checkpoint.keep=9"
    train.train(configure(*words, "export.enabled=false", to="run"), events=[own])
    one, two = "step-000001", "step-000002"
    assert own.told == [
        ("start", 0, 0, 2, True), "before", (1, [one]), "before", (2, [one, two]), ("end", True), "close",
    ]  # fmt: skip


@pytest.mark.parametrize("moment", ["on_start", "before_step", "after_step", "on_end"])
def test_an_error_of_an_observer_names_its_class_its_moment_and_its_line(
    moment: str, configure: Configure, tmp_path: Path
) -> None:
    """The step's row and checkpoint are there, and every observer is closed."""
    told: list[tuple[str, str]] = []
    other = Named("other", told)
    words = "max_steps=2", "checkpoint.every=1", "checkpoint.asynchronous=false", "export.enabled=false"
    place = rf"Named\.{moment}, of the program's events, has failed after step \d: LookupError: in {moment}, .*:\d+"
    with pytest.raises(EventError, match=place) as caught:
        train.train(configure(*words, to="run"), events=[other, Named("mine", told, moment)])
    assert caught.value.exit_code == 2 and caught.value.culprit == {"event": "Named"}
    assert not caught.value.on_every_rank, "each rank has observers of its own"
    assert told[-2:] == [("mine", "close"), ("other", "close")] and gc.isenabled()
    if moment == "after_step":
        assert len(rows(tmp_path / "run", "metrics.jsonl")) == 1
        assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


def test_an_error_of_this_package_stays_what_it_is() -> None:
    """An observer may end a run by one of them."""

    class Judge(RunEvents):
        def before_step(self) -> None:
            raise NumericError("the loss is too large for me")

    with pytest.raises(LlavaFsdpError) as caught:
        OwnEvent(Judge()).before_step()
    assert type(caught.value) is NumericError


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"events=\[\.\.\.\]: <class .*RunEvents'> is not an object"):
        check_own_events([RunEvents])  # type: ignore[list-item]
    check_own_events([RunEvents()])
