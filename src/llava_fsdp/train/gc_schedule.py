"""Run Python's garbage collector at the same steps on all ranks.

By default it runs when enough objects were allocated, at another moment on each rank, and all other ranks wait for that
one in the next collective (torchtitan, tools/utils.py).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_plan(every: int | None) -> Iterator[Callable[[int], None]]:
    """Turn automatic collection off, and yield a function that collects, given the number of finished steps, every
    `every` steps. The oldest generation, which holds the model, is left out. None keeps automatic collection."""
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
