"""LLaVA records from a JSON list or a JSON Lines file."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_fsdp.config import DataConfig
from llava_fsdp.errors import ConfigError, DataError


@dataclass(frozen=True)
class Turn:
    role: str
    """human or gpt"""
    text: str


@dataclass(frozen=True)
class Record:
    """One sample as the file holds it."""

    file: str
    index: int
    id: str
    images: tuple[str, ...]
    """Paths below the image folder."""
    turns: tuple[Turn, ...]
    has_image_key: bool
    """The record says `image`, whatever it says: what the original looks at."""

    @property
    def signed_words(self) -> int:
        """The original's measure of length: words of all messages, negative without a picture (train.py:684-690)."""
        words = sum(len(turn.text.split()) for turn in self.turns)
        return words if self.has_image_key else -words

    @property
    def where(self) -> str:
        """What a message calls this record."""
        return f"{self.file}, record {self.index} (id {self.id})"


class Records:
    """A dataset file. Records are parsed when asked for; a problem of one names the file, its index and its id."""

    def __init__(self, path: Path):
        text = path.read_bytes()
        self.path = path
        self.fingerprint = hashlib.sha256(text).hexdigest()[:32]
        self._raw = parse_lines(path, text) if path.suffix == ".jsonl" else parse_list(path, text)
        if not self._raw:
            raise DataError(f"{path} holds no records")

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, index: int) -> Record:
        return parse_record(self.path, index, self._raw[index])


def check_paths(cfg: DataConfig) -> None:
    """The files of a dataset exist.

    Raises:
        ConfigError: naming the key and the path.
    """
    if not Path(cfg.path).is_file():
        raise ConfigError(f"data.path={cfg.path} is not a file; give a LLaVA JSON or JSON Lines file")
    if cfg.images is not None and not Path(cfg.images).is_dir():
        raise ConfigError(f"data.images={cfg.images} is not a folder; give the one that the records' pictures are in")


def parse_list(path: Path, text: bytes) -> list[Any]:
    try:
        raw = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, list):
        raise DataError(f"{path} holds a JSON {type(raw).__name__}; LLaVA data is a list of records")
    return raw


def parse_lines(path: Path, text: bytes) -> list[Any]:
    raw = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            raw.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
    return raw


def parse_record(path: Path, index: int, raw: Any) -> Record:
    """Raises DataError where the record has not the form of LLaVA train.py:665-740."""
    if not isinstance(raw, dict):
        raise DataError(f"{path}, record {index} is a {type(raw).__name__}, not an object with id and conversations")
    identity = str(raw.get("id", index))
    where = f"{path}, record {index} (id {identity})"
    image = raw.get("image") or []
    images = [image] if isinstance(image, str) else image
    if not isinstance(images, list) or not all(isinstance(i, str) for i in images):
        raise DataError(f"{where}: image is {image!r}; it must be a path or a list of paths")
    for name in images:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{where}: image is {name!r}, which lies outside data.images; give a path below it")
    turns = raw.get("conversations")
    if not isinstance(turns, list):
        raise DataError(f"{where}: conversations is missing or not a list")
    parsed = tuple(parse_turn(where, n, t) for n, t in enumerate(turns))
    return Record(str(path), index, identity, tuple(images), parsed, "image" in raw)


def parse_turn(where: str, position: int, raw: Any) -> Turn:
    if not isinstance(raw, dict) or not isinstance(raw.get("from"), str) or not isinstance(raw.get("value"), str):
        raise DataError(f"{where}: turn {position} is {str(raw)[:80]!r}; it must be an object with from and value")
    try:
        raw["value"].encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: turn {position} has half of a surrogate pair at character {error.start}, as a cut emoji leaves; "
            "mend the text"
        ) from error
    return Turn(raw["from"], raw["value"])
