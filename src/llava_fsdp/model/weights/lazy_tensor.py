"""Tensors whose values are not in memory. Operations on them are recorded, and any part of a result can be read later.

transformers converts names and layouts of weights by running operations such as `torch.cat` and `transpose` on whole
tensors. When the same code runs on LazyTensors, no values are read. Afterwards each rank reads only its own rows of the
results, from one or several files.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: the range [first, last) of indices in each dimension."""
Read = Callable[[Box], torch.Tensor]
"""Type of a function that reads a part of a tensor's values."""
aten = torch.ops.aten


class LazyTensor(torch.Tensor):
    """A tensor that has a shape, but no values in memory. It claims to be float32 on the CPU, whatever dtype the files
    have, so that transformers' conversions do not cast it. Values that are read have the dtype of the files.

    Attributes:
        sources: names of the tensors in files from which its values are made, in order, each once.
        read: function that reads a part of its values.
    """

    sources: tuple[str, ...]
    read: Read

    @staticmethod
    def __new__(cls, shape: Sequence[int], sources: Sequence[str], read: Read) -> "LazyTensor":
        """Create a tensor of this shape without values in memory. `read` reads any part of its values, which are made
        from the tensors in files that `sources` names."""
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32, device=torch.device("cpu"))
        self.sources = tuple(dict.fromkeys(sources))
        self.read = read
        return self

    def __init__(self, shape: Sequence[int], sources: Sequence[str], read: Read) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"LazyTensor({list(self.shape)}, {', '.join(self.sources)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operation on LazyTensors (tensors without values in memory) as LazyTensors, whose
        values are computed when they are read. Operations that only move values (`OPERATIONS`) read only those that are
        wanted; all others read their whole inputs."""
        kwargs = kwargs or {}
        if func.overloadpacket is aten._to_copy:  # casts are ignored: values that are read have the files' dtype
            return same(args[0])
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change a tensor that is not in memory")
        shapes = on_meta(func, args, kwargs)  # raises torch's error for arguments that do not fit
        operation = OPERATIONS.get(func.overloadpacket, None)
        # NotImplemented, too, if the function of the operation does not support these arguments
        result = NotImplemented if operation is None else operation(*args, **kwargs)
        return compute_later(func, args, kwargs, shapes) if result is NotImplemented else result

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Read rows [begin, end) of dimension 0, or the value of a scalar."""
        return self.read(((begin, end), *whole(self.shape[1:])) if self.ndim else ())


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return tuple((0, size) for size in shape)


def same(x: LazyTensor, *_: Any, **__: Any) -> LazyTensor:
    """Return a new LazyTensor with the values of `x`, for operations that change none, such as `clone`."""
    return LazyTensor(x.shape, x.sources, x.read)


def part(x: LazyTensor, dim: int, begin: int, end: int) -> LazyTensor:
    """Return a LazyTensor of the indices [begin, end) of dimension `dim` of `x`. It reads from `x`, at shifted
    indices."""

    def read(box: Box) -> torch.Tensor:
        first, last = box[dim]
        return x.read((*box[:dim], (first + begin, last + begin), *box[dim + 1 :]))

    return LazyTensor([*x.shape[:dim], end - begin, *x.shape[dim + 1 :]], x.sources, read)


def slice_of(x: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """Return `x[start:end]` along dimension `dim` as a LazyTensor, without reading values. Return NotImplemented for
    steps other than 1: the operation is then computed with the whole of `x`."""
    if step != 1:
        return NotImplemented
    dim %= x.ndim
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return part(x, dim, first, max(first, last))


def select(x: LazyTensor, dim: int, index: int) -> LazyTensor:
    dim %= x.ndim
    index %= x.shape[dim]
    return view(part(x, dim, index, index + 1), [*x.shape[:dim], *x.shape[dim + 1 :]])


def unbind(x: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [select(x, dim, index) for index in range(x.shape[dim])]


def split(x: LazyTensor, sizes: int | list[int], dim: int = 0) -> list[LazyTensor]:
    """Return the parts of a lazy tensor, like `torch.split`. `sizes`: the size of each part, or a list of all sizes."""
    dim %= x.ndim
    size = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - begin) for begin in range(0, size, sizes)]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [part(x, dim, end - length, end) for end, length in zip(ends, sizes, strict=True)]


def cat(tensors: Sequence[LazyTensor], dim: int = 0) -> Any:
    """Return `torch.cat` of lazy tensors. When a part of the result is read (`box`, a range for each dimension), only
    what it contains of the tensors is read. Return NotImplemented if a tensor has its values in memory: the operation
    is then computed as a whole."""
    if not all(isinstance(x, LazyTensor) for x in tensors):
        return NotImplemented
    dim %= tensors[0].ndim
    sizes = [x.shape[dim] for x in tensors]

    def read(box: Box) -> torch.Tensor:
        pieces, begin = [], 0
        for x, size in zip(tensors, sizes, strict=True):
            first, last = max(box[dim][0] - begin, 0), min(box[dim][1] - begin, size)
            if first < last:
                pieces.append(x.read((*box[:dim], (first, last), *box[dim + 1 :])))
            begin += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    shape = [*tensors[0].shape[:dim], sum(sizes), *tensors[0].shape[dim + 1 :]]
    return LazyTensor(shape, [name for x in tensors for name in x.sources], nonempty(read, tensors[0]))


def nonempty(read: Read, like: LazyTensor) -> Read:
    """Extend a function that reads a part of a tensor to parts without elements, for which it may have no values to
    concatenate. `like` has the dtype of the values."""

    def read_any(box: Box) -> torch.Tensor:
        if all(first < last for first, last in box):
            return read(box)
        empty = like.read(tuple((0, 0) for _ in like.shape))
        return empty.new_empty([last - first for first, last in box])

    return read_any


