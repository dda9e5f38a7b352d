"""The first two passes over a dataset that make its index: read all records, and examine all images.

A pass is a computation for each record. It processes chunks: consecutive records of one file. Numbers of records and of
images count those of the whole dataset.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from llava_fsdp.config import Examine, is_remote
from llava_fsdp.data.columns import ROWS, Columns, rows_column
from llava_fsdp.data.containers.data_files import CacheFolder, open_folder
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.images.check import ImageFacts, ImageFile, check_links, examine, head_of, image_in, inline_images
from llava_fsdp.data.images.image_source import SizeRule
from llava_fsdp.data.images.video import FrameChoice, examine_video
from llava_fsdp.data.index.examine.image_sample import ImageSample, ends_of
from llava_fsdp.data.index.record_store import RecordStore
from llava_fsdp.data.index.worker_pool import open_column
from llava_fsdp.data.problems import BITS, Kind
from llava_fsdp.data.records.forms.image_places import SIZE_KEYS, given_sizes
from llava_fsdp.data.records.keys import count_keys
from llava_fsdp.data.records.record import IMAGE_TAG, INLINE, Record, is_video, unread_reason
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

T = TypeVar("T")
LONGEST_ID = 1000
"""Greatest number of characters of an id in the list of problems."""
AHEAD = 64
"""Number of records whose images are downloaded together from remote files."""
ExaminedImage = tuple[str | None, str, bool]
"""An image that was examined: (image folder, name, whether it was decoded)."""
Tell = Callable[[str, str], None]
"""Function (kind of problem, reason for the user) that stores a problem of one record."""


class Findings:
    """Collects the problems of the records of one chunk."""

    def __init__(self, numbers: range, first: int):
        """Begin without problems. `numbers`: those of the chunk's records, counted in the whole dataset."""
        self.numbers = numbers
        self.first = first
        """Number of the first record in the file of records to which the chunk belongs."""
        self.flags = np.zeros(len(numbers), dtype=np.uint32)
        """Problems as bits (`problems.BITS`), uint32 [records of the chunk]."""
        self.problems: list[dict[str, Any]] = []

    def teller_of(self, number: int, identity: str | None) -> Tell:
        """Return a function `tell` that adds a problem, given as (kind, reason), to the record with this number. From
        several problems of one kind, only the first is added. `identity`: id of the record, if it has one."""
        at, identity = number - self.numbers.start, identity and identity[:LONGEST_ID]

        def tell(kind: str, reason: str) -> None:
            """Add a problem of the record, unless it has one of this kind already."""
            bit = BITS[Kind(kind)]
            if not self.flags[at] & bit:
                # `record`: the record's number in its file, so that the row is valid if other files are added before
                row = {"record": number - self.first, "id": identity, "kind": str(kind), "reason": shown_name(reason)}
                self.problems.append(row)
            self.flags[at] |= bit

        return tell

    @property
    def columns(self) -> Columns:
        return {"flags": self.flags, ROWS: rows_column(self.problems)}


def attempt(make: Callable[[], T], tell: Tell) -> T | None:
    """Return the result of `make`. If it raises a DataError with a kind, the record is at fault: pass the problem to
    the function `tell`, and return None. Other errors are raised."""
    try:
        return make()
    except DataError as error:
        if error.kind is None:
            raise
        tell(error.kind, str(error))
        return None


