"""The configuration: every key a user can set, its type, its meaning and its checks. Imports no torch.

YAML under `conf/` picks the values, Hydra composes them, `load` turns the result into these classes once, at the
door; nothing behind it sees OmegaConf. One long file on purpose: it is the list of all keys, in one place.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from llava_fsdp.errors import ConfigError
from llava_fsdp.kinds import WORDS, takes
from llava_fsdp.redact import has_secret, is_secret_variable
from llava_fsdp.untrusted import ENV, TARGETS, keys_of, leaves_of

T = TypeVar("T")
AUTO = "auto"
MOST_EPOCHS = 1000
"""Most times that an epoch shows a source's records."""
SOURCES = "data.sources.", "val.sources."
"""What follows is a name that the user chooses."""
HELDOUT = "heldout.json"
"""The embedded dataset's file of held-out records."""


def config_dir() -> Path:
    """The folder of YAML files: inside the package where it was installed from a wheel, else the checkout's."""
    here = Path(__file__).parent
    packaged = here / "conf"
    return packaged if packaged.is_dir() else here.parents[1] / "conf"


class Strategy(Enum):
    """Names of `torch.distributed.fsdp.ShardingStrategy`; SHARD_OPTIMIZER (ZeRO-1) has no name there."""

    NO_SHARD = "NO_SHARD"
    SHARD_OPTIMIZER = "SHARD_OPTIMIZER"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    _HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"
    auto = "auto"
    """No row: the planner chooses one when a training begins, which is what the run then records."""


class Part(Enum):
    projector = "projector"
    language = "language"
    vision = "vision"


class Source(Enum):
    shapes = "shapes"
    llava_json = "llava_json"


class TooLong(Enum):
    truncate = "truncate"
    quarantine = "quarantine"
    fail = "fail"


class Bad(Enum):
    """What becomes of a record that cannot be trained on."""

    fail = "fail"
    quarantine = "quarantine"


class Examine(Enum):
    """How closely pictures are looked at before training."""

    decode = "decode"
    head = "head"


class AspectRatio(Enum):
    square = "square"
    pad = "pad"
    anyres = "anyres"


class Parity(Enum):
    """Whose numbers: right ones, or those of the original LLaVA trainer, its faults included."""

    exact = "exact"
    llava_v1_5 = "llava_v1_5"


class Pixels(Enum):
    """How a picture file becomes the tower's pixels."""

    exact = "exact"
    llava_v1_5 = "llava_v1_5"
    lean = "lean"


class SpecialTokens(Enum):
    """What becomes of the tokenizer's special tokens, such as `</s>`, where a record's own text has them."""

    text = "text"
    parse = "parse"


class OrderName(Enum):
    shuffle = "shuffle"
    llava_v1_5 = "llava_v1_5"


class CompatName(Enum):
    none = "none"
    llava_v1_5 = "llava_v1_5"


class PatchMerge(Enum):
    """`mm_patch_merge_type` of the original."""

    flat = "flat"
    spatial = "spatial"
    spatial_unpad = "spatial_unpad"


class Feature(Enum):
    patch = "patch"
    full = "full"


