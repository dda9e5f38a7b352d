"""Measure the activation memory of one micro-batch's forward and backward pass, block by block, on the meta device.

Few blocks of the language model are run. Blocks of one kind need the same memory, so those before the last one stand
for all between the first and the last.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from llava_fsdp.config import ActivationCheckpointingConfig, Attention, Config, LinearKind, Part
from llava_fsdp.data.batching.batch import ForwardInputs, Segments
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.packed_attention.attention import Kernel
from llava_fsdp.model.packed_attention.packs import NothingPacked, packing_refused
from llava_fsdp.model.parts import Parts
from llava_fsdp.parallel.compile import Compilations
from llava_fsdp.parallel.context.context_attention import plan_context, share_attention
from llava_fsdp.parallel.context.divide_inputs import share_whole_rows
from llava_fsdp.parallel.expert_parallel import share_experts_on_meta
from llava_fsdp.parallel.fsdp.units import block_names
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.memory.memory import OUTPUT
from llava_fsdp.parallel.precision.precision import DTYPES, MASTERS, compute_norms_in_fp32, store_weights
from llava_fsdp.parallel.precision.summed_linear import SummedLinear, add_in_products
from llava_fsdp.plan.memory.blank_images import BlankImages
from llava_fsdp.plan.memory.divided_model import divide_on_meta
from llava_fsdp.plan.memory.known_values import KnownValues
from llava_fsdp.plan.memory.meta_trace import (
    Event,
    FusedKernels,
    LiveBytes,
    Trace,
    collect_gradients,
    split_like_inductor,
)
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes

UNLIKE, UNLIKE_OF_WHOLE = 1, 3
"""Number of blocks at the beginning of the language model that may be unlike later ones; and in a whole model of
transformers. Some of these add image features to the outputs of the first three blocks (DeepStack, arXiv 2406.04334).
"""


@dataclass(frozen=True)
class Live:
    """Bytes of the tensors that exist at one moment of a forward or backward pass, without weights."""

    activations: int = 0
    logits: int = 0
    gradients: int = 0
    """Bytes of the weights' gradients, in the dtypes in which the backward pass produces them."""

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gradients

    def __add__(self, by: "Live") -> "Live":
        return Live(self.activations + by.activations, self.logits + by.logits, self.gradients + by.gradients)

    def __sub__(self, by: "Live") -> "Live":
        return Live(self.activations - by.activations, self.logits - by.logits, self.gradients - by.gradients)


@dataclass(frozen=True)
class PassSegment:
    """Part of a forward or backward pass: a block, the output layer, or everything between two of them."""

    block: str
    """Name of the block, or `OUTPUT` for an output layer that has its own weight; empty for everything between them."""
    backward: bool
    begin: Live
    end: Live
    peak_with_fsdp: Live
    """Memory peak under FSDP. All gradients of the block's weights count, as FSDP reduces them when it ends."""
    peak_in_first_micro_batch: Live
    """Memory peak without FSDP in the first micro-batch. Each gradient is at once cast to the master weight's dtype."""
    peak_in_later_micro_batches: Live
    """Memory peak without FSDP in later micro-batches. Each gradient is added to that of the earlier ones."""
    gradient_bytes: int
    """Bytes of all weight gradients that the segment produces, in the dtypes in which they are computed."""
    master_gradient_bytes: int
    """Bytes of all weight gradients that the segment produces, in the dtypes of the master weights."""

    def shifted(self, by: Live, block: str) -> "PassSegment":
        """Return a copy for `block`, another block of the same kind, with `by` more bytes at every moment."""
        return replace(self, block=block, **{name: getattr(self, name) + by for name in LEVELS})


LEVELS = ("begin", "end", "peak_with_fsdp", "peak_in_first_micro_batch", "peak_in_later_micro_batches")
"""Names of the fields of PassSegment that hold a Live."""