@dataclass(frozen=True)
class DatasetPass(ABC):
    """Base class of the passes: results of a chunk become columns of the index. They depend on the chunk's file of
    records alone, so that they can be used again when other files are added to the dataset."""

    folder: Path
    """Folder of the index that a RecordStore opens."""
    size: int
    """Greatest number of records in a chunk."""
    sampling: FrameChoice | None
    """Selects the frames of a video that are used; None if videos are not read."""
    cache: CacheFolder
    """Folder for byte ranges of remote files."""

    @cached_property
    def store(self) -> RecordStore:
        return RecordStore(self.folder, self.sampling is not None, self.cache)

    @cached_property
    def chunks(self) -> list[range]:
        """For each chunk, the numbers of its records."""
        return [
            range(begin, min(begin + self.size, part.first + part.count))
            for part in self.store.parts
            for begin in range(part.first, part.first + part.count, self.size)
        ]

    @property
    def file_begins(self) -> list[int]:
        """For each chunk, the number of the first record of its file."""
        return [self.store.part(numbers.start).first for numbers in self.chunks]

    def chunk_of(self, number: int) -> int:
        """Return the index of the chunk that contains a record."""
        return bisect.bisect_right(self.chunks, number, key=lambda numbers: numbers.start) - 1

    def files(self, folder: Path) -> list[Path]:
        """Return the path of the file in `folder` for the result of each chunk."""
        return [folder / f"{self.key_of(numbers)}-{numbers.start - first:09d}.npz"
                for numbers, first in zip(self.chunks, self.file_begins, strict=True)]  # fmt: skip

    def key_of(self, numbers: range) -> str:
        """Return a text that changes with all data on which the results for a chunk depend."""
        return self.store.part(numbers.start).key

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def __call__(self, chunk: int) -> Columns:
        return self.of(self.chunks[chunk])

    def of(self, numbers: range) -> Columns:
        """Examine consecutive records of one file. Return the pass's columns, and those with the problems that it
        found."""
        found = Findings(numbers, self.store.part(numbers.start).first)
        return {**self.columns(numbers, found), **found.columns}

    @abstractmethod
    def columns(self, numbers: range, found: Findings) -> Columns:
        """Examine consecutive records; add their problems to `found`."""

    def records(self, numbers: range) -> Iterator[tuple[int, Record]]:
        """Yield (number, record) for the valid records. The pass ReadRecords reports the invalid ones."""
        for number in numbers:
            record = attempt(partial(self.store.record, number), lambda *_: None)
            if record is not None:
                yield number, record


NAME_SIZE = "name_size"
"""Column with the number of bytes of each image's path, int32 [images]."""
UNREAD = "unread_keys"
"""Column with the keys that no parser reads and how many records have them, JSON, uint8 [bytes]."""


@dataclass(frozen=True)
class ReadRecords(DatasetPass):
    """First pass: parse each record and store its id, number of words and images.

    Columns with a value per record: id_hash (0: no id), digest (xxh3 checksum of its bytes; 0: not read), words,
    pictures (number of images). Column with a value per image: NAME_SIZE. Column `names`: the bytes of all image paths.
    Column UNREAD.
    """

    def columns(self, numbers: range, found: Findings) -> Columns:
        """Parse the records with these numbers. Return columns for later passes; `found` gets the records' problems.

        Columns with a value for each record: id_hash, digest (checksum of its bytes), words (their number, negative
        without an image, as LLaVA's sampler needs) and pictures (number of images). NAME_SIZE has the length of each
        image's path, and `names` the bytes of all paths. UNREAD has, as JSON, how many records have each key that is
        not read. An invalid record has zeros, but for its digest.
        """
        hashes, digests = (np.zeros(len(numbers), dtype=np.uint64) for _ in range(2))
        words, pictures = (np.zeros(len(numbers), dtype=np.int32) for _ in range(2))
        names: list[bytes] = []
        unread = Counter[str]()
        for number in numbers:
            try:
                text = self.store.read(number)
                digests[number - numbers.start] = xxh3_64_intdigest(text)
                record = self.store.record(number, text)
            except DataError as error:
                if error.kind is None:
                    raise
                found.teller_of(number, self.store.id_of(number))(error.kind, str(error))
                continue
            at = number - numbers.start
            hashes[at] = id_hash(record.id) if record.has_id else 0
            words[at], pictures[at] = record.llava_length, len(record.images)
            names += [name.encode() for name in record.images]
            count_keys(unread, dict.fromkeys(record.unread_keys, 1))
            check_pictures_named(record, found.teller_of(number, record.known_id))
            if record.key_not_obeyed is not None:
                found.teller_of(number, record.known_id)(
                    Kind.key_not_obeyed, f"{record.where}: {record.key_not_obeyed}"
                )
        return {
            "id_hash": hashes,
            "digest": digests,
            "words": words,
            "pictures": pictures,
            NAME_SIZE: np.array([len(n) for n in names], dtype=np.int32),
            "names": np.frombuffer(b"".join(names), dtype=np.uint8),
            UNREAD: np.frombuffer(json.dumps(unread).encode(), dtype=np.uint8),
        }


