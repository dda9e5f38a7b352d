"""Build the model of a training, of whichever kind it is, and tell whether it accepts packed rows."""

import copy

import torch
from transformers import AutoModel, PreTrainedModel

from llava_fsdp.config import LossConfig, ModelConfig
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.llava.own_parts import NONE, OwnParts, own_loss
from llava_fsdp.model.loss import choose_loss, whole_loss
from llava_fsdp.model.packed_attention.attention import Kernel
from llava_fsdp.model.packed_attention.packs import packing_refused
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.weights.conversions import on_meta, whole_model_of
from llava_fsdp.model.whole.packs import why_whole_not_packed
from llava_fsdp.model.whole.structure import base_of, language_of
from llava_fsdp.model.whole.whole import build_whole
from llava_fsdp.runtime.errors import ConfigError


def build_architecture(
    parts: Parts,
    cfg: ModelConfig,
    compute_dtype: torch.dtype,
    kernel: Kernel | None = None,
    loss: LossConfig | None = None,
    own_parts: OwnParts = NONE,
) -> Architecture:
    """Build a model on the meta device, and freeze what does not train: a `Whole` if `parts` has the configuration of a
    whole model of transformers, else a `Llava`.

    `kernel` is the attention of packed rows; None: rows are padded. Without `loss`, the loss is computed from the
    logits of all labels at once. `own_parts` has the loss function and the projector that a Python program gives in
    place of the configured ones, if it does. Raises ConfigError and ModelError if the model cannot be built, or lacks
    what the configuration asks for.
    """
    if parts.class_config is None:
        return build_llava(parts, cfg, compute_dtype, kernel, loss, own_parts)
    if own_parts.projector is not None:
        raise ConfigError(f"a {parts.class_config.model_type} has a projector of its own; give none")
    label_loss = whole_loss if loss is None else choose_loss(loss, compute_dtype, parts.logit_change)
    if own_parts.loss is not None and loss is not None:
        label_loss = own_loss(own_parts.loss, loss)
    return build_whole(parts, cfg, compute_dtype, kernel, label_loss)


def why_not_packed(parts: Parts) -> str | None:
    """Return why a model would mix the samples of a packed row; None if it keeps them apart."""
    return packing_refused(parts.language) if parts.class_config is None else why_whole_not_packed(parts)


def meta_language(parts: Parts) -> PreTrainedModel:
    """Build the language model alone, without output layer, on the meta device; that of a whole model of transformers
    is a part of the whole model's class. Raises ModelError if transformers cannot build it."""
    if parts.class_config is None:
        return on_meta(AutoModel, parts.language)
    return language_of(base_of(whole_model_of(parts.class_config)).module)


def copied_parts(model: Architecture) -> Parts:
    """Return a copy of the configurations of a model, to build a second one: building would change the attention
    implementation in the configuration of the first."""
    parts = copy.deepcopy(model.parts)
    # None: transformers' own way to run experts. The one registered for training sends tokens to other ranks, which
    # fails on the meta device, on which `build_architecture` runs the model.
    parts.language._experts_implementation = None
    return parts
