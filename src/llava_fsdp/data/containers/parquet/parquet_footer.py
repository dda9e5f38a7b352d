"""Parse the footer of a Parquet file: its leaf columns (columns without subcolumns), and which bytes of the file each
row group stores them in.

pyarrow is not used here, because it aborts the process when it is asked about an encrypted column without its key.
Source: `https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift`.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.data.containers.parquet.parquet_levels import Cursor, Malformed, number_of
from llava_fsdp.data.containers.parquet.parquet_pages import COPY_AGAIN, REWRITE, UNCOMPRESSED, Chunk
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
MOST_FOOTER = 64 << 20
MOST_FIELDS = 1 << 21
"""Greatest number of fields in a footer. It has about 40 for each column of each row group."""
MOST_NESTING = 64
MOST_VALUES = 1 << 26
"""Greatest number of rows of a row group, and of values of a column in it."""
DECRYPT = "decrypt it once: read it with its keys and write it without encryption"
BYTE_ARRAY = 6
TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
CODECS = (UNCOMPRESSED, "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
OPTIONAL, REPEATED = 1, 2


@dataclass(frozen=True)
class Leaf:
    """A leaf column."""

    number: int
    """Index of the column among all leaf columns."""
    kind: int
    """Physical type, as an index into `TYPES`."""
    is_binary: bool
    """Whether the values are bytes that the schema does not declare as text, JSON or numbers."""
    max_definition: int
    max_repetition: int
    element: int
    """Smallest definition level of an element of the innermost list, which may be null; 0 without a list."""


class Footer:
    """The parsed footer: row groups and leaf columns."""

    def __init__(self, file: Reader):
        """Read the footer. Raise DataError if the file is not Parquet, or is truncated, damaged or encrypted."""
        self.file = file
        try:
            self.fields = Cursor(self.read_bytes(), most_fields=MOST_FIELDS).struct()
            # numbers of fields are those of FileMetaData in parquet.thrift
            if 8 in self.fields:
                self.refuse("it is encrypted", DECRYPT)
            self.groups = structs(self.fields, 4)
            self.leaves = find_leaves(structs(self.fields, 2))
        except Malformed as error:
            self.refuse(f"its footer is damaged ({error})", COPY_AGAIN)

    def read_bytes(self) -> bytes:
        """Return the bytes of the footer, after checks of the file's first bytes, last bytes and size."""
        size = self.file.size
        if size < 12:
            self.refuse(f"{size} bytes are no Parquet file", COPY_AGAIN)
        head, tail = self.file.read(0, 4), self.file.read(size - 8, 8)
        if ENCRYPTED in (head, tail[4:]):
            self.refuse("it is encrypted", DECRYPT)
        if head != MAGIC:
            self.refuse("it is no Parquet file: its first bytes are not PAR1", COPY_AGAIN)
        if tail[4:] != MAGIC:
            self.refuse("it is truncated or damaged: its last bytes are not PAR1", COPY_AGAIN)
        footer = int.from_bytes(tail[:4], "little")
        if footer > min(size - 12, MOST_FOOTER):
            self.refuse(f"its footer claims {footer} bytes, most are {min(size - 12, MOST_FOOTER)}", COPY_AGAIN)
        return self.file.read(size - 8 - footer, footer)

    def refuse(self, problem: str, cure: str) -> NoReturn:
        """Raise a DataError about the file."""
        raise DataError(f"{self.file.name}: {problem}; {cure}").about(file=self.file.name)

    def rows(self, group: int) -> int:
        """Return the number of rows of a row group, as the footer claims it."""
        try:
            return number_of(self.groups[group], 3, MOST_VALUES)
        except Malformed as error:
            self.refuse(f"the number of rows of row group {group} is damaged or too large ({error})", REWRITE)

    def has_values(self, path: str, group: int) -> bool:
        """Return whether a leaf column of a row group has a value that is not null, as its statistics say; true without
        them."""
        values = self.chunk(path, group).values
        meta = structs(self.groups[group], 1)[self.leaves[path].number][3]  # RowGroup.columns, ColumnChunk.meta_data
        statistics = meta.get(12)  # with field 3, null_count
        nulls = statistics.get(3) if isinstance(statistics, dict) else None
        return values > 0 and nulls != values

    def chunk(self, path: str, group: int) -> Chunk:
        """Return which bytes of the file are a leaf column (by its path) of a row group, and how they are compressed.
        The numbers are checked against the size of the file. Raise DataError if the footer is damaged, or the column is
        encrypted or in another file."""
        leaf = self.leaves[path]
        try:
            # numbers of fields: RowGroup, ColumnChunk (`column`) and ColumnMetaData (`meta`) in parquet.thrift; in
            # `meta`, 9 and 11 are the offsets of the first data page and of the dictionary page, and 7 the size of all
            columns = structs(self.groups[group], 1)
            if len(columns) != len(self.leaves):
                raise Malformed(f"{len(columns)} columns instead of {len(self.leaves)}")
            column = columns[leaf.number]
            if 8 in column or 9 in column:
                self.refuse(f"its column {shown_name(path)} is encrypted", DECRYPT)
            if 1 in column:
                self.refuse(f"its column {shown_name(path)} is in another file", REWRITE)
            meta = column.get(3)
            if not isinstance(meta, dict):
                raise Malformed("it has no metadata")
            if number_of(meta, 1) != leaf.kind or b".".join(check_names(meta.get(3))).decode() != path:
                raise Malformed("its path or type is not that of the schema")
            codec = CODECS[number_of(meta, 4, len(CODECS) - 1)]
            values = number_of(meta, 5, MOST_VALUES)
            begin = number_of(meta, 9, self.file.size)
            if 0 < (dictionary := number_of(meta, 11, self.file.size) if 11 in meta else 0) < begin:
                begin = dictionary
            end = begin + number_of(meta, 7, self.file.size - 8 - begin)
        except (Malformed, UnicodeDecodeError) as error:
            self.refuse(
                f"what its footer says of column {shown_name(path)} in row group {group} is damaged ({error})",
                COPY_AGAIN,
            )
        return Chunk(self.file, path, group, codec, begin, end, values, leaf.max_definition, leaf.max_repetition)


