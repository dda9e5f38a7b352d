"""An answer written token by token: which token comes next, keys and values that are kept, text once it is certain."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llava_fsdp.model.attention import Continued
from llava_fsdp.model.llava import Llava
from llava_fsdp.runtime.errors import ConfigError


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


def write_answers(
    model: nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    shown: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    most: int,
    all_done: Callable[[list[int]], bool],
) -> None:
    """The ids that follow every row, each the likeliest; keys and values of what was read are kept.

    Args:
        model: a Llava, in evaluation mode, without gradients.
        ids: int64 [rows, length], padded on the left.
        mask: bool [rows, length]: no padding.
        shown: image_positions, image_rows and images of `Llava.forward`.
        most: tokens of an answer.
        all_done: gets the next token of every row; where it says yes, no more are written. It must say the same on all
            ranks, each of which calls it as often as the others.
    """
    assert isinstance(model, Llava)  # FSDP makes a subclass of it
    rows, length = ids.shape
    kept = DynamicCache(config=model.parts.language)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    nothing = ids.new_zeros(0)
    last = torch.arange(1, rows + 1, device=ids.device) * length - 1
    for _ in range(most):
        logits = model(
            ids, Continued(positions, mask, kept), *shown, (nothing, nothing), last, return_logits=True
        )  # [rows, vocabulary]
        chosen = logits.argmax(-1)
        if all_done(chosen.tolist()):
            return
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        shown = nothing, nothing, shown[2][:0]
        last = torch.arange(rows, device=ids.device)


def check_answers(model: nn.Module, device: torch.device, size: int) -> None:
    """Write two tokens behind nothing. A collective.

    Args:
        size: of a picture.

    Raises:
        ConfigError: the language model does not keep keys and values as answers need them.
    """
    assert isinstance(model, Llava)
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    nothing = ids.new_zeros(0)
    shown = nothing, nothing, torch.zeros((0, 3, size, size), device=device)
    kind = model.parts.language.model_type
    try:
        write_answers(model, ids, torch.ones_like(ids, dtype=torch.bool), shown, 2, lambda _: False)
    except (TypeError, AttributeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"val.answers: {kind} cannot write an answer token by token here ({error}); set val.answers=0"
        ) from error
