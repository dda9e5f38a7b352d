"""`Architecture`: what the trainer knows of a model. Each kind of model is a class derived from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.config import (
    ActivationCheckpointing,
    AspectRatio,
    Config,
    LinearKind,
    ModelConfig,
    Parity,
    Part,
    Pixels,
    Quantizer,
)
from llava_fsdp.model.adapters.sample_dropout import TokenKeys
from llava_fsdp.model.experts import find_experts
from llava_fsdp.model.loss import LabelLoss
from llava_fsdp.model.packed_attention.attention import Kernel
from llava_fsdp.model.parts import Parts
from llava_fsdp.runtime.errors import ConfigError

Positions = Callable[[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], torch.Tensor]
"""Function (token ids of a sample, int64 [length]; types of its tokens by name, int64 [length]; inputs of the vision
part for its images) -> position ids, int64 [axes, length]. It can be pickled."""
ImageInputs = Mapping[str, torch.Tensor]
"""What a model needs of the images of a micro-batch, by names that only its kind knows; empty: there are no images."""


class Ability(StrEnum):
    """What a configuration may ask of a model and some kinds of models cannot do; the value is the key that asks."""

    pipeline = "parallel.pipeline"
    tensor = "parallel.tensor"
    context = "parallel.context"
    low_precision = "precision.linear"
    quantization = "model.quantize.mode"
    compilation = "compile"
    checkpointing = "activation_checkpointing.mode"
    experts = "parallel.expert"
    balance = "model.balance_loss"
    labels = "labels"
    aspect_ratio = "data.image_aspect_ratio"
    image_delimiters = "model.image_start_end"
    template = "data.template"
    pixels = "data.pixels"


@dataclass(frozen=True)
class NamedPart:
    """A part of a model as users see it."""

    title: str
    """Name of the part in messages."""
    rate: Part | None = None
    """The part of `model.train` that sets its learning rate: `optim.projector_lr` or `optim.vision_lr`, if that is set.
    None: always `optim.lr`."""


class Architecture(nn.Module, ABC):
    """A vision-language model: a language model in which some embeddings are made from images.

    It is a base class and no typing.Protocol, because a type cannot say "an nn.Module with these methods". FSDP gives a
    model a subclass of its class, so `isinstance` works for sharded models too.
    """

    cfg: ModelConfig
    parts: Parts
    """The folders from which the model is read, and the configurations in them."""
    compute_dtype: torch.dtype
    kernel: Kernel | None
    """The attention kernel of packed rows; None: rows are padded."""
    attention: str
    """Name of the language model's attention implementation in transformers' AttentionInterface."""
    is_first: bool
    is_last: bool
    """Whether this is the first and the last stage of the model; both, if the model is not divided."""
    token_keys: TokenKeys
    adapted: list[str]
    """Names of the modules that have adapters."""
    language_name: str
    """Name of the module that is the language model, without its output layer."""
    output_name: str
    """Name of the output layer, the module that makes logits and losses."""
    named_parts: Mapping[str, NamedPart]
    """The parts of the model by the beginnings of their parameters' names, in the order in which they are shown. A
    parameter belongs to the first part that its name fits (`part_name`)."""
    attends_by_mask: ClassVar[bool] = False
    """Whether the language model gets the boundaries of samples in its attention mask (`row_mask.py`), and the model
    the inputs of whole rows. False: boundaries are arguments, and inputs are those of the positions that a rank has."""
    unused: frozenset[str]
    """Names of parameters on which nothing that the model computes depends."""

    @property
    def language(self) -> Any:
        """The language model of transformers, without its output layer."""
        return self.get_submodule(self.language_name)

    @property
    def language_config(self) -> PretrainedConfig:
        return self.parts.language

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Width and height of a tile, an input image of the vision part, in pixels; 0: no tiles of one size."""

    @property
    @abstractmethod
    def image_tokens(self) -> int:
        """Number of tokens that each tile has in the language model; 0 without tiles of one size."""

    @property
    def processor_folder(self) -> Path | None:
        """The folder of the processor that prepares texts and images; None: images are cut into tiles here."""
        return None

    @property
    def needs_blank(self) -> bool:
        """Whether a micro-batch without images needs a blank one, so that all ranks run the same modules."""
        return False

    @property
    def positions(self) -> Positions | None:
        """The function that numbers the tokens of a sample; None: they are numbered one after the other."""
        return None

    @property
    def output(self) -> Any:
        """The output layer; None in a stage without it."""
        return attrgetter(self.output_name)(self)

    @property
    def output_weight(self) -> nn.Parameter:
        """The weight of the output layer, [vocabulary, hidden]."""
        return self.output.weight

    @property
    def is_tied(self) -> bool:
        """Whether the output layer and the input embeddings share one weight at present. A model that was built with a
        shared weight keeps it only if the weights of both layers are replaced together."""
        return self.output_weight is self.language.get_input_embeddings().weight

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the model on a micro-batch. The arguments are those of `Llava.forward`, with image inputs of this kind of
        model. Return the sum of the losses of all labels, float32 scalar; or, with `return_logits`, the logits at the
        labels, float32 [labels, vocabulary]; or, in a stage that is not the last one, the hidden states."""

    @abstractmethod
    def blocks(self) -> list[nn.ModuleList]:
        """Return the lists of transformer blocks through which gradients may pass, the language model's first."""

    @abstractmethod
    def all_blocks(self, part: Part) -> list[nn.Module]:
        """Return the transformer blocks of a part, empty for the projector."""

    @abstractmethod
    def used_blocks(self, part: Part) -> list[nn.Module]:
        """Return the transformer blocks of a part that run."""

    @abstractmethod
    def freeze(self) -> None:
        """Freeze all parameters except those that train. `unused` ones never do."""

    @abstractmethod
    def modules_of(self, part: Part) -> list[nn.Module]:
        """Return the modules that make up a part, without the modules inside of them."""

    @abstractmethod
    def check_trained_blocks(self) -> None:
        """Raise ConfigError if `model.train` names parts or blocks that the model does not have."""

    @abstractmethod
    def output_layer(self) -> nn.Module | None:
        """Return the output layer; None in a stage without it, and if its weight is that of the embeddings."""

    @abstractmethod
    def whole_while_frozen(self) -> list[nn.Module]:
        """Return the modules that FSDP does not shard while they are frozen: they then do not run on ranks without
        images, so their forward pass must not need collectives."""

    @abstractmethod
    def empty_image_inputs(self, tiles: int, image_tokens: int, blends: bool) -> ImageInputs:
        """Return image inputs of zeros, on the current default device, to count memory on `meta`: for so many tiles
        (input images of the vision tower) and image tokens, which with `blends` are weighted sums of four features."""

    @abstractmethod
    def with_vocabulary(self) -> set[str]:
        """Return the names of the weights that have a row for each token."""

    def experts(self) -> list[Any]:
        """Return the modules that hold the experts of the language model's layers."""
        return list(find_experts(self.language).values())

    def use_attention(self, name: str) -> None:
        """Let the language model attend by another implementation of transformers' AttentionInterface."""
        self.attention = name
        self.language.set_attn_implementation(name)

    def set_label_loss(self, loss: LabelLoss) -> None:
        """Replace the loss function of the output layer. Do nothing in a stage without output layer."""
        if self.output is not None:
            self.output.label_loss = loss

    def tie(self) -> None:
        """Make the weight of the output layer that of the embeddings."""
        self.output.weight = self.language.get_input_embeddings().weight

    def replace_language(self, language: nn.Module) -> None:
        self.set_submodule(self.language_name, language)

    @abstractmethod
    def remove_inputs(self) -> None:
        """Remove, in place, the modules and parameters that make the embeddings of images: in a stage behind the
        first."""

    def remove_output(self) -> None:
        """Remove the output layer, in place: in a stage before the last."""
        self._modules[self.output_name] = None

    def why_not(self, ability: Ability) -> str | None:
        """Return the reason why this kind of model cannot do what a key asks; None if it can."""
        return None


