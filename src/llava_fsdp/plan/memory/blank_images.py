"""Black images as inputs of a whole vision-language model of transformers, and how many tokens it makes of them.

The image processor of the model's folder prepares them, and the model's own code makes their tokens on the meta device.
No tokenizer is needed.
"""

import inspect
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from llava_fsdp.plan.memory.known_values import KnownValues
from llava_fsdp.plan.memory.meta_trace import FusedKernels
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors, read_json, refuse_model_code

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
Size = tuple[int, int]
"""Width and height in pixels."""
SAME = 0.05
"""Relative difference of two sizes below which they count as the same."""


@dataclass(frozen=True)
class VisionWork:
    """What the vision part of a model does for one image."""

    tokens: int
    """Number of the image's tokens in the language model."""
    flops: int
    """FLOPs of a forward pass of everything that makes the tokens."""
    nbytes: int
    """Bytes of the inputs, floats as float32."""


@dataclass(frozen=True, eq=False)
class BlankImages:
    """Makes the inputs of black images for one model."""

    base: Any
    """The model without output layer, on the meta device."""
    processor: Any
    """The image processor."""
    photo: Size
    """Size of an image whose size is unknown."""
    known: dict[Size, VisionWork] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, base: nn.Module, folder: Path, photo: Size) -> "BlankImages":
        """Open the image processor in a model's folder.

        Raises:
            ModelError: the folder has none, or packages are missing that it needs.
        """
        from transformers import AutoImageProcessor

        for name in (PREPROCESSOR, PROCESSOR):
            if (folder / name).is_file():
                refuse_model_code(read_json(folder / name), folder / name)
        with library_errors(f"{folder}: transformers cannot open the image processor, which says how images are cut"):
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        return cls(base, processor, photo)

    def pixels(self, size: Size, count: int) -> dict[str, torch.Tensor]:
        """Return the inputs of `count` images of one size in one sample, by the image processor's names, on the CPU."""
        images = [Image.new("RGB", size)] * count
        made = self.processor([images], return_tensors="pt")
        return {
            name: values.float() if values.is_floating_point() else values
            for name, values in made.items()
            if isinstance(values, torch.Tensor)
        }

    def work(self, size: Size | None = None) -> VisionWork:
        """Return what the vision part does for an image. None: one of the size `photo`.

        Raises:
            ModelError: the model's class does not say how many tokens it makes.
        """
        size = size or self.photo
        if size not in self.known:
            pixels = self.pixels(size, 1)
            takes = inspect.signature(self.base.get_image_features).parameters
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            counter = FlopCounterMode(display=False, custom_mapping={fused: attention_flops})
            with torch.no_grad(), KnownValues(), FusedKernels(), counter:
                made = self.base.get_image_features(**{name: own for name, own in pixels.items() if name in takes})
            nbytes = sum(values.nbytes for values in pixels.values())
            self.known[size] = VisionWork(count_tokens(made), counter.get_total_flops(), nbytes)
        return self.known[size]

    def size_of(self, tokens: float) -> Size:
        """Return a size at which an image has about so many tokens, in the proportions of `photo`. Where all sizes have
        equally many, it is `photo`."""
        ratio = math.sqrt(max(1.0, tokens) / self.work().tokens)
        width, height = self.photo
        return self.photo if abs(ratio - 1) < SAME else (max(1, round(width * ratio)), max(1, round(height * ratio)))


def attention_flops(queries: Any, keys: Any, values: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention between tensors of these shapes, each [rows, heads, tokens, channels]."""
    return sdpa_flop_count(queries, keys, values)


def count_tokens(made: Any) -> int:
    """Return the number of image tokens in what `get_image_features` of one of transformers' classes returns."""
    features = made.pooler_output if getattr(made, "pooler_output", None) is not None else made.last_hidden_state
    tensors = [tensor for tensor in tree_leaves(features) if isinstance(tensor, torch.Tensor)]
    if not tensors:
        raise ModelError("get_image_features returns no features, so that the tokens of an image cannot be counted")
    return sum(math.prod(tensor.shape[:-1]) for tensor in tensors)
