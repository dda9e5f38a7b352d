"""Count the FLOPs of training a model, from the shapes of its parameters."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.config import Part
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.packed_attention.attention import head_size, layers_with_window
from llava_fsdp.model.vision_tower import image_size, patch_size
from llava_fsdp.model.weights.quantization import weight_shape
from llava_fsdp.model.whole.whole import Whole


class Flops(NamedTuple):
    """FLOPs of a model's forward and backward pass, by kind of work. A multiplication with an addition counts as two. A
    label is a token whose loss is computed; a tile is one input image of the vision tower."""

    token: float
    """FLOPs per token in the language model's blocks, without attention."""
    pair: float
    """FLOPs of the language model's attention over a sample, divided by the square of the sample's length in tokens."""
    label: float
    """FLOPs per label in the output layer, which is computed only at tokens that predict a label."""
    vision: float
    """FLOPs per image tile in the vision tower and the projector; of a `Whole`, per image token."""

    def of(self, tokens: float, pairs: float, labels: float, tiles: float) -> float:
        """Return the FLOPs for a set of samples. `pairs` is the sum of the squares of their lengths in tokens."""
        return self.token * tokens + self.pair * pairs + self.label * labels + self.vision * tiles


def count_flops(model: Architecture, activation_checkpointing: bool, compiled: bool = False) -> Flops:
    """Count the FLOPs of a model's forward and backward pass: for each token, for each pair of tokens that attend (n
    times n for a sample of n tokens), for each label and for each image tile, in the fields of `Flops`. `compiled` says
    whether the language model's blocks are compiled.

    The FLOPs of a weight per token are: 2 in the forward pass, 2 for the gradient of its input, 2 for its own gradient
    if it is trained (with LoRA adapters, only the adapters' weights are), and 2 if activation checkpointing computes
    its product again. The gradient passes through the whole language model even if that is frozen, because the
    projector comes before it; if the projector is frozen too, only through the first block with trained weights and all
    later ones. In a mixture of experts, only the experts that a token is sent to are counted. Attention in a sliding
    window is counted as full attention (`pairs_in_windows` computes the difference). DoRA's work on whole weights, once
    per micro-batch, is not counted. When a block is computed again, its last matrix product is left out, because its
    output is not needed; a compiled block is computed again completely. With activation checkpointing in fp16, the
    logits are computed again too (`model/loss.py`).
    """
    language: Any = model.language.config
    stack = find_blocks(model.language)
    passed = stack[first_passed(model, Part.language) :]
    active = getattr(language, "num_experts_per_tok", None)
    weights, backward = (matrix_weights(*blocks, active=active) for blocks in (stack, passed))
    again = 2 * (backward - (0 if compiled else last_products(passed))) if activation_checkpointing else 0
    output = model.output_weight
    label = 4 + 2 * output.requires_grad + 2 * (activation_checkpointing and model.compute_dtype is torch.float16)
    width = language.num_attention_heads * head_size(language)
    # Q K^T and the product with V have 2 * width FLOPs each for two tokens that attend. These are half of the n times n
    # pairs, as attention is causal: 2 * width per pair forward, and twice as many backward.
    return Flops(
        token=2 * weights + 2 * backward + 2 * trained_weights(stack, active=active) + again,
        pair=(2 * len(stack) + (4 + 2 * activation_checkpointing) * len(passed)) * width,
        label=label * output.numel(),
        vision=tile_flops(model, activation_checkpointing),
    )


def tile_flops(model: Architecture, activation_checkpointing: bool) -> float:
    """Return the FLOPs with which the embeddings of images are computed, in the vision part and the projector: per tile
    in a `Llava`, per image token in a `Whole` (a whole model of transformers)."""
    if isinstance(model, Whole):
        return token_flops(model, activation_checkpointing)
    assert isinstance(model, Llava), "the kinds of models are these two"
    trains = {part: part in model.cfg.trained for part in Part}
    return tower_flops(model, trains[Part.vision], activation_checkpointing) + projector_flops(model, trains)


def token_flops(model: Whole, activation_checkpointing: bool) -> float:
    """Estimate the FLOPs per image token in vision towers and projector: those of the matrix products of as many
    patches as the projector joins into one token. Attention is left out, and averaged tokens are counted as one."""
    trains = {part: part in model.cfg.trained for part in Part}
    modules = {part: model.modules_of(part) for part in (Part.vision, Part.projector)}
    blocks = model.all_blocks(Part.vision)
    tower, projector = matrix_weights(*blocks), matrix_weights(*modules[Part.projector])
    passes = trains[Part.vision]  # whether the gradient passes through the tower
    of_tower = 2 * tower * (1 + passes * (1 + activation_checkpointing)) + 2 * trained_weights(*blocks)
    of_projector = 2 * projector * (1 + (passes or trains[Part.projector])) + 2 * trained_weights(
        *modules[Part.projector]
    )
    return of_tower * model.patches_per_token + of_projector


def pairs_in_windows(language: PretrainedConfig, tokens: int, pairs: int) -> float:
    """Return `pairs`, the sum of the squares of samples' lengths, without the pairs of tokens that are outside the
    language model's sliding windows, on average over its layers. `tokens` is the sum of the lengths.

    Attention is causal, so that a sample of n tokens counts as n * n, and has n * n / 2 pairs that attend. With a
    window of w tokens, at most w * n are left, counted as 2 * w * n. If lengths differ, the result is too large.
    """
    layers = layers_with_window(language)
    if not layers:
        return pairs
    in_window = min(pairs, 2 * language.sliding_window * tokens)
    return pairs - (pairs - in_window) * layers / language.num_hidden_layers


