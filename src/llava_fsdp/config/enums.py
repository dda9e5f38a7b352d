"""Choices of the configuration, each an Enum whose values are what users type."""

from enum import Enum


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
    skip = "skip"
    fail = "fail"


class BadRecords(Enum):
    """What becomes of a record that cannot be trained on."""

    fail = "fail"
    skip = "skip"


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
    fast = "fast"


class SpecialTokens(Enum):
    """What becomes of the tokenizer's special tokens, such as `</s>`, where a record's own text has them."""

    text = "text"
    parse = "parse"


class SamplerName(Enum):
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


class ActivationCheckpointing(Enum):
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


class WandbMode(Enum):
    """Whether Weights & Biases is told of a run."""

    off = "off"
    offline = "offline"
    """into output_dir/wandb, which `wandb sync` sends later"""
    online = "online"
