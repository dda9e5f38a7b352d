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

    Positions are indices into the flattened rows: row * length + column.
    """

    input_ids: torch.Tensor
    """Token ids, int64 [rows, length]; 0 at image tokens and padding."""
    image_positions: torch.Tensor
    """Positions of the image tokens in the flattened rows, int64 [image tokens]."""
    image_rows: torch.Tensor
    """For each image token the index of its vision feature, int64 [image tokens], in the features of all tiles
    concatenated; the index after the last means the learned vector that ends a line (anyres)."""
    images: torch.Tensor
    """Image tiles, uint8 [tiles, 3, size, size], or float32 once normalised; an image is one tile, with anyres
    several."""
    label_positions: torch.Tensor
    """For each label the position of the token that predicts it, int64 [labels]; one before the label's own token."""
    label_ids: torch.Tensor
    """Token id of each label, int64 [labels]."""
    scale: float
    """Factor by which the sum of this micro-batch's token losses is multiplied."""
    position_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Position ids, int64 [1, tokens], from 0 in each sample; like the next two fields empty with padded rows."""
    cu_seqlens: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """Begin of each sample in the packed row and end of the last, int32 [samples + 1]."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each sample of a packed row, on the CPU."""
    seeds: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """Dropout seed of each sample, int64 [samples], below 2**31; the same on any number of ranks."""
    tile_seeds: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Seed of dropout in the vision tower for each tile, int64 [tiles]."""
    label_sources: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Index in `data.sources` of the source of each label, int64 [labels]; empty with a single source."""

    @property
    def segments(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None:
        """(position_ids, cu_seqlens, lengths) of a packed row; None with padded rows."""
        return (self.position_ids, self.cu_seqlens, self.lengths) if self.lengths else None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Positional arguments for `Llava.forward`."""
        images = self.image_positions, self.image_rows, self.images
        seeds = self.seeds, self.tile_seeds
        return self.input_ids, self.segments, *images, seeds, self.label_positions, self.label_ids

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """Return a copy with `function` applied to each tensor."""
        return replace(self, **{name: function(getattr(self, name)) for name in TENSORS})


TENSORS = tuple(f.name for f in fields(MicroBatch) if f.name not in ("scale", "lengths"))


@dataclass(frozen=True)
class SkippedSample:
    """A sample that is left out of a step because it turned out broken when it was read."""

    number: int
    record: str
    """Name of the record in messages."""
    kind: str
    reason: str
    lacks: StepFacts
    """Counts of this sample alone, from the index, to subtract from those of the step."""


@dataclass
class StepFacts:
    """Counts of a step over all ranks (samples, tokens, labels, ...), which each rank computes from the index."""

    step: int
    samples: int = 0
    tokens: int = 0
    """Number of text and image tokens, without padding."""
    pairs: int = 0
    """Sum of the squares of the samples' lengths, to which the cost of attention is proportional."""
    label_tokens: int = 0
    images: int = 0
    tiles: int = 0
    truncated: int = 0
    """Number of samples truncated at `data.max_length`."""
    labels_cut: int = 0
    """Number of labels lost by truncation."""
    skipped: list[SkippedSample] = field(default_factory=list)
    """Samples that turned out broken when they were read."""
    unlabelled: list[str] = field(default_factory=list)
    """Records of samples without any label: masked by LLaVA's rules, or truncated before the first answer."""
    source_labels: dict[str, int] = field(default_factory=dict)
    """Number of label tokens of each source, by the source's name."""

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
    """Counts of the step. As prepared by a data worker, `skipped` has only this rank's samples and the counts include
    them; `Step.without` corrects both."""
    micro_batches: list[MicroBatch]
    """Micro-batches of this rank, as many as on each other rank."""

    def without(self, skipped: list[SkippedSample], normalize: Normalize) -> Step:
        """Return the step without the samples that any rank skipped; the loss is normalised by the remaining labels."""
        facts = self.facts.without(skipped)
        if normalize is Normalize.micro_batch or not skipped:
            return Step(facts, self.micro_batches)
        return Step(facts, [replace(m, scale=1 / max(1, facts.label_tokens)) for m in self.micro_batches])

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        """Return a copy with `function` applied to each tensor, in the order of micro-batches and their fields."""
        return Step(self.facts, [micro.map(function) for micro in self.micro_batches])

    def pin_memory(self) -> Step:
        """Return a copy in page-locked memory, for asynchronous copies to a GPU; torch's DataLoader calls this."""
        return self.map(torch.Tensor.pin_memory)
