"""Blocks of layers compiled by torch.compile, one at a time, and how often that happened.

Those of the language model: a vision tower is a hundredth of the work, and its batches of one picture, transformers'
hooks on its layers and layers that are frozen beside others that train would each be compiled anew.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as shapes

from llava_fsdp.config import AUTO, ActivationCheckpointing, Attention, Config
from llava_fsdp.runtime.errors import ConfigError

WARM_UP = 5
"""Steps of a process in which what it needs is compiled."""


@dataclass(frozen=True)
class Compiling:
    """Whether blocks are compiled, and why."""

    on: bool
    reason: str


def choose_compiling(cfg: Config, device: torch.device, attention: Attention | None) -> Compiling:
    """What `compile=` asks for, or what this machine is best at.

    Args:
        attention: of packed rows; None: rows are padded.

    Raises:
        ConfigError: it is asked for, and cannot be had here.
    """
    mode = cfg.activation_checkpointing.mode
    if mode is ActivationCheckpointing.budget:
        check_compiler(device, "activation_checkpointing=budget")
        return Compiling(True, "activation_checkpointing=budget is the compiler's choice")
    if cfg.compile is False:
        return Compiling(False, "as asked for")
    cut = is_cut(mode, attention)
    why_cut = (
        "activation_checkpointing=selective needs a block in one piece, and SDPA a sample at a time cuts it in two"
    )
    if cfg.compile is True:
        check_compiler(device, "compile=true")
        if cut:
            raise ConfigError(
                f"compile=true: {why_cut}; choose activation_checkpointing=none or full, pack=false, or compile=auto"
            )
        return Compiling(True, "as asked for")
    assert cfg.compile == AUTO
    if device.type != "cuda":
        return Compiling(False, f"on {device.type} compiling takes longer than it saves")
    lack = compiler_missing(device)
    if lack is not None:
        return Compiling(False, lack)
    if cfg.deterministic:
        return Compiling(False, "the compiler times kernels and takes the fastest, which deterministic=true forbids")
    return Compiling(False, why_cut) if cut else Compiling(True, "Triton is here")


def is_cut(mode: ActivationCheckpointing, attention: Attention | None) -> bool:
    """Whether a block that has to be compiled in one piece cannot be: SDPA runs a sample at a time."""
    return mode is ActivationCheckpointing.selective and attention is Attention.sdpa


def check_compiler(device: torch.device, asked: str) -> None:
    """Raises ConfigError, naming what was asked for, where torch.compile cannot work."""
    lack = compiler_missing(device)
    if lack is not None:
        other = "compile=auto" if asked.startswith("compile") else "activation_checkpointing=selective"
        raise ConfigError(f"{asked} compiles blocks with torch.compile, and {lack}; set {other}")


def compiler_missing(device: torch.device) -> str | None:
    """Why torch.compile cannot work here; None where it can."""
    if not torch._dynamo.is_dynamo_supported():
        return "this Python or platform has none"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed, which it writes kernels with (pip install triton)"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
            return f"{torch.cuda.get_device_name(device)} is too old for Triton, which needs compute capability 7.0"
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler, which it builds kernels for a CPU with (apt-get install g++)"
    return None


def is_of_compiler(error: BaseException) -> bool:
    """Whether it was torch.compile that failed, and not what it has compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


class Compilations:
    """Graphs that were compiled in this process, counted where they are: in torch.compile's backend.

    Dynamo gives up on a block that it has compiled eight times, and runs it as it is, with a line in its log; what is
    counted behind the warm-up tells of it long before.
    """

    def __init__(self) -> None:
        self.total = 0
        self._steps = 0
        self._expected = 0

    def after_step(self) -> int:
        """Call it once a step; how many graphs have been compiled since the warm-up."""
        self._steps += 1
        if self._steps <= WARM_UP:
            self._expected = self.total
        return self.total - self._expected


def compile_blocks(
    stack: nn.ModuleList, budget: float | None = None, count: Compilations | None = None, one_row: bool = False
) -> None:
    """Compile every block's forward in place, when it first runs.

    Only `forward` is compiled, not the call: hooks on a block, as `fully_shard` adds them afterwards, stay outside.
    Lengths of rows are variables of the compiled code, which all blocks of a kind share. Sizes of 1 are not: torch
    compiles anew for them. So a row of one position runs as it is, and so does a batch of one where it has more.

    Args:
        budget: the share of a block's activations that is kept (`torch._functorch.config.activation_memory_budget`);
            None leaves the choice to torch.
        count: is told of every graph.
        one_row: batches have one row always; else it is the rare one that does.
    """
    backend = inductor_with(budget, count or Compilations())
    each: dict[type, Callable[..., Any]] = {}
    # two lengths that are alike when a block is compiled need not be so later
    lengths_apart = shapes.patch(use_duck_shape=False)  # pyright: ignore[reportAttributeAccessIssue]
    for block in stack:
        forward = type(block).forward
        compiled = each.setdefault(type(block), torch.compile(own_code(forward), backend=backend, dynamic=True))
        block.forward = partial(run_block, block, block.forward, compiled, lengths_apart, one_row)


def run_block(
    block: nn.Module,
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    lengths_apart: Any,
    one_row: bool,
    hidden: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A block's forward. Without gradients it is not compiled: what a validation runs must not make the training's
    graphs be compiled anew, of which torch keeps eight.

    Args:
        plain: it, uncompiled.
        hidden: [rows, length, channels]
    """
    is_rare = hidden.ndim == 3 and (hidden.shape[1] == 1 or (hidden.shape[0] == 1) is not one_row)
    if is_rare or not torch.is_grad_enabled():
        return plain(hidden, *args, **kwargs)
    if hidden._is_view():  # the first block's: it would be compiled anew for what it is a view of
        hidden = torch.ops.aten._unsafe_view(hidden, hidden.shape)
    with lengths_apart:
        return compiled(block, hidden, *args, **kwargs)


def own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `forward`, with a code object of its own.

    torch keeps what it has compiled with the code, and transformers has one wrapper around the layers of all models.
    """

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(block, *args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def inductor_with(budget: float | None, count: Compilations) -> Callable[..., Any]:
    """torch.compile's usual backend, whose settings hold while it compiles and not a moment longer."""

    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._functorch import config as functorch
        from torch._inductor.compile_fx import compile_fx

        count.total += 1
        settings = {} if budget is None else {"activation_memory_budget": budget}
        with functorch.patch(settings):
            return compile_fx(graph, inputs)

    return compiled
