"""The properties of parameters from which the bytes that a rank holds are computed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import nn

from llava_fsdp.config import LinearKind, OptimConfig, ParallelConfig, PrecisionConfig
from llava_fsdp.parallel.fsdp.parts import ModelParts
from llava_fsdp.parallel.fsdp.units import block_names, units_of_blocks
from llava_fsdp.parallel.local_shards import clean_name
from llava_fsdp.parallel.memory.memory import OUTPUT, Weight, unit_of_experts
from llava_fsdp.parallel.precision.fp8 import weights_in_fp8
from llava_fsdp.parallel.precision.precision import norm_weights


@runtime_checkable
class Packed(Protocol):
    """Protocol of modules with quantised weights, several of which are packed into each element of `weight`."""

    per_element: int
    """Number of weights in an element."""
    statistics_bytes: int
    """Bytes of the weight's scales and offsets, which every rank holds whole."""


def weights_of(
    model: nn.Module,
    parts: ModelParts,
    precision: PrecisionConfig,
    blocks_per_unit: int = 1,
    parallel: ParallelConfig | None = None,
    optim: OptimConfig | None = None,
) -> dict[str, Weight]:
    """Return, for every parameter of a meta-device model, the properties from which the bytes that a rank holds are
    computed, by parameter name, in the order in which FSDP2 has the parameters of a unit.

    Args:
        parts: the model's lists of blocks, output layer and experts, and modules that stay whole while they are frozen.
        precision: the dtypes of weights, norms and moments.
        blocks_per_unit: number of consecutive blocks that form an FSDP unit.
        parallel: says how many ranks share the experts of a mixture, and compute each layer together; None: one.
        optim: says whether Muon updates matrices, and whether an average of the weights is kept; None: neither.
    """
    parallel = parallel or ParallelConfig()
    of_muon = matrix_names(model, parts) if optim is not None and optim.is_muon else set()
    in_fp8 = weights_in_fp8(parts.stacks[0]) if precision.linear is LinearKind.fp8 else set()
    norms = norm_weights(model, precision)
    kept_whole = norms | {p for module in parts.whole for p in module.parameters()}
    names = block_names(model, parts.stacks)
    unit_names = units_of_blocks(model, parts.stacks, blocks_per_unit)
    units = {p: unit_names[names[block]] for block in names for p in block.parameters()}
    units |= dict.fromkeys(parts.output.parameters() if parts.output is not None else (), OUTPUT)
    own_names = {p: name for name, p in model.named_parameters()}
    weights: dict[str, Weight] = {}
    for p in dict.fromkeys(p for module in in_order_of_fsdp(model) for p in module.parameters(recurse=False)):
        weights[own_names[p]] = Weight(
            tuple(p.shape),
            trainable=p.requires_grad,
            whole=p in kept_whole,
            fp32=p in norms,
            fp8=p in in_fp8,
            unit=units.get(p, ""),
            muon=p.requires_grad and own_names[p] in of_muon,
            average=p.requires_grad and optim is not None and optim.ema is not None,
            moments=precision.moment_dtype if p.requires_grad else None,
        )
    for module_name, module in model.named_modules():
        if parallel.expert > 1 and module in parts.experts:
            block = next(name for block, name in names.items() if module in set(block.modules()))
            for leaf, _ in module.named_parameters():
                name = f"{module_name}.{leaf}"
                shared = {"sharers": parallel.expert, "tensor": parallel.tensor}
                weights[name] = replace(weights[name], unit=unit_of_experts(block), **shared)
        if isinstance(module, Packed):
            name = f"{module_name}.weight"
            size = {"per_element": module.per_element, "statistics": module.statistics_bytes}
            weights[name] = replace(weights[name], **size)
    return weights


def matrix_names(model: nn.Module, parts: ModelParts) -> set[str]:
    """Return the names of the parameters that Muon updates: the weights of linear layers except the output layer, and
    experts, which are stacks of matrices. Embeddings, convolutions, routers of experts with a class of their own, norms
    and biases are left to AdamW.

    Args:
        parts: the model's output layer and its modules with experts.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {p for module in (parts.output, *embeddings) if module is not None for p in module.parameters()}
    names = set()
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            dimensions = 2 * isinstance(module, nn.Linear) or 3 * (module in parts.experts)
            if parameter.ndim == dimensions and parameter not in left_out:
                names.add(clean_name(f"{module_name}.{leaf}"))
    return names


def in_order_of_fsdp(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a module in the order in which FSDP2 collects them: children first, then the module itself
    (`_get_managed_modules` in torch/distributed/fsdp/_fully_shard/_fsdp_init.py)."""
    for child in module.children():
        yield from in_order_of_fsdp(child)
    yield module
