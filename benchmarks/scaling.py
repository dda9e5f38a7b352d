"""What does a step cost as sequences, pictures, the model, the ranks and the dataset grow?

    python benchmarks/scaling.py [FOLDER]

Every point is a process of its own. How to read the curves is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capped import MIB, facts, write
from hydra import compose, initialize_config_dir
from packing import write_model, write_records
from provenance import REPOSITORY
from torchruns import launch

from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.data.batching.batch import Step, StepFacts
from llava_fsdp.data.synthetic import Contents, SyntheticLoader, synthetic_micro_batch
from llava_fsdp.model.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.memory.malloc import return_freed_memory
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.comm_volume import CollectiveBytes
from llava_fsdp.parallel.ranks.fake_collectives import is_simulated, simulate_collectives
from llava_fsdp.parallel.ranks.mesh import World, distributed, make_meshes
from llava_fsdp.parallel.zero import SHARD_PLANS
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_model import build_model, shape_of
from llava_fsdp.train.setup.build_state import assemble, open_data
from llava_fsdp.train.setup.dry_run import draw_shards, held_bytes
from llava_fsdp.train.setup.peak_memory import PeakMeter

QUESTION = "what does a step cost as sequences, pictures, the model, the ranks and the dataset grow?"
SIDE, VOCABULARY, TEXT = 6, 2048, 64
PICTURE = SIDE * SIDE
RECORD = 96
"""Positions of a record of the datasets."""
CURVES = ("length", "pictures", "parameters", "ranks", "imagined", "dataset")


@dataclass(frozen=True)
class Point:
    """A step to measure: of every rank one packed row of equal samples, each a picture or more and a text."""

    curve: str
    at: int
    """Where on the curve's axis."""
    length: int = PICTURE + TEXT
    samples: int = 8
    pictures: int = 1
    """Of a sample."""
    hidden: int = 256
    ranks: int = 1
    imagined: int | None = None


def points(options: argparse.Namespace) -> list[Point]:
    """All curves but that of the dataset. With --quick two points of each, small."""
    hidden = 64 if options.quick else 256
    found = [
        *(Point("length", n, length=n, samples=1) for n in (128, 256, 512, 1024, 2048)),
        *(Point("pictures", n, length=n * PICTURE + TEXT, pictures=n) for n in (1, 2, 4, 8)),
        *(Point("parameters", n, hidden=n) for n in (128, 256, 384, 512, 768)),
        *(Point("ranks", n, ranks=n) for n in (1, 2, 4)),
        *(Point("imagined", n, imagined=n) for n in (8, 64, 256, 1024)),
    ]
    found = [Point(**asdict(p) | {"hidden": hidden}) if p.curve != "parameters" else p for p in found]
    found = [p for p in found if p.curve in options.curves]
    if options.quick:
        of = {curve: [p for p in found if p.curve == curve] for curve in CURVES}
        found = [p for own in of.values() for p in own[:2]]
    return found


# One point: in processes of its own


def configure(work: Path, point: Point) -> Config:
    world = point.imagined or point.ranks
    overrides = [
        "stage=finetune",
        f"model.language={work / f'hidden{point.hidden}' / 'language'}",
        f"model.vision={work / f'hidden{point.hidden}' / 'vision'}",
        "model.projector=random",
        "data.max_length=2048",
        "data.workers=0",
        f"output_dir={work / 'run'}",
        "precision=fp32",
        "activation_checkpointing=none",
        f"micro_batch_size={point.samples}",
        f"global_batch_size={point.samples * world}",
        *([f"dry_run={point.imagined}"] if point.imagined else []),
    ]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(Config, compose("train", overrides))


def contents_of(point: Point) -> Contents:
    tiles = point.samples * point.pictures
    labels = point.samples * max(1, point.length - point.pictures * PICTURE) // 2
    return Contents((point.length,) * point.samples, tiles, tiles, labels, tiles * PICTURE)