def structs(fields: dict[int, Any], field: int) -> list[dict[int, Any]]:
    """Return a field of a Thrift struct {field number: value}; raise Malformed if it is not a list of structs."""
    found = fields.get(field)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Malformed(f"field {field} is no list of structs")
    return found


def check_names(value: Any) -> list[bytes]:
    """Return a field that is a list of names; raise Malformed if it is not one."""
    if not isinstance(value, list) or not all(isinstance(name, bytes) for name in value):
        raise Malformed("a list of names is missing")
    return value


def find_leaves(schema: list[dict[int, Any]]) -> dict[str, Leaf]:
    """Return the leaf columns of a schema by their dotted paths, such as `image.bytes`. Its elements are Thrift structs
    {field number: value} in depth-first order: each group is followed by its children."""
    found: dict[str, Leaf] = {}
    # numbers of fields are those of SchemaElement in parquet.thrift: 1 type, 3 repetition, 4 name, 5 number of children
    # A column that may be null, or a list, raises the definition level of its leaves by 1, and a list their repetition
    # level, too. For each open group: number of children to come, path, definition level, repetition level, definition
    # level of an element of the innermost list
    open_groups: list[tuple[int, tuple[str, ...], int, int, int]] = []
    for place, element in enumerate(schema):
        if place == 0:
            open_groups.append((number_of(element, 5), (), 0, 0, 0))
        else:
            while open_groups and open_groups[-1][0] == 0:
                open_groups.pop()
            if not open_groups or len(open_groups) > MOST_NESTING:
                raise Malformed("its columns are nested in an impossible way, or too deep")
            children_left, path, definition, repetition, element_level = open_groups.pop()
            open_groups.append((children_left - 1, path, definition, repetition, element_level))
            repetition_type = number_of(element, 3, REPEATED)
            definition += repetition_type in (OPTIONAL, REPEATED)
            if repetition_type == REPEATED:
                repetition, element_level = repetition + 1, definition
            (name,) = check_names([element.get(4)])
            path = (*path, decode_name(name))
            if 1 not in element:
                open_groups.append((number_of(element, 5), path, definition, repetition, element_level))
                continue
            kind = number_of(element, 1, len(TYPES) - 1)
            dotted_path = ".".join(path)
            if dotted_path in found:
                raise Malformed(f"two columns have the path {shown_name(dotted_path)}; give one of them another name")
            # fields 6 and 10 give bytes a meaning, such as text
            binary = kind == BYTE_ARRAY and 6 not in element and 10 not in element
            found[dotted_path] = Leaf(len(found), kind, binary, definition, repetition, element_level)
    if any(children_left for children_left, *_ in open_groups):
        raise Malformed("its schema ends early")
    return found


def decode_name(name: bytes) -> str:
    """Return the name of a column as text; raise Malformed if it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise Malformed("the name of a column is not UTF-8") from error
