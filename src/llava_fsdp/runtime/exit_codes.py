"""The ways in which a command can end, each with its exit code."""

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a rank. Launch scripts read them from `run_status.json`: torchrun always exits with 1 after a
    failure."""

    DONE = 0
    BUG = 1
    USER = 2
    CHECKPOINT = 3
    NUMERIC = 4
    COMMUNICATION = 5
    INTERRUPTED = 130  # Ctrl-C, as in shells
    STOPPED = 75  # stopped on request, with a checkpoint: start it again to continue


@dataclass(frozen=True)
class Ending:
    """A way in which a run can end. Its `name` is the value of `class` in `run_status.json`."""

    name: str
    exit_code: ExitCode
    is_permanent: bool
    """Whether starting the run again would end in the same way, or is not wanted."""

    @property
    def is_stop(self) -> bool:
        """Whether a run that ends in this way was asked to end, by its user or by torchrun. Its ranks then need not end
        torchrun: a user's request has reached it too, and it stops ranks only to restart them."""
        return self.name in ("stopped", "interrupted")


ENDINGS = {
    ending.name: ending
    for ending in (
        Ending("done", ExitCode.DONE, True),
        Ending("config", ExitCode.USER, True),
        Ending("model", ExitCode.USER, True),
        Ending("data", ExitCode.USER, True),
        Ending("memory", ExitCode.USER, True),
        Ending("checkpoint", ExitCode.CHECKPOINT, True),
        Ending("numeric", ExitCode.NUMERIC, True),
        Ending("corruption", ExitCode.NUMERIC, False),  # the last checkpoint is from before the corruption
        Ending("communication", ExitCode.COMMUNICATION, False),
        Ending("bug", ExitCode.BUG, False),
        Ending("stopped", ExitCode.STOPPED, True),
        Ending("interrupted", ExitCode.INTERRUPTED, True),
    )
}
"""All endings by name. A killed process records none; starting it again may help."""
