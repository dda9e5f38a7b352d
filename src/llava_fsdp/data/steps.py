"""A step of a run: this rank's part of its samples as tensors.

Which samples a step has is `order.py`'s matter, how they are cut over ranks `cut.py`'s.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch.utils.data import Dataset

from llava_fsdp.config import Config, Normalize
from llava_fsdp.data.anyres import NEWLINE_ROW
from llava_fsdp.data.cut import cut_step
from llava_fsdp.data.encode import Encoder, Sample
from llava_fsdp.data.images import PictureReader
from llava_fsdp.data.order import Cuts, Order
from llava_fsdp.data.source import Record, Records
from llava_fsdp.data.vocabulary import IGNORE, IMAGE_ID
from llava_fsdp.errors import DataError


@dataclass
class MicroBatch:
    """Rows that a rank runs at once, padded on the right with id 0.

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

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The arguments of the model's forward pass; without the last it returns logits."""
        shown = self.image_positions, self.image_rows, self.images
        return self.input_ids, *shown, self.label_positions, self.label_ids


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
    unlabelled: list[str] = field(default_factory=list)
    """Samples without any label, by record: masked by the original's rules, or cut before their first answer."""


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
        order: Order,
        encoder: Encoder,
        pictures: PictureReader,
        cfg: Config,
        rank: int,
        world_size: int,
    ):
        self.records = records
        self.order = order
        self.encoder = encoder
        self.pictures = pictures
        self.global_batch_size = cfg.global_batch_size
        self.micro_batch_size = cfg.micro_batch_size
        self.normalize = cfg.loss.normalize
        self.rank = rank
        self.world_size = world_size

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return self.order.per_epoch

    def fingerprints(self) -> dict[str, str]:
        """Of the records, of what makes ids and pixels of them, and of what their order depends on."""
        encoding = f"{self.encoder.tokenizer.fingerprint} {self.pictures.fingerprint}"
        return {
            "dataset": self.records.fingerprint,
            "encoding": hashlib.sha256(encoding.encode()).hexdigest()[:32],
            "order": self.order.shape,
        }

    def __getitem__(self, step: int) -> PackedStep | DataError:
        try:
            return pack(self.prepare(step))
        except DataError as error:  # a worker's exception would reach the user as a traceback within a message
            return error

    def prepare(self, step: int) -> Step:
        """Encode the whole step's texts, and load the pictures of this rank's part."""
        facts = StepFacts(step)
        numbers = self.order.samples(step)
        encoded = {n: self.encode(n) for n in dict.fromkeys(numbers)}
        for number in numbers:
            count(facts, *encoded[number])
        kept = {n: (record, sample) for n, (record, sample) in encoded.items() if sample is not None}
        cuts = self.order.cuts(step) or self.cut([n for n in numbers if n in kept], kept)
        micro_batches = [[kept[n] for n in micro if n in kept] for micro in cuts[self.rank]]
        total = len(micro_batches) * self.world_size
        return Step(facts, [self.collate(rows, facts, total) for rows in micro_batches])

    def encode(self, number: int) -> tuple[Record, Sample | None]:
        record = self.records[number]
        return record, self.encoder(record)

    def cut(self, numbers: list[int], kept: dict[int, tuple[Record, Sample]]) -> Cuts:
        lengths = [len(kept[n][1].input_ids) for n in numbers]
        cuts = cut_step(lengths, self.world_size, self.micro_batch_size)
        return [[[numbers[i] for i in micro] for micro in rank] for rank in cuts]

    def probe(self) -> MicroBatch:
        """A row with and one without a picture, to compare models at every position; the same on every rank."""
        rows: dict[bool, tuple[Record, Sample]] = {}
        for index in self.order.samples(0):
            record, sample = self.encode(index)
            if sample is not None:
                rows.setdefault(bool(sample.images), (record, sample))
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
        images, image_rows = self.load_images(rows)
        labels_here = len(label_positions)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            image_positions=torch.from_numpy(image_positions),
            image_rows=torch.from_numpy(image_rows),
            images=torch.from_numpy(images),
            label_positions=torch.from_numpy(label_positions),
            label_ids=torch.from_numpy(labels.reshape(-1)[label_positions]),
            scale=1 / max(1, facts.label_tokens)
            if self.normalize is Normalize.step
            else 1 / (max(1, labels_here) * micro_batches),
        )

    def load_images(self, rows: list[tuple[Record, Sample]]) -> tuple[np.ndarray, np.ndarray]:
        """All tiles of the rows' pictures, and which rows of their features the pictures' positions show."""
        tiles, places = [self.pictures.no_tiles()], [np.zeros(0, dtype=np.int64)]
        before = 0  # rows of features
        for record, sample in rows:
            for name, own in zip(sample.images, sample.image_rows, strict=True):
                tiles.append(self.pictures.tiles(record, name))
                places.append(np.where(own == NEWLINE_ROW, NEWLINE_ROW, own + before))
                before += len(tiles[-1]) * self.pictures.image_tokens
        where = np.concatenate(places)
        return np.concatenate(tiles), np.where(where == NEWLINE_ROW, before, where)


def count(facts: StepFacts, record: Record, sample: Sample | None) -> None:
    if sample is None:
        facts.quarantined.append(record.where)
        return
    facts.samples += 1
    facts.tokens += len(sample.input_ids)
    facts.label_tokens += sample.num_labels
    facts.images += len(sample.images)
    facts.truncated += sample.positions_cut > 0
    facts.labels_cut += sample.labels_cut
    if sample.num_labels == 0:
        facts.unlabelled.append(record.where)
