"""The data of one training step: this rank's micro-batches, and counts over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, NotRequired, TypedDict

import torch

from llava_fsdp.config import FULL_WEIGHT, Normalize


class Segments(NamedTuple):
    """Sample boundaries of a packed row: fields of MicroBatch, which explains them."""

    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: tuple[int, ...]
    shared: tuple[int, ...] = ()
    key_offsets: torch.Tensor | None = None
    """None if samples share no tokens."""


class ForwardInputs(TypedDict):
    """The arguments of `Architecture.forward` that a micro-batch gives, by their names there."""

    input_ids: torch.Tensor
    segments: Segments | None
    images: Mapping[str, torch.Tensor]
    seeds: torch.Tensor
    label_positions: torch.Tensor
    label_ids: torch.Tensor
    label_weights: NotRequired[torch.Tensor]


@dataclass
class MicroBatch:
    """Inputs and labels of one forward pass: one packed row (all samples one after the other), or one row per sample,
    padded on the right with id 0.

    Positions are indices into the flattened rows: row * length + column.
    """

    input_ids: torch.Tensor
    """Token ids, int64 [rows, length]; 0 at image tokens and padding."""
    images: dict[str, torch.Tensor]
    """What the model needs of the images, by name. `TileInputs` makes it, `Llava.forward` explains it, and all between
    only move it. Empty: the model gets no images."""
    label_positions: torch.Tensor
    """For each label, the position of the token that predicts it, int64 [labels]: the one before the label's own
    token."""
    label_ids: torch.Tensor
    """int64 [labels]."""
    scale: float
    """Factor of the sum of this micro-batch's token losses."""
    position_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Position id of each token of a packed row, int64 [1, tokens], starting from 0 in each sample; empty with padded
    rows."""
    cu_seqlens: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """Offsets in a packed row: the begin of each sample, then the end of the last one, int32 [samples + 1]; empty with
    padded rows."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each sample of a packed row, kept on the CPU; empty with padded rows. If several ranks share
    the row, `lengths` and `cu_seqlens` are those of the whole row, and padding counts as its last sample. The labels
    are those at this rank's positions. The other fields hold only this rank's positions too, unless the model divides
    the row itself (`TileInputs.divides`)."""
    shared: tuple[int, ...] = ()
    """For each sample of a packed row, how many of the first tokens of the sample before it are its first tokens, too,
    kept on the CPU; empty if samples share none. Its positions then begin with this number."""
    key_offsets: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """As `cu_seqlens`, with the tokens that a sample shares counted in it, too; empty if samples share none."""
    seeds: torch.Tensor = field(default_factory=lambda: torch.zeros((1, 1), dtype=torch.int64))
    """Dropout seeds below 2**31, which depend only on the sample and the step: of each token of a packed row, int64 [1,
    tokens], or of each padded row, int64 [rows, 1]. Without dropout a zero, [1, 1]."""
    label_sources: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """For each label, the index of its data source in `data.sources`, int64 [labels]; empty with a single source."""
    sample_lengths: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """Number of tokens of each sample, int64 [samples]; 0 for a blank sample, and one 0 without samples. If several
    ranks share the row, those of the whole row."""
    label_records: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """For each label, the number of its record in the dataset, int64 [labels]. Only set if several ranks process a row
    together and one of them may find that a record cannot be read; else empty."""
    label_weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """For each label, the factor of its loss in units of 1 / FULL_WEIGHT, int32 [labels]; empty if all are 1."""
    label_answers: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """For each label of a micro-batch of pairs, the number of its answer, int64 [labels]: 2 n for the chosen answer of
    pair n, 2 n + 1 for the rejected one; else empty."""
    pair_sources: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """For each pair, the index of its data source, int64 [pairs]; empty if samples are no pairs."""
    pair_numbers: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """For each pair, the number of its sample among those that are trained on, int64 [pairs]."""

    @property
    def segments(self) -> Segments | None:
        """Where the samples of a packed row begin and end, for attention. None with padded rows."""
        if not self.lengths:
            return None
        key_offsets = self.key_offsets if self.shared else None
        return Segments(self.position_ids, self.cu_seqlens, self.lengths, self.shared, key_offsets)

    @property
    def inputs(self) -> ForwardInputs:
        """The arguments of the model's forward pass, by name."""
        made: ForwardInputs = {
            "input_ids": self.input_ids,
            "segments": self.segments,
            "images": self.images,
            "seeds": self.seeds,
            "label_positions": self.label_positions,
            "label_ids": self.label_ids,
        }
        if len(self.label_weights):
            made["label_weights"] = self.label_weights
        return made

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by names such as `input_ids` and `images.tiles`."""
        own = {name: getattr(self, name) for name in TENSORS}
        return own | {f"images.{name}": values for name, values in self.images.items()}

    def without_labels(self, records: Collection[int]) -> MicroBatch:
        """Return a copy without the labels of the records with these numbers. These records then do not change the
        loss, because samples do not attend to each other. Needs `label_records`, the record number of each label."""
        kept = torch.tensor([number not in records for number in self.label_records.tolist()], dtype=torch.bool)
        names = ("label_positions", "label_ids", "label_sources", "label_records", "label_weights")
        present = (name for name in names if len(getattr(self, name)))
        return replace(self, **{name: getattr(self, name)[kept] for name in present})

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """Return a copy with `function` applied to each tensor."""
        own = {name: function(getattr(self, name)) for name in TENSORS}
        return replace(self, **own, images={name: function(each) for name, each in self.images.items()})


TENSORS = tuple(f.name for f in fields(MicroBatch) if f.name not in ("scale", "lengths", "shared", "images"))
"""Names of the fields of MicroBatch that are tensors."""


@dataclass(frozen=True)
class SkippedSample:
    """A sample that is left out of a step because its record or an image cannot be read."""

    number: int
    """Number of the record in the dataset."""
    record: str
    """Name of the record in error messages."""
    kind: str
    """Kind of the problem (`problems.Kind`)."""
    reason: str
    counts: StepFacts
    """What this sample alone has contributed to the counts of its step."""


@dataclass
class StepFacts:
    """Counts of one training step over all ranks. Every rank computes all of them from numbers that were counted before
    training, without communication."""

    step: int
    samples: int = 0
    tokens: int = 0
    """Number of text and image tokens, without padding."""
    token_pairs: int = 0
    """Sum of the squares of the samples' lengths, to which the cost of attention is proportional."""
    label_tokens: int = 0
    images: int = 0
    tiles: int = 0
    truncated: int = 0
    """Number of samples truncated at `data.max_length`."""
    labels_cut: int = 0
    """Number of labels lost by truncation."""
    skipped: list[SkippedSample] = field(default_factory=list)
    unlabelled: list[str] = field(default_factory=list)
    """Names of the records whose samples have no label: LLaVA's rules mask all labels, or the sample is truncated
    before its first answer."""
    source_labels: dict[str, int] = field(default_factory=dict)
    """{name of a data source: number of its label tokens}."""
    source_weights: dict[str, int] | None = None
    """{name of a data source: sum of the weights of its labels in units of 1 / FULL_WEIGHT}; None: all weights are
    1."""
    has_pairs: bool = False
    """Whether each sample is a pair of answers."""

    @property
    def weight(self) -> int:
        """Sum of the weights of all labels, in units of 1 / FULL_WEIGHT."""
        return self.label_tokens * FULL_WEIGHT if self.source_weights is None else sum(self.source_weights.values())

    @property
    def scale(self) -> float:
        """Factor that makes a mean of the sum of the step's losses: 1 / (sum of the labels' weights, which `weight` has
        in units of 1 / FULL_WEIGHT) or, of pairs, 1 / (number of pairs)."""
        return 1 / max(1, self.samples) if self.has_pairs else FULL_WEIGHT / (self.weight or FULL_WEIGHT)

    def without(self, skipped: list[SkippedSample]) -> StepFacts:
        """Return these counts minus those of the samples in `skipped`, which becomes the list of skipped samples. The
        sums of labels and of their weights by data source are reduced, too. The names of skipped records are removed
        from `unlabelled`, the list of records without labels."""
        counts = {name: getattr(self, name) - sum(getattr(s.counts, name) for s in skipped) for name in COUNTS}
        named = [record for sample in skipped for record in sample.counts.unlabelled]
        unlabelled = [record for record in self.unlabelled if record not in named]
        sources = without_each(self.source_labels, [sample.counts.source_labels for sample in skipped])
        weights = self.source_weights
        if weights is not None:
            weights = without_each(weights, [sample.counts.source_weights or {} for sample in skipped])
        return replace(
            self, **counts, skipped=skipped, unlabelled=unlabelled, source_labels=sources, source_weights=weights
        )


