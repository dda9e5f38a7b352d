"""Find the blocks (layers) of one of transformers' models."""

from torch import nn
from transformers import PretrainedConfig


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a model: its first ModuleList with as many modules as its configuration has layers."""
    config = model.config
    assert isinstance(config, PretrainedConfig)
    layers = config.num_hidden_layers
    stack = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers), None)
    assert stack is not None, f"{type(model).__name__} has no list of {layers} layers"
    return stack
