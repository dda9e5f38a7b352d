"""Compile the language model's blocks with torch.compile, one block at a time, and count the compilations.

The vision tower is not compiled. It does about a hundredth of the work, and torch would compile it again for batches of
one image, for transformers' hooks on its layers, and for frozen layers among trained ones.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as shapes

from llava_fsdp.config import AUTO, ActivationCheckpointing, Attention, Config
from llava_fsdp.runtime.errors import CompileError, ConfigError
from llava_fsdp.runtime.text.humanize import readable

WARM_UP = 5
"""Number of steps at the start of a process in which compilations are expected and therefore not reported."""
CACHE_ROOM = 32 * 2**20
"""Free bytes that the disk of torch.compile's cache must have."""
CACHE_KEY = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that names the folder of torch.compile's cache."""


@dataclass(frozen=True)
class Compiling:
    """Whether the language model's blocks are compiled, and why."""

    on: bool
    reason: str


def choose_compiling(cfg: Config, device: torch.device, attention: Attention | None) -> Compiling:
    """Decide whether to compile the language model's blocks: as the setting `compile` says or, with `compile=auto`,
    depending on the device and on other settings. `attention`: the kernel for rows in which several samples are packed;
    None if rows are padded instead.

    Raises:
        ConfigError: `compile=true` or `activation_checkpointing=budget` is impossible here or with these settings.
        CompileError: blocks are to be compiled, and torch.compile cannot use the folder of its cache.
    """
    mode = cfg.activation_checkpointing.mode
    chosen = compiling_of_settings(cfg, mode, attention, device.type)
    if mode is ActivationCheckpointing.budget:
        check_compiler(device, "activation_checkpointing=budget")
    elif cfg.compile is True:
        check_compiler(device, "compile=true")
        if not chosen.on:
            raise ConfigError(
                f"compile=true: {chosen.reason}; choose activation_checkpointing=none or full, pack=false, or "
                "compile=auto"
            )
    elif chosen.on:
        lack = compiler_missing(device)
        chosen = Compiling(True, "Triton is here") if lack is None else Compiling(False, lack)
    if chosen.on:
        check_cache()
    return chosen


def compiling_of_settings(
    cfg: Config, mode: ActivationCheckpointing, attention: Attention | None, device: str
) -> Compiling:
    """Decide by the settings alone whether the language model's blocks are compiled, on a machine that has the
    compiler. `mode`: of activation checkpointing; `attention`: the kernel of packed rows, None for padded ones;
    `device`: `cuda` or `cpu`."""
    if mode is ActivationCheckpointing.budget:
        return Compiling(True, "activation_checkpointing=budget is the compiler's choice")
    if cfg.compile is False:
        return Compiling(False, "compile=false")
    why_not: str | None = None
    if cfg.compile == AUTO:
        if cfg.model.balance_loss:
            why_not = "model.balance_loss needs what routers return inside of a block"
        elif cfg.parallel.tensor > 1:
            why_not = "with parallel.tensor it has not been tested"
        elif cfg.parallel.expert > 1:
            why_not = "with parallel.expert the host waits for the number of tokens of each expert"
        elif cfg.parallel.pipeline > 1:
            why_not = "with parallel.pipeline it has not been tested"
        elif device != "cuda":
            why_not = f"on {device} compiling takes longer than it saves"
        elif cfg.deterministic:
            why_not = "the compiler times kernels and takes the fastest, which deterministic=true forbids"
    if why_not is None and splits_blocks(mode, attention):
        why_not = (
            "activation_checkpointing=selective needs a block in one piece, and SDPA a sample at a time cuts it in two"
        )
    return Compiling(why_not is None, why_not or "as configured")


def splits_blocks(mode: ActivationCheckpointing, attention: Attention | None) -> bool:
    """Return whether a compiled block would be split in two by SDPA, which runs one sample at a time outside the graph,
    although its activation checkpointing needs a single graph."""
    return mode is ActivationCheckpointing.selective and attention is Attention.sdpa


def check_compiler(device: torch.device, setting: str) -> None:
    """Raise ConfigError if torch.compile cannot work here. `setting` is what needs it, as `key=value`."""
    lack = compiler_missing(device)
    if lack is not None:
        other = "compile=auto" if setting.startswith("compile") else "activation_checkpointing=selective"
        raise ConfigError(f"{setting} compiles blocks with torch.compile, and {lack}; set {other}")


def compiler_missing(device: torch.device) -> str | None:
    """Return why torch.compile cannot work on this machine with this device, or None if it can."""
    if not torch._dynamo.is_dynamo_supported():
        return "it does not support this Python or platform"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "it needs Triton, which is not installed (pip install triton)"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
            return f"{torch.cuda.get_device_name(device)} is too old for Triton, which needs compute capability 7.0"
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler, which it needs on a CPU (apt-get install g++)"
    return None


def check_cache() -> None:
    """Raise CompileError if torch.compile cannot use the folder of its cache, also with `compile=auto`: if blocks were
    not compiled then, ranks on different machines could decide differently."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cure = f"name another folder with {CACHE_KEY}, or set compile=false"
    try:
        folder = cache_dir()
        disk = os.statvfs(folder)
    except OSError as error:
        raise CompileError(f"torch.compile cannot make the folder of its cache: {error}; {cure}") from error
    free = disk.f_bavail * disk.f_frsize
    if free < CACHE_ROOM:
        problem = f"has {readable(free)} left of {readable(CACHE_ROOM)} needed"
    elif disk.f_flag & getattr(os, "ST_NOEXEC", 0):
        problem = "is mounted noexec, so that no program on it can run"
    else:
        return
    raise CompileError(f"the disk of torch.compile's cache, {folder}, {problem}; {cure}")


@contextmanager
def explained_compiler_errors() -> Iterator[None]:
    """Turn errors of torch.compile itself, and not those of the compiled code, into CompileError."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        inner = getattr(error, "inner_exception", error)
        lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [""]
        reason = next((line for line in lines if "No space left" in line or " error: " in line), lines[0])
        raise CompileError(
            f"torch.compile failed: {type(inner).__name__}: {reason}\nIf the disk of its cache is full, make room, or "
            f"name another folder with {CACHE_KEY}. compile=false trains without it"
        ) from error


