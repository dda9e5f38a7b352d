"""A file of records read without an index: for those who ask a few questions of it."""

from pathlib import Path

from llava_fsdp.data.reading import spans
from llava_fsdp.data.source import Record, parse_record, parse_text
from llava_fsdp.errors import DataError


class RecordFile:
    """Records of a file by number, parsed when asked for; a problem of one names the file, its index and its id."""

    def __init__(self, path: Path):
        self.path = path
        self._spans = list(spans(path))
        if not self._spans:
            raise DataError(f"{path} holds no records")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Record:
        offset, size = self._spans[index]
        with self.path.open("rb") as file:
            file.seek(offset)
            return parse_record(self.path, index, parse_text(self.path, index, file.read(size)))
