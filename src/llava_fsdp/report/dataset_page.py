"""Report page of a dataset: its sources, the lengths of its samples, what various maximum lengths would cut off, and
which records have problems."""

from collections.abc import Iterable, Iterator
from html import escape
from itertools import dropwhile
from typing import Any

from llava_fsdp.report.html import heading, section, table, whole_page
from llava_fsdp.report.svg import Bar, draw_bars


def dataset_page(report: dict[str, Any]) -> str:
    """Return the report page of a dataset as HTML. `report` is the content of its report.json."""
    out = report["left_out"]
    counts = f"{report['records']:,} records, {report['kept']:,} kept, {out['wrong']:,} skipped as wrong, "
    parts = [
        heading("dataset", "Dataset", f"{counts}{out['too_long']:,} as too long."),
        section("Settings", table(["setting", "value"], report["settings"].items())),
        section("Sources", table(spaced(report["sources"][0]), (source.values() for source in report["sources"]))),
        section("Lengths", *lengths(report["lengths"])),
        section("What a maximum length costs", *truncation(report)),
        section("Problems", *problems(report["problems"])),
    ]
    return whole_page("dataset", "".join(parts))


def lengths(statistics: dict[str, Any]) -> Iterator[str]:
    if not statistics["samples"]:
        yield "<p>There are no samples.</p>\n"
    else:
        bars = [
            Bar(str(bar["from"]), [bar["records"]], [f"{bar['from']} to {bar['to']}: {bar['records']:,}"])
            for bar in dropwhile(lambda bar: not bar["records"], statistics["histogram"])
        ]
        yield draw_bars("Tokens of a sample, image tokens included, before it is truncated", "records", bars)
        names = ["mean", *(f"{p} %" for p in statistics["percentiles"])]
        yield table(names, [[f"{statistics['mean']:.1f}", *statistics["percentiles"].values()]])


def truncation(report: dict[str, Any]) -> Iterator[str]:
    names = ["records_cut", "positions_lost", "label_tokens_lost", "left_without_labels"]
    samples = max(1, report["lengths"]["samples"])
    if not any(row[name] for row in report["truncation"] for name in names):
        least = min((row["max_length"] for row in report["truncation"]), default=0)
        yield f"<p>Nothing is cut off, also with data.max_length={least}.</p>\n"
        return
    labels = {"records_cut": "truncated", "left_without_labels": "left without label tokens"}
    bars = []
    for row in report["truncation"]:
        texts = [f"{text}: {row[name]:,}" for name, text in labels.items()]
        bars.append(Bar(str(row["max_length"]), [100 * row[name] / samples for name in labels], texts))
    yield draw_bars("Records by data.max_length", "% of records", bars, list(labels.values()))
    rows = ([row["max_length"], *(row[n] for n in names)] for row in report["truncation"])
    yield table(["data.max_length", *spaced(names)], rows)


def problems(kinds: dict[str, Any]) -> Iterator[str]:
    if not kinds:
        yield "<p>None.</p>\n"
        return
    yield table(
        ["kind", "records", "what becomes of them", "meaning"],
        ([kind, row["records"], "kept" if row["kept"] else "skipped", row["meaning"]] for kind, row in kinds.items()),
    )
    names = ["source", "line", "index", "id", "reason"]
    for kind, row in kinds.items():
        more = f", of which the first {len(row['first']):,} are shown; all are in problems.jsonl"
        yield f"<details><summary>{escape(kind)}: {row['records']:,}{more if row['not_shown'] else ''}</summary>\n"
        yield table(names, ([record[name] for name in names] for record in row["first"])) + "</details>\n"


def spaced(names: Iterable[str]) -> list[str]:
    return [name.replace("_", " ") for name in names]
