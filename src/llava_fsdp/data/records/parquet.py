"""Read the rows of Parquet files as records in JSON.

The columns are: the conversation, under the same keys as in a JSON file; `id`; `image` and `images`, a path, the
image's bytes, a struct of bytes and path as Hugging Face datasets writes it (without bytes, the path is used), or a
list of these; `video`, a path or a list of paths. A null counts as a missing key. Other columns whose names mean media
(audio, ...) are not read, and a record with a value in such a column is bad. So is a record whose column of videos
contains bytes.

`schema` is the file's Arrow schema, `kind` an Arrow type.
"""

import contextlib
import importlib.util
import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.containers.parquet.parquet_container import SPELL_OUT, ParquetContainer
from llava_fsdp.data.records.forms.image_places import SIZE_KEYS
from llava_fsdp.data.records.forms.messages import TURN_KEYS
from llava_fsdp.data.records.forms.pairs import ENTRY_KEYS
from llava_fsdp.data.records.forms.parse_record import FORMS, NO_KEYS, SYSTEM, VIDEO_KEYS, RecordKeys
from llava_fsdp.data.records.forms.preferences import ANSWERS, PAIR_COLUMNS
from llava_fsdp.data.records.json_stream import MOST_BYTES, check_head
from llava_fsdp.data.records.keys import (
    ONLY_OF_RECORDS,
    REASONS,
    KeyMeaning,
    is_thought,
    meaning_of,
    value_of_key_for_index,
)
from llava_fsdp.data.records.record import LOCATION, PARQUET, TOO_LARGE, UNREAD_VALUE, names_media, without_locations
from llava_fsdp.data.records.tools import RECORD_TOOLS, RESULT_KEYS, TOOL_KEYS, TURN_CALLS, has_no_tools
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

PARTS = "content"
"""Field of a turn's struct that may be a list of parts."""
TURN = tuple(key for keys in (*TURN_KEYS, ENTRY_KEYS) for key in keys)
"""Fields that are read of the structs in a column of turns."""
SMALL, SHARE = 1 << 16, 50
"""Columns that nothing reads are looked into while they have at most SMALL bytes in a row group, or 1 in SHARE of the
bytes of the columns that are read."""
LEAST_IMAGE, LEAST_NULL = 40, 6
"""Least number of bytes that an image's location, and a null in a list, take in JSON."""
NOTHING = b"{}"
"""A row of which no column that is read has a value."""
MOST_EMPTY = 1000
"""A row group may have this many rows without a value, and more if they are not more than half of its rows."""
NOT_UTF8 = b"\xff"
"""Placeholder line for a row whose text is not UTF-8. It is not UTF-8 itself, so the checks of text files report the
row."""


def is_parquet(path: str | Path) -> bool:
    return str(path).lower().endswith(PARQUET)


def check_installed(path: str) -> None:
    """Raise ConfigError if a file is a Parquet file and pyarrow, which reads it, is not installed."""
    if is_parquet(path) and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow: pip install 'llava-fsdp[parquet]'")


def turn_columns(keys: RecordKeys) -> tuple[str, ...]:
    """Return the names of all columns that can contain the conversation, or a pair."""
    return tuple(dict.fromkeys((*FORMS, *(keys.pair or ()), *(PAIR_COLUMNS if keys.pairs else ()))))


def read_columns(keys: RecordKeys, schema: Any) -> list[str]:
    """Return the names of the columns that are read: those for ids, images and the conversation; those for videos,
    system texts, tools and thoughts if they have texts; and those for sizes of images if they have numbers."""
    names = dict.fromkeys(("id", *keys.images, *turn_columns(keys)))
    names |= dict.fromkeys(key for key in VIDEO_KEYS if key in schema.names and has_paths(schema, key))
    names |= dict.fromkeys(key for key in SIZE_KEYS if key in schema.names and has_numbers(schema, key))
    texts = [name for name in schema.names if name in (SYSTEM, *RECORD_TOOLS) or is_thought(name, "")]
    # `has_paths`: the column has texts, or lists of texts
    names |= dict.fromkeys(name for name in texts if has_paths(schema, name))
    return [name for name in names if name in schema.names]


