"""Predict the longest sample that can be trained on 1, 2, 4, ... GPUs, for each number of ranks that share a row."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    OffloadMode,
    PlanConfig,
    Strategy,
)
from llava_fsdp.model.parts import Parts
from llava_fsdp.parallel.context.context_attention import plan_context
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import Machine
from llava_fsdp.plan.workload import Samples, packed_row
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.progress import Advance, Watch, watch_silently

MOST_TOKENS = 1 << 20
"""Greatest length of a sample that is tried; a longer one may fit."""
PIECE = 1024
"""Lengths are multiples of this number of tokens for each rank of a row."""
MODES = (ActivationCheckpointing.full, ActivationCheckpointing.offload)
"""Modes of activation checkpointing that are tried: those that keep the fewest bytes on the device."""


def longest(cfg: PlanConfig, machine: Machine, parts: Parts, show: Watch = watch_silently) -> list[dict[str, Any]]:
    """Predict the longest sample with which a step fits into memory, with zero3, for 1, 2, 4, ... GPUs and each number
    of ranks that may process a row together. Each row holds one sample, with the dataset's mean mix of images, text and
    labels. Lengths beyond the positions of the language model are reported as well.

    Returns:
        An object for each number of GPUs (`gpus`) and of ranks per row (`context`), with the `tokens` of the sample, 0
            if none fits; `activation_checkpointing`; and the predicted `bytes` on a rank.
    """
    contexts = context_sizes(cfg, parts)
    tried = sum(gpus % context == 0 for context in contexts for gpus in gpu_counts(cfg))
    with show("longest samples", tried) as advance:
        return points_of(cfg, machine, parts, contexts, advance)


def points_of(
    cfg: PlanConfig, machine: Machine, parts: Parts, contexts: Sequence[int], advance: Advance
) -> list[dict[str, Any]]:
    """Return the longest sample that fits into memory for each number of ranks per row in `contexts` and each number of
    GPUs that is a multiple of it: objects with `gpus`, `context` (ranks per row), `tokens` (of the sample; 0: none
    fits), `activation_checkpointing` and `bytes` (predicted for a rank). `advance(1)` is called after each."""
    points = []
    for context in contexts:
        parallel = replace(cfg.parallel, context=context)
        # without the configured limit of a row, which holds one sample of any length
        planner = Planner(replace(cfg, parallel=parallel, tokens_per_micro_batch=None), machine, parts=parts)
        # `full`; on a GPU also `offload`, which moves the inputs of blocks to host memory
        modes = MODES if machine.device == "cuda" else MODES[:1]
        checkpointing = [ActivationCheckpointingConfig(mode=mode, budget=None) for mode in modes]
        for gpus in gpu_counts(cfg):
            if gpus % context:
                continue
            ranks = RankCounts(gpus, gpus, cfg.gpus)  # in all, per copy of the model, per node
            choices = [Choice(Strategy.FULL_SHARD, one, OffloadMode.none) for one in checkpointing]
            rows = [longest_row(planner, choice, ranks) for choice in choices]
            row = max(rows, key=lambda row: 0 if row is None else row.tokens)
            points.append(
                {
                    "gpus": gpus,
                    "context": context,
                    "tokens": 0 if row is None else row.tokens * context,
                    "activation_checkpointing": None if row is None else row.choice.activation_checkpointing.mode.value,
                    "bytes": None if row is None else row.bytes["total"],
                }
            )
            advance(1)
    return points


def gpu_counts(cfg: PlanConfig) -> Iterator[int]:
    """Yield the numbers of GPUs to try: powers of two, and last all GPUs."""
    count = 1
    while count < cfg.gpus * cfg.nodes:
        yield count
        count *= 2
    yield cfg.gpus * cfg.nodes


def context_sizes(cfg: PlanConfig, parts: Parts) -> list[int]:
    """Return the numbers of ranks per row to try: powers of two up to the number of GPUs, at most 64. With
    `parallel.context_how=ulysses`, only those that divide the attention heads; only 1 if rows are not packed."""
    if not cfg.can_share_rows:
        return [1]
    sizes = []
    for size in (1 << n for n in range(7) if 1 << n <= cfg.gpus * cfg.nodes):
        try:
            plan_context(cfg.parallel.context_how, parts.language, size, 0)
        except ConfigError:  # what `size` does not divide, larger powers of two do not divide either
            break
        sizes.append(size)
    return sizes


def longest_row(planner: Planner, choice: Choice, ranks: RankCounts) -> PlanRow | None:
    """Return the prediction for the longest sample that fits, found by bisection; None if none fits."""
    context = planner.cfg.parallel.num_context
    # memory that is linear in the length is interpolated between the shortest and the longest sample
    lengths = () if planner.grows_with_square else (PIECE * context, MOST_TOKENS)
    sizes = [one_sample(planner.samples, length, context) for length in lengths]

    def predicted(pieces: int) -> PlanRow:
        return planner.row(choice, ranks, [one_sample(planner.samples, PIECE * context * pieces, context)], sizes)

    # lengths are multiples of PIECE tokens for each rank of a row, and at most MOST_TOKENS
    first, last = 0, MOST_TOKENS // (PIECE * context)
    while first < last:
        middle = (first + last + 1) // 2
        if predicted(middle).fits:
            first = middle
        else:
            last = middle - 1
    return predicted(first) if first else None


def one_sample(samples: Samples, tokens: int, context: int) -> MicroBatchSizes:
    """Estimate the sizes of a micro-batch of one sample, with the dataset's shares of image and label tokens."""
    return replace(packed_row(samples, tokens, context), samples=1)
