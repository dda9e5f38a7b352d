"""Summarize an indexed dataset: counts, lengths in tokens, tokens lost by truncation, and problems of records."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.config import FULL_WEIGHT, Config
from llava_fsdp.data.columns import BLOCK
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.index.build import Index
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine.examples import draw_examples
from llava_fsdp.data.index.token_pass import LOSSES, TAUGHT
from llava_fsdp.data.index.worker_pool import open_column
from llava_fsdp.data.problems import BITS, PROBLEMS
from llava_fsdp.data.text.encode import Encoder
from llava_fsdp.report.dataset_page import dataset_page
from llava_fsdp.runtime.files.durable_files import replacing
from llava_fsdp.runtime.text.terminal_text import shown_text

SHOWN = 1000
"""Greatest number of records that report.json lists for each kind of problem; problems.jsonl lists all."""
PAGE, TABLE, LIST = "report.html", "report.json", "problems.jsonl"
PERCENTILES = (1, 5, 25, 50, 75, 95, 99, 100)
BARS = 48
"""Greatest number of bars of a histogram."""


@dataclass
class Counts:
    """Counts of a data source, or of one of its files."""

    name: str
    file: str
    """The `path` of the data source, or the path of the file."""
    images: str | None
    records: int
    left_out: int = 0
    """Number of skipped records. All fields below this one count only the samples of records that are trained on."""
    samples: int = 0
    """Number of samples, of which a record may give several."""
    text_only: int = 0
    pictures: int = 0
    """Number of images in the records; an image that occurs several times counts several times."""
    tokens: int = 0
    """Number of tokens after truncation at data.max_length, including image tokens. The fields below count after
    truncation, too."""
    median: int | None = None
    """Median number of tokens of a record; None without records. `longest` is the greatest number."""
    longest: int | None = None
    label_tokens: int = 0
    label_weight: float = 0.0
    """Sum of the weights of these labels."""
    taught: dict[str, int] = field(default_factory=dict)
    """Counts of what is learnt from a source (`token_pass.TAUGHT`), also of records that are skipped for other reasons
    than their text; empty for a single file."""
    tiles: int = 0
    image_tokens: int | None = None
    """Number of image tokens; None if the index was made by a version that did not count them."""
    problems: dict[str, int] = field(default_factory=dict)
    """Number of records with each kind of problem, whether or not they are trained on."""


def make_report(records: Records, cfg: Config) -> dict[str, Any]:
    """Return the content of report.json: all statistics of a dataset, and the first SHOWN records of each problem."""
    index = records.index
    sources, files = count_with_problems(records)
    return {
        "index": str(index.folder),
        "fingerprint": records.fingerprint,
        "settings": {
            "labels": cfg.labels.value,
            "data.template": cfg.data.template,
            "data.max_length": cfg.data.max_length,
            "data.too_long": cfg.data.too_long.value,
            "data.image_aspect_ratio": cfg.data.image_aspect_ratio.value,
            "data.examine": cfg.data.examine.value,
            "model": cfg.model.checkpoint or f"{cfg.model.language} + {cfg.model.vision}",
        },
        "records": len(index),
        "kept": records.num_records,
        "samples": len(records),
        "examined": None if index.examined is None else index.examined.as_json(),
        "left_out": {"wrong": records.num_wrong, "too_long": records.num_too_long},
        "sources": [asdict(counts) for counts in sources],
        "files": [asdict(counts) for counts in files],
        "lengths": describe_lengths(index),
        "truncation": describe_losses(index),
        "problems": list_problems(records),
        "unread_keys": index.unread_keys,
    }


def count_sources(records: Records) -> list[Counts]:
    """Return counts of samples, tokens, images etc. for each data source, without the counts of `problems`."""
    store, ends = records.index.store, list(itertools.accumulate(records.source_counts, initial=0))
    ranges = zip(store.sources, itertools.pairwise(store.source_bounds), itertools.pairwise(ends), strict=True)
    found = [
        fill_counts(records, Counts(s.name, s.path, s.images, end - begin), kept) for s, (begin, end), kept in ranges
    ]
    for counts, taught in zip(found, records.index.taught.tolist(), strict=True):
        counts.taught = dict(zip(TAUGHT, taught, strict=True))
    return found


def count_files(records: Records) -> list[Counts]:
    """Return counts of samples, tokens, images etc. for each file of records, without the counts of `problems`."""
    parts = records.index.store.parts
    kept = records.samples_before(file_bounds(records).tolist())
    ranges = zip(parts, itertools.pairwise(kept), strict=True)
    return [fill_counts(records, Counts(p.file.name, p.file.path, p.file.images, p.count), rows) for p, rows in ranges]


def file_bounds(records: Records) -> np.ndarray:
    """Return the number in the index of the first record of each file, followed by the number of all records; int64
    [files + 1]."""
    return np.array([*(part.first for part in records.index.store.parts), len(records.index)], dtype=np.int64)


def fill_counts(records: Records, counts: Counts, kept: tuple[int, int]) -> Counts:
    """Fill in the fields of `counts` on tokens, images etc., and return it. Its field `records` has the number of all
    records, skipped ones included. `kept`: range [begin, end) of samples to count, in the numbers of those that are
    trained on."""
    begin, end = kept
    counts.left_out = counts.records - records.count_records(begin, end)
    counts.samples = end - begin
    image_tokens = records.image_tokens
    counts.image_tokens = None if image_tokens is None else 0
    longest = 0
    for at in range(begin, end, BLOCK):
        block = slice(at, min(at + BLOCK, end))
        counts.tokens += int(records.lengths[block].sum(dtype=np.int64))
        counts.label_tokens += int(records.labels[block].sum(dtype=np.int64))
        counts.label_weight += records.weight_of(block) / FULL_WEIGHT
        counts.pictures += int(records.pictures[block].sum(dtype=np.int64))
        counts.tiles += int(records.tiles[block].sum(dtype=np.int64))
        if image_tokens is not None:
            counts.image_tokens = (counts.image_tokens or 0) + int(image_tokens[block].sum(dtype=np.int64))
        counts.text_only += int(np.count_nonzero(records.pictures[block] == 0))
        longest = max(longest, int(records.lengths[block].max()))
    if begin < end:
        counts.longest, counts.median = longest, median(records.lengths, begin, end, longest)
    return counts


def median(lengths: np.ndarray, begin: int, end: int, longest: int) -> int:
    """Return the median of lengths[begin:end] without copying; `longest` is their maximum. If their number is even, the
    lower of the two middle ones is returned."""
    half = (end - begin - 1) // 2
    if end - begin <= BLOCK:
        return int(np.partition(lengths[begin:end], half)[half])
    counts = np.zeros(longest + 1, dtype=np.int64)
    for at in range(begin, end, BLOCK):
        counts += np.bincount(lengths[at : min(at + BLOCK, end)], minlength=longest + 1)
    return int(np.searchsorted(np.cumsum(counts), half + 1))


def count_problems(records: Records) -> list[dict[str, int]]:
    """Return, for each file of records, {kind of problem: number of records that have it}."""
    bounds, files = file_bounds(records), len(records.index.store.parts)
    found = {kind: np.zeros(files, dtype=np.int64) for kind, number in records.counts.items() if number}
    for begin, flags in records.index.blocks():
        for kind, counts in found.items():
            numbers = np.flatnonzero(flags & BITS[kind]) + begin
            counts += np.bincount(np.searchsorted(bounds, numbers, side="right") - 1, minlength=files)
    return [{str(kind): int(counts[file]) for kind, counts in found.items() if counts[file]} for file in range(files)]


def count_with_problems(records: Records) -> tuple[list[Counts], list[Counts]]:
    """Return the counts, with problems, of each data source and of each file of records."""
    sources, files = count_sources(records), count_files(records)
    for part, counts, problems in zip(records.index.store.parts, files, count_problems(records), strict=True):
        counts.problems, problems_of_source = problems, sources[part.source].problems
        problems_of_source |= {kind: problems_of_source.get(kind, 0) + number for kind, number in problems.items()}
    return sources, files


def describe_lengths(index: Index) -> dict[str, Any]:
    """Return the number, mean, percentiles and histogram of the lengths of all samples in tokens, before truncation."""
    lengths = open_column(index.encoded, "full")
    longest = max((int(lengths[at : at + BLOCK].max(initial=0)) for at in range(0, len(lengths), BLOCK)), default=0)
    counts = np.zeros(longest + 1, dtype=np.int64)
    for at in range(0, len(lengths), BLOCK):
        counts += np.bincount(lengths[at : at + BLOCK], minlength=longest + 1)
    counts[0] = 0  # records that make no sample
    total = int(counts.sum())
    if not total:
        return {"samples": 0, "mean": None, "percentiles": {}, "histogram": []}
    cumulative = np.cumsum(counts)
    width = bar_width(longest)
    bars = [(at, min(at + width, longest + 1)) for at in range(0, longest + 1, width)]
    return {
        "samples": total,
        "mean": float((counts * np.arange(longest + 1)).sum() / total),
        "percentiles": {str(p): int(np.searchsorted(cumulative, total * p / 100)) for p in PERCENTILES},
        "histogram": [{"from": a, "to": b - 1, "records": int(counts[a:b].sum())} for a, b in bars],
    }


def bar_width(longest: int) -> int:
    """Return the bars' width in a histogram of 0 to `longest`: the least of 1, 2, 5, 10, ... with at most BARS bars."""
    power = 1
    while True:
        for step in (1, 2, 5):
            if longest // (step * power) < BARS:
                return step * power
        power *= 10


