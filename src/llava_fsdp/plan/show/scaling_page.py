"""Write an HTML page with predicted tokens per second on 1, 2, 4, ... nodes, for zero3 over all ranks and for hybrid
sharding, which shards within each node."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from llava_fsdp.config import OffloadMode, Strategy
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.layouts import Planned
from llava_fsdp.plan.search.search import checkpointing_modes, plan_rows, splits_to_try
from llava_fsdp.plan.time.hardware import Machine
from llava_fsdp.plan.time.step_time import HOP, HOP_BETWEEN, LATENCY, LINK_EFFICIENCY, NCCL_SHARE, OVERLAP
from llava_fsdp.plan.workload import Samples
from llava_fsdp.report.charts.downsample import Point
from llava_fsdp.report.charts.html import heading, section, table, whole_page
from llava_fsdp.report.charts.svg import COLOURS, Chart, Line, draw
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.progress import Watch, watch_silently

STRATEGIES = {"zero3": Strategy.FULL_SHARD, "hybrid": Strategy.HYBRID_SHARD}
SEARCHED = "fastest layout"
"""Name of the curve with the fastest of all layouts of ranks."""


def scale(
    planner: Planner,
    gpus: int,
    nodes: int,
    is_free: bool,
    search: Callable[[int], Planned] | None = None,
    show: Watch = watch_silently,
) -> list[dict[str, Any]]:
    """Predict the fastest training that fits on 1, 2, 4, ... and `nodes` nodes of `gpus` GPUs, with zero3, with hybrid
    sharding and, if `search` is given, with the fastest layout of ranks. A step has the same number of samples on each.
    Return an object for each number of nodes and each curve.

    With zero3, rings of collectives go through all nodes and use all their network ports. With hybrid sharding, weights
    are gathered within a node, and once a step each GPU sends its gradient shard to other replicas over its own port.

    Args:
        is_free: whether to try micro-batches of all sizes, and not only those that the configuration sets.
        search: finds the fastest way on a number of ranks, and raises ConfigError if there is no layout of so many.
    """
    points = []
    counts = node_counts(nodes)
    with show("numbers of nodes", len(counts)) as advance:
        for count in counts:
            points += points_of(planner, gpus, count, is_free, search)
            advance(1)
    return points


def points_of(
    planner: Planner, gpus: int, count: int, is_free: bool, search: Callable[[int], Planned] | None
) -> Iterator[dict[str, Any]]:
    """Yield the point of each curve for `count` nodes of `gpus` GPUs: zero3, hybrid sharding and, with `search` (which
    finds the fastest layout of so many ranks), the fastest layout. `is_free`: try micro-batches of all sizes."""
    for name, row in plain_ways(planner, gpus, count, is_free):
        yield point(count, name, row)
    if search is not None:
        with contextlib.suppress(ConfigError):  # no layout of so many ranks is possible: the curve has no point here
            fastest = search(gpus * count)
            parallel = fastest.parallel
            sizes = {key: getattr(parallel, key) for key in ("context", "tensor", "expert", "pipeline")}
            layout = [fastest.row.choice.zero, *(f"{key} {size}" for key, size in sizes.items() if size > 1)]
            yield point(count, SEARCHED, fastest.row, ", ".join(layout))


def plain_ways(planner: Planner, gpus: int, count: int, is_free: bool) -> Iterator[tuple[str, PlanRow]]:
    """Yield, for zero3 and hybrid sharding, (name, the fastest prediction that fits into memory or, if none fits, the
    one with the fewest bytes) on `count` nodes of `gpus` GPUs. What is impossible with so many ranks is left out."""
    world_size, context = gpus * count, planner.cfg.parallel.num_context
    too_many = count > 1 and world_size > planner.cfg.global_batch_size * context  # more rows than samples
    if world_size % context or too_many:
        return
    for name, strategy in STRATEGIES.items():
        if count == 1 and name == "hybrid":
            continue  # within one node hybrid is the same as zero3
        choices = [
            Choice(strategy, mode, OffloadMode.none) for mode in checkpointing_modes(planner.cfg, planner.machine)
        ]
        try:
            splits = splits_to_try(planner, planner.cfg, world_size, is_free)
            rows = plan_rows(planner, choices, RankCounts(world_size, gpus, gpus), splits, watch_silently)
        except ConfigError:  # impossible with so many ranks
            continue
        yield name, rows[0]


def point(nodes: int, name: str, row: PlanRow, layout: str = "") -> dict[str, Any]:
    """Return a point of the curve `name` for JSON. `layout` has the kinds of parallelism of the fastest layout."""
    return {
        "nodes": nodes,
        "sharding": name,
        "layout": layout,
        "activation_checkpointing": row.choice.activation_checkpointing.mode.value,
        "fits": row.fits,
        "tokens_per_second": row.tokens_per_second,
        "step_seconds": row.step.seconds,
        "communication_seconds": row.step.communication,
        "exposed_seconds": row.step.exposed,
    }


def node_counts(nodes: int) -> list[int]:
    """Return the powers of two below `nodes`, and `nodes` itself."""
    counts = [1]
    while counts[-1] * 2 < nodes:
        counts.append(counts[-1] * 2)
    return [*counts, nodes]


def shown(value: object) -> object:
    """Return a float as text with four significant digits, or rounded to an integer from 1000 on."""
    return value if not isinstance(value, float) else f"{value:.4g}" if abs(value) < 1000 else round(value)


def write_page(points: Sequence[dict[str, Any]], planner: Planner, path: Path) -> Path:
    """Write an HTML page with a chart and a table of `points`, made by `point`: predicted speed with a number of nodes,
    for each sharding strategy and for the fastest layout of ranks (SEARCHED). Return its path. Raise ConfigError if the
    file cannot be written."""
    lines = []
    for colour, name in enumerate((*STRATEGIES, SEARCHED)):
        fitting = [p for p in points if p["sharding"] == name and p["fits"]]
        if not fitting and name == SEARCHED:
            continue
        values = [Point.exact(p["nodes"], p["tokens_per_second"]) for p in fitting]
        lines.append(Line(name, values, colour, dots=True))
    if points[0]["fits"]:
        # a dashed line (color numbers from COLOURS on are dashed): the speed of one node, times the number of nodes
        one, counts = points[0]["tokens_per_second"] / points[0]["nodes"], sorted({p["nodes"] for p in points})
        lines.append(Line("in proportion to the nodes", [Point.exact(n, one * n) for n in counts], 7 + COLOURS))
    title = f"{planner.cfg.model.name}, {planner.machine.name}, {planner.cfg.global_batch_size} samples a step"
    chart = Chart("Tokens a second against nodes", lines, "predicted", logs=True, wide=True, along="nodes")
    names = [name for name in points[0] if name != "fits"]
    rows = [[shown(p[n]) for n in names] for p in points if p["fits"]]
    assumed = assumptions(planner.machine, planner.samples)
    return write_chart(path, ChartPage(title, chart, "Fastest way to train on each", names, rows, assumed))


def assumptions(machine: Machine, samples: Samples) -> list[str]:
    """Return, one per line, what the predictions assume about the machine and the data."""
    lines = [
        f"Samples have {samples.tokens:,.0f} tokens on average, {samples.image_tokens:,.0f} of them image tokens and "
        f"{samples.labels:,.0f} labels ({samples.source})."
    ]
    if machine.gpu is not None:
        gpu = machine.gpu
        lines += [
            f"Blocks reach {gpu.efficiency:.1%} of the peak FLOPs ({gpu.basis.value}). Peaks and links: {gpu.source}.",
            f"Two GPUs of a node exchange {gpu.link / 1e9:g} GB/s in each direction, and each GPU sends "
            f"{gpu.network / 1e9:g} GB/s to other nodes; collectives reach {LINK_EFFICIENCY:.0%} of that, and take "
            f"{NCCL_SHARE:.0%} of the GPU from computation beside them.",
        ]
    return [
        *lines,
        f"A collective takes {LATENCY * 1e6:g} us to start and {HOP * 1e6:g} us for each rank of its ring, and "
        f"{HOP_BETWEEN * 1e6:g} us for each node.",
        f"Collectives of weights and gradients overlap with {OVERLAP:.0%} of the computation; those within layers "
        "do not overlap.",
        "Samples are dealt to ranks as in a training, data is never waited for, and no node is slower than another.",
    ]


@dataclass(frozen=True)
class ChartPage:
    """A page with a chart, a table below it, and what the values assume."""

    title: str
    chart: Chart
    table_title: str
    names: Sequence[str]
    """Names of the table's columns, with underscores for spaces."""
    rows: Sequence[Sequence[object]]
    assumed: Sequence[str] = ()


def write_chart(path: Path, page: ChartPage) -> Path:
    """Write a page as an HTML file, and return its path. Raises ConfigError if the file cannot be written."""
    values = table([name.replace("_", " ") for name in page.names], page.rows)
    body = heading("plan", page.title) + draw(page.chart) + section(page.table_title, values)
    if page.assumed:
        body += section("Assumptions", "<ul>", *(f"<li>{escape(line)}</li>" for line in page.assumed), "</ul>")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(whole_page(page.title, body))
    except OSError as error:
        raise ConfigError(f"page={path} cannot be written: {error}") from error
    return path
