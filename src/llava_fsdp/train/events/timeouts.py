"""Shorten the timeout of collectives after the first step."""

from llava_fsdp.parallel.ranks import mesh as ranks
from llava_fsdp.parallel.ranks.mesh import Meshes
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.state import StepResult


class Timeouts(RunEvents):
    """Sets the timeout of collectives to `seconds` after the first step of this process. Before, it is longer, because
    weights are loaded and kernels compiled."""

    def __init__(self, meshes: Meshes, seconds: int, watchdog: Watchdog):
        """Set nothing yet. `meshes`: their process groups get the timeout; `watchdog`: gets `seconds` as its limit."""
        self.meshes = meshes
        self.seconds = seconds
        self.watchdog = watchdog
        self.is_short = False

    def after_step(self, result: StepResult) -> None:
        """Set the timeout after the first step of this process, for collectives and for the watchdog."""
        if not self.is_short:
            ranks.set_timeout(self.meshes, self.seconds)
            self.watchdog.limit = self.seconds
            self.is_short = True