class DType(Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class MasterDType(Enum):
    """What trainable weights are kept and updated in."""

    fp32 = "fp32"
    bf16 = "bf16"


class MomentDType(Enum):
    """What the optimizer's moments are kept in."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


class LinearKind(Enum):
    """What the linear layers of the language model's blocks multiply in."""

    same = "same"
    """precision.param_dtype"""
    fp8 = "fp8"


class RecomputeMode(Enum):
    """What of a block of layers is kept from the forward pass for the backward pass."""

    none = "none"
    """everything"""
    full = "full"
    """its input; the block runs again"""
    selective = "selective"
    """its input and what its matrix products and its attention gave; the rest runs again"""
    budget = "budget"
    """compiled, and what torch's partitioner chooses for a share of the memory"""
    offload = "offload"
    """its input, in the host's memory; the block runs again"""
    auto = "auto"
    """No mode: the planner chooses one when a training begins, which is what the run then records."""


class OffloadMode(Enum):
    """What lies elsewhere than on the device, each more than the one before."""

    none = "none"
    optimizer = "optimizer"
    """moments, in host memory"""
    params = "params"
    """shards, gradients and moments, in host memory"""
    nvme = "nvme"
    """shards, gradients and moments, in files"""

    @property
    def moves_weights(self) -> bool:
        return self in (OffloadMode.params, OffloadMode.nvme)


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    warmup_decay = "warmup_decay"
    warmup_log = "warmup_log"


class Normalize(Enum):
    step = "step"
    micro_batch = "micro_batch"


class LossKernel(Enum):
    """What computes the loss from hidden states and the output layer."""

    auto = "auto"
    """the fastest that was measured: chunked"""
    chunked = "chunked"
    """ours"""
    torch = "torch"
    """torch.nn.functional.linear_cross_entropy, of 2.13, in fp32"""


class Attention(Enum):
    """What attends within the samples of a packed row."""

    auto = "auto"
    varlen = "varlen"
    """torch's own kernel for sequences of many lengths, on CUDA in bf16 or fp16"""
    flash = "flash"
    """the flash-attn package's, where it is installed"""
    sdpa = "sdpa"
    """scaled dot product attention, a sample at a time; anywhere, in any dtype"""


class FolderFormat(Enum):
    """Who loads what an export writes."""

    hf = "hf"
    """transformers"""
    llava = "llava"
    """the original LLaVA"""
    projector = "projector"
    """the original's second stage: mm_projector.bin"""


OnSaveError = Enum("OnSaveError", {"raise": "raise", "warn": "warn"})  # one of its names is a keyword
"""What follows where a checkpoint cannot be written."""


class KeptDType(Enum):
    keep = "keep"
    bf16 = "bf16"
    fp32 = "fp32"


class Devices(Enum):
    """Which GPUs a job of a sweep gets."""

    own = "own"
    """As many as it has ranks, which no other job of this user has meanwhile."""
    shared = "shared"
    """All that the sweep sees."""


class SweepMetric(Enum):
    """What a sweeper minimises."""

    loss = "loss"
    val_loss = "val_loss"
    val_score = "val_score"
    """Of which more is better: a sweeper is handed it negated."""


class Metric(Enum):
    """How an answer is scored against the record's own."""

    exact = "exact"
    """1 where it is the same text, without regard to case and surrounding white space"""
    vqa = "vqa"
    """VQAv2's accuracy, of answers normalised by its rules"""


class Format(Enum):
    text = "text"
    json = "json"


class Task(Enum):
    """What is asked of a trained model, and how its answers are scored."""

    conversations = "conversations"
    """LLaVA records: the first question of each, right where the answer is the record's."""
    vqa = "vqa"
    """Short answers against several people's, as VQAv2 scores them."""
    textvqa = "textvqa"
    """The same as TextVQA scores them."""
    multiple_choice = "multiple_choice"
    """Letters of choices, as ScienceQA has them."""
    yes_no = "yes_no"
    """Yes or no, as POPE has them."""


class LoraBias(Enum):
    """Which biases train beside the adapters; peft's names."""

    none = "none"
    all = "all"
    """every one of a part that has adapters"""
    lora_only = "lora_only"
    """those of the layers that have adapters"""


class Quantizer(Enum):
    """What the frozen linear layers of the language model's blocks are kept in."""

    none = "none"
    """precision.param_dtype"""
    nf4 = "nf4"
    """4 bits, of a code for what is normally distributed (QLoRA, arXiv 2305.14314)"""
    fp4 = "fp4"
    """4 bits, as a floating point number"""
    int8 = "int8"
    """8 bits, with a scale for each row (LLM.int8(), arXiv 2208.07339)"""


@dataclass(kw_only=True, slots=True)
class StageConfig:
    name: str
    corpus: str
    """Which file of the embedded dataset: captions, instructions or heldout. Other datasets ignore it."""


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


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """One of several sources of a dataset."""

    path: str
    images: str | None = None
    """null: data.images"""
    epochs: float | None = None
    """How often each of its records is seen in an epoch; null: once."""
    weight: float | None = None
    """Its share of an epoch's samples, against the other sources' weights; an epoch then has as many samples as all
    sources together have records."""

    def __post_init__(self) -> None:
        for name in ("epochs", "weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"data.sources: {name}={value} of {self.path} must be a finite number above 0")
        if self.epochs is not None and self.epochs > MOST_EPOCHS:
            raise ConfigError(
                f"data.sources: epochs={self.epochs:g} of {self.path} is more than {MOST_EPOCHS:,} in one epoch; raise "
                "the run's own epochs, or give the sources weights"
            )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    source: Source
    root: str | None
    """Where the embedded dataset is drawn; other datasets ignore it."""
    path: str | None
    """A JSON list, JSON Lines or Parquet file of LLaVA records."""
    images: str | None
    """The folder that the records' pictures are relative to."""
    sources: dict[str, SourceConfig]
    """Several sources by name, instead of `path`."""
    index: str | None
    """Where the dataset's index is kept; null: beside the (first) file of records, named as it with `.index` behind."""
    examine: Examine
    """decode: every picture is read to its end before the first training; head: its size alone."""
    allow_links: bool
    """Whether symbolic links in the folder of pictures may lead out of it."""
    bad: Bad
    """Records that cannot be trained on: fail stops before training begins, or where a picture breaks later; quarantine
    goes on without them, on every rank alike, and lists them in quarantine.jsonl."""
    bad_budget: str
    """Most that data.bad=quarantine leaves out: a share of the records (`0.1%`, rounded down) or a number (`20`)."""
    template: str
    image_aspect_ratio: AspectRatio
    grid_pinpoints: list[list[int]]
    """anyres only: sizes [width, height] in pixels that a picture may be fitted into, multiples of the tower's; empty:
    LLaVA-NeXT's, 1x2, 2x1, 2x2, 3x1 and 1x3 times the tower's."""
    pixels: Pixels
    """exact: pictures as a viewer shows them; llava_v1_5: as the original reads them (no EXIF orientation, 16-bit
    and floating point values clipped, transparency ignored, anyres as square); lean: as exact, in fewer operations, not
    to the bit (data/lean.py)."""
    max_length: int
    """Longest sample in positions, image positions included."""
    too_long: TooLong
    special_tokens: SpecialTokens | None = None
    """text: special tokens in a record's text (`</s>`) are tokenized as any other text; parse: they become the tokens
    that they name; null: text, and with labels=llava_v1_5 parse, which is what the original does."""
    max_record_bytes: int = 4 << 20
    """Most bytes of one record in its file; a larger one is left out without being parsed. Counting the tokens of a
    text takes memory (docs/data.md), in every process that does so."""
    workers: int | None
    """Processes that prepare batches on each rank; 0 prepares them between steps; null: up to 4, as cores allow."""
    prefetch: int
    """Steps that each worker prepares ahead."""
    stall: int
    """Seconds without progress on one record after which a worker that is waited for counts as stalled."""

    @property
    def trained_aspect(self) -> AspectRatio:
        """The original trains anyres as square (LLaVA train.py:702-718)."""
        as_square = self.image_aspect_ratio is AspectRatio.anyres and self.pixels is Pixels.llava_v1_5
        return AspectRatio.square if as_square else self.image_aspect_ratio

    @property
    def index_folder(self) -> Path:
        first = next(iter(self.sources.values())).path if self.sources else self.path
        return Path(self.index or f"{first}.index")

    @property
    def source_names(self) -> list[str]:
        """Of every source in their order; a single one that has no name is called as its file is."""
        return list(self.sources) or [Path(str(self.path)).stem]

    def budget(self, records: int) -> int:
        """Most of so many records that may be left out."""
        if self.bad_budget.endswith("%"):
            return math.floor(Fraction(self.bad_budget[:-1]) * records / 100)
        return int(self.bad_budget)

    def __post_init__(self) -> None:
        if self.path is None and not self.sources:
            raise ConfigError("data.path is not set; give it on the command line: data.path=VALUE")
        if self.path is not None and self.sources:
            raise ConfigError(
                f"data.path={self.path} and data.sources={sorted(self.sources)} are both set; make the file one of the "
                "sources, or set data.path=null"
            )
        if len({own.weight is None for own in self.sources.values()}) > 1 or any(
            own.weight is not None and own.epochs is not None for own in self.sources.values()
        ):
            raise ConfigError("data.sources: give every source a weight, or none of them; a weight replaces epochs")
        if not re.fullmatch(r"\d+|\d+(\.\d+)?%", self.bad_budget):
            raise ConfigError(
                f"data.bad_budget={self.bad_budget} is neither a share of the records, as 0.1%, nor a number of them"
            )
        if self.bad_budget.endswith("%") and Fraction(self.bad_budget[:-1]) > 100:
            raise ConfigError(f"data.bad_budget={self.bad_budget} is more than all records; 100% is the most")
        at_least("data.max_length", self.max_length, 2)
        at_least("data.max_record_bytes", self.max_record_bytes, 1024)
        if self.grid_pinpoints and self.image_aspect_ratio is not AspectRatio.anyres:
            raise ConfigError(
                f"data.grid_pinpoints is for data.image_aspect_ratio=anyres; with {self.image_aspect_ratio.value} a "
                "picture is one tile: set it to []"
            )
        for size in self.grid_pinpoints:
            if len(size) != 2 or min(size) < 1:
                raise ConfigError(f"data.grid_pinpoints: {size} is not a [width, height] in pixels")
        if self.workers is not None:
            at_least("data.workers", self.workers, 0)
        at_least("data.prefetch", self.prefetch, 1)
        at_least("data.stall", self.stall, 1)


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    strategy: Strategy
    shard_size: int | None
    """Hybrid rows only: ranks that share one copy of the model; null: the ranks of one node."""
    prefetch: int | None = None
    """Units whose all-gathers are begun before the unit in front of them runs, forward and backward; null: FSDP2's own,
    the next one, as soon as the computation has been handed over."""
    blocks_per_unit: int = 1
    """Blocks of layers that are gathered and reduced together."""

    def __post_init__(self) -> None:
        at_least("sharding.blocks_per_unit", self.blocks_per_unit, 1)
        if self.prefetch is not None:
            at_least("sharding.prefetch", self.prefetch, 1, "null leaves it to FSDP2")
        if self.shard_size is not None:
            at_least("sharding.shard_size", self.shard_size, 1)
            if self.strategy not in (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2, Strategy.auto):
                raise ConfigError(
                    f"sharding.shard_size={self.shard_size} has no meaning for {self.strategy.value}; "
                    "set it to null, or choose sharding=hybrid or sharding=hybrid2"
                )


@dataclass(kw_only=True, slots=True)
class ScalerConfig:
    """The factor on the loss that keeps fp16 gradients from vanishing; DeepSpeed's five settings."""

    scale: float | None = None
    """A fixed factor; null: one that is halved where gradients overflow and doubled after a while without."""
    initial_power: int = 16
    """The factor begins at 2 ** initial_power."""
    window: int = 1000
    """Steps without an overflow after which it is doubled."""
    hysteresis: int = 2
    """It is halved from this overflow on; a doubling starts the count anew."""
    minimum: float = 1.0
    """It is never lower; a step that overflows there ends the run."""

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise ConfigError(
                f"precision.scaler.scale={self.scale} must be a finite number above 0; null lets it find its own"
            )
        at_least("precision.scaler.window", self.window, 1)
        at_least("precision.scaler.hysteresis", self.hysteresis, 1)
        if not 0 < self.minimum < float("inf"):
            raise ConfigError(f"precision.scaler.minimum={self.minimum} must be a finite number above 0")
        if not 0 <= self.initial_power <= 127 or 2.0**self.initial_power < self.minimum:
            raise ConfigError(
                f"precision.scaler.initial_power={self.initial_power} must be 0 to 127, and 2 to its power no less "
                f"than precision.scaler.minimum={self.minimum}"
            )


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    param_dtype: DType
    """What forward and backward compute in, and what frozen weights are stored in."""
    reduce_dtype: DType
    """What gradients are added in, over micro-batches and ranks."""
    norm_dtype: DType
    """What norms compute in, and what their weights are stored in where that is not param_dtype."""
    master_dtype: MasterDType
    """What trainable weights are kept and updated in, and their gradients at the update; bf16 weights are rounded at
    random, so that small updates are not lost on average."""
    moment_dtype: MomentDType
    """What the optimizer's two moments are kept in; they are computed in fp32."""
    linear: LinearKind
    scaler: ScalerConfig
    """param_dtype=fp16 only."""

    def __post_init__(self) -> None:
        for key in ("norm_dtype", "reduce_dtype"):
            value = getattr(self, key)
            if value not in (self.param_dtype, DType.fp32):
                raise ConfigError(
                    f"precision.{key}={value.value} needs precision.param_dtype={value.value}; with "
                    f"param_dtype={self.param_dtype.value} it is {self.param_dtype.value} or fp32"
                )
        if self.master_dtype is MasterDType.bf16 and self.param_dtype is not DType.bf16:
            raise ConfigError(
                f"precision.master_dtype=bf16 keeps no more than bf16 of a weight, so computing in "
                f"param_dtype={self.param_dtype.value} gains nothing; choose precision=bf16_pure, or master_dtype=fp32"
            )
        if self.linear is LinearKind.fp8 and self.param_dtype is not DType.bf16:
            raise ConfigError(
                f"precision.linear=fp8 is for param_dtype=bf16, which everything but the products is computed in, and "
                f"not for {self.param_dtype.value}; choose precision=fp8"
            )
        if self.param_dtype is not DType.fp16 and self.scaler != ScalerConfig():
            raise ConfigError(
                f"precision.scaler is for precision=fp16; {self.param_dtype.value} has the exponents of fp32 and needs "
                "no factor on the loss"
            )


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    mode: RecomputeMode
    budget: float | None
    """budget only: the share of what a compiled block would keep, 0 (its input alone) to 1 (all that is worth it)."""

    def __post_init__(self) -> None:
        if self.mode is RecomputeMode.budget:
            if self.budget is None or not 0 <= self.budget <= 1:
                raise ConfigError(
                    f"recompute.budget={self.budget} must be the share of a block's activations that is kept, 0 to 1"
                )
        elif self.budget is not None:
            raise ConfigError(
                f"recompute.budget={self.budget} is for recompute=budget, and this is recompute={self.mode.value}: "
                "set it to null"
            )


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    mode: OffloadMode
    folder: str | None
    """nvme only: a folder on a local disk; null: output_dir. What lies there has no name and ends with the process."""

    def __post_init__(self) -> None:
        if self.folder is not None and self.mode is not OffloadMode.nvme:
            raise ConfigError(
                f"offload.folder={self.folder} is for offload=nvme; offload={self.mode.value} writes no files: set it "
                "to null"
            )


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    lr: float
    projector_lr: float | None
    vision_lr: float | None
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float | None
    schedule: Schedule
    warmup_ratio: float
    warmup_steps: int | None
    """Wins over warmup_ratio; null: by the ratio."""

    def __post_init__(self) -> None:
        for name in ("lr", "projector_lr", "vision_lr", "weight_decay", "eps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"optim.{name}={value} must be a finite number of at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"optim.clip={self.clip} must be above 0; null turns clipping off")
        if not 0 <= self.warmup_ratio <= 1:
            raise ConfigError(f"optim.warmup_ratio={self.warmup_ratio} must be a fraction of all steps, 0 to 1")
        if self.warmup_steps is not None:
            at_least("optim.warmup_steps", self.warmup_steps, 0)


@dataclass(kw_only=True, slots=True)
class OrderConfig:
    name: OrderName
    """shuffle: a permutation of (seed, epoch), cut anew for any number of ranks; llava_v1_5: the original's samplers,
    whose order depends on the number of ranks and on micro_batch_size."""
    group_by_modality_length: bool
    """llava_v1_5 only: its sampler that groups pictures and text, and like lengths; else its plain one."""


@dataclass(kw_only=True, slots=True)
class CompatConfig:
    name: CompatName
    """llava_v1_5 has set labels, order, loss.normalize, data.pixels and precision's dtypes to the original's."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    normalize: Normalize
    """step: sum over label tokens divided by the label tokens of the step on all ranks, so that no cut of the step
    changes it; micro_batch: the original's mean of the micro-batches' means."""
    chunk_tokens: int
    """Labels whose logits are there at once."""
    kernel: LossKernel

    def __post_init__(self) -> None:
        at_least("loss.chunk_tokens", self.chunk_tokens, 1)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: int | None
    keep: int
    """So many of the newest that verify stay."""
    keep_every: int | None
    """Checkpoints of multiples of this step stay for good."""
    resume: str
    """auto: the newest one of output_dir that verifies; never: start over; else a `step-NNNNNN` folder."""
    strict: bool
    """With resume=auto, a newest checkpoint that does not verify is an error, not a warning and the one before it."""
    asynchronous: bool
    """Steps wait for a copy in host memory; the disk is written to while they go on. Where the copy does not fit, or
    offload=nvme keeps states in files, they wait for the disk."""
    on_save_error: OnSaveError

    def __post_init__(self) -> None:
        if self.every is not None:
            at_least("checkpoint.every", self.every, 1)
        if self.keep_every is not None:
            at_least("checkpoint.keep_every", self.keep_every, 1)
        at_least("checkpoint.keep", self.keep, 2, "the newest may be the one that a crash interrupted")


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    enabled: bool
    dtype: DType
    verify: bool
    """Load the written model with transformers and compare its logits before the run is called done."""
    merge: bool = True
    """Of a run with adapters: write export/, the base with the adapters merged into it. The adapters alone are in
    adapter/ in any case."""


@dataclass(kw_only=True, slots=True)
class CommConfig:
    timeout: int
    """Seconds that a collective may wait for the slowest rank."""
    init_timeout: int
    """The same until the first step is over: weights are loaded and kernels compiled before."""
    warn_after: int
    """Seconds after which ranks that wait say for whom."""

    def __post_init__(self) -> None:
        for name in ("timeout", "init_timeout", "warn_after"):
            at_least(f"comm.{name}", getattr(self, name), 1)


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    """One of several files of held-out records."""

    path: str
    images: str | None = None
    """null: val.images"""


@dataclass(kw_only=True, slots=True)
class ValConfig:
    """Held-out records, which a run is measured on while it trains. Nothing here changes what is trained."""

    every: int | None
    """Steps between two validations, and one after the last step; null: none at all."""
    path: str | None
    """A file of records as data.path takes them; null: with data=shapes the embedded held-out pictures."""
    images: str | None
    """The folder of their pictures; null: data.images."""
    sources: dict[str, HeldOutConfig]
    """Several files by name, instead of `path`; each has a loss of its own."""
    index: str | None
    """Where their index is kept; null: beside the (first) file."""
    limit: int | None
    """Most records of each file, spread evenly over it; null: all."""
    answers: int
    """Questions that are answered and scored, spread evenly over the records; 0: the loss alone."""
    batch_size: int
    """Most answers that a rank writes at once; fewer where half of a micro-batch's positions do not hold them."""
    max_new_tokens: int
    metric: Metric
    shown: int
    """Answers that validation.jsonl keeps of each validation."""

    def __post_init__(self) -> None:
        for name in ("every", "limit"):
            if (value := getattr(self, name)) is not None:
                at_least(f"val.{name}", value, 1)
        at_least("val.answers", self.answers, 0, "0 measures the loss alone")
        at_least("val.batch_size", self.batch_size, 1)
        at_least("val.max_new_tokens", self.max_new_tokens, 1)
        at_least("val.shown", self.shown, 0)
        if self.path is not None and self.sources:
            raise ConfigError(
                f"val.path={self.path} and val.sources={sorted(self.sources)} are both set; make the file one of the "
                "sources, or set val.path=null"
            )

    @property
    def is_named(self) -> bool:
        """Some held-out file is."""
        return self.path is not None or bool(self.sources)


@dataclass(kw_only=True, slots=True)
class NumericConfig:
    max_consecutive_skips: int
    """Steps in a row whose gradients are not finite and that leave the weights as they were, until the run stops."""
    spike_sigma: float | None
    """Warn of a loss this many deviations above the mean of the steps before; null: never."""

    def __post_init__(self) -> None:
        at_least("numeric.max_consecutive_skips", self.max_consecutive_skips, 0)
        if self.spike_sigma is not None and not 0 < self.spike_sigma < float("inf"):
            raise ConfigError(f"numeric.spike_sigma={self.spike_sigma} must be a finite number above 0, or null")


class WandbMode(Enum):
    """Whether Weights & Biases is told of a run."""

    off = "off"
    offline = "offline"
    """into output_dir/wandb, which `wandb sync` sends later"""
    online = "online"


@dataclass(kw_only=True, slots=True)
class TrackConfig:
    """Who else is told what `metrics.jsonl` and `validation.jsonl` say; rank 0 tells them."""

    tensorboard: bool = False
    """Event files in output_dir/tensorboard."""
    wandb: WandbMode = WandbMode.off
    project: str = "llava_fsdp"
    """Of Weights & Biases."""
    name: str | None = None
    """Of the run there; null: as output_dir is called."""


@dataclass(kw_only=True, slots=True)
class Config:
    """One training run."""

    stage: StageConfig
    model: ModelConfig
    data: DataConfig
    sharding: ShardingConfig
    precision: PrecisionConfig
    recompute: RecomputeConfig
    offload: OffloadConfig
    optim: OptimConfig
    order: OrderConfig
    compat: CompatConfig
    loss: LossConfig
    checkpoint: CheckpointConfig
    export: ExportConfig
    comm: CommConfig
    numeric: NumericConfig
    val: ValConfig
    output_dir: str
    private: bool
    """What a run writes can be read by its user alone: a new output_dir is made for nobody else, and so are files."""
    labels: Parity
    """exact: every answer is supervised; llava_v1_5: as the original's preprocessing has it, which masks whole samples
    (LLaVA train.py:332-655)."""
    seed: int
    epochs: int
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: int
    pack: bool
    """Lay the samples of a micro-batch end to end in one row, each attending to itself alone; else pad rows."""
    tokens_per_micro_batch: int | str | None
    """pack only: most positions a rank runs at once; null: micro_batch_size * data.max_length; auto: the planner's
    choice when a training begins, which is what the run then records."""
    attention: Attention
    compile: bool | str
    """torch.compile for the language model's blocks, one at a time; auto: on CUDA with Triton."""
    log_every: int
    gc_every: int | None
    """Steps between two runs of Python's garbage collector, at the same ones on all ranks; null: when Python likes."""
    deterministic: bool
    profile: bool
    """A trace, CUDA's memory and a page of where the time goes, of a few steps, into output_dir/profile."""
    profile_steps: list[int] | None
    """Of these steps, from the first to the last of the two, counted from 1 where this start begins; null: 10 to 12,
    or the last ones of a shorter start, three at most."""
    track: TrackConfig = field(default_factory=TrackConfig)
    dry_run: int | None
    """Ranks to imagine: two steps of one rank in one process, to see what it holds; nothing is trained or written."""
    format: Format

    @property
    def row_tokens(self) -> int:
        """Most positions of a packed row."""
        assert not isinstance(self.tokens_per_micro_batch, str), "auto has been settled"
        return self.tokens_per_micro_batch or self.micro_batch_size * self.data.max_length

    @property
    def held_out(self) -> Self:
        """The same run reading the records of `val` once, as it reads its own."""
        own, files = self.val, self.val.sources
        embedded = str(Path(self.data.root or ".") / HELDOUT) if self.data.source is Source.shapes else None
        data = replace(
            self.data,
            path=None if files else own.path or embedded,
            images=own.images or self.data.images,
            sources={name: SourceConfig(path=file.path, images=file.images) for name, file in files.items()},
            index=own.index,
        )
        return replace(self, data=data, epochs=1, max_steps=None, profile=False)

    @property
    def trained_template(self) -> str:
        """What conversations are laid out in: the original's --version v0 leaves it at v1 (LLaVA train.py:894-908)."""
        is_v0 = self.data.template == "v0" and self.labels is Parity.llava_v1_5
        return "v1" if is_v0 else self.data.template

    @property
    def trained_special_tokens(self) -> SpecialTokens:
        """`data.special_tokens`, settled."""
        is_original = self.labels is Parity.llava_v1_5
        return self.data.special_tokens or (SpecialTokens.parse if is_original else SpecialTokens.text)

    @property
    def exports_model(self) -> bool:
        """The run ends with a whole model in transformers' format."""
        return self.export.enabled and (self.export.merge or not self.model.lora.enabled)

    @property
    def has_auto(self) -> bool:
        """Something is left to the planner."""
        return (
            self.sharding.strategy is Strategy.auto
            or self.recompute.mode is RecomputeMode.auto
            or self.tokens_per_micro_batch == AUTO
        )

    def __post_init__(self) -> None:
        self.check_packing()
        self.check_base()
        if self.precision.linear is LinearKind.fp8 and Part.language not in self.model.train:
            raise ConfigError(
                f"precision.linear=fp8 is for a language model that trains, and model.train="
                f"{[part.value for part in self.model.train]} freezes it; choose precision=bf16"
            )
        self.check_compile()
        self.check_offload()
        if self.val.every is not None and not self.val.is_named and self.data.source is not Source.shapes:
            raise ConfigError(
                f"val.every={self.val.every} needs held-out records: name a file of them, val.path=FILE, or set "
                "val.every=null"
            )
        for name in ("epochs", "global_batch_size", "micro_batch_size", "log_every"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        self.check_steps()
        if self.dry_run is not None:
            self.check_dry_run(self.dry_run)
        self.check_labels()
        if self.order.name is OrderName.llava_v1_5 and self.global_batch_size % self.micro_batch_size:
            raise ConfigError(
                f"order=llava_v1_5 has whole micro-batches, and global_batch_size={self.global_batch_size} is no "
                f"multiple of micro_batch_size={self.micro_batch_size}"
            )
        plain = all(own.weight is None and own.epochs in (None, 1) for own in self.data.sources.values())
        if self.order.name is OrderName.llava_v1_5 and not plain:
            raise ConfigError(
                "order=llava_v1_5 has every record once an epoch, as the original does; take epochs and weight out of "
                "data.sources, or set order=shuffle"
            )
        anyres = self.data.image_aspect_ratio is AspectRatio.anyres
        if self.model.patch_merge is not PatchMerge.flat and not anyres:
            raise ConfigError(
                f"model.patch_merge={self.model.patch_merge.value} is for data.image_aspect_ratio=anyres; with "
                f"{self.data.image_aspect_ratio.value} a picture is one tile: set model.patch_merge=flat"
            )
        if anyres and self.data.pixels is Pixels.llava_v1_5 and self.model.patch_merge is not PatchMerge.flat:
            raise ConfigError(
                f"data.pixels=llava_v1_5 trains anyres as square, as the original does; "
                f"model.patch_merge={self.model.patch_merge.value} needs data.pixels=exact or lean"
            )
        without = "export.merge=false" if self.model.lora.enabled else "export.enabled=false"
        if self.exports_model and self.data.trained_aspect is AspectRatio.anyres:
            raise ConfigError(
                "data.image_aspect_ratio=anyres has no equal in transformers' LLaVA, so the run could not be exported "
                f"at its end; set {without}, and use llava_fsdp.export format=llava"
            )
        if self.exports_model and self.model.projector_type != "mlp2x_gelu":
            raise ConfigError(
                f"model.projector_type={self.model.projector_type} has no equal in transformers' LLaVA, so the run "
                f"could not be exported; choose mlp2x_gelu, or set {without} and turn it into the "
                "original's format later: python -m llava_fsdp.export source=OUTPUT_DIR to=FOLDER format=llava"
            )

    def check_base(self) -> None:
        """Raises ConfigError where a frozen base cannot be computed with, or moved, as it is asked for."""
        mode = self.model.quantize.mode
        if self.model.lora.enabled and self.precision.linear is LinearKind.fp8:
            raise ConfigError(
                "precision.linear=fp8 is for weights that train, and model.lora.enabled=true freezes them; choose "
                "precision=bf16"
            )
        if mode is not Quantizer.none and self.offload.mode.moves_weights:
            raise ConfigError(
                f"offload={self.offload.mode.value} with model.quantize.mode={mode.value} would send packed weights "
                "through the host at every step; choose offload=optimizer or none"
            )

    def check_steps(self) -> None:
        """Raises ConfigError where a number of steps is none."""
        null = {"max_steps": "null trains every epoch to its end", "gc_every": "null leaves it to Python"}
        for name, why in null.items():
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1, why)
        steps = self.profile_steps
        if steps is None:
            return
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise ConfigError(f"profile_steps={steps} must be {WORDS['profile_steps']}")
        if self.profile and self.max_steps is not None:
            self.check_profile(self.max_steps)

    def check_profile(self, total: int) -> None:
        """Raises ConfigError where a run of so many steps does not come to those that `profile` is to record."""
        if self.profile and self.profile_steps is not None and self.profile_steps[1] > total:
            raise ConfigError(
                f"profile_steps={self.profile_steps}: this run has {total} steps; name earlier ones, or null for three "
                "that it has"
            )

    def check_dry_run(self, ranks: int) -> None:
        """Raises ConfigError where that many ranks cannot be imagined."""
        at_least("dry_run", ranks, 1, "it is the number of ranks to imagine")
        hybrid = self.sharding.strategy in (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2)
        if hybrid and self.sharding.shard_size is None:
            raise ConfigError(
                f"dry_run={ranks} cannot tell how many of these ranks share a node; set sharding.shard_size"
            )

    def check_compile(self) -> None:
        """Raises ConfigError where blocks are compiled and are not."""
        if isinstance(self.compile, str) and self.compile != AUTO:
            raise ConfigError(f"compile={self.compile} must be {WORDS['compile']}")
        if self.compile is False and self.recompute.mode is RecomputeMode.budget:
            raise ConfigError(
                "compile=false with recompute=budget: what runs again is chosen while blocks are compiled; set "
                "compile=auto, or choose recompute=selective"
            )

    def check_offload(self) -> None:
        """Raises ConfigError where a row of the ZeRO table keeps on the device what offload is to take off it."""
        mode, strategy = self.offload.mode, self.sharding.strategy
        if mode is not OffloadMode.none and strategy is Strategy.NO_SHARD:
            raise ConfigError(
                f"offload={mode.value} with sharding=zero0 would hold the same states in host memory once for every "
                "rank; sharding=zero2 or zero3 shares them out, and is the same on one GPU"
            )
        if mode.moves_weights and strategy is Strategy.SHARD_OPTIMIZER:
            raise ConfigError(
                f"offload={mode.value} with sharding=zero1 would still hold all weights and gradients on the device "
                "through the whole step; choose sharding=zero2 or zero3, or offload=optimizer"
            )
        masters, moments = self.precision.master_dtype, self.precision.moment_dtype
        if mode in (OffloadMode.optimizer, OffloadMode.nvme) and (masters, moments) != (
            MasterDType.fp32,
            MomentDType.fp32,
        ):
            raise ConfigError(
                f"offload={mode.value} updates stretches of fp32 masters and moments, and precision.master_dtype="
                f"{masters.value} with moment_dtype={moments.value} is rounded by the row; choose offload=params, or "
                "precision=bf16"
            )
        if mode.moves_weights and self.precision.linear is LinearKind.fp8:
            raise ConfigError(
                f"offload={mode.value} gathers shards from the host, where nothing turns them into "
                "precision.linear=fp8; choose offload=optimizer, or precision=bf16"
            )

    def check_labels(self) -> None:
        """Raises ConfigError where labels=llava_v1_5 cannot do what another key asks for."""
        if self.labels is Parity.llava_v1_5 and self.data.too_long is not TooLong.truncate:
            raise ConfigError(
                f"labels=llava_v1_5 truncates what is too long, as the original does; data.too_long="
                f"{self.data.too_long.value} needs labels=exact"
            )
        if self.labels is Parity.llava_v1_5 and self.data.special_tokens is SpecialTokens.text:
            raise ConfigError(
                "data.special_tokens=text: labels=llava_v1_5 reads special tokens in a text as the original does; set "
                "data.special_tokens=parse or null, or labels=exact"
            )

    def check_packing(self) -> None:
        """Raises ConfigError where keys of packing contradict each other."""
        tokens = self.tokens_per_micro_batch
        if isinstance(tokens, str) and tokens != AUTO:
            raise ConfigError(f"tokens_per_micro_batch={tokens} is not a number of positions; give one, auto or null")
        if not self.pack:
            if tokens is not None:
                raise ConfigError(
                    f"tokens_per_micro_batch={tokens} is for pack=true; padded micro-batches hold micro_batch_size "
                    "rows: set it to null"
                )
            if self.attention not in (Attention.auto, Attention.sdpa):
                raise ConfigError(
                    f"attention={self.attention.value} is for the rows of pack=true; with pack=false set attention=auto"
                )
            return
        if isinstance(tokens, int) and tokens < self.data.max_length:
            raise ConfigError(
                f"tokens_per_micro_batch={tokens} has no room for a sample of data.max_length={self.data.max_length}; "
                "a sample is never split: raise it, or lower data.max_length"
            )
        if self.order.name is OrderName.llava_v1_5:
            if tokens is not None:
                raise ConfigError(
                    f"order=llava_v1_5 has micro-batches of its own, of micro_batch_size samples; "
                    f"tokens_per_micro_batch={tokens} would cut none: set it to null"
                )
        elif self.loss.normalize is Normalize.micro_batch:
            raise ConfigError(
                "loss.normalize=micro_batch is a mean of means, and with pack=true a micro-batch is whatever fits into "
                "a row: a sample would weigh more or less with its neighbours; set pack=false, or loss.normalize=step"
            )


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    nproc_per_node: int
    nnodes: int
    devices: Devices


@dataclass(kw_only=True, slots=True)
class SweepKeys:
    metric: SweepMetric
    last_steps: int
    """Steps at the end of a run whose mean loss is its loss."""

    def __post_init__(self) -> None:
        at_least("sweep.last_steps", self.last_steps, 1)


@dataclass(kw_only=True, slots=True)
class SweepConfig(Config):
    """A training run, how to launch it, and what a sweep compares it by."""

    launch: LaunchConfig
    sweep: SweepKeys


@dataclass(kw_only=True, slots=True)
class PrepareKeys:
    workers: int | None
    """Processes that read records and pictures; null: one a core."""

    def __post_init__(self) -> None:
        if self.workers is not None:
            at_least("prepare.workers", self.workers, 1)


@dataclass(kw_only=True, slots=True)
class PrepareConfig(Config):
    """A dataset examined and indexed for the training that the same keys describe."""

    prepare: PrepareKeys
    report: str | None
    verify: bool = False
    """Read every record and every image again and compare them with what the index knows of them; nothing is made."""

    def __post_init__(self) -> None:
        super(PrepareConfig, self).__post_init__()
        if self.verify and self.data.examine is not Examine.decode:
            raise ConfigError(
                f"verify=true compares whole image files, and data.examine={self.data.examine.value} makes an index "
                "that knows their sizes alone; set data.examine=decode"
            )


@dataclass(kw_only=True, slots=True)
class PlanConfig(Config):
    """What a training with the same keys would cost, on GPUs that need not be here."""

    gpus: int
    """Ranks of a node."""
    nodes: int
    gpu: str
    """A name of the table in `planning/hardware.py`; auto: this machine's."""
    rows: int
    """Most rows of the table that are printed."""
    picture: str
    """Where the picture of several nodes goes."""
    format: Format

    def __post_init__(self) -> None:
        super(PlanConfig, self).__post_init__()
        for name in ("gpus", "nodes", "rows"):
            at_least(name, getattr(self, name), 1)


@dataclass(kw_only=True, slots=True)
class DoctorConfig(Config):
    """A machine looked at for the training that the same keys describe."""

    gpus: int | None
    """Ranks on this machine; null: its GPUs, or 2 where there is none."""
    nodes: int

    def __post_init__(self) -> None:
        super(DoctorConfig, self).__post_init__()
        at_least("nodes", self.nodes, 1)
        if self.gpus is not None:
            at_least("gpus", self.gpus, 1)


@dataclass(kw_only=True, slots=True)
class AskedConfig:
    """The trained model that is asked."""

    checkpoint: str
    """A run's folder, or a model folder: ours, transformers' or the original's."""


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Questions, asked of a trained model; and scores, where their answers are known."""

    stage: StageConfig
    data: DataConfig
    model: AskedConfig
    task: Task
    questions: str | None
    """The file of questions; of task=conversations that is data.path."""
    annotations: str | None
    """Right answers, where the questions' file has none: VQAv2's or TextVQA's annotations, POPE's label file or the
    folder of them, ScienceQA's problems.json or the folder that it lies in."""
    split: str
    """Of ScienceQA's problems, where questions=problems.json: test, val, minival, ..."""
    suffix: bool
    """End every question with the original's last line for its task."""
    answers: str | None
    """JSON Lines, written as answers come and continued when that was interrupted; null: answers are not kept."""
    submission: str | None
    """The answers as VQAv2's and VizWiz's servers take them: a JSON list, prepared as the original does."""
    limit: int | None
    batch_size: int
    max_new_tokens: int
    show: int
    blank: bool | None
    """Also ask with pictures of the mean colour; null: of task=conversations."""
    format: Format

    def __post_init__(self) -> None:
        if self.task is Task.conversations:
            given = [k for k in ("questions", "annotations", "submission") if getattr(self, k) is not None]
            if given:
                raise ConfigError(
                    f"{given[0]}={getattr(self, given[0])} is not for task=conversations, whose questions are "
                    f"data.path; say which task it is: task={'|'.join(t.value for t in Task if t is not self.task)}"
                )
            if self.suffix:
                raise ConfigError(
                    "suffix=true: the records of task=conversations are asked as they are; set suffix=false"
                )
        elif self.questions is None:
            raise ConfigError(f"task={self.task.value} needs questions=FILE")
        if self.submission is not None and self.task not in (Task.vqa, Task.textvqa):
            raise ConfigError(f"submission={self.submission} is of task=vqa; task={self.task.value} has none")
        at_least("show", self.show, 0)
        at_least("batch_size", self.batch_size, 1)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        if self.limit is not None:
            at_least("limit", self.limit, 1)


@dataclass(kw_only=True, slots=True)
class ChatConfig:
    """A conversation with a trained model."""

    model: AskedConfig
    image: str | None
    """A picture file, or several: [a.jpg, b.jpg]."""
    question: str | None
    max_new_tokens: int
    temperature: float
    """0: the likeliest token, always."""
    top_p: float
    """With a temperature: the likeliest tokens that have this probability together are drawn from."""
    seed: int | None
    """With a temperature: of what is drawn; null: another one every time."""
    serve: bool
    """A page for the browser instead of the terminal."""
    host: str
    """The address that the page listens on."""
    port: int
    max_upload_mb: int
    """Most that a picture sent to the page may have, in MiB."""
    max_images: int
    """Most pictures of a conversation on the page."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_upload_mb", "max_images"):
            at_least(name, getattr(self, name), 1)
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 (the likeliest token, always) or above")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0, and at most 1 (all tokens)")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be 1 to 65535")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed} must be 0 or above, and below 2**63")
        if self.question is not None and not self.question.strip() and self.image is None:
            raise ConfigError("question is empty; say what is asked, or leave it out to talk on the terminal")
        if self.serve and (self.image is not None or self.question is not None):
            raise ConfigError("serve=true takes pictures and questions from the page; leave image and question out")


@dataclass(kw_only=True, slots=True)
class ConversionConfig:
    """A model from one format into another."""

    source: str
    """A run, one of its checkpoints, or a model folder: ours, transformers' or the original's."""
    to: str | None
    """The folder to make."""
    accept: list[str]
    """Paths in `source` of files that were changed there on purpose: nothing is written but their digests, anew."""
    format: FolderFormat
    dtype: KeptDType
    """keep: every weight as the source has it."""
    merge: bool
    """Of a source with adapters: a whole model with these merged into it; false: the folder of the adapters."""
    base: str | None
    """What the adapters of a source are for: a language model, or a whole LLaVA model. null: what the source says."""
    language: str | None
    """The language model, for a source that holds a projector alone."""
    vision: str | None
    """The tower of an original's folder that names it otherwise, and the name that an original's folder gives it."""
    template: str
    """For a source that does not say its own."""
    image_aspect_ratio: AspectRatio | None
    """null: as the source says."""
    overwrite: bool
    verify: bool
    """Read back what was written and compare its logits with the source's."""


def load(schema: type[T], node: DictConfig) -> T:
    """The typed configuration of a composed one.

    Raises:
        ConfigError: a key that no class here has, a value of another type, or one that a check refuses; the message
            names the key, the value and what would do.
    """
    refuse_what_acts(node)
    refuse_unknown_keys(schema, node)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), without_hydra(node))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; give it on the command line: {missing[0]}=VALUE")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(about_value(schema, node, error)) from error
    assert isinstance(config, schema)
    refuse_secret_values(OmegaConf.to_container(merged, resolve=True))
    return config


