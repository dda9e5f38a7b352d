"""Convert Parquet files of records into JSON Lines files in the dataset's index, which are then read like any text
file.

Columns: those of a form of records (`forms`); `id`; `image` and `images`, a path, a list of paths, or images themselves
as Hugging Face datasets writes them (structs of bytes and path, or lists of these; if no row has bytes, the paths are
used). A null counts as a missing key. Other columns whose names mean media (video, audio, ...) are not read: a record
with a value in such a column is a bad record.
"""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.data.index.integrity import read_json
from llava_fsdp.data.index.worker_pool import BLOCK, Columns, chunk_file, columns_of
from llava_fsdp.data.records.forms import ENTRY_KEYS, FORMS, NO_KEYS, TOOL_KEYS, TURN_KEYS, RecordKeys
from llava_fsdp.data.records.json_stream import MOST_BYTES, check_head
from llava_fsdp.data.records.record import TOO_LARGE, is_empty, names_media, reading
from llava_fsdp.runtime.durable_files import replace_file, replacing
from llava_fsdp.runtime.errors import ConfigError, DataError

SUFFIX = ".parquet"
PARTS = "content"
"""Field of a turn that may be a list of parts."""
TURN = tuple(key for keys in (*TURN_KEYS, ENTRY_KEYS) for key in keys)
"""Fields of the structs in a column of turns that are read."""
ROWS_AT_ONCE = 256
"""Number of rows in a batch read from a Parquet file; small, because rows may contain images."""
OWN_NAMES = "llava_fsdp own names"
"""Key in the JSON of a Parquet row under which the original names of images embedded in the row are kept, by the paths
that the images have in the index."""
HELD = "..."
"""Placeholder in a record's JSON for a value that is not read: of a column with media (video, audio, ...), or of a call
of a tool."""
NOT_UTF8 = b"\xff"
"""Placeholder line for a Parquet row whose text is not UTF-8. It is not UTF-8 itself, so the checks of text files
report the row."""


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def check_installed(path: Path) -> None:
    """Raise ConfigError if the file is Parquet and pyarrow is not installed."""
    if is_parquet(path) and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow: pip install 'llava-fsdp[parquet]'")


@dataclass(frozen=True)
class WriteRows:
    """Converts each row group of a Parquet file into a JSON Lines file, and saves images embedded in the rows as files.

    The result column `held`, int64 [2], has the number of embedded images and the number of image paths.
    """

    path: Path
    folder: Path
    most: int
    """Largest size of a record in bytes."""
    keys: RecordKeys = NO_KEYS

    def text(self, group: int) -> Path:
        return self.folder / f"{group:08d}.jsonl"

    @property
    def image_folder(self) -> Path:
        return self.folder / "pictures"

    @property
    def parts(self) -> Path:
        """Folder of the files with the counts of images of each row group."""
        return self.folder / "parts"

    def __call__(self, chunk: int) -> Columns:
        self.folder.mkdir(exist_ok=True)
        store = Store(self.image_folder)
        with replacing(self.text(chunk), durable=True) as file:
            for line in lines(self.path, store, [chunk], self.most, self.keys):
                file.write(line + b"\n")
        return {"held": np.array([store.images, store.paths], dtype=np.int64)}

    @property
    def whole(self) -> Path:
        """Path of the JSON Lines file with the rows of all row groups."""
        return self.folder / "rows.jsonl"

    @property
    def held(self) -> Path:
        return self.folder / "held.json"

    def gather(self, chunks: Sequence[Path]) -> None:
        """Concatenate the JSON Lines files of all row groups into the file `whole`.

        Args:
            chunks: for each row group, the file with the counts of images.

        Raises:
            DataError: some rows contain images, and others paths of images.
        """
        groups, held = len(chunks), [columns_of(chunk)["held"].tolist() for chunk in chunks]
        images, paths = (sum(column) for column in zip(*held, strict=True)) if held else (0, 0)
        if images and paths:
            raise DataError(
                f"{self.path}: {images} images are in the rows, and {paths} are paths; one source has one of both: "
                "give a file for each"
            )
        self.folder.mkdir(exist_ok=True)
        with replacing(self.whole, durable=True) as file:
            for group in range(groups):
                with self.text(group).open("rb") as own:
                    shutil.copyfileobj(own, file, BLOCK)
            self.held.write_text(json.dumps({"pictures": images, "paths": paths}))

    def images(self) -> Path | None:
        """Return the folder of the images that were embedded in the rows; None if the rows contain only paths."""
        return self.image_folder if read_json(self.held).get("pictures") else None

    def drop_groups(self, groups: int) -> None:
        for group in range(groups):
            self.text(group).unlink(missing_ok=True)


