"""Find the parts of any of transformers' vision-language models by their structure: language model, vision towers,
projector. No name of a kind of model is needed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from llava_fsdp.config import Part
from llava_fsdp.model.blocks import find_stacks
from llava_fsdp.runtime.errors import ModelError

BASE = "model"
"""Name of the model without output layer in most of transformers' classes."""
DEPTHS = ("num_hidden_layers", "depth")
"""Keys under which the configurations of vision towers have their number of blocks."""


@dataclass(frozen=True)
class DividedClass:
    """One of transformers' classes, divided into an output layer and what makes the hidden states for it."""

    whole: PreTrainedModel
    """The class."""
    module: PreTrainedModel
    """Makes the hidden states. It is the model in the class; or, if the output layer is inside of the language model
    (as in Llama 4), the class itself with an identity as output layer, so that its logits are the hidden states."""
    prefix: str
    """What the names of the module's parameters begin with in the class: `model.`, or nothing."""
    output: str
    """Name of the output layer in the class, such as `lm_head`."""


@dataclass(frozen=True)
class Structure:
    """The names of a model's parts, as in its class."""

    output: str
    """Name of the output layer."""
    language: str
    """Name of the language model, without its output layer."""
    towers: tuple[str, ...]
    """Names of the vision towers; they may contain parts of the projector."""
    projectors: tuple[str, ...]
    """Names of those modules and parameters in the vision towers that belong to the projector. What is in no tower and
    not in the language model belongs to the projector too."""
    stacks: tuple[str, ...]
    """For each vision tower that has blocks, the name of its list of blocks."""

    def part_of(self, name: str) -> Part:
        """Return the part to which a parameter or module belongs, by its name. The projector is what belongs neither to
        the language model nor to a vision tower, and some modules in vision towers (`projectors`)."""
        if is_inside(name, (self.language, self.output)):
            return Part.language
        if is_inside(name, self.towers) and not is_inside(name, self.projectors):
            return Part.vision
        return Part.projector


def is_inside(name: str, outer: tuple[str, ...]) -> bool:
    """Return whether the parameter or module `name` is one of the modules `outer`, or inside of one; all by name."""
    return any(name == one or name.startswith(f"{one}.") for one in outer)


def find_structure(divided: DividedClass) -> Structure:
    """Find the names of the parts of a model: output layer, language model, vision towers with their lists of blocks,
    and projectors. `divided`: the class, and in it the module that makes the hidden states (`module`, whose names begin
    with `prefix`). Raises ModelError if it has no language model, or if that has no list of blocks."""
    base = divided.module
    language = language_of(base)
    names = {module: name for name, module in base.named_modules()}
    language_prefix = f"{names[language]}."
    depth = getattr(language.config, "num_hidden_layers", None)
    if not any(len(stack) == depth for stack in lists_in(language)):
        raise ModelError(f"the language model of a {type(base).__name__} has no list of its {depth} blocks")
    towers = {name: tower for name, tower in towers_of(base) if not f"{name}.".startswith(language_prefix)}
    # For each vision tower: its list of blocks, and its modules after the blocks that make features as wide as the
    # embeddings of the language model. These modules belong to the projector.
    stacks, projectors = [], []
    for tower_name, tower in towers.items():
        found = find_stacks(tower)
        if not found:
            continue
        blocks = blocks_of_tower(found, tower.config)
        stacks.append(f"{tower_name}.{blocks}")
        width = language.config.hidden_size
        projectors += [f"{tower_name}.{child}" for child in behind_blocks(tower, blocks, width)]

    def in_class(found: Any) -> tuple[str, ...]:
        return tuple(divided.prefix + name for name in found)

    own_name = divided.prefix + names[language]
    return Structure(divided.output, own_name, in_class(towers), in_class(projectors), in_class(stacks))


