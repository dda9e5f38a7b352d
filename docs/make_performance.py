"""Writes the tables of docs/performance.md from benchmarks/results: `python docs/make_performance.py`. Nothing in
them is typed by hand; a result of a GPU that is stored there appears beside those of CPUs."""

import json
import re
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from pages import DOCS, cell, code, replaced, table

RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = DOCS / "performance.md"
Report = dict[str, Any]


def newest(name: str) -> tuple[Path, Report]:
    """The newest stored result of a benchmark: names end with the date."""
    found = sorted(p for p in RESULTS.glob(f"{name}-*.json") if not p.stem.startswith(f"{name}-pretrain"))
    return found[-1], json.loads(found[-1].read_text())


def origin(path: Path, report: Report) -> str:
    """Machine, commit, date and file of a table's result."""
    device, threads = report["machine"]["device"], report["machine"]["cpus"]
    ranks = f", {report['ranks']} ranks" if "ranks" in report else ""
    plot = path.with_suffix(".png").name
    changed = " with changes" if report["commit"].endswith("with changes") else ""
    seen = f", [plot](../benchmarks/results/{plot})" if path.with_suffix(".png").exists() else ""
    return (
        f"{device}, {threads} cores{ranks}, commit {report['commit'][:12]}{changed}, {report['date'][:10]} "
        f"([result](../benchmarks/results/{path.name}){seen})."
    )


def packing() -> str:
    path, report = newest("packing-cpu")
    rows = [
        [row["tail"], cell(row["layout"]), f"{row['padding_share']:.0%}", f"{row['real_tokens_per_cpu_second']:,.0f}",
         f"{row['packed_is_times']:.2f} x"] for row in report["speed"] if re.search("grouped|sorted", row["layout"])
    ]  # fmt: skip
    head = ("lengths' tail", "layout", "padding", "real tokens a CPU second", "packed is")
    return f"{table(head, rows, 'llrrr')}\n\n{origin(path, report)}"


def activation_checkpointing() -> str:
    path, report = newest("activation-checkpointing-cpu")
    rows = [
        [code(f"activation_checkpointing={row['mode']}"), f"{row['peak_bytes'] / 2**20:,.0f}",
             f"{row['memory_ratio']:.2f}",
         f"{row['rise_ratio']:.2f}", f"{row['time_ratio']:.2f}"] for row in report["rows"]
    ]  # fmt: skip
    head = (
        "",
        "peak, MiB",
        "peak relative to `none`",
        "added by a step, relative to `none`",
        "CPU seconds relative to `none`",
    )
    return f"{table(head, rows, 'lrrrr')}\n\n{origin(path, report)}"


def strategies() -> str:
    path, report = newest("strategies-cpu")
    cells: dict[str, dict[tuple[str, int], float]] = {}
    for row in report["rows"]:
        if row["stage"] == "finetune":
            cells.setdefault(row["variant"], {})[row["stage"], row["accumulation"]] = row["cpu_ratio_to_ddp"]
    columns = list(next(iter(cells.values())))
    head = ("CPU seconds relative to DDP", *(f"{stage}, accumulation {times}" for stage, times in columns))
    rows = [
        [code(name) if name != "ddp" else "DDP", *(f"{own[c]:.2f}" for c in columns)] for name, own in cells.items()
    ]
    return f"{table(head, rows, 'lrr')}\n\n{origin(path, report)}"


def limited() -> str:
    path, report = newest("ddp-vs-zero")
    rows = [
        ["DDP" if row["variant"] == "ddp" else code(row["variant"]), str(row["train"]["batch"]),
         str(row["eval"]["batch"]), f"{min(e['cpu'] for e in row['train']['epochs']):.1f}"] for row in report["rows"]
    ]  # fmt: skip
    beyond = report["limit_beyond_imports_bytes"] / 2**20
    head = (
        f"limit {beyond:.0f} MiB per rank",
        "largest batch per rank",
        "in evaluation",
        "CPU seconds of an epoch with it",
    )
    return f"{table(head, rows, 'lrrr')}\n\n{origin(path, report)}"


