"""Writes the figures of docs/preferences.md from benchmarks/results: `python docs/make_preferences.py`."""

import sys
from statistics import median

from make_performance import newest, origin
from pages import DOCS, replaced, table

PAGE = DOCS / "preferences.md"
NAMES = {
    "a prompt for each answer": "a prompt for each answer",
    "data.prompt_once=true": "`data.prompt_once=true`",
    "trl": "trl's DPOTrainer: padded, a second model runs as the reference in each step",
}
MIB = 1 << 20


def costs() -> str:
    path, report = newest("pairs-cpu")
    rows = [
        [
            NAMES[row["peer"]],
            f"{row['tokens']:,.0f}",
            f"{row['images']}",
            f"{row['cpu_seconds']['median']:.2f}",
            f"{median(row['times_once']):.2f} x",
            f"{row['planned_bytes'] / MIB:,.0f} MiB" if row["planned_bytes"] else "",
        ]
        for row in report["rows"]
    ]
    heads = ["a step of {} pairs".format(report["options"]["pairs"]), "positions", "images encoded", "CPU seconds"]
    shown = table([*heads, "one prompt is", "planned memory"], rows, "lrrrrr")
    equal = f"The losses of all steps agree within {report['equality']['worst']:.0e}."
    return f"{shown}\n\n{equal} {origin(path, report)}"


def page() -> str:
    return replaced(PAGE.read_text(), "costs", costs())


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
