"""A training of a whole model as a plain loop over transformers' own class: one sample at a time, in one process."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from harness import single_world
from reference import bitsandbytes_values
from steps import begin, run_steps
from whole_models import IGNORE, Example, WholeModel, example_of, peer_loss

from llava_fsdp.config import Config
from llava_fsdp.model.weights.quantization import quantized_weights
from llava_fsdp.parallel.local_shards import clean_name, whole
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.main import settle_auto
from llava_fsdp.train.state import TrainState

BASE_LAYER = ".base_layer"
NOTHING = 1e-6
"""A parameter whose gradients are smaller than this part of the largest gradient of the model has none: adding one
number to every key changes no attention weight, and Adam makes full steps of the rounding errors."""


def begun(world: World, cfg: Config) -> TrainState:
    """A run before its first step, whose rows are packed if the model allows it."""
    return begin(world, settle_auto(cfg, world))


@dataclass(frozen=True)
class OwnRun:
    """A run in one process: with what it began, and what it came to."""

    first: dict[str, torch.Tensor]
    """The parameters that train, as they begin, by the names of the class and of peft's adapters in it."""
    quantized: tuple[str, ...]
    """The names of the quantized layers, as the class has them."""
    samples: list[list[int]]
    """The numbers of each step's records."""
    losses: list[float]
    weights: dict[str, torch.Tensor]
    """The parameters that train, at the end."""


def weights_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {clean_name(name): whole(parameter).clone() for name, parameter in state.masters.named.items()}


def run_alone(cfg: Config) -> OwnRun:
    state = begun(single_world(), cfg)
    first, steps, count = weights_of(state), state.loader.steps, state.loader.total_steps
    packed = [
        clean_name(name).removesuffix(".weight").replace(BASE_LAYER, "") for name in quantized_weights(state.model)
    ]
    samples = [[int(number) for number in steps.sampler.samples(step)] for step in range(count)]
    losses = [result.loss for result in run_steps(state, cfg)]
    return OwnRun(first, tuple(packed), samples, losses, weights_of(state))


@dataclass(frozen=True)
class PlainRun:
    """What a plain loop came to."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Those that train, by name."""
    without_gradient: frozenset[str]
    """The names of those whose exact gradient is 0."""
    peer: Any
    """transformers' model with the trained weights."""


def plain_run(model: WholeModel, cfg: Config, start: OwnRun, records: str) -> PlainRun:
    """Train transformers' class with AdamW at a constant learning rate. From llava_fsdp come only the choice of samples
    and the names of what trains, with the adapters' first values."""
    peer = model.peer()
    with torch.no_grad():
        for name in start.quantized:
            weight = peer.get_parameter(f"{name}.weight")
            weight.copy_(bitsandbytes_values(weight, cfg.model.quantize))
    if cfg.model.lora.enabled:
        put_adapters(peer, cfg, start.first)
    named = dict(peer.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(name in start.first)
    trained = {name: named[name] for name in start.first}
    optim = cfg.optim
    optimizer = torch.optim.AdamW(trained.values(), optim.lr, (optim.beta1, optim.beta2), optim.eps, weight_decay=0.0)
    examples = [example_of(model, record) for record in model.records(records)]
    losses, largest = [], dict.fromkeys(trained, 0.0)
    for samples in start.samples:
        optimizer.zero_grad()
        losses.append(add_gradients(peer, [examples[number] for number in samples]))
        for name, parameter in trained.items():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            largest[name] = max(largest[name], float(parameter.grad.abs().max()))
        optimizer.step()
    floor = NOTHING * max(largest.values())
    nothing = frozenset(name for name, own in largest.items() if own < floor)
    after = {name: parameter.detach() for name, parameter in trained.items()}
    return PlainRun(losses, after, nothing, peer)


def add_gradients(peer: Any, examples: list[Example]) -> float:
    """Add the gradients of a step, and return its loss: the mean over the labels of all its samples."""
    count = sum(int((example.labels[1:] != IGNORE).sum()) for example in examples)
    total = 0.0
    for example in examples:
        loss = peer_loss(peer, example) / count
        loss.backward()
        total += loss.item()
    return total


def put_adapters(peer: Any, cfg: Config, values: Mapping[str, torch.Tensor]) -> None:
    """Put peft's adapters with given values into transformers' model."""
    from peft import LoraConfig, inject_adapter_in_model

    lora = cfg.model.lora
    modules = sorted({name.rpartition(".lora_A")[0] for name in values if ".lora_A" in name})
    assert modules and not lora.dropout
    settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=modules)
    # in transformers' own classes, peft would give adapters to the experts of some mixtures too
    inject_adapter_in_model(settings, torch.nn.ModuleDict(dict(peer.named_children())))
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if ".lora_" in name:
                parameter.copy_(values[name])


def difference(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], without: Collection[str]
) -> float:
    """The norm of the difference over the norm, over all parameters but those in `difference`."""
    assert found.keys() == wanted.keys()
    names = wanted.keys() - without
    squares = [((found[name] - wanted[name]).square().sum(), wanted[name].square().sum()) for name in names]
    return math.sqrt(sum(float(d) for d, _ in squares) / sum(float(n) for _, n in squares))