def id_hash(identity: str) -> int:
    """Return a 64-bit hash of a record's id, never 0. Two of ten million ids are equal with probability 1 / 300,000."""
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def check_pictures_named(record: Record, tell: Tell) -> None:
    """Report each problem of how a record names its images and videos to `tell` (kind, reason). No file is read."""
    # an image in `inline` is in the record itself, or in its file
    outside = next((name for name in record.images if name not in record.inline), None)
    if outside is not None and record.folder is None:
        tell(
            Kind.images_unset,
            f"{record.where} has image {outside}, but data.images is not set: set it to their folder",
        )
    # describes media that are not read, such as audio
    if record.unread is not None:
        tell(Kind.media_not_read, unread_reason(record.where, record.unread))
    elif not record.images and any(IMAGE_TAG in turn.text for turn in record.turns):
        tell(
            Kind.tag_without_image,
            f"{record.where} has {IMAGE_TAG} in its text but no image: is the key called image? name the image "
            "there, or remove the tag from the text",
        )


@dataclass(frozen=True)
class ImageProblem:
    """A problem of an image. It is stored instead of the exception, which would keep the file's bytes in memory."""

    kind: str
    reason: str


@dataclass(frozen=True)
class ExaminePictures(DatasetPass):
    """Second pass: check images and store their sizes.

    Columns with a value per image: width and height in pixels after turning by the EXIF orientation, stored_height
    (before turning), and digest (uint64, xxh3 checksum of the file's bytes if all were read). If videos are read, also
    frames (number of a video's frames) and rate (float64, frames per second); both are 0 for an image. All columns are
    0 for an image or a video that has problems. They are also 0 for a file that is not opened, except the sizes if the
    record gives them.
    """

    records_folder: Path
    how: Examine
    """The setting `data.examine`; `auto` has been replaced."""
    opens_all: bool
    """Whether images that are not decoded are opened, for their sizes."""
    sample_size: int
    """With `how=sample`, the number of images that are drawn at random and decoded."""
    scales_wide_values: bool
    """Whether training scales images of more than 8 bits per value to 8 bits (by `data.pixels`). If so, an image that
    cannot be scaled has a problem."""
    allow_links: bool
    sized_by_records: SizeRule | None = None
    """See `Plan.sized_by_records`."""

    @cached_property
    def names(self) -> PictureNames:
        return PictureNames(self.records_folder)

    @cached_property
    def real_folders(self) -> dict[str, str]:
        """{local folder of images: its path without links}."""
        folders = {part.file.images for part in self.store.parts}
        return {folder: os.path.realpath(folder) for folder in folders if folder is not None and not is_remote(folder)}

    @cached_property
    def sample(self) -> ImageSample:
        """The images that are decoded with `how=sample`, drawn from all images of the dataset."""
        ends = ends_of(self.names.first, [part.first for part in self.store.parts])
        return ImageSample(ends, self.sample_size)

    def key_of(self, numbers: range) -> str:
        """Return a text that changes with all data on which the results for a chunk depend. With `how=sample`, these
        include which of its images are decoded, because the sample is drawn from the whole dataset."""
        key = super().key_of(numbers)
        if self.how is not Examine.sample:
            return key
        begin, end = self.image_range(numbers)
        return f"{key}-{xxh3_64_hexdigest((self.sample.decoded_between(begin, end) - begin).tobytes())}"

    def image_range(self, numbers: range) -> tuple[int, int]:
        """Return the range [begin, end) of the images of consecutive records."""
        return int(self.names.first[numbers.start]), int(self.names.first[numbers.stop])

    def columns(self, numbers: range, found: Findings) -> Columns:
        """Examine the images of some records. Return columns with sizes and checksums, one value for each image;
        `found` gets the problems. Sizes that the records give (`sized_by_records`) are filled in first; then the images
        that are to be opened are examined, each file once."""
        begin, end = self.image_range(numbers)
        kinds = {"width": np.int32, "height": np.int32, "stored_height": np.int32, "digest": np.uint64}
        if self.sampling is not None:
            kinds |= {"frames": np.int32, "rate": np.float64}
        columns = {name: np.zeros(end - begin, dtype=kind) for name, kind in kinds.items()}
        if self.sized_by_records is not None:
            for number, record in self.records(numbers):
                first = int(self.names.first[number]) - begin
                sizes = sizes_of(number, record, self.store, self.sized_by_records)
                for place, (width, height) in enumerate(sizes, first):
                    columns["width"][place] = width
                    columns["height"][place] = columns["stored_height"][place] = height
        decoded = self.decoded_images(begin, end)  # numbers of the images to decode; of others only the head is read
        examined: dict[ExaminedImage, ImageFacts | ImageProblem] = {}
        opened = self.records_to_open(numbers, decoded)
        for at, number in enumerate(opened):
            if at % AHEAD == 0:
                self.store.fetch_ahead(opened[at : at + AHEAD], partial(self.part_to_fetch, decoded, examined))
            names = self.names.names_of(number)
            inline = self.inline_of(number, names)
            record: Record | None = None  # read once: a hostile record names many missing images
            for image, name in enumerate(names, int(self.names.first[number])):
                folder, full = self.store.locate(number)[0].images, image in decoded
                if not (self.opens_all or full):
                    continue
                key = folder, name, full
                if key not in examined:
                    examined[key] = self.examine_one(folder, name, full, inline.get(name))
                facts = examined[key]
                if isinstance(facts, ImageProblem):
                    record = record or self.store.record(number)
                    # the reason names the image, as several records may have it; here the record's name is put in its
                    # place
                    reason = f"{record.where}: {facts.reason.removeprefix(f'{shown_name(name)}: ')}"
                    found.teller_of(number, record.known_id)(facts.kind, reason)
                    facts = ImageFacts(0, 0, 0)
                for column, values in columns.items():
                    values[image - begin] = getattr(facts, column)
        return columns

    def decoded_images(self, begin: int, end: int) -> Collection[int]:
        """Return the numbers of those of the images begin to end - 1 that are decoded."""
        if self.how is Examine.sample:
            return frozenset(self.sample.decoded_between(begin, end).tolist())
        return range(begin, end) if self.how is Examine.decode else ()

    def records_to_open(self, numbers: range, decoded: Collection[int]) -> Sequence[int]:
        """Return those of the record numbers `numbers` that have an image to open: all with `opens_all`, else the
        records of the images to decode (`decoded`, image numbers), found without a loop over all records."""
        if self.opens_all:
            return numbers
        image_numbers = np.array(sorted(decoded), dtype=np.int64)
        first_images = self.names.first[numbers.start : numbers.stop + 1]
        return (np.unique(np.searchsorted(first_images, image_numbers, side="right")) - 1 + numbers.start).tolist()

    def part_to_fetch(
        self,
        decoded_images: Collection[int],
        examined: Collection[ExaminedImage],
        number: int,
        name: str,
        location: ImageLocation,
    ) -> ImageLocation | None:
        """Return what to download of a remote image before it is examined: the location of the whole image if it is
        decoded, or of its beginning if only its size is read. None if the image is not opened, or was examined before.

        Args:
            decoded_images: the images that are decoded, each as its number among all images of the dataset.
            examined: the images that were examined before: (image folder, name of the image, whether it was decoded).
            number, name: number of the record, and name of the image in it.
            location: where the whole image is.
        """
        image_numbers = range(*self.image_range(range(number, number + 1)))
        is_decoded = image_numbers[self.names.names_of(number).index(name)] in decoded_images
        if (self.store.locate(number)[0].images, name, is_decoded) in examined:
            return None
        if is_decoded:
            return location
        return head_of(location) if self.opens_all else None

    def inline_of(self, number: int, names: list[str]) -> dict[str, ImageFile]:
        """Return the images that are embedded in a record or in its file (Parquet or tar), by their names."""
        if not any(name.startswith(INLINE) for name in names):
            return {}
        return inline_images(self.store.record(number))

    def examine_one(
        self, folder: str | None, name: str, full: bool, file: ImageFile | None
    ) -> ImageFacts | ImageProblem:
        """Check that an image or video can be read; return its size, or its problem. That begins with `name` and not
        with a record, because several records may have the image.

        Args:
            folder: folder of the images; None: it is not set.
            full: whether to decode it.
            file: the image, if it is embedded in the record or its file; None: `name` is a path in `folder`.
        """
        if file is None and folder is None:  # the first pass has reported that data.images is not set
            return ImageFacts(0, 0, 0)
        try:
            file = image_in(open_folder(str(folder), self.store.data_files), name) if file is None else file
            if is_video(name) and not isinstance(file, Path):
                return ImageProblem(
                    Kind.image_unreadable, f"video {file} is remote; videos are only read from local folders"
                )
            if isinstance(file, Path):
                check_links(file, name, self.real_folders[str(folder)], self.allow_links)
                if is_video(name) and self.sampling is not None:
                    return examine_video(file, name, self.sampling, full)
            return examine(file, name, full, self.scales_wide_values)
        except DataError as error:
            if error.kind is None:
                raise
            return ImageProblem(error.kind, str(error))


