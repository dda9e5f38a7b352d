"""Find where each record is in a dataset's files, and read records by number. The positions are the first part of an
index."""

import bisect
import contextlib
import hashlib
import itertools
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.config import DataConfig, is_remote, paths_in
from llava_fsdp.data.containers.open_shards import CacheFolder, OpenShards, RemoteFolder, open_folder
from llava_fsdp.data.containers.place import Place
from llava_fsdp.data.containers.remote_file import SHA256, RemoteFile
from llava_fsdp.data.index.find_files import find_files, find_images
from llava_fsdp.data.index.integrity import DONE, damaged, read_column, read_json, seal
from llava_fsdp.data.index.worker_pool import Columns, open_column, write_column
from llava_fsdp.data.records.forms import RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import Span, spans
from llava_fsdp.data.records.packed_text import check_unpacks
from llava_fsdp.data.records.parquet import check_installed
from llava_fsdp.data.records.record import (
    Record,
    check_bytes,
    id_of,
    name_place,
    name_record,
    parse_text,
    reading,
)
from llava_fsdp.data.records.rows import has_rows
from llava_fsdp.runtime.durable_files import replacing
from llava_fsdp.runtime.errors import DataError, SourceError
from llava_fsdp.runtime.small_json import BadJson, kinds_of, require_kinds

COMMIT = re.compile(r"^(hf://datasets/[^@]+)@[^/]+")
"""Finds the commit in the URL of a file of the Hugging Face hub."""
SPAN = "offset", "size", "line"
OPEN_FILES = 64
"""Number of text files that a process keeps open."""
PIECE = 65_536
"""Number of records per file of positions. A search for records that was interrupted continues after the last such
file."""

Needed = Callable[[int, str, Place], Place | None]
"""Function that returns which part of an image in a remote file is fetched, or None; its arguments are the record's
number, and the image's name and place."""


@dataclass(frozen=True)
class SourceFile:
    """A file of records, and the folder that their image paths are relative to."""

    name: str
    """Name of the data source that the file belongs to; a source may have several files."""
    path: str
    images: str | None
    """Path or URL of the folder, see `find_images`."""
    question: str | None = None
    """Key of a record for its question, if the configuration names one; likewise the next two (`RecordKeys`)."""
    answer: str | None = None
    image_column: str | None = None
    size: int | None = None
    """Number of bytes of a remote file; None: the file is local."""
    pin: str | None = None
    """`RemoteFile.pin` of a remote file."""

    @property
    def remote(self) -> RemoteFile | None:
        """The remote file; None: the file is local."""
        return None if self.size is None or self.pin is None else RemoteFile(self.path, self.size, self.pin)

    @property
    def place(self) -> list[Any]:
        """What the records depend on beside the file's content. The commit in a URL of the Hugging Face hub is left
        out: a new commit does not change the files that it leaves alone. That of a folder of images stays, because it
        may change any of them."""
        is_local = self.images is not None and not is_remote(self.images)
        images = os.path.realpath(str(self.images)) if is_local else self.images
        return [self.name, COMMIT.sub(r"\1", self.path), images, self.keys]

    @property
    def keys(self) -> RecordKeys:
        return RecordKeys(self.question, self.answer, self.image_column)


@dataclass(frozen=True)
class DataSource:
    """A data source: its files of records."""

    name: str
    path: str
    """The configured value of `path`."""
    files: tuple[SourceFile, ...]

    @property
    def images(self) -> str | None:
        """The folder of the source's images; None if no folder is configured."""
        return self.files[0].images


@dataclass(frozen=True)
class Part:
    """The records of one file of records."""

    source: int
    """Index of the data source."""
    file: SourceFile
    text: str
    """Path of the text file with the records: the file itself, or the one in the index that was written from a
    Parquet file, a tar, or a compressed or remote file."""
    key: str
    """Text that changes with the file's path and content."""
    first: int
    """Number of the first record of this file among the records of all files."""
    count: int


