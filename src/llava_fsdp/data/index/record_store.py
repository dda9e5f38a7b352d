"""Find the position of each record in a dataset's files, and read records by number.

The records of all data sources are numbered in one sequence, in the order of the sources and of their files.
"""

import bisect
import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.config import DataConfig, is_remote, paths_in
from llava_fsdp.data.columns import Columns, write_column
from llava_fsdp.data.containers.data_files import CacheFolder, DataFiles, RemoteFolder, open_folder
from llava_fsdp.data.containers.file_reader import reading
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.containers.remote_file import SHA256, RemoteFile
from llava_fsdp.data.index.find_files import find_files, find_images
from llava_fsdp.data.index.integrity import DONE, damaged_index, read_column, read_json, write_done
from llava_fsdp.data.index.worker_pool import open_column
from llava_fsdp.data.records.forms.parse_record import RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import spans
from llava_fsdp.data.records.packed_text import check_unpacks
from llava_fsdp.data.records.parquet import check_installed, is_parquet
from llava_fsdp.data.records.record import (
    Record,
    check_bytes,
    id_of,
    is_container,
    name_place,
    name_record,
    parse_text,
)
from llava_fsdp.runtime.errors import DataError, SourceError
from llava_fsdp.runtime.files.durable_files import replacing
from llava_fsdp.runtime.files.small_json import BadJson, kinds_of, require_kinds
from llava_fsdp.runtime.text.log import log

COMMIT = re.compile(r"^(hf://datasets/[^@]+)@[^/]+")
"""Finds the commit in the URL of a file of the Hugging Face hub."""
SPAN = "offset", "size", "line"
"""Columns of the index with the position of each record in its text file."""
PIECE = 65_536
"""Number of records whose positions are written to one file. An interrupted search continues after the last such
file."""

PartToFetch = Callable[[int, str, ImageLocation], ImageLocation | None]
"""Function (record number, image name, image location) -> location of the part of the image to download, or None."""


@dataclass(frozen=True)
class SourceFile:
    """A file of records (JSON, Parquet, tar), and the settings by which it is read."""

    name: str
    """Name of its data source, which may have several files."""
    path: str
    """Local path or URL."""
    images: str | None
    """Path or URL of the folder that the image paths of the records are relative to; see `find_images`. None: not
    configured."""
    question: str | None = None
    """Key of a record's question, if configured; `answer` and `image_column` likewise."""
    answer: str | None = None
    image_column: str | None = None
    size: int | None = None
    """Number of bytes of a remote file; None: the file is local. `pin` likewise."""
    pin: str | None = None
    """`RemoteFile.pin`, which identifies the content."""
    pairs: bool | None = None
    """Whether records have a chosen and a rejected answer. None, as for indexes of earlier versions: they have not."""

    @property
    def remote(self) -> RemoteFile | None:
        return None if self.size is None or self.pin is None else RemoteFile(self.path, self.size, self.pin)

    @property
    def identity(self) -> list[Any]:
        """Values that the parsed records depend on, beside the file's content. The commit in a URL of the Hugging Face
        hub is left out, because a new commit need not change this file; that in the URL of a folder of images stays,
        because a new commit may change any image. `keys.pairs`: whether records have a chosen and a rejected answer."""
        is_local = self.images is not None and not is_remote(self.images)
        images = os.path.realpath(str(self.images)) if is_local else self.images
        values = [self.name, COMMIT.sub(r"\1", self.path), images, self.keys]
        return [*values, "pairs"] if self.keys.pairs else values

    @property
    def keys(self) -> RecordKeys:
        return RecordKeys(self.question, self.answer, self.image_column, bool(self.pairs))


@dataclass(frozen=True)
class DataSource:
    """One of the data sources, which are mixed in training (an entry of `data.sources`), with its files of records."""

    name: str
    path: str
    """The configured value of `path`."""
    files: tuple[SourceFile, ...]

    @property
    def images(self) -> str | None:
        return self.files[0].images


@dataclass(frozen=True)
class NumberedFile:
    """A file of records, and the numbers of its records."""

    source: int
    """Index of the data source."""
    file: SourceFile
    text: str
    """Path of the text file with the records: `file` itself or, if it is a Parquet file, a tar, or a compressed or
    remote file, the copy in the index."""
    key: str
    """Text that changes with the path and content of `file`."""
    first: int
    """Number of its first record."""
    count: int


