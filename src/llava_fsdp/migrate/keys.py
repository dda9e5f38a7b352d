"""What one key of another system's configuration becomes in llava_fsdp, and the rules that most keys share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from llava_fsdp.migrate.source_run import Run, plain


class Verdict(Enum):
    mapped = "mapped"
    implied = "implied"
    unsupported = "not supported"
    no_effect = "no effect in the original"


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    text: str
    """What the key becomes, or why it has no equivalent."""
    resolved: object = None
    """What `auto` stands for, if the key's value is `auto`."""


@dataclass(frozen=True)
class Row:
    """A row of the printed table: one key of an input file or command."""

    source: str
    """The file that has the key, or where its default comes from."""
    key: str
    value: object
    outcome: Outcome
    known: bool = True

    @property
    def verdict(self) -> Verdict:
        return self.outcome.verdict

    @property
    def text(self) -> str:
        return self.outcome.text


def mapped(text: str, resolved: object = None) -> Outcome:
    return Outcome(Verdict.mapped, text, resolved)


def implied(text: str, resolved: object = None) -> Outcome:
    return Outcome(Verdict.implied, text, resolved)


def unsupported(text: str) -> Outcome:
    return Outcome(Verdict.unsupported, text)


def no_effect(text: str) -> Outcome:
    return Outcome(Verdict.no_effect, text)


OFF = implied("off, as here")
REFUSED = "the original refuses to start"


def refused(why: str) -> Outcome:
    """For a value that contradicts another input, so that the original would not start."""
    return unsupported(f"{REFUSED}: {why}; give the same value in both")


@dataclass(frozen=True)
class Context:
    """What a rule may use."""

    run: Run
    decided: Mapping[str, object]
    """All Hydra overrides of the training."""
    omitted: frozenset[str] = frozenset()
    """Overrides that are left out of the command, because the stage or its recipe has the same value."""
    key: str = ""
    """The key to which the rule is applied."""
    mentioned: set[str] = field(default_factory=set)
    """The overrides that the rule's text mentions."""

    def tell(self, key: str) -> str:
        """`key=value` of an override, for a rule's text."""
        self.mentioned.add(key)
        if key not in self.decided:
            return f"{key} stays as the stage has it"
        same = " (the recipe's own)" if key in self.omitted else ""
        return f"{key}={written(self.decided[key])}{same}"


Rule = Outcome | Callable[[Context, object], Outcome]


def outcome(rule: object, context: Context, value: object) -> Outcome:
    result = rule(context, value) if callable(rule) else rule
    assert isinstance(result, Outcome), rule
    return result


def written(value: object) -> str:
    """A value as text in the syntax of Hydra overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        text = repr(value) if abs(value) < 1e7 or value != int(value) else f"{value:g}"
        return (text if float(text) == value else repr(value)).replace("e-0", "e-").replace("e+0", "e+")
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return str(value)


def each(rule: Rule, names: str, prefix: str = "") -> dict[str, Rule]:
    """The same rule for several keys, separated by spaces in `names`."""
    return {prefix + name: rule for name in names.split()}


def to(*keys: str, note: str = "") -> Rule:
    """Rule for a key that becomes these overrides."""

    def rule(context: Context, value: object) -> Outcome:
        text = ", ".join(context.tell(key) for key in keys)
        return mapped(text + (f": {note}" if note else ""))

    return rule


@dataclass(frozen=True)
class Where:
    """Rule: the key becomes an override if the training has it; otherwise another rule applies."""

    key: str
    otherwise: Rule
    note: str = ""

    def __call__(self, context: Context, value: object) -> Outcome:
        return outcome(to(self.key, note=self.note) if self.key in context.decided else self.otherwise, context, value)


@dataclass(frozen=True)
class Usual:
    """Rule: for these values nothing needs to be set; any other has no equivalent here."""

    values: tuple[object, ...]
    text: str
    why: str

    def __call__(self, context: Context, value: object) -> Outcome:
        if value in self.values or plain(value) in self.values:
            return implied(self.text)
        return unsupported(self.why)


def off(why: str, *usual: object) -> Usual:
    """Rule for a feature that is off by default and has no equivalent here."""
    return Usual((None, False, "", "no", "none", {}, [], *usual), OFF.text, why)


def on(why: str) -> Usual:
    """Rule for a feature that is on by default, and always on here."""
    return Usual((None, True), "as here", why)