def sources_of(cfg: DataConfig, group: str = "data") -> list[DataSource]:
    """Return the data sources of a configuration (`data.path` and `data.images`, or `data.sources`).

    Args:
        group: beginning of the configuration keys in error messages (`data` or `val`).

    Raises:
        ConfigError: a file or folder does not exist, or has no records.
    """
    named = {name: (source.path, source.images or cfg.images) for name, source in cfg.sources.items()}
    if not named:
        assert cfg.path is not None, "checked by DataConfig"
        named = {Path(paths_in(cfg.path)[0]).name: (cfg.path, cfg.images)}
    sources, folders = [], dict[str, str]()
    for name, (path, images) in named.items():
        key = f"{group}.sources.{name}." if cfg.sources else f"{group}."
        columns = cfg.question, cfg.answer, cfg.image_column
        files = find_files(path, f"{key}path")
        if images is not None and images not in folders:
            folders[images] = find_images(images, f"{key}images")
        images = images and folders[images]
        own = tuple(
            SourceFile(name, file, images, *columns)
            if isinstance(file, str)
            else SourceFile(name, file.name, images, *columns, size=file.size, pin=file.pin)
            for file in files
        )
        for file in own:
            check_installed(file.path)
            check_unpacks(file.path)
        sources.append(DataSource(name, path, own))
    return sources


def files_of(sources: Sequence[DataSource]) -> list[SourceFile]:
    """Return the files of records of all sources."""
    return [file for source in sources for file in source.files]


def shards_of(files: Iterable[SourceFile], cache: CacheFolder | None) -> OpenShards:
    """Return a reader of files of records and of the images in them."""
    return OpenShards({file.path: file.remote for file in files if file.remote is not None}, cache)


def digest(file: SourceFile) -> str:
    """Return the sha256 of a file's content; of a remote file whose storage does not know it, that of its
    URL, size and pin."""
    if file.remote is not None:
        content = file.remote.content
        is_known = content.startswith(SHA256)
        return content.removeprefix(SHA256) if is_known else hashlib.sha256(content.encode()).hexdigest()
    path = Path(file.path)
    with reading(path), path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


