"""Compare the logits of a language model in this package with those of its class in transformers, before any training.

A small copy of the language model (the same class and configuration values, but few layers, small widths and random
weights in fp32) runs in both, on text alone. The logits must be equal. If transformers' class did something with hidden
states or logits that this package does not do, the training would have a wrong loss.
"""

import copy
import re
import time
from functools import lru_cache
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    PretrainedConfig,
)

from llava_fsdp.config import Feature, ModelConfig, Part, PatchMerge
from llava_fsdp.export.prove.small_copy import MOST_PARAMETERS, NoSmallCopy, count_layers, random_values, shrink
from llava_fsdp.export.prove.verify_logits import load_copy, relative_difference
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.logit_change import keys_that_change
from llava_fsdp.model.packed_attention.attention import attention_of_transformers
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.pretrained import parts_of, read_config, text_config
from llava_fsdp.model.weights.conversions import is_vision_language_model, names_of_parts, on_meta, place_of
from llava_fsdp.model.weights.init_weights import Drawn, DrawRule, Rule
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

EQUAL = 1e-5
"""Largest accepted difference, relative to the largest logit, of the same computation in fp32."""
TEXTS, TOKENS = 2, 27
"""Number of texts, and number of tokens of each: more than the sliding windows of small copies."""
LOGITS = 12.0
"""Factor of the output layer's random weights, with which logits are about as large as a trained model's: smaller ones
would hardly show a cap."""
TOWER: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "image_size": 4,
    "patch_size": 2,
}  # fmt: skip
"""Sizes of the vision tower of the small copy; it does not run."""
SEARCH_SECONDS = 10.0
"""Number of seconds after which no further key is tried as the cause of a difference."""
SUSPECTS = re.compile(r"logit|scal|multipl|cap$|capping|softcap|mup|norm|embed|residual|bias")
"""Pattern for configuration keys that may be the cause of a difference."""


class UnlikeOwnClass(ModelError):
    """Error: transformers' own class has other logits or other parameters than this package's model."""


def compare_language(parts: Parts) -> None:
    """Check that a language model, which is not read from a whole LLaVA model (`model.checkpoint`), has the same logits
    here as in its class in transformers, with a small copy. Only rank 0 calls this. If no small copy can be made, a
    warning says so.

    Raises:
        UnlikeOwnClass: the logits differ, and the message names the size of the difference and what seems to cause it;
            or the class or this package's model has a parameter that the other lacks.
    """
    config = read_config(parts.language_folder, "model.language")
    named = f"model.language={parts.language_folder}: the logits of a small copy of its {config.model_type}"
    try:
        check_text(config, named)
    except UnlikeOwnClass:
        raise
    except ModelError as error:
        log().warning("%s are not compared with those of transformers' class: %s", named, error)


def check_text(config: PretrainedConfig, named: str) -> None:
    """Check that a small copy of a language model, or of the one in a vision-language model, has the same logits here
    as in its class in transformers. The error message begins with `named`, which says whose logits differ.

    Raises:
        UnlikeOwnClass: the logits differ, or this package cannot compute them.
        ModelError: no small copy can be made, so that nothing was compared.
    """
    with library_errors("transformers cannot run it"):
        difference, factor = text_difference(ConfigKey(config))
    if difference <= EQUAL:
        return
    keys, causes = keys_that_change(text_config(config)), suspects(config)
    raise UnlikeOwnClass(
        f"{named} differ by {difference:.2g} of the largest (bound {EQUAL:.0e}) from those of transformers' class"
        + (f", which are {factor:.6g} times as large" if factor is not None else "")
        + ": the class does something with hidden states or logits that llava_fsdp does not do"
        + (f" (llava_fsdp applies {', '.join(keys)})" if keys else "")
        + (f"; it has to do with {' and '.join(causes)} in its config.json" if causes else "")
        + "; this language model is not supported"
    )


def suspects(config: PretrainedConfig) -> list[str]:
    """Return the keys of a language model's configuration, with their values, that make a small copy's logits differ
    from those of transformers' class: with a neutral value of such a key they are equal. Empty if no key is found
    within some seconds."""
    keys, begin = [], time.monotonic()
    for key, value in text_config(config).to_dict().items():
        if time.monotonic() - begin > SEARCH_SECONDS:
            break
        if not SUSPECTS.search(key) or isinstance(value, str | dict | list) or value is None:
            continue
        for neutral in (1.0, None, False):
            if neutral == value:
                continue
            other = copy.deepcopy(config)
            try:
                setattr(text_config(other), key, neutral)
                difference, _ = text_difference(ConfigKey(other))
            except Exception:  # transformers may raise any error for a value that a key cannot have
                continue
            if difference <= EQUAL:
                keys.append(f"{key}={value}")
                break
    return keys


