"""A step of a run: which samples it has, and this rank's part of them as tensors.

A step is a set of samples chosen by (seed, epoch, step) alone; how it is cut over ranks is `cut.py`'s matter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from llava_fsdp.config import AspectRatio, Config, Normalize
from llava_fsdp.data.cut import cut_step
from llava_fsdp.data.encode import IGNORE, IMAGE_ID, Encoder, Sample
from llava_fsdp.data.images import Preprocessor, load_image
from llava_fsdp.data.source import Record, Records
from llava_fsdp.errors import DataError
from llava_fsdp.seeds import derive


@dataclass
class MicroBatch:
    """Rows that a rank runs at once, padded on the right with id 0.

    Positions index the rows laid end to end (row * length + column), so that the forward pass is static writes and
    reads: nothing in it waits for a value on the device.
    """

    input_ids: torch.Tensor
    """int64 [rows, length]; 0 where a picture goes"""
    image_positions: torch.Tensor
    """int64 [pictures * image_tokens]"""
    images: torch.Tensor
    """uint8 [pictures, 3, size, size], or float32 once normalised"""
    label_positions: torch.Tensor
    """int64 [labels]: the position whose output predicts the label, one before the label's own"""
    label_ids: torch.Tensor
    """int64 [labels]"""
    scale: float
    """What the sum of this micro-batch's losses is multiplied with."""


@dataclass
class StepFacts:
    """What a step holds on all ranks together; every rank knows it without asking the others."""

    step: int
    samples: int = 0
    tokens: int = 0
    """Positions of samples, without padding."""
    label_tokens: int = 0
    images: int = 0
    truncated: int = 0
    """Samples cut at `data.max_length`."""
    labels_cut: int = 0
    quarantined: list[str] = field(default_factory=list)
    """Samples left out, by record."""


@dataclass
class Step:
    facts: StepFacts
    micro_batches: list[MicroBatch]
    """This rank's, as many as every other rank's."""


@dataclass
class PackedStep:
    """A step on its way from a worker: one tensor for each field, however many micro-batches there are.

    Every tensor that crosses between processes takes a file descriptor until it is freed.
    """

    facts: StepFacts
    fields: dict[str, torch.Tensor]
    """All micro-batches' values laid end to end, by field."""
    shapes: list[dict[str, torch.Size]]
    scales: list[float]

    def pin_memory(self) -> PackedStep:
        """In page-locked memory, so that copies to a GPU need not wait; the DataLoader calls this."""
        return replace(self, fields={name: values.pin_memory() for name, values in self.fields.items()})

    def unpack(self) -> Step:
        cut = {
            name: values.split([shapes[name].numel() for shapes in self.shapes]) for name, values in self.fields.items()
        }
        return Step(
            self.facts,
            [
                MicroBatch(**{name: cut[name][n].view(shape) for name, shape in shapes.items()}, scale=scale)
                for n, (shapes, scale) in enumerate(zip(self.shapes, self.scales, strict=True))
            ],
        )


def pack(step: Step) -> PackedStep:
    names = [f.name for f in fields(MicroBatch) if f.name != "scale"]
    return PackedStep(
        step.facts,
        {name: torch.cat([getattr(m, name).flatten() for m in step.micro_batches]) for name in names},
        [{name: getattr(m, name).shape for name in names} for m in step.micro_batches],
        [m.scale for m in step.micro_batches],
    )