class Texts:
    """Reads the records of all sources by number. The records of all sources are numbered in one sequence, in the order
    of the sources and of their files.

    The columns `offset` (int64), `size` and `line` (int32) say where the bytes of a record are. When a Texts is
    pickled, only its arguments are.

    Args:
        videos: read the records' videos; if false, a record that names a video has media that are not read.
        cache: where ranges of remote files are kept; None: they are not kept.
    """

    def __init__(self, folder: Path, videos: bool = False, cache: CacheFolder | None = None):
        self.folder = folder
        self.videos = videos
        self.cache = cache
        facts = read_json(folder / DONE)
        try:
            require_kinds(facts, {"fingerprint": (str,), "max_record_bytes": (int,)})
            self.sources = [source_from(own) for own in facts["sources"]]
            self.parts = [part_from(own) for own in facts["parts"]]
            self.fingerprint: str = facts["fingerprint"]
            """Digest of the sources' content."""
            self.most: int = facts["max_record_bytes"]
        except (KeyError, TypeError, BadJson) as error:
            raise damaged(folder / DONE, "it is not what was written") from error
        self.offset, self.size, self.lines = (open_column(folder, name) for name in SPAN)
        self._firsts = [p.first for p in self.parts]
        self._open: OrderedDict[str, int] = OrderedDict()
        self.shards = shards_of((part.file for part in self.parts), cache)

    def __reduce__(self) -> tuple:
        return Texts, (self.folder, self.videos, self.cache)

    def __len__(self) -> int:
        return len(self.offset)

    @cached_property
    def firsts(self) -> list[int]:
        """Number of each source's first record, followed by the number of all records."""
        counts = [0] * len(self.sources)
        for part in self.parts:
            counts[part.source] += part.count
        return list(itertools.accumulate(counts, initial=0))

    def place(self, number: int) -> tuple[SourceFile, int]:
        """Return the file of a record, and the record's index within that file."""
        part = self.part(number)
        return part.file, number - part.first

    def part(self, number: int) -> Part:
        return self.parts[bisect.bisect_right(self._firsts, number) - 1]

    @cached_property
    def _folders(self) -> dict[SourceFile, Path | RemoteFolder | None]:
        files = (part.file for part in self.parts)
        return {file: None if file.images is None else open_folder(file.images, self.shards) for file in files}

    def read(self, number: int) -> bytes:
        """Return the bytes of a record.

        Raises:
            DataError: the record is larger than data.max_record_bytes.
            SourceError: the source file cannot be read, or has changed.
            DamagedError: the index is damaged.
        """
        text, size, offset = self.part(number).text, int(self.size[number]), int(self.offset[number])
        if size <= 0 or offset < 0:
            raise damaged(self.folder / "offset.npy", f"a record of {size} bytes at {offset} is impossible")
        source, index = self.place(number)
        check_bytes(size, self.most, name_place(source.path, index, self.line(number)))
        with reading(Path(text)):
            try:
                descriptor = self.open(text)
            except FileNotFoundError as error:
                if text == source.path:
                    raise
                raise damaged(Path(text), "it is missing") from error
            found = os.pread(descriptor, size, offset)
        if len(found) < size:
            raise SourceError(
                f"{text} ends before byte {offset + size}, where a record should; it has changed, or its index is "
                "damaged: run llava-fsdp prepare, which checks both"
            )
        return found

    def open(self, text: str) -> int:
        """Return an open file descriptor of a text file. The latest OPEN_FILES ones are kept."""
        if text not in self._open:
            self._open[text] = os.open(text, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._open) > OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(text)
        return self._open[text]

    def raw(self, number: int) -> Any:
        """Return a record as parsed JSON."""
        return self.parse(number, self.read(number))

    def parse(self, number: int, text: bytes) -> Any:
        """Parse the bytes of a record as JSON."""
        source, index = self.place(number)
        return parse_text(source.path, index, text, self.line(number))

    def line(self, number: int) -> int | None:
        """Return the line on which a record begins in its source file; None if the source is not a text file."""
        part = self.part(number)
        return None if has_rows(part.file.path) else int(self.lines[number])

    def id_of(self, number: int) -> str | None:
        """Return the id of a record, even if the record is invalid; None if it has no id."""
        with contextlib.suppress(DataError):
            raw = self.raw(number)
            return id_of(raw) if isinstance(raw, dict) else None
        return None

    def name(self, number: int) -> str:
        """Return the name of a record for messages, whether or not it can be parsed."""
        source, index = self.place(number)
        with contextlib.suppress(DataError):
            raw = self.raw(number)
            if isinstance(raw, dict):
                return name_record(source.path, index, self.line(number), id_of(raw))
        return name_place(source.path, index, self.line(number))

    def fetch_ahead(self, numbers: Iterable[int], needed: Needed = lambda number, name, place: place) -> None:
        """Begin to fetch the images of records that lie in remote files or folders; see `OpenShards.fetch_ahead`.

        Args:
            needed: returns the part of an image that is fetched.
        """
        places = []
        for number in numbers:
            source = self.part(number).file
            folder = self._folders[source]
            if source.remote is None and not isinstance(folder, RemoteFolder):
                continue
            with contextlib.suppress(DataError):  # reported where the record is read
                record = self.record(number)
                held = list(record.inline.items()) if source.remote else []
                if isinstance(folder, RemoteFolder):
                    held += [(name, folder.place(name)) for name in record.images if name not in record.inline]
                places += [needed(number, name, place) for name, place in held if isinstance(place, Place)]
        self.shards.fetch_ahead(place for place in places if place is not None)

    def record(self, number: int, text: bytes | None = None) -> Record:
        """Read and parse a record.

        Args:
            text: the record's bytes, if they have been read already.

        Raises:
            DataError: the record is invalid; the error has a `kind`.
        """
        source, index = self.place(number)
        folder = self._folders[source]
        raw = self.raw(number) if text is None else self.parse(number, text)
        record = parse_record(source.path, index, raw, self.line(number), source.keys, self.videos)
        return replace(record, folder=folder or record.folder, shards=self.shards if record.inline else None)


def source_from(raw: dict[str, Any]) -> DataSource:
    files = tuple(SourceFile(**require_kinds(own, kinds_of(SourceFile))) for own in raw["files"])
    require_kinds(raw, {"name": (str,), "path": (str,), "files": (list,)})
    return DataSource(raw["name"], raw["path"], files)


