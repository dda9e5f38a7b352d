"""What a forward and a backward pass cost, from a model's shapes."""

from typing import Any, NamedTuple

from torch import nn

from llava_fsdp.config import Part
from llava_fsdp.model.attention import head_size
from llava_fsdp.model.llava import Llava, find_stack


class Flops(NamedTuple):
    """FLOPs of training on one of each; a multiplication and an addition are two."""

    position: float
    """A position in the blocks of the language model, without what it attends to."""
    pair: float
    """A sample's attention is this many times its length squared; causal, so that half of the square counts."""
    label: float
    """A label in the output layer, which runs for labels alone."""
    tile: float
    """A tile of a picture in tower and projector."""


def count_flops(model: Llava, recompute: bool) -> Flops:
    """A weight costs 2 forward, 2 for the gradient of its input and 2 for its own where it trains, 2 to run again.

    The gradient always goes back through the whole language model, because the projector lies before it. All of a
    mixture's experts are counted.
    """
    trains = {part: part in model.cfg.train for part in Part}
    language: Any = model.language_model.config
    again = 2 * recompute
    label = (4 + 2 * trains[Part.language]) * model.lm_head.weight.numel()
    width = language.num_attention_heads * head_size(language)
    return Flops(
        position=(4 + 2 * trains[Part.language] + again) * matrix_weights(find_stack(model.language_model)),
        pair=(2 + 4 + again) * language.num_hidden_layers * width,
        label=label,
        tile=tower_flops(model, trains[Part.vision], again) + projector_flops(model, trains),
    )


def tower_flops(model: Llava, trains: bool, again: int) -> float:
    """A frozen tower runs forward alone; every position attends to every other."""
    vision = model.parts.vision
    positions = (vision.image_size // vision.patch_size) ** 2 + 1
    factor = 3 + again / 2 if trains else 1
    weights = 2 * positions * matrix_weights(find_stack(model.vision_tower))
    return factor * (weights + 4 * vision.num_hidden_layers * vision.hidden_size * positions**2)


def projector_flops(model: Llava, trains: dict[Part, bool]) -> float:
    factor = 2 + 2 * trains[Part.projector] + 2 * trains[Part.vision]
    return factor * model.image_tokens * matrix_weights(model.multi_modal_projector)


def matrix_weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.ndim > 1)
