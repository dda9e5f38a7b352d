"""Run a whole vision-language model whose weights are on the meta device, without computing with them.

The classes of such models read values of tensors: sizes of images, masks, places of image tokens. So they do not run on
the meta device alone. None of these values depends on weights, so all of them can be real.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from llava_fsdp.model.packed_attention.dispatch_mode import CompilingMode

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")


class KnownValues(CompilingMode):
    """Dispatch mode in which an operation with a meta tensor only computes shapes, and every other one runs on the CPU.

    What a model makes on the device of its weights is on the CPU too (`make_with_values`), so that positions and masks
    have values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation: on the meta device if one of its tensors is there, else on the CPU. On the meta device, the
        shape of what is indexed or selected is found from the values of indices and masks, if these are on the CPU.
        Raise NotImplementedError if a meta tensor would be written into a CPU tensor."""
        kwargs = dict(kwargs or {})
        if not has_meta(args) and not has_meta(kwargs.values()):
            return make_with_values(func, args, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        if func in INDEXED and args[0].is_meta:
            return func(*on_meta((args[0], indices_of(args[1]), *args[2:])), **kwargs)
        if func is aten.masked_select.default and not args[1].is_meta:
            mask = args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape))
            return args[0].new_empty(int(mask.sum()))
        if func._schema.is_mutable and not args[0].is_meta:
            raise NotImplementedError(f"{func}: what depends on weights is written into a tensor of known values")
        return func(*on_meta(args), **{name: on_meta(value) for name, value in kwargs.items()})


INDEXED = {
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default, aten._unsafe_index_put.default,
}  # fmt: skip
"""Operations whose second argument is a list of indices, with masks among them: then shapes depend on values."""
FILLED = {
    aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default, aten.new_empty.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.empty_like.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_strided.default,
}  # fmt: skip
"""Operations that allocate memory with one value in all places."""


def make_with_values(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation none of whose arguments is a meta tensor, and return a CPU tensor with values.

    A model also asks for results on the device of its weights (`device=META`). They are made on the CPU, except new
    float tensors of FILLED: they stay on the meta device, because the model may later write into them what it computes
    from weights, and a CPU tensor cannot take values that do not exist.
    """
    if kwargs.get("device") != META:
        return func(*args, **kwargs)
    if func in FILLED and (kwargs.get("dtype") or dtype_of(func, args)).is_floating_point:
        return func(*args, **kwargs)
    if func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
        # inputs and weights of a real run are on one device, where `.to(device)` returns the tensor and copies nothing
        return args[0].detach()
    return func(*args, **{**kwargs, "device": CPU})


def dtype_of(func: Callable[..., Any], args: Sequence[Any]) -> torch.dtype:
    """Return the dtype of what one of the operations FILLED makes if it is given no dtype."""
    if func is aten.full.default:
        return torch.tensor(args[1]).dtype
    return args[0].dtype if isinstance(args[0], torch.Tensor) else torch.get_default_dtype()


def indices_of(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace each mask among indices by index tensors, one for each dimension of the mask, of the places where it is
    true. Masks on the meta device stay, as their values are unknown."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8) and not index.is_meta
        found += index.nonzero().unbind(1) if index is not None and is_mask else [index]
    return found


def has_meta(values: Iterable[Any]) -> bool:
    """Return whether there is a meta tensor among values or in lists of them."""
    return any(
        value.is_meta if isinstance(value, torch.Tensor) else isinstance(value, list | tuple) and has_meta(value)
        for value in values
    )


def on_meta(value: Any) -> Any:
    """Replace a CPU tensor, or those in a list, by meta tensors of the same shapes and strides."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.to(META)
    return [on_meta(item) for item in value] if isinstance(value, list | tuple) else value