def gpu() -> str:
    path, report = newest("planner-7b-cuda")
    speed_path, speed = newest("speed-finetune-bf16-cuda")
    (ours,) = (row for row in speed["ways"] if row["name"] == "ours")
    rows = [
        [code(f"activation_checkpointing={row['activation_checkpointing']}"), f"{row['tokens_per_micro_batch']:,}",
         f"{median(row['seconds']):.2f}", f"{row['mfu']:.1%}", f"{row['planned_bytes'] / 1e9:.1f}",
         f"{row['max_memory_allocated'] / 1e9:.1f}"] for row in report["rows"]
    ]  # fmt: skip
    planned = {
        (row["activation_checkpointing"], row["tokens_per_micro_batch"]): f"{row['planned_bytes'] / 1e9:.1f}"
        for row in report["rows"]
    }
    rows.append([
        f"`activation_checkpointing=auto`, which chose `{ours['activation_checkpointing']}`; gradients added by a "
        "compiled kernel", f"{ours['tokens_per_micro_batch']:,}", f"{median(ours['seconds']):.2f}",
        f"{ours['mfu']:.1%}",
        planned.get((ours["activation_checkpointing"], ours["tokens_per_micro_batch"]), "not noted"),
        f"{ours['max_memory_allocated'] / 1e9:.1f}",
    ])  # fmt: skip
    head = ("", "tokens of a micro-batch", "seconds a step", "MFU", "planned, GB", "measured, GB")
    return f"{table(head, rows, 'lrrrrr')}\n\n{origin(path, report)} Last row: {origin(speed_path, speed)}"


def gpu_peers() -> str:
    """Seconds of a step on one GPU, each beside ours in the same stage and precision."""
    sources = [newest("speed-finetune-bf16-cuda"), newest("speed-ways-cuda")]
    ways = [{"stage": "finetune"} | row for _, report in sources for row in report["ways"] if "seconds" in row]
    rows = []
    for way in sorted(ways, key=lambda row: row["stage"]):
        ours = next(row for row in ways if row["stage"] == way["stage"] and row["name"] == "ours")
        seconds = [median(row["seconds"]) for row in (way, ours)]
        share = median(f / s for f, s in zip(ours["flops"][-len(way["seconds"]) :], way["seconds"], strict=True))
        size = f"{way['rows']} rows" if "rows" in way else f"{way.get('tokens_per_micro_batch', 0):,} tokens"
        rows.append([
            way["stage"], way["name"], "16 rows" if size == "0 tokens" else size, f"{seconds[0]:.2f}",
            f"{share / ours['peak_flops']:.1%}", f"{way['max_memory_allocated'] / 1e9:.0f}",
            f"{seconds[0] / seconds[1]:.2f}",
        ])  # fmt: skip
    head = ("stage", "", "micro-batch", "seconds a step", "MFU", "peak, GB", "seconds, ours = 1")
    return f"{table(head, rows, 'lllrrrr')}\n\n" + " ".join(origin(*source) for source in sources)


def layout_curves() -> str:
    """Predicted tokens a second and GPU of the fastest layout of ranks, beside sharding alone."""
    path, report = newest("layout-curves-h100")
    rows = []
    for model in ("8x7B", "7B", "34B"):
        found = report["models"][model]
        for nodes in (1, 32, 128):
            at = {p["sharding"]: p for p in found["points"] if p["nodes"] == nodes and p["fits"]}
            fastest = at.get("fastest layout")
            if fastest is not None:
                rates = [
                    f"{at[name]['tokens_per_second'] / 8 / nodes:,.0f}" if name in at else "not predicted"
                    for name in ("fastest layout", "zero3", "hybrid")
                ]
                rows.append([model, f"{8 * nodes:,}", fastest["layout"], *rates])
    head = ("model", "GPUs", "fastest layout", "its tokens/s and GPU", "zero3", "hybrid")
    return f"{table(head, rows, 'lrlrrr')}\n\n{origin(path, report)}"


PACKED = {
    "ours packed": "this project",
    "by hand, our model": "FSDP2 by hand around this project's model",
    "by hand": "FSDP2 by hand, transformers' model, padded",
    "rows": "FSDP2 by hand, transformers' model, rows of several samples with its own mask",
    "row": "FSDP2 by hand, transformers' model, one row, SDPA a sample at a time",
    "trl": "TRL's SFTTrainer, DDP",
    "automodel": "NeMo Automodel's Llama, packing and collator, FSDP2 by hand",
}


def table_of_packed(report: Report) -> str:
    """CPU seconds beside trainers that pack, of one result."""
    found = {(row["peer"], row["data"]): row for row in report["rows"]}
    sets = report["options"]["data"]
    lines = []
    for peer in [name for name in PACKED if name in report["peers"]]:
        cells = []
        for data in sets:
            row = found.get((peer, data))
            cells += beside(row, found["ours packed", data]) if row else ["", ""]
        lines.append([PACKED[peer], *cells])
    head = ["", *(name for data in sets for name in (f"{data}: CPU seconds, ours = 1", "lowest to highest"))]
    return table(head, lines, "l" + "r" * 2 * len(sets))


def packed_peers() -> str:
    """CPU seconds beside trainers that pack, at width 512."""
    path, report = newest("packed-peers-512-cpu")
    options = report["options"]
    return (
        f"Width 512, {options['layers']} layers, {options['rows']} samples a rank, {options['steps']} steps a "
        f"round, {options['repeats']} rounds; first losses agree within "
        f"{report['equality']['first losses']:.0e}:\n\n"
        f"{table_of_packed(report)}\n\n{origin(path, report)}"
    )


