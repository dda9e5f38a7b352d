"""`manifest.json`: what every file of a checkpoint must be, and which rows of every tensor lie where.

It ends in a digest of everything before that, so that a flip of any bit is seen. Who can write into the folder can
write another manifest: it shows damage, it is no signature.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llava_fsdp.checkpoint.safetensors_stream import CODES, DTYPES, LARGEST_DIMENSION
from llava_fsdp.model import lora_files
from llava_fsdp.runtime import small_json
from llava_fsdp.runtime.digests import Digest, sealed, unsealed
from llava_fsdp.runtime.errors import CheckpointError

FORMAT = 6
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
RANK_FILE = re.compile(r"rank-\d{5}\.safetensors")
BESIDE = lora_files.FOLDER
"""In the checkpoints of a run that has adapters: a folder that other programs read."""
BESIDE_FILE = re.compile(rf"{BESIDE}(/[A-Za-z0-9]\w*)?/[A-Za-z0-9][\w.-]*")
LARGEST = 1 << 30
"""Bytes: 2000 tensors of 10,000 ranks."""
HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of a tensor, which are what a file holds under its name. A single number is one row."""

    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint, in pieces in the order of rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return rows_of(self.shape)


@dataclass(frozen=True)
class Manifest:
    step: int
    files: Mapping[str, Digest]
    """Of all files but the manifest itself, by their paths in the folder."""
    tensors: Mapping[str, Saved]


def rows_of(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def render(manifest: Manifest) -> bytes:
    """The bytes of the file. Raises CheckpointError where a tensor is not covered: nothing like that is written."""
    for name, saved in manifest.tensors.items():
        require_coverage(name, saved)
    described = {
        "format": FORMAT,
        "step": manifest.step,
        "files": {name: {"bytes": f.bytes, "xxh128": f.xxh128} for name, f in manifest.files.items()},
        "tensors": {
            name: {
                "dtype": CODES[saved.dtype],
                "shape": list(saved.shape),
                "pieces": [[p.file, p.begin, p.end] for p in saved.pieces],
            }
            for name, saved in manifest.tensors.items()
        },
    }
    lines = ",\n".join(f"{json.dumps(key)}: {one_a_line(value)}" for key, value in described.items())
    return sealed(b"{" + lines.encode())


def one_a_line(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n}"


def parse(content: bytes) -> Manifest:
    """A manifest that agrees with itself.

    Raises:
        CheckpointError: it does not, whatever the bytes are.
    """
    body = unsealed(content)
    if body is None:
        raise CheckpointError(f"{MANIFEST_FILE} is not what was written: its digest of itself differs")
    try:
        described = small_json.parse(body + b"}")
        if described["format"] != FORMAT:
            raise CheckpointError(wrong_format(described["format"]))
        found = Manifest(
            number(described["step"]),
            {file_name(k): Digest(number(v["bytes"]), hexadecimal(v["xxh128"])) for k, v in described["files"].items()},
            {name: saved_of(own) for name, own in described["tensors"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be understood: {type(error).__name__}: {error}") from error
    for name, saved in found.tensors.items():
        require_coverage(name, saved)
        lost = [p.file for p in saved.pieces if p.file not in found.files or not RANK_FILE.fullmatch(p.file)]
        if lost:
            raise CheckpointError(
                f"{MANIFEST_FILE}: rows of {name} lie in {lost[0]}, which is no file of tensors that it lists"
            )
    if STATE_FILE not in found.files:
        raise CheckpointError(f"{MANIFEST_FILE} does not list {STATE_FILE}")
    return found


def wrong_format(found: object) -> str:
    """What is said of a checkpoint of another version."""
    if isinstance(found, int) and found > FORMAT:
        return f"it has format {found}, and this version of llava_fsdp reads format {FORMAT}: update llava_fsdp"
    return (
        f"it has format {found}, and this version of llava_fsdp reads format {FORMAT}; the version that wrote it "
        "continues and exports it"
    )


def saved_of(described: dict[str, Any]) -> Saved:
    shape = tuple(number(n) for n in described["shape"])
    pieces = tuple(Piece(file_name(file), number(begin), number(end)) for file, begin, end in described["pieces"])
    return Saved(DTYPES[described["dtype"]], shape, pieces)


def number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST_DIMENSION:
        raise ValueError(f"{str(value)[:50]} is no size")
    return value


def file_name(value: Any) -> str:
    """One of the names that we give: none that leads out of the folder."""
    if not isinstance(value, str) or not (
        value == STATE_FILE or RANK_FILE.fullmatch(value) or BESIDE_FILE.fullmatch(value)
    ):
        raise ValueError(f"{str(value)[:50]!r} is no file of a checkpoint")
    return value


def hexadecimal(value: Any) -> str:
    if not isinstance(value, str) or not HEX.fullmatch(value):
        raise ValueError(f"{str(value)[:50]!r} is no XXH128")
    return value


def require_coverage(name: str, saved: Saved) -> None:
    """Every row of a tensor lies in exactly one piece.

    Raises:
        CheckpointError: naming the tensor and the rows.
    """
    reached = 0
    for piece in saved.pieces:
        if piece.begin != reached or piece.end <= piece.begin:
            kind = "twice" if piece.begin < reached else "nowhere"
            raise CheckpointError(f"{name}: rows at {min(piece.begin, reached)} of {saved.rows} are {kind}")
        reached = piece.end
    if reached != saved.rows:
        raise CheckpointError(f"{name}: rows {reached} to {saved.rows} are in no file")