@dataclass(frozen=True)
class WriteAllRows:
    """Converts the row groups of several Parquet files, each call one row group."""

    tasks: tuple[WriteRows, ...]

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """(number of the task, row group) of each chunk."""
        counts = [open_file(task.path, task.keys).num_row_groups for task in self.tasks]
        return [(number, group) for number, count in enumerate(counts) for group in range(count)]

    @property
    def files(self) -> list[Path]:
        """The file of each chunk."""
        return [chunk_file(self.tasks[number].parts, group) for number, group in self.groups]

    def __call__(self, chunk: int) -> Columns:
        number, group = self.groups[chunk]
        return self.tasks[number](group)

    def gather(self) -> None:
        """Make the JSON Lines file of each Parquet file, and delete those of its row groups."""
        for number, task in enumerate(self.tasks):
            chunks = [file for file, (own, _) in zip(self.files, self.groups, strict=True) if own == number]
            task.gather(chunks)
            task.drop_groups(len(chunks))
            shutil.rmtree(task.parts, ignore_errors=True)


@dataclass
class Store:
    """Saves images embedded in Parquet rows as files, named by their SHA-256, and counts embedded images and image
    paths."""

    folder: Path | None
    """Folder to write images to; None: no file is written, only the names that files would have are computed."""
    images: int = 0
    paths: int = 0

    def put(self, image: Any, names: dict[str, str | None]) -> Any:
        """Save an embedded image and return its path relative to the folder; return a path unchanged. For a list of
        images, return a list of paths.

        Args:
            names: receives the original names of embedded images, by their paths.
        """
        if isinstance(image, list):
            return [self.put(one, names) for one in image]
        if not isinstance(image, dict):
            return image
        if image["bytes"] is None:
            self.paths += image["path"] is not None
            return image["path"]
        self.images += 1
        digest = hashlib.sha256(image["bytes"]).hexdigest()
        name = f"{digest[:2]}/{digest}"
        names.setdefault(name, image["path"])
        if self.folder is not None and not (path := self.folder / name).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, image["bytes"])
        return name


def turn_columns(keys: RecordKeys) -> tuple[str, ...]:
    """Return the names of all columns that can have the conversation of a record."""
    return (*FORMS, *(keys.pair or ()))


def read_columns(keys: RecordKeys) -> tuple[str, ...]:
    return ("id", *keys.images, *turn_columns(keys))


def open_file(path: Path, keys: RecordKeys = NO_KEYS) -> Any:
    """Open a Parquet file of records; returns a pyarrow `ParquetFile`.

    Raises:
        DataError: the file is not Parquet, or has the columns of no form of records.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowException, OSError) as error:
        with reading(path), path.open("rb") as opened:
            head = opened.read(64)
        if not head.startswith(b"PAR1"):
            check_head(head, path)
        raise DataError(f"{path} is no whole Parquet file ({error}); take it from its source again") from error
    schema = file.schema_arrow
    if not any(name in schema.names for name in turn_columns(keys)):
        raise DataError(
            f"{path} has the columns {schema.names}; records have one of {', '.join(turn_columns(keys))}, or the "
            "two that data.question and data.answer name"
        )
    check_types(path, schema, keys)
    return file


def check_types(path: Path, schema: Any, keys: RecordKeys = NO_KEYS) -> None:
    """Raise DataError if the Arrow type of one of the columns that are read is not supported."""
    from pyarrow import types

    for name in (name for name in turn_columns(keys) if name in schema.names):
        own = schema.field(name).type
        if name not in FORMS and not is_text(own):
            raise DataError(f"{path}: {name} is {own}; it must be text")
        if name in FORMS and not are_turns(own):
            raise DataError(
                f"{path}: {name} is {own}; it must be a list of structs with from and value, which are text, with role "
                "and content, or with user and assistant (docs/data.md); an image in a part must be a path"
            )
    if "id" in schema.names:
        own = schema.field("id").type
        if not (is_text(own) or types.is_integer(own) or types.is_floating(own)):
            raise DataError(f"{path}: id is {own}; it must be text or a number")
    for name in (name for name in keys.images if name in schema.names):
        image = schema.field(name).type
        one = image.value_type if is_list(image) else image
        if not (is_text(one) or is_embedded(schema, (name,))):
            raise DataError(
                f"{path}: {name} is {image}; it must be a path, a list of paths, or structs of bytes and path"
            )


def is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: Any) -> bool:
    from pyarrow import types

    own = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(own) or types.is_large_string(own) or types.is_null(own)


def are_turns(kind: Any) -> bool:
    """Return whether an Arrow type is a list of structs that can be turns, or can only be empty."""
    from pyarrow import types

    if not is_list(kind) or types.is_null(kind.value_type):
        return types.is_null(kind) or is_list(kind)
    fields = {name: own for name, own in fields_of(kind.value_type).items() if name in TURN}
    whole = any(set(pair) <= set(fields) for pair in (*TURN_KEYS, ENTRY_KEYS))
    return whole and all(is_text(own) or (name == PARTS and is_plain(own)) for name, own in fields.items())


def is_plain(kind: Any) -> bool:
    """Return whether all values in an Arrow type are also values in JSON: texts, numbers, truths, lists, structs."""
    from pyarrow import types

    if is_list(kind):
        return is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(is_plain(own) for own in fields_of(kind).values())
    return is_text(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of an Arrow struct, by field name; empty if the type is not a struct."""
    from pyarrow import types

    return {field.name: field.type for field in kind} if types.is_struct(kind) else {}


