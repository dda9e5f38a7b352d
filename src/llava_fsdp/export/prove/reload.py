"""Compute the logits of an exported folder with transformers' class, for each kind of model."""

from collections.abc import Mapping
from pathlib import Path

import torch

from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.export.prove.verify_logits import reloaded_logits
from llava_fsdp.export.prove.whole_class import logits_of_export, without_padding
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.model.whole.whole import Whole


def comparable(model: Architecture, micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch with the label positions at which a model's logits are compared with those of transformers'
    class, from `micro`: padded rows, in which all tokens are label positions. A model that is such a class itself is
    not compared at padding, for which the class may compute anything; LLaVA's classes compute it as ordinary tokens."""
    return without_padding(micro) if isinstance(model, Whole) else micro


def logits_of_class(
    model: Architecture,
    folder: Path,
    micro: MicroBatch,
    dtype: torch.dtype,
    sizes: list[Size],
    weights: Mapping[str, Stored],
) -> torch.Tensor:
    """Load an exported folder with transformers, and return its logits for the label tokens of a micro-batch: float32
    [labels, rows of the exported embeddings].

    Args:
        model: a model of the kind that was exported; its weights are not used.
        dtype: dtype in which the class computes.
        sizes: width and height in pixels of each image.
        weights: the weights that were exported, by name.

    Raises:
        ModelError: transformers cannot load or use the folder, or loads other weights from it.
    """
    if isinstance(model, Whole):
        return logits_of_export(folder, micro, dtype, weights)
    return reloaded_logits(folder, micro, micro.images["tiles"], dtype, sizes)
