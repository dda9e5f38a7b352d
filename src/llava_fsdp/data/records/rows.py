"""Copy the records of Parquet files and tars to JSON Lines files in the dataset's index, which are then read like any
text file. Images are not copied: the JSON has their locations."""

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
from llava_fsdp.data.records.tar import TarRows
from llava_fsdp.runtime.durable_files import replacing
from llava_fsdp.runtime.log import log


class Rows(Protocol):
    """Interface for reading the records of a Parquet file or a tar."""

    @property
    def groups(self) -> int:
        """Number of parts of the file that can be read independently."""
        ...

    @property
    def page_bytes(self) -> np.ndarray:
        """Two sums over the images that `lines` found in compressed pages: their bytes, and the bytes that must be
        decompressed to read each image alone, int64 [2]."""
        ...

    def lines(self, group: int, most: int, /) -> Iterator[bytes]:
        """Yield the records of a group as JSON. Records larger than `most` bytes are replaced by a placeholder.

        Args:
            group: index of a part of the file.

        Raises:
            DataError: the file is damaged, or has a form that is not supported.
            SourceError: the file cannot be read.
        """
        ...


def open_rows(path: str, keys: RecordKeys, data_files: DataFiles) -> Rows:
    """Open a Parquet file or a tar of records; errors as for `Rows.lines`."""
    file = data_files.open(path)
    return ParquetRows(file, keys) if is_parquet(path) else TarRows(file, keys)


def all_lines(path: str, keys: RecordKeys, most: int, data_files: DataFiles) -> Iterator[bytes]:
    """Yield all records of a Parquet file or a tar as JSON; arguments and errors as for `Rows.lines`."""
    rows = open_rows(path, keys, data_files)
    for group in range(rows.groups):
        yield from rows.lines(group, most)


@dataclass(frozen=True)
class RowsFile:
    """A Parquet file or tar, and the paths in the index to which its records are copied."""

    path: str
    folder: Path
    """The index's folder for this file."""
    keys: RecordKeys

    @property
    def whole(self) -> Path:
        """Path of the JSON Lines file for all records."""
        return self.folder / "rows.jsonl"

    def text(self, group: int) -> Path:
        """Return the path of the JSON Lines file for the records of one group."""
        return self.folder / f"{group:08d}.jsonl"

    def delete_groups(self) -> None:
        """Delete the files of single groups, which are not needed once `whole` exists."""
        for path in self.folder.glob("[0-9]*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class WriteRows:
    """Copies the records of several Parquet files and tars to JSON Lines files. Each call copies one chunk, a group of
    one file; `gather` then joins the groups."""

    files: tuple[RowsFile, ...]
    most: int
    """Greatest size of a record in bytes."""
    data_files: DataFiles

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """For each chunk, (index of the file, index of the group in the file)."""
        counts = (open_rows(file.path, file.keys, self.data_files).groups for file in self.files)
        return [(number, group) for number, count in enumerate(counts) for group in range(count)]

    def chunks(self) -> list[Path]:
        """Return for each chunk a path that exists once the chunk's records are written."""
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
        """Open the file with index `number`. The last file stays open, because reading its footer again may take
        long."""
        if number not in self._last:
            self._last.clear()
            file = self.files[number]
            self._last[number] = open_rows(file.path, file.keys, self.data_files)
        return self._last[number]

    @cached_property
    def _last(self) -> dict[int, Rows]:
        return {}

    def gather(self) -> None:
        """Join the JSON Lines files of the groups of each file, and delete them. Log a warning if images are in
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