def tower_flops(model: Llava, trains: bool, activation_checkpointing: bool) -> float:
    """Count the FLOPs per tile of the vision tower's layers that run; without `trains`, where neither the tower nor its
    LoRA adapters train, only those of the forward pass.

    Every token attends to all. The pixels get no gradient. The patch embedding (a convolution) runs once per patch.
    """
    vision, tokens = model.parts.vision, model.probe.tokens
    stack = list(find_blocks(model.vision_tower))
    # leftovers: parameters that are used only after the selected layer, and so never
    in_blocks, leftovers = {p for block in stack for p in block.parameters()}, set(model.probe.leftovers)
    needed = [p for n, p in model.vision_tower.named_parameters() if p not in in_blocks and n not in leftovers]
    others = sum(p.numel() for p in needed if p.ndim > 1) - rows_looked_up(model.vision_tower)  # patch embedding
    stack = stack[: model.probe.layers]
    blocks = matrix_weights(*stack)
    patches = (image_size(vision) // patch_size(vision)) ** 2
    attention = 4 * vision.hidden_size * tokens**2
    forward = 2 * tokens * blocks + len(stack) * attention
    if not trains:
        return forward + 2 * patches * others
    passed = stack[first_passed(model, Part.vision) :]
    through = 2 * tokens * matrix_weights(*passed) + len(passed) * attention
    again = through - 2 * tokens * last_products(passed) if activation_checkpointing else 0
    # the patch embedding trains only with the whole tower, neither with some blocks nor with adapters
    whole = model.cfg.trained[Part.vision] is None and Part.vision not in model.cfg.adapted
    of_trained = 2 * tokens * trained_weights(*stack) + 2 * patches * others * whole
    # forward, gradients of inputs (of attention twice as many as forward) and weights, blocks again, patch embedding
    return forward + (through + len(passed) * attention) + of_trained + again + 2 * patches * others


def first_passed(model: Architecture, part: Part) -> int:
    """Return the index of the first block of a part through which the gradient passes; blocks before it only run
    forward. It is 0 if the whole part trains, or something before its blocks."""
    trained = model.cfg.trained  # {part: slice of its blocks that train; None: the whole part}
    before = trained.keys() & ({Part.projector, Part.vision} if part is Part.language else set())
    if before or trained.get(part) is None:
        return 0
    blocks = model.used_blocks(part)
    return next(number for number, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters()))


def projector_flops(model: Llava, trains: dict[Part, bool]) -> float:
    """Count the projector's FLOPs per tile. `trains`: for each part of the model whether it trains. The gradient of a
    layer's input is computed if anything before the layer trains."""
    trains_projector, trains_tower = trains[Part.projector], trains[Part.vision]
    layers = [2 * p.numel() for p in model.multi_modal_projector.parameters() if p.ndim > 1]
    has_norm = model.cfg.shuffle_factor > 1  # before the first layer
    factors = [
        1 + trains_projector + (trains_tower or (trains_projector and (has_norm or number > 0)))
        for number in range(len(layers))
    ]
    return model.image_tokens * sum(f * layer for f, layer in zip(factors, layers, strict=True))


def matrix_weights(*modules: nn.Module, active: int | None = None) -> int:
    """Return the number of weights used in matrix products: all except norms, biases and embeddings. `active` is the
    number of experts that a token is sent to; None: all experts are counted."""
    return sum(sum(s for _, s in matrices(module, active)) - rows_looked_up(module) for module in modules)


def matrices(module: nn.Module, active: int | None = None) -> list[tuple[nn.Parameter, int]]:
    """Return each matrix parameter of a module, in the order of registration, and the number of its weights that one
    token is multiplied with. For a quantized matrix this is the number before quantization.

    The experts of a mixture are one parameter, [experts, rows, columns]. `active` is the number of experts that a token
    is sent to; None: all are counted.
    """
    sizes = []
    for name, parameter in module.named_parameters():
        shape = weight_shape(module, name)
        if parameter.ndim == 3 and active is not None:
            shape = (min(active, shape[0]), *shape[1:])
        if parameter.ndim > 1 and not name.endswith("bias"):
            sizes.append((parameter, math.prod(shape)))
    return sizes


def trained_weights(*modules: nn.Module, active: int | None = None) -> int:
    """Return the number of trained weights in the matrices of modules. `active` is the number of experts that a token
    is sent to; None: all experts are counted."""
    return sum(size for module in modules for p, size in matrices(module, active) if p.requires_grad)


def rows_looked_up(module: nn.Module) -> int:
    """Return the number of weights in a module's embeddings, whose rows are looked up and not multiplied."""
    looked_up = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    return sum(weight.numel() for weight in looked_up)


def last_products(blocks: nn.ModuleList | list[nn.Module]) -> int:
    """Return the number of weights in the last matrix product of each block, which is that of the matrix registered
    last, summed over the blocks. Blocks with a mixture of experts are not counted, because the output of their last
    product is needed for the router's gradient."""
    of_blocks = [matrices(block) for block in blocks]
    return sum(of_block[-1][1] for of_block in of_blocks if all(parameter.ndim < 3 for parameter, _ in of_block))
