"""Errors that a user can cause or meet, each with the exit code of its type.

The message names the file, record or key, the value and the cure. Our own mistakes are asserts.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from llava_fsdp.runtime.terminal_text import shown_name


class ExitCode(IntEnum):
    """Exit codes of a rank. torchrun itself always returns 1, so launchers read `run_status.json`."""

    DONE = 0
    BUG = 1
    USER = 2
    CHECKPOINT = 3
    NUMERIC = 4
    COMMUNICATION = 5
    INTERRUPTED = 130  # Ctrl-C, as in shells
    STOPPED = 75  # stopped on request with a checkpoint: run it again


@dataclass(frozen=True)
class Ending:
    """A way for a run to end: `class` in `run_status.json`."""

    name: str
    exit_code: ExitCode
    is_permanent: bool
    """Starting it again at once would end in the same way, or is not wanted."""


# The table of all endings. A killed process leaves none; it is worth a restart.
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
    on_every_rank = True
    """Whether every rank raises it, so that only rank 0 reports it."""
    leaves_word = True
    """Whether it may be written into `output_dir`, which may belong to another run."""
    culprit: dict[str, Any] = {}  # noqa: RUF012  never changed in place; see `about`

    @property
    def exit_code(self) -> ExitCode:
        return ENDINGS[self.ending].exit_code

    def about(self, **culprit: Any) -> Self:
        """Add what the error is about by name (record, image, key, file), for the run's status."""
        self.culprit = {**self.culprit, **culprit}
        return self


class CommunicationError(LlavaFsdpError):
    """Another rank is gone or late. It is not the cause: the report of the rank that failed comes first."""

    ending = "communication"
    on_every_rank = False


class Stopped(LlavaFsdpError):
    """A stop was asked for, and the run has stopped at the end of a step."""

    ending = "stopped"

    def __init__(self, message: str, asked_here: bool = True):
        """
        Args:
            asked_here: whether this rank was asked.
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
    """A file of a model or adapter that this package wrote was changed, is missing, or cannot be read."""


class DataError(LlavaFsdpError):
    """A dataset file or a record is wrong."""

    ending = "data"

    def __init__(self, message: str, kind: str | None = None):
        """
        Args:
            kind: a record's problem, from the table in `data/records/problems.py`. The message is then made one line,
                as it has names and values from the record.
        """
        super().__init__(message if kind is None else shown_name(message))
        self.kind = kind


class ImageError(DataError):
    """An image is missing or broken. Only the rank that opens it raises this."""

    on_every_rank = False

    def __init__(self, message: str, kind: str = "image_unreadable"):
        super().__init__(message, kind)
        self.kind: str = kind
        """image_missing, image_empty, image_truncated, image_unreadable, image_bomb or image_shape"""


class WorkerError(DataError):
    """A data worker died or stalled. Only its rank raises this."""

    on_every_rank = False


class WorkerLost(WorkerError):
    """A data worker was killed between two records: no record is the cause, and a restart may help."""

    ending = "communication"


class SourceError(DataError):
    """A file of a dataset or its index cannot be read or has changed. Only the rank that reads it raises this."""

    on_every_rank = False


class DamagedError(DataError):
    """The index of a dataset is not what was written. Only the rank that reads it raises this."""

    on_every_rank = False


class FolderInUse(ConfigError):
    """Another run uses `output_dir`. Only rank 0 checks this."""

    on_every_rank = False
    leaves_word = False


class BuildError(ConfigError):
    """The index of a dataset cannot be written. Only the rank that makes it raises this."""

    on_every_rank = False


class StorageError(ConfigError):
    """`output_dir` cannot be written. Only the rank that writes raises this."""

    on_every_rank = False


class CheckpointError(LlavaFsdpError):
    """A checkpoint cannot be written, read, or continued with this configuration."""

    ending = "checkpoint"


class FolderLost(CheckpointError):
    """`output_dir` was deleted, moved, replaced or taken by another run while this one was under way."""

    def __init__(self, message: str, leaves_word: bool):
        """
        Args:
            leaves_word: whether the folder of that name belongs to this run again.
        """
        super().__init__(message)
        self.leaves_word = leaves_word


class OffloadError(ConfigError):
    """Host memory or disk space for `offload` is not available. Only the rank that asked raises this."""

    on_every_rank = False


class OutOfMemory(LlavaFsdpError):
    """Memory of the device or the host ran out. Only the rank that asked raises this."""

    ending = "memory"
    on_every_rank = False


class NumericError(LlavaFsdpError):
    """The loss or a gradient is not finite."""

    ending = "numeric"


class ReplicaError(LlavaFsdpError):
    """Ranks that must hold the same numbers differ. Every rank raises this."""

    ending = "corruption"