def has_numbers(schema: Any, name: str) -> bool:
    """Return whether a column contains numbers, or lists of numbers. `schema`: the file's Arrow schema."""
    from pyarrow import types

    kind = schema.field(name).type
    kind = kind.value_type if is_list(kind) else kind
    return types.is_integer(kind) or types.is_floating(kind)


def has_paths(schema: Any, name: str) -> bool:
    """Return whether a column contains texts, such as paths, or lists of texts."""
    kind = schema.field(name).type
    return is_text(kind.value_type if is_list(kind) else kind)


def open_file(file: Reader, keys: RecordKeys = NO_KEYS) -> ParquetContainer:
    """Open a Parquet file of records.

    Raises:
        DataError: the file is not a Parquet file, or its columns are those of no form of records.
        SourceError: the file cannot be read.
    """
    import pyarrow

    head = file.read(0, min(64, file.size))
    if not head.startswith(b"PAR1"):
        check_head(head, file.name)
    parquet = ParquetContainer(file)
    try:
        schema = parquet.arrow.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file.name} is no whole Parquet file ({shown_name(error)}); take it from its source again"
        ) from error
    if not any(name in schema.names for name in turn_columns(keys)):
        raise DataError(
            f"{file.name} has the columns {shown_name(schema.names)}; records have one of "
            f"{', '.join(turn_columns(keys))}, or the two that data.question and data.answer name"
        )
    check_types(file.name, schema, keys)
    return parquet


def check_types(path: str, schema: Any, keys: RecordKeys = NO_KEYS) -> None:
    """Raise DataError if the type of a column that is read is not supported."""

    for name in (name for name in turn_columns(keys) if name in schema.names):
        column_type = schema.field(name).type
        if name in PAIR_COLUMNS and keys.pairs:  # of any type: the parser of pairs says what is wrong with a value
            continue
        # FORMS are the columns whose value is a whole conversation, others have a question or an answer
        if name not in FORMS and not is_text(column_type):
            raise DataError(f"{path}: {name} is {shown_name(column_type)}; it must be text")
        if name in FORMS and not are_turns(column_type):
            raise DataError(
                f"{path}: {name} is {shown_name(column_type)}; it must be a list of structs with from and value, "
                "which are text, with role and content, or with user and assistant (docs/data.md); an "
                "image in a part must be a path"
            )
    for name in (name for name in keys.images if name in schema.names):
        if not (has_paths(schema, name) or is_embedded(schema, name)):
            raise DataError(
                f"{path}: {name} is {shown_name(schema.field(name).type)}; it must be a path, bytes, a struct of bytes "
                "and path, or a list of these"
            )


def is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: Any) -> bool:
    """Return whether all values of an Arrow type are texts or nulls."""
    from pyarrow import types

    value_type = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(value_type) or types.is_large_string(value_type) or types.is_null(value_type)


def are_turns(kind: Any) -> bool:
    """Return whether a type can be a list of messages: a list of structs with the fields of a message, or a type whose
    values are all empty."""
    from pyarrow import types

    if not is_list(kind) or types.is_null(kind.value_type):
        return types.is_null(kind) or is_list(kind)
    fields = {name: field_type for name, field_type in fields_of(kind.value_type).items() if name in TURN}
    # whether a struct has both fields of a message (speaker and text), or of a question and its answer
    whole = any(set(pair) <= set(fields) for pair in (*TURN_KEYS, ENTRY_KEYS))
    return whole and all(
        is_text(field_type) or (name == PARTS and is_plain(field_type)) for name, field_type in fields.items()
    )


def is_plain(kind: Any) -> bool:
    """Return whether JSON can hold an Arrow type's values: texts, numbers, booleans, lists and structs of these."""
    from pyarrow import types

    if is_list(kind):
        return is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(is_plain(field_type) for field_type in fields_of(kind).values())
    return is_text(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)


def fields_of(kind: Any) -> dict[str, Any]:
    """Return {field name: type} of a struct type; empty for another type."""
    from pyarrow import types

    return {field.name: field.type for field in kind} if types.is_struct(kind) else {}


