"""Find the parameters of a whole model on which no loss depends, such as an image generator or the last block of a
vision tower whose output is not taken, and freeze them."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from llava_fsdp.config import DType, PrecisionConfig
from llava_fsdp.data.batching.collate import image_inputs
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.processor.encoder import ProcessorEncoder
from llava_fsdp.data.text.conversation import Segment
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.packed_attention.attention import attention_of_transformers, in_bf16
from llava_fsdp.parallel.precision.precision import compute_norms_in_fp32, norm_weights
from llava_fsdp.plan.memory.known_values import KnownValues
from llava_fsdp.runtime.text.log import log

LARGE = (1400, 900)
"""Width and height in pixels of an image that every processor cuts into as many parts as it ever does, or nearly."""


def freeze_unused(model: Architecture, loader: Loader, precision: PrecisionConfig) -> None:
    """Freeze the parameters of a meta-device model on which the loss of no image depends. Only models with a processor
    are tried. Raise ConfigError if such a model cannot compute with the dtypes of its weights."""
    reader, encoder = loader.steps.image_reader, loader.steps.encoder
    if not isinstance(encoder, ProcessorEncoder):
        return
    image = Segment(encoder.placeholder, supervised=False, image=0)
    large = encoder.encode([image], ["large"], [LARGE], "a large image"), [np.zeros((*LARGE[::-1], 3), np.uint8)]
    used: set[str] = set()
    for sample, images in (encoder.blank(), large):
        ids = sample.input_ids[None]
        given = image_inputs(reader).collate([(sample, images)], ids)
        used |= reached(model, torch.from_numpy(ids), given, precision)
    unused = {name for name, p in model.named_parameters() if p.requires_grad} - used
    if unused:
        log().info(
            "%d parameters are frozen, because no loss depends on them: %s%s",
            len(unused), min(unused), " and others" if len(unused) > 1 else "",
        )  # fmt: skip
    model.unused = model.unused | unused
    model.freeze()


def reached(
    model: Architecture, ids: torch.Tensor, images: dict[str, torch.Tensor], precision: PrecisionConfig
) -> set[str]:
    """Return the names of the trained parameters on which the logits of a sample depend. The model runs on the meta
    device, in bf16, as some kernels of mixtures of experts require, with norms in fp32 if the training has other norms
    than weights; its autograd graph has the answer, so that no gradient is computed. `ids`: int64 [1, length];
    `images`: the other inputs."""
    kernel, attention, dtype = model.kernel, model.attention, model.compute_dtype
    was_training = model.training
    model.eval()
    model.kernel, model.compute_dtype = None, torch.bfloat16
    model.use_attention(attention_of_transformers(model.language_config, type(model.language)))
    inputs = (ids, None, images, torch.zeros_like(ids), torch.arange(ids.shape[1]))
    weights, hooks = in_bf16(model), []
    if precision.norm_dtype is not precision.param_dtype:
        mixed = replace(precision, param_dtype=DType.bf16, norm_dtype=DType.fp32)
        kept = norm_weights(model, mixed)
        weights |= {name: own for name, own in model.named_parameters() if own in kept}
        hooks = compute_norms_in_fp32(model, mixed)
    try:
        with torch.enable_grad(), KnownValues():
            logits = functional_call(model, weights, inputs, {"return_logits": True})
    finally:
        for hook in hooks:
            hook.remove()
        model.kernel, model.compute_dtype = kernel, dtype
        model.use_attention(attention)
        model.train(was_training)
    leaves = set(leaves_of(logits))
    return {name for name, own in model.named_parameters() if own in leaves}


def leaves_of(output: torch.Tensor) -> Iterable[nn.Parameter]:
    """Yield the parameters in the autograd graph of a tensor."""
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(own := getattr(node, "variable", None), nn.Parameter):
            yield own
        left += [following for following, _ in node.next_functions]