def describe_losses(index: Index) -> list[dict[str, Any]]:
    """Return, for each maximum length, what truncation to it loses in all data sources together and in each one: counts
    of records, tokens and labels, from `index.losses`, int64 [data sources, maximum lengths, kinds of counts]."""
    names = [source.name for source in index.store.sources]
    return [
        {
            "max_length": limit,
            **named_losses(index.losses[:, row].sum(axis=0)),
            "sources": {name: named_losses(index.losses[source, row]) for source, name in enumerate(names)},
        }
        for row, limit in enumerate(index.limits)
    ]


def named_losses(counts: np.ndarray) -> dict[str, int]:
    """Return counts of what truncation loses, int64 [LOSSES], by their names in report.json."""
    names = {"records": "records_cut", "positions": "positions_lost", "labels": "label_tokens_lost"}
    return {names.get(n, "left_without_labels"): int(c) for n, c in zip(LOSSES, counts, strict=True)}


def list_problems(records: Records) -> dict[str, Any]:
    """Return {kind of problem: facts}, as in report.json: the number of records that have it (`records`), whether they
    are trained on (`kept`), what it means, the first of these records (SHOWN at most), and how many are not shown."""
    found = {
        kind: {
            "records": count,
            "kept": kind not in records.dropped_kinds,
            "meaning": PROBLEMS[kind].meaning,
            "first": [],
        }
        for kind, count in records.counts.items()
        if count
    }
    for row in problem_rows(records):
        first = found[row.pop("kind")]["first"]
        if len(first) < SHOWN:
            first.append({key: value for key, value in row.items() if key != "kept"})
    for entry in found.values():
        entry["not_shown"] = entry["records"] - len(entry["first"])
    return {str(kind): entry for kind, entry in found.items()}


