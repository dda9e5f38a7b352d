"""Compute a hidden state of any of transformers' vision encoders (vision towers), without running the layers after
it."""

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PretrainedConfig

from llava_fsdp.config import Feature
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.safe_load import library_errors

CACHES_TENSORS = ("beit", "data2vec-vision")
"""Values of `model_type` of vision towers for which transformers caches tensors for the whole process, on the device of
the first call."""
AUGMENTS = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Keys of DINOv3's configuration that move the positions of patches randomly in training, as in DINOv3's pretraining.
They are turned off, because the random numbers would differ between ranks, and after a run is resumed."""
SIZES = ("image_size", "patch_size", "num_hidden_layers", "hidden_size")
"""Keys that the configuration of a vision tower must have."""


class Probe(NamedTuple):
    """Properties of a vision tower (vision encoder), found by running it on the meta device."""

    features: int
    """Number of features of an image tile that the projector gets."""
    tokens: int
    """Number of tokens that an image tile has in the vision tower."""
    drops_cls: bool
    """Whether the first token, the CLS token, is left out. Registers (tokens that belong to no patch) stay."""
    leftovers: tuple[str, ...]
    """Names of the parameters that are used only after the selected hidden state. They never get a gradient and are
    frozen; otherwise optimizers and checkpoints would disagree about them."""
    layers: int
    """Number of layers up to the selected hidden state."""
    last_layer: str | None
    """Name of the layer whose output is the selected hidden state. None if the hidden state is not the output of a
    layer, so that the whole vision tower has to run."""


def image_size(vision: PretrainedConfig) -> int:
    """Return the width and height, in pixels, of a vision tower's input images. Some configurations have it as a
    pair."""
    return side(vision.image_size)


def patch_size(vision: PretrainedConfig) -> int:
    """Return the width and height of a vision tower's patches, in pixels."""
    return side(vision.patch_size)


