"""What can go wrong, by who can mend it; the exit code is part of the type.

A mistake of the user's is one of these, with one message that names the file, record or key, the value and the
cure. A mistake of ours is an `assert`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from llava_fsdp.runtime.terminal_text import shown_name


class ExitCode(IntEnum):
    """What a worker process returns. torchrun itself always returns 1, so launchers read `run_status.json`."""

    DONE = 0
    BUG = 1
    USER = 2
    CHECKPOINT = 3
    NUMERIC = 4
    COMMUNICATION = 5
    INTERRUPTED = 130  # Ctrl-C, as shells say it
    STOPPED = 75  # stopped on request with a checkpoint: run me again


@dataclass(frozen=True)
class Ending:
    """A way for a run to end: `class` in `run_status.json`."""

    name: str
    exit_code: ExitCode
    is_permanent: bool
    """Starting it again at once would end alike, or is not wanted."""


# THE table of endings. A process that is killed leaves none behind; it is worth a restart.
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
        Ending("corruption", ExitCode.NUMERIC, False),  # the last checkpoint is from before it
        Ending("communication", ExitCode.COMMUNICATION, False),
        Ending("bug", ExitCode.BUG, False),
        Ending("stopped", ExitCode.STOPPED, True),
        Ending("interrupted", ExitCode.INTERRUPTED, True),
    )
}


class LlavaFsdpError(Exception):
    """Base of all errors that a user can cause or meet."""

    ending = "bug"
    """A name of `ENDINGS`."""
    on_every_rank = True  # every rank finds it alike, so that rank 0 alone need say it
    leaves_word = True
    """Whether it may be written into `output_dir`: what lies there may be another run's."""
    culprit: dict[str, Any] = {}  # noqa: RUF012  never changed in place: `about` gives an error its own

    @property
    def exit_code(self) -> ExitCode:
        return ENDINGS[self.ending].exit_code

    def about(self, **culprit: Any) -> Self:
        """The same error, with what it is about by name (record, picture, key, file), for the run's status."""
        self.culprit = {**self.culprit, **culprit}
        return self


class CommunicationError(LlavaFsdpError):
    """Another rank is gone, or late. Whoever meets it is not the cause: the word of a rank that failed comes first."""

    ending = "communication"
    on_every_rank = False


class Stopped(LlavaFsdpError):
    """A stop was asked for, and the run has stopped at the end of a step."""

    ending = "stopped"

    def __init__(self, message: str, asked_here: bool = True):
        """
        Args:
            asked_here: this very rank was.
        """
        super().__init__(message)
        self.asked_here = asked_here


class ConfigError(LlavaFsdpError):
    """A key, a choice or a combination of them is wrong."""

    ending = "config"


class ModelError(LlavaFsdpError):
    """A model folder is missing, incomplete or of another model."""

    ending = "model"


class DamagedModel(ModelError):
    """A file of a model or adapter that we wrote is not what was written, is missing, or cannot be read."""


class DataError(LlavaFsdpError):
    """A dataset file or a record is wrong."""

    ending = "data"

    def __init__(self, message: str, kind: str | None = None):
        """
        Args:
            kind: of a record's problem, as the table in `data/records/problems.py` has it; the message, which has names
                and values of the record, is then one line.
        """
        super().__init__(message if kind is None else shown_name(message))
        self.kind = kind


class ImageError(DataError):
    """A picture is missing or broken; the one rank that opens it knows."""

    on_every_rank = False

    def __init__(self, message: str, kind: str = "image_unreadable"):
        super().__init__(message, kind)
        self.kind: str = kind
        """image_missing, image_empty, image_truncated, image_unreadable, image_bomb or image_shape"""


class WorkerError(DataError):
    """A data worker died, or stalled; the one rank that it worked for knows."""

    on_every_rank = False


class WorkerLost(WorkerError):
    """A data worker was killed while it read nothing: no record is to blame, and the run is worth a restart."""

    ending = "communication"


class SourceError(DataError):
    """A file of a dataset, or of its index, cannot be read or has changed; the one rank that reads it knows."""

    on_every_rank = False


class DamagedError(DataError):
    """The index of a dataset is not what was written; the one rank that reads it knows."""

    on_every_rank = False


class FolderInUse(ConfigError):
    """Another run is under way in `output_dir`; rank 0 alone looks."""

    on_every_rank = False
    leaves_word = False


class BuildError(ConfigError):
    """The index of a dataset cannot be written; the one rank that makes it knows."""

    on_every_rank = False


class StorageError(ConfigError):
    """`output_dir` cannot be written; the one rank that does it knows."""

    on_every_rank = False


class CheckpointError(LlavaFsdpError):
    """A checkpoint cannot be written, read, or continued with this configuration."""

    ending = "checkpoint"


class FolderLost(CheckpointError):
    """`output_dir` was deleted, moved, replaced or taken by another run while this one was under way."""

    def __init__(self, message: str, leaves_word: bool):
        """
        Args:
            leaves_word: the folder of that name is this run's again.
        """
        super().__init__(message)
        self.leaves_word = leaves_word


class OffloadError(ConfigError):
    """Host memory or disk for what `offload` moves there cannot be had; the one rank that asked knows."""

    on_every_rank = False


class OutOfMemory(LlavaFsdpError):
    """Memory ran out, on the device or the host; the one rank that asked knows."""

    ending = "memory"
    on_every_rank = False


class NumericError(LlavaFsdpError):
    """The loss or a gradient is not finite."""

    ending = "numeric"


class ReplicaError(LlavaFsdpError):
    """Ranks that must hold the same numbers hold others; every rank knows which."""

    ending = "corruption"
