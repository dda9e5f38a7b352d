"""Seconds of a step by kind, from torch's profiler: products, gradient additions, attention, elementwise kernels, the
optimizer, copies, and the rest. On a GPU they are seconds of kernels, without one of operations of the CPU."""

from __future__ import annotations

import json
import re
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from llava_fsdp.report.profile.profile_trace import (
    LAUNCHING,
    ON_DEVICE,
    RANGE,
    Spans,
    add_exclusive,
    length,
    merge_spans,
    spans_of,
)

BY_PLACE = {
    "gradient additions": re.compile(r"^torch::autograd::AccumulateGrad$"),
    "optimizer": re.compile(rf"^({RANGE}optimizer$|Optimizer\.step#)"),
}
"""Whatever is launched in these ranges of the host is of this kind. Hooks that add a gradient run in autograd's node
for it, whichever kernel they launch."""
BY_NAME = {
    "attention": re.compile(r"flash|fmha|sdpa|attention"),
    "products": re.compile(
        r"nvjet|gemm|cublas|xmma|cutlass|splitk|fprop|dgrad|wgrad|"
        r"^aten::(addmm|mm|bmm|baddbmm|_scaled_mm|mkldnn_convolution)$"
    ),
    "copies": re.compile(r"memcpy|direct_copy|catarray|^aten::(copy_|cat|clone|index|index_select|embedding)$"),
    "elementwise": re.compile(
        r"triton_|elementwise|multi_tensor|norm|reduce|softmax|"
        r"^aten::_?(add|sub|mul|div|neg|pow|rsqrt|silu|gelu|sigmoid|sum|mean|amax|abs|exp|log|sin|cos|where)"
    ),
}
"""Other kernels and operations by their names in lower case; the first that fits."""
KINDS = (*BY_PLACE, *BY_NAME, "rest")
MOST_LONGEST = 40


def profiled(action: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Run a step under torch's profiler; return what `kinds_of` finds, and the wall-clock seconds."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = kinds_of(json.loads(path.read_text(errors="replace"))["traceEvents"])
    return {"wall_seconds": seconds, **found}


def kinds_of(events: list[Any]) -> dict[str, Any]:
    """Return the seconds of each kind, the seconds in which the device (or a thread of the CPU) was busy with any of
    them, and the kernels that took longest. `events`: those of a trace (`export_chrome_trace`)."""
    events = [event for event in events if event.get("ph") == "X"]
    on_host = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    places = {kind: spans_by_thread(on_host, pattern) for kind, pattern in BY_PLACE.items()}
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    total: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    if kernels:
        launches = {e["args"].get("correlation"): e for e in events if e.get("cat") in LAUNCHING and "args" in e}
        for kernel in kernels:
            launch = launches.get(kernel.get("args", {}).get("correlation"), kernel)
            total[kind_of(kernel["name"], launch, places)] += kernel["dur"]
            longest[kernel["name"][:100]] += kernel["dur"]
        busy = kernels
    else:
        busy = [event for event in on_host if event["cat"] == "cpu_op"]
        for thread in {event["tid"] for event in busy}:
            own = [event for event in busy if event["tid"] == thread]
            add_exclusive([{**event, "name": kind_of(event["name"], event, places)} for event in own], [], total)
            add_exclusive(own, [], longest)
    return {
        "of": "kernels" if kernels else "operations",
        "seconds": {kind: total[kind] / 1e6 for kind in KINDS},
        "busy_seconds": length(merge_spans(spans_of(busy))),
        "longest": {name: time / 1e6 for name, time in longest.most_common(MOST_LONGEST)},
    }


def spans_by_thread(events: list[Any], pattern: re.Pattern[str]) -> dict[Any, Spans]:
    """The time spans of the host's events whose names fit, for each thread."""
    found = defaultdict(list)
    for event in events:
        if pattern.search(event["name"]):
            found[event["tid"]].append(event)
    return {thread: merge_spans(spans_of(of_thread)) for thread, of_thread in found.items()}


def kind_of(name: str, launch: Any, places: dict[str, dict[Any, Spans]]) -> str:
    """The kind of a kernel or operation. `launch`: the event on the host that launched it."""
    for kind, threads in places.items():
        spans = threads.get(launch["tid"], [])
        before = bisect_right(spans, (launch["ts"], float("inf"))) - 1
        if before >= 0 and launch["ts"] <= spans[before][1]:
            return kind
    return next((kind for kind, pattern in BY_NAME.items() if pattern.search(name.lower())), "rest")