class ActivationMeter:
    """Measures activation memory under one mode of activation checkpointing."""

    def __init__(
        self,
        parts: Parts,
        cfg: Config,
        activation_checkpointing: ActivationCheckpointingConfig,
        kernel: Kernel | None,
        part: int = 0,
        compiled: bool = False,
        one_row: bool = True,
        images: BlankImages | None = None,
    ):
        """Build on the meta device the model whose activations are measured, with few blocks in its language model.

        Args:
            kernel: attention of packed rows; None: rows are padded.
            part: number of the rank whose memory is measured, among those that process a row together.
            compiled: whether the language model's blocks keep for the backward pass what the compiler keeps.
            one_row: whether micro-batches have one row; compiled blocks then expect this shape.
            images: makes the inputs of a whole model of transformers; None: the model has tiles.
        """
        # if only some blocks train, they differ in what they keep for the backward pass
        are_unlike = cfg.model.trained.get(Part.language) is not None
        # number of blocks at the beginning that may be unlike later ones
        unlike = UNLIKE if images is None else UNLIKE_OF_WHOLE
        self.measured, self.period = blocks_to_measure(parts.language, unlike)
        short = parts if are_unlike else with_depth(parts, self.measured)
        # padded rows use this package's SDPA: the mask of transformers' depends on values, which meta tensors lack
        has_own = images is None and packing_refused(parts.language) is None
        attention = kernel or (Kernel(Attention.sdpa, "padded rows") if has_own else None)
        # a copy, because a model writes its attention into its configuration, and other meters have other attention
        model = build_architecture(
            copy.deepcopy(short), cfg.model, DTYPES[cfg.precision.param_dtype], attention, cfg.loss
        )
        if images is not None:
            # parameters on which no loss depends do not train
            model.unused = images.model.unused
            model.freeze()
        if cfg.parallel.tensor > 1:
            divide_on_meta(model, cfg.parallel.tensor, cfg.loss.chunk_tokens)
        store_weights(model, cfg.precision, sharded=False)
        compute_norms_in_fp32(model, cfg.precision)
        if cfg.precision.linear is LinearKind.fp32_sums:
            sum_on_meta(model.blocks()[0], MASTERS[cfg.precision.master_dtype])
        count = Compilations(compiler=split_like_inductor) if compiled else None
        device = torch.device("meta")
        apply_activation_checkpointing(model.blocks(), activation_checkpointing, device, count, one_row)
        model.train()
        if cfg.parallel.num_context > 1 and kernel is not None:
            share_attention_on_meta(model, kernel, cfg, part)
        if cfg.parallel.expert > 1:
            share_experts_on_meta(model.language, model.experts(), cfg.parallel.expert)
        self.model = model
        self.packed = kernel is not None
        self.images = images
        self.blends = images is None and ImageTokens.of_config(cfg, parts.image_size, model.image_tokens).blends
        """Whether image tokens are weighted sums of vision features (with anyres_max)."""
        self.vocabulary = math.ceil(short.language.vocab_size / cfg.parallel.tensor)
        self.master = MASTERS[cfg.precision.master_dtype]
        self.depth = None if short is parts else parts.language.num_hidden_layers
        """Number of blocks of the real language model; None if the measured model has all of them."""

    def segments(self, micro: MicroBatchSizes) -> list[PassSegment]:
        """Run a micro-batch forward and backward, and return the memory of both passes in the order of execution. If
        fewer blocks were run than the real model has (`depth`), the segments of the others are copies of a block's."""
        if self.images is None:
            trace = run(self.model, inputs_of(self.model, micro, self.packed, self.blends))
        else:
            with KnownValues():  # a whole model needs values of token ids and positions to find shapes
                trace = run(self.model, self.images.inputs_of(micro, self.packed))
        segments = split_into_segments(trace, self.model, self.vocabulary, self.master)
        self.model.zero_grad(set_to_none=True)
        if self.depth is None:
            return segments
        return deepened(segments, stack_name(self.model), self.depth, self.measured, self.period)


def sum_on_meta(blocks: nn.ModuleList, master: torch.dtype) -> None:
    """Make linear layers of blocks on the meta device add gradients within products, to sums of the dtype `master`."""
    add_in_products(blocks, sharded=False)
    for module in blocks.modules():
        if isinstance(module, SummedLinear):
            module.gradient_sum = torch.empty_like(module.weight, dtype=master)


def share_attention_on_meta(model: Architecture, kernel: Kernel, cfg: Config, part: int) -> None:
    """Make a model attend as rank `part` of those that share a row. There are no other ranks: functions that only
    allocate the results stand for the collectives."""
    size = cfg.parallel.num_context
    plan = plan_context(cfg.parallel.context_how, model.language_config, size, part, cfg.parallel.tensor)
    name = f"{kernel.name}_{plan.how.value}_{part}_of_{size}"  # several models are planned in one process
    if model.attends_by_mask:  # a whole model of transformers, which gets whole rows on every rank
        return share_whole_rows(model, kernel, plan, torch.clone, name)
    share_attention(model.language, kernel, plan, torch.clone, lambda keys: torch.cat([keys] * size), name)


