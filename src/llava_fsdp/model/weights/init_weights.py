"""Initialise parameters and buffers that are in no file: random weights, which depend only on the seed and the
parameter's name, and buffers that transformers computes."""

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from llava_fsdp.model.weights.quantization import QuantizedLinear, weight_shape
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.seeds import derive


class Rule(Enum):
    """Kinds of random or constant values with which parameters are initialised."""

    ONES = "ones"
    ZEROS = "zeros"
    NORMAL = "normal"
    """Normal distribution: mean 0, standard deviation `scale`."""
    UNIFORM = "uniform"
    """Uniform distribution in [-scale, scale)."""


@dataclass(frozen=True)
class DrawRule:
    """How a parameter is initialised."""

    kind: Rule
    scale: float = 0.0
    """Standard deviation of a normal, or bound of a uniform distribution."""


@dataclass(frozen=True)
class Drawn:
    """Random initial values of a parameter, which stand in for values in a file. They are generated for the whole
    parameter, on the CPU, so that they do not depend on sharding."""

    name: str
    shape: tuple[int, ...]
    rule: DrawRule
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Generate the initial values of the whole parameter, and return rows [begin, end) of dimension 0, float32."""
        generator = torch.Generator().manual_seed(derive("weight", self.seed, self.name))
        whole = torch.empty(self.shape)
        match self.rule.kind:
            case Rule.ONES:
                whole.fill_(1)
            case Rule.ZEROS:
                whole.zero_()
            case Rule.NORMAL:
                whole.normal_(0, self.rule.scale, generator=generator)
            case Rule.UNIFORM:
                whole.uniform_(-self.rule.scale, self.rule.scale, generator=generator)
        return whole[begin:end]


@dataclass(frozen=True)
class InitScale:
    """Standard deviations for the random initialisation of the language model, its output layer or the vision tower."""

    embedding: float
    """Standard deviation of embeddings."""
    matrix: float
    """Standard deviation of matrices, multiplied by sqrt(fan-in)."""


# The vision tower's blocks start close to the identity, so that the features of a frozen random tower describe the
# image patches.
SCALES = {"vision_tower": InitScale(0.2, 0.3), "language_model": InitScale(0.5, 1.0), "lm_head": InitScale(0.5, 1.0)}
WHOLE = InitScale(0.2, 0.3)
"""Standard deviations for a whole model of transformers, whose weights are random in a dry run alone."""


def draw_rule(model: nn.Module, name: str) -> DrawRule:
    """Choose how the parameter `name` is initialized: weights of norms with 1, biases with 0, matrices with a standard
    deviation proportional to 1 / sqrt(fan-in), and the projector like `nn.Linear`, as in LLaVA
    (multimodal_projector/builder.py:39-44). SCALES has the scales of the vision tower, the language model and its
    output layer, and WHOLE those of a model that is trained as its class in transformers has it."""
    parent = model.get_submodule(name.rpartition(".")[0])
    shape = weight_shape(model, name)
    part = name.partition(".")[0]
    if part == "multi_modal_projector" and isinstance(parent, nn.Linear):
        return DrawRule(Rule.UNIFORM, parent.in_features**-0.5)
    if part == "image_newline":  # LLaVA llava_arch.py:83-88
        return DrawRule(Rule.NORMAL, shape[0] ** -0.5)
    if name.endswith("bias"):
        return DrawRule(Rule.ZEROS)
    if "Norm" in type(parent).__name__:
        return DrawRule(Rule.ONES)
    scale = SCALES.get(part, WHOLE)
    if isinstance(parent, nn.Embedding) or len(shape) == 1:
        return DrawRule(Rule.NORMAL, scale.embedding)
    return DrawRule(Rule.NORMAL, scale.matrix * max(math.prod(shape[1:]), 1) ** -0.5)


def computed_buffers(model: nn.Module, stored: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the buffers of a meta-device model that transformers computes (rotary frequencies, position ids), on the
    CPU, by name. Each module that has such buffers must be inside of one of transformers' models.

    These buffers are in no file, and are uninitialised after a meta-device model is materialised. transformers computes
    them in `_init_weights`, which is called here on copies of the modules that have such buffers.

    Args:
        stored: names of buffers that are in files, and are left out.
    """
    buffers: dict[str, torch.Tensor] = {}
    models: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            models[path] = module
        buffer_names = {f"{path}.{name}".lstrip("."): name for name, _ in module.named_buffers(recurse=False)}
        names = [name for whole_name, name in buffer_names.items() if whole_name not in stored]
        if not names or isinstance(module, QuantizedLinear):  # buffers of quantized layers are set with the weight
            continue
        above = [outer for outer in models if not outer or f"{path}.".startswith(f"{outer}.")]
        assert above, f"{path} has buffers that nothing computes"
        values = recompute_buffers(models[max(above, key=len)], module, names)
        buffers |= {f"{path}.{name}".lstrip("."): value for name, value in values.items()}
    return buffers


@torch.no_grad()
def recompute_buffers(part: PreTrainedModel, module: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """Compute the named buffers of a meta-device module with the `_init_weights` of `part`, the nearest of
    transformers' models that contains it, on the CPU. This is done twice, from different initial values, to prove that
    `_init_weights` sets all of them. Raises ModelError if it does not."""
    results = []
    for filling in (1, 2):
        twin = copy_alone(module).to_empty(device="cpu")
        for name in names:
            twin.get_buffer(name).fill_(filling)
        part._init_weights(twin)
        results.append({name: twin.get_buffer(name) for name in names})
    for name in names:
        if not torch.equal(results[0][name], results[1][name]):
            raise ModelError(
                f"a model of type {part.config.model_type} is not supported yet: its {type(module).__name__} has a "
                f"buffer, {name}, that no file holds and that transformers computes only while it builds the model"
            )
    return results[0]


def copy_alone(module: nn.Module) -> Any:
    """Copy a module with those of its submodules that have no submodules themselves: `_init_weights` may look at them,
    and the others may be large. In the copy the others are None."""
    children = dict(module._modules)
    for name, child in children.items():
        if child is not None and any(True for _ in child.children()):
            module._modules[name] = None
    try:
        return copy.deepcopy(module)
    finally:
        module._modules.update(children)


def restore_buffers(model: nn.Module, buffers: dict[str, torch.Tensor], clean_name: Callable[[str], str] = str) -> None:
    """Copy buffers into a model that was materialised from the meta device, in which they are uninitialised.

    Args:
        buffers: values of all buffers of the model except those of quantized layers, by name.
        clean_name: removes what was added to the names of modules after the buffers were computed.
    """
    values_left = dict(buffers)
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            for name, buffer in module.named_buffers(recurse=False):
                buffer.copy_(values_left.pop(clean_name(f"{path}.{name}")))
    assert not values_left, f"buffers that the model does not have: {sorted(values_left)}"