class Steps(Dataset):
    """Step number -> the step, packed, or the error that preparing it met."""

    def __init__(
        self,
        records: Records,
        encoder: Encoder,
        preprocessor: Preprocessor,
        cfg: Config,
        rank: int,
        world_size: int,
    ):
        self.records = records
        self.encoder = encoder
        self.preprocessor = preprocessor
        self.images = Path(cfg.data.images) if cfg.data.images is not None else None
        self.aspect: AspectRatio = cfg.data.image_aspect_ratio
        self.seed = cfg.seed
        self.global_batch_size = cfg.global_batch_size
        self.micro_batch_size = cfg.micro_batch_size
        self.normalize = cfg.loss.normalize
        self.rank = rank
        self.world_size = world_size

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch; the last may hold fewer samples."""
        return -(-len(self.records) // self.global_batch_size)

    def fingerprints(self) -> dict[str, str]:
        """Of the records, and of what makes ids and pixels of them."""
        encoding = f"{self.encoder.tokenizer.fingerprint} {self.preprocessor} {self.encoder.image_tokens}"
        return {"dataset": self.records.fingerprint, "encoding": hashlib.sha256(encoding.encode()).hexdigest()[:32]}

    def __getitem__(self, step: int) -> PackedStep | DataError:
        try:
            return pack(self.prepare(step))
        except DataError as error:  # a worker's exception would reach the user as a traceback within a message
            return error

    def indices(self, step: int) -> list[int]:
        """Record numbers of a step."""
        epoch, within = divmod(step, self.per_epoch)
        order = epoch_order(len(self.records), self.seed, epoch)
        return order[within * self.global_batch_size : (within + 1) * self.global_batch_size].tolist()

    def prepare(self, step: int) -> Step:
        """Encode the whole step's texts, and load the pictures of this rank's part."""
        facts = StepFacts(step)
        kept: list[tuple[Record, Sample]] = []
        for index in self.indices(step):
            record = self.records[index]
            sample = self.encoder(record)
            if sample is None:
                facts.quarantined.append(record.where)
                continue
            kept.append((record, sample))
            facts.samples += 1
            facts.tokens += len(sample.input_ids)
            facts.label_tokens += sample.num_labels
            facts.images += len(sample.images)
            facts.truncated += sample.positions_cut > 0
            facts.labels_cut += sample.labels_cut
        cuts = cut_step([len(s.input_ids) for _, s in kept], self.world_size, self.micro_batch_size)[self.rank]
        total = len(cuts) * self.world_size
        return Step(facts, [self.collate([kept[i] for i in cut], facts, total) for cut in cuts])

    def probe(self) -> MicroBatch:
        """A row with and one without a picture, to compare models at every position; the same on every rank."""
        rows: dict[bool, tuple[Record, Sample]] = {}
        for index in self.indices(0):
            record = self.records[index]
            sample = self.encoder(record) if bool(record.images) not in rows else None
            if sample is not None:
                rows[bool(sample.images)] = (record, sample)
        micro = self.collate(list(rows.values()), StepFacts(0), 1)
        return replace(micro, label_positions=torch.arange(micro.input_ids.numel()), label_ids=torch.zeros(0))

    def collate(self, rows: list[tuple[Record, Sample]], facts: StepFacts, micro_batches: int) -> MicroBatch:
        """Pad rows to the longest; a micro-batch without rows is one padding position without labels."""
        length = max((len(s.input_ids) for _, s in rows), default=1)
        ids = np.zeros((max(1, len(rows)), length), dtype=np.int64)
        labels = np.full((max(1, len(rows)), length), IGNORE, dtype=np.int64)
        for row, (_, sample) in enumerate(rows):
            ids[row, : len(sample.input_ids)] = sample.input_ids
            labels[row, : len(sample.labels) - 1] = sample.labels[1:]
        image_positions = np.flatnonzero(ids == IMAGE_ID)
        label_positions = np.flatnonzero(labels != IGNORE)
        ids[ids == IMAGE_ID] = 0
        count = len(label_positions)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            image_positions=torch.from_numpy(image_positions),
            images=self.load_images(rows),
            label_positions=torch.from_numpy(label_positions),
            label_ids=torch.from_numpy(labels.reshape(-1)[label_positions]),
            scale=1 / max(1, facts.label_tokens)
            if self.normalize is Normalize.step
            else 1 / (max(1, count) * micro_batches),
        )

    def load_images(self, rows: list[tuple[Record, Sample]]) -> torch.Tensor:
        pictures = []
        for record, sample in rows:
            for name in sample.images:
                assert self.images is not None, "checked when the records were opened"
                pictures.append(load_image(self.images / name, self.preprocessor, self.aspect, record.where))
        size = self.preprocessor.size
        stacked = np.stack(pictures) if pictures else np.zeros((0, 3, size, size), dtype=np.uint8)
        return torch.from_numpy(stacked)


def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of `count` records that depends on nothing but (seed, epoch)."""
    generator = torch.Generator().manual_seed(derive("order", seed, epoch))
    return torch.randperm(count, generator=generator)
