"""The trained weights of a checkpoint, one at a time, without the run that wrote it."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from llava_fsdp.checkpoint import quiet_single_process
from llava_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, whatever ranks wrote it; nothing is read before `rows`."""

    folder: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of dimension 0.

        Raises:
            CheckpointError: it cannot be read.
        """
        values = torch.empty(self.shape, dtype=self.dtype)
        try:
            with quiet_single_process():
                dcp.load({self.key: values}, checkpoint_id=self.folder, no_dist=True)
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            why = str(error).strip().splitlines()[-1]
            raise CheckpointError(f"checkpoint {self.folder}: {self.key} could not be read: {why}") from error
        return values[begin:end]


def saved_weights(folder: Path) -> dict[str, SavedTensor]:
    """The trained weights of a checkpoint, fp32, by parameter name.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling raises anything
        raise CheckpointError(f"checkpoint {folder} could not be read: {error}") from error
    return {
        key.removeprefix("model."): SavedTensor(folder, key, tuple(saved.size), saved.properties.dtype)
        for key, saved in stored.items()
        if isinstance(saved, TensorStorageMetadata) and key.startswith("model.")
    }
