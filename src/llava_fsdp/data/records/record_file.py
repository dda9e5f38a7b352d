"""Read all records of one file without making an index."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llava_fsdp.data.containers.open_shards import OpenShards
from llava_fsdp.data.records.forms import NO_KEYS, RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import MOST_BYTES, spans
from llava_fsdp.data.records.record import Record, check_bytes, name_place, parse_text
from llava_fsdp.data.records.rows import all_lines, has_rows
from llava_fsdp.runtime.errors import DataError


class RecordFile:
    """Sequence of the records of one file; a record is parsed when it is accessed. Errors name the file, the record's
    number and its id."""

    def __init__(self, path: Path, most: int = MOST_BYTES, keys: RecordKeys = NO_KEYS):
        self.path = path
        self.keys = keys
        self.shards = OpenShards()
        self._texts = list(texts(path, most, keys))
        if not self._texts:
            raise DataError(f"{path} holds no records")

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Record:
        text, line = self._texts[index]
        raw = parse_text(self.path, index, text, line)
        record = parse_record(self.path, index, raw, line, self.keys, videos=True)
        return replace(record, shards=self.shards) if record.inline else record


def texts(path: Path, most: int, keys: RecordKeys = NO_KEYS) -> Iterator[tuple[bytes, int | None]]:
    """Yield each record of a file as JSON bytes, with the number of the line on which it begins (None if the file is no
    text).

    Args:
        most: largest size of a record in bytes.

    Raises:
        DataError: the file is not a list of records, or a record is larger than `most`.
    """
    if has_rows(str(path)):
        for row in all_lines(str(path), keys, most, OpenShards()):
            yield row, None
        return
    with path.open("rb") as file:
        for index, (offset, size, line) in enumerate(spans(path, most=most)):
            check_bytes(size, most, name_place(path, index, line))
            file.seek(offset)
            yield file.read(size), line
