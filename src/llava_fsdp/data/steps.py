"""A step of a run: this rank's part of its samples as tensors.

Which samples a step has is `order.py`'s matter, how they are cut over ranks `cut.py`'s.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch.utils.data import Dataset

from llava_fsdp.config import Config
from llava_fsdp.data.batch import FlatStep, MicroBatch, Step, StepFacts, flatten
from llava_fsdp.data.collate import Collator, Row
from llava_fsdp.data.cost import CostModel
from llava_fsdp.data.cut import Cuts, cut_step, pack_step
from llava_fsdp.data.encode import Encoder, Sample
from llava_fsdp.data.images import PictureReader
from llava_fsdp.data.order import Order
from llava_fsdp.data.source import Record, Records
from llava_fsdp.errors import DataError


class Steps(Dataset):
    """Step number -> the step, flat, or the error that preparing it met."""

    def __init__(
        self,
        records: Records,
        order: Order,
        encoder: Encoder,
        pictures: PictureReader,
        cfg: Config,
        rank: int,
        world_size: int,
        cost: CostModel,
    ):
        self.records = records
        self.order = order
        self.encoder = encoder
        self.pictures = pictures
        self.global_batch_size = cfg.global_batch_size
        self.micro_batch_size = cfg.micro_batch_size
        self.most_tokens = cfg.row_tokens if cfg.pack else None
        self.collate = Collator(pictures, cfg.loss.normalize, cfg.pack)
        self.cost = cost
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

    def __getitem__(self, step: int) -> FlatStep | DataError:
        try:
            return flatten(self.prepare(step))
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
        self.pictures.watch.at(record.where)
        return record, self.encoder(record)

    def cut(self, numbers: list[int], kept: dict[int, tuple[Record, Sample]]) -> Cuts:
        samples = [kept[n] for n in numbers]
        lengths = [len(sample.input_ids) for _, sample in samples]
        if self.most_tokens is None:
            cuts = cut_step(lengths, self.world_size, self.micro_batch_size)
        else:
            costs = [self.cost(sample, self.pictures.image_tokens) for _, sample in samples]
            cuts = pack_step(lengths, costs, self.world_size, self.most_tokens)
        return [[[numbers[i] for i in micro] for micro in rank] for rank in cuts]

    def probe(self) -> MicroBatch:
        """A row with and one without a picture, to compare models at every position; the same on every rank.

        Padded: other models than ours are asked too.
        """
        rows: dict[bool, Row] = {}
        for index in self.order.samples(0):
            record, sample = self.encode(index)
            if sample is not None:
                rows.setdefault(bool(sample.images), (record, sample))
        micro = Collator(self.pictures, self.collate.normalize, pack=False)(list(rows.values()), StepFacts(0), 1)
        return replace(micro, label_positions=torch.arange(micro.input_ids.numel()), label_ids=torch.zeros(0))


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
