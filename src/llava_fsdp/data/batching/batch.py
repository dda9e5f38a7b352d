"""The data of one training step: this rank's micro-batches, and counts over the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from llava_fsdp.config import Normalize


@dataclass
class MicroBatch:
    """Inputs and labels of one forward pass: one packed row, or rows padded on the right with id 0.

    Positions are indices into the flattened rows (row * length + column), so that the forward pass never waits for a
    value on the device.
    """

    input_ids: torch.Tensor
    """int64 [rows, length]; 0 at image tokens"""
    image_positions: torch.Tensor
    """int64 [image tokens]: positions of the image tokens"""
    image_rows: torch.Tensor
    """int64 [image tokens]: the feature of each, as a row of the features of all tiles laid end to end; the row behind
    the last stands for the learned vector at the end of a line (anyres)"""
    images: torch.Tensor
    """uint8 [tiles, 3, size, size], or float32 once normalised; an image is one tile, with anyres several"""
    label_positions: torch.Tensor
    """int64 [labels]: the position whose output predicts the label, one before the label's token"""
    label_ids: torch.Tensor
    """int64 [labels]"""
    scale: float
    """Factor of the sum of this micro-batch's losses."""
    position_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [1, tokens], from 0 in every sample; empty with padded rows"""
    cu_seqlens: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """int32 [samples + 1]: begin of each sample in the row, and end of the last; empty with padded rows"""
    lengths: tuple[int, ...] = ()
    """Tokens of each sample of a packed row, known on the host; empty with padded rows."""
    seeds: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """int64 [samples], below 2**31: seeds of the samples' dropout, the same on any number of ranks"""
    tile_seeds: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [tiles]: seeds of dropout in the vision tower"""
    label_sources: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [labels]: index of each label's source in `data.sources`; empty with a single source"""

    @property
    def segments(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None:
        """(position_ids, cu_seqlens, lengths) of a packed row; None with padded rows."""
        return (self.position_ids, self.cu_seqlens, self.lengths) if self.lengths else None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Positional arguments of `Llava.forward`."""
        images = self.image_positions, self.image_rows, self.images
        seeds = self.seeds, self.tile_seeds
        return self.input_ids, self.segments, *images, seeds, self.label_positions, self.label_ids

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """A copy with `function` applied to every tensor."""
        return replace(self, **{name: function(getattr(self, name)) for name in TENSORS})


TENSORS = tuple(f.name for f in fields(MicroBatch) if f.name not in ("scale", "lengths"))


@dataclass(frozen=True)
class SkippedSample:
    """A sample that a step goes without, because it turned out broken when it was read."""

    number: int
    """Number of its record among those that are trained on."""
    record: str
    """The record as messages name it."""
    kind: str
    reason: str
    lacks: StepFacts
    """Counts of the sample alone, from the index."""


@dataclass
class StepFacts:
    """Counts of a step over all ranks, which every rank computes from the index."""

    step: int
    samples: int = 0
    tokens: int = 0
    """Text and image tokens, without padding."""
    pairs: int = 0
    """Sum of the squares of the samples' lengths, to which the cost of attention is proportional."""
    label_tokens: int = 0
    images: int = 0
    tiles: int = 0
    truncated: int = 0
    """Samples truncated at `data.max_length`."""
    labels_cut: int = 0
    """Labels lost by that."""
    skipped: list[SkippedSample] = field(default_factory=list)
    """Samples that turned out broken when they were read; the counts above are without them."""
    unlabelled: list[str] = field(default_factory=list)
    """Records of samples without any label: masked by LLaVA's rules, or truncated before the first answer."""
    source_labels: dict[str, int] = field(default_factory=dict)
    """Label tokens by source, for every source of the dataset."""

    def without(self, skipped: list[SkippedSample]) -> StepFacts:
        counts = {name: getattr(self, name) - sum(getattr(s.lacks, name) for s in skipped) for name in COUNTS}
        named = [record for sample in skipped for record in sample.lacks.unlabelled]
        unlabelled = [record for record in self.unlabelled if record not in named]
        sources = {
            name: labels - sum(sample.lacks.source_labels.get(name, 0) for sample in skipped)
            for name, labels in self.source_labels.items()
        }
        return replace(self, **counts, skipped=skipped, unlabelled=unlabelled, source_labels=sources)


COUNTS = ("samples", "tokens", "pairs", "label_tokens", "images", "tiles", "truncated", "labels_cut")
"""Fields of StepFacts that are sums over the samples."""


@dataclass
class Step:
    facts: StepFacts
    """As a worker prepares it, `skipped` has this rank's samples alone, and the counts include them; `without`
    corrects both."""
    micro_batches: list[MicroBatch]
    """This rank's, as many as on every other rank."""

    def without(self, skipped: list[SkippedSample], normalize: Normalize) -> Step:
        """The step without the samples that any rank skipped; the loss is normalised by the remaining labels."""
        facts = self.facts.without(skipped)
        if normalize is Normalize.micro_batch or not skipped:
            return Step(facts, self.micro_batches)
        return Step(facts, [replace(m, scale=1 / max(1, facts.label_tokens)) for m in self.micro_batches])

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        """A copy with `function` applied to every tensor, in the order of micro-batches and their fields."""
        return Step(self.facts, [micro.map(function) for micro in self.micro_batches])

    def pin_memory(self) -> Step:
        """A copy in page-locked memory, for asynchronous copies to a GPU; the DataLoader calls this."""
        return self.map(torch.Tensor.pin_memory)
