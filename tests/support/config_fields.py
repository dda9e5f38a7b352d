"""Other legal values of every field of a model's configuration, found from transformers' configuration class."""

import types
import typing
from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

IDENTITY = {"model_type", "transformers_version"}
"""Fields that say what the file is."""
ACTIVATIONS = ("relu", "silu", "gelu", "quick_gelu")
KINDS_OF_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "conv", "linear_attention")
ROPE_VALUES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0}, "proportional": {}, "dynamic": {"factor": 2.0, "original_max_position_embeddings": 8},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


def other_values(config: PretrainedConfig) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each field of a configuration and the values to try in its place. Of a number the first legal
    one is enough; a choice is tried with all its values (`tries_all`)."""
    hints = {name: hint for kind in reversed(type(config).__mro__) for name, hint in own_hints(kind).items()}
    for name, value in config.to_dict().items():
        if name in IDENTITY:
            continue
        if name == "rope_parameters":
            yield from other_ropes(config)
            continue
        found = others_of(name, value, hints.get(name))
        if found:
            yield name, found


def tries_all(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def others_of(name: str, value: Any, hint: Any) -> list[Any]:
    choices = [choice for choice in literals(hint) if choice != value]
    if choices:
        return choices
    kinds = named_types(hint) if value is None else {type(value)}
    if bool in kinds:
        return [not value]
    if isinstance(value, str) or (value is None and str in kinds):
        return [own for own in ACTIVATIONS if own != value and own in ACT2FN] if "act" in name else []
    if isinstance(value, list):
        return other_lists(value)
    if float in kinds:  # a field that says int | float too
        return [1.5 * value, value / 2, value + 0.25] if value else [0.3, 3.0]
    if int in kinds:
        return [2 * value, value + 1, value // 2, value - 1, 0, 1, 3, 4] if value else [3, 1, 2, 4, 9]
    return []


def other_lists(value: list[Any]) -> list[list[Any]]:
    """Return lists like `value`: the other kinds of layers, its reverse, and its items changed one by one."""
    found: list[list[Any]] = []
    if all(isinstance(item, str) for item in value):
        found += [[kind] * len(value) for kind in KINDS_OF_LAYERS]
        found += [[*value[:-1], kind] for kind in KINDS_OF_LAYERS]
    elif all(type(item) in (int, float) for item in value):
        found += [[2 * item for item in value], [item + 1 for item in value], [1 - item for item in value], []]
    found.append(value[::-1])
    return [own for own in found if own != value]


def literals(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [choice for own in typing.get_args(hint) for choice in literals(own)]


def named_types(hint: Any) -> set[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {kind for own in typing.get_args(hint) for kind in named_types(own)}
    return {hint}


def other_ropes(config: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield every form of rotary embeddings that transformers knows, and other numbers of the present form."""
    given = config.rope_parameters
    if not given:
        return
    nested = {key: own for key, own in given.items() if isinstance(own, dict)} or {"": given}
    for key, own in nested.items():

        def whole(new: dict[str, Any], key: str = key) -> dict[str, Any]:
            return {**given, key: new} if key else new

        where = f"rope_parameters{f'.{key}' if key else ''}"
        yield f"{where}.rope_theta", [whole({**own, "rope_theta": 37.0})]
        share = own.get("partial_rotary_factor", 1.0)
        yield f"{where}.partial_rotary_factor", [whole({**own, "partial_rotary_factor": share / 2})]
        for form in ROPE_INIT_FUNCTIONS:
            values = {**own, **ROPE_VALUES.get(form, {}), "rope_type": form}
            if form == "longrope":
                head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                half = int(head * share) // 2
                values |= {"short_factor": [1.1] * half, "long_factor": [3.1] * half}
            if form != own.get("rope_type", "default"):
                yield f"{where}.rope_type={form}", [whole(values)]


def with_value(kind: str, values: dict[str, Any], field: str, value: Any) -> PretrainedConfig:
    """Return the configuration of a kind of model with another value of a field. Raises any error if transformers
    refuses it."""
    return AutoConfig.for_model(kind, **{**values, field.partition(".")[0]: value})


def own_hints(kind: type) -> dict[str, Any]:
    return {name: hint for name, hint in vars(kind).get("__annotations__", {}).items() if not isinstance(hint, str)}