def is_embedded(schema: Any, name: str) -> bool:
    """Return whether a column can contain the bytes of images: bytes, a struct with a field `bytes`, or a list of
    these. `schema`: the file's Arrow schema."""
    from pyarrow import types

    kind = schema.field(name).type
    kind = kind.value_type if is_list(kind) else kind
    fields = fields_of(kind)
    data = fields.get("bytes", kind)  # its type is null if all images are given by paths
    named = "path" not in fields or is_text(fields["path"])
    return (types.is_binary(data) or types.is_large_binary(data) or types.is_null(data)) and named


class ParquetRows:
    """Reads rows as records in JSON, with the location of an image instead of its bytes. See `RecordRows`."""

    def __init__(self, file: Reader, keys: RecordKeys = NO_KEYS):
        """Read the file's footer, and decide by name and type what is done with each column."""
        self.parquet = open_file(file, keys)
        self.parquet.check_rows()
        self.written: dict[int, int] = {}
        """{index of a row group: number of bytes of its rows as JSON, as far as they were read}; `total` is their
        sum."""
        self.total = 0
        self.keys = keys
        schema = self.parquet.arrow.schema_arrow
        self.read_columns = read_columns(keys, schema)
        others = [name for name in schema.names if name not in (*self.read_columns, *FORMS, LOCATION, TOO_LARGE)]
        media = [name for name in others if names_media(name) or name in TOOL_KEYS]
        binary = {leaf.partition(".")[0] for leaf in self.parquet.binary_leaves()}
        self.learning_columns = [
            name for name in others if name not in (*media, *binary) and meaning_of(name) in REASONS
        ]
        """Names of the columns that say whether, or how much, an answer is in the loss."""
        self.presence_columns = media + [
            name for name in binary.intersection(others).difference(media) if meaning_of(name) in REASONS
        ]
        """Names of the columns of media and tools, of which it is only read whether a row has a value."""
        self.unknown_columns = [
            n
            for n in others
            if n not in (*self.learning_columns, *self.presence_columns) and meaning_of(n) is KeyMeaning.unknown
        ]
        """Names of the columns that nothing reads, and that are not known to be harmless."""
        self.leaves = {name: leaf for name in keys.images if (leaf := self.leaf_with_images(name)) is not None}
        """{name of a column of images: its leaf column with the images' bytes}, without columns that have only
        paths."""
        self.presence_leaves = [
            leaf for leaf in self.parquet.binary_leaves() if any(is_below(leaf, name) for name in self.presence_columns)
        ]
        """Leaf columns with the bytes of media that are not read."""
        self.page_bytes = np.zeros(2, dtype=np.int64)
        """Sums over the images in compressed pages: their bytes, and the bytes to decompress for each of them alone."""
        self.lists = {name for name in schema.names if is_list(schema.field(name).type)}

    @property
    def groups(self) -> int:
        return self.parquet.groups

    @property
    def num_rows(self) -> int:
        return self.parquet.arrow.metadata.num_rows

    def leaf_with_images(self, name: str) -> str | None:
        """Return the leaf (a column of Parquet with values, such as `image.bytes` in the struct `image`) that has the
        bytes of a column of images; None if it has only paths. Raise DataError if several leaves may have them."""
        schema = self.parquet.arrow.schema_arrow
        if name not in schema.names or not is_embedded(schema, name):
            return None
        leaves = [leaf for leaf in self.parquet.binary_leaves() if is_below(leaf, name)]
        kind = schema.field(name).type
        if fields_of(kind.value_type if is_list(kind) else kind):
            leaves = [leaf for leaf in leaves if leaf.endswith(".bytes")]
        if len(leaves) > 1:
            raise DataError(f"{self.parquet.reader.name}: several columns hold {name}: {leaves}; keep one")
        return leaves[0] if leaves else None

    def lines(self, group: int, max_bytes: int = MOST_BYTES) -> Iterator[bytes]:
        """Yield each row of a row group as a record in JSON; a placeholder for one of more than `max_bytes`. A few
        hundred rows are in memory at a time, and the locations of all images of the row group."""
        locations = {name: self.parquet.locations(leaf, group) for name, leaf in self.leaves.items()}
        presence_locations = {leaf: self.parquet.locations(leaf, group) for leaf in self.presence_leaves}
        columns = self.read_columns + self.presence_columns + self.learning_columns
        unknown_small, unknown_large = self.divide_unknown(group, columns)
        columns += unknown_small
        self.total -= self.written.get(group, 0)  # the row group may have been read before
        number = empty = self.written[group] = 0
        rows = self.parquet.rows(group)
        for batch in self.parquet.batches(group, self.leaves_to_skip(columns)):
            has_value = {name: have_values(batch.column(name)) for name in unknown_small}  # of each row
            batch = batch.select([name for name in batch.schema.names if name not in has_value])
            if "id" in batch.schema.names:
                batch = batch.set_column(batch.schema.names.index("id"), "id", readable_ids(batch.column("id")))
            for row in range(batch.num_rows):
                # the least number of bytes that the locations of the row's images, and the nulls among them, take in
                # JSON
                least = sum(LEAST_IMAGE * images + LEAST_NULL * nulls for images, nulls in
                            (column.count(number) for column in locations.values()))  # fmt: skip
                # a row of too many images becomes a placeholder, without their locations
                images = {} if least > max_bytes else {name: column.row(number) for name, column in locations.items()}
                self.count_pages(images)
                unread_media = {name for name in self.presence_columns for leaf in presence_locations
                                if is_below(leaf, name) and presence_locations[leaf].count(number)[0]}  # fmt: skip
                unknown = [*unknown_large, *(name for name, of_rows in has_value.items() if of_rows[row])]
                line = self.line(batch.slice(row, 1), images, unread_media, max_bytes, unknown, least)
                # NOTHING: no column that is read has a value in this row
                empty += line == NOTHING
                if empty > max(MOST_EMPTY, rows // 2):
                    self.parquet.footer.refuse(
                        f"more than half of the {rows:,} rows of row group {group} hold nothing in the columns that "
                        "are read",
                        "take these rows out, or name the columns: data.question, data.answer",
                    )
                self.count_bytes(group, len(line))
                yield line
                number += 1

    def leaves_to_skip(self, columns: Collection[str]) -> set[str]:
        """Return the leaf columns that need not be read for the values of `columns`: those of other columns, and those
        with the bytes of media, of which only the locations are needed."""
        leaves = self.parquet.footer.leaves
        skipped = {leaf for leaf in self.parquet.binary_leaves() if any(is_below(leaf, name) for name in self.leaves)}
        skipped |= {*self.presence_leaves}
        return skipped | {leaf for leaf in leaves if not any(is_below(leaf, name) for name in columns)}

    def count_pages(self, images: dict[str, list[ImageLocation | None]]) -> None:
        """Add the images of a row that are in compressed pages to `page_bytes`. `images`: locations by column."""
        paged = [
            image for column in images.values() for image in column if image is not None and image.page is not None
        ]
        self.page_bytes += [
            sum(image.size or 0 for image in paged),
            sum(image.page.unpacked for image in paged if image.page),
        ]

    def count_bytes(self, group: int, size: int) -> None:
        """Count the bytes of a row as JSON. Raise DataError if all rows take more than a file of this size may."""
        self.written[group] += size
        self.total += size
        if self.total > self.parquet.most_bytes:
            self.parquet.footer.refuse(
                f"its rows take more than {self.parquet.most_bytes:,} bytes as text, in a file of "
                f"{self.parquet.reader.size:,} bytes",
                SPELL_OUT,
            )

    def divide_unknown(self, group: int, columns: Collection[str]) -> tuple[list[str], list[str]]:
        """Choose what is looked into of a row group's columns that nothing reads, and that are not known to be
        harmless. Return the names of those that are small beside the columns that are read (`columns`), so that it
        costs little to see in which rows they have a value; and of those larger ones that have any value in the row
        group, which count for all its rows."""
        chunks = {leaf: self.parquet.footer.chunk(leaf, group) for leaf in self.parquet.footer.leaves}
        sizes = Counter[str]()
        for leaf, chunk in chunks.items():
            sizes[leaf.partition(".")[0]] += chunk.end - chunk.begin
        left = max(SMALL, sum(sizes[name] for name in columns) // SHARE)
        binary = {leaf.partition(".")[0] for leaf in self.parquet.binary_leaves()}
        small, large = [], []
        for name in sorted(self.unknown_columns, key=sizes.__getitem__):
            leaves = [leaf for leaf in chunks if is_below(leaf, name)]
            if name not in binary and sizes[name] <= left:
                left -= sizes[name]
                small.append(name)
            elif any(self.parquet.footer.has_values(leaf, group) for leaf in leaves):
                large.append(name)
        return small, large

    def line(
        self,
        row: Any,
        locations: dict[str, list[ImageLocation | None]],
        unread_media: Collection[str],
        max_bytes: int,
        unknown: Collection[str] = (),
        least: int = 0,
    ) -> bytes:
        """Return a row as a record in JSON. If it would have more than `max_bytes`, return a placeholder: its id and,
        as TOO_LARGE, its size. UNREAD_VALUE stands for values that are not needed, of which it only counts that they
        exist. A row with a text that is not UTF-8 becomes NOT_UTF8, a line that is reported where lines are parsed.

        Args:
            row: an Arrow RecordBatch of one row, without the bytes of images.
            locations: {name of a column of images: where in the file each of the row's images lies}.
            unread_media: names of the columns in which the row has bytes of media (such as audio) that are not read.
            unknown: names of the columns that nothing reads and in which the row has a value.
            least: number of bytes that the row's images take at least.
        """
        names = row.schema.names
        size = max(least, row.select([name for name in names if not has_dictionary(row.schema, name)]).nbytes)
        try:
            if size > max_bytes:
                (named,) = row.select([name for name in names if name == "id"]).to_pylist()
                return json.dumps({**named, TOO_LARGE: [size, max_bytes]}).encode()
            (values,) = row.to_pylist()
        except UnicodeDecodeError:
            return NOT_UTF8
        record: dict[str, Any] = {}
        columns = (*self.read_columns, *self.presence_columns, *self.learning_columns)
        for name in [n for n in columns if n in values or n in locations or n in unread_media]:
            value, places = values.get(name), locations.get(name, [])
            if (
                name in self.learning_columns
            ):  # columns that say what is learnt: numbers and short texts stay, others become UNREAD_VALUE
                value = value_of_key_for_index(name, value)
            elif name in self.presence_columns:  # columns of media and tools
                value = UNREAD_VALUE if name in unread_media or not has_no_tools(value) else None
            elif name in ("id", *SIZE_KEYS) and value != value:  # NaN, as pandas writes a missing number
                value = None
            elif name in (*self.keys.images, *VIDEO_KEYS):
                value = self.images(name, value, places)
            elif (name in FORMS or (name in ANSWERS and self.keys.pairs)) and isinstance(value, list):
                value = [plain_turn(without_locations(turn)) for turn in value]
            if value is not None:
                record[name] = value
        made = json_line(record | dict.fromkeys(unknown, UNREAD_VALUE))
        if len(made) <= max_bytes:
            return made
        return json.dumps({"id": record.get("id"), TOO_LARGE: [len(made), max_bytes]}).encode()

    def images(self, name: str, value: Any, locations: list[ImageLocation | None]) -> Any:
        """Return the images in one row of a column: for each its location in the file, or its path.

        Args:
            value: the row's value in this column, without the bytes of images.
            locations: location of each image; empty if the column cannot contain bytes.
        """
        if name not in self.lists:
            return one_image(value, locations[0] if locations else None)
        if value is None:  # a null, or a list whose elements consist of bytes only
            return [one_image(None, location) for location in locations] or None
        locations = locations or [None] * len(value)
        return [one_image(image, location) for image, location in zip(value, locations, strict=True)]


def readable_ids(column: Any) -> Any:
    """Return an Arrow array of ids as texts or numbers: uuids as they are written, dates and times in ISO's form, bytes
    as text or else in hexadecimal. Ids of another type (a list, a struct) become nulls, as no record needs one."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if is_text(kind) or types.is_integer(kind) or types.is_floating(kind):
        return column
    is_uuid = str(kind) == "extension<arrow.uuid>"
    stored = column.storage if isinstance(kind, pyarrow.BaseExtensionType) else column
    stored_type = stored.type
    if types.is_binary(stored_type) or types.is_large_binary(stored_type) or types.is_fixed_size_binary(stored_type):
        ids = [None if value is None else id_text(value, is_uuid) for value in stored.to_pylist()]
        return pyarrow.array(ids, pyarrow.string())
    try:
        return stored.cast(pyarrow.string())
    except pyarrow.ArrowException:
        return pyarrow.nulls(len(column), pyarrow.string())


def id_text(value: bytes, is_uuid: bool) -> str:
    """Return an id given as bytes: a uuid as it is written, printable text as it is, else hexadecimal digits."""
    if is_uuid:
        return str(UUID(bytes=value))
    with contextlib.suppress(UnicodeDecodeError):
        if (text := value.decode()).isprintable():
            return text
    return value.hex()


def have_values(column: Any) -> list[bool]:
    """Return for each row of an Arrow array whether its value is more than a null, NaN, an empty text or list, or a
    struct of these."""
    import pyarrow.compute
    from pyarrow import types

    compute: Any = pyarrow.compute  # its functions are made when it is imported
    kind = column.type
    if types.is_null(kind):
        return [False] * len(column)
    said = compute.invert(compute.is_null(column, nan_is_null=types.is_floating(kind)))
    if types.is_struct(kind):
        inside = np.zeros(len(column), dtype=bool)
        for field in column.flatten():
            inside |= np.array(have_values(field), dtype=bool)
        return inside.tolist()
    if is_list(kind) and not types.is_fixed_size_list(kind):
        said = compute.and_(said, compute.fill_null(compute.greater(compute.list_value_length(column), 0), False))
    elif types.is_string(kind) or types.is_large_string(kind):
        has_letters = compute.greater(compute.binary_length(column.cast(pyarrow.large_binary())), 0)
        said = compute.and_(said, compute.fill_null(has_letters, False))
    return said.to_pylist()


def json_line(record: Any) -> bytes:
    """Return a JSON value as one line of UTF-8. Around half of a surrogate pair, non-ASCII characters are escaped."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def has_dictionary(schema: Any, name: str) -> bool:
    """Return whether a column is dictionary-encoded. Arrow counts the whole dictionary in the size of each row."""
    from pyarrow import types

    return types.is_dictionary(schema.field(name).type)


def is_below(leaf: str, column: str) -> bool:
    """Return whether a leaf column (such as `image.bytes`) is a column (such as `image`) or part of it."""
    return leaf == column or leaf.startswith(f"{column}.")


def one_image(value: Any, location: ImageLocation | None) -> Any:
    """Return an image as JSON: an object with its location if the file contains its bytes, else its path. `value`: the
    path, or a struct with the field `path`. `location`: that of the bytes; None if the value has no bytes."""
    path = value.get("path") if isinstance(value, dict) else value
    if location is None:
        return path
    return {LOCATION: replace(location, name=path).to_json()}


def plain_turn(turn: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a message with only those fields that are read (`from`, `value`, calls, thoughts, ...) and have a value.
    Other fields for media or tools that have one get UNREAD_VALUE, so that they are reported. A field that nothing
    reads is left out if it is harmless in a message, else kept with a shortened value (`value_of_key_for_index`)."""
    if turn is None:
        return None
    made = {name: turn[name] for name in TURN if turn.get(name) is not None}
    for key, value in turn.items():
        if key in TURN:
            continue
        if key in (*TURN_CALLS, *RESULT_KEYS) or is_thought(key, value):
            kept = None if has_no_tools(value) else value
        elif names_media(key) or key in TOOL_KEYS:
            kept = UNREAD_VALUE if not has_no_tools(value) else None
        else:
            kept = (
                None
                # ONLY_OF_RECORDS: harmless in a record, but not in a message (`name`: the speaker)
                if meaning_of(key) is KeyMeaning.harmless and key not in ONLY_OF_RECORDS
                else value_of_key_for_index(key, value)
            )
        if kept is not None:
            made[key] = kept
    return made
