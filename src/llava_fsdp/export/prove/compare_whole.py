"""Compare the logits of a whole model (`model.checkpoint`) in this package with those of its class in transformers,
before any training. The class and its values are those of the `config.json` in the model's folder. (An export may have
another class; `rehearsal.py` tries it.)"""

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, LlavaNextConfig, LlavaOnevisionConfig

from llava_fsdp.config import AspectRatio
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.export.prove.compare_language import EQUAL, UnlikeOwnClass
from llava_fsdp.export.prove.small_copy import small_copy
from llava_fsdp.export.prove.verify_logits import exported_logits, load_copy, logits, random_rows, relative_difference
from llava_fsdp.export.write.formats import SourceModel
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.parts import read_json
from llava_fsdp.model.sources.llava_v1_5_config import is_original
from llava_fsdp.model.sources.pretrained import read_llava_config
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

SPARE = 3
"""Number of rows of the vocabulary of transformers' model after the trained ones; the first is the image token's."""


@torch.random.fork_rng(devices=[])  # transformers draws random numbers while it builds a model, on this rank alone
def compare_whole(source: SourceModel) -> None:
    """Check that a small copy of a LLaVA read as a whole (`model.checkpoint`), with random weights, has the same logits
    here as in its class in transformers, for text with an image. Only for rank 0. Warns if no small copy can be made.

    A folder of the original LLaVA (no class in transformers) is not compared. Raises UnlikeOwnClass if they differ.
    """
    folder = source.model.parts.whole
    assert folder is not None
    if is_original(read_json(folder / "config.json", f"model.checkpoint={folder}")):
        return
    config = read_llava_config(folder, "model.checkpoint")
    named = f"model.checkpoint={folder}: the logits of a small copy of this {config.model_type}"
    try:
        small, values = small_copy(without_adapters(source))
        ours = load_copy(small.model, values, torch.float32)
        with library_errors(f"transformers cannot run a small copy of a {config.model_type}"):
            theirs = transformers_model_with_weights_of(config, source.model, ours, small.grid_pinpoints)
            rule = tokens_of(theirs.config, ours)
            micro, sizes = random_rows(ours, rule)
            expected = exported_logits(theirs, micro, micro.images["tiles"], sizes)
        actual = logits(ours, micro)
    except UnlikeOwnClass:
        raise
    except ModelError as error:
        log().warning("%s are not compared with those of transformers' class: %s", named, error)
        return
    # transformers' class has more rows of the vocabulary, for the image and video tokens
    difference = relative_difference(expected[:, : actual.shape[1]], actual)
    if not difference <= EQUAL:
        raise UnlikeOwnClass(
            f"{named} differ by {difference:.2g} of the largest (bound {EQUAL:.0e}) from those of transformers' "
            f"{type(theirs).__name__}, for an image and text: a model with this configuration is not supported"
        )


def without_adapters(source: SourceModel) -> SourceModel:
    """Return the description of a model without its LoRA adapters, because transformers' class of the model has
    none."""
    if not source.model.adapted:
        return source
    # a second model would change the attention implementation in the configuration of the first
    parts = copy.deepcopy(source.model.parts)
    return replace(source, model=build_llava(parts, source.model.cfg.plain, torch.float32))


def tokens_of(config: Any, model: Architecture) -> ImageTokens:
    """Return the object that computes which tokens an image gets in a small copy of a model, as transformers' class of
    the model does. `config`: the copy's configuration in transformers; `model`: the copy."""
    tile, merge = model.parts.image_size, model.cfg.patch_merge
    if not isinstance(config, LlavaNextConfig | LlavaOnevisionConfig):
        return ImageTokens(AspectRatio.square, tile, model.image_tokens)
    aspect = AspectRatio.anyres if isinstance(config, LlavaNextConfig) else AspectRatio.anyres_max
    theirs: Any = config.image_grid_pinpoints
    pinpoints = [[width, height] for height, width in theirs]
    # at most the features of 1 tile, as the copy's configuration says with anyres_max_1
    return ImageTokens(aspect, tile, model.image_tokens, tuple(grid_sizes(pinpoints, tile, aspect)), merge, 1)


def transformers_model_with_weights_of(
    config: Any, model: Architecture, ours: Architecture, grids: list[list[int]]
) -> Any:
    """Build transformers' own class of a whole model for its small copy on the CPU, with the small copy's weights.

    Args:
        config: the configuration in the model's folder.
        model: the whole model, as a training builds it.
        ours: its small copy.
        grids: sizes [width, height] in pixels that the small copy fits images into.

    Raises:
        UnlikeOwnClass: transformers' class or the small copy has a parameter that the other lacks.
    """
    # transformers' model has SPARE more rows of the vocabulary, for the image and video tokens
    language, vocab_size = ours.parts.language, ours.parts.language.vocab_size
    small = copy.deepcopy(config)
    small.text_config = type(language).from_dict({**language.to_dict(), "vocab_size": vocab_size + SPARE})
    small.vision_config = copy.deepcopy(ours.parts.vision)
    small.tie_word_embeddings = bool(language.tie_word_embeddings)
    # the small copy has fewer layers, so its index of the same layer may differ
    if config.vision_feature_layer == model.cfg.select_layer:
        small.vision_feature_layer = ours.cfg.select_layer
    small.image_token_id = vocab_size
    if isinstance(small, LlavaNextConfig | LlavaOnevisionConfig):
        small.image_grid_pinpoints = [[height, width] for width, height in grids]
    if isinstance(small, LlavaOnevisionConfig):
        small.video_token_id, small.vision_aspect_ratio = vocab_size + 1, "anyres_max_1"
    theirs: Any = AutoModelForImageTextToText.from_config(small, dtype=torch.float32, trust_remote_code=False)
    values = dict(ours.named_parameters(remove_duplicate=False))
    their_parameters = {name.removeprefix("model."): p for name, p in theirs.named_parameters(remove_duplicate=False)}
    differing = (values.keys() ^ their_parameters.keys()) - {"image_newline"}
    if differing:
        raise UnlikeOwnClass(
            f"only one of transformers' {type(theirs).__name__} and this model has {min(differing)}: this kind of "
            "model is not supported yet"
        )
    with torch.no_grad():
        for name, parameter in their_parameters.items():
            parameter[: len(values[name])] = values[name]
    return theirs.eval()
