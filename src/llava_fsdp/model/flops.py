"""What a forward and a backward pass cost, from a model's shapes."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from llava_fsdp.config import Part
from llava_fsdp.model.attention import head_size
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.quantization import weight_shape


class Flops(NamedTuple):
    """FLOPs of training on one of each; a multiplication and an addition are two."""

    position: float
    """A position in the blocks of the language model, without what it attends to."""
    pair: float
    """A sample's attention is this many times its length squared; causal, so that half of the square counts."""
    label: float
    """A label in the output layer, which runs for labels alone."""
    tile: float
    """A tile of an image in tower and projector."""

    def of(self, positions: float, pairs: float, labels: float, tiles: float) -> float:
        """FLOPs of samples that hold so much together.

        Args:
            pairs: the sum of the squares of the samples' lengths.
        """
        return self.position * positions + self.pair * pairs + self.label * labels + self.tile * tiles


def count_flops(model: Llava, activation_checkpointing: bool, compiled: bool = False) -> Flops:
    """A weight costs 2 forward, 2 for the gradient of its input and 2 for its own where it trains, 2 to run again.

    With adapters those are the ones that train. What DoRA makes of whole weights once a micro-batch is not counted, and
    the gradient of a part's own input is, which a part of adapters has no need of where nothing before it trains.

    The gradient always goes back through the whole language model, because the projector lies before it. All of a
    mixture's experts are counted. What runs again is a block without its last product, whose result nothing needs; in
    fp16 the logits do so whether blocks do or not (`model/loss.py`).

    Args:
        compiled: the language model's blocks are: one that runs again does so by its forward graph, to the end.
    """
    trains = {part: part in model.cfg.train for part in Part}
    language: Any = model.language_model.config
    stack = find_blocks(model.language_model)
    weights = matrix_weights(stack)
    again = 2 * (weights - (0 if compiled else last_products(stack))) if activation_checkpointing else 0
    label = (
        4
        + 2 * model.lm_head.weight.requires_grad
        + 2 * (activation_checkpointing and model.compute_dtype is torch.float16)
    )
    width = language.num_attention_heads * head_size(language)
    return Flops(
        position=4 * weights + 2 * trained_weights(stack) + again,
        pair=(2 + 4 + 2 * activation_checkpointing) * language.num_hidden_layers * width,
        label=label * model.lm_head.weight.numel(),
        tile=tower_flops(model, trains[Part.vision], activation_checkpointing) + projector_flops(model, trains),
    )


def tower_flops(model: Llava, trains: bool, activation_checkpointing: bool) -> float:
    """Of the layers that run; a frozen tower runs forward alone. Every position attends to every other.

    Pixels have no gradient, and the product that makes positions of them, a convolution, runs once a patch.
    """
    vision, positions = model.parts.vision, model.probe.tokens
    stack = list(find_blocks(model.vision_tower))
    in_blocks, leftovers = {p for block in stack for p in block.parameters()}, set(model.probe.leftovers)
    needed = [p for n, p in model.vision_tower.named_parameters() if p not in in_blocks and n not in leftovers]
    others = sum(p.numel() for p in needed if p.ndim > 1) - rows_looked_up(model.vision_tower)
    stack = stack[: model.probe.layers]
    blocks = matrix_weights(*stack)
    patches = (vision.image_size // vision.patch_size) ** 2
    attention = 4 * len(stack) * vision.hidden_size * positions**2
    forward = 2 * positions * blocks + attention
    again = forward - 2 * positions * last_products(stack) if trains and activation_checkpointing else 0
    if not trains:
        return forward + 2 * patches * others
    own = 2 * positions * trained_weights(*stack) + 2 * patches * others * (Part.vision not in model.cfg.adapted)
    return forward + (forward + attention) + own + again + 2 * patches * others


def projector_flops(model: Llava, trains: dict[Part, bool]) -> float:
    """Its first layer's input has a gradient where the tower trains, the others' where anything before them does."""
    own, tower = trains[Part.projector], trains[Part.vision]
    layers = [2 * p.numel() for p in model.multi_modal_projector.parameters() if p.ndim > 1]
    factors = [1 + own + (tower or (own and number > 0)) for number in range(len(layers))]
    return model.image_tokens * sum(f * layer for f, layer in zip(factors, layers, strict=True))


def matrix_weights(*modules: nn.Module) -> int:
    """Weights that something is multiplied with: not norms and biases, nor rows that are looked up."""
    return sum(sum(sizes_of_matrices(module)) - rows_looked_up(module) for module in modules)


def sizes_of_matrices(module: nn.Module) -> list[int]:
    """Weights of each matrix, in the order in which they are registered; of a packed one, those that are packed."""
    return [math.prod(weight_shape(module, name)) for name, p in module.named_parameters() if p.ndim > 1]


def trained_weights(*modules: nn.Module) -> int:
    """Of them, those that have a gradient."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim > 1 and p.requires_grad)


def rows_looked_up(module: nn.Module) -> int:
    looked_up = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    return sum(weight.numel() for weight in looked_up)


def last_products(blocks: nn.ModuleList | list[nn.Module]) -> int:
    """Weights of each block's last product: the one that it registers last, as all of transformers' blocks do."""
    return sum(sizes_of_matrices(block)[-1] for block in blocks)
