"""Write safetensors files as a stream, and read ranges of rows (slices of dimension 0) from safetensors files without
mapping them into memory.

The format is: 8 bytes with the length of a JSON header, little-endian; the header, with dtype, shape and byte range of
every tensor; the data. `safetensors.safe_open` can read the written files.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

from llava_fsdp.runtime.errors import CheckpointError, NumericError
from llava_fsdp.runtime.files.digests import CHUNK, Digest
from llava_fsdp.runtime.files.durable_files import READ, new_file, write_all

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}
WRITEBACK = 64 << 20
"""Bytes after which the kernel is asked to start writing them to the disk. Otherwise it would start only when the bytes
that wait fill a tenth of the memory."""
LARGEST_HEADER = 100 << 20
"""Maximum accepted size of a header in bytes, as in the safetensors library."""
LARGEST_DIMENSION = 1 << 62


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a safetensors file, from the file's header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte, from the beginning of the file."""
    end: int


def size_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor's data."""
    return math.prod(shape) * dtype.itemsize


def build_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """Build the header of a safetensors file, with the 8 bytes before it that give its length, from each tensor's dtype
    and shape. Also return the tensors' names in the order of their data: wide dtypes first, to align all data."""
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + size_of(dtype, shape)
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], torch.Tensor],
    hasher: Executor,
) -> Digest:
    """Write tensors to a new safetensors file, a few MiB at a time, and fsync it. Return its size and digest.

    Args:
        tensors: dtype and shape of each tensor, by name.
        read: returns the tensor with a given name. It is called just before that tensor is written.
        hasher: executor with another thread, which computes the digest while this thread writes.

    Raises:
        NumericError: a tensor has a value that is not finite.
        OSError: the file cannot be written.
    """
    head, order = build_header(tensors)
    digest, written, sent_to_disk = xxh3_128(), 0, 0
    with new_file(path) as descriptor:
        for chunk in chunks(head, order, read):
            digest_task = hasher.submit(digest.update, chunk)
            try:
                write_all(descriptor, chunk)
            finally:
                digest_task.result()  # also after an error, because the caller may then overwrite the buffer
            written += len(chunk)
            if written - sent_to_disk >= WRITEBACK:
                begin_writing(descriptor, sent_to_disk, written - sent_to_disk)
                sent_to_disk = written
    return Digest(written, digest.hexdigest())


def chunks(head: bytes, order: list[str], read: Callable[[str], torch.Tensor]) -> Iterator[memoryview]:
    """Yield the content of a safetensors file: its header `head`, then the data of the tensors named in `order`, which
    `read` returns by name, in pieces of a few MiB. Raises NumericError if a value is not finite."""
    yield memoryview(head)
    for name in order:
        flat = read(name).detach().reshape(-1)
        step = CHUNK // flat.dtype.itemsize
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step].cpu()
            require_finite(name, part)
            yield as_bytes(part)


def require_finite(name: str, part: torch.Tensor) -> None:
    """Raise NumericError if `part`, a slice of the tensor `name`, has a value that is not finite. Only the minimum and
    the maximum are checked: they are NaN if any value is NaN."""
    if not part.is_floating_point():
        return
    part = part.float() if part.dtype.itemsize == 1 else part  # `aminmax` takes no fp8
    least, largest = torch.aminmax(part)
    if not (math.isfinite(least) and math.isfinite(largest)):
        what = "the weights" if name.startswith("model.") else "the optimizer's state"
        raise NumericError(
            f"{name} holds numbers that are not finite, so that no checkpoint is written: {what} cannot be trained on; "
            "continue from the checkpoint before, with a smaller optim.lr or optim.clip=1.0"
        )


def begin_writing(descriptor: int, begin: int, length: int) -> None:
    """Ask the kernel to start writing the bytes [begin, begin + length) of a file to the disk in the background. Does
    nothing if the operating system has no such call."""
    if hasattr(os, "posix_fadvise"):
        # the kernel can drop pages from its cache only when they are written
        os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_DONTNEED)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def open_file(path: Path) -> int:
    """Open a file for reading; return its file descriptor. Raises CheckpointError if the path is a link or not a
    regular file, or if it cannot be opened."""
    try:
        descriptor = os.open(path, READ)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else error.strerror
        raise CheckpointError(f"{path.name} cannot be read: {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path.name} is no regular file")
    return descriptor


def read_header(descriptor: int, name: str) -> dict[str, TensorPlace]:
    """Read the header of an open safetensors file; `name` is for error messages. Raises CheckpointError if the file has
    another format, or its data does not match the header."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(size - 8, LARGEST_HEADER):
        raise CheckpointError(f"{name} is no safetensors file: {size} bytes with a header of {length}")
    try:
        entries = json.loads(os.pread(descriptor, length, 8))
        entries.pop("__metadata__", None)
        places = {key: parse_place(values, 8 + length) for key, values in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name} has no header that safetensors could read: {error}") from error
    end = 8 + length
    for key, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != end or place.end - place.begin != size_of(place.dtype, place.shape):
            raise CheckpointError(f"{name}: the place of {key} does not fit its shape and its neighbours")
        end = place.end
    if end != size:
        raise CheckpointError(f"{name} has {size} bytes, and its tensors end at {end}")
    return places


def parse_place(entry: dict[str, Any], base: int) -> TensorPlace:
    """Parse a tensor's entry in a header. Its offsets count from byte `base` of the file. Raise ValueError, TypeError
    or KeyError if the entry is invalid."""
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    numbers = [begin, end, *shape]
    if not all(type(n) is int and 0 <= n < LARGEST_DIMENSION for n in numbers):
        raise ValueError(f"{numbers} are not sizes")
    return TensorPlace(DTYPES[entry["dtype"]], tuple(shape), base + begin, base + end)


def read_rows(descriptor: int, name: str, begin: int, into: torch.Tensor) -> None:
    """Fill a tensor on any device with the bytes of an open file from the offset `begin` on. Raises CheckpointError,
    which names the file `name`, if the file ends before the tensor is full."""
    into_tensor_memory = into.device.type == "cpu" and into.is_contiguous()
    flat = into.detach().reshape(-1) if into_tensor_memory else torch.empty(into.numel(), dtype=into.dtype)
    if not flat.numel():
        return
    memory, num_read = as_bytes(flat), 0
    while num_read < len(memory):
        count = os.preadv(descriptor, [memory[num_read : num_read + (CHUNK << 3)]], begin + num_read)
        if not count:
            raise CheckpointError(f"{name} ends before byte {begin + len(memory)}")
        num_read += count
    if not into_tensor_memory:
        into.detach().copy_(flat.view(into.shape))
