"""Write a GGUF file of llama.cpp, with one tensor in memory at a time, and read its tensors back.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from llava_fsdp.config import KeptDType
from llava_fsdp.runtime.errors import ConfigError, ModelError

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""Values of the key `general.file_type`, by the type that most of a file's tensors have."""
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ASKED = {KeptDType.fp32: "F32", KeptDType.fp16: "F16", KeptDType.bf16: "BF16", KeptDType.q8_0: "Q8_0"}
LARGEST_FP16 = 65504.0


def import_gguf() -> ModuleType:
    """Return the module `gguf`. Raise ConfigError if the package is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"format=gguf needs the package gguf ({error}): pip install 'llava-fsdp[gguf]'") from error
    return gguf


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: its shape, in the file and in the model folder of which it is made.
        type: its type in the file: F32, F16, BF16 or Q8_0.
        read: returns its values in the order of the file; only called when it is written.
    """

    shape: tuple[int, ...]
    type: str
    read: Callable[[], torch.Tensor]


def type_of(shape: tuple[int, ...], stored: torch.dtype, asked: KeptDType, is_exact: bool = False) -> str:
    """Return the type in which a tensor is written.

    Vectors are F32, because llama.cpp adds and multiplies them in F32 alone, and so are tensors with `is_exact`. Blocks
    of Q8_0 have 32 values of one row: a row of another length is F16, as llama.cpp's own converter does.

    Args:
        stored: dtype of the tensor in the model folder.
        asked: the dtype that the user asked for.
    """
    if len(shape) == 1 or is_exact:
        return "F32"
    wanted = TYPES[stored] if asked is KeptDType.keep else ASKED[asked]
    return "F16" if wanted == "Q8_0" and shape[-1] % 32 else wanted


def write_gguf(writer: Any, tensors: dict[str, GgufTensor]) -> None:
    """Write the keys of a `gguf.GGUFWriter`, and then the tensors, by their names in the file, one after the other.
    Raise ModelError if a value is not finite, or too large for F16."""
    gguf = import_gguf()
    # the file's type: the most frequent one beside F32, which vectors have in every file
    types = [tensor.type for tensor in tensors.values() if tensor.type != "F32"] or ["F32"]
    writer.add_file_type(FILE_TYPES[max(sorted(set(types)), key=types.count)])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[tensor.type]
        if tensor.type in ("F32", "F16"):
            shape, dtype = tensor.shape, np.dtype(np.float32 if tensor.type == "F32" else np.float16)
        else:
            shape, dtype = gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind), np.dtype(np.uint8)
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for name, tensor in tensors.items():
            values = tensor.read().float().contiguous()
            check_values(name, values, tensor.type)
            writer.write_tensor_data(gguf.quantize(values.numpy(), gguf.GGMLQuantizationType[tensor.type]))
    finally:
        writer.close()


def check_values(name: str, values: torch.Tensor, kind: str) -> None:
    """Raise ModelError if values cannot be written in a type: they are not finite, or too large for F16."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest < float("inf"):
        raise ModelError(f"{name} has values that are not finite; the model cannot be exported")
    if kind == "F16" and largest > LARGEST_FP16:
        raise ModelError(f"{name} has the value {largest:.4g}, and F16 ends at {LARGEST_FP16:.0f}; give dtype=bf16")


def types_in(path: Path) -> set[str]:
    """Return the types of the tensors in a GGUF file."""
    return {tensor.tensor_type.name for tensor in import_gguf().GGUFReader(path).tensors}


def read_gguf(path: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name, type and values (in float32) of each tensor of a GGUF file, with one of them in memory at a time."""
    gguf = import_gguf()
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.dequantize(np.array(tensor.data), tensor.tensor_type).reshape(shape)
        yield tensor.name, tensor.tensor_type.name, torch.from_numpy(np.ascontiguousarray(values))
