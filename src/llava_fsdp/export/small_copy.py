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
from llava_fsdp.export.formats import SourceModel
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.init_weights import Drawn, DrawRule, Rule
from llava_fsdp.model.llava import Llava, build_llava
from llava_fsdp.model.lora_names import LORA_B
from llava_fsdp.model.vision_tower import image_size, patch_size

MOST = {
    "vocab_size": 67, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 9, "attention_chunk_size": 9,
    "ffn_dim": 40, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
"""Largest values that a small copy's configuration has, beside those of heads and layers."""
MOST_INTERMEDIATE, MOST_EXPERT = 40, 24
"""Largest widths inside MLPs, and inside experts. Kernels of mixtures of experts take multiples of 8 alone."""
HEADS, HEAD_DIM = 4, 16
MOST_LAYERS = 16
"""A model whose first layers of every kind are not among its first 16 ones is not copied."""
MOST_PARAMETERS = 16_000_000
DERIVED = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")
"""Values that transformers computes from the number of layers while it reads a configuration."""


def small_copy(source: SourceModel, seed: int = 0) -> tuple[SourceModel, dict[str, Drawn]]:
    """Return the description of a small copy of a model, on the meta device, and random values of its parameters.

    Raises:
        Exception: there is no small copy of this model, for instance because one of its sizes is under a name that is
            not known here.
    """
    model, parts = source.model, source.model.parts
    language = shrink(parts.language, count_layers(model.language_model))
    depth = min(parts.vision.num_hidden_layers, max(3, count_layers(model.vision_tower)))
    vision = shrink_image(shrink(parts.vision, depth), model.cfg.shuffle_factor)
    cfg = replace(
        model.cfg,
        select_layer=shrink_layer(model.cfg, parts.vision.num_hidden_layers, depth),
        quantize=QuantizeConfig(),
    )
    small = build_llava(replace(parts, language=language, vision=vision), cfg, torch.float32)
    check_same_structure(model, small)
    tile, old = small.parts.image_size, parts.image_size
    grids = [[width // old * tile, height // old * tile] for width, height in source.grid_pinpoints]
    # one tile at most, so that a grid of more tiles is shrunk
    return replace(source, model=small, grid_pinpoints=grids, max_tiles=1), random_values(small, seed)


def count_layers(part: Any) -> int:
    """Return how many layers, from the first on, include one of each kind that a transformer has; at least 2."""
    config, blocks = part.config, find_blocks(part)
    depth = len(blocks)
    lists = [v for v in config.to_dict().values() if isinstance(v, list) and len(v) == depth]
    lists = [own for own in lists if all(isinstance(v, bool | int | str | None) for v in own) and len({*own}) <= 4]
    kinds = [(describe(block), *(own[place] for own in lists)) for place, block in enumerate(blocks)]
    needed = max(kinds.index(kind) for kind in kinds) + 1
    if needed > MOST_LAYERS:
        raise ValueError(f"layer {needed} of {depth} is the first of its kind")
    return min(depth, max(2, needed))


def describe(block: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes kinds of layers: their modules and these modules' settings. Numbers may differ from
    layer to layer, but whether they are 0."""
    return tuple(
        (path, type(module), tuple((k, setting(v)) for k, v in sorted(vars(module).items()) if not k.startswith("_")))
        for path, module in block.named_modules()
    )


def setting(value: Any) -> Any:
    if isinstance(value, bool | str | None):
        return value
    return (type(value), bool(value)) if isinstance(value, int | float) else type(value)


def shrink(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a configuration of the same class with `layers` layers and small widths. Values that it has under names
    that are not known here stay as they are."""
    values = config.to_dict()
    depth, heads, width = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    groups = getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None) or width // heads
    new_heads, new_dim = min(heads, HEADS), min(head_dim, HEAD_DIM)
    sizes = dict(MOST)
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": new_heads, "head_dim": new_dim}
    sizes["hidden_size"] = new_heads * new_dim + (0 if heads * head_dim == width else 8)
    sizes["num_key_value_heads"] = new_heads if groups == heads else min(2, new_heads // 2)
    vocabulary = min(sizes["vocab_size"], getattr(config, "vocab_size", 0))
    names = {config.attribute_map.get(name, name): most for name, most in sizes.items()}
    for name, value in values.items():
        if name in DERIVED:
            continue
        if isinstance(value, list) and len(value) == depth:
            value = value[:layers]
        values[name] = shrunk(name, value, names, vocabulary)
    values = {name: value for name, value in values.items() if name not in DERIVED}
    if "qk_head_dim" in values:
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if values.get("rope_parameters"):
        values["rope_parameters"] = shrink_rope(values["rope_parameters"], new_dim / head_dim)
    return type(config).from_dict(values)


def shrunk(name: str, value: Any, names: dict[str, int], vocabulary: int) -> Any:
    """Return a value of a configuration, made small if it is a size or the id of a token."""
    most = names.get(name)
    if most is None and "intermediate_size" in name:
        most = MOST_EXPERT if "moe" in name else MOST_INTERMEDIATE
    if most is None and name.endswith("_token_id"):
        most = vocabulary - 1
    if isinstance(value, list):
        return [shrunk(name, own, names, vocabulary) for own in value] if most is not None else value
    return min(value, most) if most is not None and type(value) is int else value


def shrink_rope(values: Any, ratio: float) -> Any:
    """Return rotary parameters for heads that are `ratio` times as wide: lists with a number for each frequency get
    shorter, and the sections of several positions (MRoPE) get narrower."""
    if not isinstance(values, dict):
        return values
    result = {}
    for name, value in values.items():
        if name == "mrope_section":
            total, first = round(sum(value) * ratio), [int(own * ratio) for own in value[:-1]]
            result[name] = [*first, total - sum(first)]
        elif isinstance(value, list):
            result[name] = value[: round(len(value) * ratio)]
        else:
            result[name] = shrink_rope(value, ratio)
    return result


def shrink_image(vision: PretrainedConfig, factor: int) -> PretrainedConfig:
    """Return a vision tower's configuration with images of few patches. Their number in each direction stays odd or
    even and a multiple of `factor`, and as many pixels are left over."""
    values, size, patch = vision.to_dict(), image_size(vision), patch_size(vision)
    grid = size // patch
    few = 2 * factor if factor > 1 else 3 + (grid % 2 == 0)
    new = min(few, grid) * patch + size % patch
    values["image_size"] = [new, new] if isinstance(values["image_size"], list | tuple) else new
    return type(vision).from_dict(values)


def shrink_layer(cfg: ModelConfig, depth: int, new_depth: int) -> int:
    """Return `model.select_layer` for fewer layers: the last, the one before it, or one of those before them."""
    behind = -cfg.select_layer - 1 if cfg.select_layer < 0 else depth - cfg.select_layer
    behind = min(behind, new_depth - 1)
    return -behind - 1 if cfg.select_layer < 0 else new_depth - behind


def check_same_structure(model: Llava, small: Llava) -> None:
    """Raise ValueError if the small copy has other kinds of parameters than the model, or is not small."""

    def names(own: nn.Module) -> set[str]:
        found = (re.sub(r"\.\d+\.", ".0.", name) for name, _ in own.named_parameters())
        return {name.replace("base_layer.", "") for name in found}

    differing = names(model) ^ names(small)
    if differing:
        raise ValueError(f"it does not agree about {min(differing)}")
    if small.probe.drops_cls != model.probe.drops_cls:
        raise ValueError("its vision tower has another number of tokens beside the patches")
    size = sum(parameter.numel() for parameter in small.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it would have {size:,} parameters")


def random_values(model: Llava, seed: int) -> dict[str, Drawn]:
    """Return random values of all parameters: also norms and biases, that no two parameters may be mistaken for each
    other."""

    def scale(shape: torch.Size) -> float:
        fan_in = math.prod(shape[1:]) if len(shape) > 3 else shape[-1]
        return max(fan_in, 1) ** -0.5 if len(shape) > 1 else 0.5

    lora = model.cfg.lora.scaling if model.adapted else 1.0  # adapters change weights about as much as these are large
    return {
        name: Drawn(
            name, tuple(p.shape), DrawRule(Rule.NORMAL, scale(p.shape) / (lora if name.endswith(LORA_B) else 1)), seed
        )
        for name, p in model.named_parameters()
    }
