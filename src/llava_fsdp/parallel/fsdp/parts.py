"""The parts of a model that FSDP treats differently."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from llava_fsdp.model.architecture import Architecture


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model that FSDP treats differently."""

    stacks: list[nn.ModuleList]
    """Lists of blocks, the language model's first. One or several blocks (`sharding.blocks_per_unit`) become an FSDP
    unit."""
    whole: Sequence[nn.Module] = ()
    """Modules whose weights are never sharded while they are frozen."""
    output: nn.Module | None = None
    """The output layer, which becomes an FSDP unit; None: its weight is in another unit, or the model has none."""
    experts: Sequence[nn.Module] = ()
    """Modules with the experts of a mixture."""


def parts_of(model: Architecture) -> ModelParts:
    return ModelParts(model.blocks(), model.whole_while_frozen(), model.output_layer(), model.experts())