def refuse_what_acts(node: DictConfig) -> None:
    """Values are values: none names Python to call, and none reads a secret from the environment.

    Raises:
        ConfigError: naming the key.
    """
    raw = OmegaConf.to_container(without_hydra(node), resolve=False)
    for name, key in keys_of(raw):
        if key in TARGETS:
            raise ConfigError(f"{name}: no configuration may name Python to call; take it out")
    for name, value in leaves_of(raw):
        for variable in ENV.findall(value) if isinstance(value, str) else ():
            plain = variable.partition(",")[0].strip()
            if not re.fullmatch(r"\w+", plain) or is_secret_variable(plain):
                raise ConfigError(
                    f"{name}={value}: this variable of the environment may hold a secret, and is not read"
                )


def refuse_secret_values(tree: object) -> None:
    """Raises ConfigError where a value is a secret: a configuration is written to files, and told on the screen."""
    for name, value in leaves_of(tree):
        if isinstance(value, str) and has_secret(value):
            raise ConfigError(
                f"{name} holds a secret (a token, or a password in an address), and is written to files: take it out"
            )


def at_least(key: str, value: int, least: int, why: str = "") -> None:
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}" + (f": {why}" if why else ""))


def without_hydra(node: DictConfig) -> DictConfig:
    kept = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
    assert isinstance(kept, DictConfig)
    return kept


