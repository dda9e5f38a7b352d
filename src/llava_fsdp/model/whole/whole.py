"""Whole models of transformers: any vision-language model that its AutoModelForImageTextToText builds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from llava_fsdp.config import ModelConfig, Part, Quantizer, part_and_blocks
from llava_fsdp.model.adapters.lora import add_adapters, linear_layers, trained_in_adapted_parts
from llava_fsdp.model.adapters.sample_dropout import TokenKeys
from llava_fsdp.model.architecture import Ability, Architecture, ImageInputs, NamedPart, Positions, part_name
from llava_fsdp.model.blocks import find_blocks, refuse_layerdrop
from llava_fsdp.model.experts import check_routers, check_widths
from llava_fsdp.model.loss import LabelLoss, LossCollector, OutputLayer
from llava_fsdp.model.packed_attention.attention import (
    CachedRows,
    Kernel,
    RowSegments,
    attention_of_transformers,
)
from llava_fsdp.model.packed_attention.packs import refuse_packing
from llava_fsdp.model.packed_attention.row_mask import BoundaryMask, register_attention
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.weights.conversions import whole_model_of
from llava_fsdp.model.weights.quantization import quantize_layers
from llava_fsdp.model.whole.answers import Generation, class_around, generate
from llava_fsdp.model.whole.class_checks import check_logits, check_positions
from llava_fsdp.model.whole.packs import why_whole_not_packed
from llava_fsdp.model.whole.patches import multiply_patches
from llava_fsdp.model.whole.positions import positions_of
from llava_fsdp.model.whole.structure import base_of, find_structure, is_inside, name_modules, other_inputs
from llava_fsdp.runtime.errors import ConfigError, ModelError

TYPES = "token_type_ids"
"""Ending of the names of a processor's outputs that say of each token what it stands for."""
RANKS, OWN, UNTRIED = (
    "ranks divide only its weights (sharding=zero3)",
    "its processor decides that",
    "that has not been tried",
)
REFUSED = {
    Ability.pipeline: RANKS,
    Ability.labels: "its processor makes the tokens; set labels=exact",
    Ability.aspect_ratio: f"{OWN}; set it to pad, the default",
    Ability.image_delimiters: f"{OWN}; set it to false",
    Ability.template: "with its own chat template; set data.template=auto",
    Ability.pixels: "its processor gets the pixels of the image file; set data.pixels=exact",
}
"""What contradicts a value other than the default, by the key; for other keys that are refused it is UNTRIED."""
SUPPORTED = (
    Ability.quantization, Ability.compilation, Ability.experts, Ability.balance, Ability.tensor, Ability.context,
)  # fmt: skip
"""Keys whose values other than the default are supported."""