def is_embedded(schema: Any, names: Iterable[str]) -> bool:
    """Return whether one of the named columns of a Parquet file can contain image bytes, not only paths."""
    from pyarrow import types

    for name in (name for name in names if name in schema.names):
        image = schema.field(name).type
        fields = fields_of(image.value_type if is_list(image) else image)
        if {"bytes", "path"} <= set(fields) and is_text(fields["path"]):
            data = fields["bytes"]
            return types.is_binary(data) or types.is_large_binary(data) or types.is_null(data)
    return False


def lines(
    path: Path,
    store: Store | None,
    groups: list[int] | None = None,
    most: int = MOST_BYTES,
    keys: RecordKeys = NO_KEYS,
) -> Iterator[bytes]:
    """Yield each row of a Parquet file as a JSON record. At most `ROWS_AT_ONCE` rows are in memory, or one row if the
    file has columns of media (video, audio, ...) that are not read.

    Args:
        store: saves images embedded in rows; None: such rows raise DataError.
        groups: numbers of the row groups to read; None: all.
        most: largest size of a record in bytes; a larger record is replaced by a placeholder with its size.

    Raises:
        DataError: the file is not a Parquet file of records, or contains images and `store` is None.
    """
    file = open_file(path, keys)
    if store is None and is_embedded(file.schema_arrow, keys.images):
        raise DataError(f"{path} holds images; only llava-fsdp prepare and training read them: give paths instead")
    names = file.schema_arrow.names
    read = read_columns(keys)
    unread = [name for name in names if name not in read and (names_media(name) or name in TOOL_KEYS)]
    present = [name for name in read if name in names] + unread
    rows = 1 if unread else ROWS_AT_ONCE
    for batch in read_on(path, file.iter_batches(rows, row_groups=groups, columns=present)):
        for row in range(batch.num_rows):
            yield line(batch.slice(row, 1), store, most, keys)


def read_on(path: Path, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow

    try:
        yield from batches
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}; take it from its source again") from error


def line(row: Any, store: Store | None, most: int, keys: RecordKeys = NO_KEYS) -> bytes:
    names = row.schema.names
    size = row.select([name for name in turn_columns(keys) if name in names]).nbytes
    try:
        if size > most:
            (named,) = row.select([name for name in names if name == "id"]).to_pylist()
            return json.dumps({**named, TOO_LARGE: [size, most]}).encode()
        (values,) = row.to_pylist()
    except UnicodeDecodeError:
        return NOT_UTF8
    record: dict[str, Any] = {
        name: value if name in read_columns(keys) else HELD
        for name, value in values.items()
        if value is not None and (name in read_columns(keys) or not is_empty(value))
    }
    for name in (name for name in FORMS if name in record):
        record[name] = [plain_turn(turn) for turn in record[name]]
    own_names: dict[str, str | None] = {}
    for name in (name for name in keys.images if name in record):
        if store is None:
            continue
        record[name] = store.put(record[name], own_names)
        if record[name] is None:  # it was a struct of two nulls
            del record[name]
    if own_names:
        record[OWN_NAMES] = own_names
    made = json.dumps(record).encode()
    if len(made) <= most:
        return made
    return json.dumps({"id": record.get("id"), TOO_LARGE: [len(made), most]}).encode()


def plain_turn(turn: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a turn with only its fields of TURN that have a value, and a placeholder for each other field with a value
    that names media or calls of tools."""
    if turn is None:
        return None
    held = {k: HELD for k, v in turn.items() if (names_media(k) or k in TOOL_KEYS) and not is_empty(v)}
    return {name: turn[name] for name in TURN if turn.get(name) is not None} | held
