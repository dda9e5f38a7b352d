"""Run Python's garbage collector at the same steps on all ranks.

Otherwise Python runs it on each rank at another time, when enough objects have been allocated. All other ranks then
wait for this rank in the next collective (torchtitan, tools/utils.py).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_plan(every: int | None) -> Iterator[Callable[[int], None]]:
    """Context manager that turns automatic garbage collection off. It yields a function that is to be called with the
    number of finished steps, and that collects garbage every `every` steps. The oldest generation of objects, which
    includes the model, is not collected. With `every=None`, automatic collection stays on."""
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
