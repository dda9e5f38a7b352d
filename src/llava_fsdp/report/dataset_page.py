"""Build the page of a dataset: its sources and files, the lengths of its samples, what maximum lengths would truncate,
its problems, and some samples as a model is trained on them."""

from collections.abc import Iterable, Iterator
from html import escape
from itertools import dropwhile, takewhile
from typing import Any

from llava_fsdp.report.charts.html import heading, section, table, whole_page
from llava_fsdp.report.charts.svg import Bar, draw_bars
from llava_fsdp.report.examples import Example, examples_body

FIRST = 5
"""Number of records with one kind of problem that are shown without unfolding."""
LISTED = 100
"""Number of records with one kind of problem that are on the page, folded ones included."""
WORST, FOLDED = 20, 1000
"""Number of files shown without unfolding, those with the most skipped records first; and of further, folded ones."""
NAMED = 3
"""Number of kinds of problems, and of sources with a problem, that a table cell names."""
SPACE = "\u00a0"
"""Non-breaking space."""
COLUMNS = ("records", "skipped", "problems", "images", "tokens", "median", "longest", "with labels")


def dataset_page(report: dict[str, Any], examples: list[Example]) -> str:
    """Return the report page of a dataset as HTML.

    Args:
        report: content of report.json. Its `sources` and `files` have an object of counts for each data source or file.
        examples: samples to show as a model is trained on them.
    """
    out = report["left_out"]
    counts = f"{report['records']:,} records, {report['kept']:,} kept, {out['wrong']:,} skipped as wrong, "
    split = sum(source["taught"].get("split", 0) for source in report["sources"])
    if split:
        counts = f"{report['samples']:,} samples (the template rewrites earlier turns of {split:,} records) of {counts}"
    counts += f"{out['too_long']:,} as too long."
    if report["examined"] is not None:
        counts += f" {report['examined']['summary'].capitalize()}."
    parts = [
        heading("dataset", "Dataset", counts),
        section("Settings", table(["setting", "value"], report["settings"].items())),
        section("Sources", *sources(report)),
        section("What is learnt", *taught(report)),
        section("Lengths", *lengths(report["lengths"])),
        section("What a maximum length costs", *truncation(report)),
        section("Problems", *problems(report)),
        section("Keys that are not read", *unread_keys(report["unread_keys"])),
        section("Records as the model sees them", *examples_body(examples)),
    ]
    return whole_page("dataset", "".join(parts))


def sources(report: dict[str, Any]) -> Iterator[str]:
    """Yield HTML tables of the data sources in report.json (`report`) and, if one has several files, of all files, the
    worst first."""
    more = ("text_only", "label_tokens", "tiles", "image_tokens", "images")
    rows = (
        [source["name"], source["file"], *cells_of(source), *(source[name] for name in more)]
        for source in report["sources"]
    )
    yield table(["source", "file", *COLUMNS, *with_spaces(more[:-1]), "folder of images"], rows)
    if len(report["files"]) == len(report["sources"]):
        return
    files = sorted(report["files"], key=lambda file: badness(file, report["sources"]))
    paths = [file["file"] for file in files]
    # the beginning that the first and the last path in alphabetical order share, all paths share
    same = takewhile(lambda pair: pair[0] == pair[1], zip(min(paths), max(paths), strict=False))
    shared_folder = "".join(character for character, _ in same).rpartition("/")[0]
    bad = sum(bool(file["left_out"] or file["problems"]) for file in files)
    head = f"{len(files):,} files, {bad:,} of them with skipped records or problems."
    order = "most skipped records first, then most problems, then a share of labels that is far from the source's"
    below = f" All paths begin with {escape(shared_folder)}/." if shared_folder else ""
    yield f"<h3>Files</h3><p class=note>{head} Their order: {order}.{below}</p>\n"
    # with a single source, the column of sources stays empty, so that `table` leaves it out
    names = ["source" if len(report["sources"]) > 1 else None, "file", *COLUMNS]
    lines = [
        [file["name"] if names[0] else None, file["file"].removeprefix(f"{shared_folder}/"), *cells_of(file)]
        for file in files[: WORST + FOLDED]
    ]
    yield table([text or "" for text in names], lines[:WORST])
    if len(lines) > WORST:
        remark = f", of which {FOLDED:,} are shown; all are in report.json" if len(files) > len(lines) else ""
        yield f"<details><summary>The other {len(files) - WORST:,} files{remark}</summary>\n"
        yield table([text or "" for text in names], lines[WORST:]) + "</details>\n"


def taught(report: dict[str, Any]) -> Iterator[str]:
    """Yield an HTML table of what a model learns from each data source: numbers of answers and of the labels in their
    thoughts, calls and texts, and the mean weight of a label. `report`: content of report.json."""
    names = {
        "answers": "answers", "proven": "with a prompt proven equal", "split": "records of several samples",
        "thought": "labels of thoughts", "calls": "of calls", "text": "of texts", "repeated": "tokens read repeatedly",
    }  # fmt: skip
    rows = [
        [source["name"], *(source["taught"].get(key, 0) for key in names), f"{mean_weight(source):.3g}"]
        for source in report["sources"]
    ]
    yield table(["source", *names.values(), "mean weight of a label"], rows)
    yield (
        "<p class=note>A prompt is proven equal if the tokens before the answer are those that the model's own chat "
        "template shows the model when it answers there.</p>\n"
    )


