"""An answer written token by token: which token comes next, keys and values that are kept, text once it is certain."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llava_fsdp.data.tokenizer import Tokenizer
from llava_fsdp.model.llava import Llava

BROKEN = "\ufffd"
"""How bytes are decoded that make no character, or none yet."""
PENDING = 8
"""Tokens that may wait for the rest of a character, which has four bytes at most."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is written."""

    max_new_tokens: int
    temperature: float = 0.0
    """0: the likeliest token, always."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this probability together are drawn from."""


def choose(logits: torch.Tensor, how: Sampling, dice: torch.Generator | None) -> torch.Tensor:
    """A token for every row.

    Args:
        logits: float32 [rows, vocabulary]
        dice: on the logits' device; None: torch's own.

    Returns:
        int64 [rows]
    """
    if how.temperature == 0:
        return logits.argmax(-1)
    shares = torch.softmax(logits / how.temperature, -1)
    if how.top_p < 1:
        shares, ids = shares.sort(-1, descending=True)
        likelier = shares.cumsum(-1) - shares  # what stands before each; the first always stays
        shares = shares.masked_fill(likelier >= how.top_p, 0)
        return ids.gather(-1, torch.multinomial(shares, 1, generator=dice))[:, 0]
    return torch.multinomial(shares, 1, generator=dice)[:, 0]


@torch.inference_mode()
def write_tokens(
    model: Llava,
    embeds: torch.Tensor,
    mask: torch.Tensor | None,
    cache: DynamicCache,
    how: Sampling,
    dice: torch.Generator | None = None,
) -> Iterator[torch.Tensor]:
    """Tokens behind a prompt, one for every row at a time; whoever takes them decides when to stop.

    When one comes the cache has everything before it, and not yet the token itself.

    Args:
        embeds: [rows, length, hidden], what the cache does not have yet.
        mask: int64 [rows, length], 0 where a row that begins later is padded; None: nowhere. With an empty cache only.

    Yields:
        int64 [rows]
    """
    past, length = cache.get_seq_length(), embeds.shape[1]
    if mask is None:
        positions = torch.arange(past, past + length, device=embeds.device)[None]
    else:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(how.max_new_tokens):
        read = model.language_model(
            inputs_embeds=embeds, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        chosen = choose(model.lm_head(read.last_hidden_state[:, -1]).float(), how, dice)
        yield chosen
        embeds = model.language_model.get_input_embeddings()(chosen)[:, None]
        positions = positions[:, -1:] + 1
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)


@dataclass
class Memory:
    """The keys and values of the conversation that was continued last, so that a turn reads what is new alone."""

    cache: DynamicCache | None = None
    held: list[int] = field(default_factory=list)
    """What stands at each position of the cache: a token, or below 0 a position of a picture, by a number that no other
    picture has."""

    def begin(self, model: Llava, wanted: list[int]) -> tuple[DynamicCache, int]:
        """The cache with as much of `wanted` as it has, and how many positions these are: never all."""
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.held, wanted[:-1], strict=False))
        common = sum(1 for _ in pairs)
        spare = len(self.held) - common
        cache = self.cache
        if cache is None or not common or not self.is_whole(cache) or (spare and not can_be_cut(cache)):
            self.cache, self.held = DynamicCache(config=model.language_model.config), []
            return self.cache, 0
        if spare:
            cache.crop(-spare)
        self.held = self.held[:common]
        return cache, common

    def is_whole(self, cache: DynamicCache) -> bool:
        """Whether every layer has every position: a pass that was interrupted leaves some behind."""
        return all(isinstance(own, DynamicLayer) and own.get_seq_length() == len(self.held) for own in cache.layers)


def can_be_cut(cache: DynamicCache) -> bool:
    """Whether positions can be taken off its end: a layer with a window, or a state, has lost what came before."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def stops_of(tokenizer: Tokenizer, stop: str, ends: int | list[int] | None) -> frozenset[int]:
    """Ids that end an answer: a model's ends of a sequence, and a template's where it is one token.

    Args:
        stop: the template's, as text.
        ends: as configurations have them.
    """
    own = {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    last = tokenizer.encode(stop)
    return frozenset(own | ({last[-1].id} if len(last) == 1 else set()))


class AnswerText:
    """Text of tokens as they come. What is given out is final: no half character, nothing of a stop text, no space
    around the whole; the pieces together are the answer."""

    def __init__(self, tokenizer: Tokenizer, stop: str, stops: frozenset[int]):
        """
        Args:
            stop: text that ends an answer, over however many tokens.
            stops: ids that end an answer.
        """
        self.tokenizer = tokenizer
        self.stop = stop
        self.stops = stops
        self.ids: list[int] = []
        self.ended = False
        self._window = 0  # tokens from here on are decoded again: some decode otherwise at the beginning of a text
        self._decoded = 0  # tokens whose text has been taken
        self._held = ""
        self._has_begun = False

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        if self.ended:
            return ""
        if token in self.stops:
            self.ended = True
            return self.close()
        self.ids.append(token)
        return self._release(self._decode(is_last=False))

    def close(self) -> str:
        """What was still held back when no token follows."""
        text = self._release(self._decode(is_last=True)) + self._held.rstrip()
        self._held, self.ended = "", True
        return text if self._has_begun else text.strip()

    def _decode(self, is_last: bool) -> str:
        before = self.tokenizer.decode(self.ids[self._window : self._decoded])
        text = self.tokenizer.decode(self.ids[self._window :])
        waits = text.endswith(BROKEN) and len(self.ids) - self._decoded <= PENDING
        if len(text) <= len(before) or (waits and not is_last):
            return ""
        # at its beginning a text may lose spaces, so that the window begins with a token that has more than spaces
        if self.tokenizer.decode(self.ids[self._decoded :]).strip():
            self._window = self._decoded
        self._decoded = len(self.ids)
        return text[len(before) :]

    def _release(self, new: str) -> str:
        self._held += new
        at = self._held.find(self.stop) if self.stop else -1
        if at >= 0:
            certain, self._held, self.ended = self._held[:at].rstrip(), "", True
        else:
            longest = min(len(self.stop) - 1, len(self._held))
            begun = next((n for n in range(longest, 0, -1) if self.stop.startswith(self._held[-n:])), 0)
            certain = self._held[: len(self._held) - begun].rstrip()
            self._held = self._held[len(certain) :]
        if not self._has_begun:
            certain = certain.lstrip()
            self._has_begun = bool(certain)
        return certain
