"""What a probe found. Imports nothing of torch's, which may be what is broken."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "OK"
    WARN = "WARN"
    """It will train, but slower, or not for certain."""
    FAIL = "FAIL"
    """The training that was described will not run."""


@dataclass(frozen=True)
class Finding:
    level: Level
    name: str
    """Of the thing that was looked at."""
    said: str
    """What was found."""
    cure: str = ""
    """One line: what to do. Empty where nothing is wrong."""


def ok(name: str, said: str) -> Finding:
    return Finding(Level.OK, name, said)


def warn(name: str, said: str, cure: str) -> Finding:
    return Finding(Level.WARN, name, said, cure)


def fail(name: str, said: str, cure: str) -> Finding:
    return Finding(Level.FAIL, name, said, cure)


def output_of(command: Sequence[str], seconds: float) -> str | None:
    """What a program prints; None where there is none, it fails, or it does not end in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def said_of(error: Exception) -> tuple[str, str]:
    """What an error's message says, and its cure: what stands behind the last semicolon, or `pip` at the end."""
    for sign in ("; ", ": pip "):
        said, found, cure = str(error).rpartition(sign)
        if found:
            return said, sign[2:] + cure
    return str(error), ""