def without_each(sums: dict[str, int], parts: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return sums by source minus those of some samples."""
    return {name: number - sum(part.get(name, 0) for part in parts) for name, number in sums.items()}


COUNTS = ("samples", "tokens", "token_pairs", "label_tokens", "images", "tiles", "truncated", "labels_cut")
"""Names of the StepFacts fields that are sums over the samples of a step."""


@dataclass
class Step:
    """This rank's part of one training step, and counts of the whole step."""

    facts: StepFacts
    """Counts of the step over all ranks. When a data worker returns the step, `skipped` lists only the samples skipped
    on this rank, and the counts still include them; `Step.without` corrects both."""
    micro_batches: list[MicroBatch]
    """Every rank has the same number."""

    def without(self, skipped: list[SkippedSample], normalize: Normalize) -> Step:
        """Return a copy of the step whose counts leave out the samples that any rank skipped. Their labels are removed
        if `label_records` says which sample each label is of. If the loss is normalised over the step, the scale of
        each micro-batch's loss becomes that of what is left in the step (`StepFacts.scale`)."""
        facts, micros = self.facts.without(skipped), self.micro_batches
        if skipped and any(len(micro.label_records) for micro in micros):
            micros = [micro.without_labels({sample.number for sample in skipped}) for micro in micros]
        if normalize is Normalize.micro_batch or not skipped:
            return Step(facts, micros)
        return Step(facts, [replace(micro, scale=facts.scale) for micro in micros])

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        """Return a copy with `function` applied to each tensor, always in the same order."""
        return Step(self.facts, [micro.map(function) for micro in self.micro_batches])

    def pin_memory(self) -> Step:
        """Copy the step to page-locked memory, for asynchronous copies to a GPU; torch's DataLoader calls this."""
        return self.map(torch.Tensor.pin_memory)
