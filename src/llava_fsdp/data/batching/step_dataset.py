"""A step of a run: this rank's part of its samples as tensors.

Which samples a step has is `sampler.py`'s matter, how they are cut over ranks `packing.py`'s.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from llava_fsdp.config import BadRecords, Config
from llava_fsdp.data.batching.batch import LeftOut, MicroBatch, Step, StepFacts
from llava_fsdp.data.batching.collate import Collator, Row
from llava_fsdp.data.batching.cost_model import CostModel
from llava_fsdp.data.batching.packing import Cuts, cut_step, pack_step
from llava_fsdp.data.batching.sampler import Order
from llava_fsdp.data.images.preprocess import PictureReader
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.integrity import damaged
from llava_fsdp.data.records.record import Record
from llava_fsdp.data.text.encode import Encoder
from llava_fsdp.runtime.errors import DataError, PictureError
from llava_fsdp.runtime.seeds import derive


class Steps(Dataset):
    """Step number -> the step, or the error that preparing it met."""

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
        self.bad = cfg.data.bad_records
        self.collate = Collator(pictures, cfg.loss.normalize, cfg.pack)
        self.cost = cost
        self.rank = rank
        self.world_size = world_size
        self.seed = cfg.seed
        self.drops = cfg.model.lora.enabled and cfg.model.lora.dropout > 0
        self.sources = cfg.data.source_names
        self.ends = np.cumsum(records.source_counts)

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

    def __getitem__(self, step: int) -> Step | DataError:
        try:
            return self.prepare(step)
        except DataError as error:  # a worker's exception would reach the user as a traceback within a message
            error.on_every_rank = False  # every rank reads its own samples
            return error

    def prepare(self, step: int) -> Step:
        """What the whole step holds, and this rank's part of it, read and laid out."""
        numbers = self.order.samples(step)
        cuts = self.order.cuts(step) or self.cut(numbers)
        facts = self.facts(step, numbers)
        own = cuts[self.rank]
        read = {n: self.read(n) for micro in own for n in dict.fromkeys(micro)}
        facts.left_out = [out for micro in own for n in micro if isinstance(out := read[n], LeftOut)]
        total = len(own) * self.world_size
        micros = []
        for micro in own:
            kept = [(n, row) for n in micro if not isinstance(row := read[n], LeftOut)]
            seeds = [derive("dropout", self.seed, step, n) % 2**31 for n, _ in kept] if self.drops else []
            sources = self.sources_of([n for n, _ in kept]).tolist() if len(self.sources) > 1 else []
            micros.append(self.collate([row for _, row in kept], facts, total, seeds, sources))
        return Step(facts, micros)

    def sources_of(self, numbers: list[int] | np.ndarray) -> np.ndarray:
        """int64: the number of each record's source."""
        return np.searchsorted(self.ends, numbers, side="right")

    def facts(self, step: int, numbers: list[int]) -> StepFacts:
        """From the index alone."""
        own = np.array(numbers, dtype=np.int64)
        records = self.records
        labels = np.bincount(self.sources_of(own), records.labels[own], len(self.sources))
        return StepFacts(
            step,
            samples=len(own),
            tokens=int(records.lengths[own].sum()),
            pairs=int((records.lengths[own].astype(np.int64) ** 2).sum()),
            label_tokens=int(records.labels[own].sum()),
            images=int(records.images[own].sum()),
            tiles=int(records.tiles[own].sum()),
            truncated=int((records.positions_cut[own] > 0).sum()),
            labels_cut=int(records.labels_cut[own].sum()),
            unlabelled=[records[n].where for n in own[records.labels[own] == 0].tolist()],
            source_labels=dict(zip(self.sources, labels.astype(int).tolist(), strict=True)),
        )

    def read(self, number: int) -> Row | LeftOut:
        """A sample and its pictures, or what is wrong with them where `data.bad_records=skip`.

        Raises:
            DataError: it is wrong, and `data.bad_records=fail`; or it is not what was examined.
        """
        try:
            return self.load(number)
        except DataError as error:
            if self.bad is BadRecords.fail or error.kind is None:
                raise
            where, lacks = self.records.where(number), self.facts(0, [number])
            return LeftOut(number, where, error.kind, str(error), lacks)

    def load(self, number: int) -> Row:
        record = self.parse(number)
        if self.pictures.watch is not None:
            self.pictures.watch.at(record.where)
        sample = self.encoder(record)
        length, labels = int(self.records.lengths[number]), int(self.records.labels[number])
        if sample is None or (len(sample.input_ids), sample.num_labels) != (length, labels):
            raise DataError(  # of no kind: a sample of another length may not fit its micro-batch
                f"{record.where} is not what it was when the dataset was examined: {length} positions and {labels} "
                "labels then; remove the index and examine it again"
            )
        try:
            return sample, [self.pictures.tiles(record, name) for name in sample.images]
        except PictureError as error:
            error.about(record=record.where)
            at, texts = self.records.at(number), self.records.index.texts
            if texts.embeds(at):  # whole when it was written out
                path = Path(texts.sources[texts.part(at).source].images or "")
                raise damaged(path, str(error)) from error
            raise

    def parse(self, number: int) -> Record:
        """Raises DataError, of no kind, where it cannot be parsed: it could when the dataset was examined."""
        try:
            return self.records[number]
        except DataError as error:
            if error.kind is None:
                raise
            raise DataError(
                f"{error}. It was right when the dataset was examined: the file has changed since, or its index "
                f"{self.records.index.folder} is damaged; run llava_fsdp.prepare"
            ) from error

    def records_of(self, step: int, ranks: list[int]) -> list[str]:
        """The records of a step, by their `where`: of some ranks, or of all where none is named."""
        numbers = self.order.samples(step)
        if ranks:
            cuts = self.order.cuts(step) or self.cut(numbers)
            numbers = [n for rank in ranks for micro in cuts[rank] for n in micro]
        return [self.records.where(n) for n in dict.fromkeys(numbers)]

    def cut(self, numbers: list[int]) -> Cuts:
        own = np.array(numbers, dtype=np.int64)
        lengths = self.records.lengths[own]
        if self.most_tokens is None:
            cuts = cut_step(lengths.tolist(), self.world_size, self.micro_batch_size)
        else:
            costs = self.cost(lengths, self.records.labels[own], self.records.tiles[own])
            cuts = pack_step(lengths.tolist(), costs.tolist(), self.world_size, self.most_tokens)
        return [[[numbers[i] for i in micro] for micro in rank] for rank in cuts]

    def probe(self) -> MicroBatch:
        """A row with and one without a picture, to compare models at every position; the same on every rank.

        Padded: other models than ours are asked too.
        """
        rows: dict[bool, Row] = {}
        for number in self.order.samples(0):
            shown = bool(self.records.images[number])
            if shown not in rows and not isinstance(row := self.read(number), LeftOut):
                rows[shown] = row
        micro = Collator(self.pictures, self.collate.normalize, pack=False)(list(rows.values()), StepFacts(0), 1)
        return replace(micro, label_positions=torch.arange(micro.input_ids.numel()), label_ids=torch.zeros(0))