def stack(tensors: Sequence[LazyTensor], dim: int = 0) -> Any:
    if not all(isinstance(x, LazyTensor) for x in tensors):
        return NotImplemented
    return cat([unsqueeze(x, dim) for x in tensors], dim % (tensors[0].ndim + 1))


def unsqueeze(x: LazyTensor, dim: int) -> LazyTensor:
    dim %= x.ndim + 1
    return view(x, [*x.shape[:dim], 1, *x.shape[dim:]])


def squeeze(x: LazyTensor, dim: int | Sequence[int] | None = None) -> LazyTensor:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    removed_dims = {number % x.ndim for number in dims if x.shape[number] == 1}
    return view(x, [size for number, size in enumerate(x.shape) if number not in removed_dims])


def permute(x: LazyTensor, order: Sequence[int]) -> LazyTensor:
    """`torch.permute` of a lazy tensor: dimension i of the result is dimension `order[i]` of `x`."""
    order = [number % x.ndim for number in order]

    def read(box: Box) -> torch.Tensor:
        inner = [box[order.index(number)] for number in range(len(order))]
        return x.read(tuple(inner)).permute(order)

    return LazyTensor([x.shape[number] for number in order], x.sources, read)


def transpose(x: LazyTensor, first: int = 0, second: int = 1) -> LazyTensor:
    """`torch.transpose` of a lazy tensor, and `torch.t`, which leaves a vector as it is."""
    order = list(range(x.ndim))
    if order:
        second = min(second, x.ndim - 1)
        order[first], order[second] = order[second], order[first]
    return permute(x, order)


def view(x: LazyTensor, shape: Sequence[int], *_: Any, **__: Any) -> LazyTensor:
    """`x.view(shape)` of a lazy tensor; -1 in `shape` stands for the remaining size."""
    shape = list(shape)
    if -1 in shape:
        shape[shape.index(-1)] = x.numel() // max(1, -prod(shape))
    return LazyTensor(shape, x.sources, nonempty(lambda box: read_view(x, shape, box), x))


def read_view(x: LazyTensor, shape: Sequence[int], box: Box) -> torch.Tensor:
    """Read a part of `x.view(shape)`, and as few other values of `x` as possible. `box` has the range [first, last) of
    each dimension.

    No other values are read if the shapes differ only in dimensions of size 1. If the shapes have equal leading
    dimensions, the part is read in full in all later dimensions. Otherwise all rows of `x` with values of the part are
    read.
    """
    sizes = [last - first for first, last in box]
    if [size for size in shape if size != 1] == [size for size in x.shape if size != 1]:
        wanted = iter(span for span, size in zip(box, shape, strict=True) if size != 1)
        return x.read(tuple((0, 1) if size == 1 else next(wanted) for size in x.shape)).reshape(sizes)
    shared = 0
    while shared < min(len(shape), x.ndim) and shape[shared] == x.shape[shared]:
        shared += 1
    if shared:
        values = x.read((*box[:shared], *whole(x.shape[shared:]))).reshape(sizes[:shared] + list(shape[shared:]))
        return values[(slice(None),) * shared + tuple(slice(*span) for span in box[shared:])]
    if not shape or not x.ndim:
        return x.read(whole(x.shape)).reshape(shape)[tuple(slice(*span) for span in box)]
    row, row_of_x = prod(shape[1:]), prod(x.shape[1:])
    begin, end = box[0][0] * row, box[0][1] * row
    first, last = begin // row_of_x, -(-end // row_of_x)
    values = x.read(((first, last), *whole(x.shape[1:]))).reshape(-1)
    values = values[begin - first * row_of_x : end - first * row_of_x].reshape(-1, *shape[1:])
    return values[(slice(None), *(slice(*span) for span in box[1:]))]


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a torch operation with meta tensors in place of its tensors. Return its results: shapes without values."""

    def to_meta(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value

    meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs))
    return func(*meta_args, **meta_kwargs)


def compute_later(func: Any, args: Any, kwargs: Any, shapes: Any) -> Any:
    """Return the results of a torch operation on LazyTensors, as LazyTensors: whenever a part of a result is read, all
    inputs are read and the whole operation is computed. For operations that compute new values. `shapes`: the results
    on the meta device."""

    def in_memory(value: Any) -> Any:
        return value.read(whole(value.shape)) if isinstance(value, LazyTensor) else value

    inputs = (args, kwargs)
    sources = [name for x in tree_leaves(inputs) if isinstance(x, LazyTensor) for name in x.sources]

    def reader(number: int | None) -> Read:
        """Return the function that reads parts of result `number`; None: the operation has a single result."""

        def read(box: Box) -> torch.Tensor:
            read_args, read_kwargs = tree_map(in_memory, inputs)
            result = func(*read_args, **read_kwargs)
            result = result if number is None else result[number]
            return result[tuple(slice(*span) for span in box)]

        return read

    if isinstance(shapes, torch.Tensor):
        return LazyTensor(shapes.shape, sources, reader(None))
    return [LazyTensor(result.shape, sources, reader(number)) for number, result in enumerate(shapes)]


OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach: same, aten.alias: same, aten.clone: same, aten.contiguous: same, aten.lift_fresh: same,
    aten.view: view, aten._unsafe_view: view, aten.reshape: view, aten._reshape_copy: view,
    aten.transpose: transpose, aten.t: transpose, aten.permute: permute, aten.cat: cat, aten.stack: stack,
    aten.unsqueeze: unsqueeze, aten.squeeze: squeeze, aten.slice: slice_of, aten.select: select, aten.unbind: unbind,
    aten.split: split, aten.split_with_sizes: split,
}  # fmt: skip
"""Operations that only move values -> functions that record them, or return NotImplemented for unsupported
arguments."""
