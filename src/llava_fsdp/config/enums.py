"""Choices of the configuration, each an Enum whose values are what users type."""

from enum import Enum


class Strategy(Enum):
    """Sharding strategies by their names in `torch.distributed.fsdp.ShardingStrategy`; SHARD_OPTIMIZER (ZeRO-1) has
    no name there."""

    NO_SHARD = "NO_SHARD"
    SHARD_OPTIMIZER = "SHARD_OPTIMIZER"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    _HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"
    auto = "auto"
    """Strategy chosen by the planner when a training begins, and recorded by the run."""


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
    """What happens with a record that cannot be trained on."""

    fail = "fail"
    skip = "skip"


class Examine(Enum):
    """How much of every image is read before training."""

    decode = "decode"
    """Every image is decoded completely."""
    head = "head"
    """Only the size in every image's header is read."""


class AspectRatio(Enum):
    square = "square"
    pad = "pad"
    anyres = "anyres"


class Parity(Enum):
    """Whether to be exact, or bit-compatible with the original LLaVA trainer, bugs included."""

    exact = "exact"
    llava_v1_5 = "llava_v1_5"


class Pixels(Enum):
    """How an image file is converted to the vision tower's pixels."""

    exact = "exact"
    llava_v1_5 = "llava_v1_5"
    fast = "fast"


class SpecialTokens(Enum):
    """How special tokens such as `</s>` in a record's own text are tokenized."""

    text = "text"
    parse = "parse"


class SamplerName(Enum):
    shuffle = "shuffle"
    llava_v1_5 = "llava_v1_5"


class CompatName(Enum):
    none = "none"
    llava_v1_5 = "llava_v1_5"


class PatchMerge(Enum):
    """How the tiles of an image are joined to a sequence (`mm_patch_merge_type` of the original)."""

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
    """Dtype of trainable weights."""

    fp32 = "fp32"
    bf16 = "bf16"


class MomentDType(Enum):
    """Dtype of the optimizer's moments."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


class LinearKind(Enum):
    """Number format of the matrix products in the linear layers of the language model's blocks."""

    same = "same"
    """Products in precision.param_dtype."""
    fp8 = "fp8"


class ActivationCheckpointing(Enum):
    """What a block keeps from the forward pass for the backward pass."""

    none = "none"
    """Keeps everything; nothing runs again."""
    full = "full"
    """Keeps the block's input; the block runs again."""
    selective = "selective"
    """Keeps the block's input and the results of its matrix products and its attention; the rest runs again."""
    budget = "budget"
    """Keeps what torch's partitioner chooses for a share of the memory; the block is compiled."""
    offload = "offload"
    """Keeps the block's input in host memory; the block runs again."""
    auto = "auto"
    """Mode chosen by the planner when a training begins, and recorded by the run."""


class OffloadMode(Enum):
    """What is kept outside of the device's memory; each mode adds to the one before."""

    none = "none"
    optimizer = "optimizer"
    """Optimizer moments are in host memory."""
    params = "params"
    """Shards of weights, gradients and moments are in host memory."""
    nvme = "nvme"
    """Shards of weights, gradients and moments are in files."""

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
    """Implementation of the loss from hidden states and the output layer."""

    auto = "auto"
    """The fastest one by measurement: chunked."""
    chunked = "chunked"
    """This project's own loss, computed in chunks of label tokens."""
    torch = "torch"
    """torch.nn.functional.linear_cross_entropy, from torch 2.13 on, in fp32."""


class Attention(Enum):
    """Implementation of attention within the samples of a packed row."""

    auto = "auto"
    varlen = "varlen"
    """torch's attention kernel for sequences of different lengths, on CUDA in bf16 or fp16."""
    flash = "flash"
    """Kernel of the flash-attn package, which must be installed."""
    sdpa = "sdpa"
    """torch's scaled dot product attention, one sample at a time; on any device, in any dtype."""


class FolderFormat(Enum):
    """Which program an exported folder is for."""

    hf = "hf"
    """Folder for the transformers library."""
    llava = "llava"
    """Folder for the original LLaVA code."""
    projector = "projector"
    """Folder for the original LLaVA's second training stage: mm_projector.bin."""


OnSaveError = Enum("OnSaveError", {"raise": "raise", "warn": "warn"})  # one of its names is a keyword
"""What happens if a checkpoint cannot be written."""


class KeptDType(Enum):
    keep = "keep"
    bf16 = "bf16"
    fp32 = "fp32"


class Devices(Enum):
    """Which GPUs a run of a sweep gets."""

    own = "own"
    """As many GPUs as the run has ranks, locked against other runs of this user."""
    shared = "shared"
    """All GPUs that the sweep sees."""


class SweepMetric(Enum):
    """Quantity that a sweep minimizes."""

    loss = "loss"
    val_loss = "val_loss"
    val_score = "val_score"
    """Metric of which more is better, so the sweeper gets its negative."""


class Metric(Enum):
    """How a generated answer is scored against the record's answer."""

    exact = "exact"
    """Score 1 if both texts are the same without regard to case and surrounding white space, else 0."""
    vqa = "vqa"
    """VQAv2's accuracy of answers, normalized by its rules."""


class Format(Enum):
    text = "text"
    json = "json"


class Task(Enum):
    """Kind of questions of an evaluation, and how their answers are scored."""

    conversations = "conversations"
    """First question of each LLaVA record; right if the answer is the record's."""
    vqa = "vqa"
    """Questions with short answers, compared with several people's answers as VQAv2 does."""
    textvqa = "textvqa"
    """Questions with short answers, compared with several people's answers as TextVQA does."""
    multiple_choice = "multiple_choice"
    """Multiple-choice questions answered by a letter, as in ScienceQA."""
    yes_no = "yes_no"
    """Yes-or-no questions, as in POPE."""


class LoraBias(Enum):
    """Biases that are trained beside the adapters, by peft's names."""

    none = "none"
    all = "all"
    """All biases of a model part that has adapters."""
    lora_only = "lora_only"
    """Biases of the layers that have adapters."""


class Quantizer(Enum):
    """Format of the frozen linear layers of the language model's blocks."""

    none = "none"
    """Unquantized weights in precision.param_dtype."""
    nf4 = "nf4"
    """4-bit code for normally distributed values (QLoRA, arXiv 2305.14314)."""
    fp4 = "fp4"
    """4-bit floating point numbers."""
    int8 = "int8"
    """8-bit integers with a scale for each row (LLM.int8(), arXiv 2208.07339)."""


class WandbMode(Enum):
    """Whether Weights & Biases records a run."""

    off = "off"
    offline = "offline"
    """Records into output_dir/wandb, for `wandb sync` to send later."""
    online = "online"
