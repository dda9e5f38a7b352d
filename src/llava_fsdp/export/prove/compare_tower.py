"""Compare the features of a vision tower in this package with those of its class in transformers, before any training.

If this package read a configuration in another way than transformers, the features would differ, and the training is
refused before its first step.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from llava_fsdp.config import Feature
from llava_fsdp.export.prove.small_copy import NoSmallCopy, scale, shrink, shrink_tower
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.model.vision_tower import build_vision_tower, image_size, probe_vision_config, selected_features
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

CLOSE = 1e-5
"""Largest accepted difference between features computed in fp32, relative to the largest one."""
IMAGES = 2
"""Number of random images for which features are compared."""


def compare_tower(model: Architecture) -> None:
    """Check that a small copy of a model's vision tower, with random weights, gives the features of transformers'
    class; warn if there can be no copy. Only rank 0 calls this. Raises ModelError if features differ or are not finite.

    transformers' class is the one for the configuration in the vision tower's folder. If this is the configuration of a
    larger model, such as a whole CLIP, the larger model is built and its vision tower is used.
    """
    assert isinstance(model, Llava), "the kind of model that is built from a vision tower"
    parts = model.parts
    feature = Feature.patch if model.probe.drops_cls else Feature.full
    config = read_config(parts.vision_folder, "model.vision")
    named = f"model.vision={parts.vision_folder}: the features of a small copy of its {parts.vision.model_type}"
    try:
        vision, select_layer = shrink_tower(model)
        difference = compare_features(ConfigKey(config), ConfigKey(vision), select_layer, feature)
    except NoSmallCopy as error:
        log().warning("%s are not compared with those of transformers' class: %s", named, error)
        return
    if difference is not None:
        raise ModelError(
            f"{named} {difference}, with model.select_layer={model.cfg.select_layer} and model.select_feature="
            f"{feature.value}: a vision tower with this configuration is not supported"
        )


@lru_cache(maxsize=64)
@torch.random.fork_rng(devices=[])  # transformers draws random numbers while it builds a model, on this rank alone
@torch.no_grad()
def compare_features(config: ConfigKey, vision: ConfigKey, select_layer: int, feature: Feature) -> str | None:
    """Return in words how the features of a small copy of a vision tower differ from transformers'; None if equal.

    Args:
        config: the configuration in the vision tower's folder: that of the vision tower, or of a larger model.
        vision: the configuration of the small copy.
        select_layer: index of the hidden state of the small copy that is used.
        feature: which of its tokens are used: `patch` (without the CLS token) or `full`.

    Raises:
        NoSmallCopy: transformers cannot build or run the small copy.
        ModelError: the small copy has weights of other names than transformers' class.
    """
    source = source_tower(config.config, vision.config)
    dice = torch.Generator().manual_seed(0)
    for parameter in source.parameters():
        parameter.normal_(0, scale(parameter.shape), generator=dice)
    ours = copy_of(vision.config, source)
    side = image_size(vision.config)
    pixels = torch.randn((IMAGES, 3, side, side), generator=dice)
    with library_errors(f"transformers' {type(source).__name__} cannot compute features", NoSmallCopy):
        expected = source(pixel_values=pixels, output_hidden_states=True).hidden_states[select_layer]
    if feature is Feature.patch:
        expected = expected[:, 1:]
    probe = probe_vision_config(vision, select_layer, feature)
    features = selected_features(ours, pixels, select_layer, probe)
    kind = type(source).__name__
    if features.shape != expected.shape:
        return f"have shape {list(features.shape)}, and {list(expected.shape)} in transformers' {kind}"
    difference = float((features - expected).abs().max() / expected.abs().max())
    if not difference <= CLOSE:  # also if a feature is not finite
        return f"differ by {difference:.2g} of the largest (bound {CLOSE:.0e}) from those of transformers' {kind}"
    return None


def source_tower(config: PretrainedConfig, vision: PretrainedConfig) -> PreTrainedModel:
    """Build transformers' own model for a small copy of a vision tower, with the configuration `vision`, on the CPU, in
    evaluation mode. `config` is that in the vision tower's folder: of the tower, or of a larger model. Raises
    NoSmallCopy if no small copy of the larger model can be made, or it has no such vision tower."""
    larger: Any = config
    if getattr(larger, "vision_config", None) is None:
        with library_errors("transformers cannot build it", NoSmallCopy):
            return AutoModel.from_config(vision, trust_remote_code=False, dtype=torch.float32).eval()
    values = larger.to_dict() | {"vision_config": vision.to_dict()}
    with library_errors(f"transformers cannot build a small copy of a {larger.model_type}", NoSmallCopy):
        if getattr(larger, "text_config", None) is not None:
            values["text_config"] = shrink(larger.text_config, 1).to_dict()
        built: Any = AutoModel.from_config(type(larger).from_dict(values), trust_remote_code=False, dtype=torch.float32)
    kinds = (m for m in built.modules() if isinstance(m, PreTrainedModel) and m.config.model_type == vision.model_type)
    tower = next(kinds, None)
    if tower is None:
        raise NoSmallCopy(f"a {larger.model_type} has no {vision.model_type} in it")
    return tower.eval()


def copy_of(vision: PretrainedConfig, source: PreTrainedModel) -> nn.Module:
    """Build a vision tower as a training builds it, with the weights of transformers' model of the same configuration,
    in evaluation mode. Raises ModelError if the two have weights of other names."""
    with torch.device("meta"):
        tower = build_vision_tower(vision)
    theirs = dict(source.named_parameters())
    differing = theirs.keys() ^ dict(tower.named_parameters()).keys()
    if differing:
        raise ModelError(f"only one of a {vision.model_type} and transformers' own has the weight {min(differing)}")
    holder = nn.ModuleDict({"vision_tower": tower})
    buffers = computed_buffers(holder)
    holder.to_empty(device="cpu")
    tower.load_state_dict(theirs, strict=False)  # without buffers
    restore_buffers(holder, buffers)
    return tower.eval()