def base_of(whole: PreTrainedModel) -> DividedClass:
    """Divide a model of transformers into its output layer and the module that makes the hidden states for it. This is
    the model in the attribute BASE; if the class has none without the output layer, it is the whole model, in which an
    identity replaces the output layer, in place. Raises ModelError if the class has no output layer."""
    output = whole.get_output_embeddings()
    name = next((name for name, module in whole.named_modules() if module is output), None)
    if output is None or name is None:
        raise ModelError(f"a {type(whole).__name__} has no output layer, and is not supported")
    inner: Any = getattr(whole, BASE, None)
    if isinstance(inner, PreTrainedModel) and output not in set(inner.modules()):
        return DividedClass(whole, inner, f"{BASE}.", name)
    whole.set_submodule(name, nn.Identity())
    return DividedClass(whole, whole, "", name)


class Named(nn.Module):
    """Holds modules under the names that they have in a class of transformers."""


def name_modules(whole: nn.Module, output: str, layer: nn.Module, into: nn.Module) -> None:
    """Put the modules of transformers' model `whole` into the module `into`, under their names in the model's class,
    with `layer` in place of the output layer `output` (a name such as `lm_head` or `language_model.lm_head`)."""
    # only the submodules on the path to the output layer are not taken as they are
    first, _, rest = output.partition(".")
    for name, child in whole.named_children():
        if name != first:
            into.add_module(name, child)
    if not rest:
        into.add_module(first, layer)
        return
    inner = Named()
    name_modules(whole.get_submodule(first), rest, layer, inner)
    into.add_module(first, inner)


def replace_modules(whole: nn.Module, named: nn.Module) -> None:
    """Replace modules of the model `whole`, of a class of transformers, in place: each module of `named`, which
    `name_modules` has filled, takes the place of the one with the same name. Other modules of `whole` stay."""
    for name, child in named.named_children():
        if isinstance(child, Named):
            replace_modules(whole.get_submodule(name), child)
        else:
            whole.set_submodule(name, child)


def language_of(base: PreTrainedModel) -> PreTrainedModel:
    """Return the language model in a model without output layer. Raises ModelError if it has none in it, or is one."""
    language = decoder_of(base)
    if language is base or not isinstance(language, PreTrainedModel) or language not in set(base.modules()):
        raise ModelError(f"a {type(base).__name__} has no language model in it that could be told from its other parts")
    return language


def decoder_of(base: PreTrainedModel) -> nn.Module:
    """Return what transformers calls the decoder of a model, without an output layer of its own."""
    decoder: Any = base.get_decoder()
    return decoder.get_submodule(BASE) if decoder.get_output_embeddings() is not None else decoder


def other_inputs(language: nn.Module) -> list[str]:
    """Return a language model's inputs that a Llama lacks, such as image features between blocks (DeepStack)."""
    known = inspect.signature(transformers.LlamaModel.forward).parameters
    return [name for name in inspect.signature(language.forward).parameters if name not in known]


def lists_in(module: nn.Module) -> Iterator[nn.ModuleList]:
    return (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))


def towers_of(base: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield (name, module) of the topmost models in a model that have one of its vision configurations."""
    configs = tuple({type(config) for name, config in inner_configs(base.config) if "vision" in name})
    found: list[str] = []
    for name, module in base.named_modules():
        is_tower = module is not base and isinstance(module, PreTrainedModel) and isinstance(module.config, configs)
        if is_tower and not is_inside(name, tuple(found)):
            found.append(name)
            yield name, module


def inner_configs(config: Any) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield the configurations of a model's parts, with their keys."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield name, value


def blocks_of_tower(stacks: Mapping[str, nn.ModuleList], config: PretrainedConfig) -> str:
    """Return the name of a vision tower's list of blocks: the first one that is as long as its configuration says, or
    else the first one."""
    depths = {getattr(config, key, None) for key in DEPTHS}
    return next((name for name, stack in stacks.items() if len(stack) in depths), next(iter(stacks)))


def behind_blocks(tower: nn.Module, blocks: str, width: int) -> list[str]:
    """Return the names of a vision tower's modules that belong to the projector: those behind its list of blocks (named
    `blocks`) that have a matrix whose outputs are as wide as the language model's embeddings (`width`), as `merger` of
    Qwen's models."""
    top = blocks.partition(".")[0]
    children: Mapping[str, nn.Module] = dict(tower.named_children())
    order = list(children)
    return [
        name
        for name in order[order.index(top) + 1 :]
        if any(p.ndim > 1 and p.shape[0] == width for p in children[name].parameters())
    ]
