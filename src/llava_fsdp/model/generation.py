"""Generate answers token by token, with a key-value cache that is kept from one turn of a conversation to the next."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from llava_fsdp.model.architecture import Architecture, ImageInputs
from llava_fsdp.model.packed_attention.attention import CachedRows
from llava_fsdp.model.whole.answers import Generation, Push
from llava_fsdp.model.whole.whole import Whole
from llava_fsdp.runtime.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Settings for generating an answer: maximum number of new tokens, temperature and top-p."""

    max_new_tokens: int
    temperature: float = 0.0
    """Temperature of the softmax; 0: always choose the likeliest token."""
    top_p: float = 1.0
    """Nucleus sampling: draw from the smallest set of likeliest tokens whose probabilities sum to at least this
    number."""


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> torch.Tensor:
    """Choose the next token of every row of a batch, int64 [rows], from the logits, float32 [rows, vocabulary]. The
    generator is on the logits' device; None: torch's default generator."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    shares = torch.softmax(logits / sampling.temperature, -1)
    if sampling.top_p < 1:
        shares, ids = shares.sort(-1, descending=True)
        likelier = shares.cumsum(-1) - shares  # probability of all likelier tokens; 0 for the first, which is kept
        shares = shares.masked_fill(likelier >= sampling.top_p, 0)
        return ids.gather(-1, torch.multinomial(shares, 1, generator=generator))[:, 0]
    return torch.multinomial(shares, 1, generator=generator)[:, 0]


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts, without the tokens that are in the cache already."""

    ids: torch.Tensor
    """int64 [rows, length], padded on the left."""
    mask: torch.Tensor
    """bool [rows, tokens in the cache + length]: False at padding."""
    images: ImageInputs
    """The images of the tokens in `ids`."""


def write_tokens(
    model: Callable[..., torch.Tensor],
    prompt: Prompt,
    cache: DynamicCache,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Iterator[torch.Tensor]:
    """Generate the tokens that follow a prompt: yield the next token of all rows of a batch, int64 [rows], until the
    caller stops iterating or `sampling.max_new_tokens` are generated.

    When a token is yielded, the cache contains all tokens before it, but not yet the token itself. With FSDP every
    forward pass is a collective, so that all ranks must take equally many tokens.

    Args:
        model: a model in evaluation mode, without gradients, or a callable with the same arguments and results.
        cache: key-value cache of earlier tokens, which is extended.
        generator: random generator on the model's device; None: torch's default generator.
    """
    ids, mask, images = prompt.ids, prompt.mask, prompt.images
    rows, length = ids.shape
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -length:]
    # index of each row's last token in the flattened rows: there the logits are computed, as for labels in training
    last = torch.arange(1, rows + 1, device=ids.device) * length - 1
    empty = ids.new_zeros(0)  # no dropout seeds
    for _ in range(sampling.max_new_tokens):
        cached = CachedRows(positions, mask, cache)
        logits = model(ids, cached, images, empty, last, return_logits=True)  # [rows, vocabulary]
        chosen = choose(logits, sampling, generator)
        yield chosen
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        images = {}
        last = torch.arange(rows, device=ids.device)


def write_answers(
    model: Callable[..., torch.Tensor],
    language: PretrainedConfig,
    prompt: Prompt,
    sampling: Sampling,
    push: Push,
    generator: torch.Generator | None = None,
) -> None:
    """Generate the tokens that follow a batch of prompts. A whole model of transformers (`Whole`) is run by its class.

    Args:
        model: a model in evaluation mode, without gradients, or a callable with the same arguments and results.
        language: configuration of the language model.
        push: is called with the next token of all rows, int64 [rows], until it returns False or
            `sampling.max_new_tokens` are generated.
        generator: random generator on the model's device; None: torch's default generator.
    """
    if isinstance(model, Whole):
        next_token = partial(choose, sampling=sampling, generator=generator)
        generation = Generation(prompt.mask, sampling.max_new_tokens, next_token, push)
        empty = prompt.ids.new_zeros(0)  # no dropout seeds and no labels
        model(prompt.ids, None, prompt.images, empty, empty, generation=generation)
        return
    for chosen in write_tokens(model, prompt, DynamicCache(config=language), sampling, generator):
        if not push(chosen):
            break


@dataclass
class PrefixCache:
    """Key-value cache of a conversation, kept between its turns, so that the model processes only new tokens."""

    cache: DynamicCache | None = None
    tokens: list[int] = field(default_factory=list)
    """Ids of the tokens in the cache. Image tokens have negative ids, which differ between images."""

    def reuse(self, model: Architecture, tokens: list[int]) -> tuple[DynamicCache, int]:
        """Crop the cache to the longest prefix that its tokens share with `tokens`, those of the conversation until
        now. Return the cache and the prefix's length in tokens.

        The prefix never includes the last token of `tokens`, because the model has to process at least one token. A
        cache that cannot be cropped or is incomplete is replaced by an empty one.
        """
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens[:-1], strict=False))
        common = sum(1 for _ in pairs)
        surplus = len(self.tokens) - common
        cache = self.cache
        if cache is None or not common or not self.is_complete(cache) or (surplus and not can_be_cropped(cache)):
            self.cache, self.tokens = DynamicCache(config=model.language.config), []
            return self.cache, 0
        if surplus:
            cache.crop(-surplus)
        self.tokens = self.tokens[:common]
        return cache, common

    def is_complete(self, cache: DynamicCache) -> bool:
        """Return whether every layer of a cache holds all tokens; after an interrupted forward pass some hold fewer."""
        return all(isinstance(own, DynamicLayer) and own.get_seq_length() == len(self.tokens) for own in cache.layers)


def can_be_cropped(cache: DynamicCache) -> bool:
    """Return whether tokens can be removed from a cache's end; with sliding windows or recurrent states they cannot."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def check_answers(model: Callable[..., torch.Tensor], language: PretrainedConfig, prompt: Prompt) -> None:
    """Check that a model can generate answers, by generating two tokens without an image. Collective.

    Args:
        model: a model in evaluation mode, without gradients, or a callable with the same arguments and results.
        prompt: a prompt without an image, on the model's device.

    Raises:
        ConfigError: the language model cannot generate with a key-value cache.
    """
    try:
        write_answers(model, language, prompt, Sampling(2), lambda _: True)
    except (TypeError, AttributeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"val.answers: {language.model_type} cannot write an answer token by token here ({error}); "
            "set val.answers=0"
        ) from error
