"""Configuration keys of the model: its parts (language model, vision tower, projector), LoRA adapters and
quantization."""

import math
import re
from dataclasses import dataclass, field, fields, replace

from llava_fsdp.config.bounds import above_zero, at_least
from llava_fsdp.config.keys.enums import Feature, LoraBias, Part, PatchMerge, Quantizer
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Configuration keys of low-rank adapters (LoRA, arXiv 2106.09685) in the linear layers of the blocks of those
    model parts (language model, vision tower) that `model.train` selects. The layers' own weights are frozen. Defaults
    are those of the original LLaVA."""

    enabled: bool = False
    """Whether to train adapters; stage=finetune_lora sets it."""
    r: int = 128
    """Rank of the adapters."""
    alpha: float = 256
    """The adapters' output is multiplied by alpha / r, or by alpha / sqrt(r) with use_rslora."""
    dropout: float = 0.05
    """Dropout rate of an adapter's input. Which values are dropped depends on the sample, not on the number of
    ranks."""
    bias: LoraBias = LoraBias.none
    """Which biases are trained beside the adapters."""
    use_dora: bool = False
    """Whether to also train the norm of every row of a weight (DoRA, arXiv 2402.09353)."""
    use_rslora: bool = False
    """Whether to scale adapters by alpha / sqrt(r) (arXiv 2312.03732)."""
    checkpoint: str | None = None
    """Folder of an adapter to continue from; null: a new one. Its format is this project's, peft's or the original
    LLaVA's."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is not allowed, or is changed without `enabled`."""
        at_least("model.lora.r", self.r, 1)
        above_zero("model.lora.alpha", self.alpha)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.lora.dropout={self.dropout} must be at least 0 and below 1")
        changed = [key.name for key in fields(self) if getattr(self, key.name) != key.default]
        if changed and not self.enabled:
            raise ConfigError(
                f"model.lora.{changed[0]}={getattr(self, changed[0])} needs model.lora.enabled=true, "
                "which stage=finetune_lora has; to train without adapters choose stage=finetune or finetune_task"
            )

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(kw_only=True, slots=True)
class QuantizeConfig:
    """Configuration keys for quantizing the frozen language model by bitsandbytes. Computation is in
    precision.param_dtype."""

    mode: Quantizer = Quantizer.none
    """Format of the quantized weights."""
    double: bool = True
    """nf4 and fp4: whether to quantize the scales to 8 bits, too. Each block of 64 weights has one."""

    def __post_init__(self) -> None:
        if not self.double and self.mode is Quantizer.none:
            raise ConfigError("model.quantize.double=false needs model.quantize.mode=nf4 or fp4")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    name: str
    language: str
    """Folder or hub name of the language model, or a GGUF file. `package:NAME` is a folder that is part of this
    package."""
    vision: str
    """Folder or hub name of the vision tower. `package:NAME` is a folder that is part of this package."""
    checkpoint: str | None
    """A whole model to start from: a run, an export, or a folder of transformers or the original LLaVA.
    model.language and model.vision are then used only for files that it lacks, such as the config of the vision
    tower."""
    projector: str
    """Source of the projector: `random`, `auto` (the stage=pretrain run beside output_dir), or a run, folder or
    file."""
    projector_type: str
    """Type of projector: linear, mlp2x_gelu (or 3x, 4x, ...), identity or pixel_shuffle2x_mlp2x_gelu (or 4x, 8x). They
    are those of LLaVA's multimodal_projector/builder.py:33-51. A pixel shuffle (transformers' InternVL) first joins 2 x
    2 neighbouring features into one, so that an image has a quarter of the tokens."""
    select_layer: int
    """Index of the vision tower's hidden state that is used. -2 is the output of the last layer but one."""
    patch_merge: PatchMerge
    """anyres: how the tiles of an image are joined. flat: one after the other; spatial: by rows of the whole image;
    spatial_unpad: likewise without padding, with a learned vector behind each row."""
    select_feature: Feature
    """Which tokens of the vision tower are used. patch: all but the CLS token (DINOv3's registers stay); full: all;
    auto: as model.checkpoint was trained, otherwise patch for a tower with a CLS token, else full."""
    image_start_end: bool
    """Whether to put `<im_start>` and `<im_end>` around every image. It is mm_use_im_start_end of the original LLaVA.
    The tokenizer must contain both tokens, as that of a checkpoint trained with them does."""
    random_weights: bool
    """Whether to draw all weights from the seed. The folders of the language model and the vision tower then need only
    a config."""
    train: list[str]
    """Parts to train: projector, language, vision, or blocks of one (`language:-4`). language:-4 trains the last 4
    blocks of the language model alone, vision:20 those of the vision tower from number 20 on, and language:4:8 numbers
    4 to 7, as Python's slices. With lora.enabled, adapters are trained in place of whole parts, except for the
    projector, which is always trained directly."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    balance_loss: float = 0.0
    """Mixtures of experts: factor of the load-balance loss; 0: none. transformers' configurations call it
    router_aux_loss_coef."""

    @property
    def plain(self) -> "ModelConfig":
        """Copy of this model configuration without LoRA adapters and quantization."""
        return replace(self, lora=LoraConfig(), quantize=QuantizeConfig())

    @property
    def shuffle_factor(self) -> int:
        """Factor N of the projector's pixel shuffle, which joins N x N vision features into one; 1 without it."""
        found = re.match(r"pixel_shuffle(\d)x_", self.projector_type)
        return int(found[1]) if found else 1

    @property
    def trained(self) -> dict[Part, slice | None]:
        """{part of the model that trains: which of its blocks do (language model, vision tower); None: all of it}."""
        return dict(part_and_blocks(text, f"model.train[{place}]") for place, text in enumerate(self.train))

    @property
    def adapted(self) -> list[Part]:
        """Parts of the model (language model, vision tower) that get LoRA adapters."""
        return [part for part in self.trained if part is not Part.projector] if self.lora.enabled else []

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        train, trained = self.train, self.trained
        if self.lora.enabled and not self.adapted:
            raise ConfigError(
                f"model.lora.enabled=true puts adapters into language or vision, and model.train={train} names neither"
            )
        if not 0 <= self.balance_loss < math.inf:
            raise ConfigError(f"model.balance_loss={self.balance_loss} must be a finite number that is at least 0")
        mode = self.quantize.mode
        if mode is not Quantizer.none and Part.language in trained and not self.lora.enabled:
            raise ConfigError(
                f"model.quantize.mode={mode.value} keeps the language model's weights in a few bits, which cannot be "
                f"trained, and model.train={train} trains them; choose stage=finetune_qlora, or "
                "model.lora.enabled=true"
            )
        if mode is not Quantizer.none and self.lora.use_dora:
            raise ConfigError(
                f"model.quantize.mode={mode.value} with model.lora.use_dora=true would unpack every weight at every "
                "step for its rows' lengths; set one of the two back"
            )
        kinds = r"linear|identity|mlp[1-9]\d*x_gelu|pixel_shuffle[248]x_mlp2x_gelu"
        if not re.fullmatch(kinds, self.projector_type):
            raise ConfigError(
                f"model.projector_type={self.projector_type} is not a projector; "
                "choose linear, mlp2x_gelu (any number of layers: mlp3x_gelu, ...), pixel_shuffle2x_mlp2x_gelu (or 4x, "
                "8x) or identity"
            )
        if not self.train:
            raise ConfigError("model.train=[] trains nothing; name parts of [projector, language, vision]")
        if len(trained) != len(train):
            raise ConfigError(f"model.train={train} names a part twice")
        if self.adapted and any(blocks is not None for blocks in trained.values()):
            raise ConfigError(
                f"model.lora.enabled=true puts adapters into all blocks of a part, and model.train={train} names some; "
                "name whole parts, or choose stage=finetune, which trains the blocks' own weights"
            )


BLOCKS = re.compile(r"(language|vision):(-?\d+)?(?:(:)(-?\d+)?)?")
"""Value in `model.train` that names blocks of a part: PART:FIRST or PART:FIRST:END."""


def part_and_blocks(text: str, key: str = "model.train") -> tuple[Part, slice | None]:
    """Return the part of the model that a value in `model.train` names, and which of its blocks; None: all of it.

    Args:
        key: the key with the value's place in the list, for the message.

    Raises:
        ConfigError: the value names no part.
    """
    if text in Part.__members__:
        return Part[text], None
    found = BLOCKS.fullmatch(text)
    if found is None or (found[2] is None and found[4] is None):
        raise ConfigError(
            f"{key}={text} must be one of [projector, language, vision], or blocks of one: language:-4 (the last 4 "
            "blocks), vision:20 (from number 20 on, counted from 0), language:4:8 (numbers 4 to 7)"
        )
    return Part[found[1]], slice(*(None if end is None else int(end) for end in (found[2], found[4])))
