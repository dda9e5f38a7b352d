"""The LLaVA model: a vision tower, a projector and a language model."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from transformers import AutoModel

from llava_fsdp.config import LossConfig, ModelConfig, Part, PatchMerge, Quantizer, part_and_blocks
from llava_fsdp.model.adapters.lora import add_adapters, check_gradients, linear_layers, trained_in_adapted_parts
from llava_fsdp.model.adapters.sample_dropout import TokenKeys
from llava_fsdp.model.architecture import Architecture, ImageInputs, NamedPart
from llava_fsdp.model.blocks import find_blocks, refuse_layerdrop
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.experts import check_routers
from llava_fsdp.model.llava.own_parts import NONE, OwnParts, make_projector, own_loss
from llava_fsdp.model.llava.projector import Projector, check_can_be_shuffled
from llava_fsdp.model.loss import LabelLoss, LossCollector, OutputLayer, choose_loss, whole_loss
from llava_fsdp.model.packed_attention.attention import CachedRows, Kernel, RowSegments
from llava_fsdp.model.packed_attention.packs import (
    other_attention,
    packing_refused,
    padded_attention,
    refuse_packing,
)
from llava_fsdp.model.packed_attention.row_mask import attention_arguments, register_attention
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.vision_tower import build_vision_tower, probe_vision_config, selected_features
from llava_fsdp.model.weights.quantization import quantize_layers
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.safe_load import library_errors

PART_NAMES = {Part.language: "language model", Part.vision: "vision tower"}
"""Names in messages of the parts that have blocks."""


class Llava(Architecture):
    """A LLaVA model: a language model in which the embeddings of image tokens are projected features of a vision tower.

    Parameter names are those of transformers' LlavaForConditionalGeneration, without the leading `model.`.
    """

    language_name = "language_model"
    output_name = "lm_head"
    named_parts: ClassVar[Mapping[str, NamedPart]] = {
        "vision_tower": NamedPart("vision tower", Part.vision),
        "multi_modal_projector": NamedPart("projector", Part.projector),
        "image_newline": NamedPart("image newline"),
        "language_model": NamedPart("language model"),
        "lm_head": NamedPart("output layer"),
    }

    def __init__(
        self,
        parts: Parts,
        cfg: ModelConfig,
        compute_dtype: torch.dtype,
        kernel: Kernel | None,
        label_loss: LabelLoss,
        projector: nn.Module | None = None,
    ):
        """Build the modules, without loading weights.

        Args:
            kernel: attention of packed rows; None: rows are padded.
            label_loss: function that computes the loss of labels from the hidden states and the output layer's weight.
            projector: used instead of the projector that `cfg` describes.
        """
        super().__init__()
        self.cfg = cfg
        self.parts = parts
        self.compute_dtype = compute_dtype
        self.kernel = kernel
        self.vision_tower = build_vision_tower(parts.vision)
        hidden = parts.language.hidden_size
        features = parts.vision.hidden_size
        self.multi_modal_projector = projector or Projector(cfg.projector_type, features, hidden, cfg.shuffle_factor)
        if cfg.patch_merge is PatchMerge.spatial_unpad:
            self.image_newline = nn.Parameter(torch.empty(hidden))
        self.attention = kernel.name if kernel is not None else padded_attention(parts.language)
        self.language_model = AutoModel.from_config(
            parts.language, attn_implementation=self.attention, trust_remote_code=False
        )
        self.language_model.config.use_cache = False
        self.language_model.config.return_dict = True  # a folder's false would make its outputs tuples
        self.lm_head = OutputLayer(hidden, parts.language.vocab_size, label_loss, parts.logit_change)
        if parts.language.tie_word_embeddings:
            self.lm_head.weight = self.language_model.get_input_embeddings().weight
        feature = parts.trained_feature or cfg.select_feature
        self.probe = probe_vision_config(ConfigKey(parts.vision), cfg.select_layer, feature)
        """Which of the vision tower's layers, tokens and parameters are used."""
        self.unused = frozenset(f"vision_tower.{name}" for name in self.probe.leftovers)
        check_can_be_shuffled(cfg, parts.vision, self.probe.features)
        self.is_first = self.is_last = True  # whether this is the first and the last pipeline stage
        self.token_keys = TokenKeys()
        """Hashes of the current micro-batch's tokens, from which the dropout masks of all layers are computed."""
        self.adapted: list[str] = []

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
        label_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the losses of all labels (tokens that the model is trained to predict), float32 scalar, or,
        with `return_logits`, the logits at the labels, float32 [labels, vocabulary]. A stage that is not the last one
        returns its last block's output, [rows, length, hidden].

        Args:
            input_ids: int64 [rows, length], padded on the right, so that causal attention ignores the padding. A packed
                row (several samples one after another) is int64 [1, tokens].
            segments: the sample boundaries of a packed row, or the input for generation; None for padded rows.
            images: empty if no rank has an image, or in a stage that is not the first one. Else by name:
                positions: int64 [image tokens]: index of each image token in the flattened rows.
                rows: int64 [image tokens]: index of each image token's feature in the concatenated features of all
                    tiles. The index after the last feature selects the learned end-of-line vector (`image_newline`).
                    For tokens that are weighted sums of four features (anyres_max): int64 [image tokens, 4].
                weights: the weights of the four features, float32 [image tokens, 4]; else empty, or absent.
                tiles: the vision tower's input images, float32 [tiles, 3, size, size], normalised.
                seeds: dropout seed of each tile, int64 [tiles]; empty or absent without dropout.
            seeds: dropout seeds of the tokens, int64 [rows, length] or broadcast to it; used in training with dropout.
            label_positions: int64 [labels]: index in the flattened rows of the token at which each label is predicted.
            label_ids: int64 [labels]; not used with `return_logits`.
            collector: collects the loss of every single label, if the loss function computes these losses.
            hidden: output of the stage before, [rows, length, hidden]; None for the first stage.
            label_weights: factor of each label's loss in units of 1 / FULL_WEIGHT, int32 [labels]; None: all are 1.
        """
        assert (hidden is None) == self.is_first, "only the first stage begins with token ids"
        is_packed = segments is not None and not isinstance(segments, CachedRows)
        assert not is_packed or self.kernel is not None, "packed rows need an attention kernel"
        if self.training and self.cfg.lora.enabled and self.cfg.lora.dropout:
            assert not isinstance(segments, CachedRows), "answers are generated in evaluation mode"
            tile_seeds = images.get("seeds", seeds.new_zeros(0))
            self.token_keys.set(seeds, tile_seeds, input_ids.shape, segments, self.probe.tokens)
        embeds = self.embedded(input_ids, images) if hidden is None else hidden
        arguments = attention_arguments(embeds, segments, self.attention)
        output: torch.Tensor = self.language_model(inputs_embeds=embeds, **arguments).last_hidden_state
        if not self.is_last:
            return output
        labelled = output.flatten(0, 1).index_select(0, label_positions)  # [labels, hidden]
        if return_logits:
            return self.lm_head(labelled)
        assert label_ids is not None
        return self.lm_head(labelled, label_ids, collector=collector, weights=label_weights)

    def embedded(self, input_ids: torch.Tensor, images: ImageInputs) -> torch.Tensor:
        """Return the language model's input embeddings, [rows, length, hidden], of `input_ids`, int64 [rows, length].
        Image tokens get projected features of the `tiles` in `images`: token n, at index positions[n] of the flattened
        rows, gets feature rows[n] or, with `weights`, a weighted sum. `images` is empty if no rank has an image."""
        if not images:
            return self.language_model.get_input_embeddings()(input_ids)
        tiles, weights = images["tiles"], images.get("weights")
        features = self.multi_modal_projector(self.image_features(tiles)).flatten(0, 1)  # [tiles * tokens, hidden]
        if self.cfg.patch_merge is PatchMerge.spatial_unpad:
            # The parameter is copied, because the gradient of an input of `cat` is a view. As the parameter's gradient,
            # this view would keep the gradients of all features in memory until the end of the step.
            newline = self.image_newline[None].index_select(0, torch.zeros(1, dtype=torch.int64, device=tiles.device))
            features = torch.cat([features, newline.to(features.dtype)])
        embeds = self.language_model.get_input_embeddings()(input_ids)  # [rows, length, hidden]
        # In a micro-batch without an image no values are copied, but the projector is part of the autograd graph, so
        # that every rank reduces its gradient, and the embeddings require a gradient even if they are frozen.
        image_embeds = take_features(features, images["rows"], weights).to(embeds.dtype)
        return embeds.flatten(0, 1).index_copy(0, images["positions"], image_embeds).view_as(embeds)

    @property
    def image_size(self) -> int:
        """Width and height of the vision tower's input images, in pixels."""
        return self.parts.image_size

    @property
    def image_tokens(self) -> int:
        """Number of tokens that each input image (tile) of the vision tower has in the language model."""
        return self.probe.features // self.cfg.shuffle_factor**2

    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the vision tower's features, [tiles, features, vision width], of `images`, [tiles, 3, size, size].

        If the micro-batch has no tile, a frozen vision tower does not run, and a trainable one runs on a blank tile
        whose features are discarded, so that its blocks run on every rank.
        """
        trains = Part.vision in self.cfg.trained
        if not trains and not len(images):
            return images.new_zeros((0, self.probe.features, self.parts.vision.hidden_size), dtype=self.compute_dtype)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            pixels = (images if len(images) else images.new_zeros((1, *images.shape[1:]))).to(self.compute_dtype)
            return selected_features(self.vision_tower, pixels, self.cfg.select_layer, self.probe)[: len(images)]

    def blocks(self) -> list[nn.ModuleList]:
        """Return the lists of transformer blocks of the language model and, if it trains, of the vision tower."""
        stacks = [find_blocks(self.language_model)]
        if Part.vision in self.cfg.trained and self.vision_tower is not None:  # only the first pipeline stage has it
            stacks.append(find_blocks(self.vision_tower))
        return stacks

    def all_blocks(self, part: Part) -> list[nn.Module]:
        """Return the transformer blocks of a part."""
        roots = {Part.language: [self.language_model], Part.vision: [self.vision_tower], Part.projector: []}[part]
        return [block for root in roots for block in find_blocks(root)]

    def used_blocks(self, part: Part) -> list[nn.Module]:
        """Return the transformer blocks of a part, without the vision tower's blocks after `model.select_layer`."""
        if part is Part.language:
            return list(find_blocks(self.language_model))
        return list(find_blocks(self.vision_tower))[: self.probe.layers]

    def modules_of(self, part: Part) -> list[nn.Module]:
        """Return the modules that make up a part."""
        return {
            Part.projector: [self.multi_modal_projector],
            Part.language: [self.language_model, self.lm_head],
            Part.vision: [self.vision_tower],
        }[part]

    def check_trained_blocks(self) -> None:
        """Raise ConfigError if `model.train` names blocks that the model does not have."""
        for text in self.cfg.train:
            part, blocks = part_and_blocks(text)
            if blocks is None:
                continue
            count = len(self.used_blocks(part))
            ends = [count + end if end < 0 else end for end in (blocks.start, blocks.stop) if end is not None]
            if not all(0 <= end <= count for end in ends) or not range(count)[blocks]:
                of_all = len(find_blocks(self.vision_tower)) if part is Part.vision else count
                unused = f", of {of_all}, because of model.select_layer={self.cfg.select_layer}" * (of_all > count)
                raise ConfigError(
                    f"model.train: {text} is not among the blocks of the {PART_NAMES[part]}, of which {count} run, "
                    f"numbers 0 to {count - 1}{unused}; the last is {part.value}:-1, and all are {part.value}:-{count}"
                )

    def output_layer(self) -> nn.Module | None:
        """Return the output layer; None in a stage without it, and if its weight is that of the embeddings."""
        tied = self.parts.language.tie_word_embeddings
        return None if tied else self.lm_head

    def whole_while_frozen(self) -> list[nn.Module]:
        """Return the modules that FSDP does not shard while they are frozen: the vision tower. While it is frozen it
        does not run on ranks without images, so it must not need collectives."""
        return [self.vision_tower] if self.vision_tower is not None else []

    def remove_inputs(self) -> None:
        self._modules |= {"vision_tower": None, "multi_modal_projector": None}
        self._parameters |= dict.fromkeys(self._parameters)

    def empty_image_inputs(self, tiles: int, image_tokens: int, blends: bool) -> ImageInputs:
        """Return the argument `images` of `forward` for as many tiles and image tokens, with zeros in all tensors.
        `blends`: whether image tokens are weighted sums of four features."""
        rows, size = torch.zeros(image_tokens, dtype=torch.int64), self.image_size
        found = {
            "positions": rows,
            "rows": torch.zeros((image_tokens, 4), dtype=torch.int64) if blends else rows.clone(),
            "tiles": torch.zeros((tiles, 3, size, size)),
            "seeds": torch.zeros(tiles, dtype=torch.int64),
        }
        return found | ({"weights": torch.zeros((image_tokens, 4))} if blends else {})

    def with_vocabulary(self) -> set[str]:
        """Return the names of the weights of the embeddings and the output layer, which have a row for each token."""
        embeddings = self.language_model.get_input_embeddings().weight
        names = {name for name, weight in self.language_model.named_parameters() if weight is embeddings}
        return {"lm_head.weight", *(f"language_model.{name}" for name in names)}

    def freeze(self) -> None:
        """Freeze all parameters except those that train: those of the parts in `model.train`, or of their blocks that
        it names; in a part with LoRA adapters, only the adapters and the biases that `model.lora.bias` selects.
        Parameters that can never get a gradient are frozen too."""
        self.requires_grad_(False)
        for part, blocks in self.cfg.trained.items():
            if part not in self.cfg.adapted:
                for module in self.modules_of(part) if blocks is None else self.used_blocks(part)[blocks]:
                    module.requires_grad_(True)
        for parameter in trained_in_adapted_parts(self) if self.adapted else []:
            parameter.requires_grad_(True)
        if self.cfg.patch_merge is PatchMerge.spatial_unpad:
            self.image_newline.requires_grad_(Part.projector in self.cfg.trained)
        for name, parameter in self.vision_tower.named_parameters(prefix="vision_tower"):
            if name in self.unused or not parameter.numel():  # DINOv3 without registers has an empty parameter for them
                parameter.requires_grad_(False)


