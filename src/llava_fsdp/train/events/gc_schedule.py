"""Run Python's garbage collector at the same steps on all ranks.

Otherwise Python would run the collector on each rank at a different time, when enough objects have been allocated, and
all other ranks would wait for this rank in the next collective (torchtitan, tools/utils.py).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def scheduled_gc(every: int | None) -> Iterator[Callable[[int], None]]:
    """Context manager in which Python's garbage collector runs every `every` training steps instead of automatically.
    The oldest generation of objects, which includes the model, is not collected. With `every=None`, automatic
    collection stays on.

    Yields:
        A function to call after each step with the number of finished steps.
    """
    if every is None:
        yield lambda finished: None
        return

    def collect(finished: int) -> None:
        if finished % every == 0:
            gc.collect(1)

    was_enabled = gc.isenabled()
    gc.collect()  # free the objects that are left from building the model
    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