class Whole(Architecture):
    """A vision-language model as its class in transformers has it. Parameter names are those of the class.

    Its processor makes the inputs. So there are no tiles, and no code for a single kind of model.
    """

    attends_by_mask = True

    def __init__(
        self, parts: Parts, cfg: ModelConfig, compute_dtype: torch.dtype, kernel: Kernel | None, label_loss: LabelLoss
    ):
        """Build the modules on the meta device, with the names that they have in the model's class.

        Args:
            parts: folders and configurations of the model; `class_config` is the configuration of its class.
            cfg: the section `model` of the configuration.
            compute_dtype: dtype of the matrix products in the forward pass.
            kernel: attention of packed rows; None: rows are padded.
            label_loss: function that computes the sum of the losses of all labels of a micro-batch.

        Raises:
            ModelError: transformers cannot build the model, or its structure is not supported.
        """
        super().__init__()
        assert parts.class_config is not None
        tried = base_of(whole_model_of(parts.class_config))  # the class, divided into its model and its output layer
        check_positions(tried)
        check_logits(tried, parts.logit_change)
        # the checks have replaced modules, so the class is built again
        made: Any = whole_model_of(parts.class_config)
        multiply_patches(made)  # 3D convolutions over single patches become matrix products
        names = {name for name, _ in made.named_parameters(remove_duplicate=False)}
        self.cfg = cfg
        self.parts = parts
        self.compute_dtype = compute_dtype
        self.kernel = kernel
        rows, width = made.get_output_embeddings().weight.shape
        base = base_of(made)
        self.held: tuple[Any] = (base.module,)
        """The module that makes the hidden states, in a tuple: its parameters are named as in the class, once."""
        self.base.config.use_cache = False
        self.base.config.return_dict = True  # a folder's false would make its outputs tuples
        self.output_name = base.output
        name_modules(made, base.output, OutputLayer(width, rows, label_loss, parts.logit_change), self)
        self.structure = find_structure(base)
        self.language_name = self.structure.language
        self.named_parts = named_parts(self)
        if parts.language.tie_word_embeddings:
            self.tie()
        other = names ^ {name for name, _ in self.named_parameters(remove_duplicate=False)}
        if other:
            raise ModelError(f"a {type(made).__name__} has parameters outside of its model and output layer: {other}")
        theirs = attention_of_transformers(parts.language, type(self.language))
        register_attention()
        self.use_attention(theirs if kernel is None else kernel.name)
        known = inspect.signature(self.base.forward).parameters
        self.types = [name for name in known if name.endswith(TYPES)]
        """Names of the token types that the model takes. They are 0 in text."""
        self.unused = frozenset()  # all parameters are used
        self.is_first = self.is_last = True  # the model is not divided into stages
        self.token_keys = TokenKeys()
        self.adapted: list[str] = []
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. Batch normalization stays in evaluation mode, with the stored statistics:
        with those of a batch, the result of a sample would depend on the others."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # each kind has inputs of its own
        self,
        input_ids: torch.Tensor,
        segments: RowSegments | CachedRows | None,
        images: ImageInputs,
        seeds: torch.Tensor,
        label_positions: torch.Tensor,
        label_ids: torch.Tensor | None = None,
        *,
        return_logits: bool = False,
        collector: LossCollector | None = None,
        hidden: torch.Tensor | None = None,
        generation: Generation | None = None,
        label_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the losses of all labels, float32 scalar; or, with `return_logits`, the logits at the
        labels, float32 [labels, vocabulary]; or, with `generation`, an empty tensor.

        Args:
            input_ids: the processor's token ids, int64 [rows, length], padded on the right. A packed row (several
                samples one after another) is int64 [1, tokens].
            segments: the sample boundaries of a packed row; None for padded rows.
            images: what the processor made of images and videos, by its own names. It also contains, if the model uses
                them, token types such as `mm_token_type_ids`, int64 [rows, length], and `position_ids`, int64 [axes,
                rows, length], of a model that numbers image tokens by rows and columns.
            seeds: dropout seeds of the tokens, int64 [rows, length] or broadcast to it; used in training with dropout.
            label_positions: int64 [labels]: index in the flattened rows of the token at which each label is predicted.
            label_ids: int64 [labels]; not used with `return_logits`.
            collector: collects the loss of every single label, if the loss function computes these losses.
            hidden: always None, as the model is not divided into stages.
            generation: how to generate the tokens that follow `input_ids`, which are then prompts, padded on the left.
                This is done in `forward`, since FSDP gathers weights for a model's forward pass.
            label_weights: factor of each label's loss in units of 1 / FULL_WEIGHT, int32 [labels]; None: all are 1.
        """
        if generation is not None:
            self.answer(input_ids, images, generation)
            return seeds.new_zeros(0)
        assert hidden is None and not isinstance(segments, CachedRows), "transformers generates answers"
        assert segments is None or self.kernel is not None, "packed rows need an attention kernel"
        if self.training and self.cfg.lora.enabled and self.cfg.lora.dropout:
            # no seeds of tiles: adapters in the vision part have no dropout
            self.token_keys.set(seeds, seeds.new_zeros(0), input_ids.shape, segments, 1)
        taken = {name: value for name, value in images.items() if not name.endswith(TYPES) or name in self.types}
        given = {name: self.cast(value) for name, value in taken.items()}
        given |= {name: torch.zeros_like(input_ids) for name in self.types if name not in given}
        positions = given.pop("position_ids", None)
        if positions is None:
            length = input_ids.shape[1]
            in_row = torch.arange(length, device=input_ids.device)[None]
            positions = in_row if segments is None else segments.position_ids
        # With a mask, transformers does not search the positions for packed samples, for which the host would wait.
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        mask = mask.long() if self.kernel is None else BoundaryMask.of(mask, segments)
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions, **given}
        with explained_dtypes(type(self.base).__name__):
            made = self.base(**inputs, use_cache=False)
        output: torch.Tensor = made.logits if hasattr(made, "logits") else made.last_hidden_state
        labelled = output.flatten(0, 1).index_select(0, label_positions)  # [labels, hidden]
        if return_logits:
            return self.output(labelled)
        assert label_ids is not None
        return self.output(labelled, label_ids, collector=collector, weights=label_weights)

    def answer(self, prompts: torch.Tensor, images: ImageInputs, generation: Generation) -> None:
        """Let transformers' class generate the tokens that follow prompts; `generation.push` gets them. Meanwhile the
        language model attends as transformers does without packed rows, and afterwards as before."""
        assert self.parts.class_config is not None
        as_class = class_around(self.parts.class_config, self)
        before = self.attention
        self.use_attention(attention_of_transformers(self.parts.language, type(self.language)))
        try:
            generate(as_class, prompts, {name: self.cast(value) for name, value in images.items()}, generation)
        finally:
            self.use_attention(before)

    @property
    def base(self) -> Any:
        """The module of transformers that makes the hidden states."""
        return self.held[0]

    def cast(self, value: torch.Tensor) -> torch.Tensor:
        """Return pixels in the dtype of the computation. Other inputs stay as they are, such as times of frames, a
        number for each video: they become positions."""
        return value.to(self.compute_dtype) if value.is_floating_point() and value.ndim > 1 else value

    @property
    def image_size(self) -> int:
        return 0

    @property
    def image_tokens(self) -> int:
        return 0

    @property
    def patches_per_token(self) -> int:
        """How many outputs of a vision tower the projector joins side by side into the input of one token: the input
        size of its first linear layer, divided by the tower's width. 1 if that is no integer."""
        projector, blocks = self.modules_of(Part.projector), self.all_blocks(Part.vision)[:1]
        inputs, widths = (
            [m.in_features for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
            for modules in (projector, blocks)
        )
        return inputs[0] // widths[0] if inputs and widths and inputs[0] % widths[0] == 0 else 1

    def stacks(self) -> list[nn.ModuleList]:
        """Return the lists of blocks of the vision towers."""
        found = [self.get_submodule(name) for name in self.structure.stacks]
        return [stack for stack in found if isinstance(stack, nn.ModuleList)]

    def blocks(self) -> list[nn.ModuleList]:
        """Return the lists of transformer blocks of the language model and, if they train, of the vision towers."""
        return [find_blocks(self.language), *(self.stacks() if Part.vision in self.cfg.trained else [])]

    def all_blocks(self, part: Part) -> list[nn.Module]:
        """Return the transformer blocks of a part. The projector has none."""
        if part is Part.language:
            return list(find_blocks(self.language))
        return [block for stack in self.stacks() for block in stack] if part is Part.vision else []

    def used_blocks(self, part: Part) -> list[nn.Module]:
        """Return the transformer blocks of a part that run: all."""
        return self.all_blocks(part)

    def modules_of(self, part: Part) -> list[nn.Module]:
        """Return the topmost modules whose parameters all belong to a part."""
        found: list[str] = []
        for name, module in self.named_modules():
            parts_inside = {self.structure.part_of(inner) for inner, _ in module.named_parameters(prefix=name)}
            if parts_inside == {part} and part_name(name, found) is None:  # not inside of one that is found already
                found.append(name)
        return [self.get_submodule(name) for name in found]

    def check_trained_blocks(self) -> None:
        """Raise ConfigError if `model.train` names parts or blocks that the model does not have."""
        kind = type(self.base).__name__
        present = {self.structure.part_of(name) for name, _ in self.named_parameters()}
        for text in self.cfg.train:
            part, blocks = part_and_blocks(text)
            if part not in present:
                raise ConfigError(f"model.train: a {kind} has no {part.value} of its own; leave {text} out")
            if blocks is None:
                continue
            count = len(self.all_blocks(part))
            ends = [count + end if end < 0 else end for end in (blocks.start, blocks.stop) if end is not None]
            if not all(0 <= end <= count for end in ends) or not range(count)[blocks]:
                raise ConfigError(
                    f"model.train: {text} is not among the {count} blocks of the {part.value} of a {kind}, numbers 0 "
                    f"to {count - 1}; the last is {part.value}:-1, and all are {part.value}:-{count}"
                )

    def output_layer(self) -> nn.Module | None:
        """Return the output layer; None if its weight is that of the embeddings."""
        return None if self.parts.language.tie_word_embeddings else self.output

    def whole_while_frozen(self) -> list[nn.Module]:
        """Return the vision towers, which do not run on ranks without images while they and the projector are
        frozen."""
        return [self.get_submodule(name) for name in self.structure.towers]

    @property
    def processor_folder(self) -> Path | None:
        return self.parts.whole

    @property
    def positions(self) -> Positions | None:
        assert self.parts.class_config is not None
        return positions_of(self.parts.class_config)

    @property
    def needs_blank(self) -> bool:
        """Whether a micro-batch without images needs a blank image: it does if parameters train that make the
        embeddings of images. Such parameters must take part in the computation on every rank."""
        return any(
            p.requires_grad and self.structure.part_of(name) is not Part.language for name, p in self.named_parameters()
        )

    def empty_image_inputs(self, tiles: int, image_tokens: int, blends: bool) -> ImageInputs:
        return {}

    def with_vocabulary(self) -> set[str]:
        """Return the names of the weights of the embeddings and the output layer, which have a row for each token."""
        embeddings = self.language.get_input_embeddings().weight
        return {f"{self.output_name}.weight", *(name for name, own in self.named_parameters() if own is embeddings)}

    def use_attention(self, name: str) -> None:
        """Let the language model attend by another implementation of transformers' AttentionInterface; the vision part
        keeps its own. Blocks that run again in the backward pass must find the same implementation."""
        self.attention = name
        for config in (self.language.config, self.base.config.get_text_config()):
            config._attn_implementation = name

    def remove_inputs(self) -> None:
        raise AssertionError("the model is not divided into stages")

    def why_not(self, ability: Ability) -> str | None:
        """Return the reason why the model cannot do what a configuration key (`ability`) asks; None if it can."""
        assert self.parts.class_config is not None
        kind, others = self.parts.class_config.model_type, other_inputs(self.language)
        # `others`: inputs of the language model that a Llama does not have, such as features of images for later layers
        if ability is Ability.tensor and others:
            return (
                f"the language model of a {kind} gets {' and '.join(others)}, which it adds between its layers, where "
                "each rank has some of the positions"
            )
        # `parallel.context` divides tokens among ranks; features of images can be divided if a mask says whose they are
        if ability is Ability.context and others and not any("mask" in name for name in others):
            return f"the language model of a {kind} gets {' and '.join(others)}, which cannot be divided among ranks"
        if ability in SUPPORTED:
            return None
        return f"a {kind} is trained as its class in transformers has it, and {REFUSED.get(ability, UNTRIED)}"

    def freeze(self) -> None:
        """Freeze all parameters except those that train: those of the parts in `model.train`, or of their blocks that
        it names; in a part with LoRA adapters, only the adapters and the biases that `model.lora.bias` selects.
        Parameters that can never get a gradient are frozen too."""
        whole = {part for part, blocks in self.cfg.trained.items() if blocks is None and part not in self.cfg.adapted}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.structure.part_of(name) in whole)
        for part, blocks in self.cfg.trained.items():
            if blocks is not None:
                for block in self.all_blocks(part)[blocks]:
                    block.requires_grad_(True)
        for parameter in trained_in_adapted_parts(self) if self.adapted else []:
            parameter.requires_grad_(True)
        for name, parameter in self.named_parameters():
            if name in self.unused or not parameter.numel():
                parameter.requires_grad_(False)