def about_value(schema: Any, node: DictConfig, error: OmegaConfBaseException) -> str:
    """What OmegaConf says of a value, in terms of the key."""
    key = str(error.full_key or error.key)
    value = value_at(node, key)
    wanted = None
    if isinstance(error, ValidationError):
        named = next((prefix for prefix in SOURCES if key.startswith(prefix)), None)
        own = "" if named is None else key.removeprefix(named).partition(".")[2]
        wanted = takes(schema, key) if named is None else takes(NAMED[named], own)
        if named is not None and not own:
            wanted = f"a source with keys of its own: {key}.path=FILE"
    if wanted is None:
        return f"{key}={value}: {str(error).splitlines()[0]}"
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return f"{key}={shown} must be {wanted}"


def value_at(node: DictConfig, key: object) -> object:
    try:
        return OmegaConf.select(node, str(key))
    except OmegaConfBaseException:
        return "?"


def schema_keys(schema: Any, prefix: str = "") -> list[str]:
    """Every key of a schema, dotted."""
    found = []
    for own in fields(schema):
        found.append(prefix + own.name)
        if is_dataclass(own.type):
            found += schema_keys(own.type, prefix + own.name + ".")
    return found


NAMED: Mapping[str, type] = MappingProxyType(dict(zip(SOURCES, (SourceConfig, HeldOutConfig), strict=True)))
"""What the user's own names stand for."""


def refuse_unknown_keys(schema: Any, node: DictConfig) -> None:
    """Hydra's `+key=value` adds any key; none is let through that nothing reads."""
    known = schema_keys(schema)

    def visit(part: DictConfig, prefix: str) -> None:
        for key in part:
            name = f"{prefix}{key}"
            if name == "hydra":
                continue
            if name not in known and prefix not in NAMED:
                raise ConfigError(f"{name} is not a key of the configuration{did_you_mean(name, known)}")
            child = part._get_node(key)
            inside = [k for k in known if k.startswith(f"{name}.")]
            if inside and not isinstance(child, DictConfig):
                raise ConfigError(f"{name}={part[key]} is a group of keys, which are set one by one: {inside[0]}=VALUE")
            if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
                known.extend(schema_keys(NAMED[prefix], name + ".") if prefix in NAMED else [])
                visit(child, name + ".")

    visit(node, "")


def did_you_mean(name: str, known: list[str]) -> str:
    """The nearest key, where one is near; a dotted name is near to no group."""
    groups = {key.rpartition(".")[0] for key in known}
    near = difflib.get_close_matches(name, [k for k in known if "." not in name or k not in groups], n=1)
    return f"; did you mean {near[0]}?" if near else ""