def part_name(name: str, parts: Iterable[str]) -> str | None:
    """Return the part that the parameter `name` belongs to: the first of `parts` that its name begins with; None if it
    belongs to no part. `parts` are the keys of `Architecture.named_parts`."""
    return next((part for part in parts if name == part or name.startswith(f"{part}.")), None)


def check_abilities(model: Architecture, cfg: Config) -> None:
    """Raise ConfigError if the configuration asks for something that this kind of model cannot do."""
    mode = cfg.activation_checkpointing.mode
    # ability -> (the configuration's value, whether it needs this ability)
    asked = {
        Ability.pipeline: (cfg.parallel.pipeline, cfg.parallel.pipeline > 1),
        Ability.tensor: (cfg.parallel.tensor, cfg.parallel.tensor > 1),
        Ability.context: (cfg.parallel.context, cfg.parallel.num_context > 1),
        Ability.low_precision: (cfg.precision.linear.value, cfg.precision.linear is not LinearKind.same),
        Ability.quantization: (cfg.model.quantize.mode.value, cfg.model.quantize.mode is not Quantizer.none),
        Ability.compilation: (cfg.compile, cfg.compile is True),
        Ability.checkpointing: (mode.value, mode in (ActivationCheckpointing.dynamic, ActivationCheckpointing.budget)),
        Ability.experts: (cfg.parallel.expert, cfg.parallel.expert > 1),
        Ability.balance: (cfg.model.balance_loss, cfg.model.balance_loss > 0),
        Ability.labels: (cfg.labels.value, cfg.labels is not Parity.exact),
        Ability.aspect_ratio: (cfg.data.image_aspect_ratio.value, cfg.data.image_aspect_ratio is not AspectRatio.pad),
        Ability.image_delimiters: (cfg.model.image_start_end, cfg.model.image_start_end),
        Ability.template: (cfg.data.template, cfg.data.names_template),
        Ability.pixels: (cfg.data.pixels.value, cfg.data.pixels is not Pixels.exact),
    }
    for ability, (value, is_asked) in asked.items():
        if is_asked and (reason := model.why_not(ability)) is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"{ability.value}={shown}: {reason}")