class Compilations:
    """Counter of the graphs that torch.compile has compiled in this process.

    After eight compilations of a block, Dynamo runs the block uncompiled and only logs a message. Compilations after
    the warm-up are counted so that this problem is noticed before it happens.
    """

    def __init__(self, compiler: Callable[[torch.fx.GraphModule, list[torch.Tensor]], Any] | None = None) -> None:
        """Begin to count compiled graphs. `compiler` makes a function of a graph and examples of its inputs; None:
        Inductor."""
        self.compiler = compiler
        self.total = 0
        self._steps = 0
        self._expected = 0
        """Number of graphs that were compiled in the first `WARM_UP` steps."""

    def after_step(self) -> int:
        """Return the number of graphs compiled since the first `WARM_UP` steps. To be called once after every step."""
        self._steps += 1
        if self._steps <= WARM_UP:
            self._expected = self.total
        return self.total - self._expected


def compile_blocks(
    stack: nn.ModuleList, budget: float | None = None, count: Compilations | None = None, one_row: bool = False
) -> None:
    """Replace `forward` of every block of a language model, in place, by a function that compiles it at its first call.

    Only `forward` is compiled and not `__call__`, so that the hooks which `fully_shard` adds later are not compiled.
    All blocks of one class share the compiled code, in which the lengths of rows are symbolic. torch would compile
    again for a dimension of size 1. Therefore rows of one token run uncompiled, and so do batches of one row, unless
    every batch has one row.

    Args:
        budget: share of a block's activations that is kept (torch's `activation_memory_budget`); None: torch's default.
        one_row: whether every batch has exactly one row.
    """
    backend = inductor_with(budget, count or Compilations())
    by_class: dict[type, Callable[..., Any]] = {}
    settings = CompilerSettings()
    for block in stack:
        forward = type(block).forward
        compiled = by_class.setdefault(
            type(block), torch.compile(with_own_code(forward), backend=backend, dynamic=True)
        )
        block.forward = partial(run_block, block, block.forward, compiled, settings, one_row)


def run_block(
    block: nn.Module,
    uncompiled: Callable[..., Any],
    compiled: Callable[..., Any],
    settings: AbstractContextManager[Any],
    one_row: bool,
    hidden: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block's forward: compiled if gradients are enabled and the shape of its input is not rare, else uncompiled.
    Dynamo compiles a block at most eight times, and neither validation nor a rare shape must use up these compilations:
    torch compiles again for a dimension of size 1. An input is rare if its rows have one token, or if it has one row,
    unless every batch has one row.

    Args:
        uncompiled: the block's own forward.
        compiled: the compiled forward of the block's class, which also takes the block.
        settings: context manager under which the compiled forward runs.
        one_row: whether every batch has exactly one row.
        hidden: the block's input, [rows, length, channels].
    """
    is_rare = hidden.ndim == 3 and (hidden.shape[1] == 1 or (hidden.shape[0] == 1) is not one_row)
    if is_rare or not torch.is_grad_enabled():
        return uncompiled(hidden, *args, **kwargs)
    if hidden._is_view():  # only the first block's input is a view, for which torch would compile again
        hidden = torch.ops.aten._unsafe_view(hidden, hidden.shape)
    with settings:
        return compiled(block, hidden, *args, **kwargs)


class CompilerSettings:
    """Context manager with torch's settings under which blocks are compiled. One object is entered for every block,
    because making it takes twice as long as entering it."""

    def __init__(self) -> None:
        """Prepare two settings of torch's compiler, which hold while a compiled block runs."""
        # Without duck shapes, torch does not assume that two lengths which are equal at the compilation stay equal.
        self.lengths_apart = shapes.patch(use_duck_shape=False)  # pyright: ignore[reportAttributeAccessIssue]
        # Numbers such as the epsilon of a norm are constants. By default torch takes them for variables, and then
        # compiles everything a second time with constants.
        self.constants = torch._dynamo.config.patch(specialize_float=True)  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> None:
        self.lengths_apart.__enter__()
        self.constants.__enter__()

    def __exit__(self, *error: object) -> None:
        self.constants.__exit__(*error)
        self.lengths_apart.__exit__(*error)


def with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a block's unbound `forward` in a function with a code object of its own, by which torch stores compiled
    graphs. transformers wraps the forwards of all models by the same function, so that they would share one."""

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(block, *args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def inductor_with(budget: float | None, count: Compilations) -> Callable[..., Any]:
    """Return a torch.compile backend that counts the graphs, and compiles them with Inductor. `budget`: share of a
    block's activations that is kept; None: torch's default."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._functorch import config as functorch
        from torch._inductor.compile_fx import compile_fx

        count.total += 1
        settings = {} if budget is None else {"activation_memory_budget": budget}
        with functorch.patch(settings):
            return (count.compiler or compile_fx)(graph, inputs)

    return compile_graph
