"""Tensor parallelism: several ranks compute each layer together, each with a part of its weights (arXiv 1909.08053).

The weights are DTensors of torch's own styles (`parallelize_module`), to which `fully_shard` adds its dimension. What
the layers between them see are plain tensors: a rank's own heads, or all channels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from llava_fsdp.runtime.tensor_cut import Cut

LINEAR: dict[Cut, Callable[[], ParallelStyle]] = {
    Cut.COLWISE: ColwiseParallel,
    Cut.COLWISE_GATHERED: lambda: ColwiseParallel(output_layouts=Replicate()),
    Cut.ROWWISE: RowwiseParallel,
    Cut.ROWWISE_SPLIT: lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""torch's styles of linear layers."""


def cut_model(model: nn.Module, plan: Mapping[str, Cut], mesh: DeviceMesh) -> None:
    """Divide the weights of a meta-device model among the ranks of a mesh, in place. Tied parameters stay tied.

    Args:
        model: the model, with `requires_grad` set.
        plan: style by the full name of a module or parameter.
        mesh: mesh with one dimension, the ranks that compute each layer together.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name, cut in plan.items():
        if cut is Cut.PARAMETER:
            parent, _, leaf = name.rpartition(".")
            divide(model.get_submodule(parent), {leaf: Shard(0)}, mesh)
            continue
        module = model.get_submodule(name)
        if cut in LINEAR:
            parallelize_module(module, mesh, LINEAR[cut](), src_data_rank=None)
            module.register_forward_hook(wait_for_output)
        elif cut is Cut.SUMMED:
            divide(module, {leaf: Replicate() for leaf, _ in module.named_parameters()}, mesh)
        elif cut is Cut.EMBEDDING:
            cut_embedding(module, mesh)
        else:
            assert cut is Cut.OUTPUT, cut
            cut_output(module, mesh)
    for first, *others in names.values():
        for other in others:
            parent, _, leaf = other.rpartition(".")
            model.get_submodule(parent).register_parameter(leaf, model.get_parameter(first))
    for siblings in siblings_of(model, plan):
        shared = SharedInput(lambda own: DTensor.from_local(own, mesh, [Replicate()], run_check=False), len(siblings))
        for module in siblings:
            module.register_forward_pre_hook(shared, prepend=True)


def siblings_of(model: nn.Module, plan: Mapping[str, Cut]) -> list[list[nn.Module]]:
    """Return the linear layers that are divided by outputs, in lists of those that belong to one module, such as the
    layers of queries, keys and values."""
    found: dict[str, list[nn.Module]] = {}
    for name, cut in plan.items():
        if cut in (Cut.COLWISE, Cut.COLWISE_GATHERED) and "lora_" not in name:
            parent = name.removesuffix(".base_layer").rpartition(".")[0]
            found.setdefault(parent, []).append(model.get_submodule(name))
    return list(found.values())


def wait_for_output(module: nn.Module, args: object, output: torch.Tensor) -> None:
    """Forward hook that waits for a collective whose result a layer returns.

    Without it, the first operation that reads the result would wait. Activation checkpointing may end its second
    forward pass before such an operation, behind a layer with an adapter. torch would then keep the result until the
    run ends.
    """
    if isinstance(output, _functional_collectives.AsyncCollectiveTensor):
        output.trigger_wait()


class SharedInput:
    """Forward pre-hook of the linear layers of a module that read the same tensor, such as those of queries, keys and
    values. The gradients that they compute for this tensor are parts; they are added before they are summed over the
    ranks, so that there is one collective and not one for each layer."""

    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor], layers: int):
        """Create the hook of all layers of one module.

        Args:
            share: returns the tensor that all layers read; its gradient is summed over ranks.
            layers: number of the layers.
        """
        self.share = share
        self.layers = layers
        self.left = 0
        self.given: torch.Tensor | None = None
        self.shared: torch.Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.given is not args[0] or self.shared is None:
            self.given, self.left, self.shared = args[0], self.layers, self.share(args[0])
        shared = self.shared
        self.left -= 1
        if not self.left:  # keeps no activation alive
            self.given = self.shared = None
        return (shared, *args[1:])


def divide(module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh) -> None:
    """Make some parameters of a module DTensors with the given placements, by name. In its forward pass, the module
    sees this rank's part of each as a plain tensor. The gradient of a parameter that every rank has whole is a sum over
    the ranks."""
    for name, placement in placements.items():
        parameter = getattr(module, name)
        whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))

    def before(module: nn.Module, args: object) -> None:
        for name, placement in placements.items():
            gradient = Partial() if placement.is_replicate() else placement
            # an attribute hides the parameter of the same name; the parameter stays registered
            module.__dict__[name] = module._parameters[name].to_local(grad_placements=[gradient])  # type: ignore[union-attr]

    def after(module: nn.Module, args: object, output: object) -> None:
        for name in placements:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def cut_embedding(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the rows of an embedding among ranks. A rank looks up the tokens that it has; the other rows are zeros,
    and the ranks' results are summed."""
    assert isinstance(module, nn.Embedding)
    begin, end = own_rows(module.num_embeddings, mesh)
    divide(module, {"weight": Shard(0)}, mesh)
    if module.padding_idx is not None:  # the row that gets no gradient
        module.padding_idx = module.padding_idx - begin if begin <= module.padding_idx < end else None  # type: ignore[assignment]
    here: list[torch.Tensor] = []

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (ids,) = args
        here[:] = [(ids >= begin) & (ids < end)]
        return ((ids - begin).clamp(0, end - begin - 1),)

    def after(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        own = output.masked_fill(~here.pop()[..., None], 0)
        return DTensor.from_local(own, mesh, [Partial()], run_check=False).full_tensor()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def cut_output(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the rows of the output layer among ranks. Called as a module, the layer returns all logits on every rank;
    the loss reads this rank's rows of its weight (`local_weight`)."""
    assert isinstance(module, nn.Linear) and module.bias is None
    vocabulary = module.out_features
    divide(module, {"weight": Shard(0)}, mesh)

    def after(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((*output.shape[:-1], vocabulary))
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(output, mesh, [Shard(output.ndim - 1)], run_check=False, shape=shape, stride=stride)
        return parts.full_tensor()

    module.register_forward_hook(after)


def local_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a divided weight, through which gradients flow."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def own_rows(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the range [begin, end) of the rows of a divided weight that this rank has."""
    each = -(-rows // mesh.size())
    index = mesh.get_local_rank()
    return min(rows, each * index), min(rows, each * (index + 1))


def reduction(mesh: DeviceMesh, operation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-reduce without gradients over the ranks of a mesh, `sum` or `max`. It holds only the group's name,
    so that it does not keep the group alive."""
    name = mesh.get_group().group_name

    def reduced(own: torch.Tensor) -> torch.Tensor:
        return _functional_collectives.wait_tensor(_functional_collectives.all_reduce(own, operation, name))

    return reduced
