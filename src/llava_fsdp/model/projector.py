"""The projector: from features of the vision tower to embeddings of the language model."""

import re

import torch
from torch import nn
from torch.nn import functional

from llava_fsdp.runtime.errors import ConfigError


class Projector(nn.Module):
    """Projector of image features to the language model's embedding space: linear, mlp{N}x_gelu or identity.

    As in LLaVA multimodal_projector/builder.py:33-51; layers are called linear_1, linear_2, ... as transformers does.
    """

    def __init__(self, kind: str, features: int, hidden: int):
        super().__init__()
        depth = {"identity": 0, "linear": 1}.get(kind) or int((re.findall(r"\d+", kind) or ["0"])[0])
        if depth == 0 and features != hidden:
            raise ConfigError(
                f"model.projector_type=identity needs a tower as wide as the language model; here they are {features} "
                f"and {hidden} wide: choose mlp2x_gelu"
            )
        self.depth = depth
        for number in range(1, depth + 1):
            self.add_module(f"linear_{number}", nn.Linear(features if number == 1 else hidden, hidden))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project features: [..., features] -> [..., hidden]."""
        for number in range(1, self.depth + 1):
            if number > 1:
                features = functional.gelu(features)
            features = self.get_submodule(f"linear_{number}")(features)
        return features
