"""Read all records of a file directly, without the index that training makes first."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.containers.file_reader import reading
from llava_fsdp.data.records.forms.parse_record import NO_KEYS, RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import MOST_BYTES, spans
from llava_fsdp.data.records.packed_text import blocks, copy_name, is_copied
from llava_fsdp.data.records.parquet import is_parquet
from llava_fsdp.data.records.record import Record, check_bytes, is_container, name_place, parse_text
from llava_fsdp.data.records.rows import all_lines
from llava_fsdp.runtime.errors import DataError


class RecordFile:
    """Sequence of the records of a file. The file is read at once; a record is parsed when it is accessed."""

    def __init__(
        self,
        path: Path | str,
        max_bytes: int = MOST_BYTES,
        keys: RecordKeys = NO_KEYS,
        data_files: DataFiles | None = None,
    ):
        """Read the file. Raise DataError if it has no records; a Parquet file may have none.

        Args:
            max_bytes: greatest size of a record.
            keys: names of the keys of question, answer and images.
            data_files: what reads remote files.
        """
        self.path = str(path)
        self.keys = keys
        self.data_files = data_files or DataFiles()
        self._records = list(read_records(self.path, max_bytes, keys, self.data_files))
        if not self._records and not is_parquet(self.path):  # a shard may have no rows
            raise DataError(f"{path} holds no records")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        """Parse the record with this index in the file."""
        text, line = self._records[index]
        raw = parse_text(self.path, index, text, line)
        record = parse_record(self.path, index, raw, line, self.keys, videos=True)
        return replace(record, data_files=self.data_files) if record.inline else record


def read_records(
    path: str, max_bytes: int, keys: RecordKeys = NO_KEYS, data_files: DataFiles | None = None
) -> Iterator[tuple[bytes, int | None]]:
    """Yield each record of a JSON, JSON Lines or Parquet file or a tar as (JSON bytes, number of the line on which it
    begins, or None if the file is not a text file).

    Args:
        max_bytes: greatest size of a record. A larger record of a Parquet file or a tar is replaced by a placeholder.
        keys: names of the keys of question, answer and images.
        data_files: what reads remote files; a local file needs none.

    Raises:
        DataError: the file is not a list of records, or a record of a text file is larger than `max_bytes`.
        SourceError: the file cannot be read.
    """
    data_files = data_files or DataFiles()
    if is_container(path):
        for row in all_lines(path, keys, max_bytes, data_files):
            yield row, None
        return
    with contextlib.ExitStack() as stack:
        text = Path(path)
        if is_copied(path):
            text = Path(stack.enter_context(tempfile.TemporaryDirectory())) / copy_name(path)
            with text.open("wb") as copy:
                copy.writelines(blocks(data_files.open(path)))
        stack.enter_context(reading(text))
        file = stack.enter_context(text.open("rb"))
        for index, (offset, size, line) in enumerate(spans(text, max_bytes=max_bytes)):
            check_bytes(size, max_bytes, name_place(path, index, line))
            file.seek(offset)
            yield file.read(size), line
