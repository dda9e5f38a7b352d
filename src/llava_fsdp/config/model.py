"""Keys of the model: its parts, adapters and quantization."""

import math
import re
from dataclasses import dataclass, field, fields, replace

from llava_fsdp.config.checks import at_least
from llava_fsdp.config.enums import Feature, LoraBias, Part, PatchMerge, Quantizer
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) in the linear layers of the blocks of language and vision, where
    `model.train` names them; their own weights stay frozen then. The defaults are the original's recipe."""

    enabled: bool = False
    r: int = 128
    alpha: float = 256
    """The adapter's output is multiplied with alpha / r, or alpha / sqrt(r) with use_rslora."""
    dropout: float = 0.05
    """Of an adapter's input; which values it takes depends on the sample alone, not on the number of ranks."""
    bias: LoraBias = LoraBias.none
    use_dora: bool = False
    """Weight-decomposed adapters (arXiv 2402.09353): a trained length for every row of a weight."""
    use_rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""
    checkpoint: str | None = None
    """A folder with an adapter to go on from, ours, peft's or the original's; null: a new one, which changes nothing
    before its first step."""

    def __post_init__(self) -> None:
        at_least("model.lora.r", self.r, 1)
        if not 0 < self.alpha < float("inf"):
            raise ConfigError(f"model.lora.alpha={self.alpha} must be a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.lora.dropout={self.dropout} must be at least 0 and below 1")
        given = [own.name for own in fields(self) if getattr(self, own.name) != own.default]
        if given and not self.enabled:
            raise ConfigError(
                f"model.lora.{given[0]}={getattr(self, given[0])} needs model.lora.enabled=true, "
                "which stage=finetune_lora has; to train without adapters choose stage=finetune or finetune_task"
            )

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(kw_only=True, slots=True)
class QuantizeConfig:
    """Frozen weights in fewer bits, by bitsandbytes; computed with in precision.param_dtype."""

    mode: Quantizer = Quantizer.none
    double: bool = True
    """nf4 and fp4: the scales of the blocks of 64 weights are quantised once more, to 8 bits."""

    def __post_init__(self) -> None:
        if not self.double and self.mode is Quantizer.none:
            raise ConfigError("model.quantize.double=false needs model.quantize.mode=nf4 or fp4")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    name: str
    language: str
    """Folder or hub name of the language model; `package:NAME` is a folder shipped with this package."""
    vision: str
    """Folder or hub name of the vision tower, likewise."""
    checkpoint: str | None
    """A whole LLaVA model to start from (ours, transformers' or the original's); language and vision then only
    serve where it lacks something (the original's folders name their tower instead of holding a config for it)."""
    projector: str
    """`random`, `auto` (the stage=pretrain run beside output_dir), or a run, folder or file that holds one."""
    projector_type: str
    """linear, mlp2x_gelu, mlp3x_gelu, ..., identity (LLaVA multimodal_projector/builder.py:33-51)."""
    select_layer: int
    """Which hidden state of the tower is the feature: -2 is the output of the last layer but one."""
    patch_merge: PatchMerge
    """anyres only: how the tiles of a picture make one sequence. flat: one after the other; spatial: line by line of
    the whole picture; spatial_unpad: likewise without the padding, a learned vector at the end of each line."""
    select_feature: Feature
    """patch drops the CLS token (CLIP); full keeps every position (towers without CLS)."""
    image_start_end: bool
    """Stand <im_start> and <im_end> around every picture (the original's mm_use_im_start_end); the tokenizer must
    have both, as that of a checkpoint trained with them has."""
    random_weights: bool
    """The folders hold a config only: weights are drawn from the seed."""
    train: list[Part]
    """Parts that learn: whole, or with lora.enabled by adapters, which the projector never has."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)

    @property
    def plain(self) -> "ModelConfig":
        """The same model without adapters, its base in full precision."""
        return replace(self, lora=LoraConfig(), quantize=QuantizeConfig())

    @property
    def adapted(self) -> list[Part]:
        """Parts that get adapters."""
        return [part for part in self.train if part is not Part.projector] if self.lora.enabled else []

    def __post_init__(self) -> None:
        self.check_adapters()
        if not re.fullmatch(r"linear|identity|mlp[1-9]\d*x_gelu", self.projector_type):
            raise ConfigError(
                f"model.projector_type={self.projector_type} is not a projector; "
                "choose linear, mlp2x_gelu (any number of layers: mlp3x_gelu, ...) or identity"
            )
        if not self.train:
            raise ConfigError("model.train=[] trains nothing; name parts of [projector, language, vision]")
        if len(set(self.train)) != len(self.train):
            raise ConfigError(f"model.train={[p.value for p in self.train]} names a part twice")

    def check_adapters(self) -> None:
        """Raises ConfigError where adapters or a quantised base contradict what trains."""
        train = [part.value for part in self.train]
        if self.lora.enabled and not self.adapted:
            raise ConfigError(
                f"model.lora.enabled=true puts adapters into language or vision, and model.train={train} names neither"
            )
        mode = self.quantize.mode
        if mode is Quantizer.none:
            return
        if Part.language in self.train and not self.lora.enabled:
            raise ConfigError(
                f"model.quantize.mode={mode.value} keeps the language model's weights in a few bits, which cannot be "
                f"trained, and model.train={train} trains them; choose stage=finetune_qlora, or "
                "model.lora.enabled=true"
            )
        if self.lora.use_dora:
            raise ConfigError(
                f"model.quantize.mode={mode.value} with model.lora.use_dora=true would unpack every weight at every "
                "step for its rows' lengths; set one of the two back"
            )
