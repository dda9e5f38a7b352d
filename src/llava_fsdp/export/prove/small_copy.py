"""Build a small copy of a model: the same classes and options with few layers, small widths and random weights, so that
an export can be tried within seconds."""

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.config import ModelConfig, QuantizeConfig
from llava_fsdp.export.write.formats import SourceModel
from llava_fsdp.model.adapters.lora_names import LORA_B
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.vision_tower import image_size, patch_size
from llava_fsdp.model.weights.init_weights import Drawn, DrawRule, Rule
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors

MOST = {
    "vocab_size": 67, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 9, "attention_chunk_size": 9,
    "ffn_dim": 40, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "vocab_size_per_layer_input": 67,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
"""Maximum values of keys in a small copy's configuration. The keys of heads and layers are not among them."""
MOST_INTERMEDIATE, MOST_EXPERT = 40, 24
"""Maximum widths of the hidden layer of an MLP, and of an expert. Kernels for experts need multiples of 8."""
HEADS, HEAD_DIM = 4, 16
MOST_LAYERS = 16
"""Maximum number of layers of a small copy. A model is not copied if a kind of layer first occurs after these."""
MOST_PARAMETERS = 16_000_000
DERIVED = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")
"""Configuration keys whose values transformers computes from the number of layers when it reads a configuration."""


class NoSmallCopy(ModelError):
    """Error: no small copy of a model can be made."""


def small_copy(source: SourceModel) -> tuple[SourceModel, dict[str, Drawn]]:
    """Return a description of a small copy of a model, built on the meta device, and random values of the copy's
    parameters, by name. Raises NoSmallCopy if no small copy can be made."""
    model, parts = source.model, source.model.parts
    language = shrink(parts.language, count_layers(model.language_model))
    vision, select_layer = shrink_tower(model)
    # exports have no quantized weights
    cfg = replace(model.cfg, select_layer=select_layer, quantize=QuantizeConfig())
    with library_errors("transformers cannot build it", NoSmallCopy):
        small = build_llava(replace(parts, language=language, vision=vision, is_small_copy=True), cfg, torch.float32)
    check_same_structure(model, small)
    tile, old = small.parts.image_size, parts.image_size
    grids = [[width // old * tile, height // old * tile] for width, height in source.grid_pinpoints]
    # max_tiles=1, so that the features of an image of several tiles are shrunk
    return replace(source, model=small, grid_pinpoints=grids, max_tiles=1), random_values(small)


def shrink_tower(model: Llava) -> tuple[PretrainedConfig, int]:
    """Return the configuration of a small copy of a model's vision tower, with few patches and, if there are as many, 3
    layers or more, and the copy's `model.select_layer`. Raises NoSmallCopy if no small copy can be made."""
    vision = model.parts.vision
    depth = min(vision.num_hidden_layers, max(3, count_layers(model.vision_tower)))
    small = shrink_image(shrink(vision, depth), model.cfg.shuffle_factor)
    return small, shrink_layer(model.cfg, vision.num_hidden_layers, depth)


def count_layers(part: Any) -> int:
    """Return how many of a transformer's first layers a small copy of it needs so that it has a layer of each kind; at
    least 2, if there are as many. Raises NoSmallCopy if these are too many."""
    config, blocks = part.config, find_blocks(part)
    depth = len(blocks)
    lists = [v for v in config.to_dict().values() if isinstance(v, list) and len(v) == depth]
    # those that name the kind of each layer have few different items; others have a number for each layer
    lists = [v for v in lists if all(isinstance(item, bool | int | str | None) for item in v) and len({*v}) <= 4]
    kinds = [(kind_of_layer(block), *(v[index] for v in lists)) for index, block in enumerate(blocks)]
    needed = max(kinds.index(kind) for kind in kinds) + 1
    if needed > MOST_LAYERS:
        raise NoSmallCopy(f"layer {needed} of {depth} is the first of its kind")
    return min(depth, max(2, needed))


def kind_of_layer(block: nn.Module) -> tuple[Any, ...]:
    """Return a tuple that is equal for two transformer layers of the same kind: their modules have the same classes and
    settings. If a setting is a number, only its type and whether it is 0 are compared."""
    return tuple(
        (
            path,
            type(module),
            tuple((k, comparable(v)) for k, v in sorted(vars(module).items()) if not k.startswith("_")),
        )
        for path, module in block.named_modules()
    )


def comparable(value: Any) -> Any:
    """Reduce a module's setting to what must be equal in layers of the same kind: a text, a bool or None to itself, a
    number to its type and whether it is nonzero, any other object to its type."""
    if isinstance(value, bool | str | None):
        return value
    return (type(value), bool(value)) if isinstance(value, int | float) else type(value)


def shrink(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a configuration of the same class for a small copy, with `layers` layers and small widths. Values of keys
    that this module does not know stay unchanged. Raises NoSmallCopy if the configuration has no single number of
    layers or heads, or transformers refuses the small values."""
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(getattr(config, key, None), int):
            raise NoSmallCopy(f"the configuration of its {config.model_type} has no {key}")
    values = config.to_dict()
    depth, heads, width = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    groups = getattr(config, "num_key_value_heads", None)
    head_dim = values.get("head_dim") or width // heads
    new_heads, new_dim = min(heads, HEADS), min(head_dim, HEAD_DIM)
    sizes = dict(MOST)  # {key: its maximum in a small copy}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": new_heads, "head_dim": new_dim}
    # another width than heads * head_dim stays another one, and grouped key heads stay grouped
    sizes["hidden_size"] = new_heads * new_dim + (0 if heads * head_dim == width else 8)
    sizes["num_key_value_heads"] = new_heads if groups == heads else min(2, new_heads // 2)
    vocabulary = min(sizes["vocab_size"], getattr(config, "vocab_size", 0))
    names = {config.attribute_map.get(name, name): most for name, most in sizes.items()}
    for name, value in values.items():
        if name in DERIVED:  # transformers computes the value from the number of layers
            continue
        if isinstance(value, list) and len(value) == depth:
            value = value[:layers]
        values[name] = shrink_value(name, value, names, vocabulary)
    values = {name: value for name, value in values.items() if name not in DERIVED}
    if values.get("per_layer_config"):  # values of single layers, such as Gemma 4's
        values["per_layer_config"] = {
            number: {name: shrink_value(name, value, names, vocabulary) for name, value in layer_values.items()}
            for number, layer_values in values["per_layer_config"].items()
            if int(number) < layers
        }
    if {"qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"} <= values.keys():
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if {"mamba_n_heads", "mamba_d_head", "mamba_expand"} <= values.keys():
        inner = values["mamba_expand"] * sizes["hidden_size"]
        values["mamba_n_heads"], values["mamba_d_head"] = new_heads, inner // new_heads
    if values.get("rope_parameters"):
        values["rope_parameters"] = shrink_rope(values["rope_parameters"], new_dim / head_dim)
    with library_errors("transformers refuses its configuration", NoSmallCopy):
        return type(config).from_dict(values)


def shrink_value(name: str, value: Any, maxima: dict[str, int], vocabulary: int) -> Any:
    """Return the value of the key `name` for a small copy: reduced if it is a size (with a maximum in `maxima`) or a
    token id, which must be below the small copy's `vocabulary`; else unchanged."""
    most = maxima.get(name)
    if most is None and "intermediate_size" in name:
        most = MOST_EXPERT if "moe" in name else MOST_INTERMEDIATE
    if most is None and name.endswith("_token_id"):
        most = vocabulary - 1
    if isinstance(value, list):
        return [shrink_value(name, item, maxima, vocabulary) for item in value] if most is not None else value
    return min(value, most) if most is not None and type(value) is int else value


def shrink_rope(values: Any, ratio: float) -> Any:
    """Return the configuration of rotary embeddings, or a part of it, for a small copy, whose attention heads are
    narrower by the factor `ratio`. Lists with one number for each frequency get shorter; the sections of MRoPE, which
    has several positions for each token, get narrower."""
    if not isinstance(values, dict):
        return values
    result = {}
    for name, value in values.items():
        if name == "mrope_section" and value:
            total, first = round(sum(value) * ratio), [int(section * ratio) for section in value[:-1]]
            result[name] = [*first, total - sum(first)]
        elif isinstance(value, list):
            result[name] = value[: round(len(value) * ratio)]
        else:
            result[name] = shrink_rope(value, ratio)
    return result


def shrink_image(vision: PretrainedConfig, factor: int) -> PretrainedConfig:
    """Return a vision tower's configuration changed to images of few patches. As in the original configuration, the
    number of patches in each direction is odd or even, and the same number of pixels remains at the edge. The number is
    a multiple of `factor`, the number of patches in each direction that the projector joins."""
    values, size, patch = vision.to_dict(), image_size(vision), patch_size(vision)
    grid = size // patch
    few = 2 * factor if factor > 1 else 3 + (grid % 2 == 0)
    new = min(few, grid) * patch + size % patch
    values["image_size"] = [new, new] if isinstance(values["image_size"], list | tuple) else new
    return type(vision).from_dict(values)


def shrink_layer(cfg: ModelConfig, depth: int, new_depth: int) -> int:
    """Return the value of `model.select_layer` for a small copy whose vision tower has `new_depth` instead of `depth`
    layers: the layer that is as far from the last one, or the first layer if there are too few."""
    behind = -cfg.select_layer - 1 if cfg.select_layer < 0 else depth - cfg.select_layer
    behind = min(behind, new_depth - 1)
    return -behind - 1 if cfg.select_layer < 0 else new_depth - behind


def check_same_structure(model: Llava, small: Llava) -> None:
    """Raise NoSmallCopy if a small copy does not have the structure of its model, or is not small. Parameters must have
    the same names apart from layer numbers, and the vision tower must drop its CLS token in both or in neither."""

    def names(module: nn.Module) -> set[str]:
        found = (re.sub(r"\.\d+\.", ".0.", name) for name, _ in module.named_parameters())
        return {name.replace("base_layer.", "") for name in found}

    differing = names(model) ^ names(small)
    if differing:
        raise NoSmallCopy(f"only one of both has {min(differing)}")
    if small.probe.drops_cls != model.probe.drops_cls:
        raise NoSmallCopy("its vision tower has another number of tokens beside the patches")
    size = sum(parameter.numel() for parameter in small.parameters())
    if size > MOST_PARAMETERS:
        raise NoSmallCopy(f"it would have {size:,} parameters")


def random_values(model: Llava) -> dict[str, Drawn]:
    """Return random values of all parameters, by name, which are generated when they are read. Norms and biases are
    random too, so that an export that swaps two parameters has other logits."""

    def deviation(name: str, shape: torch.Size) -> float:
        if model.adapted and name.endswith(LORA_B):  # so that adapters' products are about as large as the weights
            return scale(shape) / model.cfg.lora.scaling
        return scale(shape)

    return {
        name: Drawn(name, tuple(p.shape), DrawRule(Rule.NORMAL, deviation(name, p.shape)), seed=0)
        for name, p in model.named_parameters()
    }


def scale(shape: torch.Size) -> float:
    """Return the standard deviation of the random values of a small copy's parameter with this shape: that with which a
    matrix keeps the size of its inputs, and 0.5 for a vector."""
    # more than three dimensions: a convolution over images, each output of which sums over all dimensions but the first
    fan_in = math.prod(shape[1:]) if len(shape) > 3 else shape[-1]
    return max(fan_in, 1) ** -0.5 if len(shape) > 1 else 0.5
