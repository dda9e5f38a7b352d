"""A run's state and steps without the command around them: what one rank builds, trains and ends with."""

import hashlib
from collections.abc import Callable

import torch
from loaders import agreed_steps

from llava_fsdp.config import Config
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.checkpoints.checkpoint_contents import tensors
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.state import StepResult, TrainState

Trace = tuple[list[float], list[float], dict[str, torch.Tensor]]
"""Losses, gradient norms, and this rank's masters at the end."""


class Calls(RunEvents):
    """Calls a function after each step, and another one before it."""

    def __init__(self, after: Callable[[StepResult], object], before: Callable[[], object] = lambda: None):
        self.after, self.before = after, before

    def after_step(self, result: StepResult) -> None:
        self.after(result)

    def before_step(self) -> None:
        self.before()


def begin(world: World, cfg: Config) -> TrainState:
    """A run before its first step."""
    state = build_state(cfg, Parallelism.of(cfg, world))
    state.model.train()
    return state


def run_steps(state: TrainState, cfg: Config) -> list[StepResult]:
    """All steps that are left."""
    return [train_step(state, step, cfg, 0.0) for step in agreed_steps(state.loader, state.step)]


def held_masters(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: local(parameter).clone() for name, parameter in state.masters.named.items()}


def traces(world: World, configs: list[Config]) -> list[Trace]:
    """The trace of each configuration's run."""
    torch._inductor.config.compile_threads = 1  # a pool of a process that was forked from waits for nobody here
    found = []
    for cfg in configs:
        state = begin(world, cfg)
        results = run_steps(state, cfg)
        found.append(([r.loss for r in results], [r.grad_norm for r in results], held_masters(state)))
    return found


def digest_of_state(state: TrainState) -> str:
    """Of this rank's masters and moments."""
    digest = hashlib.sha256()
    for name, value in tensors(state).items():
        digest.update(name.encode() + local(value).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
