"""The records of an indexed dataset that are trained on."""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.config import FULL_WEIGHT, Parity, TooLong
from llava_fsdp.data.columns import BLOCK
from llava_fsdp.data.index.build import Index
from llava_fsdp.data.index.examine.examine_passes import PictureSizes
from llava_fsdp.data.index.shared_columns import shared_column
from llava_fsdp.data.index.token_pass import FIRST_TURN, LABEL_WEIGHT, LAST_TURN, TAUGHT
from llava_fsdp.data.index.worker_pool import open_column
from llava_fsdp.data.problems import BITS, Kind, is_kept, mask
from llava_fsdp.data.records.record import Record


class Records:
    """The samples of a dataset that are trained on, and columns with a value for each. A record gives one sample, or
    several, each with a part of its answers; it is parsed when one of its samples is accessed.

    Arguments and columns count the samples that are trained on, unless they say otherwise. The columns are
    memory-mapped files. If records are skipped, a copy of each column without their values is written to disk when the
    column is first used.
    """

    def __init__(self, index: Index, labels: Parity, too_long: TooLong):
        """Choose the records to train on, and count the problems of all records. `labels` and `too_long` decide which
        kinds of problems cause a record to be skipped."""
        self.index = index
        self.dropped_kinds = [kind for kind in Kind if not is_kept(kind, labels, too_long)]
        self.counts: dict[Kind, int] = dict.fromkeys(Kind, 0)
        """Number of all records with each kind of problem."""
        self.num_wrong = 0
        """Number of records that are skipped because something is wrong with them."""
        self.num_too_long = 0
        """Number of records that are skipped only because they are too long."""
        self.num_records = 0
        """Number of records that are trained on."""
        # the name of the folder of encoded columns changes with the other folders of columns, too
        kept = f"{index.encoded.name.replace('encoded', 'kept')}-{mask(*self.dropped_kinds):x}"
        self._kept = index.encoded.with_name(kept)
        """Folder of the columns without the skipped records."""
        count = self._count()
        is_all = count == index.num_samples
        make = self._sample_numbers
        self.kept_samples = None if is_all else self._computed_once("numbers", count, np.dtype(np.int64), make)
        """Number of each sample in the index, int64; None if all records are trained on."""
        self._sizes = PictureSizes(index.records, index.pictures)

    def _count(self) -> int:
        """Count records by kind of problem, and skipped ones; return the number of samples of those not skipped."""
        dropped_bits = mask(*self.dropped_kinds)
        too_long_bits = dropped_bits & BITS[Kind.too_long]
        wrong_bits = dropped_bits & ~too_long_bits
        samples = 0
        for begin, flags in self.index.blocks():
            for kind in Kind:
                self.counts[kind] += int(np.count_nonzero(flags & BITS[kind]))
            # A too-long record may be noted as one without labels only because its labels stand behind the place where
            # it would be truncated. It is skipped instead, so it counts as too long, not as wrong.
            counted_bits = np.where(flags & too_long_bits, wrong_bits & ~BITS[Kind.no_labels], wrong_bits)
            self.num_wrong += int(np.count_nonzero(flags & counted_bits.astype(np.uint32)))
            is_kept = (flags & dropped_bits) == 0
            self.num_records += int(np.count_nonzero(is_kept))
            samples += int(self._samples_of(begin, is_kept).sum())
        self.num_too_long = len(self.index) - self.num_records - self.num_wrong
        return samples

    def _samples_of(self, begin: int, chosen: np.ndarray) -> np.ndarray:
        """Return for each sample of some consecutive records whether its record is chosen, bool [samples]. A record
        gives one or several samples (`first_sample` is None if each gives one). `begin`: number of the first record;
        `chosen`: whether each is chosen, bool [records]."""
        first = self.index.first_sample
        return chosen if first is None else np.repeat(chosen, np.diff(first[begin : begin + len(chosen) + 1]))

    def _sample_numbers(self) -> Iterator[np.ndarray]:
        """Yield the numbers in the index of the samples to train on, in blocks, int64 [block]: those of records without
        a problem for which records are skipped (a bit of `flags` for each kind of problem)."""
        # first: number of the first sample of each record; None if each record gives one sample
        dropped_bits, first = mask(*self.dropped_kinds), self.index.first_sample
        for begin, flags in self.index.blocks():
            yield np.flatnonzero(self._samples_of(begin, (flags & dropped_bits) == 0)) + (
                begin if first is None else int(first[begin])
            )

    def _blocks(self) -> Iterator[np.ndarray]:
        """Yield, in blocks, the number in the index of each sample that is trained on, int64 [block]."""
        for begin in range(0, len(self), BLOCK):
            end = min(begin + BLOCK, len(self))
            yield np.arange(begin, end) if self.kept_samples is None else self.kept_samples[begin:end]

    def _computed_once(
        self, name: str, count: int, dtype: np.dtype, make: Callable[[], Iterator[np.ndarray]]
    ) -> np.ndarray:
        """Return a column [count] from the file `name` in the folder of columns without the skipped records; if it is
        missing, one process writes it first. `make`: function that yields its values in pieces."""
        return shared_column(self._kept / f"{name}.npy", count, dtype, make)

    def __len__(self) -> int:
        return self.index.num_samples if self.kept_samples is None else len(self.kept_samples)

    def number_in_index(self, number: int) -> int:
        """Return the number in the index of a sample's record."""
        return self.record_of(self._sample_in_index(number))

    def _sample_in_index(self, number: int) -> int:
        return number if self.kept_samples is None else int(self.kept_samples[number])

    def record_of(self, sample: int) -> int:
        """Return the number of the record to which a sample belongs, given the sample's number in the index."""
        first = self.index.first_sample
        return sample if first is None else int(np.searchsorted(first, sample, side="right")) - 1

    def turns(self, number: int) -> tuple[int, int] | None:
        """Return the indices of the turns that are a sample's first and last answer; None if it has all answers of its
        record."""
        if self._turns is None:
            return None
        first, last = (int(column[self._sample_in_index(number)]) for column in self._turns)
        return None if first < 0 else (first, last)

    @cached_property
    def _turns(self) -> list[np.ndarray] | None:
        """Columns with the turns of the first and of the last answer of each sample in the index, -1 for the only
        sample of its record; None if each record gives one sample."""
        if self.index.first_sample is None:
            return None
        return [open_column(self.index.encoded, name) for name in (FIRST_TURN, LAST_TURN)]

    def is_first(self, number: int) -> bool:
        """Return whether a sample is the first one of its record."""
        first = self.index.first_sample
        return first is None or int(first[self.number_in_index(number)]) == self._sample_in_index(number)

    def count_records(self, begin: int, end: int) -> int:
        """Return the number of records whose samples, all of them, are `begin` to `end` - 1."""
        if self.index.first_sample is None:
            return end - begin
        return len({self.number_in_index(number) for number in range(begin, end)})

    def __getitem__(self, number: int) -> Record:
        index_number = self.number_in_index(number)
        return self._sizes.put(self.index.store.record(index_number), index_number)

    def is_decoded(self, number: int, position: int) -> bool:
        """Return whether a record's image with index `position` was decoded, and was good, before training."""
        return bool(self._digests[self._sizes.first[self.number_in_index(number)] + position])

    @cached_property
    def has_videos(self) -> bool:
        """Whether any record of the dataset has a video that is read."""
        return self._sizes.frames is not None and bool(self._sizes.frames.any())

    @cached_property
    def has_images(self) -> bool:
        """Whether any record of the dataset has an image, or a file that cannot be read."""
        frames = self._sizes.frames  # number of frames of each file, 0 for an image; None if videos are not read
        return len(self._sizes.width) > 0 if frames is None else bool((frames == 0).any())

    @cached_property
    def _digests(self) -> np.ndarray:
        return open_column(self.index.pictures, "digest")

    def fetch_ahead(self, numbers: Iterable[int], names: Mapping[int, Collection[str]] | None = None) -> None:
        """Begin to download the images of the samples `numbers` that are in remote files or folders. `names`: {sample:
        names of the images to download}; None: all images."""
        numbers_in_index = [self.number_in_index(number) for number in sorted(numbers)]
        if names is None:
            return self.index.store.fetch_ahead(numbers_in_index)
        names_to_fetch = {self.number_in_index(number): image_names for number, image_names in names.items()}
        # the function returns what to download of an image: all (its location), or nothing (None)
        self.index.store.fetch_ahead(
            numbers_in_index, lambda number, name, place: place if name in names_to_fetch[number] else None
        )

    def where(self, number: int) -> str:
        """Return the name of a sample's record for messages, whether or not it can be parsed."""
        return self.index.store.name(self.number_in_index(number))

    def column(self, folder: Path, name: str) -> np.ndarray:
        """Return a column of the index, with a value for each sample that is trained on. `folder`: its folder. Columns
        about tokens (in `index.encoded`) have a value for each sample; others, for each record, which all its samples
        get."""
        values = open_column(folder, name)
        is_record = folder != self.index.encoded and self.index.first_sample is not None
        if self.kept_samples is None and not is_record:
            return values
        # computed once, into a file that all processes map into memory
        return self._computed_once(
            name, len(self), values.dtype,
            lambda: (values[self.records_of(block) if is_record else block] for block in self._blocks()),
        )  # fmt: skip

    def records_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of the record of each sample, int64 [samples], given the samples' numbers in the index."""
        first = self.index.first_sample
        return samples if first is None else np.searchsorted(first, samples, side="right") - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens after truncation, int32 [samples]."""
        return self.column(self.index.encoded, "length")

    @cached_property
    def labels(self) -> np.ndarray:
        """Number of label tokens after truncation, int32 [samples]."""
        return self.column(self.index.encoded, "labels")

    @cached_property
    def weights(self) -> np.ndarray | None:
        """Sum of each sample's label weights after truncation, int64 [samples], in 1 / FULL_WEIGHT; None: all are 1."""
        has_weights = (self.index.encoded / f"{LABEL_WEIGHT}.npy").is_file()
        return self.column(self.index.encoded, LABEL_WEIGHT) if has_weights else None

    def weight_of(self, block: slice) -> int:
        """Return the sum of the weights of the labels of the samples in `block`, in units of 1 / FULL_WEIGHT."""
        if self.weights is None:
            return int(self.labels[block].sum(dtype=np.int64)) * FULL_WEIGHT
        return int(self.weights[block].sum())

    @cached_property
    def repeated(self) -> int:
        """Number of tokens that are read more than once because a record gives several samples that begin alike. It
        counts tokens before truncation, also of skipped records."""
        return int(self.index.taught[:, TAUGHT.index("repeated")].sum())

    @cached_property
    def images(self) -> np.ndarray:
        """Number of images after truncation, int32 [samples]."""
        return self.column(self.index.encoded, "images")

    @cached_property
    def pictures(self) -> np.ndarray:
        """Number of images before truncation, int32 [samples]."""
        return self.column(self.index.records, "pictures")

    @cached_property
    def tiles(self) -> np.ndarray:
        """Number of image tiles after truncation, int32 [samples]."""
        return self.column(self.index.encoded, "tiles")

    @cached_property
    def image_tokens(self) -> np.ndarray | None:
        """Number of image tokens after truncation, int32 [samples]; None if the dataset was examined by a version that
        did not count them."""
        is_counted = (self.index.encoded / "image_tokens.npy").is_file()
        return self.column(self.index.encoded, "image_tokens") if is_counted else None

    @cached_property
    def positions_cut(self) -> np.ndarray:
        return self.column(self.index.encoded, "positions_cut")

    @cached_property
    def labels_cut(self) -> np.ndarray:
        return self.column(self.index.encoded, "labels_cut")

    @cached_property
    def words(self) -> np.ndarray:
        """Number of words of all messages, negative without an image, int32 [samples]."""
        return self.column(self.index.records, "words")

    @cached_property
    def source_counts(self) -> list[int]:
        """For each data source, the number of its samples that are trained on."""
        begins = self.samples_before(self.index.store.source_bounds)
        return [end - begin for begin, end in itertools.pairwise(begins)]

    def samples_before(self, records: Sequence[int]) -> list[int]:
        """Return, for each record number in `records` (numbers in the index), how many of the samples that are trained
        on belong to earlier records."""
        first = self.index.first_sample  # for each record, the number of its first sample; None: each gives one sample
        samples = records if first is None else first[np.array(records)]
        return list(samples) if self.kept_samples is None else np.searchsorted(self.kept_samples, samples).tolist()

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the content of the dataset's files, of which samples are trained on, and if a record gives
        several samples, of the turns of each."""
        whole = self.index.store.fingerprint
        if self.kept_samples is None and self._turns is None:
            return whole
        digest = hashlib.sha256(whole.encode())
        for block in self._blocks():
            digest.update(block.tobytes())
            # columns with the turns of the first and of the last answer of each sample
            for column in self._turns or ():
                digest.update(self.records_of(block).tobytes() + column[block].tobytes())
        return digest.hexdigest()[:32]

    def left_out(self) -> Iterator[dict[str, Any]]:
        """Yield each problem of each skipped record as a dict with the record's name, the kind and the reason."""
        for problem in self.index.problems():
            if problem["kind"] in self.dropped_kinds:
                where = self.index.store.name(problem["record"])
                yield {"record": where, "kind": problem["kind"], "reason": problem["reason"]}
