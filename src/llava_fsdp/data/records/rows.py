"""Write the records of Parquet files and tars as JSON Lines files into the dataset's index, where they are read like
any text file. Images stay where they are: the JSON has their places."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.index.worker_pool import BLOCK, Columns, column
from llava_fsdp.data.records.forms import RecordKeys
from llava_fsdp.data.records.parquet import ParquetRows, is_parquet
from llava_fsdp.data.records.tar import TarRows, is_tar
from llava_fsdp.runtime.durable_files import replacing
from llava_fsdp.runtime.log import log


def has_rows(path: str) -> bool:
    """Return whether a file of records is no text, so that its records are written into the index."""
    return is_parquet(path) or is_tar(path)


class Rows(Protocol):
    """The records of a file that is no text."""

    @property
    def groups(self) -> int:
        """Number of parts of the file that can be read alone."""
        ...

    @property
    def page_bytes(self) -> np.ndarray:
        """See `ParquetRows.page_bytes`."""
        ...

    def lines(self, group: int, most: int, /) -> Iterator[bytes]:
        """Yield the records of a group as JSON; those larger than `most` bytes are replaced by a placeholder.

        Raises:
            DataError: the file is damaged, or is not read for another reason.
            SourceError: the file cannot be read.
        """
        ...


def open_rows(path: str, keys: RecordKeys, data_files: DataFiles) -> Rows:
    """Open a Parquet file or a tar; errors as for `Rows.lines`."""
    file = data_files.open(path)
    return ParquetRows(file, keys) if is_parquet(path) else TarRows(file, keys)


def all_lines(path: str, keys: RecordKeys, most: int, data_files: DataFiles) -> Iterator[bytes]:
    """Yield all records of a file as JSON; arguments and errors as for `Rows.lines`."""
    rows = open_rows(path, keys, data_files)
    for group in range(rows.groups):
        yield from rows.lines(group, most)


@dataclass(frozen=True)
class RowsFile:
    """A Parquet file or tar, and the file of the index for its records."""

    path: str
    folder: Path
    """Folder of the index for this file."""
    keys: RecordKeys

    @property
    def whole(self) -> Path:
        """JSON Lines file with all records."""
        return self.folder / "rows.jsonl"

    def text(self, group: int) -> Path:
        return self.folder / f"{group:08d}.jsonl"

    def delete_groups(self) -> None:
        """Delete the files of single groups, which nobody needs once `whole` exists."""
        for path in self.folder.glob("[0-9]*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class WriteRows:
    """Writes the records of several files as JSON Lines files, each call one group of one file. Files whose records
    were written before are left out."""

    files: tuple[RowsFile, ...]
    most: int
    """Largest size of a record in bytes."""
    data_files: DataFiles

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """(number of the file, group in the file) of each chunk."""
        counts = (open_rows(file.path, file.keys, self.data_files).groups for file in self.files)
        return [(number, group) for number, count in enumerate(counts) for group in range(count)]

    def chunks(self) -> list[Path]:
        """Return the file of each chunk, which exists once the chunk's records are written."""
        return [self.files[number].text(group).with_suffix(".npz") for number, group in self.groups]

    def __call__(self, chunk: int) -> Columns:
        number, group = self.groups[chunk]
        rows = self.opened(number)
        before = rows.page_bytes.copy()
        with replacing(self.files[number].text(group), durable=True) as target:
            for line in rows.lines(group, self.most):
                target.write(line + b"\n")
        return {"page_bytes": rows.page_bytes - before}

    def opened(self, number: int) -> Rows:
        """Return an opened file. The last one stays open, because its footer may be long."""
        if number not in self._last:
            self._last.clear()
            file = self.files[number]
            self._last[number] = open_rows(file.path, file.keys, self.data_files)
        return self._last[number]

    @cached_property
    def _last(self) -> dict[int, Rows]:
        return {}

    def gather(self) -> None:
        """Concatenate the JSON Lines files of the groups of each file, and delete them. Log a warning if images are in
        compressed pages."""
        page_bytes = sum((column(chunk, "page_bytes") for chunk in self.chunks()), np.zeros(2, dtype=np.int64))
        if page_bytes[0]:
            log().warning(
                "images in compressed pages of Parquet files are slow to read: for each, %.0f times its bytes are "
                "decompressed. Write the files again without compression (docs/data.md)",
                page_bytes[1] / page_bytes[0],
            )
        groups = [0] * len(self.files)
        for number, _ in self.groups:
            groups[number] += 1
        for file, count in zip(self.files, groups, strict=True):
            file.folder.mkdir(parents=True, exist_ok=True)  # a Parquet file may have no row group
            with replacing(file.whole, durable=True) as target:
                for group in range(count):
                    with file.text(group).open("rb") as own:
                        shutil.copyfileobj(own, target, BLOCK)
            file.delete_groups()
