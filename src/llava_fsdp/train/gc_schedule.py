"""Python's garbage collector, at steps that all ranks share.

Left to itself it begins by counts of objects, on each rank at another moment of the step, and all others wait for that
rank in the next collective (torchtitan, tools/utils.py).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_plan(every: int | None) -> Iterator[Callable[[int], None]]:
    """The collector does nothing of itself inside; what is yielded is told how many steps are finished, and collects.

    Args:
        every: steps from one collection to the next, of the two younger generations: the model, which is as old as
            the run, is not searched. None leaves Python's own way.
    """
    if every is None:
        yield lambda finished: None
        return

    def collect(finished: int) -> None:
        if finished % every == 0:
            gc.collect(1)

    was_enabled = gc.isenabled()
    gc.collect()  # what building the run has left behind
    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
