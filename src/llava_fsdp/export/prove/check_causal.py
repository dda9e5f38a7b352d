"""Check with small copies of a language model that no token depends on later ones or on other rows, and whether it
depends on padding in front."""

import copy
import inspect
from functools import lru_cache
from typing import Any

import torch
from transformers import MODEL_MAPPING, PretrainedConfig

from llava_fsdp.export.prove.small_copy import NoSmallCopy, count_layers, scale, shrink
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.build import meta_language, why_not_packed
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.packed_attention.attention import attention_of_transformers
from llava_fsdp.model.parts import Parts
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

TOKENS = 12
PADDING = 1031
"""Number of padding tokens that are tried in front of a prompt: more than a block of the keys that sparse attention
chooses among."""
SAME = 1e-4
"""Largest accepted change of a token's hidden state, relative to the largest value."""


def check_causal(model: Architecture) -> None:
    """Check with a small copy of the language model, which has random weights, that a token's hidden state depends on
    no later token and on no other row. A model that sees later tokens is shown the tokens that it is trained to
    predict, and sees the padding of padded rows. Only rank 0 calls this. Without a small copy nothing is checked.

    Raises:
        ModelError: a hidden state depends on a later token or another row. The message names the keys that cause it.
    """
    language = model.parts.language
    try:
        small = shrink(language, count_layers(model.language))
        seen = what_is_seen(ConfigKey(small))
    except NoSmallCopy as error:  # `compare_language` warns of it
        log().debug("whether a %s sees later tokens is not tried: %s", language.model_type, error)
        return
    if seen is None:
        return
    keys = ", ".join(causes(small))
    raise ModelError(
        f"model.language: what a {language.model_type} with this configuration computes of a token depends on {seen}"
        + (f", because of {keys} in its config.json" if keys else "")
        + ": it cannot be trained to predict the next token of each sample; give a causal language model"
    )


def causes(small: PretrainedConfig) -> list[str]:
    """Return, as `key=value`, the keys of a small copy's configuration whose default value alone would make the
    language model causal."""
    keys = []
    defaults = type(small)().to_dict()
    for key, value in small.to_dict().items():
        if not isinstance(value, bool | int | float | str) or defaults.get(key) == value or key not in defaults:
            continue
        other = copy.deepcopy(small)
        try:
            setattr(other, key, defaults[key])
            seen = what_is_seen(ConfigKey(other))
        except Exception:  # transformers may raise any error for a value that does not fit the other ones
            continue
        if seen is None:  # no token sees a later one, or another row
            keys.append(f"{key}={value}")
    return keys


@lru_cache(maxsize=64)
@torch.random.fork_rng(devices=[])  # transformers draws random numbers while it builds a model, on this rank alone
@torch.no_grad()
def what_is_seen(key: ConfigKey) -> str | None:
    """Return in words what a token of a small language model with this configuration sees that it must not see; None if
    there is nothing. Raises NoSmallCopy if transformers cannot build or run the model.

    A token sees later tokens if a hidden state changes with one, or if a layer says that it is not causal: some of
    transformers' attention implementations ignore that. It sees other rows if a hidden state changes with one."""
    config: Any = key.config
    with library_errors(f"transformers cannot run a small copy of a {config.model_type}", NoSmallCopy):
        dice = torch.Generator().manual_seed(0)
        model = random_language(MODEL_MAPPING[type(config)], config, dice)
        embeds = torch.randn((3, TOKENS, config.hidden_size), generator=dice)
        embeds[1, : TOKENS - 1] = embeds[0, : TOKENS - 1]  # these two rows differ in the last token alone
        alone, other, beside = (
            model(inputs_embeds=rows, use_cache=False).last_hidden_state[0]
            for rows in (embeds[:1], embeds[1:2], embeds[[0, 2]])
        )

    def changed(hidden: torch.Tensor, tokens: int) -> bool:
        return not float((alone - hidden)[:tokens].abs().max() / alone.abs().max()) <= SAME

    if changed(other, TOKENS - 1) or any(getattr(module, "is_causal", True) is False for module in model.modules()):
        return "later tokens"
    return "other rows of its micro-batch" if changed(beside, TOKENS) else None


def answers_alone(parts: Parts) -> bool:
    """Return whether a model must answer each prompt alone. In a batch, shorter prompts have padding in front, which
    changes what some models compute: MiniMax-M3's attention chooses blocks of keys by their positions in the row.

    If rows of the model can be packed, its layers attend by their masks, which exclude padding. Any other model is
    tried with a small copy of its language model. If there is none, it answers each prompt alone.
    """
    if why_not_packed(parts) is None:
        return False
    kind = parts.language.model_type
    try:
        language = meta_language(parts)
        changes = padding_changes(type(language), ConfigKey(shrink(language.config, count_layers(language))))
    except ModelError as error:
        log().info("prompts are answered one by one: a batch of a %s cannot be tried (%s)", kind, error)
        return True
    if changes:
        log().info("prompts are answered one by one: padding in a batch would change what a %s computes", kind)
    return changes


@lru_cache(maxsize=64)
@torch.random.fork_rng(devices=[])
@torch.no_grad()
def padding_changes(kind: Any, key: ConfigKey) -> bool:
    """Return whether padding in front of a prompt changes the hidden states of its tokens in a language model with this
    class and configuration. Raises NoSmallCopy if transformers cannot build or run the model."""
    config: Any = key.config
    with library_errors(f"transformers cannot run a small copy of a {config.model_type}", NoSmallCopy):
        dice = torch.Generator().manual_seed(0)
        model = random_language(kind, config, dice)
        embeds = torch.randn((1, PADDING + TOKENS, config.hidden_size), generator=dice)
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
        mask[:, :PADDING] = 0
        # the places of a prompt's tokens are counted without padding, as by transformers' generate
        places = (mask.cumsum(1) - 1).clamp(min=0)
        rows = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": places}
        known = inspect.signature(model.forward).parameters
        alone, padded = (
            model(**{name: row[:, begin:] for name, row in rows.items() if name in known}, use_cache=False)
            for begin in (PADDING, 0)
        )
        alone, padded = (made.last_hidden_state[0, -TOKENS:] for made in (alone, padded))
    return not float((alone - padded).abs().max() / alone.abs().max()) <= SAME


def random_language(kind: Any, config: PretrainedConfig, dice: torch.Generator) -> Any:
    """Return a language model of a class of transformers with random weights in float32, for evaluation."""
    attention = attention_of_transformers(config, kind)
    model = kind._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.normal_(0, scale(parameter.shape), generator=dice)
    return model
