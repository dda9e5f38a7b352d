"""Plan which weights of a language model tensor parallelism divides among ranks, and how, from what transformers says
about the model (`base_model_tp_plan` of its configuration).

Outputs of the first linear layers of attention and of an MLP are divided, so that a rank computes some of the heads and
of the intermediate channels; the last linear layer sums. Between them (residuals, norms) a rank computes its own
positions of each row, and so it does in the layers of a mixture of experts (router, experts), each of which computes
token by token. The other parts (vision tower, projector, last norm) are computed by every rank.

In this module, `size` is the number of ranks that compute a layer together. A plan has a style for each module or
parameter that is divided, by its full name.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.model.adapters.lora_names import ADAPTER
from llava_fsdp.model.adapters.sample_dropout import SampleDropout
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.experts import find_experts
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.runtime.errors import ConfigError

KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Last parts of the names of the layers that compute the keys."""
DIVIDED = (Cut.COLWISE, Cut.ROWWISE)
"""Styles that divide what is between two layers of a module."""


def tensor_plan(model: Architecture, size: int) -> dict[str, Cut]:
    """Return how the weights of a model are divided among `size` ranks: {full name of a module or of a single
    parameter: how it is divided}. The model is on the meta device, and has its adapters.

    Raises:
        ConfigError: transformers has no plan for the language model; the plan has a style that is not supported, or
            does not mention a weight; or a size cannot be divided by `size`.
    """
    language, prefix = model.language, f"{model.language_name}."
    refuse_dropout(model.language_config, size)
    mixtures = mixtures_of(language, size)
    modules = {name: module for name, module in language.named_modules() if not is_inside(name, mixtures)}
    parameters = {name: weight for name, weight in language.named_parameters() if not is_inside(name, mixtures)}
    found = {prefix + name: cut for mixture in mixtures for name, cut in in_mixture(language, mixture, size).items()}
    for name, style in styles_of(model.language_config, modules, parameters, size).items():
        if name in parameters:
            found[prefix + name] = Cut.PARAMETER
        elif style is not Cut.OWNER:  # parameters of an OWNER are divided one by one, under their own names
            check_sizes(name, modules[name], style, size)
            found |= {prefix + layer: cut for layer, cut in with_adapter(name, modules[name], style).items()}
    refuse_forgotten(language, prefix, found, size)
    # weights, such as those of norms, that a rank has whole but uses for its own positions alone
    found |= between_layers(language, prefix, found, size, mixtures)
    embedding = language.get_input_embeddings()
    check_vocabulary(model.language_config.vocab_size, size)
    names = {module: name for name, module in modules.items()}
    return found | {prefix + names[embedding]: Cut.EMBEDDING, model.output_name: Cut.OUTPUT}