def sizes_of(number: int, record: Record, store: RecordStore, rule: SizeRule) -> list[tuple[int, int]]:
    """Return the sizes that a record gives of its images, as (width, height) in pixels; empty if their tokens do not
    depend on sizes. Raise ConfigError if it does not give the sizes of all its images, or has a video."""
    has_video = any(map(is_video, record.images))
    if not record.images or not (has_video or rule.needs_size(record.num_images)):
        return []
    sizes = None if has_video else given_sizes(store.raw(number), len(record.images))
    if sizes is None:
        lacks = (
            "has a video, whose frames must be counted"
            if has_video
            else f"does not give the size of each image in its keys {' and '.join(SIZE_KEYS)}, a number of pixels or a "
            "list of them; add these keys"
        )
        raise ConfigError(
            f"{record.where} {lacks}: data.examine=lazy opens no file before training, and with {rule.cause} the "
            "number of tokens depends on it. Or set data.examine=head, which reads only the beginning of each image"
        )
    return sizes


class PictureNames:
    """Reads the names (paths) of the images of records from the index."""

    def __init__(self, records: Path):
        self.first = open_column(records, "first_picture")
        """Number of each record's first image."""
        self.end = open_column(records, "name_end")
        self.names = open_column(records, "names")

    def names_of(self, number: int) -> list[str]:
        """Return the names of the images of record `number` of the dataset."""
        ends = self.end[int(self.first[number]) : int(self.first[number + 1]) + 1].tolist()
        return [self.names[begin:end].tobytes().decode() for begin, end in itertools.pairwise(ends)]


