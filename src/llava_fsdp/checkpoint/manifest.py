"""Format and parse a checkpoint's `manifest.json`: the size and digest of every file, and which file holds which rows
(slices of dimension 0) of each tensor.

The manifest ends with a digest of everything before it, so that any changed bit is detected. This detects damage, not
forgery: whoever can write into the folder can also write a matching manifest.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from llava_fsdp.checkpoint.safetensors_stream import CODES, DTYPES, LARGEST_DIMENSION
from llava_fsdp.model.adapters.lora_files import FOLDER as ADAPTER_FOLDER
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files import small_json
from llava_fsdp.runtime.files.digests import Digest, with_digest, without_digest

FORMAT = 6
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
RANK_FILE = re.compile(r"rank-\d{5}\.safetensors")
ADAPTER_FILE = re.compile(rf"{ADAPTER_FOLDER}(/[A-Za-z0-9]\w*)?/[A-Za-z0-9][\w.-]*")
"""Pattern for paths of the files in a checkpoint's adapter folder, a copy of the adapters for other programs."""
LARGEST = 1 << 30
"""Largest accepted size of a manifest in bytes: enough for 2000 tensors on 10,000 ranks."""
HEX = re.compile(r"[0-9a-f]{32}")


class RowRange(NamedTuple):
    """Rows [begin, end) of a tensor, and the name of the file that holds them. A scalar counts as one row."""

    file: str
    begin: int
    end: int
    columns: tuple[int, int] | None = None
    """Columns (indices of dimension 1) that the file holds of these rows; None: all. Tensor parallelism divides some
    weights by columns, and FSDP shards experts along dimension 1 if they are fewer than the ranks."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's dtype and shape, and the files that hold its rows, in the order of columns and then of rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Number of rows; a scalar counts as one."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize // max(1, self.rows)

    def columns_of(self, rows: RowRange) -> tuple[int, int]:
        """Return the range of columns in a file; (0, 1) for a tensor without columns."""
        return rows.columns or (0, self.shape[1] if len(self.shape) > 1 else 1)

    def shape_of(self, rows: RowRange) -> tuple[int, ...]:
        """Return the shape of the values that a file has for a range of rows of this tensor, of some columns or all."""
        if not self.shape:
            return ()
        columns = () if len(self.shape) == 1 else (self.columns_of(rows)[1] - self.columns_of(rows)[0],)
        return (rows.end - rows.begin, *columns, *self.shape[2:])


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of, for its verification."""

    step: int
    files: Mapping[str, Digest]
    """Size and digest of every file except the manifest, by path within the checkpoint's folder."""
    tensors: Mapping[str, TensorEntry]


