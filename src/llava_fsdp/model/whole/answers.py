"""Let the class of a whole model in transformers generate answers with the modules of the model in training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from llava_fsdp.model.logit_change import without_change
from llava_fsdp.model.weights.conversions import whole_model_of
from llava_fsdp.model.whole.structure import replace_modules

Choose = Callable[[torch.Tensor], torch.Tensor]
"""Chooses the next token of each row, int64 [rows], from logits, float32 [rows, vocabulary]."""
Push = Callable[[torch.Tensor], bool]
"""Takes the next token of each row, int64 [rows]. Returns whether to generate another one."""


@dataclass(frozen=True)
class Generation:
    """How to generate the tokens that follow prompts: each is pushed, until `push` returns False or `most` are
    generated. `mask`: bool [rows, length], False at padding."""

    mask: torch.Tensor
    most: int
    choose: Choose
    push: Push


def class_around(config: PretrainedConfig, model: nn.Module) -> Any:
    """Return a model of transformers' class (`config`) that shares another model's modules, and can generate answers.

    Args:
        model: holds the modules under the names of the class. Its output layer returns the logits as the class makes
            them, so that the class must not change them again.
    """
    made: Any = whole_model_of(config)
    # the output layer already applies the class's factor and cap of logits
    text = made.config.get_text_config()
    for key, value in without_change(text).items():
        setattr(text, key, value)
    replace_modules(made, model)
    made.generation_config = GenerationConfig()  # the folder's may draw tokens, or search for an answer
    return made.eval()


class Chosen(LogitsProcessor):
    """Leaves only the chosen token of each row possible."""

    def __init__(self, choose: Choose):
        self.choose = choose

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self.choose(scores.float())
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


class Pushed(StoppingCriteria):
    """Gives the newest token of each row to `push`, and ends all rows of the batch together when it returns False."""

    def __init__(self, push: Push):
        self.push = push

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        goes_on = self.push(input_ids[:, -1])
        return torch.full((len(input_ids),), not goes_on, device=input_ids.device)


@torch.no_grad()
def generate(model: Any, prompts: torch.Tensor, images: Mapping[str, torch.Tensor], generation: Generation) -> None:
    """Generate the tokens that follow prompts, and hand each to `generation.push` as soon as it is chosen.

    Args:
        model: the result of `class_around`, one of transformers' models.
        prompts: token ids, int64 [rows, length], padded on the left.
        images: what the processor made of the prompts' images, with the types of tokens. The class numbers the
            positions of tokens itself.
        generation: the attention mask, the maximum number of tokens (`most`), and two functions: `choose` chooses
            tokens by their scores; `push` gets each row's newest token, and ends the generation by returning False.
    """
    known = inspect.signature(model.forward).parameters.keys() - {"position_ids"}
    model.generate(
        input_ids=prompts,
        attention_mask=generation.mask.long(),
        max_new_tokens=generation.most,
        do_sample=False,
        logits_processor=LogitsProcessorList([Chosen(generation.choose)]),
        stopping_criteria=StoppingCriteriaList([Pushed(generation.push)]),
        **{name: value for name, value in images.items() if name in known},
    )
