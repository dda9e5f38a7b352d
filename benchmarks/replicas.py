"""What does it cost to compare replicas before each checkpoint?

    python benchmarks/replicas.py                          # two gloo ranks; --hidden, --layers, --rows, --steps

Every rank holds all weights and moments (zero0), which is the most that can be compared. Steps and comparisons run in
turn. How to read the result is in benchmarks/README.md.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from capped import RANKS, attempt, facts, write
from provenance import REPOSITORY
from strategies import Case, configure, specialize, write_language_model

from llava_fsdp.config import Config
from llava_fsdp.data.toy_shapes import ensure_shapes
from llava_fsdp.parallel.ranks.mesh import World, make_meshes
from llava_fsdp.parallel.zero import SHARD_PLANS
from llava_fsdp.train.checkpoints.replica_check import all_tensors, check_replicas
from llava_fsdp.train.loop import fit
from llava_fsdp.train.setup.build_state import build_state

QUESTION = "what does it cost to compare replicas before each checkpoint?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="samples of a rank in a step")
    parser.add_argument("--steps", type=int, default=12, help="of which the first two are not timed")
    parser.add_argument("--activation_checkpointing", default="none")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    report = facts(QUESTION, options) | {
        "ranks": RANKS,
        "sizes": [measure(hidden, options) for hidden in options.hidden],
    }
    write(report, "replicas-cpu", options.out, draw)


def measure(hidden: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        ensure_shapes(work / "shapes")
        write_language_model(work / "language", argparse.Namespace(**vars(options) | {"hidden": hidden}))
        case = specialize(configure(Case("finetune", 1), options, work, RANKS), "zero0", "fp32")
        found = attempt(None, time_run, replace(case, max_steps=options.steps), work).results
    assert found, "nothing limits memory here"
    row: dict[str, Any] = {"hidden": hidden, **found[0]}
    row["of_a_step"] = statistics.median(row["check_seconds"]) / statistics.median(row["step_seconds"])
    row["of_training"] = row["of_a_step"] / row["every"]
    print(
        f"hidden {hidden}: {row['bytes'] / 1e6:,.0f} MB compared; {100 * row['of_a_step']:.2f} % of a step, "
        f"{100 * row['of_training']:.4f} % of a training with checkpoint.every={row['every']}",
        flush=True,
    )
    return row


def time_run(world: World, cfg: Config, work: Path) -> dict[str, Any]:
    """Wall-clock seconds of each step and of each comparison, on this rank, and the bytes that it compares."""
    plan = SHARD_PLANS[cfg.sharding.strategy]
    with contextlib.redirect_stderr(io.StringIO()):  # without the screen that a run begins with
        state = build_state(cfg, world, plan, make_meshes(world, plan, cfg))
    steps: list[float] = []
    checks: list[float] = []
    began = time.perf_counter()

    def after_step(_: object) -> None:
        nonlocal began
        steps.append(time.perf_counter() - began)
        began = time.perf_counter()
        check_replicas(state, work)
        checks.append(time.perf_counter() - began)
        began = time.perf_counter()

    fit(state, plan, cfg, after_step)
    compared = sum(t.numel() * t.element_size() for t in all_tensors(state).values())
    return {"bytes": compared, "every": cfg.checkpoint.every, "step_seconds": steps[2:], "check_seconds": checks[2:]}


def draw(pyplot: Any, report: dict[str, Any]) -> None:
    figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
    rows = report["sizes"]
    axis.bar([f"hidden {row['hidden']}" for row in rows], [100 * row["of_training"] for row in rows])
    axis.set_ylabel("% of the training time")
    figure.suptitle("Comparing replicas before each checkpoint")


if __name__ == "__main__":
    main()
