"""The moments of a training at which other code runs, and the list that calls it in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_fsdp.runtime.errors import ConfigError, EventError, LlavaFsdpError
from llava_fsdp.runtime.text.log import log

if TYPE_CHECKING:
    from llava_fsdp.config import Config
    from llava_fsdp.train.state import StepResult


@dataclass(frozen=True)
class RunStart:
    """What an observer learns of a training before its first step."""

    cfg: Config
    """The configuration, with all values `auto` replaced."""
    folder: Path
    """The run's folder, `output_dir`."""
    rank: int
    """Number of this process; 0 writes the files of the run."""
    step: int
    """Number of steps that are finished: 0, or the step at which the run continues."""
    last_step: int


class RunEvents:
    """An observer of a training. Subclasses override the moments that they need; the others do nothing.

    Except for `after_validation`, each moment comes on every rank, at the same place between the same collectives. An
    observer that calls a collective must call it on every rank.
    """

    def on_start(self, run: RunStart) -> None:
        """Called once, when the state has been loaded or resumed, before the first data are waited for."""

    def before_step(self) -> None:
        """Called when the data of the next step have arrived, before its first forward pass."""

    def after_step(self, result: StepResult) -> None:
        """Called after each step, when the weights are updated and the step is counted, also if the update was skipped
        (`result.skipped`)."""

    def on_pause(self) -> None:
        """Called between two batches of a validation, where a request to stop is noticed."""

    def on_progress(self, text: str) -> None:
        """Called while a validation runs, with a text that says how much of it is done."""

    def after_validation(self, row: dict[str, Any]) -> None:
        """Called on rank 0 with the results of a validation: its row of `validation.jsonl`."""

    def on_best(self, step: int | None) -> None:
        """With `checkpoint.best`, called at the start and after each validation with the step whose validation is the
        best so far; None if no validation has a finite number."""

    def on_end(self) -> None:
        """Called once, after the last step and its checkpoint, before the export. Not called if the run fails or is
        stopped."""

    def close(self) -> None:
        """Called once, after `on_end` or an error, also after the error of another observer, in the reverse order of
        the list. Frees what the observer holds. It must not call a collective, because other ranks may have failed."""


class EventList(RunEvents):
    """Passes each moment on to a list of observers, in their order; `close` goes in the reverse order."""

    def __init__(self, events: Sequence[RunEvents] = ()):
        self.events = list(events)

    def on_start(self, run: RunStart) -> None:
        for event in self.events:
            event.on_start(run)

    def before_step(self) -> None:
        for event in self.events:
            event.before_step()

    def after_step(self, result: StepResult) -> None:
        for event in self.events:
            event.after_step(result)

    def on_pause(self) -> None:
        for event in self.events:
            event.on_pause()

    def on_progress(self, text: str) -> None:
        for event in self.events:
            event.on_progress(text)

    def after_validation(self, row: dict[str, Any]) -> None:
        for event in self.events:
            event.after_validation(row)

    def on_best(self, step: int | None) -> None:
        for event in self.events:
            event.on_best(step)

    def on_end(self) -> None:
        for event in self.events:
            event.on_end()

    def close(self) -> None:
        """Close the observers, the last one first. An exception in one is only logged."""
        for event in reversed(self.events):
            try:
                event.close()
            except Exception as error:  # the others are closed all the same, and an earlier error is not replaced
                log().warning("%s was not closed (%s: %s)", type(event).__name__, type(error).__name__, error)


class OwnEvent(RunEvents):
    """An observer that a program has given to a training. An exception in it becomes an EventError, which names its
    class and the moment."""

    def __init__(self, event: RunEvents):
        self.event = event
        self.step = 0

    def guarded(self, moment: str, call: Callable[[], object]) -> None:
        """Call a method of an observer that the program gives, and turn its exception into an EventError.

        Args:
            moment: name of the method, for the message.
            call: calls the method.

        Raises:
            EventError: the observer has raised an exception other than this package's and KeyboardInterrupt.
        """
        try:
            call()
        except LlavaFsdpError:
            raise
        except (Exception, SystemExit) as error:
            name = type(self.event).__name__
            raise EventError(
                f"{name}.{moment}, of the program's events, has failed after step {self.step}: {describe(error)}"
            ).about(event=name) from error

    def on_start(self, run: RunStart) -> None:
        self.step = run.step
        self.guarded("on_start", lambda: self.event.on_start(run))

    def before_step(self) -> None:
        self.guarded("before_step", self.event.before_step)

    def after_step(self, result: StepResult) -> None:
        self.step = result.facts.step + 1
        self.guarded("after_step", lambda: self.event.after_step(result))

    def on_pause(self) -> None:
        self.guarded("on_pause", self.event.on_pause)

    def on_progress(self, text: str) -> None:
        self.guarded("on_progress", lambda: self.event.on_progress(text))

    def after_validation(self, row: dict[str, Any]) -> None:
        self.guarded("after_validation", lambda: self.event.after_validation(row))

    def on_best(self, step: int | None) -> None:
        self.guarded("on_best", lambda: self.event.on_best(step))

    def on_end(self) -> None:
        self.guarded("on_end", self.event.on_end)

    def close(self) -> None:
        self.guarded("close", self.event.close)


def describe(error: BaseException) -> str:
    """Return an error as text: its type and message, and the file and line of the function that raised it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f", {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
    return f"{type(error).__name__}: {str(error)[:500]}{where}"


def check_own_events(events: Sequence[RunEvents]) -> None:
    """Raise ConfigError if an object that a program gives as an observer is not a `RunEvents`."""
    for event in events:
        if not isinstance(event, RunEvents):
            raise ConfigError(f"events=[...]: {event!r} is not an object of a subclass of llava_fsdp.RunEvents")
