"""Files that others wrote, and that are to be read and never to be run: models, datasets, settings.

A file of the wrong sort, size or depth is refused with an error that names it; nothing is read from outside the folder
that it belongs to.
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
"""Most bytes of a JSON file of a model: the largest index of shards has one."""
LARGE = 512 * MiB
"""Most bytes of a tokenizer."""
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate")
"""What makes transformers look for a Python file beside a model."""


def read_text(path: Path, error: type[LlavaFsdpError] = ModelError, largest: int = SMALL) -> str:
    """A whole file of UTF-8 text.

    Raises:
        LlavaFsdpError: of the given type, where it is none, or is larger than anything of its sort.
    """
    try:
        if not path.is_file():
            raise error(f"{path} is not a file")
        size = path.stat().st_size
        if size > largest:
            raise error(f"{path} has {size:,} bytes, and no more than {largest:,} make sense here")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:  # a path with a NUL in it is a ValueError
        raise error(f"{str(path)!r} cannot be read: {problem}") from problem


def read_json(path: Path, error: type[LlavaFsdpError] = ModelError, largest: int = SMALL) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        LlavaFsdpError: of the given type, where it is none.
    """
    text = read_text(path, error, largest)
    try:
        found = json.loads(text)  # as transformers does: with NaN, and the last of a key's values
    except ValueError as problem:
        raise error(f"{path} cannot be read: it is not JSON: {problem}; was the download interrupted?") from problem
    except RecursionError as problem:
        raise error(f"{path} cannot be read: it is nested too deeply") from problem
    if not isinstance(found, dict):
        raise error(f"{path} cannot be read: it holds a {type(found).__name__}, not an object")
    return found


@contextlib.contextmanager
def foreign(what: str, error: type[LlavaFsdpError] = ModelError) -> Iterator[None]:
    """Within it other people's parsers read other people's files: whatever they raise is said to be the file's fault.

    Raises:
        LlavaFsdpError: ours as they are; of the given type for anything else.
    """
    try:
        yield
    except LlavaFsdpError:
        raise
    except BaseException as problem:
        panic = type(problem).__name__ == "PanicException"  # of Rust, which is no Exception
        if not isinstance(problem, Exception) and not panic:
            raise
        why = " ".join(str(problem).split())[:500]
        raise error(f"{what} ({type(problem).__name__}: {why})") from problem


def refuse_model_code(fields: dict[str, Any], path: Path) -> None:
    """Raises ModelError where a model's file names Python code that is to be loaded with it."""
    for key in CODE_KEYS:
        if fields.get(key):
            raise ModelError(
                f"{path} has {key}: the model brings Python code of its own, which is never run here. If transformers "
                "knows its model_type without that code, take the key out of the file"
            )


def beside(path: Path, name: object) -> Path:
    """The file that an index names, which lies in the index's own folder.

    Raises:
        ModelError: the name is no plain name of a file.
    """
    plain = isinstance(name, str) and re.fullmatch(r"[\w.+=-][\w.+= -]*", name) and name not in (".", "..")
    if not plain:
        raise ModelError(f"{path} names {str(name)[:200]!r}, which is no file beside it")
    return path.parent / str(name)


def refuse_yaml_bombs(path: Path, largest: int = MiB) -> str:
    """The text of a YAML file that is no larger when it has been read.

    Raises:
        ConfigError: it is too large, refers to parts of itself (an alias), or is no YAML.
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
    """Whether any user of this machine may put files into a folder: a folder that others may only add to is one too."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH)
