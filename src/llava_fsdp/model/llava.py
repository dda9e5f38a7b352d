"""The model: a vision tower, a projector and a language model. Knows nothing of ranks."""

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig

from llava_fsdp.config import Feature, LossConfig, ModelConfig, Part, PatchMerge, Quantizer
from llava_fsdp.model.attention import (
    Continued,
    Kernel,
    Segments,
    check_full_attention,
    check_reaches_all_layers,
    padded_attention,
    register_attention,
    told,
)
from llava_fsdp.model.lora import add_adapters, check_gradients, linear_layers, trained_with_adapters
from llava_fsdp.model.loss import Each, LabelLoss, choose_loss, whole_loss
from llava_fsdp.model.pretrained import Parts
from llava_fsdp.model.projector import Projector
from llava_fsdp.model.quantization import quantize_layers
from llava_fsdp.model.sample_dropout import TokenKeys
from llava_fsdp.model.vision_tower import hidden_state, probe_tower
from llava_fsdp.runtime.safe_load import foreign


class Llava(nn.Module):
    """Picture positions are overwritten with projected tower features, then the language model runs.

    Parameter names are those of transformers' LlavaForConditionalGeneration without its leading `model.`.
    """

    def __init__(
        self,
        parts: Parts,
        cfg: ModelConfig,
        compute_dtype: torch.dtype,
        kernel: Kernel | None,
        label_loss: LabelLoss,
    ):
        super().__init__()
        self.cfg = cfg
        self.parts = parts
        self.compute_dtype = compute_dtype
        self.kernel = kernel
        self.label_loss = label_loss
        self.vision_tower = AutoModel.from_config(parts.vision, attn_implementation="sdpa", trust_remote_code=False)
        hidden = parts.language.hidden_size
        self.multi_modal_projector = Projector(cfg.projector_type, parts.vision.hidden_size, hidden)
        if cfg.patch_merge is PatchMerge.spatial_unpad:
            self.image_newline = nn.Parameter(torch.empty(hidden))
        self.attention = kernel.name if kernel is not None else padded_attention(parts.language)
        """The language model's implementation, as transformers calls it."""
        self.language_model = AutoModel.from_config(
            parts.language, attn_implementation=self.attention, trust_remote_code=False
        )
        self.language_model.config.use_cache = False
        self.lm_head = nn.Linear(hidden, parts.language.vocab_size, bias=False)
        if parts.language.tie_word_embeddings:
            self.lm_head.weight = self.language_model.get_input_embeddings().weight
        self.probe = probe_tower(self.vision_tower, parts.vision, cfg)
        self.token_keys = TokenKeys()
        self.adapted: list[str] = []
        """Modules that have adapters."""

    def forward(
        self,
        input_ids: torch.Tensor,
        segments: Segments | Continued | None,
        image_positions: torch.Tensor,
        image_rows: torch.Tensor,
        images: torch.Tensor | None,
        seeds: tuple[torch.Tensor, torch.Tensor],
        label_positions: torch.Tensor,
        label_ids: torch.Tensor | None = None,
        each: Each | None = None,
    ) -> torch.Tensor:
        """Sum of the losses of all labels, or their logits where there are no label ids.

        Args:
            input_ids: int64 [rows, length], padded on the right: causal attention keeps padding out. With segments
                int64 [1, tokens].
            segments: the samples of a packed row, None for padded rows: int64 [1, tokens] positions that begin at 0
                with every sample, int32 [samples + 1] where samples begin and the last ends, and their lengths. Of rows
                that go on behind what was read before: where they are, and what was kept.
            image_positions: int64 [positions], into the rows laid end to end.
            image_rows: int64 [positions], into the features of all tiles laid end to end; the row behind the last is
                the end of a line.
            images: float32 [tiles, 3, size, size], normalised. None: no rank has any, and the tower is left out.
            seeds: int64 [samples] and int64 [tiles], what their dropout depends on; read in training, if there is any.
            label_positions: int64 [labels], into the rows laid end to end: where each label is predicted.
            label_ids: int64 [labels].
            each: gets every label's own loss, where the loss's kernel has them.

        Returns:
            float32 scalar, or float32 [labels, vocabulary].
        """
        assert not isinstance(segments, tuple) or self.kernel is not None, (
            "a model for padded rows was given a packed one"
        )
        if self.training and self.cfg.lora.enabled and self.cfg.lora.dropout:
            assert not isinstance(segments, Continued), "answers are written in evaluation mode"
            self.token_keys.set(*seeds, input_ids.shape, segments, self.probe.positions)
        embeds = self.embedded(input_ids, image_positions, image_rows, images)
        hidden = self.language_model(inputs_embeds=embeds, **told(segments, self.attention)).last_hidden_state
        labelled = hidden.flatten(0, 1).index_select(0, label_positions)  # [labels, hidden]
        if label_ids is None:
            return self.lm_head(labelled).float()
        return self.label_loss(labelled, self.lm_head.weight, label_ids, each=each)

    def embedded(
        self,
        input_ids: torch.Tensor,
        image_positions: torch.Tensor,
        image_rows: torch.Tensor,
        images: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the language model reads, [rows, length, hidden]; the arguments are those of `forward`."""
        if images is None:
            return self.language_model.get_input_embeddings()(input_ids)
        features = self.multi_modal_projector(self.image_features(images)).flatten(0, 1)  # [tiles * tokens, hidden]
        if self.cfg.patch_merge is PatchMerge.spatial_unpad:
            features = torch.cat([features, self.image_newline[None].to(features.dtype)])
        embeds = self.language_model.get_input_embeddings()(input_ids)  # [rows, length, hidden]
        # Without a picture this is a write of nothing that still keeps the projector in the graph: every rank then
        # reduces its gradient, and embeddings require one although they are frozen.
        shown = features.index_select(0, image_rows).to(embeds.dtype)
        return embeds.flatten(0, 1).index_copy(0, image_positions, shown).view_as(embeds)

    @property
    def image_tokens(self) -> int:
        """Positions that a picture takes."""
        return self.probe.image_tokens

    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        """[tiles, image_tokens, tower width]; all pictures in one call of the tower.

        A frozen tower does not run at all without a picture. A trainable one runs one blank picture and drops it,
        so that its blocks run on every rank whatever the rank's data.
        """
        trains = Part.vision in self.cfg.train
        if not trains and not len(images):
            return images.new_zeros((0, self.image_tokens, self.parts.vision.hidden_size), dtype=self.compute_dtype)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            shown = images if len(images) else images.new_zeros((1, *images.shape[1:]))
            pixels = shown.to(self.compute_dtype)
            features = hidden_state(self.vision_tower, pixels, self.cfg.select_layer, self.probe.last_layer)
            if self.cfg.select_feature is Feature.patch:
                features = features[:, 1:]
            return features[: len(images)]

    def blocks(self) -> list[nn.ModuleList]:
        """Stacks of blocks: the language model's, and the tower's where it trains."""
        stacks = [find_stack(self.language_model)]
        if Part.vision in self.cfg.train:
            stacks.append(find_stack(self.vision_tower))
        return stacks

    @staticmethod
    def stack_of(module: nn.Module) -> nn.ModuleList:
        """The blocks of a language model or a tower."""
        return find_stack(module)

    def whole_while_frozen(self) -> list[nn.Module]:
        """The frozen tower does not run on a rank without pictures, so it must not take part in collectives."""
        return [self.vision_tower]

    def freeze(self) -> None:
        """Leave trainable the parts of `model.train`, or their adapters, without what can never receive a gradient."""
        self.requires_grad_(False)
        modules = {
            Part.projector: [self.multi_modal_projector],
            Part.language: [self.language_model, self.lm_head],
            Part.vision: [self.vision_tower],
        }
        for part in self.cfg.train:
            if part not in self.cfg.adapted:
                for module in modules[part]:
                    module.requires_grad_(True)
        for parameter in trained_with_adapters(self) if self.adapted else []:
            parameter.requires_grad_(True)
        if self.cfg.patch_merge is PatchMerge.spatial_unpad:
            self.image_newline.requires_grad_(Part.projector in self.cfg.train)
        leftovers = set(self.probe.leftovers)
        for name, parameter in self.vision_tower.named_parameters():
            if name in leftovers:
                parameter.requires_grad_(False)


def find_stack(model: nn.Module) -> nn.ModuleList:
    """The list of a transformer's layers: as long as its configuration says, whatever its name."""
    config = model.config
    assert isinstance(config, PretrainedConfig)
    layers = config.num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    assert stacks, f"{type(model).__name__} has no list of {layers} layers"
    return stacks[0]


def build_llava(
    parts: Parts,
    cfg: ModelConfig,
    compute_dtype: torch.dtype,
    kernel: Kernel | None = None,
    loss: LossConfig | None = None,
) -> Llava:
    """The model on the meta device: shapes only, and what trains.

    Args:
        kernel: attends within the samples of packed rows; None: the model takes padded rows alone.
        loss: how labels become a loss; None: from the logits of all of them at once.

    Raises:
        ConfigError: the language model cannot keep the samples of a packed row apart, `loss.kernel` cannot be had, or
            adapters or a quantised base cannot be.
    """
    if kernel is not None:
        register_attention()
        check_full_attention(parts.language)
    label_loss = whole_loss if loss is None else choose_loss(loss, compute_dtype)
    folders = sorted({str(parts.whole or parts.language_folder), str(parts.vision_folder)})
    with torch.device("meta"), foreign(f"config.json of {', '.join(folders)} describes no model that can be built"):
        model = Llava(parts, cfg, compute_dtype, kernel, label_loss)
        if kernel is not None:
            check_reaches_all_layers(model.language_model)
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
