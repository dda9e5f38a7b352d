"""Dataset whose items are whole training steps: this rank's samples of the step, as tensors."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import Dataset

from llava_fsdp.config import FULL_WEIGHT, BadRecords, Config, Normalize
from llava_fsdp.data.batching.batch import MicroBatch, SkippedSample, Step, StepFacts
from llava_fsdp.data.batching.collate import Collator, SampleKeys, shown_images, shown_places
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.batching.cost_model import CostModel
from llava_fsdp.data.batching.packing import Assignment, pack_step, split_step
from llava_fsdp.data.batching.sampler import Sampler
from llava_fsdp.data.batching.tile_inputs import Row
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.processor.images import ProcessorImages
from llava_fsdp.data.records.record import Record, is_video
from llava_fsdp.data.text.chat_template.message_parts import IMAGE
from llava_fsdp.data.text.encode import Encoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.runtime.errors import DataError, ImageError
from llava_fsdp.runtime.seeds import derive


class Steps(Dataset):
    """Dataset of training steps: item n is this rank's part of step n, or the DataError raised while preparing it.

    Samples have their numbers among those that are trained on; steps count from 0.

    Args:
        rank: number of this rank among those that process different rows; ranks that process a row together have the
            same number.
        world_size: number of ranks that process different rows at the same time.
        cut: which positions of each row this rank processes; None: all.
    """

    def __init__(
        self,
        records: Records,
        sampler: Sampler,
        encoder: Encoder,
        image_reader: ImageSource,
        cfg: Config,
        rank: int,
        world_size: int,
        cost: CostModel,
        cut: ContextCut | None = None,
    ):
        """Prepare to read steps. `cfg` is the configuration of the training.

        Args:
            rank, world_size: number of this rank, and number of ranks; ranks that process the same rows count as one.
            cost: estimates the FLOPs of samples.
            cut: which positions of each row this rank processes; None: all.
        """
        self.records = records
        self.sampler = sampler
        self.encoder = encoder
        self.image_reader = image_reader
        self.global_batch_size = cfg.global_batch_size
        self.micro_batch_size = cfg.micro_batch_size
        self.most_tokens = cfg.row_tokens if cfg.packs else None
        self.bad_records = cfg.data.bad_records
        self.collate = Collator(image_reader, cfg.loss.normalize, cfg.packs, cut)
        self.cost = cost
        self.cut = cut
        self.rank = rank
        self.world_size = world_size
        self.round_micro_batches = cfg.parallel.num_micro_batches
        """Function: number of micro-batches that a rank needs -> number that it runs; a pipeline may need more."""
        self.ranks_per_row = cfg.parallel.ranks_per_row
        self.shares_rows = self.ranks_per_row > 1 or cfg.parallel.pipeline > 1
        """Whether several ranks process the same rows."""
        self.seed = cfg.seed
        self.drops = cfg.model.lora.enabled and cfg.model.lora.dropout > 0
        self.sources = cfg.data.source_names
        self.has_pairs = cfg.data.pairs
        # whether a pair of answers is two samples, each with the prompt
        self.copies_prompt = cfg.data.pairs and not cfg.data.prompt_once
        self.ends = np.cumsum(records.source_counts)

    def fingerprints(self) -> dict[str, str]:
        """Return texts that change with the dataset, with its encoding and with the order of the samples. A resumed run
        compares them with those of its checkpoint."""
        encoding = f"{self.encoder.tokenizer.fingerprint} {self.image_reader.fingerprint}"
        return {
            "dataset": self.records.fingerprint,
            "encoding": hashlib.sha256(encoding.encode()).hexdigest()[:32],
            "order": self.sampler.shape,
        }

    def __getitem__(self, step: int) -> Step | DataError:
        """Return this rank's part of a step, or the DataError that was raised while it was prepared."""
        try:
            return self.prepare(step)
        except DataError as error:  # a raised one would reach the main process as text with a traceback
            error.on_every_rank = False  # every rank reads its own samples
            return error

    def prepare(self, step: int) -> Step:
        """Read and collate this rank's part of a step, and count the samples of the whole step."""
        numbers = self.sampler.samples(step)
        facts = self.facts(step, numbers)
        micro_batches = self.assignment(step, numbers)[self.rank]
        total = len(micro_batches) * self.world_size  # only these count in a mean over micro-batches
        # a pipeline may need more micro-batches than the sampler, or loss.normalize=micro_batch, allows to fill
        micro_batches = [*micro_batches, *[[]] * (self.round_micro_batches(len(micro_batches)) - len(micro_batches))]
        if self.cut is not None:
            # a row of several ranks: read the images at this rank's positions or, if the model divides them itself, all
            prepare = self.prepare_divided_row if self.collate.images.divides else self.prepare_whole_row
            micros = [prepare(micro, facts, total) for micro in micro_batches]
            return Step(facts, micros)
        self.records.fetch_ahead({n for micro in micro_batches for n in micro})
        read = {n: self.read(n) for micro in micro_batches for n in dict.fromkeys(micro)}
        facts.skipped = [out for micro in micro_batches for n in micro if isinstance(out := read[n], SkippedSample)]
        micros = []
        for micro in micro_batches:
            kept = [(n, row) for n in micro if not isinstance(row := read[n], SkippedSample)]
            keys = self.keys_of(step, [n for n, _ in kept])
            micros.append(self.collate([row for _, row in kept], facts, total, keys))
        return Step(facts, micros)

    def keys_of(self, step: int, numbers: list[int]) -> SampleKeys:
        """Return what a micro-batch needs to know of the records with these numbers beside their content: their dropout
        seeds, if there is dropout; their data sources, if there are several; and the numbers, if records are pairs of
        answers. Else these lists are empty."""
        seeds = [derive("dropout", self.seed, step, n) % 2**31 for n in numbers] if self.drops else []
        sources = self.sources_of(numbers).tolist() if len(self.sources) > 1 else []
        return SampleKeys(seeds, sources, numbers=numbers if self.has_pairs else [])

    def prepare_divided_row(self, numbers: list[int], facts: StepFacts, micro_batches: int) -> MicroBatch:
        """Read and collate this rank's positions of a row that several ranks process together. Only images that have
        tokens at these positions are read.

        If an image cannot be read and `data.bad_records=skip`, black tiles take its place, and the sample is added to
        `facts.skipped`; `Loader.agree` then removes the sample's labels on all ranks. The sample must stay in the row,
        because the other ranks of the row may not read this image.

        Args:
            numbers: the samples of the row, in order, by their number in the dataset.
            facts: counts of the whole step.
            micro_batches: number of rows of the step.
        """
        cut, reader = self.cut, self.image_reader
        assert cut is not None and isinstance(reader, ImageReader)
        records = [self.parse(n) for n in numbers]
        samples = [self.encode(record, n) for record, n in zip(records, numbers, strict=True)]
        lengths = [len(sample.input_ids) for sample in samples]
        tokens = sum(lengths) or 1
        is_here = np.zeros(tokens + cut.padding(tokens), dtype=bool)  # the row's positions that this rank processes
        is_here[cut.positions(len(is_here))] = True
        parts = np.split(is_here, np.cumsum(lengths))[: len(samples)]
        names: dict[int, set[str]] = {}
        for number, sample, here in zip(numbers, samples, parts, strict=True):
            names.setdefault(number, set()).update(sample.images[place] for place in shown_places(sample, here))
        self.records.fetch_ahead(names, names)
        rows, tile_numbers = [], []
        for number, record, sample, here in zip(numbers, records, samples, parts, strict=True):
            counts = [reader.count_tiles(record, sample.place(n)) for n in range(len(sample.images))]

            def read(
                place: int,
                number: int = number,
                record: Record = record,
                sample: Sample = sample,
                counts: list[int] = counts,
            ) -> np.ndarray:
                try:
                    return self.tiles(record, number, sample.place(place))
                except DataError as error:
                    facts.skipped.append(self.skip_or_raise(number, error))
                    return np.zeros((counts[place], *reader.no_tiles().shape[1:]), dtype=np.uint8)

            first_tiles = [0, *itertools.accumulate(counts)][:-1]
            row, own_tiles = shown_images(sample, here, reader.tokens.features, read, first_tiles)
            rows.append(row)
            tile_numbers.append(own_tiles)
        records_of_labels = numbers if self.bad_records is BadRecords.skip else []
        keys = replace(self.keys_of(facts.step, numbers), records=records_of_labels, tile_numbers=tile_numbers)
        return self.collate(rows, facts, micro_batches, keys)

    def prepare_whole_row(self, numbers: list[int], facts: StepFacts, micro_batches: int) -> MicroBatch:
        """Read and collate a row that several ranks process together, for a model that divides it itself: every rank
        reads all of its images.

        If an image cannot be read and `data.bad_records=skip`, a black one takes its place, and the sample is added to
        `facts.skipped`; `Loader.agree` then removes the sample's labels on all ranks. The sample must stay in the row,
        because another rank of the row may be able to read the image. `numbers` are the row's records, `facts` the
        counts of the whole step, `micro_batches` its number of rows.
        """
        self.records.fetch_ahead(set(numbers))
        rows = [self.read_or_black(number, facts) for number in numbers]
        # with which `agree` finds the labels to remove
        records_of_labels = numbers if self.bad_records is BadRecords.skip else []
        keys = replace(self.keys_of(facts.step, numbers), records=records_of_labels)
        return self.collate(rows, facts, micro_batches, keys)

    def read_or_black(self, number: int, facts: StepFacts) -> Row:
        """Read and encode a record; return the sample and its images. An unreadable image becomes a black one of its
        size, and the sample is added to `facts.skipped`."""
        record = self.parse(number)
        sample, images = self.encode(record, number), []
        for n in range(len(sample.images)):
            try:
                images.append(self.tiles(record, number, sample.place(n)))
            except DataError as error:
                if is_video(record.images[sample.place(n)]):  # the number of its black frames is not known here
                    raise
                facts.skipped.append(self.skip_or_raise(number, error))
                width, height = self.image_reader.size(record, sample.place(n))
                images.append(np.zeros((height, width, 3), dtype=np.uint8))
        return sample, images

    def sources_of(self, numbers: list[int] | np.ndarray) -> np.ndarray:
        """Return the index of the data source of each record, int64 [records]."""
        return np.searchsorted(self.ends, numbers, side="right")

    def facts(self, step: int, numbers: list[int]) -> StepFacts:
        """Return the counts of a step of the given records. They were counted before training; the records themselves
        are read only to name those without labels."""
        chosen = np.array(numbers, dtype=np.int64)
        records = self.records
        sources = self.sources_of(chosen)
        labels = np.bincount(sources, records.labels[chosen], len(self.sources))
        weights = None
        if records.weights is not None:  # summed as integers: float64 sums would depend on the order
            weights = [int(records.weights[chosen[sources == n]].sum()) for n in range(len(self.sources))]
        return StepFacts(
            step,
            samples=len(chosen),
            tokens=int(records.lengths[chosen].sum()),
            # Pairs of tokens, for the cost of attention: squared lengths. The two samples of a pair of answers do not
            # attend to each other, and are about equally long: half of the square. With one prompt for both, they are
            # counted as if they did.
            token_pairs=int((records.lengths[chosen].astype(np.int64) ** 2).sum()) // (1 + self.copies_prompt),
            label_tokens=int(records.labels[chosen].sum()),
            images=int(records.images[chosen].sum()),
            tiles=int(records.tiles[chosen].sum()),
            truncated=int((records.positions_cut[chosen] > 0).sum()),
            labels_cut=int(records.labels_cut[chosen].sum()),
            unlabelled=[records[n].where for n in chosen[records.labels[chosen] == 0].tolist()],
            source_labels=dict(zip(self.sources, labels.astype(int).tolist(), strict=True)),
            source_weights=None if weights is None else dict(zip(self.sources, weights, strict=True)),
            has_pairs=self.has_pairs,
        )

    def read(self, number: int) -> Row | SkippedSample:
        """Read and encode a record; return a SkippedSample if it or an image is invalid and `data.bad_records=skip`.
        Raise DataError if `data.bad_records=fail`, or if the record has changed since the dataset was examined."""
        try:
            return self.read_row(number)
        except DataError as error:
            return self.skip_or_raise(number, error)

    def read_row(self, number: int) -> Row:
        """Read and encode a record, and read its images. Raise DataError if something is invalid."""
        record = self.parse(number)
        sample = self.encode(record, number)
        return sample, [self.tiles(record, number, sample.place(n)) for n in range(len(sample.images))]

    def skip_or_raise(self, number: int, error: DataError) -> SkippedSample:
        """Return a description of a record that is left out because of an error. Raise the error instead if
        `data.bad_records=fail`, or if it has no `kind` of bad record: then the record cannot be left out."""
        if self.bad_records is BadRecords.fail or error.kind is None:
            raise error
        return SkippedSample(number, self.records.where(number), error.kind, str(error), self.facts(0, [number]))

    def encode(self, record: Record, number: int) -> Sample:
        """Encode sample `number` of the dataset, which is all of the record or one of several samples of it. Raise
        DataError if it is not what it was when it was indexed."""
        if self.image_reader.status is not None:  # note what this worker reads, for messages
            self.image_reader.status.at(record.where)
        sample = self.encoder(record, self.records.turns(number))
        records = self.records
        length, num_labels = int(records.lengths[number]), int(records.labels[number])
        weight = num_labels * FULL_WEIGHT if records.weights is None else int(records.weights[number])
        if sample is None or (sample.length, sample.num_labels, sample.weight) != (length, num_labels, weight):
            raise DataError(  # without a kind, so that the record is not skipped: it may no longer fit its micro-batch
                f"{record.where} is not what it was when the dataset was examined: {length} tokens and {num_labels} "
                "labels then; remove the index and examine it again"
            )
        return sample

    def tiles(self, record: Record, number: int, place: int) -> np.ndarray:
        """Read the image or video with index `place` in record `number`: uint8 [tiles, 3, size, size], or as the reader
        of a model with a processor returns it. Raise ImageError if it cannot be read."""
        try:
            return self.image_reader.tiles(record, record.images[place])
        except ImageError as error:
            error.about(record=record.where)
            if self.records.is_decoded(number, place):
                raise
            unknown = "the image was not decoded before training: llava-fsdp prepare data.examine=decode checks all"
            raise ImageError(f"{error}; {unknown}", error.kind).about(**error.culprit) from error

    def parse(self, number: int) -> Record:
        """Parse a record. If it is not valid any more, raise a DataError that stops the run even if bad records are
        skipped."""
        try:
            return self.records[number]
        except DataError as error:
            if error.kind is None:  # it already stops the run
                raise
            raise DataError(
                f"{error}. It was right when the dataset was examined: the file has changed since, or its index "
                f"{self.records.index.folder} is damaged; run llava-fsdp prepare"
            ) from error

    def record_names_of_ranks(self, step: int, ranks: list[int]) -> list[str]:
        """Return the names of the records that some ranks process in a step; those of all ranks if `ranks` is empty.
        `ranks` are global ranks, of which several may process the same rows."""
        numbers = self.sampler.samples(step)
        if ranks:
            by_rank, size = self.assignment(step, numbers), self.ranks_per_row
            # `%`: in a pipeline, the ranks of each stage follow one another, and process the same rows again
            numbers = [n for rank in ranks for micro in by_rank[rank // size % self.world_size] for n in micro]
        return [self.records.where(n) for n in dict.fromkeys(numbers)]

    def assignment(self, step: int, numbers: list[int]) -> Assignment:
        """Distribute the `numbers` of a step's records among ranks and micro-batches: [rank][micro-batch][record]."""
        if (by_rank := self.sampler.assignment(step)) is not None:
            return by_rank
        chosen = np.array(numbers, dtype=np.int64)
        lengths = self.records.lengths[chosen]
        if self.most_tokens is None:  # one padded row for each sample
            # A pipeline may need more micro-batches than the samples fill (`round_micro_batches`). With
            # loss.normalize=micro_batch, to spread the samples over more of them would change the loss, a mean over
            # micro-batches: the number stays (`int`), and `prepare` adds empty micro-batches that do not count.
            rounded = self.round_micro_batches if self.collate.normalize is Normalize.step else int
            by_rank = split_step(lengths.tolist(), self.world_size, self.micro_batch_size, rounded)
        else:
            costs = self.cost(lengths, self.records.labels[chosen], self.records.tiles[chosen])
            by_rank = pack_step(
                lengths.tolist(), costs.tolist(), self.world_size, self.most_tokens, self.round_micro_batches
            )
        return [[[numbers[i] for i in micro] for micro in rank] for rank in by_rank]

    def probe(self) -> tuple[MicroBatch, list[Size]]:
        """Return a padded micro-batch for comparing the outputs of two models, and the sizes in pixels of its images.
        All ranks return the same.

        The micro-batch has two samples of step 0: one with an image and one without, neither with a video, and if
        possible not truncated. It has no labels; its `label_positions` are all tokens, so that all outputs are
        compared.
        """
        rows: dict[bool, Row] = {}
        sizes: list[Size] = []
        for number in sorted(self.sampler.samples(0), key=lambda n: bool(self.records.positions_cut[n])):
            has_image = bool(self.records.images[number])
            if has_image and any(map(is_video, self.parse(number).images)):
                continue
            if has_image not in rows and not isinstance(row := self.read(number), SkippedSample):
                rows[has_image] = row[0].parts[0], row[1]  # of a pair, the chosen answer
                record = self.parse(number)
                sizes += [self.image_reader.size(record, rows[has_image][0].place(n)) for n in range(len(row[1]))]
        reader = self.image_reader
        if isinstance(reader, ProcessorImages):  # a video without a sample of its own would not be compared
            reader = replace(reader, blanks={kinds: blank for kinds, blank in reader.blanks.items() if IMAGE in kinds})
        micro = Collator(reader, self.collate.normalize, pack=False)(list(rows.values()), StepFacts(0), 1)
        micro = replace(micro, label_positions=torch.arange(micro.input_ids.numel()), label_ids=torch.zeros(0))
        return micro, sizes