def blocks_to_measure(language: PretrainedConfig, unlike: int) -> tuple[int, int]:
    """Return how many blocks of a language model must be run to know the memory of all, and after how many blocks their
    kinds (`layer_types`) repeat. The last block that is run is of the kind of the model's last one.

    Args:
        unlike: number of blocks at the beginning that may be unlike later ones of their kind.
    """
    depth = language.num_hidden_layers
    kinds = list(getattr(language, "layer_types", None) or [None] * depth)
    period = next(n for n in range(1, depth + 1) if kinds[n:] == kinds[: depth - n])
    least = unlike + period + 1  # the first ones, the period that is repeated for all others, the last one
    return min(depth, least + (depth - least) % period), period


def with_depth(parts: Parts, depth: int) -> Parts:
    """Return the parts of a model with at most the first `depth` blocks of its language model."""
    language = parts.language
    if language.num_hidden_layers <= depth:
        return parts
    # a whole model of transformers has one configuration of all parts, which contains that of the language model
    short, whole = copy.deepcopy(language), copy.deepcopy(parts.class_config)
    for text in [short, *([whole.get_text_config()] if whole is not None else [])]:
        text.num_hidden_layers = depth
        if getattr(language, "layer_types", None):
            text.layer_types = list(language.layer_types)[:depth]
    return replace(parts, language=short, class_config=whole)


def inputs_of(model: Architecture, micro: MicroBatchSizes, packed: bool, blends: bool = False) -> ForwardInputs:
    """Make the arguments of the model's forward pass on the meta device. `packed`: whether the samples are packed into
    rows. `blends`: whether image tokens are weighted sums of four features."""
    with torch.device("meta"):
        ids = torch.zeros((micro.rows, micro.length), dtype=torch.int64)
        segments = None
        if packed:
            begins = torch.zeros(micro.samples + 1, dtype=torch.int32)
            tokens = micro.tokens * micro.context
            each = tokens // micro.samples
            lengths = (*[each] * (micro.samples - 1), tokens - each * (micro.samples - 1))
            segments = Segments(torch.zeros_like(ids), begins, lengths)
        images = dict(model.empty_image_inputs(micro.tiles, micro.image_tokens, blends))
        labels = torch.zeros(micro.labels, dtype=torch.int64)
        # of dropout: one for each token of a packed row, or for each padded row
        seeds = torch.zeros(ids.shape if packed else (micro.rows, 1), dtype=torch.int64)
        return {
            "input_ids": ids,
            "segments": segments,
            "images": images,
            "seeds": seeds,
            "label_positions": labels,
            "label_ids": labels.clone(),
        }


def run(model: Architecture, inputs: ForwardInputs) -> Trace:
    """Run one forward and one backward pass, and return the trace of allocated and freed storages. Attention and
    products of experts are counted as the fused kernels of a GPU would allocate them."""
    trace = Trace()
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    # NothingPacked: transformers' check for packed samples, which needs values, finds none
    live = LiveBytes(trace, iter([*model.parameters(), *model.buffers(), *tensors]))
    with collect_gradients(model, live, trace), mark_blocks(model, trace), FusedKernels(), NothingPacked(), live:
        loss = model(**inputs)
        trace.mark("backward")
        # `loss.backward()` would be handled by FusedKernels, which is then inactive inside of it, where activation
        # checkpointing runs blocks again. The arguments are those with which torch.autograd.backward calls the engine.
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
    return trace


