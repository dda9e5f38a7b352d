"""Enums of the values that users can choose for configuration keys. An enum's values are what users type."""

from enum import Enum


class Strategy(Enum):
    """Sharding strategies. Their names are those of `torch.distributed.fsdp.ShardingStrategy`, except SHARD_OPTIMIZER
    (ZeRO-1), which torch does not have."""

    NO_SHARD = "NO_SHARD"
    SHARD_OPTIMIZER = "SHARD_OPTIMIZER"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    _HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"
    auto = "auto"
    """The planner (`llava-fsdp plan`) chooses a strategy when a training begins, and the run records the choice."""


class ContextHow(Enum):
    """Choices of `parallel.context_how`: how ranks that share a row compute its attention."""

    auto = "auto"
    """`ulysses` if the number of ranks divides the number of attention heads, else `gather`."""
    ulysses = "ulysses"
    """Each rank computes all positions for some of the heads (arXiv 2309.14509)."""
    gather = "gather"
    """Each rank computes its own positions, with the keys and values of all (arXiv 2407.21783 section 3.3.2)."""


PipelineSchedule = Enum("PipelineSchedule", {"1f1b": "1f1b", "interleaved": "interleaved"})
"""Choices of `parallel.schedule`: in which order a rank runs the micro-batches of its stages. 1f1b: one stage a rank,
which runs one forward and one backward pass in turn (arXiv 1806.03377). interleaved: two stages a rank, with a smaller
idle time and twice the messages (arXiv 2104.04473 section 2.2)."""


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
    """Choices of `data.bad_records`: what happens if a training record is invalid, such as one with a missing image."""

    fail = "fail"
    skip = "skip"


class Examine(Enum):
    """Choices of `data.examine`: which images are opened before training, and how much of them is read."""

    auto = "auto"
    """`decode` for a dataset of up to a million images, `sample` for a larger one."""
    decode = "decode"
    """Every image is decoded completely."""
    head = "head"
    """Only the size in the header of every image is read."""
    sample = "sample"
    """Some images are decoded completely. The size of the others is read only if it is needed before training."""
    lazy = "lazy"
    """No image is opened."""


class AspectRatio(Enum):
    """Choices of `data.image_aspect_ratio`: how an image is fitted into the square input of the vision tower; it may be
    cut into several such squares (tiles)."""

    square = "square"
    """The image is squeezed to a square, or its centre is cropped, as the vision tower's own preprocessing does."""
    pad = "pad"
    """The image is padded to a square with the mean colour (LLaVA-1.5)."""
    anyres = "anyres"
    """The image is cut into several tiles (LLaVA-NeXT)."""
    anyres_max = "anyres_max"
    """The image is cut into several tiles, whose features are shrunk if there are too many; if a sample has several
    images, each is padded instead (LLaVA-OneVision)."""


class Parity(Enum):
    """Choices of `labels`: whether exactly the tokens of all answers are labels, or the same tokens as in the original
    LLaVA trainer, including its bugs."""

    exact = "exact"
    llava_v1_5 = "llava_v1_5"


class Pixels(Enum):
    """Choices of `data.pixels`: how an image file is converted to the pixels for the vision tower."""

    exact = "exact"
    llava_v1_5 = "llava_v1_5"
    fast = "fast"


class SpecialTokens(Enum):
    """Choices of `data.special_tokens`: how special tokens such as `</s>` in the text of a training record are
    tokenized."""

    text = "text"
    parse = "parse"


class Thoughts(Enum):
    """Choices of `data.thoughts`: what is done with the thoughts of answers."""

    refuse = "refuse"
    train = "train"
    context = "context"
    drop = "drop"


class EmptyThoughts(Enum):
    """Choices of `data.empty_thoughts`: whether the empty thought that a chat template writes before an answer without
    a thought has labels."""

    context = "context"
    train = "train"


class History(Enum):
    """Choices of `data.history`: what prompts show of the thoughts of earlier turns."""

    template = "template"
    keep = "keep"


class Answers(Enum):
    """Choices of `data.answers`: which answers of a record have labels."""

    all = "all"
    last = "last"


class LabelWeights(Enum):
    """Choices of `data.weights`: whether the weights that records give their answers are obeyed."""

    use = "use"
    ignore = "ignore"


class ShownThoughts(Enum):
    """Choices of the key `thoughts` of `chat`: whether the thought before an answer is shown."""

    show = "show"
    hide = "hide"


class OptimName(Enum):
    adamw = "adamw"
    muon = "muon"


class SamplerName(Enum):
    shuffle = "shuffle"
    computed_shuffle = "computed_shuffle"
    llava_v1_5 = "llava_v1_5"


class CompatName(Enum):
    none = "none"
    llava_v1_5 = "llava_v1_5"


class PatchMerge(Enum):
    """Choices of `model.patch_merge`: if an image is cut into several tiles, how these are joined into one sequence of
    tokens (`mm_patch_merge_type` of the original LLaVA)."""

    flat = "flat"
    spatial = "spatial"
    spatial_unpad = "spatial_unpad"


