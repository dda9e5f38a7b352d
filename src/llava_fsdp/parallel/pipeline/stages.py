"""Divide a model into stages, one after the other, for pipeline parallelism.

A stage is the whole model in which modules of other stages are replaced by `Passed`, so that parameters keep their
names. The first stage has the vision tower, the projector and the token embeddings; the last one has the final norm and
the output layer; each has some of the blocks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from llava_fsdp.config import ActivationCheckpointing, Config
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.flops import Flops, count_flops, matrix_weights
from llava_fsdp.model.packed_attention.row_mask import attention_arguments
from llava_fsdp.runtime.errors import ConfigError

M = TypeVar("M", bound=nn.Module)


class Passed(nn.Module):
    """Takes the place of a module that another stage runs; returns its first argument."""

    def __init__(self, replaced: nn.Module, calls: list[str] | None = None, name: str = ""):
        """Create the replacement of a module that another stage runs; it returns its first argument. At each call
        `name` is added to the list `calls`, if that is given."""
        super().__init__()
        self.calls, self.name = calls, name
        if hasattr(replaced, "attention_type"):  # some models read it from their blocks
            self.attention_type = replaced.attention_type

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.calls is not None:
            self.calls.append(self.name)
        return hidden


@dataclass(frozen=True)
class StagePlan:
    """Which blocks of the language model each stage has."""

    blocks: tuple[range, ...]
    costs: tuple[float, ...]
    """Estimated cost of each stage, in any unit."""

    def __str__(self) -> str:
        """Text for the log, such as `blocks 0 to 15 (98%), 16 to 31 (102%) of the mean cost`."""
        total, count = sum(self.costs), len(self.costs)
        shares = (
            f"{part.start} to {part.stop - 1} ({cost * count / total:.0%})"
            for part, cost in zip(self.blocks, self.costs, strict=True)
        )
        return f"blocks {', '.join(shares)} of the mean cost"


def plan_stages(model: Architecture, flops: Flops, counts: Sequence[float], stages: int, tensor: int = 1) -> StagePlan:
    """Divide the blocks of a model, which is on the meta device, among stages of about equal cost. The cost of the
    vision tower is added to the first stage, and that of the loss to the last.

    Args:
        flops: FLOPs of the model for each token, pair of tokens, label and tile.
        counts: number of tokens, pairs of tokens that attend, labels and tiles of typical samples.
        tensor: number of ranks that compute each layer of the language model together; each computes the whole tower.

    Raises:
        ConfigError: the model has fewer blocks than stages, or cannot be divided.
    """
    check_can_be_divided(model, stages)
    blocks = find_blocks(model.language)
    active = getattr(model.language.config, "num_experts_per_tok", None)
    weights = [matrix_weights(block, active=active) for block in blocks]
    tokens, pairs, labels, tiles = counts
    of_block = [
        flops.token * tokens * weight / max(1, sum(weights)) + flops.pair * pairs / len(blocks) for weight in weights
    ]
    # each of the `tensor` ranks computes 1 / tensor of a block's FLOPs, and all FLOPs of the vision tower
    tower, loss = flops.vision * tiles * tensor, flops.label * labels
    parts = divide(of_block, tower, loss, stages)
    costs = [sum(of_block[number] for number in part) for part in parts]
    costs[0] += tower
    costs[-1] += loss
    return StagePlan(tuple(parts), tuple(costs))


def divide(costs: Sequence[float], first: float, last: float, parts: int) -> list[range]:
    """Divide items with these costs into consecutive parts, none of which is empty. The largest cost of a part is as
    small as possible and, among such divisions, the sum of the squared costs. `first` and `last` are added to the cost
    of the first and of the last part. Return the range of items of each part."""
    count, sums = len(costs), [0.0, *itertools.accumulate(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}  # end -> (largest cost, squares, borders)
    for part in range(parts):
        extra = first * (part == 0) + last * (part == parts - 1)
        found: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(part + 1, count + 1 - (parts - 1 - part)):
            candidates = []
            for begin, (largest, squares, borders) in best.items():
                if begin < end:
                    cost = sums[end] - sums[begin] + extra
                    candidates.append((max(largest, cost), squares + cost**2, [*borders, end]))
            found[end] = min(candidates)
        best = found
    return [range(begin, end) for begin, end in itertools.pairwise(best[count][2])]


def check_can_be_divided(model: Architecture, stages: int) -> None:
    """Raise ConfigError if a model, which is on the meta device, has fewer blocks than `stages`, or if its stages would
    not compute what the model computes.

    The language model runs without its blocks and without other modules that have weights, which are found by trying:
    what is left must return its input unchanged, and must call the blocks in order and then the other modules.
    """
    if model.is_tied:
        raise ConfigError(
            "parallel.pipeline divides the model between its embeddings and its output layer, which share their "
            "weights in this model (tie_word_embeddings in its config.json); set parallel.pipeline=1"
        )
    calls: list[str] = []
    names = children_of(model.language)
    kind = model.language.config.model_type
    refusal = ConfigError(
        f"parallel.pipeline: a language model of type {kind} cannot be divided into stages, because it does more than "
        "to run its blocks and then a norm; set parallel.pipeline=1"
    )
    if names is None:
        raise refusal
    skeleton, stack = twin_of(model.language), find_blocks(model.language)
    if len(stack) < stages:
        raise ConfigError(
            f"parallel.pipeline: the language model has {len(stack)} blocks, which cannot be divided among {stages} "
            "stages; set parallel.pipeline (times 2 with parallel.schedule=interleaved) to at most that number"
        )
    expected = [str(number) for number in range(len(stack))]
    passed = (Passed(block, calls, number) for number, block in zip(expected, stack, strict=True))
    setattr(skeleton, names.blocks, nn.ModuleList(passed))
    setattr(skeleton, names.embeddings, None)
    for name in names.others:
        setattr(skeleton, name, Passed(skeleton.get_submodule(name), calls, name))
    if next(skeleton.parameters(), None) is not None:
        raise refusal
    hidden = torch.linspace(-1, 1, 3 * model.language_config.hidden_size).view(1, 3, -1)
    arguments = attention_arguments(hidden, None, model.attention)
    # the memo makes the copies write into the same list `calls`
    on_cpu: nn.Module = copy.deepcopy(skeleton, {id(calls): calls}).to_empty(device="cpu")
    try:
        with torch.no_grad():
            output = on_cpu(inputs_embeds=hidden, **arguments).last_hidden_state
    except Exception as error:  # whatever a model does with a block that is not one of its own
        raise refusal from error
    in_order = calls[: len(stack)] == expected and sorted(calls[len(stack) :]) == sorted(names.others)
    if not in_order or not torch.equal(output, hidden):
        raise refusal


@dataclass(frozen=True)
class Children:
    """Names of the children of a language model."""

    blocks: str
    embeddings: str
    others: tuple[str, ...]
    """Other children with weights, such as the final norm."""


def children_of(language: nn.Module) -> Children | None:
    """Return the names under which one of transformers' language models holds its blocks, its embeddings and its other
    modules with weights; None if the blocks or the embeddings are inside another module."""
    stack, embeddings = find_blocks(language), embeddings_of(language)
    found = {child: name for name, child in language.named_children()}
    if stack not in found or embeddings not in found:
        return None
    others = [
        name
        for child, name in found.items()
        if child not in (stack, embeddings) and any(True for _ in child.parameters())
    ]
    return Children(found[stack], found[embeddings], tuple(others))


def twin_of(module: M) -> M:
    """Return a copy of a module that has the same children and parameters, but its own lists of children and hooks."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, dict) and name not in ("_parameters", "_buffers"):
            twin.__dict__[name] = copy.copy(value)
    return twin