@lru_cache(maxsize=64)
def text_difference(key: ConfigKey) -> tuple[float, float | None]:
    """Compare the logits of random text in a small copy of a language model between transformers' own class and this
    package's. Return the largest difference, relative to the largest logit; and the factor by which all logits differ,
    None if they differ in another way. `key` has the configuration of the model in the form of a key for the cache.

    Raises:
        ModelError: no small copy can be made.
        UnlikeOwnClass: this package's model cannot compute logits.
    """
    small = small_configuration(key.config)
    parts = parts_of(small, CLIPVisionConfig(**TOWER))
    with torch.random.fork_rng(devices=[]):
        ours = random_model(parts)
        theirs = transformers_model_with_weights_of(small, ours)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(4, parts.language.vocab_size, (TEXTS, TOKENS), generator=generator)
        with torch.no_grad(), library_errors(f"transformers cannot run a {small.model_type}"):
            expected = theirs(input_ids=ids).logits.float()
    rows = torch.arange(ids.numel())
    nothing = torch.zeros(0, dtype=torch.int64)
    with torch.no_grad(), library_errors(f"llava_fsdp cannot run a {small.model_type}", UnlikeOwnClass):
        actual = ours(ids, None, {}, nothing, rows, return_logits=True)
    expected = expected.flatten(0, 1)
    if expected.shape != actual.shape or not expected.isfinite().all():
        raise ModelError(f"a small copy of a {small.model_type} has logits of {list(expected.shape)}, or not finite")
    factor = float((expected * actual).sum() / actual.square().sum())  # the best one, by least squares
    is_factor = relative_difference(actual * factor, expected) <= EQUAL
    return relative_difference(actual, expected), factor if is_factor else None


def small_configuration(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a small copy of a language model, or of a vision-language model in which only the
    language model is shrunk; the configuration itself if it cannot be shrunk, or ModelError if it is then too large."""
    text = text_config(config)
    try:
        language = shrink(text, layers_of(text))
        check_size(language)
    except ModelError:
        check_size(text)
        return config
    if text is config:
        return language
    small: Any = copy.deepcopy(config)
    small.text_config = language
    return small


def layers_of(config: PretrainedConfig) -> int:
    """Return how many layers a small copy needs (`count_layers`): all if the first layer of some kind comes late."""
    try:
        return count_layers(on_meta(AutoModel, config))
    except NoSmallCopy:
        return getattr(config, "num_hidden_layers", 0)


def check_size(config: PretrainedConfig) -> None:
    """Raise ModelError unless a language model with this configuration can be built and is small."""
    size = sum(parameter.numel() for parameter in on_meta(AutoModel, config).parameters())
    if size > MOST_PARAMETERS:
        raise ModelError(f"it would have {size:,} parameters")


def random_model(parts: Parts) -> Architecture:
    """Return a model on the CPU with random weights in fp32. Those of the output layer are enlarged, so that logits are
    about as large as a trained model's. The folders of the model's parts are not read."""
    cfg = ModelConfig(
        name="own", language="", vision="", checkpoint=None, projector="random", projector_type="linear",
        select_layer=-2, patch_merge=PatchMerge.flat, select_feature=Feature.auto, image_start_end=False,
        random_weights=True, train=[Part.projector.value],
    )  # fmt: skip
    model = build_llava(parts, cfg, torch.float32)
    values = random_values(model)
    head = values.get("lm_head.weight")
    if head is not None:
        values["lm_head.weight"] = Drawn(head.name, head.shape, DrawRule(Rule.NORMAL, LOGITS * head.rule.scale), 0)
    return load_copy(model, values, torch.float32)


def build(config: PretrainedConfig) -> Any:
    """Build transformers' own class of a model on the CPU. In a vision-language model, all but the language model and
    the output layer stays on the meta device, because text alone does not need it."""
    config_copy = copy.deepcopy(config)
    text = text_config(config_copy)
    text._attn_implementation = attention_of_transformers(text)  # ours may be written there
    if not is_vision_language_model(config):
        causal: Any = AutoModelForCausalLM
        return causal.from_config(config_copy, dtype=torch.float32, trust_remote_code=False)
    theirs: Any = on_meta(AutoModelForImageTextToText, config_copy)
    head = theirs.get_output_embeddings()
    head.to_empty(device="cpu")
    place = place_of(theirs, text).removesuffix(".")
    theirs.set_submodule(place, AutoModel.from_config(text, dtype=torch.float32, trust_remote_code=False))
    return theirs


def transformers_model_with_weights_of(config: PretrainedConfig, ours: Architecture) -> Any:
    """Build transformers' own class of a language or vision-language model on the CPU, with the weights of `ours`.

    Raises:
        UnlikeOwnClass: the class or `ours` has a parameter that the other lacks.
        ModelError: transformers cannot build the model.
    """
    with library_errors(f"transformers cannot build a {config.model_type} model"):
        theirs = build(config)
    values = dict(ours.named_parameters(remove_duplicate=False))
    copied = set()
    with torch.no_grad():
        for prefix, our_prefix in names_of_parts(theirs).items():
            for name, parameter in theirs.named_parameters(remove_duplicate=False):
                if name.startswith(prefix):
                    mine = our_prefix + name.removeprefix(prefix)
                    if mine not in values:
                        raise UnlikeOwnClass(
                            f"transformers' {type(theirs).__name__} has {name}, which llava_fsdp does not train or "
                            "keep: this kind of model is not supported yet"
                        )
                    parameter.copy_(values[mine])
                    copied.add(mine)
    not_copied = {name for name in values if name.startswith(("language_model.", "lm_head."))} - copied
    if not_copied:
        raise UnlikeOwnClass(f"transformers' {type(theirs).__name__} has no {min(not_copied)}, which is trained here")
    return theirs.eval()
