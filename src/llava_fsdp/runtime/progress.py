"""Progress of a long pass over a dataset: a bar on a terminal, else log lines."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from llava_fsdp.runtime.console import TextConsole
from llava_fsdp.runtime.log import log

SECONDS = 10
"""Time between two log lines."""

Advance = Callable[[int], None]
"""Called with the number of chunks done since the last call."""
Watch = Callable[[str, int], contextlib.AbstractContextManager[Advance]]
"""(label, number of chunks) -> context of an `Advance`."""


@contextlib.contextmanager
def watch(label: str, chunks: int) -> Iterator[Advance]:
    """Show how many chunks are done. A pass of less than `SECONDS` logs nothing."""
    if sys.stderr.isatty():
        with show_bar(label, chunks) as advance:
            yield advance
    else:
        yield log_lines(label, chunks)


@contextlib.contextmanager
def watch_silently(_label: str, _chunks: int) -> Iterator[Advance]:
    yield lambda _: None


@contextlib.contextmanager
def show_bar(label: str, chunks: int) -> Iterator[Advance]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=TextConsole(on_stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=chunks)
        yield lambda count: progress.advance(task, count)


def log_lines(label: str, chunks: int) -> Advance:
    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= SECONDS:
            last = time.monotonic()
            log().info("%s: %d of %d", label, done, chunks)

    return advance


def watch_loading(is_first_rank: bool, what: str = "weights") -> Callable[[Iterable[str]], Iterable[str]]:
    """A function that shows a bar over names of weights on rank 0's terminal."""

    def watch(names: Iterable[str]) -> Iterable[str]:
        if not (is_first_rank and sys.stderr.isatty()):
            return names
        return track(list(names), description=what, console=TextConsole(on_stderr=True), transient=True)

    return watch
