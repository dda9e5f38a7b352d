"""Show the progress of long work: a progress bar on a terminal, otherwise log lines."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log

LOG_SECONDS = 10
"""Number of seconds between two log lines of progress."""

Advance = Callable[[int], None]
"""Reports progress: how many parts are finished since the last call."""
Watch = Callable[[str, int], contextlib.AbstractContextManager[Advance]]
"""Starts a display: (label, number of parts) -> context manager that yields an `Advance`."""


@contextlib.contextmanager
def watch(label: str, chunks: int) -> Iterator[Advance]:
    """Context manager that shows how many parts of a long work, such as files, are done: on a terminal by a progress
    bar, otherwise by a log line at most every `LOG_SECONDS` seconds. `chunks`: number of all parts. It yields a
    function to be called with the number of parts that were done since its last call."""
    if not sys.stderr.isatty():
        yield log_lines(label, chunks)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=TextConsole(on_stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(label, total=chunks)
        yield lambda count: progress.advance(task, count)


@contextlib.contextmanager
def watch_silently(_label: str, _chunks: int) -> Iterator[Advance]:
    """Take the place of `watch` where no progress is to be shown: the yielded function does nothing."""
    yield lambda _: None


def log_lines(label: str, chunks: int) -> Advance:
    """Return a function to be called with the number of chunks that were finished since its last call. It logs how many
    of all `chunks` are done, at most every LOG_SECONDS."""
    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        """Count `count` more finished chunks; log how many are done if the last log line was long ago."""
        nonlocal done, last
        done += count
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            log().info("%s: %d of %d", label, done, chunks)

    return advance


class StageLine:
    """Says which stage of a long work runs: on a terminal in one line, which is replaced and shows how much of the
    stage is done and the time since the beginning; otherwise in one log line for each stage. A context manager, at
    whose end the line disappears."""

    def __init__(self, work: str):
        """Prepare to show which stage of a long work runs. `work`: name of the whole work, shown before the stage's."""
        self.work = work
        self.logged_stages: set[str] = set()
        """The stages that have a log line."""
        self.progress: Progress | None = None
        """The line on the terminal; None without a terminal."""
        self.streams: list[tuple[logging.StreamHandler[Any], Any]] = []
        """Log handlers, with the streams that they wrote to before the line was shown."""

    def __enter__(self) -> Self:
        """Show the line of progress, if there is a terminal, and let log messages appear above it."""
        if sys.stderr.isatty():
            self.progress = Progress(
                TextColumn("{task.description}"),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                console=TextConsole(on_stderr=True),
                transient=True,
            )
            self.task = self.progress.add_task(self.work, total=None, count="")
            self.progress.start()
            # rich has put an object into sys.stderr that prints above the line; messages go there, too
            handlers = [one for one in log().handlers if isinstance(one, logging.StreamHandler)]
            self.streams = [(one, stream) for one in handlers if (stream := one.setStream(sys.stderr)) is not None]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line of progress from the terminal, and let log messages go to their former streams again."""
        if self.progress is not None:
            for handler, stream in self.streams:
                handler.setStream(stream)
            self.progress.stop()
            self.progress = None

    def stage(self, label: str) -> None:
        """Show that the stage `label` runs now: in the line on the terminal, or else by one log line for each stage."""
        if self.progress is not None:
            self.progress.update(self.task, description=f"{self.work}: {label}", count="")
        elif label not in self.logged_stages:
            self.logged_stages.add(label)
            log().info("%s: %s", self.work, label)

    @contextlib.contextmanager
    def watch(self, label: str, chunks: int) -> Iterator[Advance]:
        """Context manager for the stage `label`, which has `chunks` parts. It yields a function to be called with the
        number of parts that were done since its last call."""
        self.stage(label)
        done = 0

        def advance(count: int) -> None:
            """Count `count` more finished parts of the stage, and show on the terminal how many are done."""
            nonlocal done
            done += count
            if self.progress is not None:
                self.progress.update(self.task, count=f"{done:,} of {chunks:,}")

        advance(0)
        yield advance


def watch_loading(is_first_rank: bool, what: str = "weights") -> Callable[[Iterable[str]], Iterable[str]]:
    """Return a function that wraps an iterable of weight names, so that a progress bar labelled `what` is shown. On
    ranks other than 0, or without a terminal, it returns the iterable unchanged."""

    def watch(names: Iterable[str]) -> Iterable[str]:
        if not (is_first_rank and sys.stderr.isatty()):
            return names
        return track(list(names), description=what, console=TextConsole(on_stderr=True), transient=True)

    return watch
