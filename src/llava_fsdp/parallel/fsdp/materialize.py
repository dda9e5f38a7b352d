"""Allocate the tensors of a model that was built on the meta device."""

from collections.abc import Callable, Sequence

from torch import nn

from llava_fsdp.config import LinearKind, PrecisionConfig
from llava_fsdp.parallel.local_shards import clean_name
from llava_fsdp.parallel.precision.precision import MASTERS, MasterWeights


def materialize(model: nn.Module, allocate: Callable[[nn.Module], object], roots: Sequence[nn.Module] = ()) -> None:
    """Allocate the tensors of a meta-device model in place with the function `allocate`, and then tie the parameters
    again that were tied on the meta device: a tied parameter has several names. `roots` are the parts of the model that
    are called in its place, if it is divided among ranks."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for root in roots or [model]:
        allocate(root)
    for first, *others in names.values():
        for other in others:
            module_name, _, leaf = other.rpartition(".")
            model.get_submodule(module_name).register_parameter(leaf, model.get_parameter(first))


def masters_of(model: nn.Module, blocks: nn.ModuleList, cfg: PrecisionConfig, compiled: bool) -> MasterWeights:
    """Return the master weights of a model by parameter name: the tensors to load, to optimize and to save.

    Args:
        blocks: the language model's blocks, whose layers may multiply in fp8.
        compiled: whether torch.compile makes the kernels that add gradients and that cast weights to fp8.
    """
    trainable = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    has_scales = cfg.linear is LinearKind.fp8 and any(p.requires_grad for p in blocks.parameters())
    return MasterWeights(trainable, MASTERS[cfg.master_dtype], blocks, has_scales, compiled)
