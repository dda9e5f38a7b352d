"""Compute where the time of recorded training steps went, from a trace of PyTorch's profiler.

With a GPU, the time of the GPU is divided. A kernel's time belongs to the part of the step that launched the kernel. A
collective's time counts only while no other kernel runs. In the rest of the time the GPU waits for the host. Without a
GPU, the time of the main thread is divided into operations, collectives that do not overlap with operations, and Python
code between them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE = "llava_fsdp::"
"""Prefix of the profiler ranges that mark the parts of a step."""
COMPUTING = ("forward", "backward", "optimizer")
CATEGORIES = ("data", *COMPUTING, "communication", "host gaps")
STEP = "ProfilerStep#"
"""Prefix of the name that PyTorch's profiler gives each step."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHING = ("cuda_runtime", "cuda_driver")
COLLECTIVE_KERNEL, COLLECTIVE_OP = "nccl", ("gloo:", "nccl:", "c10d::")
MOST_LONGEST = 15

Spans = list[tuple[float, float]]
"""Time spans (begin, end) in microseconds, sorted and not overlapping."""


@dataclass(frozen=True)
class Times:
    """How the time of the steps in a profile is divided; there is at least one."""

    on_device: bool
    """Whether the times are those of a GPU; if not, of the main thread."""
    steps: list[dict[str, float]]
    """For each step the seconds of each category; their sum is the step's time."""
    longest: list[tuple[str, float]]
    """(name, seconds over all steps) of the kernels that took longest, or of the operations without a GPU. An
    operation's time excludes those that it called, and waiting for collectives."""


class TraceError(Exception):
    """Error: a profiler trace is incomplete or contains no step."""


def times_of(path: Path) -> Times:
    """Divide the time of each step in a gzipped trace of PyTorch's profiler (`export_chrome_trace`) among CATEGORIES.
    The times are those of the GPU's kernels or, if the trace has none, of operations in the thread that runs the steps.
    Where computation and a collective overlap, the time counts as computation.

    Raises:
        OSError: the file cannot be read.
        TraceError: the trace is incomplete or contains no step.
    """
    try:
        with gzip.open(path, "rt") as file:
            events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    except (EOFError, ValueError, KeyError, zlib.error) as error:
        raise TraceError(f"was not written to its end ({type(error).__name__}: {error})") from error
    annotations = [e for e in events if e.get("cat") == "user_annotation"]
    parts = {
        name: merge_spans(spans_of(e for e in annotations if e["name"] == RANGE + name))
        for name in ("data", *COMPUTING)
    }
    of_steps = [e for e in annotations if e["name"].startswith(STEP)]
    if not of_steps:
        raise TraceError("holds no step")
    kernels = [e for e in events if e.get("cat") in ON_DEVICE]
    operations = [e for e in events if e.get("cat") == "cpu_op"]
    total: Counter[str] = Counter()
    if kernels:
        busy, collectives = device_spans(kernels, events, parts)
        for kernel in kernels:
            total[kernel["name"]] += kernel["dur"]
    else:
        main = of_steps[0]["tid"]
        busy, collectives = host_spans(operations, annotations, main, parts)
        for thread in {e["tid"] for e in operations}:
            of_thread = [e for e in operations if e["tid"] == thread]
            add_exclusive(of_thread, collectives if thread == main else [], total)
    collectives = difference(collectives, merge_spans(span for spans in busy.values() for span in spans))
    accounted = merge_spans([*(span for spans in busy.values() for span in spans), *collectives])
    spans = {"data": difference(parts["data"], accounted), **busy, "communication": collectives}
    rows = []
    for begin, end in sorted(spans_of(of_steps)):
        # the last category, "host gaps", is the rest of the step
        row = {name: length(intersection(spans[name], [(begin, end)])) for name in CATEGORIES[:-1]}
        rows.append(row | {"host gaps": (end - begin) / 1e6 - sum(row.values())})
    return Times(bool(kernels), rows, [(name, time / 1e6) for name, time in total.most_common(MOST_LONGEST)])