def take_features(features: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the image feature of each image token, [image tokens, hidden], from the features of all tiles, [tiles *
    tokens, hidden]. `rows` has the index of each token's feature, int64 [image tokens]. With `weights`, float32 [image
    tokens, 4], it has four of them for each token, [image tokens, 4], whose weighted sum is computed in float32."""
    if weights is None or not len(weights):
        return features.index_select(0, rows)
    pairs = zip(rows.unbind(1), weights.unbind(1), strict=True)
    terms = [features.index_select(0, index) * weight[:, None] for index, weight in pairs]
    return sum(terms[1:], start=terms[0])


def build_llava(
    parts: Parts,
    cfg: ModelConfig,
    compute_dtype: torch.dtype,
    kernel: Kernel | None = None,
    loss: LossConfig | None = None,
    own_parts: OwnParts = NONE,
) -> Llava:
    """Build a LLaVA model on the meta device, with the configured LoRA adapters and quantized layers, and freeze what
    does not train.

    Args:
        compute_dtype: dtype of the matrix products in the forward pass.
        kernel: attention implementation for packed rows; None: the model accepts only padded rows.
        loss: None: the loss is computed from the logits of all labels at once.
        own_parts: loss function and projector that a Python program gives in place of those of the configuration.

    Raises:
        ConfigError: the language model cannot keep the samples of a packed row apart, or does not support adapters or
            quantization, or has no experts to balance (`model.balance_loss`); or `loss.kernel` is not supported.
        ModelError: transformers cannot build the language model or the vision tower, or one of them is not supported.
    """
    # the language model must keep the samples of a packed row apart: by its configuration here, and when it runs below
    if kernel is not None:
        register_attention()
        refuse_packing(other_attention(parts.language))
    label_loss = whole_loss if loss is None else choose_loss(loss, compute_dtype, parts.logit_change)
    if own_parts.loss is not None and loss is not None:
        label_loss = own_loss(own_parts.loss, loss)
    projector = None
    if own_parts.projector is not None:
        features, hidden = parts.vision.hidden_size, parts.language.hidden_size
        projector = make_projector(own_parts.projector, features, hidden, cfg.shuffle_factor)
    folders = sorted({str(parts.whole or parts.language_folder), str(parts.vision_folder)})
    with (
        torch.device("meta"),
        library_errors(f"config.json of {', '.join(folders)} describes no model that can be built"),
    ):
        model = Llava(parts, cfg, compute_dtype, kernel, label_loss, projector)
        if kernel is not None:
            refuse_packing(packing_refused(parts.language))
    for part in (parts.language, parts.vision):
        refuse_layerdrop(part)
    check_routers(model.language_model, cfg.balance_loss)
    linears = linear_layers(model, Part.language)
    if cfg.lora.enabled:
        with torch.device("meta"):
            model.adapted = add_adapters(model, cfg.lora, model.token_keys)
    model.freeze()
    if model.adapted:
        check_gradients(model)
    if cfg.quantize.mode is not Quantizer.none:
        quantize_layers(model, linears, cfg.quantize, compute_dtype)
    return model
