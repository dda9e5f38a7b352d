"""What the entries that read a dataset for a model begin with."""

from pathlib import Path

import torch

from llava_fsdp.config import Config, DataConfig, LinearKind, Source
from llava_fsdp.data.cost import CostModel
from llava_fsdp.data.loader import ModelShape
from llava_fsdp.data.shapes import ensure_shapes
from llava_fsdp.model.attention import choose_kernel
from llava_fsdp.model.flops import count_flops
from llava_fsdp.model.llava import Llava, build_llava
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.quantized import check_quantizer
from llava_fsdp.sharding.compiled import choose_compiling
from llava_fsdp.sharding.fp8 import check_fp8
from llava_fsdp.sharding.precision import DTYPES


def draw_shapes(cfg: DataConfig) -> None:
    """The embedded dataset is drawn where it is not there yet."""
    if cfg.source is Source.shapes:
        ensure_shapes(Path(cfg.root or "."))


def build_model(cfg: Config, parts: Parts, device: torch.device) -> Llava:
    """The model that a training on this device has, on the meta device: shapes only.

    Raises:
        ConfigError: this device, or this model, cannot do what is asked for.
    """
    if cfg.precision.linear is LinearKind.fp8:
        check_fp8(device)
    check_quantizer(cfg.model.quantize, device)
    compute_dtype = DTYPES[cfg.precision.param_dtype]
    kernel = choose_kernel(cfg.attention, parts.language, device, compute_dtype) if cfg.pack else None
    choose_compiling(cfg, device, kernel and kernel.attention)
    return build_llava(parts, cfg.model, compute_dtype, kernel, cfg.loss)


def shape_of(model: Llava) -> ModelShape:
    language = model.parts.language
    return ModelShape(
        image_tokens=model.image_tokens,
        image_size=model.parts.vision.image_size,
        max_length=language.max_position_embeddings,
        vocab_size=language.vocab_size,
        # without recomputation, whatever the run does: with and without it the same cut gives the same bits
        cost=CostModel(*count_flops(model, recompute=False)),
    )
