"""Types and shared rules of `migrate`, which translates trainings of other systems. A rule is a function that says what
one key or flag of another system becomes in llava_fsdp (an Outcome), or an Outcome that is always the same."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from llava_fsdp.migrate.source_run import Run, plain


class Verdict(Enum):
    """Whether and how a key or flag of another system can be translated to llava_fsdp."""

    mapped = "mapped"
    """The key becomes an override of llava_fsdp."""
    implied = "implied"
    """llava_fsdp does the same without an override."""
    unsupported = "not supported"
    no_effect = "no effect in the original"


@dataclass(frozen=True)
class Outcome:
    """What a key or flag of another system becomes in llava_fsdp: a verdict, and an explanation for the user."""

    verdict: Verdict
    text: str
    """What the key becomes in llava_fsdp, or why llava_fsdp has no equivalent."""
    resolved: object = None
    """If the key's value is `auto`: the value that it stands for; else None."""


@dataclass(frozen=True)
class Row:
    """A row of the table that `migrate`, which translates trainings of other systems, prints: one key of an input file
    or one flag of a command, and what it becomes in llava_fsdp."""

    source: str
    """File that sets the key; if no file sets it, a remark on where its default value comes from."""
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
    """Return what `migrate` reports for a value that contradicts another input file, so that the original program would
    refuse to start: it is not supported.

    Args:
        why: which value the other file has.
    """
    return unsupported(f"{REFUSED}: {why}; give the same value in both")


@dataclass(frozen=True)
class Context:
    """What a rule of `migrate`, a function that says what a key of another system becomes in llava_fsdp, knows besides
    the key's value: the key, and the whole training that is migrated."""

    run: Run
    decided: Mapping[str, object]
    """All Hydra overrides with which llava_fsdp does the training that is being migrated."""
    omitted: frozenset[str] = frozenset()
    """Keys of overrides in `decided` that the printed command leaves out, because its stage has these values by
    default."""
    key: str = ""
    """Key (of the other system) about which the rule decides."""
    mentioned: set[str] = field(default_factory=set)
    """Keys of the llava_fsdp overrides that a rule has mentioned in its text; `tell` adds them."""

    def tell(self, key: str) -> str:
        """Return the text `key=value` for a message to the user: the value that the migrated training has in llava_fsdp
        for the configuration key `key`. The key is added to `mentioned`."""
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
    """Return a setting's value as text in the syntax of Hydra overrides, such as `null` for None."""
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


def rules(rule: Rule, names: str, prefix: str = "") -> dict[str, Rule]:
    """Return a table that has the same rule for several keys (or flags) of another system.

    Args:
        rule: what the keys become in llava_fsdp: a function that decides it, or a fixed result.
        names: the keys, separated by spaces.
        prefix: text in front of every key.
    """
    return {prefix + name: rule for name in names.split()}


def becomes(*keys: str, note: str = "") -> Rule:
    """Return a rule of `migrate`, a function that says what a key of another system becomes in llava_fsdp: here one or
    more Hydra overrides.

    Args:
        keys: keys of the overrides.
        note: remark that is printed behind the overrides.
    """

    def rule(context: Context, value: object) -> Outcome:
        text = ", ".join(context.tell(key) for key in keys)
        return mapped(text + (f": {note}" if note else ""))

    return rule


@dataclass(frozen=True)
class IfDecided:
    """Rule of `migrate`, a function that says what a key of another system becomes in llava_fsdp: here a Hydra
    override, provided that the migrated training needs this override.

    Attributes:
        key: key of the override.
        otherwise: rule for the case that the training does not need the override.
        note: remark that is printed behind the override.
    """

    key: str
    otherwise: Rule
    note: str = ""

    def __call__(self, context: Context, value: object) -> Outcome:
        return outcome(
            becomes(self.key, note=self.note) if self.key in context.decided else self.otherwise, context, value
        )


@dataclass(frozen=True)
class OnlyIf:
    """Rule of `migrate`, a function that says what a key of another system becomes in llava_fsdp, for a key of which
    llava_fsdp supports only some values.

    Attributes:
        values: supported values, which need no override.
        text: message for a supported value.
        why: message for any other value: why it is not supported.
    """

    values: tuple[object, ...]
    text: str
    why: str

    def __call__(self, context: Context, value: object) -> Outcome:
        if value in self.values or plain(value) in self.values:
            return implied(self.text)
        return unsupported(self.why)


def only_off(why: str, *usual: object) -> OnlyIf:
    """Return a rule of `migrate`, a function that says what a key of another system becomes in llava_fsdp, for a
    feature that is off by default and that llava_fsdp does not have.

    Args:
        why: why the feature is not supported, or what to use in its place.
        usual: values that mean that the feature is off, besides false, empty and `none`.
    """
    return OnlyIf((None, False, "", "no", "none", {}, [], *usual), OFF.text, why)


def only_on(why: str) -> OnlyIf:
    """Return a rule of `migrate`, a function that says what a key of another system becomes in llava_fsdp, for a
    feature that is on by default and that llava_fsdp always has on.

    Args:
        why: message for a value that switches the feature off.
    """
    return OnlyIf((None, True), "as here", why)