def part_from(raw: dict[str, Any]) -> Part:
    file = SourceFile(**require_kinds(raw["file"], kinds_of(SourceFile)))
    require_kinds(raw, {"source": (int,), "text": (str,), "key": (str,), "first": (int,), "count": (int,)})
    return Part(**{**raw, "file": file})


@dataclass(frozen=True)
class Shard:
    """A file of records whose records are to be found."""

    file: SourceFile
    text: Path
    """The text file with its records."""
    key: str


@dataclass(frozen=True)
class FindRecords:
    """Finds the records in text files. Each call finds those of one file, and writes their positions in pieces."""

    shards: tuple[Shard, ...]
    folder: Path
    """Folder of the pieces."""
    most: int
    """Largest number of bytes of a record."""

    def __call__(self, chunk: int) -> Columns:
        shard = self.shards[chunk]
        if has_rows(shard.file.path) and not shard.text.stat().st_size:
            raise no_records(shard.file.path)
        split_file(shard.text, self.pieces(chunk), self.most, shard.file.path)
        return {"count": np.zeros(0, dtype=np.int64)}

    def pieces(self, chunk: int) -> Path:
        return self.folder / self.shards[chunk].key

    def files(self) -> list[Path]:
        return [self.folder / f"{shard.key}.npz" for shard in self.shards]


def no_records(file: str) -> DataError:
    return DataError(f"{file} holds no records; take it out, or take it from its source again").about(file=file)


def join_texts(
    sources: Sequence[DataSource],
    found: FindRecords,
    folder: Path,
    fingerprint: str,
    check: Callable[[], None],
) -> None:
    """Join the positions of the records of all files, and write them into a folder that `Texts` opens.

    Args:
        found: the files of all sources in order; their records have been found.
        fingerprint: digest of the files' content.
        check: called before the folder gets its final name; raises if a file has changed.

    Raises:
        DataError: a file has no records.
    """
    numbers = [number for number, source in enumerate(sources) for _ in source.files]
    parts: list[Part] = []
    pieces: list[Path] = []
    first = 0
    for chunk, (source, shard) in enumerate(zip(numbers, found.shards, strict=True)):
        own = sorted(found.pieces(chunk).glob("*.npy"))
        count = sum(len(read_column(p)) for p in own)
        if not count:
            raise no_records(shard.file.path)
        parts.append(Part(source, shard.file, str(shard.text), shard.key, first, count))
        pieces += own
        first += count
    staged = folder.with_name(f"{folder.name}.tmp")
    staged.mkdir(exist_ok=True)
    for place, (name, dtype) in enumerate(zip(SPAN, (np.int64, np.int32, np.int32), strict=True)):
        columns = (np.minimum(read_column(p)[:, place], np.iinfo(dtype).max).astype(dtype) for p in pieces)
        write_column(staged / f"{name}.npy", columns, np.dtype(dtype))
    facts = {"sources": [asdict(s) for s in sources], "parts": [asdict(p) for p in parts]}
    facts |= {"fingerprint": fingerprint, "max_record_bytes": found.most}
    seal(staged, facts)
    check()
    os.replace(staged, folder)


def split_file(path: Path, folder: Path, most: int, name: str | None = None) -> list[Path]:
    """Find the positions of the records in a file and write them in pieces. Pieces left by an interrupted run are used
    again.

    Args:
        folder: folder of the pieces.
        most: largest number of bytes of a record.
        name: the file in messages, where `path` is a copy of it; None: `path`.

    Returns:
        Paths of the pieces, .npy files with offset, size and line of each record, int64 [records, 3].
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = sorted(folder.glob("*.npy"))
    after = tuple(read_column(pieces[-1])[-1].tolist()) if pieces else None
    found = spans(path, after, most, name)
    while piece := take(found, path):
        target = folder / f"{len(pieces):08d}.npy"
        with replacing(target, durable=True) as file:
            np.save(file, np.array(piece, dtype=np.int64))
        pieces.append(target)
    return pieces


def take(found: Iterator[Span], path: Path) -> list[Span]:
    with reading(path):
        return list(itertools.islice(found, PIECE))