def unread_keys(sources: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield an HTML table of keys in the records that are not read and could change what is learnt. `sources`: data
    source -> key -> number of records that have it."""
    rows = [[name, key, count] for name, keys in sources.items() for key, count in keys.items()]
    yield table(["source", "key", "records"], rows) if rows else "<p>There are none.</p>\n"


def cells_of(counts: dict[str, Any]) -> list[object]:
    """Return the cells of a data source or file, with its entry `counts` of report.json, in the columns COLUMNS."""
    share = f"{100 * label_share(counts):.1f} %" if counts["tokens"] else None
    lengths = [counts["pictures"], counts["tokens"], counts["median"], counts["longest"], share]
    return [counts["records"], counts["left_out"], greatest_counts(counts["problems"]), *lengths]


def greatest_counts(counts: dict[str, int]) -> str:
    """Return the greatest counts as text, such as "bad image 12, no label 3, bad JSON 2, 4 more"."""
    first = sorted(counts, key=lambda name: -counts[name])[:NAMED]
    more = [f"{len(counts) - NAMED}{SPACE}more"] if len(counts) > NAMED else []
    return ", ".join([*(f"{name}{SPACE}{counts[name]:,}" for name in first), *more])


def mean_weight(counts: dict[str, Any]) -> float:
    """Return the mean weight of the labels of a source; 1 without labels."""
    return counts["label_weight"] / counts["label_tokens"] if counts["label_tokens"] else 1.0


def label_share(counts: dict[str, Any]) -> float:
    """Return the share of label tokens among all tokens of a source or a file."""
    return counts["label_tokens"] / max(1, counts["tokens"])


def badness(counts: dict[str, Any], sources: list[dict[str, Any]]) -> tuple[float, ...]:
    """Return a sort key that puts files with the most skipped samples first, then those with the most problems, then
    those whose share of label tokens differs most from that of their source."""
    share = next(label_share(source) for source in sources if source["name"] == counts["name"])
    problems = sum(counts["problems"].values()) / counts["records"]
    return -counts["left_out"] / counts["records"], -problems, -abs(label_share(counts) - share)


def lengths(statistics: dict[str, Any]) -> Iterator[str]:
    """Yield, as HTML, a chart and a table of sample lengths in tokens, from the entry `lengths` of report.json."""
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
    """Yield, as HTML, a chart and a table of what truncation loses at each `data.max_length`, from report.json."""
    names = ["records_cut", "positions_lost", "label_tokens_lost", "left_without_labels"]
    samples = max(1, report["lengths"]["samples"])
    if not any(row[name] for row in report["truncation"] for name in names):
        least_length = min((row["max_length"] for row in report["truncation"]), default=0)
        yield f"<p>No record would be truncated, even with data.max_length={least_length}.</p>\n"
        return
    labels = {"records_cut": "truncated", "left_without_labels": "left without label tokens"}
    bars = []
    for row in report["truncation"]:
        texts = [f"{text}: {row[name]:,}" for name, text in labels.items()]
        bars.append(Bar(str(row["max_length"]), [100 * row[name] / samples for name in labels], texts))
    yield draw_bars("Records by data.max_length", "% of records", bars, list(labels.values()))
    rows = ([row["max_length"], *(row[n] for n in names)] for row in report["truncation"])
    yield table(["data.max_length", *with_spaces(names)], rows)


def problems(report: dict[str, Any]) -> Iterator[str]:
    """Yield HTML tables from report.json: the kinds of problems in a dataset and, for each kind, its first records."""
    kinds, sources = report["problems"], report["sources"]
    if not kinds:
        yield "<p>None.</p>\n"
        return
    by_source = {
        kind: {source["name"]: source["problems"][kind] for source in sources if kind in source["problems"]}
        for kind in kinds
    }
    yield table(
        ["kind", "records", "sources" if len(sources) > 1 else "", "kept or skipped", "meaning"],
        (
            [
                kind,
                row["records"],
                greatest_counts(by_source[kind]) if len(sources) > 1 else "",
                "kept" if row["kept"] else "skipped",
                row["meaning"],
            ]
            for kind, row in kinds.items()
        ),
    )
    names = ["source", "line", "index", "id", "reason"]
    for kind, row in kinds.items():
        # FIRST records are shown, and more, up to LISTED, are folded
        first = [[record[name] for name in names] for record in row["first"][:LISTED]]
        yield f"<h3>{escape(kind)}</h3>\n{table(names, first[:FIRST])}"
        if row["records"] > FIRST:
            more = f", of which the first {LISTED - FIRST} are shown; all are in problems.jsonl"
            rest = more if row["records"] > len(first) else ""
            yield f"<details><summary>{row['records'] - FIRST:,} more of {escape(kind)}{rest}</summary>\n"
            yield table(names, first[FIRST:]) + "</details>\n"


def with_spaces(names: Iterable[str]) -> list[str]:
    return [name.replace("_", " ") for name in names]
