"""What a key takes, in words, by the type of its field: for messages about values of another type."""

import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

WORDS = {
    "compile": "true, false or auto",
    "tokens_per_micro_batch": "a number of positions, auto or null",
    "profile_steps": "the first and the last step to profile, as [10, 12], or null",
}
"""Of keys whose type says too little."""
PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
MANY = {int: "whole numbers", float: "numbers", str: "texts"}


def takes(schema: Any, key: str) -> str | None:
    """What the key of a schema takes; None where it is none, or one whose name the user chose.

    Args:
        key: dotted, with `[place]` behind a list's.
    """
    found: Any = schema
    name, *places = key.split("[")
    for part in name.split("."):
        own = {field.name: field.type for field in fields(found)} if is_dataclass(found) else {}
        if part not in own:
            return None
        found = own[part]
    if name in WORDS and not places:
        return WORDS[name]
    for _ in places:
        lists = [one for one in alternatives(found) if typing.get_origin(one) is list]
        if not lists:
            return None
        found = typing.get_args(lists[0])[0]
    return described(found)


def alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def described(kind: Any) -> str | None:
    found = [describe_one(one) for one in alternatives(kind)]
    return " or ".join(one for one in found if one is not None) if None not in found else None


def describe_one(kind: Any) -> str | None:
    if kind is types.NoneType:
        return "null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of [{', '.join(kind.__members__)}]"
    if typing.get_origin(kind) is list:
        (own,) = typing.get_args(kind)
        if typing.get_origin(own) is list:
            return f"a list of lists of {MANY.get(typing.get_args(own)[0], 'values')}"
        if isinstance(own, type) and issubclass(own, Enum):
            return f"a list of names of [{', '.join(own.__members__)}]"
        return f"a list of {MANY.get(own, 'values')}"
    return PLAIN.get(kind)
