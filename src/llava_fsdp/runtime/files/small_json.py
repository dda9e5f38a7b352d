"""Read small JSON files and check the types of their values; BadJson is raised if a file is not as expected."""

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

LARGEST = 1 << 20
"""Default of the maximum size of a file in bytes. This package's files have a few thousand."""
DEEPEST = 40
"""Maximum nesting depth. Python's JSON functions fail at a few hundred levels."""
Kinds = tuple[type, ...]
"""The allowed types of a value."""


class BadJson(ValueError):
    """Error: a file or text is not the expected JSON. Only errors of `read_object` name the file."""


class MissingJson(BadJson):
    """Error: a JSON file does not exist."""


def parse(content: bytes | str) -> Any:
    """Parse strict JSON in UTF-8: no NaN, no infinity (such as 1e999), no repeated keys. Raises BadJson."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        return json.loads(
            text, parse_constant=parse_finite, parse_float=parse_finite, object_pairs_hook=require_unique_keys
        )
    except RecursionError as error:
        raise BadJson("it is nested too deeply") from error
    except ValueError as error:
        raise BadJson(f"it is not JSON: {error}") from error


def parse_finite(text: str) -> float:
    """Parse a number of JSON; raise ValueError if it is not finite: `NaN`, `Infinity`, or one as large as 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:50]} is not a finite number")
    return number


def require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its (key, value) pairs; raise ValueError if a key is repeated."""
    by_key = dict(pairs)
    if len(by_key) != len(pairs):
        raise ValueError("a key is repeated")
    return by_key


def parse_object(content: bytes | str, kinds: Mapping[str, Kinds] | None = None) -> dict[str, Any]:
    """Parse a JSON object and check the types of its values.

    Args:
        kinds: the allowed types of each key's value; None: any. With `type(None)` the key may be missing. An integer,
            of at most 63 bits, is also allowed where a float is; True and False are no numbers.

    Raises:
        BadJson: the content is not a JSON object, is nested too deeply, or has a value of another type.
    """
    parsed = require_kinds(parse(content), kinds or {})
    if not is_flat(parsed):
        raise BadJson(f"it has more than {DEEPEST} levels")
    return parsed


def require_kinds(parsed: Any, kinds: Mapping[str, Kinds]) -> dict[str, Any]:
    """Check that a parsed JSON value is an object whose values have the types in `kinds` (key -> allowed types), and
    return it. If `type(None)` is among the types, the key may be missing. An integer is also allowed where a float is,
    and has at most 63 bits; True and False are no numbers. Raises BadJson, which names the wrong key."""
    if not isinstance(parsed, dict):
        raise BadJson(f"it holds a {type(parsed).__name__}, not an object")
    for key, allowed in kinds.items():
        value = parsed.get(key)
        is_allowed = type(value) in allowed or (type(value) is int and float in allowed)
        if not is_allowed or (type(value) is int and abs(value) >= 1 << 63):
            wanted = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
            raise BadJson(f"its {key!r} is not {wanted}")
    return parsed


def kinds_of(schema: type) -> dict[str, Kinds]:
    """Return the allowed types (`Kinds`) of a JSON object with the fields of a dataclass as keys, from annotations such
    as `int`, `float | None`, or `list[str]`, which allows any list."""
    kinds = {}
    for field in fields(schema):
        choices = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        kinds[field.name] = tuple(get_origin(choice) or choice for choice in choices)
    return kinds


def is_flat(tree: Any) -> bool:
    """Return whether a JSON value is nested at most `DEEPEST` levels deep. Does not recurse."""
    inside = [tree]
    for _ in range(DEEPEST):
        nested = [node for node in inside if isinstance(node, dict | list)]
        if not nested:
            return True
        inside = [value for node in nested for value in (node.values() if isinstance(node, dict) else node)]
    return not any(isinstance(node, dict | list) for node in inside)


def read_object(path: Path, kinds: Mapping[str, Kinds] | None = None, largest: int = LARGEST) -> dict[str, Any]:
    """Read a JSON object of at most `largest` bytes from a file, and check its values: `kinds` has the allowed types by
    key (see `parse_object`).

    Raises:
        MissingJson: the file does not exist.
        BadJson: the file is not as expected. The message of both errors names the file.
    """
    try:
        return parse_object(read_bytes(path, largest), kinds)
    except BadJson as error:
        raise type(error)(f"{path} cannot be read: {error}") from error


def read_bytes(path: Path, largest: int) -> bytes:
    """Return the content of a regular file. Raises BadJson, without the file's name, if it cannot be read, is larger
    than `largest`, or is a pipe or device (this does not block)."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadJson("it is not a regular file")
            if status.st_size > largest:
                raise BadJson(f"it has {status.st_size:,} bytes, more than the {largest:,} allowed here")
            return file.read(largest + 1)
    except FileNotFoundError as error:
        raise MissingJson("there is no such file") from error
    except OSError as error:
        raise BadJson(error.strerror or str(error)) from error


def object_or_none(
    path: Path, kinds: Mapping[str, Kinds] | None = None, largest: int = LARGEST
) -> dict[str, Any] | None:
    """Read a JSON object of at most `largest` bytes from a file, and check its values: `kinds` has the allowed types by
    key (see `parse_object`). Return None if the file is missing, cannot be read or is not as expected."""
    try:
        return read_object(path, kinds, largest)
    except BadJson:
        return None
