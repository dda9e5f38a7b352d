"""The result of a check of `doctor`. Imports no torch, which may itself be broken."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "OK"
    WARN = "WARN"
    """The training runs, but more slowly; or it may fail."""
    FAIL = "FAIL"
    """The training cannot run with the given configuration."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: a row of the report that `doctor` prints."""

    level: Level
    name: str
    result: str
    cure: str = ""
    """Advice in one line; empty if nothing is wrong."""


def ok(name: str, result: str) -> Finding:
    return Finding(Level.OK, name, result)


def warn(name: str, result: str, cure: str) -> Finding:
    return Finding(Level.WARN, name, result, cure)


def fail(name: str, result: str, cure: str) -> Finding:
    return Finding(Level.FAIL, name, result, cure)


def output_of(command: Sequence[str], seconds: float) -> str | None:
    """Return the standard output of a program; None if it is missing, fails, or runs longer than `seconds`."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def result_and_cure(error: Exception | str) -> tuple[str, str]:
    """Split the message of an error or a warning into the problem and the advice. The advice is what follows the last
    semicolon or, without semicolons, the last colon if it begins with `pip`; it is empty if there is no such sign."""
    for sign in ("; ", ": pip "):
        result, separator, cure = str(error).rpartition(sign)
        if separator:
            return result, sign[2:] + cure  # `pip ` belongs to the advice
    return str(error), ""


def finding_of(level: Level, name: str, message: Exception | str) -> Finding:
    """Return a finding with the problem and the advice in the message of an error or a warning."""
    result, cure = result_and_cure(message)
    return Finding(level, name, result, cure)
