"""Find the parameters of a whole model on which a loss depends, without weights."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.func import functional_call

from llava_fsdp.config import DType, PrecisionConfig
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.packed_attention.attention import attention_of_transformers
from llava_fsdp.model.packed_attention.packs import in_bf16
from llava_fsdp.parallel.precision.precision import compute_norms_in_fp32, norm_weights
from llava_fsdp.plan.memory.blank_images import BlankImages
from llava_fsdp.plan.memory.known_values import KnownValues
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes

LARGE = (1400, 900)
"""Width and height in pixels of an image that every processor cuts into as many parts as it ever does, or nearly."""


def freeze_unreached(images: BlankImages, precision: PrecisionConfig) -> None:
    """Freeze those parameters of a meta-device model that get no gradient, because the logits of a sample with one
    large image do not depend on them. A plan then counts no memory for their gradients and moments. A training finds
    them with a small image, and a video if its dataset has some. `images` makes inputs with blank images."""
    model, large = images.model, replace(images, photo=LARGE)
    each = large.vision_work().tokens  # tokens of the image; each counts as one tile
    # one token of text before the image, and one behind it that is the label
    sizes = MicroBatchSizes(1, each + 2, samples=1, tiles=each, labels=1, image_tokens=each)
    inputs = large.inputs_of(sizes, packed=False)
    used = reached(model, inputs["input_ids"], dict(inputs["images"]), precision)
    model.unused = frozenset(name for name, weight in model.named_parameters() if weight.requires_grad) - used
    model.freeze()


def reached(
    model: Architecture, ids: torch.Tensor, images: dict[str, torch.Tensor], precision: PrecisionConfig
) -> set[str]:
    """Return the names of the trained parameters on which the logits of a sample depend. They are found in the autograd
    graph of a forward pass on the meta device, so that no gradient is computed. The model runs in bf16, which some
    kernels of experts require; its norms in fp32 if they have another dtype than weights in training.

    Args:
        ids: token ids, int64 [1, length].
        images: the model's other inputs.
    """
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
        weights |= {name: weight for name, weight in model.named_parameters() if weight in kept}
        hooks = compute_norms_in_fp32(model, mixed)
    try:
        with torch.enable_grad(), KnownValues():  # which computes positions and masks, with values, on the CPU
            logits = functional_call(model, weights, inputs, {"return_logits": True})
    finally:
        for hook in hooks:
            hook.remove()
        model.kernel, model.compute_dtype = kernel, dtype
        model.use_attention(attention)
        model.train(was_training)
    leaves = set(leaves_of(logits))
    return {name for name, weight in model.named_parameters() if weight in leaves}


def leaves_of(output: torch.Tensor) -> Iterable[nn.Parameter]:
    """Yield the parameters in the autograd graph of a tensor."""
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            yield variable
        left += [following for following, _ in node.next_functions]
