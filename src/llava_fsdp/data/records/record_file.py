"""Read all records of one JSON, JSON Lines or Parquet file, without making an index."""

from collections.abc import Iterator
from pathlib import Path

from llava_fsdp.data.records import parquet
from llava_fsdp.data.records.forms import NO_KEYS, RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import MOST_BYTES, spans
from llava_fsdp.data.records.record import Record, check_bytes, name_place, parse_text
from llava_fsdp.runtime.errors import DataError


class RecordFile:
    """Sequence of the records of one file; a record is parsed when it is accessed. Errors name the file, the record's
    number and its id."""

    def __init__(self, path: Path, most: int = MOST_BYTES, keys: RecordKeys = NO_KEYS):
        self.path = path
        self.keys = keys
        self._texts = list(texts(path, most, keys))
        if not self._texts:
            raise DataError(f"{path} holds no records")

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Record:
        text, line = self._texts[index]
        return parse_record(self.path, index, parse_text(self.path, index, text, line), line, self.keys)


def texts(path: Path, most: int, keys: RecordKeys = NO_KEYS) -> Iterator[tuple[bytes, int | None]]:
    """Yield each record of a file as JSON bytes, with the number of the line on which it begins (None for Parquet).

    Args:
        most: largest size of a record in bytes.

    Raises:
        DataError: the file is not a list of records, or a record is larger than `most`.
    """
    if parquet.is_parquet(path):
        for row in parquet.lines(path, store=None, most=most, keys=keys):
            yield row, None
        return
    with path.open("rb") as file:
        for index, (offset, size, line) in enumerate(spans(path, most=most)):
            check_bytes(size, most, name_place(path, index, line))
            file.seek(offset)
            yield file.read(size), line