def side(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def build_vision_tower(vision: PretrainedConfig) -> nn.Module:
    """Build transformers' model for a vision tower's configuration. Raises ModelError if transformers cannot build it,
    or it is not a vision transformer that turns an image into one sequence of tokens. Random shifts of patch positions
    in training (`AUGMENTS`), which DINOv3 may have, are turned off: ranks, and a resumed run, would draw other ones."""
    kind, lacks = MODEL_MAPPING.get(type(vision), None), [name for name in SIZES if not hasattr(vision, name)]
    if kind is None:
        raise ModelError(f"{unsupported(vision)} transformers has no class for it alone")
    if lacks:
        raise ModelError(
            f"{unsupported(vision)} its configuration has no {lacks[0]}, so that the number or the width of an image's "
            "tokens is unknown"
        )
    if not getattr(kind, "_supports_sdpa", False):
        raise ModelError(
            f"{unsupported(vision)} transformers' {getattr(kind, '__name__', kind)} has no scaled dot product attention"
        )
    config = copy.deepcopy(vision)
    for name in AUGMENTS:
        if hasattr(config, name):
            setattr(config, name, None)  # None: the position is not changed
    with library_errors(f"{unsupported(vision)} transformers cannot build it"):
        return AutoModel.from_config(config, attn_implementation="sdpa", trust_remote_code=False)


def unsupported(vision: PretrainedConfig) -> str:
    """Return the beginning of the error message for a vision tower of a type that is not supported."""
    return f"model.vision: a vision tower of type {vision.model_type} is not supported:"


class Reached(Exception):
    """Exception with which the vision tower's forward pass is ended after the last layer that is needed."""


def hidden_state(
    vision_tower: nn.Module, pixels: torch.Tensor, select_layer: int, last_layer: str | None
) -> torch.Tensor:
    """Compute transformers' `hidden_states[select_layer]` of a vision tower, bit for bit, [images, tokens, width]. The
    layers, norms and heads after the selected layer do not run: an exception ends the forward pass.

    Args:
        pixels: [images, 3, size, size], in the vision tower's dtype.
        last_layer: name of the layer whose output is this hidden state; None: the whole vision tower runs.
    """
    if last_layer is None:
        return vision_tower(pixel_values=pixels, output_hidden_states=True).hidden_states[select_layer]
    outputs: list[torch.Tensor] = []

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(first_of(output))
        raise Reached

    # registered anew for each pass, because this hook must run after the hooks that `fully_shard` adds to the layer
    handle = vision_tower.get_submodule(last_layer).register_forward_hook(leave)
    try:
        vision_tower(pixel_values=pixels)
    except Reached:
        return outputs.pop()  # `pop` empties the list, which the exception's frames keep alive
    finally:
        handle.remove()
    raise AssertionError(f"the vision tower did not run its layer {last_layer}")


def selected_features(vision_tower: nn.Module, pixels: torch.Tensor, select_layer: int, probe: Probe) -> torch.Tensor:
    """Return the features of images that the projector gets: the hidden state `select_layer`, without the CLS token if
    the probe says so, float [images, features, width]. `pixels`: [images, 3, size, size] in the tower's dtype."""
    features = hidden_state(vision_tower, pixels, select_layer, probe.last_layer)
    return features[:, 1:] if probe.drops_cls else features


def first_of(output: Any) -> Any:
    """Return the first element of a layer's output, if the output is a tuple, else the output."""
    return output[0] if isinstance(output, tuple) else output


@functools.lru_cache(maxsize=64)
def probe_vision_config(vision: ConfigKey, select_layer: int, feature: Feature) -> Probe:
    """Build a vision tower on the meta device, and find which of its layers, tokens and parameters are used with these
    settings (`model.select_layer` and `model.select_feature`). The answers for the last 64 configurations are cached:
    `vision` is a configuration that can be hashed."""
    with torch.device("meta"):
        vision_tower = build_vision_tower(vision.config)
    return probe_vision_tower(vision_tower, vision.config, select_layer, feature)


def probe_vision_tower(vision_tower: nn.Module, vision: PretrainedConfig, select_layer: int, feature: Feature) -> Probe:
    """Run a meta-device vision tower once, to find which of its layers, tokens and parameters are used. `select_layer`
    and `feature` are the settings `model.select_layer` and `model.select_feature`.

    Raises:
        ConfigError: the vision tower has no such layer, or no CLS token for `model.select_feature=patch` to drop.
        ModelError: the vision tower does not compute one sequence of features for each image.
    """
    if vision.model_type in CACHES_TENSORS:
        raise ModelError(
            f"{unsupported(vision)} transformers' code for it keeps tensors of the meta device, on which the model is "
            "built, and computes with them later"
        )
    depth = vision.num_hidden_layers
    if not 1 <= abs(select_layer) <= depth:
        raise ConfigError(
            f"model.select_layer={select_layer}: {vision.model_type} has {depth} layers; give 1 to {depth}, or "
            f"-{depth} to -1 counted from the last"
        )
    pixels = torch.zeros((1, 3, image_size(vision), image_size(vision)), device="meta")
    names, parameters = zip(*vision_tower.named_parameters(), strict=True)
    layers = {  # those of every module list that is as long as the tower is deep
        f"{name}.{number}": layer
        for name, stack in vision_tower.named_modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == depth
        for number, layer in enumerate(stack)
    }
    outputs: dict[str, Any] = {}

    def note(name: str) -> Any:
        return lambda module, inputs, output: outputs.update({name: first_of(output)})

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    failing = f"{unsupported(vision)} transformers' model does not compute and differentiate the features of an image"
    with torch.enable_grad(), library_errors(failing):
        features = vision_tower(pixel_values=pixels, output_hidden_states=True).hidden_states[select_layer]
        if features.ndim != 3 or features.shape[2] != vision.hidden_size:
            raise ModelError(
                f"{unsupported(vision)} its layers give features of shape {list(features.shape)}, and not [images, "
                f"tokens, {vision.hidden_size}]"
            )
        # None for a parameter that does not take part in the features
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
    for handle in handles:
        handle.remove()
    tokens, grid = features.shape[1], (image_size(vision) // patch_size(vision)) ** 2
    # DINOv2 and DINOv3 put their registers between the CLS token and the patches
    has_cls = tokens == grid + 1 + (getattr(vision, "num_register_tokens", None) or 0)
    if feature is Feature.patch and not has_cls:
        raise ConfigError(
            f"model.select_feature=patch drops a CLS token, but {vision.model_type} gives {tokens} tokens for a "
            f"grid of {grid} patches; set model.select_feature=full"
        )
    drops_cls = has_cls if feature is Feature.auto else feature is Feature.patch
    return Probe(
        features=tokens - drops_cls,
        tokens=tokens,
        drops_cls=drops_cls,
        leftovers=tuple(name for name, gradient in zip(names, gradients, strict=True) if gradient is None),
        layers=select_layer % (depth + 1),  # hidden state 0 is the input of the first layer
        last_layer=next((name for name, output in outputs.items() if output is features), None),
    )