def device_spans(kernels: list[Any], events: list[Any], parts: dict[str, Spans]) -> tuple[dict[str, Spans], Spans]:
    """Return the time spans of a GPU's computing kernels, by the part of the step that launched them, and those of
    collectives. A time in which kernels of two parts run counts for only one of them.

    Args:
        events: all events of the trace.
        parts: time spans of each part of a step on the host.
    """
    launches = {e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") in LAUNCHING and "args" in e}
    kernels_of_part: dict[str, list[Any]] = {name: [] for name in COMPUTING}
    collectives = []
    for kernel in kernels:
        if COLLECTIVE_KERNEL in kernel["name"].lower():
            collectives.append(kernel)
            continue
        launched_at = launches.get(kernel.get("args", {}).get("correlation"), kernel["ts"])
        # a kernel that was launched between two parts, by a report or a save, belongs to neither
        part = next((n for n in COMPUTING if any(begin <= launched_at <= end for begin, end in parts[n])), None)
        if part is not None:
            kernels_of_part[part].append(kernel)
    taken_spans: Spans = []
    busy = {}
    for name, launched_here in kernels_of_part.items():
        busy[name] = difference(merge_spans(spans_of(launched_here)), taken_spans)
        taken_spans = merge_spans([*taken_spans, *busy[name]])
    return busy, merge_spans(spans_of(collectives))


def host_spans(
    operations: list[Any], annotations: list[Any], main: Any, parts: dict[str, Spans]
) -> tuple[dict[str, Spans], Spans]:
    """Return the time spans in which the main thread ran operations, by part of the step, and those of collectives
    during which it ran no operation of torch (`aten::`). Collectives run in other threads; an operation that waits for
    one does not compute.

    Args:
        operations: events of operations, of all threads.
        annotations: events of ranges that the program marked.
        main: id of the main thread.
        parts: time spans of each part of a step.
    """
    # operations of the main thread, without those that start collectives
    here = [e for e in operations if e["tid"] == main and not e["name"].startswith(COLLECTIVE_OP)]
    kernels = merge_spans(spans_of(e for e in here if e["name"].startswith("aten::")))
    collectives = merge_spans(spans_of(e for e in (*operations, *annotations) if e["name"].startswith(COLLECTIVE_OP)))
    exposed = difference(collectives, kernels)
    running = difference(merge_spans(spans_of(here)), exposed)
    return {name: intersection(running, parts[name]) for name in COMPUTING}, exposed


def add_exclusive(events: list[Any], waiting: Spans, total: Counter[str]) -> None:
    """Add the microseconds of one thread's operations to `total`, by name. An operation's time excludes the operations
    that it called, and the spans in which it was `waiting` for a collective."""
    open_events: list[Any] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
            open_events.pop()
        exclusive = event["dur"] - 1e6 * length(intersection(spans_of([event]), waiting))
        total[event["name"]] += exclusive
        if open_events:
            total[open_events[-1]["name"]] -= exclusive
        open_events.append(event)


def spans_of(events: Iterable[Any]) -> Spans:
    """Return the time span of each event, in the order of the events."""
    return [(e["ts"], e["ts"] + e["dur"]) for e in events]


def merge_spans(spans: Iterable[tuple[float, float]]) -> Spans:
    """Sort time spans, and merge those that overlap."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(spans: Spans, others: Spans) -> Spans:
    """Return the time spans (begin, end) that lie both in one of `spans` and in one of `others`, both ascending."""
    result, at = [], 0
    for begin, end in spans:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        number = at
        while number < len(others) and others[number][0] < end:
            result.append((max(begin, others[number][0]), min(end, others[number][1])))
            number += 1
    return result


def difference(spans: Spans, others: Spans) -> Spans:
    """Return those parts of the time spans `spans` that no span of `others` covers: what lies in the gaps between."""
    edges = [float("-inf"), *(edge for span in others for edge in span), float("inf")]
    return intersection(spans, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: Spans) -> float:
    """Return the sum of spans in seconds."""
    return sum(end - begin for begin, end in spans) / 1e6