def whole_peers() -> str:
    """CPU seconds of a step of a whole model of transformers, beside its Trainer and a packed loop by hand: with all
    parts trained, and with a frozen vision part."""
    frozen = whole_peers_in("whole-peers-frozen-cpu")
    return f"{whole_peers_in('whole-peers-cpu')}\n\nWith a frozen vision part, as in LLaVA's recipe:\n\n{frozen}"


def whole_peers_in(name: str) -> str:
    """CPU seconds of a step in the newest result of a name."""
    path, report = newest(name)
    found, own, options = {}, report["options"], report["options"]["data"]
    for row in report["rows"]:
        found.setdefault(row["peer"], {})[row["data"]] = row
    lines = [
        [WHOLE[peer], *(value for data in options for value in beside(rows[data], rows[data]))]
        for peer, rows in found.items()
    ]
    head = ["", *(name for data in options for name in (f"{data}: CPU seconds, ours = 1", "lowest to highest"))]
    goals = {goal["peer"]: f"{goal['goal']:.1f} is {'met' if goal['met'] else 'missed'}" for goal in report["goals"]}
    main = next(data for data in options if data != "text")
    size, recipe = report["sizes"][main], "vision part frozen" if own.get("frozen") else "all parts train"
    products = report["products"][main][recipe]
    blank = "" if report["blank_image"] is None or own.get("frozen") else (
        " In a step of `text` the vision part does not run. A rank without images beside one that has some runs it on "
        f"a blank image: its steps take {report['blank_image']['median']:.2f} times the seconds."
    )  # fmt: skip
    return (
        f"Width {own['hidden']}, {own['layers']} layers and as many in the vision part, {own['rows']} samples a step, "
        f"{own['steps']} steps a round, {own['repeats']} rounds. A step of `{main}` has {size['tokens']:,.0f} tokens "
        f"({size['padded_positions']:,.0f} positions when padded) and {size['patches']:,.0f} patches of images. First "
        f"losses agree within {report['equality']['first losses']:.0e}:\n\n"
        f"{table(head, lines, 'l' + 'r' * 2 * len(options))}\n\n"
        f"On `{main}`, the goal beside the Trainer of {goals['hf']}, and that beside the loop by hand of "
        f"{goals['row']}. A padded step has {products['padded_over_packed']:.2f} times the products of matrices.{blank}"
        f"\n\n{origin(path, report)}"
    )


WHOLE = {
    "ours packed": "this project",
    "hf": "transformers' Trainer, padded",
    "row": "an expert's packed loop by hand",
}


def beside(row: Report, ours: Report) -> list[str]:
    """CPU seconds of each round over those of our round beside it: the median, and the lowest and highest."""
    pairs = zip(row["cpu_seconds"]["all"], ours["cpu_seconds"]["all"], strict=False)
    times = row.get("times_ours") or [own / our for own, our in pairs]
    return [f"{median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}"]


def low_precision() -> str:
    """Losses and CPU seconds of products and bases of few bits, each beside its like in bf16; and how far apart two
    runs in bf16 are that differ in rounding alone."""
    (path, report), (own_path, rounding) = newest("low-precision-cpu"), newest("rounding-cpu")
    measured = {row["way"] for row in report["rows"]}
    shown = [row for row in rounding["rows"] if row["way"] not in measured] + report["rows"]
    rows = [
        [row["way"], spread(row["last_beside"]), spread(row["all_beside"]), f"{row['time_beside']:.2f}"]
        for row in shown if any(row.get("all_beside", []))  # without baselines, and runs of the very same bits
    ]  # fmt: skip
    head = ("", f"loss of the last {report['last']} steps beside bf16", "of all steps", "CPU seconds, bf16 = 1")
    origins = f"{origin(path, report)} Padded rows: {origin(own_path, rounding)}"
    return f"{table(head, rows, 'lrrr')}\n\n{origins}"


def spread(values: list[float]) -> str:
    """Mean of numbers, and from which to which they go, as percentages."""
    middle, *ends = (f"{value:+.2%}" for value in (mean(values), min(values), max(values)))
    return f"{middle} ({ends[0]} to {ends[1]})"


TABLES = {
    "gpu": gpu, "gpu_peers": gpu_peers, "layout_curves": layout_curves, "packed_peers": packed_peers,
    "whole_peers": whole_peers, "limited": limited, "strategies": strategies,
    "activation_checkpointing": activation_checkpointing, "packing": packing, "low_precision": low_precision,
}  # fmt: skip


def page() -> str:
    """The page with all of its tables."""
    text = PAGE.read_text()
    for name, make in TABLES.items():
        text = replaced(text, name, make())
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
