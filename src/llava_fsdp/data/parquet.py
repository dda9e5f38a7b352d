"""Parquet files of records, written as JSON Lines into the index: what comes after reads text alone.

Columns: `conversations`, a list of structs with from and value; `id`; `image`, a path, a list of paths, or pictures
themselves as Hugging Face datasets writes them (structs of bytes and path, or lists of these). A null is an absent key.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.data.chunks import Columns
from llava_fsdp.errors import ConfigError, DataError

SUFFIX = ".parquet"
COLUMNS = ("id", "image", "conversations")
ROWS_AT_ONCE = 256
"""Few, because rows may hold pictures."""
NOT_UTF8 = b"\xff"
"""Stands for a row whose text is not UTF-8, and is found to be that."""


def check_installed(path: Path) -> None:
    """Raises ConfigError where Parquet cannot be read."""
    if path.suffix == SUFFIX and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow: pip install 'llava-fsdp[parquet]'")


@dataclass(frozen=True)
class WriteRows:
    """A pass over the row groups of a file: each becomes a file of JSON Lines, its pictures files beside it."""

    path: Path
    folder: Path

    def text(self, group: int) -> Path:
        return self.folder / f"{group:08d}.jsonl"

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    def __call__(self, chunk: int) -> Columns:
        self.folder.mkdir(exist_ok=True)
        staged = self.text(chunk).with_suffix(f".{os.getpid()}.tmp")
        with staged.open("wb") as file:
            for line in lines(self.path, self.pictures, [chunk]):
                file.write(line + b"\n")
        os.replace(staged, self.text(chunk))
        return {"done": np.zeros(1, dtype=np.int8)}


def open_file(path: Path) -> Any:
    """A pyarrow `ParquetFile`.

    Raises:
        DataError: it is none, or lacks the columns of records.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no Parquet file: {error}") from error
    schema = file.schema_arrow
    if "conversations" not in schema.names:
        raise DataError(f"{path} has the columns {schema.names}; LLaVA records have id, image and conversations")
    check_types(path, schema)
    return file


def check_types(path: Path, schema: Any) -> None:
    """Raises DataError where a column cannot hold what its name says."""
    from pyarrow import types

    turns = schema.field("conversations").type
    inner = turns.value_type if is_list(turns) else None
    if inner is None or not types.is_struct(inner) or not {"from", "value"} <= {f.name for f in inner}:
        raise DataError(f"{path}: conversations is {turns}; it must be a list of structs with from and value")
    if "image" in schema.names:
        image = schema.field("image").type
        one = image.value_type if is_list(image) else image
        if not (is_text(one) or is_embedded(schema) or types.is_null(one)):
            raise DataError(
                f"{path}: image is {image}; it must be a path, a list of paths, or structs of bytes and path"
            )


def is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind)


def is_text(kind: Any) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind)


def is_embedded(schema: Any) -> bool:
    """The rows hold pictures, not their paths."""
    from pyarrow import types

    if "image" not in schema.names:
        return False
    image = schema.field("image").type
    one = image.value_type if is_list(image) else image
    return types.is_struct(one) and {"bytes", "path"} <= {f.name for f in one}


def lines(path: Path, pictures: Path | None, groups: list[int] | None = None) -> Iterator[bytes]:
    """Every row's record as JSON, a few rows in memory at a time.

    Args:
        pictures: where pictures that are in the rows are written to.

    Raises:
        DataError: the file is no Parquet file of records, or holds pictures that may not be written.
    """
    import pyarrow

    file = open_file(path)
    if pictures is None and is_embedded(file.schema_arrow):
        raise DataError(f"{path} holds pictures; only llava_fsdp.prepare and training read them: give paths instead")
    present = [name for name in COLUMNS if name in file.schema_arrow.names]
    try:
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=present):
            for row in range(batch.num_rows):
                yield line(batch.slice(row, 1), pictures)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}; take it from its source again") from error


def line(row: Any, pictures: Path | None) -> bytes:
    try:
        (values,) = row.to_pylist()
    except UnicodeDecodeError:
        return NOT_UTF8
    record = {name: value for name, value in values.items() if value is not None}
    if pictures is not None and "image" in record:
        image = record["image"]
        record["image"] = [stored(i, pictures) for i in image] if isinstance(image, list) else stored(image, pictures)
    return json.dumps(record).encode()


def stored(image: Any, pictures: Path) -> Any:
    """The path below `pictures` of a picture that was in a row; a path stays what it is."""
    if not isinstance(image, dict):
        return image
    if image["bytes"] is None:
        return image["path"]
    digest = hashlib.sha256(image["bytes"]).hexdigest()
    path = pictures / digest[:2] / digest
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f"{digest}.{os.getpid()}.tmp")
        staged.write_bytes(image["bytes"])
        os.replace(staged, path)
    return f"{digest[:2]}/{digest}"
