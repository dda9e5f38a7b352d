"""What does it cost, and what does it save, to let several ranks process a sample together?

    python benchmarks/context.py      # 1, 2 and 4 gloo ranks; then again under one RLIMIT_DATA

For samples of growing length and 1, 2 and 4 ranks per row: memory that a step takes beyond the states, CPU seconds of
all ranks, and bytes that a rank receives in attention, beside the arithmetic of the planner. Then the longest sample
that trains under a limit on the private memory of each rank. How to read the result is in benchmarks/README.md.
"""

import argparse
import contextlib
import io
import time
from pathlib import Path
from typing import Any

from capped import MIB, PeakPrivate, attempt, facts, largest, private_bytes, write
from hydra import compose, initialize_config_dir
from provenance import REPOSITORY

from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.data.synthetic import Contents, SyntheticLoader, synthetic_step
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.context.context_attention import plan_context
from llava_fsdp.parallel.ranks.comm_volume import CollectiveBytes
from llava_fsdp.parallel.ranks.mesh import World, make_meshes
from llava_fsdp.parallel.zero import SHARD_PLANS
from llava_fsdp.plan.time.step_time import context_volume
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_model import build_model, shape_of
from llava_fsdp.train.setup.build_state import assemble
from llava_fsdp.train.setup.dry_run import draw_shards

QUESTION = "what does it cost, and what does it save, to let several ranks process a sample together?"
RANKS = (1, 2, 4)
PIECE = 1024
"""Lengths that are tried under the limit are multiples of this number of tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--how", choices=["ulysses", "gather"], nargs="+", default=["ulysses", "gather"])
    parser.add_argument("--limit", type=int, default=150, help="MiB beyond the imports")
    parser.add_argument("--longest", type=int, default=64, help="most pieces of 1024 tokens that are tried under it")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    report: dict[str, Any] = facts(QUESTION, options) | {"rows": [], "longest": []}
    for how in options.how:
        for length in options.lengths:
            for ranks in RANKS:
                outcome = attempt(None, step_of, how, length, timeout=3600, size=ranks)
                assert outcome.results is not None
                report["rows"].append(row_of(how, length, ranks, outcome.results))
                print(describe(report["rows"][-1]), flush=True)
        limit = private_bytes() + options.limit * MIB
        for ranks in RANKS:

            def fits(pieces: int, how: str = how, ranks: int = ranks, limit: int = limit) -> bool:
                return bool(attempt(limit, step_of, how, PIECE * pieces, timeout=3600, size=ranks))

            found = PIECE * largest(fits, 2, options.longest)
            report["longest"].append({"how": how, "ranks": ranks, "limit_bytes": limit, "tokens": found})
            print(
                f"{how}, {ranks} ranks per row: {found:,} tokens under {options.limit} MiB beyond the imports",
                flush=True,
            )
    write(report, "context-cpu", options.out, draw)


def configured(how: str, length: int, ranks: int) -> Config:
    overrides = [
        "model.projector=random", "model.random_weights=true", "precision=fp32", "sharding=zero3", "pack=true",
        "activation_checkpointing=full", "data.workers=0", f"data.max_length={length}", "micro_batch_size=1",
        "tokens_per_micro_batch=null", f"global_batch_size={ranks}", f"parallel.context={ranks}",
        f"parallel.context_how={how if ranks > 1 else 'auto'}",
    ]  # fmt: skip
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(Config, compose("train", overrides))


def step_of(world: World, how: str, length: int) -> dict[str, Any]:
    """The second of two steps with one sample of `length` tokens on all ranks."""
    cfg = configured(how, length, world.size)
    plan = SHARD_PLANS[cfg.sharding.strategy]
    with contextlib.redirect_stderr(io.StringIO()):
        model = build_model(cfg, find_parts(cfg.model), world.device)
        shape = shape_of(model)
        own = length // world.size
        contents = Contents((length,), 1, 1, own // 2, shape.image_tokens, world.size)
        meshes = make_meshes(world, plan, cfg)
        state = assemble(model, SyntheticLoader(world.device, 2), draw_shards, cfg, world, plan, meshes)
    state.model.train()
    counter = CollectiveBytes()
    with counter:
        train_step(state, synthetic_step(0, contents, shape, cfg, world.size), plan, cfg, 0.0)
    step = synthetic_step(1, contents, shape, cfg, world.size)
    before, cpu, began = private_bytes(), time.process_time(), time.perf_counter()
    with PeakPrivate() as peak:
        train_step(state, step, plan, cfg, 0.0)
    planned = 0.0
    if world.size > 1:
        chosen = plan_context(cfg.parallel.context_how, model.parts.language, world.size, 0).how
        planned = context_volume(chosen, world.size, model.parts.language, 4, own, 1.0)[0] * len(step.micro_batches)
    return {
        "bytes": peak.bytes - before,
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.perf_counter() - began,
        "moved": counter.moved,
        "planned_bytes": planned,
    }


def row_of(how: str, length: int, ranks: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes are those of the rank with the most, CPU seconds those of all ranks together."""
    return {
        "how": how,
        "length": length,
        "ranks": ranks,
        "bytes": max(found["bytes"] for found in results),
        "cpu_seconds": sum(found["cpu_seconds"] for found in results),
        "seconds": max(found["seconds"] for found in results),
        "moved": results[0]["moved"],
        "planned_attention_bytes": results[0]["planned_bytes"],
    }


def describe(row: dict[str, Any]) -> str:
    return (
        f"{row['how']}, {row['length']:,} tokens, {row['ranks']} ranks per row: {row['bytes'] / MIB:,.0f} MiB beyond "
        f"the states, {row['cpu_seconds']:.1f} CPU seconds, "
        f"{row['planned_attention_bytes'] / MIB:,.0f} MiB received in "
        "attention (arithmetic)"
    )


def draw(pyplot: Any, report: dict[str, Any]) -> None:
    """Memory and CPU seconds against the length, a line for each number of ranks and way to attend."""
    _, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for how in dict.fromkeys(row["how"] for row in report["rows"]):
        for ranks in RANKS:
            own = [row for row in report["rows"] if (row["how"], row["ranks"]) == (how, ranks)]
            lengths = [row["length"] for row in own]
            style = {"marker": "o", "linestyle": "-" if how == "ulysses" else "--", "color": f"C{RANKS.index(ranks)}"}
            name = f"{ranks} rank{'s' * (ranks > 1)} per row, {how}"
            left.plot(lengths, [row["bytes"] / MIB for row in own], label=name, **style)
            right.plot(lengths, [row["cpu_seconds"] for row in own], label=name, **style)
    left.set_ylabel("MiB of a rank beyond its states")
    right.set_ylabel("CPU seconds of all ranks")
    for axes in (left, right):
        axes.set_xlabel("tokens of the sample")
        axes.set_ylim(bottom=0)
    left.legend(fontsize="small")


if __name__ == "__main__":
    main()
