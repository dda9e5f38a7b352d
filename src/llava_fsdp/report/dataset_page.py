"""A report as one page of HTML that needs nothing else; what came from the data is escaped."""

from collections.abc import Iterator
from html import escape
from typing import Any

from llava_fsdp.report.html import spaced, table, ticks

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .5em 0 1.5em }
td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
td.r { font-size: 13px; overflow-wrap: anywhere }
.out { color: #a11 } summary { cursor: pointer }
"""
WIDTH, HEIGHT, LEFT, BELOW = 860, 240, 70, 40
COLOURS = ("#3565a8", "#c8742b", "#4a8f4a", "#a03a3a")


def write_page(report: dict[str, Any]) -> Iterator[str]:
    yield "<!doctype html><html lang='en'><meta charset='utf-8'><title>dataset</title>"
    yield f"<style>{STYLE}</style><h1>Dataset</h1>\n"
    out = report["left_out"]
    yield (
        f"<p>{report['records']:,} records, {report['kept']:,} kept, {out['wrong']:,} left out as wrong, "
        f"{out['too_long']:,} as too long.</p>\n"
    )
    yield table(["setting", "value"], ([key, value] for key, value in report["settings"].items()))
    yield "<h2>Sources</h2>\n" + table(spaced(report["sources"][0]), (own.values() for own in report["sources"]))
    yield from lengths(report["lengths"])
    yield from truncation(report)
    yield from problems(report["problems"])


def lengths(found: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Lengths</h2>\n<p>Positions of a sample before any cut, those of pictures included.</p>\n"
    if found["samples"]:
        bars = [([bar["records"]], f"{bar['from']} to {bar['to']}: {bar['records']:,}") for bar in found["histogram"]]
        yield chart(bars, [str(bar["from"]) for bar in found["histogram"]], "records")
        row = [f"{found['mean']:.1f}", *found["percentiles"].values()]
        yield table(["mean", *(f"{p} %" for p in found["percentiles"])], [row])


def truncation(report: dict[str, Any]) -> Iterator[str]:
    """Shares of all that there is, side by side for every maximum length."""
    found = report["truncation"]
    names = ["records_cut", "positions_lost", "label_tokens_lost", "left_without_labels"]
    yield "<h2>What a maximum length costs</h2>\n"
    samples = max(1, report["lengths"]["samples"])
    shown = [("records_cut", "records cut"), ("left_without_labels", "left without labels")]
    bars = [
        ([100 * own[n] / samples for n, _ in shown], ", ".join(f"{w} {own[n]:,}" for n, w in shown)) for own in found
    ]
    yield chart(bars, [str(own["max_length"]) for own in found], "% of records", [w for _, w in shown])
    yield table(["data.max_length", *spaced(names)], ([own["max_length"], *(own[n] for n in names)] for own in found))


def problems(found: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Problems</h2>\n"
    if not found:
        yield "<p>None.</p>\n"
        return
    yield table(
        ["kind", "records", "what becomes of them", "meaning"],
        ([kind, own["records"], "kept" if own["kept"] else "left out", own["meaning"]] for kind, own in found.items()),
    )
    for kind, own in found.items():
        more = f", of which the first {len(own['first']):,} are shown; all are in problems.jsonl"
        yield f"<details><summary>{escape(kind)}: {own['records']:,}{more if own['not_shown'] else ''}</summary>\n"
        names = ["source", "line", "index", "id", "reason"]
        yield table(names, ([row[name] for name in names] for row in own["first"]))
        yield "</details>\n"


def chart(groups: list[tuple[list[float], str]], labels: list[str], unit: str, legend: list[str] | None = None) -> str:
    """Bars as SVG: groups of values with what is shown on hovering, and what stands below them."""
    most = max((value for values, _ in groups for value in values), default=0) or 1
    step = (WIDTH - LEFT) / len(groups)
    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT + BELOW}' role='img' style='max-width:{WIDTH}px;font-size:11px'>"]
    for value in ticks(0, most, 4):
        y = HEIGHT - value / most * (HEIGHT - 20)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{value:,.4g}</text>")
    for place, (values, hover) in enumerate(groups):
        wide = step * 0.9 / len(values)
        for number, value in enumerate(values):
            tall = (HEIGHT - 20) * value / most
            x = LEFT + step * (place + 0.05) + wide * number
            parts.append(
                f"<rect x='{x:.1f}' y='{HEIGHT - tall:.1f}' width='{wide:.1f}' height='{tall:.1f}' "
                f"fill='{COLOURS[number]}'><title>{escape(hover)}</title></rect>"
            )
    every = -(-len(labels) // 12)
    for place in range(0, len(labels), every):
        x = LEFT + step * (place + 0.5)
        parts.append(f"<text x='{x:.1f}' y='{HEIGHT + 16}' text-anchor='middle'>{escape(labels[place])}</text>")
    parts.append(f"<text x='{LEFT}' y='12'>{escape(unit)}</text>")
    for number, name in enumerate(legend or []):
        x = LEFT + 150 * (number + 1)
        parts.append(f"<text x='{x}' y='12' fill='{COLOURS[number]}'>■ {escape(name)}</text>")
    return "".join(parts) + "</svg>\n"
