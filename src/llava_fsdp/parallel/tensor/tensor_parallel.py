"""Tensor parallelism: several ranks compute each layer together, each with a part of its weights (arXiv 1909.08053).

The weights are DTensors, to which `fully_shard` adds its dimension. Layers compute with plain tensors: this rank's part
of a weight, its own heads, or all channels of its own positions. torch's styles (`ColwiseParallel`, `RowwiseParallel`)
compute with DTensors, which plan every operation anew for each length of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from llava_fsdp.parallel.tensor.tensor_cut import Cut

BY_OUTPUTS = (Cut.COLWISE, Cut.COLWISE_GATHERED)
BY_INPUTS = (Cut.ROWWISE, Cut.ROWWISE_SPLIT)


def cut_model(
    model: nn.Module, plan: Mapping[str, Cut], mesh: DeviceMesh, chains: Sequence[Sequence[nn.Module]]
) -> None:
    """Divide the weights of a meta-device model among the ranks of a one-dimensional mesh, in place, as `plan` says.
    Also register hooks that divide the positions of hidden states between the layers of blocks. `requires_grad` of the
    parameters must be set before, because the divided parameters copy it. Tied parameters stay tied.

    Args:
        plan: full name of a module or parameter -> how it is divided.
        chains: the language model's blocks that this rank has, in lists of consecutive ones.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name, cut in plan.items():
        if cut is Cut.PARAMETER:  # a single parameter, of which each rank has some rows
            parent, _, leaf = name.rpartition(".")
            divide(model.get_submodule(parent), {leaf: Shard(0)}, mesh)
            continue
        module = model.get_submodule(name)
        if cut in BY_OUTPUTS:  # each rank computes some outputs; COLWISE_GATHERED: they are gathered
            cut_by_outputs(module, mesh, is_gathered=cut is Cut.COLWISE_GATHERED, sums_gradient="lora_" in name)
        elif cut in BY_INPUTS:  # outputs are summed; ROWWISE_SPLIT: every rank has all inputs, and takes some
            cut_by_inputs(module, mesh, takes_whole=cut is Cut.ROWWISE_SPLIT)
        elif cut is Cut.SUMMED:  # every rank has the whole weights, and computes a part of their gradient
            divide(module, {leaf: Replicate() for leaf, _ in module.named_parameters(recurse=False)}, mesh)
        elif cut is Cut.EMBEDDING:
            cut_embedding(module, mesh)
        else:
            assert cut is Cut.OUTPUT, cut
            cut_output(module, mesh)
    for first, *others in names.values():  # tie parameters again that had several names
        for other in others:
            parent, _, leaf = other.rpartition(".")
            model.get_submodule(parent).register_parameter(leaf, model.get_parameter(first))
    # `siblings_of`: the linear layers with the same input, such as query, key and value
    divide_positions(Positions(mesh), chains, siblings_of(model, plan))


def siblings_of(model: nn.Module, plan: Mapping[str, Cut]) -> dict[nn.Module, list[nn.Module]]:
    """Return {module: those of its linear layers that are divided by outputs}, such as attention's query, key and value
    layers. Adapters' layers are left out: each sums the gradient of its input over the ranks by itself."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for name, cut in plan.items():
        if cut in BY_OUTPUTS and "lora_" not in name:
            parent = name.removesuffix(".base_layer").rpartition(".")[0]
            found.setdefault(model.get_submodule(parent), []).append(model.get_submodule(name))
    return found


def awaited(output: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that computes `output`, if there is one, and return `output`.

    torch keeps a collective's result until it is waited for, usually by the first operation that reads it. The second
    forward pass of activation checkpointing may end before such an operation, for example behind a layer with an
    adapter, and the result would be kept until the run ends.
    """
    if isinstance(output, _functional_collectives.AsyncCollectiveTensor):
        output.trigger_wait()
    return output