class PictureSizes:
    """Reads the sizes of the images of records from the index."""

    def __init__(self, records: Path, pictures: Path):
        """Open the columns with sizes. `records`, `pictures`: folders that ReadRecords and ExaminePictures wrote."""
        self.first = open_column(records, "first_picture")
        """Number of each record's first image."""
        names = ("width", "height", "stored_height")
        self.width, self.height, self.stored_height = (open_column(pictures, name) for name in names)
        has_videos = (pictures / "frames.npy").is_file()
        self.frames, self.rate = (open_column(pictures, n) if has_videos else None for n in ("frames", "rate"))

    def sizes_of(self, number: int, position: int) -> tuple[int, int, int]:
        """Return (width, height, height before turning by the EXIF orientation) in pixels of the record's image with
        index `position`. All are 0 if the image has problems or has not been opened."""
        row = int(self.first[number]) + position
        return int(self.width[row]), int(self.height[row]), int(self.stored_height[row])

    def put(self, record: Record, number: int) -> Record:
        """Return a copy of a record with the sizes of its images and the lengths of its videos."""
        if not record.images:
            return record
        positions = range(len(record.images))
        sizes = tuple(self.sizes_of(number, position)[:2] for position in positions)
        return replace(record, sizes=sizes, frames=tuple(self.frames_of(number, position) for position in positions))

    def frames_of(self, number: int, position: int) -> tuple[int, float]:
        """Return (number of frames, frames per second) of item `position` of record `number`; zeros for an image, and
        if the dataset was examined without its videos."""
        if self.frames is None or self.rate is None:
            return 0, 0.0
        row = int(self.first[number]) + position
        return int(self.frames[row]), float(self.rate[row])