def embeddings_of(language: nn.Module) -> nn.Module:
    """Return the module with the token embeddings of one of transformers' language models."""
    assert isinstance(language, PreTrainedModel)
    return language.get_input_embeddings()


def stage_of(model: Architecture, children: Children, blocks: range, is_first: bool, is_last: bool) -> Architecture:
    """Return one stage of a model. It shares the modules that it has with the model.

    Args:
        children: names of the children of the whole language model.
        blocks: numbers of the language model's blocks that the stage has.
        is_first: whether the stage has the vision tower, the projector and the embeddings.
        is_last: whether the stage has the final norm and the output layer.
    """
    stage = twin_of(model)  # shares all modules and parameters, in lists of its own
    stage.is_first, stage.is_last = is_first, is_last
    stage.replace_language(twin_of(model.language))
    setattr(stage.language, children.blocks, nn.ModuleList(find_blocks(model.language)))
    if not is_first:
        # the model itself may own parameters of the first stage; None hides them
        vars(stage)["_parameters"] = dict.fromkeys(model._parameters)
    remove_others(stage, children, set(blocks), is_first, is_last)
    return stage


def remove_others(model: Architecture, children: Children, blocks: set[int], has_first: bool, has_last: bool) -> None:
    """Remove from a model, in place, the modules that a rank or a stage does not have.

    Args:
        children: names of the children of the whole language model.
        blocks: numbers of the language model's blocks that it has.
        has_first: whether it has the vision tower, the projector and the embeddings.
        has_last: whether it has the final norm and the output layer.
    """
    language, stack = model.language, model.language.get_submodule(children.blocks)
    assert isinstance(stack, nn.ModuleList)
    for number, block in enumerate(stack):
        if number not in blocks and not isinstance(block, Passed):
            stack[number] = Passed(block)  # returns its first argument
    if not has_first:
        language._modules[children.embeddings] = None
        model.remove_inputs()
    if not has_last:
        model.remove_output()
        for name in children.others:
            setattr(language, name, Passed(language.get_submodule(name)))


def chains_of_blocks(model: Architecture) -> list[list[nn.Module]]:
    """Return the language model's blocks that this rank has, in lists of those that follow one another in the whole
    model. A rank has several such lists if it has several stages."""
    chains: list[list[nn.Module]] = [[]]
    for block in find_blocks(model.language):
        if isinstance(block, Passed):  # stands for a block that another stage runs
            chains.append([])
        else:
            chains[-1].append(block)
    return [chain for chain in chains if chain]


def plan_of_stages(cfg: Config, model: Architecture, counts: Sequence[float]) -> StagePlan:
    """Divide the blocks of a model, which is on the meta device, as the configuration says. `counts`: mean number of
    tokens, pairs of tokens that attend, labels and tiles of a sample."""
    recomputes = cfg.activation_checkpointing.mode is not ActivationCheckpointing.none
    return plan_stages(model, count_flops(model, recomputes), counts, cfg.parallel.num_stages, cfg.parallel.tensor)
