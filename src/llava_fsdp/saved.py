"""The trained weights of a checkpoint, one at a time, without the run that wrote it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from llava_fsdp.checkpoint import Checkpoint
from llava_fsdp.checkpoint.manifest import Saved
from llava_fsdp.checkpoint.resume import saved_rows

WEIGHT = "model."


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, whatever ranks wrote it; nothing is read before `rows`."""

    folder: Path
    key: str
    saved: Saved

    @property
    def shape(self) -> tuple[int, ...]:
        return self.saved.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.saved.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of dimension 0.

        Raises:
            CheckpointError: they cannot be read.
        """
        return saved_rows(self.folder, self.key, self.saved, begin, end)


def saved_weights(found: Checkpoint) -> dict[str, SavedTensor]:
    """The trained weights of a checkpoint that has been verified, in the dtype of the masters, by parameter name."""
    return {
        key.removeprefix(WEIGHT): SavedTensor(found.folder, key, saved)
        for key, saved in found.manifest.tensors.items()
        if key.startswith(WEIGHT)
    }
