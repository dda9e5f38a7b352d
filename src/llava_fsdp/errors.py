"""What can go wrong, by who can mend it; the exit code is part of the type.

A mistake of the user's is one of these, with one message that names the file, record or key, the value and the
cure. A mistake of ours is an `assert`.
"""

from enum import IntEnum


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


class LlavaFsdpError(Exception):
    """Base of all errors that a user can cause or meet."""

    exit_code = ExitCode.BUG
    on_every_rank = True  # every rank finds it alike, so that rank 0 alone need say it


class ConfigError(LlavaFsdpError):
    """A key, a choice or a combination of them is wrong."""

    exit_code = ExitCode.USER


class ModelError(LlavaFsdpError):
    """A model folder is missing, incomplete or of another model."""

    exit_code = ExitCode.USER


class DataError(LlavaFsdpError):
    """A dataset file or a record is wrong."""

    exit_code = ExitCode.USER

    def __init__(self, message: str, kind: str | None = None):
        """
        Args:
            kind: of a record's problem, as the table in `data/problems.py` has it.
        """
        super().__init__(message)
        self.kind = kind


class PictureError(DataError):
    """A picture is missing or broken; the one rank that opens it knows."""

    on_every_rank = False

    def __init__(self, message: str, kind: str = "image_unreadable"):
        super().__init__(message)
        self.kind = kind
        """image_missing, image_empty, image_truncated, image_unreadable, image_bomb or image_shape"""


class WorkerError(DataError):
    """A data worker died, or stalled; the one rank that it worked for knows."""

    on_every_rank = False


class SourceError(DataError):
    """A file of a dataset, or of its index, cannot be read or has changed; the one rank that reads it knows."""

    on_every_rank = False


class DamagedError(DataError):
    """The index of a dataset is not what was written; the one rank that reads it knows."""

    on_every_rank = False


class BuildError(ConfigError):
    """The index of a dataset cannot be written; the one rank that makes it knows."""

    on_every_rank = False


class StorageError(ConfigError):
    """`output_dir` cannot be written; the one rank that does it knows."""

    on_every_rank = False


class CheckpointError(LlavaFsdpError):
    """A checkpoint cannot be written, read, or continued with this configuration."""

    exit_code = ExitCode.CHECKPOINT


class OffloadError(ConfigError):
    """Host memory or disk for what `offload` moves there cannot be had; the one rank that asked knows."""

    on_every_rank = False


class OutOfMemory(LlavaFsdpError):
    """Memory ran out, on the device or the host; the one rank that asked knows."""

    exit_code = ExitCode.USER
    on_every_rank = False


class NumericError(LlavaFsdpError):
    """The loss or a gradient is not finite."""

    exit_code = ExitCode.NUMERIC
