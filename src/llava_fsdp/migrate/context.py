"""What a table's rule may look at, and the rules that most keys share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llava_fsdp.migrate.bash_script import shown
from llava_fsdp.migrate.key_outcome import Outcome, implied, mapped, unsupported
from llava_fsdp.migrate.source_run import Run, plain


@dataclass(frozen=True)
class Context:
    run: Run
    decided: Mapping[str, object]
    """Every override of the run."""
    omitted: frozenset[str] = field(default_factory=frozenset)
    """Those that the command leaves out, because the stage or the recipe says the same."""
    key: str = ""
    """The key that is asked about."""
    told: set[str] = field(default_factory=set)
    """Overrides that the answer has spoken of."""

    def tell(self, key: str) -> str:
        self.told.add(key)
        if key not in self.decided:
            return f"{key} stays as the stage has it"
        same = " (the recipe's own)" if key in self.omitted else ""
        return f"{key}={written(self.decided[key])}{same}"


Rule = Callable[[Context, object], Outcome]


def outcome(rule: object, context: Context, value: object) -> Outcome:
    if isinstance(rule, Outcome):
        return rule
    assert callable(rule), rule
    result = rule(context, value)
    assert isinstance(result, Outcome), result
    return result


def written(value: object) -> str:
    """A value as Hydra's grammar has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        text = repr(value) if abs(value) < 1e7 or value != int(value) else f"{value:g}"
        return (text if float(text) == value else repr(value)).replace("e-0", "e-").replace("e+0", "e+")
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return shown(value)


def to(*keys: str, note: str = "") -> "To":
    return To(keys, note)


@dataclass(frozen=True)
class To:
    """Mapped to these overrides."""

    keys: tuple[str, ...]
    note: str = ""

    def __call__(self, context: Context, value: object) -> Outcome:
        text = ", ".join(context.tell(key) for key in self.keys)
        return mapped(text + (f": {self.note}" if self.note else ""))


@dataclass(frozen=True)
class Usual:
    """These values say what is so here too; any other has no equal."""

    values: tuple[object, ...]
    text: str
    why: str

    def __call__(self, context: Context, value: object) -> Outcome:
        if value in self.values or plain(value) in self.values:
            return implied(self.text)
        return unsupported(self.why)


def off(why: str, *usual: object) -> Usual:
    """Something that is off by default and has no equal here."""
    return Usual((None, False, "", "no", "none", {}, [], *usual), "off, as here", why)


def on(why: str) -> Usual:
    """Something that is on by default, and always on here."""
    return Usual((None, True), "as here", why)
