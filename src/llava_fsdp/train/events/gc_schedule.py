"""Run Python's garbage collector at the same steps on all ranks.

Otherwise Python would run the collector on each rank at a different time, when enough objects have been allocated, and
all other ranks would wait for this rank in the next collective (torchtitan, tools/utils.py).
"""

import gc

from llava_fsdp.train.events.run_events import RunEvents, RunStart
from llava_fsdp.train.state import StepResult


class GarbageCollection(RunEvents):
    """Runs Python's garbage collector every `every` steps instead of automatically. The oldest generation of objects,
    which includes the model, is not collected. With `every=None`, automatic collection stays on."""

    def __init__(self, every: int | None):
        self.every = every
        self.was_enabled = False

    def on_start(self, run: RunStart) -> None:
        """Turn Python's automatic garbage collection off, because `after_step` collects every `self.every` steps
        instead. With `self.every` None, Python's collection stays as it is."""
        if self.every is None:
            return
        self.was_enabled = gc.isenabled()
        gc.collect()  # free the objects that are left from building the model
        gc.disable()

    def after_step(self, result: StepResult) -> None:
        if self.every is not None and (result.facts.step + 1) % self.every == 0:
            gc.collect(1)

    def close(self) -> None:
        if self.was_enabled:
            gc.enable()
