"""Let several ranks share rows in a model whose language model gets whole rows (`Architecture.attends_by_mask`).

Every rank makes the embeddings of the whole row: of its tokens and of all its images. At the call of the language model
each takes its own positions of what the call has for each token. The mask stays that of the whole row, because with
`ulysses` every rank attends to whole rows, with some of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.model.adapters.sample_dropout import TokenKeys
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.packed_attention.attention import Kernel
from llava_fsdp.model.packed_attention.row_mask import has_boundaries
from llava_fsdp.parallel.context.context_attention import Collective, ContextPlan, share_attention
from llava_fsdp.runtime.errors import ConfigError

MASK = "attention_mask"


def share_whole_rows(
    model: Architecture, kernel: Kernel, plan: ContextPlan, exchange: Collective, name: str = "llava_fsdp_context"
) -> None:
    """Make several ranks share each row of a model whose language model is called with whole rows: a hook replaces its
    inputs by those of this rank's positions. Only for a plan with `ulysses`.

    Args:
        kernel: the attention implementation for packed rows.
        plan: how the ranks share attention, and which positions of a row this rank has.
        exchange: all-to-all on [ranks, ...].
        name: name of the attention in transformers' AttentionInterface.
    """
    share_attention(model.language, kernel, plan, exchange, torch.clone, name)  # `ulysses` does not call its `gather`
    model.use_attention(name)
    model.language.register_forward_pre_hook(DivideInputs(plan.cut, model.token_keys), with_kwargs=True)


class DivideInputs:
    """Forward pre-hook of a language model that replaces its inputs by those of this rank's positions."""

    def __init__(self, cut: ContextCut, keys: TokenKeys):
        """`keys`: hashes of the tokens for dropout, which are divided too."""
        self.cut = cut
        self.keys = keys

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of the language model for this rank's positions, and divide the hashes of tokens for
        dropout (`keys`), in place. If the arguments have no packed row, they are returned unchanged."""
        if not has_boundaries(kwargs.get(MASK)):
            return args, kwargs
        tokens = kwargs["inputs_embeds"].shape[1]
        ((begin, end),) = self.cut.chunks(tokens)  # a rank has a single chunk
        if self.keys.language is not None:
            self.keys.language = self.keys.language[:, begin:end]
        return args, divided(kwargs, tokens, slice(begin, end))


def divided(inputs: Mapping[str, Any], tokens: int, own_positions: slice) -> dict[str, Any]:
    """Return the inputs of a language model at some positions of a row.

    What an input is follows from its shape and dtype. Values of each token are [1, tokens, channels]; positions and
    types of tokens are ints, [..., tokens]. Features of the image tokens are floats, [image tokens, channels], also in
    lists or dicts; an input of bools is True at these tokens, [1, tokens] or [1, tokens, channels].

    The attention mask (MASK) stays whole, because each rank computes all positions of its heads.

    Args:
        tokens: number of tokens of the row.
        own_positions: the positions.

    Raises:
        ConfigError: an input has another shape.
    """
    others = {name: value for name, value in inputs.items() if name != MASK}
    row = (1, tokens)
    masks = [v for v in others.values() if torch.is_tensor(v) and v.dtype is torch.bool and v.shape[:2] == row]
    shown = masks[0].reshape(1, tokens, -1)[0, :, 0] if masks else None  # bool [tokens]

    def part(value: Any, name: str) -> Any:
        """Return an input, or each one in a list or dict, at the positions of `own_positions`. `name` is for the
        error."""
        if isinstance(value, dict):
            return {key: part(each, name) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(part(each, name) for each in value)
        if not torch.is_tensor(value) or value.ndim == 0:
            return value
        is_feature = value.is_floating_point() and value.ndim < 3
        if value.shape[:2] == row and not is_feature:
            return value[:, own_positions]
        if value.shape[-1] == tokens and not value.is_floating_point():
            return value[..., own_positions]
        if is_feature and shown is not None and len(value) == int(shown.sum()):
            before = int(shown[: own_positions.start].sum())
            return value[before : before + int(shown[own_positions].sum())]
        raise ConfigError(
            f"parallel.context: the language model gets {name} of the shape {list(value.shape)} for a row of {tokens} "
            "tokens, which cannot be divided among ranks; set parallel.context=1"
        )

    return {**inputs, **{name: part(value, name) for name, value in others.items()}}
