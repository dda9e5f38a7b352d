"""Past one machine, on paper: tokens a second against nodes, for zero3 over all ranks and hybrid within nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_fsdp.config import OffloadMode, Strategy
from llava_fsdp.plan.planner import Choice, Planner
from llava_fsdp.plan.search import checkpointings, plan_rows, ways_to_cut
from llava_fsdp.runtime.errors import ConfigError

STRATEGIES = {"zero3": Strategy.FULL_SHARD, "hybrid": Strategy.HYBRID_SHARD}


def scale(planner: Planner, gpus: int, nodes: int, is_free: bool) -> list[dict[str, Any]]:
    """For 1, 2, 4, ... nodes the fastest row of each that fits; a step has the same samples on any number.

    Rings of zero3 go through all nodes, over all ports of each; hybrid gathers within a node and sends shards of
    gradients to the other replicas once a step, each GPU over its own port.

    Args:
        is_free: micro-batches may be any, and not only those of the configuration's keys.
    """
    found = []
    for count in node_counts(nodes):
        world_size = gpus * count
        if count > 1 and world_size > planner.cfg.global_batch_size:
            break  # more ranks than samples
        for name, strategy in STRATEGIES.items():
            if count == 1 and name == "hybrid":
                continue  # within one node it is zero3
            ways = [Choice(strategy, r, OffloadMode.none) for r in checkpointings(planner.cfg, planner.machine.device)]
            cut = ways_to_cut(planner, planner.cfg, world_size, is_free)
            row = plan_rows(planner, ways, world_size, gpus, gpus, cut)[0]
            found.append(
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
    return found


def node_counts(nodes: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < nodes:
        counts.append(counts[-1] * 2)
    return [*counts, nodes]


def draw(points: Sequence[dict[str, Any]], planner: Planner, path: Path) -> Path:
    """The picture of `scale`.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("nodes= draws with matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in STRATEGIES:
        own = [p for p in points if p["sharding"] == name and p["fits"]]
        axes.plot([p["nodes"] for p in own], [p["tokens_per_second"] for p in own], marker="o", label=name)
    counts = sorted({p["nodes"] for p in points})
    if points[0]["fits"]:
        many = [points[0]["tokens_per_second"] * count for count in counts]
        axes.plot(counts, many, color="grey", linestyle=":", label="as many times one node")
    axes.set(xlabel="nodes", ylabel="tokens a second, predicted", xscale="log", yscale="log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_xticks([], minor=True)
    axes.set_title(f"{planner.cfg.model.name}, {planner.machine.name}, {planner.cfg.global_batch_size} samples a step")
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"picture={path} cannot be written: {error}") from error
    return path
