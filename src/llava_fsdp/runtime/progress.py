"""How a long pass over a dataset is shown: a bar on a terminal, else plain lines."""

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
"""Between two plain lines."""

Advance = Callable[[int], None]
"""Told how many chunks have been done since the last time."""
Watch = Callable[[str, int], contextlib.AbstractContextManager[Advance]]
"""(what is done, number of chunks) -> what is told how many have been done."""


@contextlib.contextmanager
def watch(label: str, chunks: int) -> Iterator[Advance]:
    """Shows how many of the chunks are done; says nothing of what takes a moment only."""
    if sys.stderr.isatty():
        with show_bar(label, chunks) as advance:
            yield advance
    else:
        yield tell_lines(label, chunks)


@contextlib.contextmanager
def watch_silently(_label: str, _chunks: int) -> Iterator[Advance]:
    yield lambda _: None


@contextlib.contextmanager
def show_bar(label: str, chunks: int) -> Iterator[Advance]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=TextConsole(on_stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=chunks)
        yield lambda count: progress.advance(task, count)


def tell_lines(label: str, chunks: int) -> Advance:
    done, said = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            log().info("%s: %d of %d", label, done, chunks)

    return advance


def watch_loading(is_first_rank: bool, what: str = "weights") -> Callable[[Iterable[str]], Iterable[str]]:
    """Shows what is done with weights, one after the other, on rank 0's terminal."""

    def watch(names: Iterable[str]) -> Iterable[str]:
        if not (is_first_rank and sys.stderr.isatty()):
            return names
        return track(list(names), description=what, console=TextConsole(on_stderr=True), transient=True)

    return watch
