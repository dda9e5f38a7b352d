"""Write an HTML page with predicted tokens per second on 1, 2, 4, ... nodes, for zero3 over all ranks and for hybrid
sharding, which shards within each node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_fsdp.config import OffloadMode, Strategy
from llava_fsdp.plan.planner import Choice, Planner, Ranks
from llava_fsdp.plan.search import checkpointing_modes, plan_rows, splits_to_try
from llava_fsdp.report.downsample import Point
from llava_fsdp.report.html import heading, section, table, whole_page
from llava_fsdp.report.svg import COLOURS, Chart, Line, draw
from llava_fsdp.runtime.errors import ConfigError

STRATEGIES = {"zero3": Strategy.FULL_SHARD, "hybrid": Strategy.HYBRID_SHARD}


def scale(planner: Planner, gpus: int, nodes: int, is_free: bool) -> list[dict[str, Any]]:
    """Predict the fastest training that fits into memory on 1, 2, 4, ... and `nodes` nodes, with zero3 and with hybrid
    sharding. A step has the same number of samples for every number of nodes. Return a dict (nodes, sharding, tokens
    per second, ...) for each number of nodes and each sharding.

    With zero3, the rings of collectives go through all nodes and use all network ports of each node. With hybrid
    sharding, weights are gathered within a node, and once a step each GPU sends its shard of the gradients to the other
    replicas over its own port.

    Args:
        planner: predicts memory and time of one way to train.
        gpus: number of GPUs of a node.
        is_free: whether to try micro-batches of all sizes; if false, only those that the configuration sets.
    """
    points = []
    for count in node_counts(nodes):
        world_size, context = gpus * count, planner.cfg.parallel.num_context
        if world_size % context:
            continue
        if count > 1 and world_size > planner.cfg.global_batch_size * context:
            break  # more rows than samples
        for name, strategy in STRATEGIES.items():
            if count == 1 and name == "hybrid":
                continue  # within one node hybrid is the same as zero3
            modes = checkpointing_modes(planner.cfg, planner.machine.device)
            choices = [Choice(strategy, mode, OffloadMode.none) for mode in modes]
            splits = splits_to_try(planner, planner.cfg, world_size, is_free)
            row = plan_rows(planner, choices, Ranks(world_size, gpus, gpus), splits)[0]
            points.append(
                {
                    "nodes": count,
                    "sharding": name,
                    "activation_checkpointing": row.choice.activation_checkpointing.mode.value,
                    "fits": row.fits,
                    "tokens_per_second": row.tokens_per_second,
                    "step_seconds": row.step.seconds,
                    "communication_seconds": row.step.communication,
                    "exposed_seconds": row.step.exposed,
                }
            )
    return points


def node_counts(nodes: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < nodes:
        counts.append(counts[-1] * 2)
    return [*counts, nodes]


def shown(value: object) -> object:
    """Return a float as text with four significant digits, or rounded to a whole number from 1000 on. Other values are
    returned unchanged."""
    return value if not isinstance(value, float) else f"{value:.4g}" if abs(value) < 1000 else round(value)


def write_page(points: Sequence[dict[str, Any]], planner: Planner, path: Path) -> Path:
    """Write an HTML page with a chart and a table of the training speed on 1, 2, 4, ... nodes. Return its path.

    Args:
        points: the predictions, as `scale` returns them.
        planner: the planner that made them, from which the page's title is taken.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines = []
    for colour, name in enumerate(STRATEGIES):
        fitting = [p for p in points if p["sharding"] == name and p["fits"]]
        values = [Point(p["nodes"], *[p["tokens_per_second"]] * 3) for p in fitting]
        lines.append(Line(name, values, colour, dots=True))
    if points[0]["fits"]:
        one, counts = points[0]["tokens_per_second"], sorted({p["nodes"] for p in points})
        lines.append(Line("as many times one node", [Point(n, *[one * n] * 3) for n in counts], 7 + COLOURS))
    title = f"{planner.cfg.model.name}, {planner.machine.name}, {planner.cfg.global_batch_size} samples a step"
    chart = Chart("Tokens a second against nodes", lines, "predicted", logs=True, wide=True, along="nodes")
    names = [name for name in points[0] if name != "fits"]
    rows = [[shown(p[n]) for n in names] for p in points if p["fits"]]
    return write_chart(path, title, chart, "Fastest way to train on each", names, rows)


def write_chart(
    path: Path, title: str, chart: Chart, table_title: str, names: Sequence[str], rows: Sequence[Sequence[object]]
) -> Path:
    """Write an HTML page with a chart and a table below it.

    Args:
        names: names of the table's columns, with underscores for spaces.

    Raises:
        ConfigError: the file cannot be written.
    """
    values = table([name.replace("_", " ") for name in names], rows)
    body = heading("plan", title) + draw(chart) + section(table_title, values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(whole_page(title, body))
    except OSError as error:
        raise ConfigError(f"page={path} cannot be written: {error}") from error
    return path
