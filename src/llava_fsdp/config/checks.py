"""Checks of single values."""

from llava_fsdp.runtime.errors import ConfigError

AUTO = "auto"


def at_least(key: str, value: int, least: int, why: str = "") -> None:
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}" + (f": {why}" if why else ""))
