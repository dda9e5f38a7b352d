"""Greedy answers from the model that trains, as it is sharded: every rank runs as many forward passes as any other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import DynamicCache

from llava_fsdp.errors import ConfigError
from llava_fsdp.model.attention import Continued
from llava_fsdp.model.llava import Llava


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
        logits = model(ids, Continued(positions, mask, kept), *shown, (nothing, nothing), last)  # [rows, vocabulary]
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
