"""Read files of unknown origin (models, datasets, settings) without running code from them.

A file of the wrong type, size or nesting depth is refused with an error that names it. Other files that it refers to
must be in the same folder.
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
"""Maximum size, in bytes, of a JSON file of a model."""
LARGE = 512 * MiB
"""Maximum size, in bytes, of a file of a tokenizer."""
LFS_HEAD = b"version https://git-lfs"
"""Beginning of the text file that git writes in place of a large file that has not been fetched."""
LFS_POINTER = "a pointer of git-LFS, not the file itself; fetch it: git lfs pull"
VALUES = 4_000_000
"""Maximum number of commas and opening brackets of a JSON file: a value of a few bytes takes a hundred once read. The
largest tokenizers have about two million."""
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate")
"""Keys in a model's JSON files that make transformers load Python files from the model folder."""


def read_text(path: Path, error: type[LlavaFsdpError] = ModelError, largest: int = SMALL) -> str:
    """Read UTF-8 text. Raises `error` if that fails, or for more than `largest` bytes or a git-LFS pointer."""
    try:
        if not path.is_file():
            raise error(f"{path} is not a file")
        size = path.stat().st_size
        if size > largest:
            raise error(f"{path} has {size:,} bytes, more than the {largest:,} allowed here")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:  # a path with a NUL character raises ValueError
        raise error(f"{str(path)!r} cannot be read: {problem}") from problem
    if text.startswith(LFS_HEAD.decode()):
        raise error(f"{path} is {LFS_POINTER}")
    return text


def refuse_pointer(path: Path) -> None:
    """Raise ModelError if git has not fetched a file, so that a pointer of git-LFS is in its place."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_HEAD)) == LFS_HEAD
    except OSError as problem:
        raise ModelError(f"{path} cannot be read: {problem.strerror}") from problem
    if is_pointer:
        raise ModelError(f"{path} is {LFS_POINTER}")


def read_json(path: Path, error: type[LlavaFsdpError] = ModelError, largest: int = SMALL) -> dict[str, Any]:
    """Read a JSON object. Raises `error` if the file is unreadable, has over `largest` bytes, or contains no object."""
    text = read_text(path, error, largest)
    values = text.count(",") + text.count("[") + text.count("{")
    if values > VALUES:
        raise error(f"{path} has {values:,} values, more than the {VALUES:,} allowed here")
    try:
        content = json.loads(text.removeprefix("\ufeff"))  # accepts NaN and repeated keys, like transformers
    except ValueError as problem:
        raise error(f"{path} cannot be read: it is not JSON: {problem}; was the download interrupted?") from problem
    except RecursionError as problem:
        raise error(f"{path} cannot be read: it is nested too deeply") from problem
    if not isinstance(content, dict):
        raise error(f"{path} cannot be read: it holds a {type(content).__name__}, not an object")
    return content


@contextlib.contextmanager
def library_errors(what: str, error: type[LlavaFsdpError] = ModelError) -> Iterator[None]:
    """Context manager in which a library parses a file of unknown origin. An exception that is no LlavaFsdpError is
    raised again as one of type `error`, with a message that begins with `what`."""
    try:
        yield
    except LlavaFsdpError:
        raise
    except BaseException as problem:
        is_panic = type(problem).__name__ == "PanicException"  # raised by Rust libraries, not a subclass of Exception
        if not isinstance(problem, Exception) and not is_panic:
            raise
        why = " ".join(str(problem).split())[:500]
        raise error(f"{what} ({type(problem).__name__}: {why})") from problem


def refuse_model_code(fields: dict[str, Any], path: Path) -> None:
    """Raise ModelError if the `fields` of a model's JSON file name Python code that transformers would load."""
    for key in CODE_KEYS:
        if fields.get(key):
            raise ModelError(
                f"{path} has {key}: the model brings its own Python code, which is never run here. If transformers "
                "knows its model_type without that code, remove the key from the file"
            )


def file_beside(path: Path, name: object) -> Path:
    """Return the path of the file `name`, which the file `path` (such as an index of weights) names, in the same
    folder. Raise ModelError if `name` is not a plain file name, so that it could lead out of the folder."""
    is_plain_name = isinstance(name, str) and re.fullmatch(r"[\w.+=-][\w.+= -]*", name) and name not in (".", "..")
    if not is_plain_name:
        raise ModelError(f"{path} names {str(name)[:200]!r}, which is not a file beside it")
    return path.parent / str(name)


def refuse_yaml_bombs(path: Path, largest: int = MiB) -> str:
    """Return the text of a YAML file. Raises ConfigError if it has more than `largest` bytes, is not YAML, or contains
    an alias: a small file with aliases can be parsed into content of any size (a "YAML bomb")."""
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
    """Return whether every user of this machine may create files in a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH)