class Positions:
    """Divides the positions of hidden states among the ranks, wherever a block computes position by position: norms and
    residuals (sequence parallelism, arXiv 2205.05198). Attention and the MLP get all positions.

    Ranks have ceil(length / ranks) positions each; the last ones may have fewer, or none. `own` stands for this rank's
    positions, [rows, own positions, channels], and `whole` for all, [rows, positions, channels].
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.length = 0
        """Number of positions of the rows that the current block processes."""

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's positions of hidden states that are the same on all ranks: [rows, positions, channels] ->
        [rows, own positions, channels]. The gradients of the ranks' positions are gathered."""
        found = DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)
        return found.redistribute(placements=[Shard(1)]).to_local()

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return all positions, whose gradient must be the same on all ranks."""
        return self.gathered(own)[0]

    def summed(self, whole: torch.Tensor) -> torch.Tensor:
        """Return `whole` for layers that are divided by outputs: the ranks' gradients are parts, which are summed."""
        return with_summed_gradient(whole, self.mesh)

    def gathered(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the hidden states of all positions, [rows, own positions, channels] -> [rows, positions, channels],
        and return them twice. The first tensor is for code that every rank runs alike: its gradient is taken as equal
        on all ranks. The second is for layers divided by outputs: the gradients of the ranks are summed."""
        # `self.length`: number of positions of all ranks, of the rows that the current block processes
        shape = torch.Size((part.shape[0], self.length, part.shape[2]))
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(part, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
        whole = parts.redistribute(placements=[Replicate()])
        return awaited(whole.to_local()), awaited(whole.to_local(grad_placements=[Partial()]))

    def note_length(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")  # None in models that give their blocks rotary embeddings alone
        self.length = kwargs["position_embeddings"][0].shape[-2] if positions is None else positions.shape[-1]

    def take_own(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_hidden(args, kwargs, self.own(hidden_of(args, kwargs)))

    def give_whole(self, block: nn.Module, args: object, output: Any) -> Any:
        own, others = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        whole = self.whole(own).clone()  # FSDP warns of modules that return a view
        return whole if others is None else (whole, *others)


def divide_positions(
    positions: Positions, chains: Sequence[Sequence[nn.Module]], parents: Mapping[nn.Module, Sequence[nn.Module]]
) -> None:
    """Register hooks by which a rank has only its own positions of the hidden states between the layers of a block. The
    positions are divided before the first of consecutive blocks, gathered for each module that needs all of them
    (attention, MLP), and gathered behind the last block.

    Args:
        chains: the language model's blocks, in lists of consecutive ones.
        parents: module that needs all positions -> its layers that read its input.
    """
    for blocks in chains:
        for block in blocks:
            block.register_forward_pre_hook(positions.note_length, with_kwargs=True)
        blocks[0].register_forward_pre_hook(positions.take_own, with_kwargs=True)
        blocks[-1].register_forward_hook(positions.give_whole)
    for parent, layers in parents.items():
        gathered = GatheredInput(positions)
        parent.register_forward_pre_hook(gathered.before, with_kwargs=True)
        parent.register_forward_hook(gathered.after, always_call=True)
        for layer in layers:
            # gives the layer the gathered input whose gradient is summed over the ranks
            layer.register_forward_pre_hook(gathered.read, prepend=True)


class GatheredInput:
    """Forward hooks of a module that needs all positions, and of its layers that read its input. Each of these layers
    computes a part of the input's gradient; the parts are added before they are summed over the ranks, so that there is
    one collective and not one for each layer."""

    def __init__(self, positions: Positions):
        self.positions = positions
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None
        """The module's input, as `Positions.gathered` returns it; None outside the module's forward pass."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.given = self.positions.gathered(hidden_of(args, kwargs))
        return with_hidden(args, kwargs, self.given[0])

    def read(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.given is not None and args[0] is self.given[0]:
            return (self.given[1], *args[1:])
        return (self.positions.summed(args[0]), *args[1:])

    def after(self, module: nn.Module, args: object, output: object) -> None:
        self.given = None


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states among the arguments of a block or of one of its modules."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def place(module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh) -> None:
    """Replace parameters of a module by DTensors. `placements`: {parameter's name: its placement on the mesh}."""
    for name, placement in placements.items():
        parameter = getattr(module, name)
        # src_data_rank=None: nothing is sent, each rank takes its part of its own tensor
        whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def divide(module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh) -> None:
    """Replace parameters of a module by DTensors with the given placements, by name, and let its forward pass see this
    rank's part of each as a plain tensor. Gradients of parameters that each rank has whole are summed up."""
    place(module, placements, mesh)

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


def with_summed_gradient(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return what is the same on all ranks of a mesh, with the sum of the ranks' gradients as its gradient."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def cut_by_outputs(module: nn.Module, mesh: DeviceMesh, is_gathered: bool, sums_gradient: bool) -> None:
    """Divide the outputs of a linear layer among ranks, which have the same input, and gather them if `is_gathered`.
    `sums_gradient`: whether to sum the gradient of the input, of which each rank computes a part. Adapters need this;
    for other layers, `GatheredInput` sums it once for all layers of a module."""
    assert isinstance(module, nn.Linear)
    divide(module, {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}, mesh)
    if sums_gradient:
        module.register_forward_pre_hook(lambda _, args: (with_summed_gradient(args[0], mesh), *args[1:]))
    if is_gathered:
        gather_outputs(module, mesh)


def gather_outputs(module: nn.Linear, mesh: DeviceMesh) -> None:
    """Register a hook that gathers all outputs of a layer whose outputs are divided. If the layer returns a scalar, as
    the output layer does when it computes the loss, nothing is gathered."""
    outputs = module.out_features

    def after(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        """Gather the outputs of all ranks, unless the output is a scalar."""
        if not output.ndim:
            return output
        shape = torch.Size((*output.shape[:-1], outputs))
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(output, mesh, [Shard(output.ndim - 1)], run_check=False, shape=shape, stride=stride)
        return parts.full_tensor()

    module.register_forward_hook(after)


def cut_by_inputs(module: nn.Module, mesh: DeviceMesh, takes_whole: bool) -> None:
    """Divide the inputs (channels) of a linear layer among ranks. Its outputs, [rows, positions, channels], are summed
    over the ranks; each rank gets the sums at its own positions, and adds the bias to them. `takes_whole`: every rank
    has all inputs of the layer, and takes its own of them; otherwise a rank's input has only its own channels."""
    assert isinstance(module, nn.Linear)
    divide(module, {"weight": Shard(1)}, mesh)
    has_bias = module.bias is not None
    if has_bias:
        place(module, {"bias": Replicate()}, mesh)

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Hide the bias, and take this rank's channels of the input if every rank has all of them."""
        module.__dict__["bias"] = None  # hides the parameter, which would be added once by every rank
        if not takes_whole:
            return args
        whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(args[0].ndim - 1)]).to_local(), *args[1:])

    def add(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        """Sum the outputs over the ranks, keep this rank's positions, and add the bias to them."""
        assert output.ndim == 3, "the second dimension is divided, which must be the positions"
        parts = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        reduced = awaited(parts.redistribute(placements=[Shard(1)]).to_local())
        if not has_bias:
            return reduced
        bias = module._parameters["bias"]
        assert isinstance(bias, DTensor)
        return reduced + bias.to_local(grad_placements=[Partial()])

    def after(module: nn.Module, args: object, output: object) -> None:
        module.__dict__.pop("bias", None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(add)
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
        embedded = output.masked_fill(~here.pop()[..., None], 0)
        return DTensor.from_local(embedded, mesh, [Partial()], run_check=False).full_tensor()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def cut_output(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the rows of the output layer among ranks. Logits are gathered on every rank. If the layer computes the
    loss and returns this scalar, nothing is gathered."""
    assert isinstance(module, nn.Linear) and module.bias is None
    divide(module, {"weight": Shard(0)}, mesh)
    gather_outputs(module, mesh)


def own_rows(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the range [begin, end) of the rows of a divided weight that this rank has."""
    each = -(-rows // mesh.size())
    index = mesh.get_local_rank()
    return min(rows, each * index), min(rows, each * (index + 1))


def reduction(mesh: DeviceMesh, operation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-reduce without gradients, `sum` or `max`. It holds only a name, so that the group can be freed."""
    name = mesh.get_group().group_name

    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        return _functional_collectives.wait_tensor(_functional_collectives.all_reduce(tensor, operation, name))

    return reduced
