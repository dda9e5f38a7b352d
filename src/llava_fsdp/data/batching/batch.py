"""A step as tensors: the micro-batches that a rank runs, and what the whole step holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from llava_fsdp.config import Normalize


@dataclass
class MicroBatch:
    """What a rank runs at once: samples end to end in one row, or rows padded on the right with id 0.

    Positions index the rows laid end to end (row * length + column), so that the forward pass is static writes and
    reads: nothing in it waits for a value on the device.
    """

    input_ids: torch.Tensor
    """int64 [rows, length]; 0 where a picture goes"""
    image_positions: torch.Tensor
    """int64 [positions]: where features of pictures go"""
    image_rows: torch.Tensor
    """int64 [positions]: which features go there, as rows of all tiles' features laid end to end; the row behind the
    last is the end of a line (anyres)"""
    images: torch.Tensor
    """uint8 [tiles, 3, size, size], or float32 once normalised; a picture is one tile, with anyres several"""
    label_positions: torch.Tensor
    """int64 [labels]: the position whose output predicts the label, one before the label's own"""
    label_ids: torch.Tensor
    """int64 [labels]"""
    scale: float
    """What the sum of this micro-batch's losses is multiplied with."""
    position_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [1, tokens]: every sample begins at 0; empty where rows are padded"""
    cu_seqlens: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """int32 [samples + 1]: where each sample begins in the row, and where the last ends; empty where rows are padded"""
    lengths: tuple[int, ...] = ()
    """Positions of each sample of a packed row, known without asking the device."""

    seeds: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """int64 [samples], below 2**31: what a sample's dropout depends on, whatever ranks there are"""
    tile_seeds: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [tiles], likewise"""
    label_sources: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [labels]: which source each is of, by its place among `data.sources`; empty where there is one alone"""

    @property
    def segments(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None:
        """position_ids, cu_seqlens and lengths of a packed row."""
        return (self.position_ids, self.cu_seqlens, self.lengths) if self.lengths else None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of the model's forward pass; without the last it returns logits."""
        shown = self.image_positions, self.image_rows, self.images
        seeds = self.seeds, self.tile_seeds
        return self.input_ids, self.segments, *shown, seeds, self.label_positions, self.label_ids

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """The same with every tensor changed."""
        return replace(self, **{name: function(getattr(self, name)) for name in TENSORS})


TENSORS = tuple(f.name for f in fields(MicroBatch) if f.name not in ("scale", "lengths"))


@dataclass(frozen=True)
class LeftOut:
    """A sample that a step goes without: what was wrong, and what the step lacks with it."""

    number: int
    """Of the record, among those that are trained on."""
    record: str
    """What a message calls it."""
    kind: str
    reason: str
    lacks: StepFacts
    """What the index says of the sample alone."""


@dataclass
class StepFacts:
    """What a step holds on all ranks together; every rank knows it without asking the others."""

    step: int
    samples: int = 0
    tokens: int = 0
    """Positions of samples, without padding."""
    pairs: int = 0
    """Squares of the samples' positions, added up: what attention goes by."""
    label_tokens: int = 0
    images: int = 0
    tiles: int = 0
    """Of the images."""
    truncated: int = 0
    """Samples cut at `data.max_length`."""
    labels_cut: int = 0
    left_out: list[LeftOut] = field(default_factory=list)
    """Samples that turned out broken when they were read; they are in none of the numbers above."""
    unlabelled: list[str] = field(default_factory=list)
    """Samples without any label, by record: masked by the original's rules, or cut before their first answer."""
    source_labels: dict[str, int] = field(default_factory=dict)
    """Label tokens of every source of the dataset, also of those that the step has none of."""

    def without(self, left_out: list[LeftOut]) -> StepFacts:
        counts = {name: getattr(self, name) - sum(getattr(o.lacks, name) for o in left_out) for name in COUNTS}
        named = [record for out in left_out for record in out.lacks.unlabelled]
        unlabelled = [record for record in self.unlabelled if record not in named]
        sources = {
            name: labels - sum(out.lacks.source_labels.get(name, 0) for out in left_out)
            for name, labels in self.source_labels.items()
        }
        return replace(self, **counts, left_out=left_out, unlabelled=unlabelled, source_labels=sources)


COUNTS = ("samples", "tokens", "pairs", "label_tokens", "images", "tiles", "truncated", "labels_cut")
"""What adds up over the samples of a step."""


@dataclass
class Step:
    facts: StepFacts
    """As of a worker, `left_out` has this rank's samples only, and the numbers still count them; `without` mends it."""
    micro_batches: list[MicroBatch]
    """This rank's, as many as every other rank's."""

    def without(self, left_out: list[LeftOut], normalize: Normalize) -> Step:
        """The step as every rank sees it once all know what all had to leave out; its loss is of what remains."""
        facts = self.facts.without(left_out)
        if normalize is Normalize.micro_batch or not left_out:
            return Step(facts, self.micro_batches)
        return Step(facts, [replace(m, scale=1 / max(1, facts.label_tokens)) for m in self.micro_batches])

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        """This step with `function` applied to every tensor, in the order of micro-batches and their fields."""
        return Step(self.facts, [micro.map(function) for micro in self.micro_batches])

    def pin_memory(self) -> Step:
        """In page-locked memory, so that copies to a GPU need not wait; the DataLoader calls this."""
        return self.map(torch.Tensor.pin_memory)