def sources_of(cfg: DataConfig, group: str = "data") -> list[DataSource]:
    """Return the data sources of a configuration, with the files of records that they name.

    Args:
        group: beginning of the configuration keys in error messages (`data` or `val`).

    Raises:
        ConfigError: a file or folder does not exist, or has no records.
    """
    paths_by_name = {name: (source.path, source.images or cfg.images) for name, source in cfg.sources.items()}
    if not paths_by_name:
        assert cfg.path is not None, "checked by DataConfig"
        paths_by_name = {Path(paths_in(cfg.path)[0]).name: (cfg.path, cfg.images)}
    sources, folders = [], dict[str, str]()
    for name, (path, images) in paths_by_name.items():
        key = f"{group}.sources.{name}." if cfg.sources else f"{group}."
        files = find_files(path, f"{key}path")
        if images is not None and images not in folders:
            folders[images] = find_images(images, f"{key}images")
        images = images and folders[images]
        source_files = tuple(
            SourceFile(
                name=name,
                path=file if isinstance(file, str) else file.name,
                images=images,
                question=cfg.question,
                answer=cfg.answer,
                image_column=cfg.image_column,
                size=None if isinstance(file, str) else file.size,
                pin=None if isinstance(file, str) else file.pin,
                pairs=cfg.pairs or None,
            )
            for file in files
        )
        for file in source_files:
            # Parquet files and files compressed with zstd can only be read with pyarrow
            check_installed(file.path)
            check_unpacks(file.path)
        sources.append(DataSource(name, path, source_files))
    return sources


def files_of(sources: Sequence[DataSource]) -> list[SourceFile]:
    """Return the files of records of all data sources, in order."""
    return [file for source in sources for file in source.files]


def open_data_files(files: Iterable[SourceFile], cache: CacheFolder | None) -> DataFiles:
    """Return the object that reads files of records and the images in them. With `cache=None`, remote files are not
    cached."""
    return DataFiles({file.path: file.remote for file in files if file.remote is not None}, cache)


def digest_of_records(file: SourceFile) -> str:
    """Return the SHA-256 checksum of a file of records. For a remote file whose storage does not know it, return the
    checksum of its URL, size and version (`RemoteFile.content`)."""
    if file.remote is not None:
        content = file.remote.content
        is_known = content.startswith(SHA256)
        return content.removeprefix(SHA256) if is_known else hashlib.sha256(content.encode()).hexdigest()
    path = Path(file.path)
    with reading(path), path.open("rb") as opened_file:
        return hashlib.file_digest(opened_file, "sha256").hexdigest()


