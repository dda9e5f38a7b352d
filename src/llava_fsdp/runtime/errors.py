"""Errors that users can cause or encounter, each with the exit code of its type.

The message names the file, record or key, the wrong value and what to do. Mistakes of this package are asserts.
"""

from typing import Any, Self

from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.terminal_text import shown_name


class LlavaFsdpError(Exception):
    """Base class of all errors that users can cause or encounter."""

    ending = "bug"
    """The way in which this error ends a run: a key of `ENDINGS`."""
    on_every_rank = True
    """Whether every rank raises this error; only rank 0 then prints it."""
    leaves_word = True
    """Whether this error may be recorded in `output_dir`; not if that folder may belong to another run."""
    culprit: dict[str, Any] = {}  # noqa: RUF012  never changed in place; see `about`

    @property
    def exit_code(self) -> ExitCode:
        return ENDINGS[self.ending].exit_code

    def about(self, **culprit: Any) -> Self:
        """Add details of the error (record, image, key, file) for `run_status.json`, and return the error."""
        self.culprit = {**self.culprit, **culprit}
        return self


class CommunicationError(LlavaFsdpError):
    """Error: another rank has ended or is late. The cause is in the report of the rank that failed first."""

    ending = "communication"
    on_every_rank = False


class Stopped(LlavaFsdpError):
    """Raised when a stop was requested and the run has stopped at the end of a step."""

    ending = "stopped"

    def __init__(self, message: str, asked_here: bool = True):
        super().__init__(message)
        self.asked_here = asked_here
        """Whether this rank itself received the request to stop."""


class ConfigError(LlavaFsdpError):
    """Error: a configuration key, a value or a combination of values is wrong."""

    ending = "config"


class ModelError(LlavaFsdpError):
    """Error: a model folder is missing, incomplete, or holds another model than expected."""

    ending = "model"


class DamagedModel(ModelError):
    """Error: a model or adapter file that this package wrote was changed, is missing, or cannot be read."""


class DataError(LlavaFsdpError):
    """Error: a dataset file or a record is wrong."""

    ending = "data"

    def __init__(self, message: str, kind: str | None = None):
        """`kind` is a record's problem, from the table in `data/records/problems.py`; line breaks in the message are
        then escaped, as it contains names and values from the record."""
        super().__init__(message if kind is None else shown_name(message))
        self.kind = kind


class ImageError(DataError):
    """Error: an image is missing or broken. Only the rank that opens the image raises this."""

    on_every_rank = False

    def __init__(self, message: str, kind: str = "image_unreadable"):
        super().__init__(message, kind)
        self.kind: str = kind
        """The problem: image_missing, image_empty, image_truncated, image_unreadable, image_bomb or image_shape."""


class WorkerError(DataError):
    """Error: a data worker process died or stalled. Only the rank that started the worker raises this."""

    on_every_rank = False


class WorkerLost(WorkerError):
    """Error: a data worker was killed between two records, so that no record is the cause and a restart may help."""

    ending = "communication"


class SourceError(DataError):
    """Error: a dataset file or the dataset's index cannot be read or has changed. Only the rank that reads it raises
    this."""

    on_every_rank = False


class DamagedError(DataError):
    """Error: the content of a dataset's index has changed since it was written. Only the rank that reads it raises
    this."""

    on_every_rank = False


class FolderInUse(ConfigError):
    """Error: another run uses `output_dir`. Only rank 0 checks this."""

    on_every_rank = False
    leaves_word = False


class BuildError(ConfigError):
    """Error: the index of a dataset cannot be written. Only the rank that builds the index raises this."""

    on_every_rank = False


class StorageError(ConfigError):
    """Error: `output_dir` cannot be written. Only the rank that writes raises this."""

    on_every_rank = False


class CheckpointError(LlavaFsdpError):
    """Error: a checkpoint cannot be written or read, or cannot be resumed with this configuration."""

    ending = "checkpoint"


class FolderLost(CheckpointError):
    """Error: `output_dir` was deleted, moved, replaced or taken by another run during this run."""

    def __init__(self, message: str, leaves_word: bool):
        """`leaves_word`: whether the folder now at that path belongs to this run."""
        super().__init__(message)
        self.leaves_word = leaves_word


class OffloadError(ConfigError):
    """Error: host memory or disk space is too small for `offload`. Only the rank that needs it raises this."""

    on_every_rank = False


class OutOfMemory(LlavaFsdpError):
    """Error: GPU memory or host memory ran out. Only the rank that needed the memory raises this."""

    ending = "memory"
    on_every_rank = False


class NumericError(LlavaFsdpError):
    """Error: the loss or a gradient is not finite."""

    ending = "numeric"


class ReplicaError(LlavaFsdpError):
    """Error: ranks that must hold identical values hold different ones. Every rank raises this."""

    ending = "corruption"
