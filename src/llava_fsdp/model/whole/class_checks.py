"""Compare what a class of transformers does before and behind its language model with what `Whole` does there. The code
of the class runs with the model's own configuration, and with stand-ins for the parts that are large."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.whole.structure import DividedClass, decoder_of, language_of
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors

TOKENS, VOCABULARY = 3, 7
LARGE = 50.0
"""Standard deviation of the tried logits, which any cap would change."""


class Outputs(tuple):
    """What a model returns to the model that contains it: the last hidden states. All else is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


class StandIn(nn.Module):
    """Stands for a language model, or for a model without output layer. It returns given hidden states, or else the
    embeddings that it gets, and keeps the positions that it is called with."""

    def __init__(self, config: PretrainedConfig, states: torch.Tensor | None = None):
        """Make a stand-in for a language model that returns `states`; None: it returns the embeddings that it gets."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(VOCABULARY, config.hidden_size)
        self.states = states
        self.seen: torch.Tensor | None = None

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self, *_: Any, inputs_embeds: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **__: Any
    ) -> Outputs:
        """Return, in place of a language model, the given hidden states or else the embeddings. Keep `position_ids`."""
        self.seen = position_ids
        return Outputs((inputs_embeds if self.states is None else self.states,))


def check_logits(divided: DividedClass, logit_change: LogitChange) -> None:
    """Raise ModelError if the class of a model in transformers makes other logits from the last hidden states than the
    output layer with `logit_change` does, or cannot be run for this. The class gets a few random hidden states, and
    random weights of a small output layer.

    Args:
        divided: the model, divided into its output layer and the module that makes the hidden states; on the meta
            device. Its modules are replaced, so that it cannot be used afterwards.
        logit_change: the factor and the cap by which logits are made from the output of the output layer.
    """
    model = divided.whole
    what = f"a {type(model).__name__}, model_type={model.config.model_type}"
    try:
        with torch.no_grad(), torch.device("cpu"):
            theirs, ours = logits_of(divided, logit_change)
    except Exception as error:
        raise ModelError(f"{what} is not supported: its class makes no logits of hidden states ({error})") from error
    if theirs.shape != ours.shape or not torch.allclose(theirs.float(), ours, rtol=1e-5, atol=1e-5):
        raise ModelError(
            f"{what} is not supported: with the values in its config.json, its class makes other logits than its "
            "output layer gives, so that a training would not be of that model"
        )


def logits_of(divided: DividedClass, logit_change: LogitChange) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two kinds of logits of the same random hidden states: as the class makes them, and as the output layer
    with `logit_change` (a factor and a cap) does. In the class, a stand-in that returns these hidden states takes the
    place of the language model, and a small random output layer that of its own. Raises ModelError if a class whose
    output layer is an identity returns others than the hidden states of its language model."""
    model: Any = divided.whole
    config = model.config.get_text_config()
    width = config.hidden_size
    dice = torch.Generator().manual_seed(0)
    head = nn.Linear(width, VOCABULARY, bias=False)
    head.weight = nn.Parameter(torch.randn((VOCABULARY, width), generator=dice) * LARGE * width**-0.5)
    states = torch.randn((1, TOKENS, width), generator=dice)
    ids = torch.zeros((1, TOKENS), dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    stand_in = StandIn(config, states)
    # The output layer is inside of the language model: `base_of` has put an identity in its place.
    if divided.module is model:
        replace_module(model, decoder_of(model), stand_in)
        if not torch.equal(model(**inputs).logits, states):
            raise ModelError("it changes the hidden states of its language model")
    else:
        model.set_submodule(divided.prefix.removesuffix("."), stand_in)
    model.set_submodule(divided.output, head)
    return model(**inputs).logits, logit_change.apply(head(states).float())


def replace_module(model: nn.Module, inner: nn.Module, stand_in: nn.Module) -> None:
    model.set_submodule(next(name for name, own in model.named_modules() if own is inner), stand_in)


def check_positions(divided: DividedClass) -> None:
    """Raise ModelError if the class of a model in transformers does not number the tokens of a text from 0. PaliGemma's
    begins with 1. The positions are those that a stand-in for its language model gets. Replaces the language model in
    `divided` (output layer, and module that makes the hidden states; on meta)."""
    model, base = divided.whole, divided.module
    language = language_of(base)
    with torch.device("cpu"):
        stand_in = StandIn(language.config)
        ids = torch.ones((1, TOKENS), dtype=torch.int64)
        replace_module(base, language, stand_in)
        with (
            torch.no_grad(),
            library_errors(f"{type(model).__name__} fails with a text without an image, without weights"),
        ):
            base.eval()(input_ids=ids, attention_mask=ids, use_cache=False)
    seen = stand_in.seen
    if seen is not None and bool((seen.reshape(-1, TOKENS) != torch.arange(TOKENS, device=seen.device)).any()):
        raise ModelError(
            f"a {type(model).__name__}, model_type={model.config.model_type} is not supported: it numbers the tokens "
            f"of a text {seen.flatten().tolist()}, not from 0"
        )
