"""Who may use the model: one question at a time, in the order in which they came."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator

from llava_fsdp.runtime.errors import DataError

MOST = 16
"""Questions that may wait for their turn; one more is refused."""
LOOK = 0.05
"""Seconds between two looks at whose turn it is."""
ABANDONED = 300.0
"""Seconds without a token after which a question holds nobody up: whoever asked may be gone without a word."""
LET_GO = 10.0
"""The same of one that was stopped, and whose page may be gone."""


class Place:
    """A question's place in the line."""

    def __init__(self, line: "Line", is_stopped: Callable[[], bool]):
        self.line = line
        self.is_stopped = is_stopped
        self.is_computing = False
        self.moved = time.monotonic()

    @property
    def is_abandoned(self) -> bool:
        """Never while it computes, however long that takes: two at once would write into one memory."""
        silent = time.monotonic() - self.moved
        return not self.is_computing and silent > (LET_GO if self.is_stopped() else ABANDONED)

    def ahead(self) -> Iterator[int]:
        """How many are before it, whenever that changes, until it is its turn or it is stopped."""
        said = 0
        while not self.is_stopped() and (number := self.line.before(self)):
            if number != said:
                said = number
                yield number
            time.sleep(LOOK)

    def through(self, pieces: Generator[str, None, None]) -> Iterator[str]:
        """The pieces of its answer, as long as it is its turn."""
        with contextlib.closing(pieces):
            while self.line.begins(self):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
                finally:
                    self.is_computing = False
                    self.touch()
                yield piece

    def touch(self) -> None:
        self.moved = time.monotonic()


class Line:
    """Of all questions of a page."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._changing = threading.RLock()  # the collector may close a generator within it

    @contextlib.contextmanager
    def place(self, is_stopped: Callable[[], bool]) -> Iterator[Place]:
        """
        Raises:
            DataError: too many wait already.
        """
        own = Place(self, is_stopped)
        with self._changing:
            if len(self._places) > MOST:
                raise DataError(f"{MOST} questions wait for their turn already; ask again in a while")
            self._places.append(own)
        try:
            yield own
        finally:
            with self._changing:
                self._drop(own)

    def before(self, own: Place) -> int:
        """How many are before it; none where it was taken for abandoned itself, and is not answered."""
        with self._changing:
            if own not in self._places:
                return 0
            if self._places[0] is not own and self._places[0].is_abandoned:
                self._drop(self._places[0])
            return self._places.index(own)

    def begins(self, own: Place) -> bool:
        """Whether it is its turn to compute, which it does from here on."""
        with self._changing:
            own.is_computing = self._places[:1] == [own]
            return own.is_computing

    def _drop(self, gone: Place) -> None:
        self._places = [place for place in self._places if place is not gone]
        if self._places:
            self._places[0].touch()  # its own turn begins: what it has waited does not count
