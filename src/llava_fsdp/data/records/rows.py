"""Copy the records of Parquet files and tars to JSON Lines files in the dataset's index, which are then read like any
text file. Images are not copied: the JSON has their locations."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llava_fsdp.data.columns import BLOCK, Columns, column
from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.records.forms.parse_record import RecordKeys
from llava_fsdp.data.records.parquet import ParquetRows, is_parquet
from llava_fsdp.data.records.tar import TarRows
from llava_fsdp.runtime.files.durable_files import replacing, sync_folder
from llava_fsdp.runtime.text.log import log

ROWS_ALONE = 100_000
"""Number of rows up to which a Parquet file is copied by one process, in some seconds, although others have no work."""


class RecordRows(Protocol):
    """Reads the records of a Parquet file or a tar."""

    @property
    def groups(self) -> int:
        """Number of parts that can be read independently (row groups; 1 for a tar)."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of records; 0 for a tar, of which it is not known before it is read."""
        ...

    @property
    def page_bytes(self) -> np.ndarray:
        """Two sums over the images that `lines` has found in compressed pages: the bytes of the images, and the bytes
        that must be decompressed to read each image alone, int64 [2]."""
        ...

    def lines(self, group: int, max_bytes: int, /) -> Iterator[bytes]:
        """Yield the records of one part as JSON: of the row group with the index `group` of a Parquet file, or of a
        whole tar. A record larger than `max_bytes` is replaced by a placeholder.

        Raises:
            DataError: the file is damaged, or has a form that is not supported.
            SourceError: the file cannot be read.
        """
        ...


def open_rows(path: str, keys: RecordKeys, data_files: DataFiles) -> RecordRows:
    """Open a Parquet file or a tar of records. See `RecordRows.lines` for the errors."""
    file = data_files.open(path)
    return ParquetRows(file, keys) if is_parquet(path) else TarRows(file, keys)


def all_lines(path: str, keys: RecordKeys, max_bytes: int, data_files: DataFiles) -> Iterator[bytes]:
    """Yield all records of a Parquet file or a tar as JSON, with a placeholder for each larger than `max_bytes`.

    Args:
        keys: names of the keys of question, answer and images.
        data_files: what reads remote files.

    Raises:
        DataError: the file is damaged, or has a form that is not supported.
        SourceError: the file cannot be read.
    """
    rows = open_rows(path, keys, data_files)
    for group in range(rows.groups):
        yield from rows.lines(group, max_bytes)


@dataclass(frozen=True)
class RowsFile:
    """A Parquet file or tar, and the paths in the index folder to which its records are copied as JSON."""

    path: str
    folder: Path
    """The index's folder for this file."""
    keys: RecordKeys

    @property
    def whole(self) -> Path:
        """Path of the JSON Lines file with all records."""
        return self.folder / "rows.jsonl"

    def text(self, groups: range) -> Path:
        """Return the path of the JSON Lines file with the records of consecutive row groups."""
        return self.folder / f"{groups.start:08d}-{groups.stop:08d}.jsonl"

    def delete_parts(self) -> None:
        """Delete the files with the records of some row groups, which are not needed once `whole` exists."""
        for path in self.folder.glob("[0-9]*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class WriteRows:
    """Copies the records of several Parquet files and tars to JSON Lines files, in worker processes. Each call copies
    one chunk: one file, or one row group of a file (a tar counts as one row group). `join_parts` then joins the parts
    of each file's copy."""

    files: tuple[RowsFile, ...]
    max_bytes: int
    data_files: DataFiles
    by_group: bool
    """Whether a chunk is a row group if its file has more than ROWS_ALONE rows. Then several processes can copy one
    file, but its records are written twice: `join_parts` copies them."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_last"}  # an open file is not pickled

    @cached_property
    def parts(self) -> list[tuple[int, range]]:
        """What each chunk consists of: (index of the file, indices of its row groups). With `by_group`, each row group
        of a larger file is a chunk of its own, so that several processes can copy one file."""
        found = []
        for number, file in enumerate(self.files):
            rows = open_rows(file.path, file.keys, self.data_files)
            # a file of few rows is copied faster as one chunk
            step = 1 if self.by_group and rows.num_rows > ROWS_ALONE else max(rows.groups, 1)
            found += [(number, range(at, at + step)) for at in range(0, rows.groups, step)]
        return found

    def chunks(self) -> list[Path]:
        """Return a path for each chunk, which exists once the chunk's records are written."""
        return [self.files[number].text(groups).with_suffix(".npz") for number, groups in self.parts]

    def __call__(self, chunk: int) -> Columns:
        """Write the records of a chunk as JSON Lines. Return as the column `page_bytes`, for the chunk's images in
        compressed pages, the bytes of the images and the bytes to decompress for each of them alone, int64 [2]."""
        number, groups = self.parts[chunk]
        rows = self.opened(number)
        before = rows.page_bytes.copy()
        with replacing(self.files[number].text(groups), durable=True) as target:
            for group in groups:
                for line in rows.lines(group, self.max_bytes):
                    target.write(line + b"\n")
        return {"page_bytes": rows.page_bytes - before}

    def opened(self, number: int) -> RecordRows:
        """Open a file by its index. The last one stays open, because reading its footer again may take long."""
        if number not in self._last:
            self._last.clear()
            file = self.files[number]
            self._last[number] = open_rows(file.path, file.keys, self.data_files)
        return self._last[number]

    @cached_property
    def _last(self) -> dict[int, RecordRows]:
        return {}

    def join_parts(self) -> None:
        """Join the parts of each file's copy to one file, and delete the parts. Log a warning if images are in
        compressed pages, where reading them is slow."""
        # over the images in compressed pages: their bytes, and the bytes to decompress for them
        page_bytes = sum((column(chunk, "page_bytes") for chunk in self.chunks()), np.zeros(2, dtype=np.int64))
        if page_bytes[0]:
            log().warning(
                "images in compressed pages of Parquet files are slow to read: for each, %.0f times its bytes are "
                "decompressed. Write the files again without compression (docs/data.md)",
                page_bytes[1] / page_bytes[0],
            )
        texts: dict[int, list[Path]] = {number: [] for number in range(len(self.files))}
        for number, groups in self.parts:
            texts[number].append(self.files[number].text(groups))
        for number, file in enumerate(self.files):
            if len(texts[number]) == 1:  # nothing that was written is deleted
                # an .npz file marks a chunk as written; it is renamed first, because a process that is killed between
                # the two steps then writes both files again
                os.replace(texts[number][0].with_suffix(".npz"), file.whole.with_suffix(".npz"))
            join_texts(texts[number], file.whole)
            file.delete_parts()


def join_texts(texts: Sequence[Path], target: Path) -> None:
    """Join files to the one file `target`, after which the caller may delete them. A single file is renamed."""
    # a Parquet file without row groups has no `texts`, and nothing has made the folder; an empty file is written
    target.parent.mkdir(parents=True, exist_ok=True)
    if len(texts) == 1:
        os.replace(texts[0], target)
        sync_folder(target.parent)  # so that a power failure cannot undo the renaming, but keep files made from it
        return
    with replacing(target, durable=True) as joined:
        for text in texts:
            with text.open("rb") as source:
                shutil.copyfileobj(source, joined, BLOCK)
