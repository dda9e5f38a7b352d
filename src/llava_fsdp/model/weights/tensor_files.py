"""Read tensors from safetensors files and files of torch.save, a part of a tensor at a time."""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from llava_fsdp.model.weights.weight_names import PEFT
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import file_beside, read_json, refuse_pointer

WHOLE_MODEL = ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"]
PROJECTOR = ["mm_projector.safetensors", "mm_projector.bin"]
OF_ADAPTERS = ("adapter_config.", "adapter_model.", "non_lora_trainables.")
"""Beginnings of the names of the files in a LoRA adapter's folder."""
ADAPTER_CURE = (
    "of a LoRA adapter, which is used with its base: give its folder, with all of its files, as model.lora.checkpoint "
    "(training) or source (export, chat, evaluate)"
)
WRAPPER_PREFIX = "module."
"""Prefix of all names in a wrapped model."""
LARGEST_HEADER = 20 << 20
"""Maximum accepted size, in bytes, of the header of a safetensors file: about 150,000 tensors."""
CODES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. Its values are read only when `rows` or `part` is called."""

    file: Path
    name: str
    handle: Any
    """The opened file: a dict of memory-mapped tensors, or a handle of safetensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.handle, dict):  # the tensors of a file of torch.save; otherwise the file is a safetensors
            return tuple(self.handle[self.name].shape)
        return tuple(self.handle.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor. Raises ModelError if it is not a float of at least 16 bits, as in quantized models."""
        if isinstance(self.handle, dict):
            dtype: Any = self.handle[self.name].dtype
        else:
            code = self.handle.get_slice(self.name).get_dtype()
            dtype = CODES.get(code, code)
        if dtype not in CODES.values():
            raise ModelError(f"{self.file}: {self.name} is {dtype}; quantized weights cannot be read")
        return dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Read rows [begin, end) of dimension 0, or the value of a scalar."""
        if not self.shape:
            return self.part(())
        if isinstance(self.handle, dict):
            return self.handle[self.name][begin:end]
        return self.handle.get_slice(self.name)[begin:end]

    def part(self, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Read a part of a tensor: for each dimension, the range [first, last) of indices."""
        sizes = [last - first for first, last in box]
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype)
        if not box:
            return self.handle[self.name] if isinstance(self.handle, dict) else self.handle.get_tensor(self.name)
        values = self.handle[self.name] if isinstance(self.handle, dict) else self.handle.get_slice(self.name)
        return values[tuple(slice(*span) for span in box)]


def open_tensors(path: Path, projector_only: bool = False) -> dict[str, StoredTensor]:
    """Open all tensors of a file or a model folder, by their names in the files. Values are not read yet.
    `projector_only` prefers a file with only the projector to a whole model, if the folder has both.

    Raises:
        ModelError: there are no weights, a shard is missing, or a file cannot be read.
    """
    names = (PROJECTOR if projector_only else []) + WHOLE_MODEL + PROJECTOR
    is_file = require_weights(path).is_file()
    file = path if is_file else next(path / name for name in names if (path / name).is_file())
    tensors = open_index(file) if file.name.endswith(".index.json") else open_file(file)
    refuse_adapter(file, tensors)
    return tensors


def require_weights(path: Path) -> Path:
    """Return `path`. Raise ModelError if it is a folder without any file of weights, or does not exist."""
    if path.is_file() or any((path / name).is_file() for name in WHOLE_MODEL + PROJECTOR):
        return path
    of_adapter = sorted(file.name for file in path.glob("*") if file.name.startswith(OF_ADAPTERS))
    if of_adapter:
        raise ModelError(f"{path} has {of_adapter[0]}, a file {ADAPTER_CURE}")
    raise ModelError(
        f"{path} has no weights: none of {', '.join(WHOLE_MODEL + PROJECTOR)}; for a run, give its folder or its export"
    )


def refuse_adapter(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ModelError if a file that is read as a model or a projector belongs to a LoRA adapter, or was saved from a
    model with one."""
    if path.name.startswith(OF_ADAPTERS):
        raise ModelError(f"{path} is a file {ADAPTER_CURE}")
    name = next((name for name in tensors if name.startswith(PEFT)), None)
    if name is not None:
        raise ModelError(
            f"{path} has {name}: it was saved from a model inside peft; save the model itself "
            "(model.merge_and_unload().save_pretrained), or only the adapter (model.save_pretrained)"
        )


def refuse_parts(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ModelError if a file of tensors was saved from a wrapped model: one whose parameters DeepSpeed has divided
    among ranks, or that DistributedDataParallel has renamed."""
    empty = next((name for name, tensor in tensors.items() if tensor.shape == (0,)), None)
    if empty is not None:
        raise ModelError(
            f"{path} has {empty} without values (shape [0]): it was saved under DeepSpeed's ZeRO-3, where a rank has "
            "only its part of a weight; make it from the checkpoint with DeepSpeed's zero_to_fp32.py, or save it with "
            "stage3_gather_16bit_weights_on_model_save"
        )
    if tensors and all(name.startswith(WRAPPER_PREFIX) for name in tensors):
        raise ModelError(
            f"{path} has names that begin with {WRAPPER_PREFIX} ({next(iter(tensors))}), which "
            "DistributedDataParallel and DeepSpeed put there: save the wrapped model's .module, or take the prefix off"
        )


def open_index(path: Path) -> dict[str, StoredTensor]:
    """Open all tensors of the files that an index (such as model.safetensors.index.json) lists, by their names in the
    files. Raises ModelError if a file is missing or cannot be read."""
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{path} has no weight_map of names to files; get it again from the model's makers")
    listed = {str(f): file_beside(path, f) for f in names.values()}
    missing = sorted(f for f, file in listed.items() if not file.is_file())
    if missing:
        raise ModelError(f"{path} lists {missing[0]}, which does not exist; was the download interrupted?")
    files = {f: open_file(listed[f]) for f in sorted(listed)}
    absent = [n for n, f in names.items() if n not in files[f]]
    if absent:
        raise ModelError(f"{path} says {absent[0]} is in {names[absent[0]]}, which lacks it")
    return {n: files[f][n] for n, f in names.items()}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Open all tensors of a safetensors file or a file of torch.save, by their names. Raises ModelError if the file
    cannot be read, contains anything other than tensors, or was saved from a wrapped model."""
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        refuse_pointer(path)
    if path.suffix == ".safetensors":
        check_header(path)
        try:
            handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
        stored = {name: StoredTensor(path, name, handle) for name in handle.keys()}
        refuse_parts(path, stored)
        return stored
    if path.suffix not in (".bin", ".pt", ".pth"):
        raise ModelError(f"{path} is not a file of tensors; give a .safetensors or .bin file, or a model folder")
    try:  # weights_only: such a file can carry a program; mmap: it can be larger than the memory
        mapped = is_plain_archive(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises anything from KeyError to UnpicklingError here
        raise ModelError(why_unreadable(path, str(error))) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ModelError(f"{path} has more than tensors by name; it is not a file of weights")
    stored = {name: StoredTensor(path, name, tensors) for name in tensors}
    refuse_parts(path, stored)
    return stored


def check_header(path: Path) -> None:
    """Raise ModelError if the header of a safetensors file would take far more memory than that of any model."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
    except OSError:
        return  # the library reports it
    if LARGEST_HEADER < size <= path.stat().st_size:  # the library refuses a header that is longer than its file
        raise ModelError(f"{path} has a header of {size:,} bytes, more than the {LARGEST_HEADER:,} allowed here")


def is_plain_archive(path: Path) -> bool:
    """Return whether a file is a zip archive like those of torch.save, which can be memory-mapped. Raises ModelError if
    it has compressed or duplicate entries, so that it could unpack to any size."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    names = {entry.filename for entry in entries}
    packed = any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries)
    if packed or len(names) < len(entries) or sum(e.file_size for e in entries) > path.stat().st_size:
        raise ModelError("it is an archive with compressed or duplicate entries, which torch.save does not write")
    return True


def why_unreadable(path: Path, message: str) -> str:
    """Return the error message for a file that torch.load cannot read. It names the cause found in torch's message, and
    does not repeat torch's advice to set weights_only=False."""
    code = re.search(r"GLOBAL (\S+)", message)
    if code:
        return (
            f"{path} is not loaded: it is a pickle that would run code ({code[1]}), which weights do not need; get "
            "them from their makers as .safetensors"
        )
    if "Unsupported operand" in message:
        return f"{path} is not loaded: it was not written by torch.save, and other pickles can run code"
    first = next(iter(message.splitlines()), "it is empty or truncated")
    return f"{path} cannot be read as a file of tensors: {first}"


class Stored(Protocol):
    """Protocol of what a parameter is read from, such as a tensor in a file: any range of rows of dimension 0 at a
    time."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, begin: int, end: int) -> torch.Tensor: ...