class RecordStore:
    """Reads the records of a dataset by number, from positions in their files that were found before.

    The columns `offset` (int64), `size` and `line` (int32), each [records], are these positions. When a RecordStore is
    pickled, only its arguments are.

    Args:
        folder: folder of the columns.
        videos: whether videos are read. If false, a record that names a video has a problem.
        cache: folder that caches byte ranges of remote files; None: they are not cached.
    """

    def __init__(self, folder: Path, videos: bool = False, cache: CacheFolder | None = None):
        """Open the positions of the records in their files: the columns SPAN (offset, size and line) in a folder of the
        index, which `join_positions` has written. Raise DamagedError if the folder is damaged. `videos`: whether videos
        are read; `cache`: folder for parts of remote files; None: they are not kept."""
        self.folder = folder
        self.videos = videos
        self.cache = cache
        facts = read_json(folder / DONE)
        try:
            require_kinds(facts, {"fingerprint": (str,), "max_record_bytes": (int,)})
            self.sources = [source_from(raw) for raw in facts["sources"]]
            self.parts = [numbered_file_from(raw) for raw in facts["parts"]]
            self.fingerprint: str = facts["fingerprint"]
            """Checksum of the content of all files."""
            self.most_bytes: int = facts["max_record_bytes"]
            """Greatest size of a record in bytes."""
        except (KeyError, TypeError, BadJson) as error:
            raise damaged_index(folder / DONE, "it is not what was written") from error
        self.offset, self.size, self.lines = (open_column(folder, name) for name in SPAN)
        self._part_begins = [p.first for p in self.parts]
        self.data_files = open_data_files((part.file for part in self.parts), cache)

    def __reduce__(self) -> tuple:
        return RecordStore, (self.folder, self.videos, self.cache)

    def __len__(self) -> int:
        return len(self.offset)

    @cached_property
    def source_bounds(self) -> list[int]:
        """Number of the first record of each data source, followed by the number of all records."""
        counts = [0] * len(self.sources)
        for part in self.parts:
            counts[part.source] += part.count
        return list(itertools.accumulate(counts, initial=0))

    def locate(self, number: int) -> tuple[SourceFile, int]:
        """Return the file of a record, and the record's index among those of the file."""
        part = self.part(number)
        return part.file, number - part.first

    def part(self, number: int) -> NumberedFile:
        """Return the file that contains record `number` of the dataset."""
        return self.parts[bisect.bisect_right(self._part_begins, number) - 1]

    @cached_property
    def _folders(self) -> dict[SourceFile, Path | RemoteFolder | None]:
        """{file of records: folder that its image paths are relative to; None if it is not configured}."""
        files = (part.file for part in self.parts)
        return {file: None if file.images is None else open_folder(file.images, self.data_files) for file in files}

    def read(self, number: int) -> bytes:
        """Return the bytes of a record, JSON. Raise DataError if it is larger than data.max_record_bytes, SourceError
        if its file cannot be read or has changed, and DamagedError if the dataset's index is damaged."""
        # text: path of the file of records, or of its copy in the index if it is compressed, remote, or no text
        text, size, offset = self.part(number).text, int(self.size[number]), int(self.offset[number])
        if size <= 0 or offset < 0:
            raise damaged_index(self.folder / "offset.npy", f"a record of {size} bytes at {offset} is impossible")
        source, index = self.locate(number)
        check_bytes(size, self.most_bytes, name_place(source.path, index, self.line(number)))
        try:
            return self.data_files.open(text).read(offset, size)
        except SourceError as error:
            if text != source.path and isinstance(error.__cause__, FileNotFoundError):
                raise damaged_index(Path(text), "it is missing") from error
            raise

    def raw(self, number: int) -> Any:
        """Return a record as a parsed JSON value."""
        return self.parse(number, self.read(number))

    def parse(self, number: int, text: bytes) -> Any:
        """Parse the bytes of a record as JSON; the number is for error messages."""
        source, index = self.locate(number)
        return parse_text(source.path, index, text, self.line(number))

    def line(self, number: int) -> int | None:
        """Return the line, from 1, on which a record begins; None if its file is not a text file."""
        part = self.part(number)
        return None if is_container(part.file.path) else int(self.lines[number])

    def id_of(self, number: int) -> str | None:
        """Return the id of a record, even if the record is invalid; None if it has no id."""
        with contextlib.suppress(DataError):
            raw = self.raw(number)
            return id_of(raw) if isinstance(raw, dict) else None
        return None

    def name(self, number: int) -> str:
        """Return the name of a record for messages, whether or not it can be parsed."""
        source, index = self.locate(number)
        with contextlib.suppress(DataError):
            raw = self.raw(number)
            if isinstance(raw, dict):
                return name_record(source.path, index, self.line(number), id_of(raw))
        return name_place(source.path, index, self.line(number))

    def fetch_ahead(
        self, numbers: Iterable[int], part_to_fetch: PartToFetch = lambda number, name, place: place
    ) -> None:
        """Begin to download the images of records that are in remote files or folders. Downloads begun by earlier calls
        are dropped if they were not read. `part_to_fetch`: function (record, name of an image, its location) ->
        location of the part to download, or None; by default, whole images are downloaded."""
        locations = []
        for number in numbers:
            source = self.part(number).file
            folder = self._folders[source]
            if source.remote is None and not isinstance(folder, RemoteFolder):
                continue
            with contextlib.suppress(DataError):  # reported where the record is read
                record = self.record(number)
                images = list(record.inline.items()) if source.remote else []
                if isinstance(folder, RemoteFolder):
                    images += [(name, folder.location(name)) for name in record.images if name not in record.inline]
                locations += [
                    part_to_fetch(number, name, place) for name, place in images if isinstance(place, ImageLocation)
                ]
        self.data_files.fetch_ahead(place for place in locations if place is not None)

    def record(self, number: int, text: bytes | None = None) -> Record:
        """Parse a record, from its bytes `text` if they are given. Raise a DataError with a `kind` if it is invalid."""
        source, index = self.locate(number)
        folder = self._folders[source]
        raw = self.raw(number) if text is None else self.parse(number, text)
        record = parse_record(source.path, index, raw, self.line(number), source.keys, self.videos)
        # `folder` has the images that the record names; `inline` locates those embedded in the file of records
        return replace(record, folder=folder or record.folder, data_files=self.data_files if record.inline else None)


def source_from(raw: dict[str, Any]) -> DataSource:
    """Return a data source from its JSON in `done.json`. Raise BadJson, KeyError or TypeError if that is wrong."""
    files = tuple(SourceFile(**require_kinds(file, kinds_of(SourceFile))) for file in raw["files"])
    require_kinds(raw, {"name": (str,), "path": (str,), "files": (list,)})
    return DataSource(raw["name"], raw["path"], files)


def numbered_file_from(raw: dict[str, Any]) -> NumberedFile:
    """Return a record file from its JSON in `done.json`. Raise BadJson, KeyError or TypeError if that is wrong."""
    file = SourceFile(**require_kinds(raw["file"], kinds_of(SourceFile)))
    require_kinds(raw, {"source": (int,), "text": (str,), "key": (str,), "first": (int,), "count": (int,)})
    return NumberedFile(**{**raw, "file": file})


