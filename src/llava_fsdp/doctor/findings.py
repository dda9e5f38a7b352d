"""Results of probes. Imports no torch, which may be what is broken."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "OK"
    WARN = "WARN"
    """The training will run, but slower or not for certain."""
    FAIL = "FAIL"
    """The training that was described will not run."""


@dataclass(frozen=True)
class Finding:
    """A row of the report."""

    level: Level
    name: str
    """The thing that was examined."""
    result: str
    cure: str = ""
    """One line: what to do. Empty if nothing is wrong."""


def ok(name: str, result: str) -> Finding:
    return Finding(Level.OK, name, result)


def warn(name: str, result: str, cure: str) -> Finding:
    return Finding(Level.WARN, name, result, cure)


def fail(name: str, result: str, cure: str) -> Finding:
    return Finding(Level.FAIL, name, result, cure)


def output_of(command: Sequence[str], seconds: float) -> str | None:
    """Standard output of a program; None if it is missing, fails, or does not end in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def result_and_cure(error: Exception) -> tuple[str, str]:
    """Split an error's message into what is wrong and the cure: the text after the last semicolon, or from `pip` on."""
    for sign in ("; ", ": pip "):
        result, found, cure = str(error).rpartition(sign)
        if found:
            return result, sign[2:] + cure
    return str(error), ""
