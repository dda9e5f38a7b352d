"""Tell in which formats a model can be exported: for transformers, for the original LLaVA, or its projector alone."""

import re
from collections.abc import Callable
from pathlib import Path

from transformers import InternVLVisionConfig

from llava_fsdp.config import AspectRatio, PatchMerge
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.logit_change import keys_that_change
from llava_fsdp.model.parts import Parts, read_json
from llava_fsdp.model.sources.llava_v1_5_config import is_original, rope
from llava_fsdp.model.vision_tower import patch_size
from llava_fsdp.runtime.errors import ConfigError, ModelError

KEPT = "original"
"""Name of the subfolder of a model folder for transformers that keeps the configuration and tokenizer files of the
original LLaVA model, so that the folder can be converted back."""


def check_hf(model: Llava, aspect: AspectRatio) -> None:
    """Raise ConfigError or ModelError if transformers has no class that computes what a model computes. The message
    names another export format. `aspect`: how an image is fitted into the vision tower's input, as one tile or more."""
    refused = why_not_hf(model, aspect)
    if refused is not None:
        choice = "llava" if why_not_original(model) is None else None
        raise type(refused)(f"{refused}; {cure(model, choice)}") from refused


def check_original(model: Llava) -> None:
    """Raise ConfigError or ModelError if the original LLaVA lacks a model's projector or language model. The message
    names another format that the model can be exported in."""
    refused = why_not_original(model)
    if refused is not None:
        # A model that joins tiles (spatial_unpad) may be exportable for transformers with any division of images;
        # others take an image as one tile.
        aspects = AspectRatio if model.cfg.patch_merge is PatchMerge.spatial_unpad else [AspectRatio.square]
        is_hf = any(why_not_hf(model, aspect) is None for aspect in aspects)
        raise type(refused)(f"{refused}; {cure(model, 'hf' if is_hf else None)}") from refused


def check_projector(model: Llava) -> None:
    """Raise ConfigError if a model's projector has no weights."""
    if not model.multi_modal_projector.depth:
        raise ConfigError("an identity projector has no weights, so there is no mm_projector.bin")


def cure(model: Llava, choice: str | None) -> str:
    """Return what to do instead of a refused export. `choice`: another format for the whole model; None: no other."""
    if choice is not None:
        return f"choose format={choice}"
    without = "train with export.enabled=false (or, with adapters, export.merge=false); chat and evaluate read the run"
    if model.cfg.projector_type == "identity":  # it has no weights to write
        return without
    return f"{without}; llava-fsdp export format=projector writes the projector alone"


def why_not_hf(model: Llava, aspect: AspectRatio) -> ConfigError | ModelError | None:
    """Return the error with which an export for transformers is refused; None if it is possible."""
    return error_of(lambda: require_hf(model, aspect))


def why_not_original(model: Llava) -> ConfigError | ModelError | None:
    """Return the error with which an export for the original LLaVA is refused; None if it is possible."""
    return error_of(lambda: require_original(model))


def error_of(check: Callable[[], None]) -> ConfigError | ModelError | None:
    """Return the error that a check raises; None if it passes."""
    try:
        check()
    except (ConfigError, ModelError) as error:
        return error
    return None


def require_original(model: Llava) -> None:
    """Raise ConfigError if the original LLaVA lacks a model's projector (multimodal_projector/builder.py:33-51);
    ModelError if it lacks its language model (never so for a model that was loaded from the original)."""
    if not re.fullmatch(r"linear|identity|mlp\d+x_gelu", model.cfg.projector_type):
        raise ConfigError(f"the original LLaVA has no {model.cfg.projector_type} projector")
    if original_folder(model.parts) is None:
        rope(model.parts.language)  # raises ModelError


def require_hf(model: Llava, aspect: AspectRatio) -> None:
    """Raise ConfigError if transformers has no class that computes what a model computes: LLaVA for images of one tile,
    LLaVA-NeXT or LLaVA-OneVision for images cut into several tiles (`aspect` anyres), InternVL for projectors with
    pixel shuffle. None of them caps logits."""
    cfg, parts, tiled = model.cfg, model.parts, aspect in (AspectRatio.anyres, AspectRatio.anyres_max)
    require_no_cap(parts)
    if cfg.shuffle_factor > 1:
        return require_internvl(model, tiled)
    if cfg.projector_type != "mlp2x_gelu":
        raise ConfigError(f"transformers' LLaVA has no {cfg.projector_type} projector")
    if cfg.patch_merge is not (PatchMerge.spatial_unpad if tiled else PatchMerge.flat):
        raise ConfigError(
            f"image_aspect_ratio={aspect.value} with patch_merge={cfg.patch_merge.value} has no equal in transformers: "
            "its LLaVA takes an image as one tile, and its LLaVA-NeXT (anyres) and LLaVA-OneVision (anyres_max) take "
            "several, joined as spatial_unpad"
        )
    grid = (parts.image_size // patch_size(parts.vision)) ** 2
    if tiled and (model.image_tokens != grid or parts.vision.image_size != parts.image_size):
        raise ConfigError(
            "transformers' LLaVA-NeXT and LLaVA-OneVision take image_size // patch_size features for each side of a "
            f"tile, and the vision tower with image_size={parts.vision.image_size} gives {model.image_tokens} for a "
            f"tile of {grid} patches"
        )


def require_no_cap(parts: Parts) -> None:
    """Raise ConfigError if the language model's own class limits the logits with a tanh (caps them). The classes for an
    export do not, and a change of the output layer's weight cannot do the same."""
    if parts.logit_change.cap is not None:
        raise ConfigError(
            f"the class of the {parts.language.model_type} in transformers caps its logits "
            f"({', '.join(keys_that_change(parts.language))} in its config.json), and transformers' LLaVA classes do "
            "not: an export would have other logits than the model"
        )


def require_internvl(model: Llava, tiled: bool) -> None:
    """Raise ConfigError if transformers' InternVL cannot compute what a model with pixel shuffle computes. `tiled` says
    whether images are cut into several tiles."""
    kind, said = model.parts.vision.model_type, f"model.projector_type={model.cfg.projector_type}"
    if not isinstance(model.parts.vision, InternVLVisionConfig):
        raise ConfigError(
            f"{said} is exported as transformers' InternVL, which reads no other vision tower than its own "
            f"(internvl_vision), and this one is a {kind}"
        )
    if tiled:
        raise ConfigError(
            f"{said} with image_aspect_ratio=anyres or anyres_max has no equal in transformers, whose InternVL does "
            "not join tiles as LLaVA does; image_aspect_ratio=square or pad has"
        )


def original_folder(parts: Parts) -> Path | None:
    """Return the folder of the original LLaVA's configuration and tokenizer files, if the model was loaded from a model
    of the original LLaVA, or from an export of such a model, which keeps them in the subfolder KEPT; else None."""
    if parts.whole is None:
        return None
    if (parts.whole / KEPT / "config.json").is_file():
        return parts.whole / KEPT
    return parts.whole if is_original(read_json(parts.whole / "config.json", str(parts.whole))) else None
