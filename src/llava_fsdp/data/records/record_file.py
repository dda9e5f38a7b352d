"""Read all records of one file without making an index."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.containers.file_reader import reading
from llava_fsdp.data.records.forms import NO_KEYS, RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import MOST_BYTES, spans
from llava_fsdp.data.records.packed_text import blocks, copy_name, is_copied
from llava_fsdp.data.records.record import Record, check_bytes, name_place, parse_text
from llava_fsdp.data.records.rows import all_lines, has_rows
from llava_fsdp.runtime.errors import DataError


class RecordFile:
    """Sequence of the records of one file; a record is parsed when it is accessed. Errors name the file, the record's
    number and its id."""

    def __init__(
        self, path: Path | str, most: int = MOST_BYTES, keys: RecordKeys = NO_KEYS, data_files: DataFiles | None = None
    ):
        self.path = str(path)
        self.keys = keys
        self.data_files = data_files or DataFiles()
        self._texts = list(texts(self.path, most, keys, self.data_files))
        if not self._texts:
            raise DataError(f"{path} holds no records")

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Record:
        text, line = self._texts[index]
        raw = parse_text(self.path, index, text, line)
        record = parse_record(self.path, index, raw, line, self.keys, videos=True)
        return replace(record, data_files=self.data_files) if record.inline else record


def texts(
    path: str, most: int, keys: RecordKeys = NO_KEYS, data_files: DataFiles | None = None
) -> Iterator[tuple[bytes, int | None]]:
    """Yield each record of a file as JSON bytes, with the number of the line on which it begins (None if the file is no
    text).

    Args:
        most: largest size of a record in bytes.

    Raises:
        DataError: the file is not a list of records, or a record of a text file is larger than `most`; other files give
            a placeholder.
        SourceError: the file cannot be read.
    """
    data_files = data_files or DataFiles()
    if has_rows(path):
        for row in all_lines(path, keys, most, data_files):
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
        for index, (offset, size, line) in enumerate(spans(text, most=most)):
            check_bytes(size, most, name_place(path, index, line))
            file.seek(offset)
            yield file.read(size), line