def problem_rows(records: Records) -> Iterator[dict[str, Any]]:
    """Yield each problem of each record as a dict for problems.jsonl, with the place of the record in its file."""
    for row in records.index.problems():
        file, index = records.index.store.locate(row["record"])
        yield {
            "kind": row["kind"],
            "kept": row["kind"] not in records.dropped_kinds,
            "source": file.name,
            "file": file.path,
            "line": records.index.store.line(row["record"]),
            "index": index,
            "id": row["id"],
            "reason": row["reason"],
        }


def write_report(records: Records, cfg: Config, encoding: tuple[Encoder, ImageSource], folder: Path) -> dict[str, Any]:
    """Write report.json, report.html and problems.jsonl into a folder; return the content of report.json. `encoding`:
    (encoder, image reader), with which some records are encoded to show them on the page."""
    report = make_report(records, cfg)
    encoder, reader = encoding
    examples = draw_examples(records, encoder, reader)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / LIST, (json.dumps(row) + "\n" for row in problem_rows(records)))
    write_text(folder / PAGE, [shown_text(dataset_page(report, examples))])
    write_text(folder / TABLE, [json.dumps(report, indent=1) + "\n"])
    return report


def write_text(path: Path, text: Iterator[str] | list[str]) -> None:
    """Write a text, given in pieces, into a file that gets its name when it is complete."""
    with replacing(path) as file:
        file.writelines(piece.encode(errors="backslashreplace") for piece in text)  # an id may be half a surrogate pair