class Feature(Enum):
    auto = "auto"
    patch = "patch"
    full = "full"


class DType(Enum):
    """Choices of the dtypes of `precision`: in which a training computes, adds gradients and computes norms."""

    auto = "auto"
    """bf16 if the devices of all ranks have instructions for it, else fp32. Every command replaces it before it builds
    a model (`PrecisionConfig.settled`)."""
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class ExportDType(Enum):
    """Choices of `export.dtype`."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class MasterDType(Enum):
    """Choices of `precision.master_dtype`: dtype in which trainable weights are stored."""

    fp32 = "fp32"
    bf16 = "bf16"


class MomentDType(Enum):
    """Choices of `precision.moment_dtype`: dtype in which the optimizer's moments are stored."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


class LinearKind(Enum):
    """Choices of `precision.linear`: how the linear layers of the language model's transformer blocks multiply."""

    same = "same"
    """The products are in precision.param_dtype."""
    fp32_sums = "fp32_sums"
    """The products are in precision.param_dtype, except the gradient of a weight: its product adds it to the fp32 sum
    over micro-batches without rounding it. For one rank only."""
    fp8 = "fp8"
    """Their factors are cast to fp8, and the products are in param_dtype."""
    int8_mixed = "int8_mixed"
    """Their factors are cast to int8, and the products are in param_dtype."""

    @property
    def in_8_bits(self) -> bool:
        """Whether the factors of the products have 8 bits."""
        return self in (LinearKind.fp8, LinearKind.int8_mixed)


class ActivationCheckpointing(Enum):
    """Choices of `activation_checkpointing.mode`: which tensors of the forward pass a transformer block keeps for the
    backward pass."""

    none = "none"
    """Keeps all activations; nothing is computed again."""
    full = "full"
    """Keeps the block's input; the whole block is computed again."""
    selective = "selective"
    """Keeps the block's input and the results of its matrix products and its attention; the rest is computed again."""
    budget = "budget"
    """Keeps as many activations as a given share of the memory allows, chosen by torch's partitioner; the block is
    compiled."""
    offload = "offload"
    """Keeps the block's input in host memory; the whole block is computed again."""
    dynamic = "dynamic"
    """Begins as `full`. After three steps, blocks that were measured keep all their activations, as many as the memory
    that is left has room for."""
    auto = "auto"
    """The planner (`llava-fsdp plan`) chooses a mode when a training begins, and the run records the choice."""


class OffloadMode(Enum):
    """Choices of `offload.mode`: which training states (optimizer moments, gradients, weights) are kept in host memory
    or in files instead of in the GPU's memory."""

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
    sqrt = "sqrt"
    constant = "constant"
    warmup_decay = "warmup_decay"
    warmup_log = "warmup_log"

    @property
    def decays(self) -> bool:
        """Whether the learning rate falls even without a warm-up; that of `warmup_decay` needs one of two steps or
        more."""
        return self in (Schedule.cosine, Schedule.linear, Schedule.sqrt)


class Normalize(Enum):
    step = "step"
    micro_batch = "micro_batch"


class LossKernel(Enum):
    """Choices of `loss.kernel`: implementation of the cross-entropy loss, which is computed from hidden states and the
    weights of the output layer instead of from logits."""

    auto = "auto"
    """The implementation that was measured to be fastest: chunked."""
    chunked = "chunked"
    """This project's own implementation, computed in chunks of label tokens."""
    torch = "torch"
    """torch.nn.functional.linear_cross_entropy in fp32; needs torch 2.13 or later."""


class Attention(Enum):
    """Choices of `attention`: implementation of attention in packed rows, which are several samples end to end, each
    attending only to itself."""

    auto = "auto"
    varlen = "varlen"
    """torch's attention kernel for sequences of different lengths, on CUDA in bf16 or fp16."""
    flash = "flash"
    """Attention kernel of the package flash-attn, which must be installed."""
    sdpa = "sdpa"
    """torch's scaled dot product attention, one sample at a time; on any device, in any dtype."""


class FolderFormat(Enum):
    """Choices of `format` in the command `export`: the program for which an exported model folder is written."""

    hf = "hf"
    """Folder for the transformers library."""
    llava = "llava"
    """Folder for the original LLaVA code."""
    projector = "projector"
    """Folder from which the original LLaVA starts its second training stage: mm_projector.bin."""
    peft = "peft"
    """Folder for the transformers library with the base model, and in its subfolder `adapter` the LoRA adapters, for
    peft and vLLM."""
    gguf = "gguf"
    """Folder for llama.cpp and Ollama: model.gguf, mmproj.gguf and a Modelfile."""


OnSaveError = Enum("OnSaveError", {"raise": "raise", "warn": "warn"})  # `raise` is a keyword of Python
"""What happens if a checkpoint cannot be written."""