def measure(point: Point, steps: int, work: Path) -> dict[str, Any]:
    """Steps of this rank; the first makes the optimizer's states and is not timed."""
    cfg = configure(work, point)
    return_freed_memory()
    with distributed(cfg) as world, contextlib.redirect_stderr(io.StringIO()):
        plan = SHARD_PLANS[cfg.sharding.strategy]
        mesh = make_meshes(world, plan, cfg)
        model = build_model(cfg, find_parts(cfg.model), world.device)
        shape = shape_of(model)
        assert shape.image_tokens == PICTURE
        parameters = sum(p.numel() for p in model.parameters())
        meter = PeakMeter(world.device)
        state = assemble(model, SyntheticLoader(world.device, steps + 1), draw_shards, cfg, world, plan, mesh)
        held: dict[str, int] = {}
        state.optimizer.register_step_post_hook(lambda *_: held.update(held_bytes(state)))
        state.model.train()
        micro = synthetic_micro_batch(contents_of(point), shape, pack=True)
        cpu, wall = [], []
        counter = CollectiveBytes()
        if is_simulated():
            simulate_collectives(state.model, counter.traffic)
        for number in range(steps + 1):
            gc.collect()
            if dist.is_initialized() and not is_simulated():
                dist.barrier()
            began = time.process_time(), time.perf_counter()
            step = Step(StepFacts(number, samples=point.samples * world.size), [micro])
            with counter if number == 0 else contextlib.nullcontext():
                train_step(state, step, plan, cfg, 0.0)
            if number:
                cpu.append(time.process_time() - began[0])
                wall.append(time.perf_counter() - began[1])
        return {
            "cpu": cpu,
            "wall": wall,
            "at_rest": held,
            "peak": next(iter(meter.read().values())),
            "moved": counter.moved,
            "parameters": parameters,
            "first": world.is_first,
        }


def run_point(plan_file: Path) -> None:
    plan = json.loads(plan_file.read_text())
    torch.set_num_threads(1)
    found = measure(Point(**plan["point"]), plan["steps"], plan_file.parent)
    rank = os.environ.get("RANK", "0")
    plan_file.with_name(f"{plan_file.stem}-rank{rank}.json").write_text(json.dumps(found))