def mixtures_of(language: nn.Module, size: int) -> list[str]:
    """Return the names of the modules that each hold the router and the experts of a layer (a mixture of experts).

    Raises:
        ConfigError: such a module is a whole block of the language model: the block's attention would not be divided.
    """
    found = list(dict.fromkeys(owner(name) for name in find_experts(language)))
    blocks = set(find_blocks(language))
    for name in found:
        if language.get_submodule(name) in blocks:
            raise ConfigError(
                f"parallel.tensor={size}: the experts of {type(language).__name__} belong to {name}, which also has "
                "attention; this is not supported, set parallel.tensor=1"
            )
    return found


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether the module or parameter `name` is inside one of `modules`, which are given by name."""
    return any(name.startswith(f"{module}.") for module in modules)


def in_mixture(language: nn.Module, name: str, size: int) -> dict[str, Cut]:
    """Return how the weights of the module `name`, which holds the router and the experts of a layer, are divided. All
    but the experts are SUMMED: whole on every rank, which computes a part of the gradient. The experts are left out,
    because `parallel.expert` divides them instead.

    Raises:
        ConfigError: an adapter in the module has dropout: its masks would be for other positions than the rank has.
    """
    experts = set(find_experts(language).values())
    found = {}
    for inner_name, module in language.get_submodule(name).named_modules(prefix=name):
        if isinstance(module, SampleDropout):
            raise ConfigError(
                f"parallel.tensor={size} with model.lora.dropout is not supported for adapters beside experts "
                f"({inner_name}); set model.lora.dropout=0, or parallel.tensor=1"
            )
        if module not in experts and list(module.parameters(recurse=False)):
            found[inner_name] = Cut.SUMMED
    return found


def styles_of(
    config: PretrainedConfig, modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], size: int
) -> dict[str, Cut]:
    """Return how transformers' plan (`base_model_tp_plan`) divides the modules and parameters of a language model, by
    name. Those that it does not mention are left out.

    Raises:
        ConfigError: there is no plan, it has an unknown style, or the heads of attention cannot be divided.
    """
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"parallel.tensor={size}: transformers has no plan (base_model_tp_plan) for dividing a "
            f"{config.model_type}; set parallel.tensor=1"
        )
    # style in transformers' plan -> how weights are divided; the three others are this package's own
    known = {cut.value: cut for cut in Cut if cut not in (Cut.PARAMETER, Cut.EMBEDDING, Cut.OUTPUT)}
    found: dict[str, Cut] = {}
    for name in (*modules, *parameters):
        style = plan.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))  # whole numbers between points, not those of `fc1`
        if style is None:
            continue
        if style not in known:
            raise ConfigError(
                f"parallel.tensor={size}: transformers' plan for a {config.model_type} divides {name} by the style "
                f"{style}, which is not supported; set parallel.tensor=1"
            )
        found[name] = known[style]
    # a layer that computes keys is divided by outputs, which are heads
    if any(cut is Cut.COLWISE and name.endswith(KEYS) for name, cut in found.items()):
        check_heads(config, size)
    return found


def refuse_dropout(config: PretrainedConfig, size: int) -> None:
    """Raise ConfigError if blocks change hidden states at random between layers, or before a router: there each rank
    has its own positions, and would draw other numbers for them than a single rank."""
    for key in ("residual_dropout", "resid_pdrop", "hidden_dropout", "router_jitter_noise", "input_jitter_noise"):
        if value := getattr(config, key, None):
            raise ConfigError(
                f"parallel.tensor={size}: {key}={value} of the language model is not supported, because each rank has "
                f"some of the positions; set {key} to 0 in its config.json, or parallel.tensor=1"
            )


def check_heads(config: PretrainedConfig, size: int) -> None:
    """Raise ConfigError if the heads of attention, or of its keys and values, cannot be divided by `size` ranks."""
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None) or config.num_attention_heads
        if any(number % size for number in (heads if isinstance(heads, list) else [heads])):
            raise ConfigError(
                f"parallel.tensor={size} gives each rank some of the heads, and does not divide {key}={heads} of the "
                "language model; choose a divisor of it"
            )


def check_sizes(name: str, module: nn.Module, style: Cut, size: int) -> None:
    """Raise ConfigError if a module is not of a kind that its style divides, or if the outputs (COLWISE) or inputs
    (ROWWISE) of a linear layer, which stay divided between layers, cannot be divided evenly."""
    if style is Cut.SUMMED:  # whole on every rank
        return
    linear = getattr(module, "base_layer", module)  # of a layer with a LoRA adapter
    if not isinstance(linear, nn.Linear):
        raise ConfigError(
            f"parallel.tensor={size}: {name} is a {type(linear).__name__}, and only linear layers are divided "
            f"({style.value}); set parallel.tensor=1"
        )
    width = {Cut.COLWISE: linear.out_features, Cut.ROWWISE: linear.in_features}.get(style, 0)
    if width % size:
        raise ConfigError(
            f"parallel.tensor={size} does not divide the {width} channels of {name}; choose a divisor of them"
        )


def check_vocabulary(vocabulary: int, size: int) -> None:
    """Raise ConfigError if a rank would have no token of the vocabulary."""
    if math.ceil(vocabulary / size) * (size - 1) >= vocabulary:
        raise ConfigError(f"parallel.tensor={size} is too large for a vocabulary of {vocabulary} tokens")


def with_adapter(name: str, module: nn.Module, style: Cut) -> dict[str, Cut]:
    """Return how a module and its LoRA adapter are divided, by name. The adapter's matrix on the divided side of the
    layer (`lora_B` for outputs, `lora_A` for inputs) is divided like the layer. The other one is whole on every rank.
    If the layer is divided by inputs (ROWWISE), its outputs are summed, and each rank gets those at its own positions:
    then the gradient of `lora_B` is summed over the ranks (SUMMED)."""
    if not hasattr(module, "base_layer"):
        return {name: style}
    found = {f"{name}.base_layer": style}
    if style is Cut.COLWISE:  # with COLWISE_GATHERED the outputs are whole, and so is the adapter
        found[f"{name}.lora_B.{ADAPTER}"] = style
    if style in (Cut.ROWWISE, Cut.ROWWISE_SPLIT):
        found |= {f"{name}.lora_A.{ADAPTER}": style, f"{name}.lora_B.{ADAPTER}": Cut.SUMMED}
    return found


def between_layers(
    language: nn.Module, prefix: str, plan: Mapping[str, Cut], size: int, mixtures: Sequence[str]
) -> dict[str, Cut]:
    """Return the weights of blocks that are used outside of attention, the MLP and the `mixtures`, such as those of
    norms. All are SUMMED: every rank has the whole weight, and computes the part of its gradient for its own positions.

    Args:
        prefix: beginning of the names of the language model's weights in `plan`.
        plan: how layers are divided, by which attention and the MLP are recognized.
        mixtures: names, within the language model, of the modules with a router and experts.

    Raises:
        ConfigError: one of the weights is a matrix: its module may need all positions.
    """
    parents = {  # the names of attention and the MLP, whose layers are divided by outputs
        owner(name.removesuffix(".base_layer"))
        for name, cut in plan.items()
        if cut in (Cut.COLWISE, Cut.COLWISE_GATHERED) and "lora_" not in name
    }
    blocks = set(find_blocks(language))
    found = {}
    for block_name, block in language.named_modules():
        for name, module in block.named_modules(prefix=prefix + block_name) if block in blocks else ():
            weights = list(module.parameters(recurse=False))
            if not weights or is_inside(f"{name}.", [*parents, *(prefix + mixture for mixture in mixtures)]):
                continue
            if any(weight.dim() > 1 for weight in weights):
                raise ConfigError(
                    f"parallel.tensor={size}: {name} has a matrix that transformers' plan does not mention. It would "
                    "get a part of each row's tokens, and it may mix tokens; set parallel.tensor=1"
                )
            found[name] = Cut.SUMMED
    return found


def refuse_forgotten(language: nn.Module, prefix: str, plan: Mapping[str, Cut], size: int) -> None:
    """Raise ConfigError if the plan divides some layers of a module, but does not mention another weight of it: each
    rank would compute only a part of that weight's gradient. `prefix`: that of the language model's names in `plan`."""
    # modules with layers of the styles COLWISE and ROWWISE, between which what is computed is divided among the ranks
    parents = {
        owner(name.removesuffix(".base_layer")) for name, cut in plan.items() if cut in DIVIDED and "lora_" not in name
    }
    for name, _ in language.named_parameters():
        full = prefix + name
        if any(full.startswith(f"{parent}.") for parent in parents) and "lora_" not in name:
            if not {full, owner(full)} & plan.keys():
                raise ConfigError(
                    f"parallel.tensor={size}: transformers' plan does not say how {full} is divided, and its "
                    "neighbours are; set parallel.tensor=1"
                )


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def divide_dropout(model: nn.Module, plan: Mapping[str, Cut], size: int, index: int) -> None:
    """Set, in the dropout of adapters whose inputs are divided (ROWWISE), which channels rank `index` of `size` has, so
    that the masks are the same as without a division."""
    for name, cut in plan.items():
        if cut is Cut.ROWWISE and name.endswith(f".lora_A.{ADAPTER}"):
            layer = model.get_submodule(name.removesuffix(f".lora_A.{ADAPTER}"))
            dropout = getattr(layer, "lora_dropout")[ADAPTER]  # noqa: B009  not in nn.Module's annotations
            if isinstance(dropout, SampleDropout):
                dropout.first_channel = getattr(layer, "in_features") // size * index  # noqa: B009
