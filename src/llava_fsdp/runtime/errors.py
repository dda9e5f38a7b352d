"""Errors that users can cause or encounter; each error class has an exit code.

The message of an error names the file, record or key, the wrong value, and what the user can do. Bugs of this package
itself have no class here; assertions check for them.
"""

from typing import Any, Self

from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.text.terminal_text import shown_name


class LlavaFsdpError(Exception):
    """Base class of all errors that users can cause or encounter."""

    ending = "bug"
    """How a run ends if this error is raised: a key of `ENDINGS`."""
    on_every_rank = True
    """Whether every rank raises this error, so that only rank 0 prints it."""
    may_be_recorded = True
    """Whether `run_status.json` may be written into `output_dir`. Not if the folder may belong to another run."""
    culprit: dict[str, Any] = {}  # noqa: RUF012  never changed in place; see `about`

    @property
    def exit_code(self) -> ExitCode:
        return ENDINGS[self.ending].exit_code

    def about(self, **culprit: Any) -> Self:
        """Add details of the cause (record, image, key, file, ...) for `run_status.json`; return the error."""
        self.culprit = {**self.culprit, **culprit}
        return self


class CommunicationError(LlavaFsdpError):
    """Error: another rank has ended or is late. The report of the rank that failed first names the cause."""

    ending = "communication"
    on_every_rank = False


class Stopped(LlavaFsdpError):
    """Ends a run, at the end of a training step, because a stop was requested."""

    ending = "stopped"

    def __init__(self, message: str, asked_here: bool = True):
        """Create the error that ends a run because a stop was requested."""
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
        """Create the error about a wrong file or record of a dataset. `kind`: the kind of problem of a record, a name
        in `data/problems.py`; None if the error is not about a record. With a kind, line breaks in the message are
        escaped, because it contains names and values from the record."""
        super().__init__(message if kind is None else shown_name(message))
        self.kind = kind


class ImageError(DataError):
    """Error: an image is missing or broken. Raised only on the rank that opens the image."""

    on_every_rank = False

    def __init__(self, message: str, kind: str = "image_unreadable"):
        """Create the error about a missing or broken image."""
        super().__init__(message, kind)
        self.kind: str = kind
        """image_missing, image_empty, image_truncated, image_unreadable, image_bomb or image_shape."""


class WorkerError(DataError):
    """Error: a process that loads data died or stalled. Raised only on the rank that started the process."""

    on_every_rank = False


class WorkerLost(WorkerError):
    """Error: a process that loads data was killed while it read no record. A restart may help."""

    ending = "communication"


class SourceError(DataError):
    """Error: a file of a dataset, or its index, cannot be read or has changed. Raised only on the rank that reads
    it."""

    on_every_rank = False


class RemoteGone(SourceError):
    """Error: a remote file does not exist (any more)."""


class RemoteChanged(SourceError):
    """Error: a remote file has changed since its folder was listed."""


class RemoteForbidden(SourceError):
    """Error: a remote storage refuses to give a file to this user."""


class RemoteAway(SourceError):
    """Error: a remote storage could not be reached, or answered with errors, until the deadline. A restart may help."""

    ending = "communication"


class DamagedError(DataError):
    """Error: the index of a dataset has changed since it was written. Raised only on the rank that reads it."""

    on_every_rank = False


class CompileError(ConfigError):
    """Error: torch.compile failed. Raised only on the rank on which it failed."""

    on_every_rank = False


class FolderInUse(ConfigError):
    """Error: another run uses the folder `output_dir`. Only rank 0 checks this."""

    on_every_rank = False
    may_be_recorded = False


class BuildError(ConfigError):
    """Error: the index of a dataset cannot be written. Raised only on the rank that builds it."""

    on_every_rank = False


class StorageError(ConfigError):
    """Error: a file in `output_dir` cannot be written. Raised only on the rank that writes it."""

    on_every_rank = False


class MetricError(ConfigError):
    """Error: a program's own function that scores validation answers failed, or returned no number from 0 to 1. Raised
    only on the rank that scores the answer."""

    on_every_rank = False


class EventError(ConfigError):
    """Error: an observer that a program gave to a training (`events=`) has raised an exception. Raised only on the rank
    on which that happened."""

    on_every_rank = False


class CheckpointError(LlavaFsdpError):
    """Error: a checkpoint cannot be written or read, or cannot be resumed with this configuration."""

    ending = "checkpoint"


class FolderLost(CheckpointError):
    """Error: during a run `output_dir` was deleted, moved, replaced or taken by another run."""

    def __init__(self, message: str, may_be_recorded: bool):
        """Create the error that ends a run whose `output_dir` was deleted, moved or replaced. `may_be_recorded`:
        whether `run_status.json` may be written into the folder that is at this path now."""
        super().__init__(message)
        self.may_be_recorded = may_be_recorded


class HubError(LlavaFsdpError):
    """Error: the Hugging Face hub could not be reached, or did not take what was pushed. Running the command again may
    help."""

    ending = "communication"
    on_every_rank = False


class OffloadError(ConfigError):
    """Error: host memory or disk space is too small for what the key `offload` moves there. Raised only on the rank
    that lacks it."""

    on_every_rank = False


class OutOfMemory(LlavaFsdpError):
    """Error: GPU memory or host memory ran out. Raised only on the rank that needed the memory."""

    ending = "memory"
    on_every_rank = False


class NumericError(LlavaFsdpError):
    """Error: the loss, a gradient, a weight or a tensor of the optimizer is not finite."""

    ending = "numeric"


class ReplicaError(LlavaFsdpError):
    """Error: ranks that must hold identical values hold different ones. Raised on every rank."""

    ending = "corruption"
