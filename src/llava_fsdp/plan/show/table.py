"""Print a plan as tables, or convert it to a JSON object."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from llava_fsdp.config import ParallelConfig
from llava_fsdp.parallel.memory.memory import checkpoint_bytes
from llava_fsdp.plan.memory.published_formulas import formulas
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.search.layouts import Planned, Search, why_not
from llava_fsdp.plan.search.longest import MOST_TOKENS
from llava_fsdp.runtime.text.humanize import duration

GB = 1e9


def show_plan(
    console: Console,
    planner: Planner,
    rows: Sequence[PlanRow],
    shown: int,
    command: str | None,
    search: Search | None = None,
) -> None:
    """Print the recommended command, a table of the best `shown` rows, and the published memory formulas.

    Args:
        rows: the ways to train, the best first.
        command: None if no way fits into memory.
        search: the search in which the rows were found; None: all have the same layout.
    """
    machine, samples = planner.machine, planner.samples
    world_size, memory = rows[0].world_size, gigabytes(machine.memory)
    devices = f"on {world_size} x {machine.name} of {memory} GB"
    if machine.gpu is None:
        devices = f"{world_size} rank{'s' * (world_size > 1)} on {machine.name}, {memory} GB for each rank"
    console.print(
        f"{planner.cfg.model.checkpoint or planner.cfg.model.name}, stage={planner.cfg.stage.name}: "
        f"{planner.trainable:,} parameters train, "
        f"{devices}, {gigabytes(rows[0].usable)} GB for tensors"
    )
    # without tiles, as in whole models, each image token counts as one
    tiles = f"{samples.tiles:.2f} image tiles, " if samples.tile_tokens != 1 else ""
    console.print(
        f"a checkpoint: {gigabytes(checkpoint_bytes(planner.whole_weights, planner.cfg.precision))} GB; "
        f"samples: {samples.tokens:.0f} tokens, {samples.image_tokens:.0f} of them image tokens, {tiles}"
        f"{samples.labels:.0f} label tokens "
        f"({samples.source}); a step: {planner.cfg.global_batch_size} samples"
    )
    fitting = [row for row in rows if row.fits]
    if command is None:
        can_share = planner.cfg.can_share_rows and planner.cfg.parallel.num_context < world_size
        console.print(
            f"\nNothing fits; the first row is nearest. Use more GPUs, {'a larger parallel.context, ' * can_share}a "
            "smaller data.max_length, fewer parts in model.train, or, on GPUs with bf16, precision=bf16_pure."
        )
    else:
        best = fitting[0]
        chosen = [overrides_of(best.choice), *(layout_overrides(planner.cfg.parallel) if search is not None else [])]
        console.print(
            f"\nUse {' '.join(chosen)}: {gigabytes(best.bytes['total'])} GB, "
            f"{best.samples_per_second:.3g} samples/s, {best.step.seconds:.3g} s a step (predicted)"
            f"{all_steps(planner, best)}{off_device(best)}\n"
        )
        console.print(f"  {command}\n", soft_wrap=True)
    if search is not None:
        console.print(f"{search}")
        console.print(search_table(search.rows[:shown]))
        console.print(formula_table(planner, world_size))
        return
    console.print(rows_table(rows[:shown]))
    hidden = [row for row in rows if row not in rows[:shown]]
    if hidden:
        fit = sum(row.fits for row in hidden)
        console.print(f"{len(hidden)} more, of which {fit} fit but are slower: rows={len(rows)} shows all")
    console.print(formula_table(planner, world_size))


def gigabytes(size: float) -> str:
    """Format bytes as GB: with one decimal, or with four if it is more than 0 and less than 0.1."""
    return f"{size / GB:.{4 if 0 < size < GB / 10 else 1}f}"


def overrides_of(choice: Choice) -> str:
    """Return strategy, activation checkpointing and offload of a way to train as command-line overrides."""
    activation_checkpointing, offload = choice.activation_checkpointing, choice.offload.value
    words = [f"sharding={choice.zero}", f"activation_checkpointing={activation_checkpointing.mode.value}"]
    if activation_checkpointing.budget is not None:
        words.append(f"activation_checkpointing.budget={activation_checkpointing.budget}")
    return " ".join(words if offload == "none" else [*words, f"offload={offload}"])


def all_steps(planner: Planner, row: PlanRow) -> str:
    """Return the end of a sentence: how long the whole training takes; empty if its number of steps is not known."""
    cfg, steps = planner.cfg, planner.cfg.max_steps
    if steps is None and planner.samples.count is not None:
        steps = cfg.epochs * math.ceil(planner.samples.count / cfg.global_batch_size)
    return f"; about {duration(steps * row.step.seconds)} for {steps:,} steps" if steps else ""


def off_device(row: PlanRow) -> str:
    """Return the host memory and files that a row needs, as text. Whether this machine has them is not checked."""
    needs = {"host memory": row.host, "files": row.disk}
    return "".join(f"; {gigabytes(size)} GB of {where} a rank" for where, size in needs.items() if size)


def rows_table(rows: Sequence[PlanRow]) -> Table:
    """Return the table that `plan` prints, one row for each choice of settings."""
    table = Table(
        "sharding", "activation_checkpointing", "offload", "tokens x micro-batches", "fits", "total GB", "states",
        "gathered", "reducing", "acts.", "logits", "s/step", "tokens/s", "MFU", "sent GB",
        title=f"GB on a rank at the worst moment of a step; best first{ranks_of_a_row(rows)}", title_justify="left",
    )  # fmt: skip
    for row in rows:
        bytes_of = row.bytes
        states = bytes_of["parameters"] + bytes_of["gradients"] + bytes_of["optimizer"] + bytes_of["buffers"]
        table.add_row(
            row.choice.zero,
            row.choice.activation_checkpointing.mode.value,
            row.choice.offload.value,
            f"{row.tokens:,} x {len(row.micro_batches)}",
            "yes" if row.fits else "NO",
            gigabytes(bytes_of["total"]),
            gigabytes(states),
            *(gigabytes(bytes_of[name]) for name in ("gathered", "reducing", "activations", "logits")),
            f"{row.step.seconds:.3g}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.mfu:.0%}",
            gigabytes(row.sent.total),
        )
    return table


def layout_overrides(parallel: ParallelConfig) -> list[str]:
    """Return the kinds of parallelism as command-line overrides; empty for sharding alone."""
    sizes = {key: getattr(parallel, key) for key in ("context", "tensor", "expert", "pipeline")}
    overrides = [f"parallel.{key}={size}" for key, size in sizes.items() if size != 1]
    return [*overrides, f"parallel.schedule={parallel.schedule.value}"] if parallel.pipeline > 1 else overrides


def search_table(found: Sequence[Planned]) -> Table:
    """Return a table of what a search has found: settings in different layouts of ranks, the chosen one first."""
    table = Table(
        "layout", "sharding", "activation_checkpointing", "offload", "tokens x micro-batches", "GB", "s/step", "waits",
        "MFU", "why not", title="s/step: predicted seconds of a step; waits: seconds of communication that nothing "
        "hides", title_justify="left",
    )  # fmt: skip
    for one in found:
        row, words = one.row, layout_overrides(one.parallel)
        table.add_row(
            " ".join(word.removeprefix("parallel.") for word in words) or "sharding alone",
            row.choice.zero,
            row.choice.activation_checkpointing.mode.value,
            row.choice.offload.value,
            f"{row.tokens:,} x {len(row.micro_batches)}",
            gigabytes(row.bytes["total"]),
            f"{row.step.seconds:.3g}",
            f"{row.step.exposed:.2g}",
            f"{row.mfu:.0%}",
            "" if one is found[0] else why_not(one, found[0]),
        )
    return table


def search_object(search: Search) -> dict[str, Any]:
    """Return a JSON object about a search: the numbers of `layouts` of ranks, of `ways` to train that were compared,
    and of combinations whose memory was predicted (`measured`). Its `rows` have an object for each entry of
    `Search.rows`: how its ranks are divided (keys of `parallel`), and why the first one was chosen instead."""
    keys = "context", "tensor", "expert", "pipeline"
    rows = [
        {
            **{key: getattr(one.parallel, key) for key in keys},
            "schedule": one.parallel.schedule.value,
            "why_not": why_not(one, search.rows[0]) if number else None,
        }
        for number, one in enumerate(search.rows)
    ]
    return {"layouts": search.layouts, "ways": search.ways, "measured": search.measured, "rows": rows}


def ranks_of_a_row(rows: Sequence[PlanRow]) -> str:
    """Return how many ranks process a row together, as text; empty if each rank has its own rows."""
    context = rows[0].micro_batches[0].context
    return f"; {context} ranks process a row together (parallel.context={context})" if context > 1 else ""


def show_longest(console: Console, points: Sequence[dict[str, Any]], title: str) -> None:
    """Print the longest samples: a line for each number of GPUs, a column for each number of ranks of a row."""
    contexts = sorted({point["context"] for point in points})
    columns = [f"{context} rank{'s' * (context > 1)} per row" for context in contexts]
    table = Table("GPUs", *columns, title=f"longest sample in tokens that fits: {title}", title_justify="left")
    for gpus in sorted({point["gpus"] for point in points}):
        tokens_by_context = {point["context"]: point["tokens"] for point in points if point["gpus"] == gpus}
        cells = [
            "" if context not in tokens_by_context else longest_as_text(tokens_by_context[context])
            for context in contexts
        ]
        table.add_row(f"{gpus}", *cells)
    console.print(table)


def longest_as_text(tokens: int) -> str:
    """Return the cell of a table for the length of the longest sample that fits."""
    if not tokens:
        return "none"
    return f"{tokens:,}" if tokens < MOST_TOKENS else f"at least {tokens:,}"


def formula_table(planner: Planner, world_size: int) -> Table:
    """Return a table of published formulas for the bytes of weights, gradients and optimizer states on a rank."""
    table = Table(
        "formula", "", "GB a rank", "what differs here", title_justify="left",
        title=f"published formulas of the states alone, P = {planner.trainable:,}, N = {world_size}",
    )  # fmt: skip
    for formula in formulas(planner.trainable, world_size):
        table.add_row(formula.name, formula.text, gigabytes(formula.bytes), formula.differs)
    return table


def as_object(planner: Planner, rows: Sequence[PlanRow], command: str | None, more: dict[str, Any]) -> dict[str, Any]:
    """Return a plan as a JSON object. Units are bytes, seconds and rates per second.

    Args:
        rows: the ways to train, the best first.
        command: None if no way fits into memory.
        more: entries to add to the object.
    """
    machine, samples, world_size = planner.machine, planner.samples, rows[0].world_size
    return {
        "model": planner.cfg.model.name,
        "stage": planner.cfg.stage.name,
        "gpu": machine.name,
        "world_size": world_size,
        "capacity": machine.memory,
        "usable": rows[0].usable,
        "trainable": planner.trainable,
        "checkpoint_bytes": checkpoint_bytes(planner.whole_weights, planner.cfg.precision),
        "samples": {name: getattr(samples, name) for name in ("tokens", "image_tokens", "tiles", "labels", "source")},
        "rows": [row_object(row) for row in rows],
        "recommended": None
        if command is None
        else {**row_object(next(row for row in rows if row.fits)), "command": command},
        "formulas": {f.name: {"text": f.text, "bytes": f.bytes} for f in formulas(planner.trainable, world_size)},
        **more,
    }


def row_object(row: PlanRow) -> dict[str, Any]:
    """Return a row of the plan as the object that format=json prints."""
    choice = row.choice
    return {
        "sharding": row.choice.zero,
        "strategy": choice.strategy.value,
        "activation_checkpointing": choice.activation_checkpointing.mode.value,
        "budget": choice.activation_checkpointing.budget,
        "offload": choice.offload.value,
        "tokens_per_micro_batch": row.tokens,
        "micro_batches": len(row.micro_batches),
        "context": row.micro_batches[0].context,
        "bytes": row.bytes,
        "moment": row.peak_moment,  # when in a step the memory peak is
        "at_rest": row.at_rest,
        "host_bytes": row.host,
        "disk_bytes": row.disk,
        "fits": row.fits,
        "step_seconds": row.step.seconds,
        "samples_per_second": row.samples_per_second,
        "tokens_per_second": row.tokens_per_second,
        "mfu": row.mfu,
        "communication_bytes": row.sent.total,
        "exposed_seconds": row.step.exposed,
    }
