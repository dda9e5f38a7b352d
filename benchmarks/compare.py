"""Is a result slower than an earlier one of the same benchmark? Seconds.

    python benchmarks/compare.py OLD.json NEW.json [--limit 1.05] [--only REGEX] [--across]

Compares every time and rate that both contain. Exit code 1: something is past the limit; 2: the two cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from bench import Report, show

RATE = re.compile(r"_per_(\w+_)?second|_rate$|^rates?$")
TIME = re.compile(r"seconds$|^(cpu|wall)(_s)?$|_ms$")
DERIVED = re.compile(r"ratio|_to_ddp$|_is_times$")
ASIDE = {"options", "machine", "goals", "findings", "equality", "published", "error", "versions", "environment"}
"""Parts of a result in which nothing was timed, or that say again what its rows hold."""
UNMEASURED = {"out", "folder", "scratch", "work", "timeout", "readme"}
"""Options that change nothing of what is measured."""
NAMING = {
    "accumulation", "at", "batch", "labels", "layers", "limited", "pictures", "ranks", "records", "seed", "trains",
    "vocabulary", "width", "workers", "zero",
}  # fmt: skip
"""Numbers and switches that say what a row is of; all others are what was found."""
FOUND = {"why"}
"""Texts of a row that are an outcome."""
PROVENANCE = ("date", "commit", "python", "torch", "transformers")


def main() -> None:
    options = parse()
    old, new = (read(path) for path in (options.old, options.new))
    if apart := differences(old, new, options.across):
        refuse(*apart)
    compared, skipped = compare(old, new, re.compile(options.only))
    if not compared:
        refuse("they have no time and no rate in common" + (f" that matches {options.only}" if options.only else ""))
    sides = [{name: report.get(name) for name in PROVENANCE} | report.get("versions", {}) for report in (old, new)]
    names = dict.fromkeys(name for side in sides for name in side)
    show(script_of(new), ("", "old", "new"), [(n, *(str(s.get(n) or "not said") for s in sides)) for n in names])
    slowest_first = sorted(compared.items(), key=lambda item: -item[1][2])
    lines = [(path.replace("[", r"\["), f"{was:.4g}", f"{now:.4g}", f"{times:.3f}")
             for path, (was, now, times) in slowest_first]  # fmt: skip
    show("times as slow", ("what", "old", "new", "times as slow"), lines)
    for name in skipped:
        print(f"not compared: {name}")
    slower = [path for path, (_, _, times) in compared.items() if times > options.limit]
    print(f"{len(compared)} compared, {len(slower)} more than {options.limit:g} times as slow")
    sys.exit(1 if slower else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--limit", type=float, default=1.05, help="times as slow that is still good; default 1.05")
    parser.add_argument("--only", default="", help="a regular expression of the paths to compare: cpu_seconds.min")
    parser.add_argument("--across", action="store_true", help="the two may be of different machines")
    options = parser.parse_args()
    if not options.limit >= 1:
        parser.error(f"--limit {options.limit}: it is how many times as slow is still good, at least 1")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only}: {error}")
    return options


def read(path: Path) -> Report:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse(f"{path} cannot be read: {error}")
    if not isinstance(report, dict) or not {"machine", "command", "options"} <= report.keys():
        refuse(f"{path} is no result of a benchmark: it needs `machine`, `command` and `options`")
    return report


def script_of(report: Report) -> str:
    return next((Path(word).name for word in report["command"].split() if word.endswith(".py")), report["command"])


def refuse(*reasons: str) -> NoReturn:
    print("\n".join(f"cannot compare: {reason}" for reason in reasons), file=sys.stderr)
    sys.exit(2)


def differences(old: Report, new: Report, across: bool) -> list[str]:
    """Why two results must not be compared; empty if they may.

    Args:
        across: results of different machines may be compared.
    """
    if script_of(old) != script_of(new):
        return [f"they are of different benchmarks: {script_of(old)} and {script_of(new)}"]
    found = []
    if old["machine"] != new["machine"] and not across:
        found.append(f"they are of different machines, {old['machine']} and {new['machine']}; --across compares them")
    for name in ("ranks", "precision"):
        if old.get(name) != new.get(name):
            found.append(f"{name} was {old.get(name)} and is {new.get(name)}")
    before, after = old["options"], new["options"]
    for name in sorted((before.keys() | after.keys()) - UNMEASURED):
        was, is_ = before.get(name), after.get(name)
        chooses = all(own is None or isinstance(own, list) for own in (was, is_))  # rows: what both have is compared
        if was != is_ and not chooses:
            found.append(f"option {name} was {was} and is {is_}")
    return found


Compared = dict[str, tuple[float, float, float]]
"""path -> old, new, and how many times as slow"""


def compare(old: Report, new: Report, only: re.Pattern[str]) -> tuple[Compared, list[str]]:
    """What both hold, and the paths that only one holds or that are no numbers above 0."""
    before, after = (dict(measured(report)) for report in (old, new))
    compared: Compared = {}
    skipped = []
    for path in [*before, *(p for p in after if p not in before)]:
        if not only.search(path):
            continue
        if path not in before or path not in after:
            skipped.append(f"{path} is only in {'NEW' if path in after else 'OLD'}")
            continue
        (was, is_rate), (now, _) = before[path], after[path]
        if not all(math.isfinite(v) and v > 0 for v in (was, now)):
            skipped.append(f"{path}: {was} and {now}")
            continue
        compared[path] = was, now, was / now if is_rate else now / was
    return compared, skipped


def measured(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[float, bool]]]:
    """(path, (value, whether it is a rate)) of everything that is a time or a rate.

    A list of numbers, which are repeats, counts as its best one; beside "min" the list "all" is not looked at.
    """
    if isinstance(value, dict):
        for name, own in value.items():
            if not (not path and name in ASIDE) and name != "all":
                yield from measured(own, (*path, str(name)))
    elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        for name, own in zip(names_of(value), value, strict=True):
            yield from measured(own, (*path, name))
    elif (is_rate := kind_of(path)) is not None:
        numbers = value if isinstance(value, list) else [value]
        if numbers and all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers):
            yield ".".join(path), (float((max if is_rate else min)(numbers)), is_rate)


def kind_of(path: tuple[str, ...]) -> bool | None:
    """Whether a path leads to a rate, where more is better; False: to a time; None: to neither."""
    for name in reversed(path):
        if DERIVED.search(name):
            return None
        if RATE.search(name):
            return True
        if TIME.search(name):
            return False
    return None


def names_of(rows: list[Report]) -> list[str]:
    """Rows by what they say they are of, whatever other rows there are: a part of a result is compared with all of it.

    Several of one name are told apart by their place among them, where both results hold as many.
    """
    names = [
        ", ".join(
            f"{k}={v}" if k in NAMING else str(v)
            for k, v in row.items()
            if k in NAMING or (isinstance(v, str) and k not in FOUND)
        )
        for row in rows
    ]
    total, seen = Counter(names), Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"[{name}]" if total[name] == 1 else f"[{name}; {seen[name]} of {total[name]}]")
    return found


if __name__ == "__main__":
    main()