@contextmanager
def explained_dtypes(kind: str) -> Iterator[None]:
    """Context manager in which a model runs: replace torch's error about a product of tensors of two dtypes by a
    ConfigError that says what to set. Some classes convert values to the dtype of a norm's weight, which may be kept in
    fp32."""
    try:
        yield
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        raise ConfigError(
            f"a {kind} does not compute with norms in another dtype than its other weights ({error}); set "
            "precision.norm_dtype to the value of precision.param_dtype"
        ) from error


def named_parts(model: Whole) -> Mapping[str, NamedPart]:
    """Return the parts of a model as users see them (title, and which learning rate they have), by the beginnings of
    their parameters' names: first parts inside of others, last the model's children, as what is in no other part
    belongs to the projector."""
    structure = model.structure
    found = {name: NamedPart("projector", Part.projector) for name in structure.projectors}
    found |= {name: NamedPart("vision tower", Part.vision) for name in structure.towers}
    found |= {structure.language: NamedPart("language model"), structure.output: NamedPart("output layer")}
    others = [name for name, _ in model.named_children() if not is_inside(structure.output, (name,))]
    return found | {name: NamedPart("projector", Part.projector) for name in others if name not in found}


def build_whole(
    parts: Parts, cfg: ModelConfig, compute_dtype: torch.dtype, kernel: Kernel | None, label_loss: LabelLoss
) -> Whole:
    """Build a whole model of transformers on the meta device, with the configured LoRA adapters and quantized layers,
    and freeze what does not train.

    Args:
        parts: folders and configurations of the model.
        compute_dtype: dtype of the matrix products in the forward pass.
        kernel: attention implementation for packed rows; None: the model accepts only padded rows.
        label_loss: function that computes the sum of the losses of all labels of a micro-batch.

    Raises:
        ConfigError: the model cannot keep the samples of a packed row apart, or has no layers for adapters or
            quantization.
        ModelError: transformers cannot build the model, or its structure is not supported.
    """
    assert parts.class_config is not None
    if kernel is not None:
        refuse_packing(why_whole_not_packed(parts))
    for config in (parts.class_config, parts.language, parts.vision):
        refuse_layerdrop(config)
    with torch.device("meta"):
        model = Whole(parts, cfg, compute_dtype, kernel, label_loss)
        check_widths(model.language)
        check_routers(model.language, cfg.balance_loss)
        linears = linear_layers(model, Part.language)
        if cfg.lora.enabled:
            if cfg.lora.dropout and Part.vision in cfg.adapted:
                raise ConfigError(
                    f"model.lora.dropout={cfg.lora.dropout}: adapters in the vision part of a "
                    f"{parts.class_config.model_type} have no dropout; set it to 0, or take vision out of model.train"
                )
            model.adapted = add_adapters(model, cfg.lora, model.token_keys)
    model.freeze()
    if cfg.quantize.mode is not Quantizer.none:
        quantize_layers(model, linears, cfg.quantize, compute_dtype)
    return model
