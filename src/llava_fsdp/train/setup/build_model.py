"""Build the model on the meta device, for all commands that need a model."""

from functools import partial

import numpy as np
import torch

from llava_fsdp.config import Config, LinearKind
from llava_fsdp.data.batching.cost_model import CostModel
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.loader import ModelShape
from llava_fsdp.model.architecture import Architecture, check_abilities
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.experts import check_shared_experts
from llava_fsdp.model.flops import count_flops
from llava_fsdp.model.llava.own_parts import NONE, OwnParts
from llava_fsdp.model.loss import label_losses
from llava_fsdp.model.packed_attention.attention import choose_kernel
from llava_fsdp.model.packed_attention.packs import check_lengths
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.weights.quantization import check_quantizer
from llava_fsdp.parallel.compile import choose_compiling
from llava_fsdp.parallel.context.share_rows import check_rows
from llava_fsdp.parallel.pipeline.stages import check_can_be_divided
from llava_fsdp.parallel.precision.fp8 import check_fp8
from llava_fsdp.parallel.precision.int8_mixed import check_int8_mixed
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.tensor.tensor_plan import tensor_plan
from llava_fsdp.runtime.errors import ConfigError


def build_model(cfg: Config, parts: Parts, device: torch.device, own_parts: OwnParts = NONE) -> Architecture:
    """Build the model on the meta device, as it will be trained on `device`. `own_parts`: a loss and a projector that
    the program which calls this package gives in place of the configured ones.

    Raises:
        ConfigError: the device or the model does not support the configuration.
    """
    if cfg.precision.linear is LinearKind.fp8:
        check_fp8(device)
    elif cfg.precision.linear is LinearKind.int8_mixed:
        check_int8_mixed(device)
    check_quantizer(cfg.model.quantize, device)
    check_lengths(parts.language, cfg.data.max_length, is_alone=not cfg.packs and cfg.micro_batch_size == 1)
    compute_dtype = DTYPES[cfg.precision.param_dtype]
    kernel = choose_kernel(cfg.attention, parts.language, device, compute_dtype) if cfg.packs else None
    choose_compiling(cfg, device, kernel and kernel.attention)
    model = build_architecture(parts, cfg.model, compute_dtype, kernel, cfg.loss, own_parts)
    check_abilities(model, cfg)
    if cfg.data.pairs:
        if own_parts.loss is not None:
            raise ConfigError("data.pairs=true has a loss of pairs (pref), and the program gives a loss; leave one out")
        model.set_label_loss(partial(label_losses, chunk_tokens=cfg.loss.chunk_tokens))
    model.check_trained_blocks()
    if cfg.parallel.tensor > 1:
        tensor_plan(model, cfg.parallel.tensor)  # raises an error if the model cannot be divided
    check_rows(model, cfg.parallel)
    check_shared_experts(model.language, cfg.parallel.expert, cfg.parallel.tensor)
    if cfg.parallel.pipeline > 1:
        check_can_be_divided(model, cfg.parallel.num_stages)
    return model


def shape_of(model: Architecture) -> ModelShape:
    """Return what the preparation of data depends on, such as the number of tokens of an image."""
    language = model.language_config
    # without the FLOPs of activation checkpointing, on which packing, and so the training's result, must not depend
    flops = count_flops(model, activation_checkpointing=False)
    return ModelShape(
        image_tokens=model.image_tokens,
        image_size=model.image_size,
        max_length=language.max_position_embeddings,
        vocab_size=language.vocab_size,
        grid_pinpoints=model.parts.grid_pinpoints,
        max_tiles=model.parts.max_tiles,
        cost=CostModel(token=flops.token, pair=flops.pair, label=flops.label, tile=flops.vision),
        processor_folder=model.processor_folder,
        needs_blank=model.needs_blank,
        positions=model.positions,
    )


def mean_counts(records: Records) -> tuple[float, float, float, float]:
    """Return a sample's mean number of tokens, pairs of tokens, labels and tiles, to divide a model into stages."""
    pairs = float((records.lengths.astype(np.float64) ** 2).mean())
    return float(records.lengths.mean()), pairs, float(records.labels.mean()), float(records.tiles.mean())
