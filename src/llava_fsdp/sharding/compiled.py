"""Blocks of layers compiled by torch.compile, one at a time, and how much of them is kept for the backward pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llava_fsdp.errors import ConfigError


def check_compiler(device: torch.device, asked: str) -> None:
    """Raises ConfigError, naming what was asked for, where torch.compile cannot work."""
    lack = compiler_missing(device)
    if lack is not None:
        raise ConfigError(f"{asked} compiles blocks with torch.compile, and {lack}; set recompute=selective")


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


def compile_blocks(stacks: list[nn.ModuleList], budget: float | None) -> None:
    """Compile every block's forward in place, when it first runs.

    Only `forward` is compiled, not the call: hooks on a block, as `fully_shard` adds them afterwards, stay outside.
    Lengths of rows are variables of the compiled code, which all blocks of a kind share.

    Args:
        budget: the share of a block's activations that is kept (`torch._functorch.config.activation_memory_budget`);
            None leaves the choice to torch.
    """
    compiled = inductor_with(budget)
    for stack in stacks:
        for block in stack:
            block.forward = torch.compile(block.forward, backend=compiled, dynamic=True)


def inductor_with(budget: float | None) -> Callable[..., Any]:
    """torch.compile's usual backend, whose settings hold while it compiles and not a moment longer."""

    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._functorch import config as functorch
        from torch._inductor.compile_fx import compile_fx

        settings = {} if budget is None else {"activation_memory_budget": budget}
        with functorch.patch(settings):
            return compile_fx(graph, inputs)

    return compiled