@dataclass(frozen=True)
class TextFile:
    """A text file of records (JSON or JSON Lines) whose positions in the file are not known yet."""

    file: SourceFile
    path: Path
    """`file` itself, or the file in the index to which its records were written."""
    key: str
    """Text that changes with the path and content of `file`."""


@dataclass(frozen=True)
class FindRecords:
    """Finds the positions of the records in text files. A call with the index of a file writes the positions of its
    records to several .npy files (pieces)."""

    texts: tuple[TextFile, ...]
    folder: Path
    """Folder in which each text file has a folder for its pieces."""
    most_bytes: int
    """Greatest size of a record in bytes."""

    def __call__(self, chunk: int) -> Columns:
        """Write the positions of the records of text file number `chunk`. The result, empty columns, marks its end."""
        text = self.texts[chunk]
        # made of a Parquet file without rows, which is allowed; `join_positions` raises an error if there are no others
        if is_parquet(text.file.path) and not text.path.stat().st_size:
            log().warning("%s holds no records", text.file.path)
            return {"count": np.zeros(0, dtype=np.int64)}
        if is_container(text.file.path) and not text.path.stat().st_size:
            raise no_records(text.file.path)
        split_file(text.path, self.pieces(chunk), self.most_bytes, text.file.path)
        return {"count": np.zeros(0, dtype=np.int64)}

    def pieces(self, chunk: int) -> Path:
        """Return the folder of the pieces of a file."""
        return self.folder / self.texts[chunk].key

    def files(self) -> list[Path]:
        """Return for each text file a path that exists once the positions of all its records are written."""
        return [self.folder / f"{text.key}.npz" for text in self.texts]


def no_records(file: str) -> DataError:
    return DataError(f"{file} holds no records; take it out, or take it from its source again").about(file=file)


def join_positions(
    sources: Sequence[DataSource],
    found: FindRecords,
    folder: Path,
    fingerprint: str,
    check: Callable[[], None],
) -> None:
    """Join the positions of the records of all files, and write them into a folder that RecordStore can open.

    Args:
        found: the computation that has written the positions for the files of all sources, in their order.
        check: called before the folder gets its final name; raises an error if a file has changed.

    Raises:
        DataError: a file has no records. A Parquet file without rows among others is left out.
    """
    numbers = [number for number, source in enumerate(sources) for _ in source.files]
    parts: list[NumberedFile] = []
    pieces: list[Path] = []
    first = 0
    for chunk, (number, text) in enumerate(zip(numbers, found.texts, strict=True)):
        source = sources[number]
        files = sorted(found.pieces(chunk).glob("*.npy"))
        count = sum(len(read_column(p)) for p in files)
        if not count:
            if is_parquet(text.file.path) and len(source.files) > 1:
                continue  # a shard without rows, as a filter leaves it
            raise no_records(text.file.path)
        parts.append(NumberedFile(number, text.file, str(text.path), text.key, first, count))
        pieces += files
        first += count
    without_records = [
        source.path for number, source in enumerate(sources) if number not in {part.source for part in parts}
    ]
    if without_records:
        raise no_records(without_records[0])
    staged = folder.with_name(f"{folder.name}.tmp")
    staged.mkdir(exist_ok=True)
    for place, (name, dtype) in enumerate(zip(SPAN, (np.int64, np.int32, np.int32), strict=True)):
        # numbers beyond int32 become its largest: such a record is over data.max_record_bytes (4 MiB by default), too
        columns = (np.minimum(read_column(p)[:, place], np.iinfo(dtype).max).astype(dtype) for p in pieces)
        write_column(staged / f"{name}.npy", columns, np.dtype(dtype))
    facts = {"sources": [asdict(s) for s in sources], "parts": [asdict(p) for p in parts]}
    facts |= {"fingerprint": fingerprint, "max_record_bytes": found.most_bytes}
    write_done(staged, facts)
    check()
    os.replace(staged, folder)


def split_file(path: Path, folder: Path, most_bytes: int, name: str | None = None) -> list[Path]:
    """Find the positions of the records in a text file and write them to several .npy files (pieces) in `folder`.
    Pieces left by an interrupted run are used again.

    Args:
        most_bytes: greatest size of a record in bytes.
        name: name of the file in error messages if `path` is a copy of it; None: `path`.

    Returns:
        Paths of the pieces; each has offset, size and line of its records, int64 [records, 3].
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = sorted(folder.glob("*.npy"))
    after = tuple(read_column(pieces[-1])[-1].tolist()) if pieces else None
    found = spans(path, after, most_bytes, name)
    while True:
        with reading(path):
            piece = list(itertools.islice(found, PIECE))
        if not piece:
            return pieces
        target = folder / f"{len(pieces):08d}.npy"
        with replacing(target, durable=True) as file:
            np.save(file, np.array(piece, dtype=np.int64))
        pieces.append(target)
