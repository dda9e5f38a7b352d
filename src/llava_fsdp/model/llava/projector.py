"""The projector, which maps image features of the vision tower to embeddings of the language model."""

import math
import re

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from llava_fsdp.config import ModelConfig
from llava_fsdp.model.vision_tower import image_size, patch_size
from llava_fsdp.runtime.errors import ConfigError


class Projector(nn.Module):
    """Projector of image features into the language model's embedding space: a linear layer, an MLP with GELU, or the
    identity. With pixel shuffle, each square of `factor` x `factor` neighbouring features is first joined into one
    feature, and an MLP with a LayerNorm follows. A factor of 1 means no pixel shuffle.

    It is that of LLaVA (multimodal_projector/builder.py:33-51) or, with pixel shuffle, that of transformers' InternVL
    (InternVLMultiModalProjector in modeling_internvl.py). Layers are named as there: layer_norm, linear_1, linear_2,
    ...
    """

    def __init__(self, kind: str, features: int, hidden: int, factor: int = 1):
        """Build the layers. `kind` is the value of `model.projector_type`, such as mlp2x_gelu (two linear layers);
        `features` and `hidden` are the widths of image features and of embeddings. Each square of `factor` x `factor`
        features is joined. Raises ConfigError if an identity would have to change the width."""
        super().__init__()
        depth = {"identity": 0, "linear": 1}.get(kind) or int((re.findall(r"mlp(\d+)x", kind) or ["0"])[0])
        if depth == 0 and features != hidden:
            raise ConfigError(
                f"model.projector_type=identity needs a tower as wide as the language model; here they are {features} "
                f"and {hidden} wide: choose mlp2x_gelu"
            )
        self.depth = depth
        self.factor = factor
        features *= factor**2
        if factor > 1:
            self.layer_norm = nn.LayerNorm(features)
        for number in range(1, depth + 1):
            self.add_module(f"linear_{number}", nn.Linear(features if number == 1 else hidden, hidden))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project image features to embeddings: [tiles, features, width] -> [tiles, features / factor**2, hidden]."""
        if self.factor > 1:
            features = self.layer_norm(pixel_shuffle(features, self.factor))
        for number in range(1, self.depth + 1):
            if number > 1:
                features = functional.gelu(features)
            features = self.get_submodule(f"linear_{number}")(features)
        return features


def pixel_shuffle(features: torch.Tensor, factor: int) -> torch.Tensor:
    """Join each square of factor x factor neighbouring features of a square grid into one feature, row by row: [tiles,
    side**2, width] -> [tiles, (side / factor)**2, factor**2 * width]."""
    tiles, count, width = features.shape
    across = math.isqrt(count) // factor
    squares = features.view(tiles, across, factor, across, factor, width).transpose(2, 3)
    return squares.reshape(tiles, across**2, factor**2 * width)


def check_can_be_shuffled(cfg: ModelConfig, vision: PretrainedConfig, features: int) -> None:
    """Raise ConfigError if the projector has a pixel shuffle, and the vision tower's features (their number is
    `features`) are not a square grid that can be divided into squares of shuffle_factor x shuffle_factor features."""
    side, factor = image_size(vision) // patch_size(vision), cfg.shuffle_factor
    if factor == 1:
        return
    if features != side**2:
        raise ConfigError(
            f"model.projector_type={cfg.projector_type} joins the features of a grid, and {vision.model_type} gives "
            f"{features} features for a grid of {side} x {side} patches; drop its CLS token with "
            "model.select_feature=patch, or choose mlp2x_gelu"
        )
    if side % factor:
        raise ConfigError(
            f"model.projector_type={cfg.projector_type} joins squares of {factor} x {factor} features, and "
            f"{vision.model_type} gives a grid of {side} x {side}; choose mlp2x_gelu, or another vision tower"
        )
