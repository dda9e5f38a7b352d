"""What a vision tower gives, whichever tower of transformers it is, and no layer of it more than that takes."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.config import Feature, ModelConfig
from llava_fsdp.runtime.errors import ConfigError


class Probe(NamedTuple):
    """What a run on the meta device tells of a tower."""

    image_tokens: int
    """Positions that a picture takes in the language model."""
    positions: int
    """Positions of a picture within the tower."""
    leftovers: list[str]
    """Parameters behind the selected hidden state, by name: they would never get a gradient, and optimizers and
    checkpoints would disagree about them."""
    layers: int
    """So many it takes."""
    last_layer: str | None
    """The last of them, by name, whose output the hidden state is; None where it is no layer's own, and the whole tower
    has to run."""


class Reached(Exception):
    """The layer has run; what lies behind it need not."""


def hidden_state(tower: nn.Module, pixels: torch.Tensor, select_layer: int, last_layer: str | None) -> torch.Tensor:
    """float [tiles, positions, width]: transformers' `hidden_states[select_layer]`, to the bit.

    Layers behind it do not run, nor norms and heads: transformers has no other way out of a tower's forward pass than
    an exception.

    Args:
        pixels: [tiles, 3, size, size].
    """
    if last_layer is None:
        return tower(pixel_values=pixels, output_hidden_states=True).hidden_states[select_layer]
    found: list[torch.Tensor] = []

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(first_of(output))
        raise Reached

    # registered for each pass: it has to come behind those of `fully_shard`, which are to be done with the layer
    handle = tower.get_submodule(last_layer).register_forward_hook(leave)
    try:
        tower(pixel_values=pixels)
    except Reached:
        return found.pop()  # and nothing keeps it: the exception's frames would, through the list
    finally:
        handle.remove()
    raise AssertionError(f"the tower did without its layer {last_layer}")


def first_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def probe_tower(tower: nn.Module, vision: PretrainedConfig, cfg: ModelConfig) -> Probe:
    """Run a tower on the meta device, whichever it is.

    Raises:
        ConfigError: it has no such layer, or no CLS token to drop.
    """
    depth = vision.num_hidden_layers
    if not 1 <= abs(cfg.select_layer) <= depth:
        raise ConfigError(
            f"model.select_layer={cfg.select_layer}: {vision.model_type} has {depth} layers; give 1 to {depth}, or "
            f"-{depth} to -1 counted from the last"
        )
    pixels = torch.zeros((1, 3, vision.image_size, vision.image_size), device="meta")
    names, parameters = zip(*tower.named_parameters(), strict=True)
    layers = {
        f"{name}.{number}": layer
        for name, stack in tower.named_modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == depth
        for number, layer in enumerate(stack)
    }
    given: dict[str, Any] = {}

    def note(name: str) -> Any:
        return lambda module, inputs, output: given.update({name: first_of(output)})

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    with torch.enable_grad():
        features = tower(pixel_values=pixels, output_hidden_states=True).hidden_states[cfg.select_layer]
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
    for handle in handles:
        handle.remove()
    positions, grid = features.shape[1], (vision.image_size // vision.patch_size) ** 2
    if cfg.select_feature is Feature.patch and positions != grid + 1:
        raise ConfigError(
            f"model.select_feature=patch drops a CLS token, but {vision.model_type} gives {positions} positions for a "
            f"grid of {grid}; set model.select_feature=full"
        )
    return Probe(
        image_tokens=positions - (cfg.select_feature is Feature.patch),
        positions=positions,
        leftovers=[name for name, gradient in zip(names, gradients, strict=True) if gradient is None],
        layers=cfg.select_layer % (depth + 1),
        last_layer=next((name for name, output in given.items() if output is features), None),
    )