@contextmanager
def mark_blocks(model: Architecture, trace: Trace) -> Iterator[None]:
    """Context manager that marks in the trace where a pass through a block or the output layer begins or ends."""
    handles = []

    # the gradient of a block's output exists when its backward pass begins, and that of its input when it ends
    def hook(tensor: Any, text: str) -> None:
        if torch.is_tensor(tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: trace.mark(text))

    def before(name: str) -> Any:
        def enter(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            trace.mark(f"enter {name}")
            hook(inputs[0] if inputs else named["hidden_states"], f"leave {name}")

        return enter

    def after(name: str) -> Any:
        def leave(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            trace.mark(f"leave {name}")
            hook(output if torch.is_tensor(output) else output[0], f"enter {name}")

        return leave

    modules = dict(block_names(model, model.blocks()))
    output = model.output_layer()
    if output is not None:
        modules[output] = OUTPUT
    for block, name in modules.items():
        handles += [
            block.register_forward_pre_hook(before(name), with_kwargs=True),
            block.register_forward_hook(after(name)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class TraceReader:
    """Reads a trace event by event: counts the bytes alive, and splits the passes into segments."""

    def __init__(self, trace: Trace, vocabulary: int, weights: dict[str, nn.Parameter], master: torch.dtype):
        """Begin to read a trace. `vocabulary`: width of this rank's logits, by which they are recognized. `weights`:
        parameters by name. `master`: dtype of the master weights."""
        self.vocabulary = vocabulary
        self.master = master
        self.numbers = {name: number for number, name in trace.gradients.items()}  # storages of weights' gradients
        self.gradients = set(trace.gradients)
        self.weights = weights
        self.logits: set[int] = set()
        self.unfinished_gradients: dict[int, int] = {}
        """Storage number -> bytes of a gradient that the backward pass is still computing."""
        self.level = Live()
        self.backward = False
        self.forward_gradients: dict[int, int] = {}
        """Storage number -> bytes of the output layer's gradient, which the loss computes in the forward pass."""
        self.segments: list[PassSegment] = []
        self.open("")  # begins the segment before the first block

    def open(self, block: str) -> None:
        """Begin the segment of `block` (empty for what is between blocks) with the bytes that exist now (`level`). The
        three peaks are with FSDP, and without it in the first and in later micro-batches."""
        self.block = block
        self.begin = self.peak_with_fsdp = self.level
        self.peak_in_first_micro_batch = self.peak_in_later_micro_batches = self.level
        self.gradient_bytes = self.master_gradient_bytes = 0
        self.is_empty = True

    def close(self, next_block: str) -> None:
        """End the current segment and begin that of `next_block` (a block, the output layer, or empty for what is
        between them). A segment between blocks in which nothing was allocated or freed is dropped."""
        if self.block or not self.is_empty:
            # bytes alive at its ends and at its peaks (with FSDP; without it in the first and in later micro-batches),
            # and of the weight gradients that it makes, in their own dtypes and in those of the master weights
            self.segments.append(
                PassSegment(
                    self.block,
                    self.backward,
                    begin=self.begin,
                    end=self.level,
                    peak_with_fsdp=self.peak_with_fsdp,
                    peak_in_first_micro_batch=self.peak_in_first_micro_batch,
                    peak_in_later_micro_batches=self.peak_in_later_micro_batches,
                    gradient_bytes=self.gradient_bytes,
                    master_gradient_bytes=self.master_gradient_bytes,
                )
            )
        self.open(next_block)

    def add(self, event: Event) -> None:
        """Count a storage that was allocated or freed: as a weight's gradient if the backward pass makes it, as logits
        if it is as wide as the vocabulary, else as an activation. A gradient that the forward pass makes (the loss
        computes that of the output layer there) counts as an activation until `finish_gradient` is called for it."""
        self.is_empty = False
        if event.storage in self.gradients and self.backward:
            if event.change > 0:
                self.unfinished_gradients[event.storage] = event.change
        elif event.storage in self.logits or (event.change > 0 and event.width == self.vocabulary):
            self.logits.add(event.storage)
            self.level += Live(logits=event.change)
        else:
            if event.storage in self.gradients:
                self.forward_gradients[event.storage] = event.change
            self.level += Live(activations=event.change)
        self.update_peaks()

    def finish_gradient(self, name: str) -> None:
        """Count a parameter's gradient as complete: the segment has made it, in its own dtype under FSDP
        (`gradient_bytes`), cast to the master weight's dtype without FSDP (`master_gradient_bytes`)."""
        number, weight = self.numbers[name], self.weights[name]
        if number in self.forward_gradients:
            size = self.forward_gradients.pop(number)
            self.level -= Live(activations=size)
            self.unfinished_gradients[number] = size
        if number in self.unfinished_gradients:  # the hook of a tied weight's gradient runs twice
            # an fp32 weight, or one in the dtype of the master weights, has no separate master weight
            is_own_master = weight.dtype in (torch.float32, self.master)
            size = weight.numel() * (weight.dtype if is_own_master else self.master).itemsize
            self.update_peaks(0 if is_own_master else size)
            self.gradient_bytes += self.unfinished_gradients.pop(number)
            self.master_gradient_bytes += size

    def update_peaks(self, casting: int = 0) -> None:
        """Raise the segment's three memory peaks to the bytes that exist now, where these are more. They differ in
        which of the weight gradients that the segment has made still exist. `casting`: bytes of the copy of a gradient
        in the master weight's dtype, which exists only without FSDP."""
        unfinished = sum(self.unfinished_gradients.values())
        # with FSDP, which reduces all gradients of a block when the block ends
        self.peak_with_fsdp = larger(self.peak_with_fsdp, self.level, self.gradient_bytes + unfinished)
        # without FSDP, in the first micro-batch: each gradient is cast to the master weight's dtype
        gradients = self.master_gradient_bytes + unfinished + casting
        self.peak_in_first_micro_batch = larger(self.peak_in_first_micro_batch, self.level, gradients)
        # without FSDP, in later ones: each is at once added to that of the first, which is counted elsewhere
        self.peak_in_later_micro_batches = larger(self.peak_in_later_micro_batches, self.level, unfinished + casting)


def larger(peak: Live, level: Live, gradients: int) -> Live:
    """Return the one with more bytes: the one so far, `peak`, or `level` with these bytes of gradients."""
    return max(peak, replace(level, gradients=gradients), key=lambda live: live.total)


def split_into_segments(trace: Trace, model: Architecture, vocabulary: int, master: torch.dtype) -> list[PassSegment]:
    """Split a trace at its marks into the runs of blocks, of the output layer, and of what is between them.

    The marks are `enter NAME` and `leave NAME` (of a block or the output layer, in both passes), `backward` (that pass
    begins) and `gradient NAME` (a parameter's gradient is complete). Events without a mark allocate or free memory.

    Args:
        vocabulary: width of this rank's logits, by which they are recognized.
        master: dtype of the master weights.
    """
    reader = TraceReader(trace, vocabulary, dict(model.named_parameters()), master)
    for event in trace.events:
        kind, _, name = event.mark.partition(" ")
        if kind == "":
            reader.add(event)
        elif kind == "gradient":
            reader.finish_gradient(name)
        elif kind != "leave" or name == reader.block:  # in the backward pass the next block enters before one leaves
            reader.close(name if kind == "enter" else "")
            reader.backward = reader.backward or kind == "backward"
    reader.close("")
    return reader.segments


def stack_name(model: Architecture) -> str:
    stack = find_blocks(model.language)
    return next(name for name, module in model.named_modules() if module is stack)


def deepened(segments: list[PassSegment], stack: str, depth: int, measured: int, period: int) -> list[PassSegment]:
    """Return the segments of a model with `depth` blocks, made from those of its first `measured` blocks by repeating
    the `period` blocks before the last one. `stack` is the name of the module list that holds the blocks. Each
    repetition begins with more bytes than the one before, because blocks keep tensors until their backward pass."""
    deep: list[PassSegment] = []
    shift = Live()
    first = measured - 1 - period  # number of the first block that is repeated
    for backward in (False, True):
        one_pass = [s for s in segments if s.backward is backward]
        places = {s.block: number for number, s in enumerate(one_pass)}
        begin, end = first, measured - 1
        if backward:  # blocks run in reverse order
            begin, end = end - 1, begin - 1
        begin, end = places[f"{stack}.{begin}"], places[f"{stack}.{end}"]
        growth = one_pass[end].begin - one_pass[begin].begin  # of the bytes; negative in the backward pass
        added = range(0, depth - measured + 1, period)  # what is added to the blocks' numbers
        last = {f"{stack}.{measured - 1}": f"{stack}.{depth - 1}"}
        deep += [s.shifted(shift, last.get(s.block, s.block)) for s in one_pass[:begin]]
        for number in reversed(added) if backward else added:
            names = {f"{stack}.{block}": f"{stack}.{block + number}" for block in range(first, measured - 1)}
            deep += [s.shifted(shift, names.get(s.block, s.block)) for s in one_pass[begin:end]]
            shift += growth
        shift -= growth  # one of the repetitions is the measured one itself
        deep += [s.shifted(shift, last.get(s.block, s.block)) for s in one_pass[end:]]
    return deep
