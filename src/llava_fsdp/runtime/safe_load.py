"""Read files of unknown origin (models, datasets, settings) without running code from them.

A file of the wrong kind, size or depth is refused with an error that names it. Nothing is read from outside its folder.
"""

import contextlib
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError, ModelError

MiB = 1 << 20
SMALL = 64 * MiB
"""Largest JSON file of a model, in bytes."""
LARGE = 512 * MiB
"""Largest file of a tokenizer, in bytes."""
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate")
"""Keys that make transformers load a Python file beside a model."""


def read_text(path: Path, error: type[LlavaFsdpError] = ModelError, largest: int = SMALL) -> str:
    """Read a file of UTF-8 text.

    Raises:
        LlavaFsdpError: of the given type; it cannot be read, or is too large.
    """
    try:
        if not path.is_file():
            raise error(f"{path} is not a file")
        size = path.stat().st_size
        if size > largest:
            raise error(f"{path} has {size:,} bytes, more than the {largest:,} allowed here")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:  # a path with a NUL in it is a ValueError
        raise error(f"{str(path)!r} cannot be read: {problem}") from problem


def read_json(path: Path, error: type[LlavaFsdpError] = ModelError, largest: int = SMALL) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        LlavaFsdpError: of the given type; it does not.
    """
    text = read_text(path, error, largest)
    try:
        found = json.loads(text)  # like transformers, accepts NaN and repeated keys
    except ValueError as problem:
        raise error(f"{path} cannot be read: it is not JSON: {problem}; was the download interrupted?") from problem
    except RecursionError as problem:
        raise error(f"{path} cannot be read: it is nested too deeply") from problem
    if not isinstance(found, dict):
        raise error(f"{path} cannot be read: it holds a {type(found).__name__}, not an object")
    return found


@contextlib.contextmanager
def foreign(what: str, error: type[LlavaFsdpError] = ModelError) -> Iterator[None]:
    """Within it a library parses a foreign file: whatever it raises is reported as an error of the file.

    Raises:
        LlavaFsdpError: unchanged if one was raised; of the given type for anything else.
    """
    try:
        yield
    except LlavaFsdpError:
        raise
    except BaseException as problem:
        panic = type(problem).__name__ == "PanicException"  # Rust's, which is not an Exception
        if not isinstance(problem, Exception) and not panic:
            raise
        why = " ".join(str(problem).split())[:500]
        raise error(f"{what} ({type(problem).__name__}: {why})") from problem


def refuse_model_code(fields: dict[str, Any], path: Path) -> None:
    """Raise ModelError if a model's file names Python code to be loaded with it."""
    for key in CODE_KEYS:
        if fields.get(key):
            raise ModelError(
                f"{path} has {key}: the model brings its own Python code, which is never run here. If transformers "
                "knows its model_type without that code, remove the key from the file"
            )


def beside(path: Path, name: object) -> Path:
    """The path of a file that an index names, in the folder of the index.

    Raises:
        ModelError: the name is not a plain file name.
    """
    plain = isinstance(name, str) and re.fullmatch(r"[\w.+=-][\w.+= -]*", name) and name not in (".", "..")
    if not plain:
        raise ModelError(f"{path} names {str(name)[:200]!r}, which is not a file beside it")
    return path.parent / str(name)


def refuse_yaml_bombs(path: Path, largest: int = MiB) -> str:
    """Read the text of a YAML file without aliases, which could make it grow without limit when parsed.

    Raises:
        ConfigError: it is too large, has an alias, or is not YAML.
    """
    text = read_text(path, ConfigError, largest)
    try:
        aliases = [
            event.anchor for event in yaml.parse(text, Loader=yaml.SafeLoader) if isinstance(event, yaml.AliasEvent)
        ]
    except (yaml.YAMLError, RecursionError, ValueError) as problem:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(problem).split())}") from problem
    if aliases:
        raise ConfigError(f"{path} refers to a part of itself with *{aliases[0]}; write the values out")
    return text


def is_open_to_others(path: Path) -> bool:
    """Whether any user of this machine may create files in a folder, with or without the sticky bit."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH)
