"""Run Python's garbage collector at the same steps on all ranks.

By default it runs when enough objects were allocated, at another moment on each rank, and all other ranks wait for that
one in the next collective (torchtitan, tools/utils.py).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_plan(every: int | None) -> Iterator[Callable[[int], None]]:
    """Context manager that turns automatic garbage collection off, and yields a function that collects at the due
    steps, given the number of finished steps.

    Args:
        every: steps between two collections. They leave out the oldest generation, which holds the model. None keeps
            automatic collection.
    """
    if every is None:
        yield lambda finished: None
        return

    def collect(finished: int) -> None:
        if finished % every == 0:
            gc.collect(1)

    was_enabled = gc.isenabled()
    gc.collect()  # free the garbage left from building the run
    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
