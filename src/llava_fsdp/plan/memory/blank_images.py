"""Black images as inputs of a whole vision-language model of transformers, and how many tokens it makes of them.

The image processor of the model's folder prepares them, and the model's own code makes their tokens on the meta device.
No tokenizer is needed.
"""

import inspect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from llava_fsdp.config import Config, Part
from llava_fsdp.data.batching.batch import ForwardInputs, Segments
from llava_fsdp.data.images.image_tokens import PHOTO, ImageTokens
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.flops import Flops
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.whole.positions import positions_of
from llava_fsdp.model.whole.whole import TYPES, Whole
from llava_fsdp.plan.memory.known_values import META, KnownValues
from llava_fsdp.plan.memory.meta_trace import FusedKernels
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
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
    """FLOPs of the forward and backward pass of all that makes the tokens."""
    recomputed: int
    """FLOPs that activation checkpointing adds: those of the forward pass, if a vision tower trains."""
    nbytes: int
    """Bytes of the inputs, floats as float32."""


@dataclass(frozen=True, eq=False)
class BlankImages:
    """Makes the inputs of black images for one model, and counts their tokens as `ImageTokens` does for tiles. Each
    token counts as a tile."""

    model: Whole
    """The model on the meta device."""
    processor: Any
    """The image processor."""
    photo: Size
    """Size of an image whose size is unknown."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the image processor."""
    known: dict[Size, VisionWork] = field(default_factory=dict)

    @classmethod
    def of_parts(cls, model: Architecture, parts: Parts, photo: Size) -> "BlankImages":
        """Open the image processor in the folder of a model, and return the black images that it makes for the model.
        `photo`: size of images whose size is unknown. Raises ModelError if the folder has no processor, or packages are
        missing that it needs."""
        assert isinstance(model, Whole) and parts.whole is not None
        for path in (parts.whole / PREPROCESSOR, parts.whole / PROCESSOR):
            if path.is_file():
                refuse_model_code(read_json(path), path)
        what = f"{parts.whole}: transformers cannot open the image processor, which says how images are cut"
        with library_errors(what):
            processor = AutoImageProcessor.from_pretrained(
                parts.whole, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        return cls(model, processor, photo, image_arguments(parts.class_config))

    # the planner asks `blends`, `needs_size`, `count_tiles` and `of` of this class as of `ImageTokens`
    blends: ClassVar[bool] = False

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The size of all images of a dry run."""
        return (self.photo,)

    def needs_size(self, images: int) -> bool:
        return True

    def count_tiles(self, size: Size | None, images: int) -> int:
        return self.vision_work(size).tokens

    def of(self, size: Size | None, images: int) -> range:
        return range(self.vision_work(size).tokens)

    def pixels(self, size: Size, count: int) -> dict[str, torch.Tensor]:
        """Return the inputs of `count` images of one size in one sample, by the image processor's names, on the CPU."""
        given = {**self.arguments, "return_tensors": "pt"}
        made = self.processor([[Image.new("RGB", size)] * count], **given)
        return {
            name: values.float() if values.is_floating_point() else values
            for name, values in made.items()
            if isinstance(values, torch.Tensor)
        }

    def vision_work(self, size: Size | None = None) -> VisionWork:
        """Return the tokens, FLOPs and input bytes of an image of this size in the vision part; None: of the size
        `photo`. Raises ModelError if the model's class does not say how many tokens it makes."""
        size = size or self.photo
        if size not in self.known:
            self.known[size] = self.measure(self.pixels(size, 1))
        return self.known[size]

    def measure(self, pixels: dict[str, torch.Tensor]) -> VisionWork:
        """Return the tokens, FLOPs and input bytes of an image with the inputs `pixels`: the vision part runs forward
        and backward on it, without values of weights."""
        model = self.model
        takes = inspect.signature(model.base.get_image_features).parameters
        given = {name: model.cast(value) for name, value in pixels.items() if name in takes}
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
        # weights are on the meta device, and inputs have values on the CPU, from which shapes follow
        with KnownValues(), FusedKernels(), counter:
            made = model.base.get_image_features(**given)
            groups = features_of(made)
            forward = counter.get_total_flops()
            # beside the features of tokens, DeepStack makes some for the first blocks of the language model
            leaves = tree_leaves([groups, getattr(made, "deepstack_features", None)])
            trained = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if trained:
                torch.autograd.grad(trained, weights, [torch.ones_like(leaf) for leaf in trained], allow_unused=True)
        return VisionWork(
            sum(math.prod(tensor.shape[:-1]) for tensor in groups[0]),
            counter.get_total_flops(),
            forward if Part.vision in model.cfg.trained else 0,  # what activation checkpointing would recompute
            sum(values.nbytes for values in pixels.values()),
        )

    def with_images(self, flops: Flops, recomputes: bool) -> Flops:
        """Return `flops` with the vision part's FLOPs per image token in the field `tile`, measured with an image of
        the size `photo`; they depend on the size. `recomputes`: activations are recomputed in the backward pass."""
        work = self.vision_work()
        return flops._replace(vision=(work.flops + recomputes * work.recomputed) / work.tokens)

    def images_of(self, tokens: int) -> tuple[int, Size]:
        """Return (number, size in pixels) of equal images that have about `tokens` tokens together. The size has the
        proportions of `photo`, and the number brings it nearest to `photo`. A size almost equal to `photo` is replaced
        by it, so that it is measured only once."""
        # `vision_work()` measures an image of the size `photo`
        count = round(tokens / self.vision_work().tokens) or int(tokens > 0)
        ratio = math.sqrt(tokens / (count * self.vision_work().tokens)) if count else 1.0
        width, height = self.photo
        size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
        return count, self.photo if abs(ratio - 1) < SAME else size

    def input_bytes(self, micro: MicroBatchSizes) -> int:
        """Return the bytes of the inputs of a micro-batch: pixels and int64 numbers. Each token has five numbers: its
        id, its place in its sample and one for each of three axes of positions, whether or not the model has these
        axes. Each label has two: its position and its token id."""
        row = micro.whole_rows
        count, size = self.images_of(row.image_tokens)
        return count * self.vision_work(size).nbytes + 8 * (5 * row.tokens + 2 * micro.labels)

    def inputs_of(self, micro: MicroBatchSizes, packed: bool) -> ForwardInputs:
        """Make the arguments of the model's forward pass, which gets whole rows. Those from which shapes follow are on
        the CPU, with values: pixels, token ids with images first, boundaries of samples. Others are on `meta`."""
        micro = micro.whole_rows
        count, size = self.images_of(micro.image_tokens)
        each = self.vision_work(size).tokens
        rows, length = micro.rows, micro.length
        count = min(count, rows * ((length - 1) // (each + 1)))  # as many as fit
        image_id = image_token(self.model.base.config)
        ids = torch.full((rows, length), int(image_id == 0))  # text: any id that is not the image token's
        for number in range(count):
            begin = 1 + (number // rows) * (each + 1)  # a token of text between two images
            ids[number % rows, begin : begin + each] = image_id
        images = self.pixels(size, count) if count else {}
        takes = inspect.signature(self.model.base.forward).parameters
        images = {name: value for name, value in images.items() if name in takes}
        # some models also take the type of each token: 1 for images, 0 for text
        types = {name: (ids == image_id).long() for name in takes if name.endswith(TYPES)}
        images |= types | self.positions(rows, length, list(types))
        segments = None
        if packed:
            each_sample = micro.tokens // micro.samples
            lengths = (*[each_sample] * (micro.samples - 1), micro.tokens - each_sample * (micro.samples - 1))
            begins = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            segments = Segments(positions, begins, lengths)
        with META:
            labels = torch.zeros(micro.labels, dtype=torch.int64)
            # of dropout: one for each token of a packed row, or for each padded row
            seeds = torch.zeros(ids.shape if packed else (rows, 1), dtype=torch.int64)
            return {
                "input_ids": ids,
                "segments": segments,
                "images": images,
                "seeds": seeds,
                "label_positions": labels,
                "label_ids": labels.clone(),
            }

    def positions(self, rows: int, length: int, types: list[str]) -> dict[str, torch.Tensor]:
        """Return {"position_ids": positions of the tokens, [axes, rows, length], as if all were text, without images};
        empty if the model itself numbers tokens one after the other. `types`: names of the inputs with the types of
        tokens."""
        assert self.model.parts.class_config is not None
        # a function (token ids, types of tokens by name, sizes of images by name) -> positions [axes, length]
        number = positions_of(self.model.parts.class_config)
        if number is None:
            return {}
        text = torch.zeros(length, dtype=torch.int64)
        return {"position_ids": number(text, dict.fromkeys(types, text), {})[:, None].expand(-1, rows, -1).contiguous()}


def image_rule(cfg: Config, model: Architecture) -> "BlankImages | ImageTokens":
    """Return the rule by which tokens of images are counted: for a whole model of transformers, which must be on the
    meta device, black images that it is run with; for a LLaVA model, tiles. Images whose size is unknown have PHOTO
    pixels."""
    if model.parts.class_config is None:
        return ImageTokens.of_config(cfg, model.parts.image_size, model.image_tokens)
    return BlankImages.of_parts(model, model.parts, PHOTO)


def image_arguments(config: Any) -> Mapping[str, Any]:
    """Return the arguments with which the processor of a model always calls its image processor, such as
    `crop_to_patches=True` for InternVL. They are read from the processor's class, because opening a processor may need
    torchvision. Empty if the model has no processor, or its class cannot be imported without torchvision."""
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    try:
        kind: Any = getattr(transformers, name) if name else None
        older = getattr(getattr(kind, "valid_processor_kwargs", None), "_defaults", {})  # of older releases
        return {**getattr(kind, "images_kwargs", {}), **older.get("images_kwargs", {})}
    except ImportError:
        return {}


def features_of(made: Any) -> list[list[torch.Tensor]]:
    """Return the features in what `get_image_features` of one of transformers' classes returns, each [..., width] with
    the features of image tokens. There is one list for each block of the language model that gets features of all image
    tokens (DeepStack, as in Granite 4 Vision); else there is one list. Raise ModelError if there are no features."""
    fields = ("pooler_output", "last_hidden_state")
    features = next((field for name in fields if (field := getattr(made, name, None)) is not None), None)
    groups = getattr(made, "deepstack_features", None) or [] if features is None else [features]
    found = [[leaf for leaf in tree_leaves(group) if isinstance(leaf, torch.Tensor)] for group in groups]
    if not any(found):
        raise ModelError("get_image_features returns no features, so that the tokens of an image cannot be counted")
    return found


def image_token(config: Any) -> int:
    """Return the id of the token that stands for image features. Raise ModelError if the configuration names none."""
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise ModelError(f"the config.json of a {config.model_type} names no image_token_id, the token of images")


def attention_flops(queries: Any, keys: Any, values: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention between tensors of these shapes, each [rows, heads, tokens, channels]."""
    return sdpa_flop_count(queries, keys, values)


def attention_backward_flops(gradient: Any, queries: Any, keys: Any, values: Any, *_: Any, **__: Any) -> int:
    """Return twice the FLOPs of the forward pass, as for the language model (`model/flops.py`). The kernel's own
    recomputation of the weights of attention is left out."""
    return 2 * sdpa_flop_count(queries, keys, values)


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}
"""Kernels whose FLOPs FlopCounterMode does not know."""