def rank_file(rank: int) -> str:
    """Return the name of the file with the tensors that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def render(manifest: Manifest) -> bytes:
    """Return a manifest's JSON file as bytes. Raises CheckpointError if a tensor's row is missing or listed twice."""
    for name, entry in manifest.tensors.items():
        require_coverage(name, entry)
    values = {
        "format": FORMAT,
        "step": manifest.step,
        "files": {name: {"bytes": f.bytes, "xxh128": f.xxh128} for name, f in manifest.files.items()},
        "tensors": {
            name: {
                "dtype": CODES[entry.dtype],
                "shape": list(entry.shape),
                "pieces": [[rows.file, rows.begin, rows.end, *(rows.columns or ())] for rows in entry.ranges],
            }
            for name, entry in manifest.tensors.items()
        },
    }
    lines = ",\n".join(f"{json.dumps(key)}: {one_item_per_line(value)}" for key, value in values.items())
    # with_digest adds the last key, `digest`, and the closing brace
    return with_digest(b"{" + lines.encode())


def one_item_per_line(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n}"


def parse(content: bytes) -> Manifest:
    """Parse a manifest and check its consistency. Raises CheckpointError, and no other error, if it is invalid."""
    body = without_digest(content)
    if body is None:
        raise CheckpointError(f"{MANIFEST_FILE} is not what was written: its digest of itself differs")
    try:
        values = small_json.parse(body + b"}")  # `without_digest` has cut the closing brace off with the digest
        if (version := values["format"]) != FORMAT:
            is_newer = isinstance(version, int) and version > FORMAT
            cure = "update llava_fsdp" if is_newer else "the version that wrote it continues and exports it"
            raise CheckpointError(
                f"it has format {version}, and this version of llava_fsdp reads format {FORMAT}: {cure}"
            )
        files = {parse_file_name(name): parse_digest(entry) for name, entry in values["files"].items()}
        tensor_files = set(filter(RANK_FILE.fullmatch, files))
        tensors = {name: parse_entry(name, entry, tensor_files) for name, entry in values["tensors"].items()}
        manifest = Manifest(parse_size(values["step"]), files, tensors)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be understood: {type(error).__name__}: {error}") from error
    for name, entry in manifest.tensors.items():
        require_coverage(name, entry)
    if STATE_FILE not in manifest.files:
        raise CheckpointError(f"{MANIFEST_FILE} does not list {STATE_FILE}")
    return manifest


def parse_entry(name: str, values: dict[str, Any], tensor_files: set[str]) -> TensorEntry:
    """Parse the manifest's entry of the tensor `name`. `tensor_files` are the files with tensors. It is written for
    speed: 1,024 ranks write a million ranges of rows of a 7B model. Raises CheckpointError, ValueError, TypeError or
    KeyError if something is invalid."""
    ranges = []
    for file, begin, end, *columns in values["pieces"]:
        if file not in tensor_files:
            raise CheckpointError(
                f"{MANIFEST_FILE}: rows of {name} lie in {str(file)[:50]!r}, which is no file of tensors that it lists"
            )
        if len(columns) not in (0, 2):
            raise ValueError(f"{len(columns)} numbers are not a range of columns")
        column_range = (parse_size(columns[0]), parse_size(columns[1])) if columns else None
        ranges.append(RowRange(file, parse_size(begin), parse_size(end), column_range))
    return TensorEntry(DTYPES[values["dtype"]], tuple(parse_size(n) for n in values["shape"]), tuple(ranges))


def parse_size(value: Any) -> int:
    """Return `value` if it is a valid size, step or row number; raise ValueError otherwise."""
    if type(value) is not int or not 0 <= value < LARGEST_DIMENSION:
        raise ValueError(f"{str(value)[:50]} is not a size")
    return value


def parse_file_name(value: Any) -> str:
    """Return `value` if it is the path of a file of a checkpoint, within its folder; else raise ValueError."""
    if not isinstance(value, str) or not (
        value == STATE_FILE or RANK_FILE.fullmatch(value) or ADAPTER_FILE.fullmatch(value)
    ):
        raise ValueError(f"{str(value)[:50]!r} is no file of a checkpoint")
    return value


def parse_digest(values: dict[str, Any]) -> Digest:
    """Parse the size (`bytes`) and XXH128 digest (`xxh128`) of a file. Raises ValueError if one of them is invalid."""
    size, digest = parse_size(values["bytes"]), values["xxh128"]
    if not isinstance(digest, str) or not HEX.fullmatch(digest):
        raise ValueError(f"{str(digest)[:50]!r} is not an XXH128")
    return Digest(size, digest)


def require_coverage(name: str, entry: TensorEntry) -> None:
    """Raise CheckpointError, naming the tensor and the rows or columns, unless every value of a tensor is in exactly
    one file: the ranges of columns follow one another, and for each of them the ranges of rows."""
    if not any(rows.columns for rows in entry.ranges):
        require_run(f"{name}: rows", [(rows.begin, rows.end) for rows in entry.ranges], entry.rows)
        return
    strips: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rows in entry.ranges:
        strips.setdefault(entry.columns_of(rows), []).append((rows.begin, rows.end))
    require_run(f"{name}: columns", list(strips), entry.shape[1] if len(entry.shape) > 1 else 1)
    for ranges in strips.values():
        require_run(f"{name}: rows", ranges, entry.rows)


def require_run(what: str, ranges: list[tuple[int, int]], size: int) -> None:
    """Raise CheckpointError, about `what`, unless ranges [begin, end) follow one another from 0 to `size`."""
    end_so_far = 0
    for begin, end in ranges:
        if end <= begin:
            raise CheckpointError(f"{what} {begin} to {end} of {size} are an empty range")
        if begin != end_so_far:
            kind = "twice, or not in order" if begin < end_so_far else "nowhere, or not in order"
            raise CheckpointError(f"{what} at {min(begin, end_so_far)} of {size} are {kind}")
        end_so_far = end
    if end_so_far != size:
        raise CheckpointError(f"{what} {end_so_far} to {size} are in no file")
