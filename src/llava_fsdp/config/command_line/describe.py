"""Describe the values that a configuration key accepts, from the type of its field, for error messages and help."""

import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from llava_fsdp.config.bounds import TAKES

PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
MANY = {int: "whole numbers", float: "numbers", str: "texts"}


def takes(schema: Any, key: str) -> str | None:
    """Return a description of the values that a configuration key accepts, such as "a whole number or null". Return
    None if `key` is a group of keys, or contains a name that the user chooses. `schema`: dataclass that has the key.
    `key`: its dotted name, such as `optim.lr`; followed by `[index]` for an item of a list."""
    kind, words = schema, None
    name, *indices = key.split("[")
    for part in name.split("."):
        keys = {key.name: key for key in fields(kind)} if is_dataclass(kind) else {}
        if part not in keys:
            return None
        kind, words = keys[part].type, keys[part].metadata.get(TAKES)
    if words and not indices:
        return words
    for _ in indices:
        lists = [one for one in alternatives(kind) if typing.get_origin(one) is list]
        if not lists:
            return None
        kind = typing.get_args(lists[0])[0]
    texts = [describe_one(one) for one in alternatives(kind)]
    return None if None in texts else " or ".join(map(str, texts))


def alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def describe_one(kind: Any) -> str | None:
    """Return the values that a type allows, in words; None if the type has no description."""
    if kind is types.NoneType:
        return "null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of [{', '.join(kind.__members__)}]"
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        if typing.get_origin(item) is list:
            return f"a list of lists of {MANY.get(typing.get_args(item)[0], 'values')}"
        if isinstance(item, type) and issubclass(item, Enum):
            return f"a list of names of [{', '.join(item.__members__)}]"
        return f"a list of {MANY.get(item, 'values')}"
    return PLAIN.get(kind)