class KeptDType(Enum):
    """Choices of `dtype` in the command `export`."""

    keep = "keep"
    bf16 = "bf16"
    fp32 = "fp32"
    fp16 = "fp16"
    """Only with format=gguf."""
    q8_0 = "q8_0"
    """Only with format=gguf: blocks of 32 values in 8 bits, with a common scale."""


class Devices(Enum):
    """Choices of `launch.devices`: which GPUs each training gets that the command `sweep` starts."""

    own = "own"
    """As many GPUs as the run has ranks, locked against other runs of the same user."""
    shared = "shared"
    """All GPUs that the sweep can see."""


class SweepMetric(Enum):
    """Choices of `sweep.metric`: metric by which the command `sweep` compares its trainings."""

    loss = "loss"
    val_loss = "val_loss"
    val_score = "val_score"
    """Higher is better for this metric, so the sweeper minimizes its negative."""


class Metric(Enum):
    """Choices of `val.metric`: how an answer that the model generates in validation is scored against the answer in the
    record."""

    exact = "exact"
    """Score 1 if both texts are equal except for case and surrounding white space, else 0."""
    vqa = "vqa"
    """VQAv2's accuracy; before it is computed, answers are normalized by VQAv2's rules."""


class Format(Enum):
    text = "text"
    json = "json"


class BestBy(Enum):
    """Choices of `checkpoint.best`: the number of a validation by which checkpoints are compared."""

    loss = "loss"
    """The lowest loss is the best."""
    score = "score"
    """The highest score of answers is the best."""
    accuracy = "accuracy"
    """For pairs: the highest share whose chosen answer has the higher reward is the best."""
    margin = "margin"
    """For pairs: the greatest difference of rewards is the best."""


class Which(Enum):
    """Choices of `export.which`, and of `which` in the command `export`: the weights that are exported."""

    last = "last"
    """The last step."""
    best = "best"
    """The step with the best validation (checkpoint.best)."""
    average = "average"
    """The last step's moving average of the weights (optim.ema)."""


class Task(Enum):
    """Choices of `task` in the command `evaluate`: kind of questions that the model answers, which also decides how its
    answers are scored."""

    conversations = "conversations"
    """First question of each LLaVA record; an answer is right if it equals the record's answer."""
    vqa = "vqa"
    """Questions with short answers, which are compared with the answers of several people as in VQAv2."""
    textvqa = "textvqa"
    """Questions with short answers, which are compared with the answers of several people as in TextVQA."""
    multiple_choice = "multiple_choice"
    """Multiple-choice questions that are answered by a letter, as in ScienceQA."""
    pairs = "pairs"
    """Records with a better and a worse answer, of which the model should find the better one more probable."""
    yes_no = "yes_no"
    """Yes-or-no questions, as in POPE."""


class LoraBias(Enum):
    """Choices of `model.lora.bias`: which biases are trained in addition to the adapters. The choices are named as in
    peft."""

    none = "none"
    all = "all"
    """All biases of a model part that has adapters."""
    lora_only = "lora_only"
    """Biases of the layers that have adapters."""


class Quantizer(Enum):
    """Choices of `model.quantize.mode`: number format in which the frozen weights of the linear layers in the language
    model's transformer blocks are stored."""

    none = "none"
    """Unquantized weights in precision.param_dtype."""
    nf4 = "nf4"
    """4-bit code for normally distributed values (QLoRA, arXiv 2305.14314)."""
    fp4 = "fp4"
    """4-bit floating point numbers."""
    int8 = "int8"
    """8-bit integers with a scale for each row (LLM.int8(), arXiv 2208.07339)."""


class WandbMode(Enum):
    """Choices of `track.wandb`: whether Weights & Biases records a training."""

    off = "off"
    offline = "offline"
    """Records into output_dir/wandb; `wandb sync` can send it later."""
    online = "online"


class PairForm(Enum):
    """Choices of `pref.form`: loss of a pair as a function of its margin m, which is pref.beta times the difference of
    the scores of the chosen and the rejected answer, minus pref.gamma."""

    sigmoid = "sigmoid"
    """-log sigmoid(m): DPO (arXiv 2305.18290)."""
    robust = "robust"
    """DPO for labels of which the share pref.label_smoothing is wrong (arXiv 2403.00409)."""
    hinge = "hinge"
    """max(0, 1 - m): SLiC (arXiv 2305.10425)."""
    ipo = "ipo"
    """((m - 1/2) / beta)^2: IPO (arXiv 2310.12036)."""


class PairReference(Enum):
    """Choices of `pref.reference`: the model whose log-probabilities are subtracted from those of the trained one."""

    auto = "auto"
    """`adapters` if adapters alone train and begin at zero, else `stored`."""
    adapters = "adapters"
    """The model without its adapters, in a second forward pass."""
    stored = "stored"
    """The model as training begins. Its log-probabilities are computed once and stored."""
    none = "none"
    """No reference: SimPO (arXiv 2405.14734)."""
