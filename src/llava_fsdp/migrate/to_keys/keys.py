"""Types and shared rules of `migrate`. A rule says what one key or flag of another system becomes in llava_fsdp: a
function that returns a Translation, or a Translation that is always the same."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from llava_fsdp.migrate.source.source_run import SourceRun, plain


class Verdict(Enum):
    """Whether and how a key or flag can be translated."""

    mapped = "mapped"
    """The key becomes an override."""
    implied = "implied"
    """llava_fsdp does the same without an override."""
    unsupported = "not supported"
    no_effect = "no effect in the original"


@dataclass(frozen=True)
class Translation:
    """What a key or flag becomes."""

    verdict: Verdict
    text: str
    """What the key becomes, or why llava_fsdp has no equivalent."""
    resolved: object = None
    """The value that a value `auto` stands for."""


@dataclass(frozen=True)
class TableRow:
    """A row of the printed table: one key of an input file or one flag of a command, and what it becomes."""

    source: str
    """File that sets the key; if no file sets it, a remark on where its default value comes from."""
    key: str
    value: object
    outcome: Translation
    known: bool = True

    @property
    def verdict(self) -> Verdict:
        return self.outcome.verdict

    @property
    def text(self) -> str:
        return self.outcome.text


def mapped(text: str, resolved: object = None) -> Translation:
    return Translation(Verdict.mapped, text, resolved)


def implied(text: str, resolved: object = None) -> Translation:
    return Translation(Verdict.implied, text, resolved)


def unsupported(text: str) -> Translation:
    return Translation(Verdict.unsupported, text)


def no_effect(text: str) -> Translation:
    return Translation(Verdict.no_effect, text)


OFF = implied("off, as here")
REFUSED = "the original refuses to start"


def refused(why: str) -> Translation:
    """Return a Translation for a value that contradicts another input file (`why`), so that the original would not
    start."""
    return unsupported(f"{REFUSED}: {why}; give the same value in both")


@dataclass(frozen=True)
class RuleContext:
    """What a rule knows besides the key's value."""

    run: SourceRun
    decided: Mapping[str, object]
    """All overrides with which llava_fsdp does the training that is being migrated."""
    omitted: frozenset[str] = frozenset()
    """Keys of overrides that the printed command leaves out, because its stage has these values by default."""
    key: str = ""
    """Key (of the other system) about which the rule decides."""
    mentioned: set[str] = field(default_factory=set)
    """Keys of the overrides that a rule has mentioned in its text; `text_of_override` adds them."""

    def text_of_override(self, key: str) -> str:
        """Return the override of a key as text, and add the key to `mentioned`: `key=value` with the value that the
        migrated training has (`decided`). A remark follows if the printed command leaves the override out, because it
        repeats the stage's value (`omitted`). The text is another one if the training has no override of the key."""
        self.mentioned.add(key)
        if key not in self.decided:
            return f"{key} stays as the stage has it"
        same = " (the recipe's own)" if key in self.omitted else ""
        return f"{key}={written(self.decided[key])}{same}"


Rule = Translation | Callable[[RuleContext, object], Translation]


def outcome(rule: object, context: RuleContext, value: object) -> Translation:
    """Return what a key of another system becomes: its `Rule` or, if that is a function, its result for `value`."""
    result = rule(context, value) if callable(rule) else rule
    assert isinstance(result, Translation), rule
    return result


def written(value: object) -> str:
    """Return a value in the syntax of Hydra overrides, such as `null` for None."""
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
    """Return a table that has the same rule for the keys in `names`, separated by spaces."""
    return {prefix + name: rule for name in names.split()}


def becomes(*keys: str, note: str = "") -> Rule:
    """Return a rule for a key that becomes one or more overrides; `note` is printed behind them."""

    def rule(context: RuleContext, value: object) -> Translation:
        text = ", ".join(context.text_of_override(key) for key in keys)
        return mapped(text + (f": {note}" if note else ""))

    return rule


@dataclass(frozen=True)
class IfDecided:
    """Rule for a key that becomes an override, provided that the migrated training needs it.

    Attributes:
        key: key of the override.
        otherwise: rule for the case that the training does not need the override.
        note: remark that is printed behind the override.
    """

    key: str
    otherwise: Rule
    note: str = ""

    def __call__(self, context: RuleContext, value: object) -> Translation:
        return outcome(
            becomes(self.key, note=self.note) if self.key in context.decided else self.otherwise, context, value
        )


@dataclass(frozen=True)
class OnlyIf:
    """Rule for a key of which llava_fsdp supports only some values.

    Attributes:
        values: supported values, which need no override.
        text: message for a supported value.
        why: why any other value is not supported.
    """

    values: tuple[object, ...]
    text: str
    why: str

    def __call__(self, context: RuleContext, value: object) -> Translation:
        if value in self.values or plain(value) in self.values:
            return implied(self.text)
        return unsupported(self.why)


def only_off(why: str, *usual: object) -> OnlyIf:
    """Return a rule for a feature that is off by default and that llava_fsdp does not have. `usual` are values that
    mean that it is off, besides false, empty and `none`."""
    return OnlyIf((None, False, "", "no", "none", {}, [], *usual), OFF.text, why)


def only_on(why: str) -> OnlyIf:
    """Return a rule for a feature that is on by default and that llava_fsdp always has on."""
    return OnlyIf((None, True), "as here", why)
