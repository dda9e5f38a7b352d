"""Positions of tokens in models that number the tokens of an image by its rows and columns (M-RoPE)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, PretrainedConfig


@dataclass(frozen=True)
class SamplePositions:
    """Function that numbers the tokens of a sample as the class of a model in transformers does. It needs no weights,
    and can be sent to other processes."""

    config: PretrainedConfig
    """The configuration of the whole model."""

    def __call__(
        self, ids: torch.Tensor, types: Mapping[str, torch.Tensor], pixels: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the positions of a sample's tokens, int64 [axes, length]. The axes, such as time, height and width,
        are those by which the model numbers the tokens of images.

        Args:
            ids: the sample's token ids, int64 [length].
            types: what the processor says of each token, as `mm_token_type_ids`, int64 [length] each.
            pixels: what the processor says of the sample's images, as `image_grid_thw`.
        """
        model: Any = model_class(self.config)
        bare = model.__new__(model)  # `get_rope_index` reads only the configuration: no modules are built
        nn.Module.__init__(bare)
        bare.config = self.config
        known = inspect.signature(model.get_rope_index).parameters
        given = {name: value[None] for name, value in types.items() if name in known}
        given |= {name: value for name, value in pixels.items() if name in known}
        return bare.get_rope_index(ids[None], **given)[0][:, 0].long()  # the first result is [axes, 1, length]


def positions_of(config: PretrainedConfig) -> SamplePositions | None:
    """Return the function that numbers a sample's tokens; None if a model numbers them one after the other."""
    return SamplePositions(config) if hasattr(model_class(config), "get_rope_index") else None


def model_class(config: PretrainedConfig) -> Any:
    """Return the class of a model without output layer in transformers; None if transformers has no such class."""
    return MODEL_MAPPING.get(type(config), None)
