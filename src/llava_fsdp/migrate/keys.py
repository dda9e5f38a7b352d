"""What becomes of one key of another system's configuration, and the rules that most keys share."""

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
    """What it becomes, or why nothing does."""
    resolved: object = None
    """What `auto` stands for, where the value is `auto`."""


@dataclass(frozen=True)
class Row:
    """One key of one input file or command."""

    source: str
    """The file that has it, or where its default comes from."""
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
    """Two inputs contradict each other, which the original does not accept."""
    return unsupported(f"{REFUSED}: {why}; give the same value in both")


@dataclass(frozen=True)
class Context:
    """What a rule may look at."""

    run: Run
    decided: Mapping[str, object]
    """Every override of the run."""
    omitted: frozenset[str] = frozenset()
    """Overrides that the command leaves out, because the stage or its recipe has the same value."""
    key: str = ""
    """The key that the rule is applied to."""
    mentioned: set[str] = field(default_factory=set)
    """Overrides that the rule's text names."""

    def tell(self, key: str) -> str:
        """`key=value` of an override, for a rule's text."""
        self.mentioned.add(key)
        if key not in self.decided:
            return f"{key} stays as the stage has it"
        same = " (the recipe's own)" if key in self.omitted else ""
        return f"{key}={written(self.decided[key])}{same}"


Rule = Outcome | Callable[[Context, object], Outcome]


def outcome(rule: object, context: Context, value: object) -> Outcome:
    if isinstance(rule, Outcome):
        return rule
    assert callable(rule), rule
    result = rule(context, value)
    assert isinstance(result, Outcome), result
    return result


def written(value: object) -> str:
    """A value in Hydra's grammar."""
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
    """The rows of a table that share a rule; names are separated by blanks."""
    return {prefix + name: rule for name in names.split()}


@dataclass(frozen=True)
class To:
    """Mapped to these overrides."""

    keys: tuple[str, ...]
    note: str = ""

    def __call__(self, context: Context, value: object) -> Outcome:
        text = ", ".join(context.tell(key) for key in self.keys)
        return mapped(text + (f": {self.note}" if self.note else ""))


def to(*keys: str, note: str = "") -> To:
    return To(keys, note)


@dataclass(frozen=True)
class Where:
    """Mapped to an override where the run has it; else another rule."""

    key: str
    otherwise: Rule
    note: str = ""

    def __call__(self, context: Context, value: object) -> Outcome:
        if self.key not in context.decided:
            return outcome(self.otherwise, context, value)
        return To((self.key,), self.note)(context, value)


@dataclass(frozen=True)
class Usual:
    """Implied for these values; any other value has no equivalent here."""

    values: tuple[object, ...]
    text: str
    why: str

    def __call__(self, context: Context, value: object) -> Outcome:
        if value in self.values or plain(value) in self.values:
            return implied(self.text)
        return unsupported(self.why)


def off(why: str, *usual: object) -> Usual:
    """A feature that is off by default and has no equivalent here."""
    return Usual((None, False, "", "no", "none", {}, [], *usual), OFF.text, why)


def on(why: str) -> Usual:
    """A feature that is on by default, and always on here."""
    return Usual((None, True), "as here", why)
