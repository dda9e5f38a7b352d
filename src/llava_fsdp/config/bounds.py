"""Checks of the value of a single configuration key, which the classes in `keys` share."""

import math
from dataclasses import fields
from typing import Any

from llava_fsdp.runtime.errors import ConfigError

AUTO = "auto"
TAKES = "takes"
"""Name in the metadata of a field: description of the values that the key accepts, where its type does not tell."""


def at_least(key: str, value: int | None, least: int, why: str = "") -> None:
    """Raise ConfigError if `value`, the value of the configuration key `key`, is below `least`. None is accepted.
    `why`: text to append to the error message, such as the reason for the bound."""
    if value is not None and value < least:
        raise ConfigError(f"{key}={value} must be at least {least}" + (f": {why}" if why else ""))


def above_zero(key: str, value: float | None, hint: str = "") -> None:
    """Raise ConfigError if `value`, the value of the configuration key `key`, is not a finite number above 0. None is
    accepted. `hint`: text to append to the error message, such as another value that is accepted."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{key}={value} must be a finite number above 0{hint}")


def refuse_texts_except_auto(keys: Any, prefix: str = "") -> None:
    """Raise ConfigError if the value of a key that accepts no text but `auto` is another text. The fields of such keys
    have a description of their values (`TAKES`) in their metadata.

    Args:
        keys: object of the class that has the keys.
        prefix: text to put before the names of the keys, such as `parallel.`.
    """
    for key in fields(keys):
        value = getattr(keys, key.name)
        if TAKES in key.metadata and isinstance(value, str) and value != AUTO:
            raise ConfigError(f"{prefix}{key.name}={value} must be {key.metadata[TAKES]}")