def row_of(point: Point, number: int, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a point; CPU seconds are of all ranks together, bytes of the rank with most."""
    plan = work / f"point{number}.json"
    plan.write_text(json.dumps({"point": asdict(point), "steps": options.steps}))
    what = f"{point.curve} {point.at}"
    launch([__file__, "--point", str(plan)], what, work / f"log{number}.txt", options.timeout, point.ranks)
    found = [json.loads((work / f"{plan.stem}-rank{r}.json").read_text()) for r in range(point.ranks)]
    cpu = [sum(of_step) for of_step in zip(*(f["cpu"] for f in found), strict=True)]
    wall = [max(of_step) for of_step in zip(*(f["wall"] for f in found), strict=True)]
    tokens = point.length * point.samples * point.ranks
    return {
        "curve": point.curve,
        "at": point.at,
        "tokens": tokens,
        "parameters": found[0]["parameters"],
        "cpu_seconds": {"min": min(cpu), "median": statistics.median(cpu), "all": cpu},
        "wall_seconds": {"min": min(wall), "median": statistics.median(wall), "all": wall},
        "tokens_per_cpu_second": tokens / min(cpu),
        "bytes_at_rest": max(sum(f["at_rest"].values()) for f in found),
        "bytes_peak": max(f["peak"] for f in found),
        "moved_by_a_rank": found[0]["moved"],
        "point": asdict(point),
    }


# The dataset


def measure_dataset(records: int, work: Path) -> dict[str, Any]:
    """Starting on so many records, for the first time and again, and preparing a step of them."""
    folder = work / f"records{records}"
    write_records(folder, [(RECORD, False)] * records, PICTURE, 1, captions=False)
    parts = min(work.glob("hidden*"))  # whichever: none of its weights are needed
    overrides = [
        "stage=finetune", f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}",
        "model.projector=random", "data=llava_json", f"data.path={folder / 'records.json'}",
        f"data.images={folder / 'images'}", "data.max_length=512", "data.workers=0", f"output_dir={work / 'run'}",
        "global_batch_size=32", "micro_batch_size=32", "precision=fp32",
    ]  # fmt: skip
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = load(Config, compose("train", overrides))
    model = build_llava(find_parts(cfg.model), cfg.model, DTYPES[cfg.precision.param_dtype])
    world = World(0, 1, 0, 1, torch.device("cpu"))
    starts = []
    for _ in range(2):
        began = cpu_of_all(), time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            loader = open_data(cfg, world, model)
        loader.steps.sampler.samples(0)
        starts.append((cpu_of_all() - began[0], time.perf_counter() - began[1]))
    prepared = []
    for number in range(min(8, loader.steps.sampler.per_epoch)):
        began_step = time.process_time()
        loader.steps.prepare(number)
        prepared.append(time.process_time() - began_step)
    return {
        "curve": "dataset",
        "at": records,
        "first_start": {"cpu_seconds": starts[0][0], "wall_seconds": starts[0][1]},
        "start": {"cpu_seconds": starts[1][0], "wall_seconds": starts[1][1]},
        "step_cpu_seconds": {"min": min(prepared), "median": statistics.median(prepared), "all": prepared},
    }


def cpu_of_all() -> float:
    """Of this process and of those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


# What is shown


def draw(pyplot: Any, report: dict[str, Any]) -> None:
    """A curve a panel, both axes logarithmic; seconds on the left, bytes on the right."""
    curves = list(dict.fromkeys(r["curve"] for r in report["rows"]))
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained", squeeze=False)
    for axis, curve in zip(axes.flat, curves, strict=False):
        rows = [r for r in report["rows"] if r["curve"] == curve]
        places = [r["parameters"] if curve == "parameters" else r["at"] for r in rows]
        axis.set(xscale="log", yscale="log", xlabel=AXES[curve], title=curve)
        if curve == "dataset":
            for name in ("first_start", "start"):
                axis.plot(places, [r[name]["cpu_seconds"] for r in rows], "o-", label=name.replace("_", " "))
            axis.plot(places, [r["step_cpu_seconds"]["min"] for r in rows], "o-", label="a step of 32 records")
        elif curve == "imagined":
            axis.plot(places, [r["bytes_at_rest"] / MIB for r in rows], "o-", label="MiB at rest, a rank")
            axis.plot(places, [r["bytes_peak"] / MIB for r in rows], "o-", label="MiB at the peak, a rank")
            axis.plot(places, [sent(r) / MIB for r in rows], "o-", label="MiB sent in a step, a rank")
        else:
            axis.plot(places, [r["cpu_seconds"]["min"] for r in rows], "o-", label="CPU seconds of a step")
            beside = axis.twinx()
            beside.plot(places, [r["bytes_peak"] / MIB for r in rows], "C1s--", label="MiB at the peak, a rank")
            beside.set_ylabel("MiB")
            beside.legend(fontsize="x-small", loc="lower right")
        axis.legend(fontsize="x-small", loc="upper left")
    for axis in list(axes.flat)[len(curves) :]:
        axis.set_visible(False)
    figure.suptitle(f"{report['machine']['device']}, torch {report['torch']}, fp32, {report['date'][:10]}")


AXES = {
    "length": "positions of the one sample",
    "pictures": "pictures of each of 8 samples",
    "parameters": "parameters",
    "ranks": "ranks on gloo, 8 samples each",
    "imagined": "imagined ranks",
    "dataset": "records",
}


def sent(row: dict[str, Any]) -> int:
    return sum(kind["sent"] for kind in row["moved_by_a_rank"].values())


def line_of(row: dict[str, Any]) -> str:
    name = f"{row['curve']} {row['at']}"
    if row["curve"] == "dataset":
        first, again, step = row["first_start"], row["start"], row["step_cpu_seconds"]["min"]
        return (
            f"{name}: CPU s first start {first['cpu_seconds']:.2f}, start {again['cpu_seconds']:.2f}, step {step:.4f}"
        )
    size = f"{row['bytes_at_rest'] / MIB:.1f} MiB at rest, {row['bytes_peak'] / MIB:.1f} at the peak"
    return f"{name}: {row['cpu_seconds']['min']:.3f} CPU s a step, {size}, {sent(row) / MIB:.1f} MiB sent"


def main() -> None:
    options = parse()
    if options.point is not None:
        return run_point(options.point)
    torch.set_num_threads(1)
    report = facts(QUESTION, options)
    report["command"] = report["command"].replace(f" {options.folder}", "")  # a folder of this machine
    rows = []
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        work = Path(folder)
        todo = points(options)
        for hidden in sorted({p.hidden for p in todo} or {64}):
            write_model(work / f"hidden{hidden}", hidden, 4, SIDE, VOCABULARY)
        for number, point in enumerate(todo):
            rows.append(row_of(point, number, work, options))
            print(line_of(rows[-1]), flush=True)
        for records in [100, 1000] if options.quick else [1000, 10_000, 100_000]:
            if "dataset" in options.curves:
                rows.append(measure_dataset(records, work))
                print(line_of(rows[-1]), flush=True)
    not_run = ["CUDA: the curves are a CPU's", "more than 4 real ranks: those of `imagined` move no bytes"]
    write(report | {"not_run": not_run, "rows": rows}, "scaling-cpu", options.folder, draw)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("folder", nargs="?", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a point; the fastest counts")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a point may take")
    parser.add_argument("--quick", action="store_true", help="two points of each curve, a small model")
    parser.add_argument("--point", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.quick:
        options.steps = min(options.steps, 2)
    return options


if __name__ == "__main__":
    sys.exit(main())
