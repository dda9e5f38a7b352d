"""What becomes of one key of somebody else's configuration."""

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    mapped = "mapped"
    implied = "implied"
    unsupported = "not supported"
    no_effect = "no effect in the original"


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    text: str
    """What it becomes, or why nothing does."""
    resolved: object = None
    """What `auto` stands for, where it does."""


@dataclass(frozen=True)
class Row:
    """One key of one input, in the order of the input."""

    source: str
    """The file, and which of its commands; `default` for what the original would have taken."""
    key: str
    value: object
    verdict: Verdict
    text: str
    resolved: object = None
    known: bool = True


def mapped(text: str, resolved: object = None) -> Outcome:
    return Outcome(Verdict.mapped, text, resolved)


def implied(text: str, resolved: object = None) -> Outcome:
    return Outcome(Verdict.implied, text, resolved)


def unsupported(text: str, resolved: object = None) -> Outcome:
    return Outcome(Verdict.unsupported, text, resolved)


REFUSED = "the original refuses to start"


def refused(why: str) -> Outcome:
    """Two of its inputs contradict each other."""
    return unsupported(f"{REFUSED}: {why}; say the same in both")


def no_effect(text: str, resolved: object = None) -> Outcome:
    return Outcome(Verdict.no_effect, text, resolved)
