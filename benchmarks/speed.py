"""How fast is a training step of LLaVA-1.5-7B on one GPU, compared with others? At most ten minutes a call.

    python benchmarks/speed.py FOLDER                      # stage 2: ours, transformers' model, DeepSpeed
    python benchmarks/speed.py FOLDER --stage pretrain     # stage 1
    python benchmarks/speed.py FOLDER --variants           # ours: compiled or not, fp8, one of eight ranks, ...
    python benchmarks/speed.py FOLDER --brief --one-process --profile --no-first-loss    # ours in little time
    python benchmarks/speed.py FOLDER --tiny               # a small model, to try the script itself; a CPU will do

Weights are random, of the real shapes; samples are drawn from a seed and are the same for all. First the device's own
limits are measured, and the losses of ours and of transformers' model are compared. Every way runs in a process of its
own, or with --one-process one after another in this one. benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from activation_checkpointing import drawn
from bench import Report, clock, command_line, composed, facts, reason, run_json, show, write, write_json
from memory import write_model
from speed_peers import PEERS, Work, samples_of_steps, time_steps

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch, Step, StepFacts
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.data.batching.packing import pack_step
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.parallel.local_shards import local_shards
from llava_fsdp.parallel.malloc import extend_segments
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.plan.time.mfu import utilization_of
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_model import shape_of
from llava_fsdp.train.setup.dry_run import settle_auto

LARGE = 130e9
"""Bytes: a device with so much holds a 7B's fp32 masters, gradients and moments; a smaller one trains in bf16 alone."""
EQUAL_WITHIN = 1e-2
"""Relative, of bf16 losses."""
PRODUCTS = ((8192, 8192, 8192), (16384, 4096, 4096), (16384, 4096, 11008), (16384, 11008, 4096))
"""m, k, n: the customary one, and LLaVA-1.5-7B's own, of 16384 positions."""


@dataclass(frozen=True)
class Way:
    """One line of the table."""

    name: str
    peer: str | None = None
    """A key of speed_peers.PEERS; None: ours."""
    overrides: tuple[str, ...] = ()
    needs: str | None = None
    """A package."""
    is_move: bool = False
    """Whether it is a change that this version may lack; it gets one warm-up step and three others."""


AUTO = ("activation_checkpointing=auto", "tokens_per_micro_batch=auto")
FIXED = ("tokens_per_micro_batch=8192",)
NONE = ("compile=auto", "activation_checkpointing=none", *FIXED)
SIDE_BY_SIDE = [
    Way("ours", None, AUTO),
    Way("transformers, padded, full activation checkpointing", "as_it_comes"),
    Way("transformers, tuned: sorted by length, no activation checkpointing", "tuned"),
    Way("transformers with Liger kernels, tuned", "liger", needs="liger_kernel"),
    Way("DeepSpeed ZeRO-3, padded, full activation checkpointing", "deepspeed", needs="deepspeed"),
    Way("ours, once more", None, AUTO),
]
VARIANTS = [
    Way("compiled", None, ("compile=true", "activation_checkpointing=full", *FIXED)),
    Way("not compiled", None, ("compile=false", "activation_checkpointing=full", *FIXED)),
    *(Way(f"compiled, {mode}", None, ("compile=true", f"activation_checkpointing={mode}", *FIXED))
      for mode in ("selective", "dynamic", "none")),
    Way("compiled, fp8", None, ("compile=true", "activation_checkpointing=full", "precision.linear=fp8", *FIXED),
        "torchao"),
    Way("compiled, none, int8", None,
        ("compile=true", "activation_checkpointing=none", "precision=int8_mixed", *FIXED), "torchao"),
    Way("auto", None, AUTO),
    Way("auto, fp8", None, ("precision.linear=fp8", *AUTO), "torchao"),
    Way("one of 8 simulated ranks, zero3: gathers are copies in the GPU's own memory, not NVLink", None,
        ("dry_run=8", "sharding=zero3", "activation_checkpointing=none", *FIXED)),
]  # fmt: skip
BRIEF = [
    Way("bf16", None, NONE),
    Way("bf16, move 1: gradients of weights added inside the products", None,
        (*NONE, "precision.linear=fp32_sums"), is_move=True),
    Way("fp8", None, ("precision.linear=fp8", *NONE), "torchao"),
]  # fmt: skip
"""Of the call `brief` of gpu.sh."""

# Ours


def precision_of(work: Work) -> str:
    return "bf16" if work.has_masters else "bf16_pure"


def configure(work: Work, overrides: tuple[str, ...]) -> Config:
    parts = [f"model.language={work.models / 'language'}", f"model.vision={work.models / 'vision'}"]
    named = [
        f"stage={work.stage}",
        *([f"model={work.model}"] if work.model else parts),
        "model.projector=random",
        f"data.max_length={work.longest}",
        f"precision={precision_of(work)}",
        "optim.clip=1.0",
        f"global_batch_size={work.samples}",
        *(o.replace("8192", str(work.row)) for o in overrides),
    ]
    return composed(named)


def run_ours(work: Work, way: Way, keep: Callable[[Report], None]) -> Report:
    cfg = configure(work, way.overrides)
    with distributed(cfg) as world:
        cfg = settle_auto(cfg, world)
        state, model = drawn(cfg, world)
        used = utilization_of(model, cfg, world.device, 1)
        steps = [our_step(n, work, cfg, model, world.device) for n in range(work.steps)]

        def run(number: int) -> float:
            result = train_step(state, steps[number], cfg, 0.0)
            if state.dynamic is not None:
                state.dynamic.after_step(result.skipped)
            return result.loss

        if state.dynamic is not None:  # it measures in its first three steps
            for number in (0, 1):
                run(number)
        kernel = model.kernel.attention.value if model.kernel else "sdpa"
        settled = {
            "activation_checkpointing": cfg.activation_checkpointing.mode.value,
            "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
            "attention": kernel,
            "micro_batches": [len(step.micro_batches) for step in steps],
            "flops": [used.of(step.facts, 1.0)["flops"] for step in steps],
            "peak_flops": used.peak,
            "peak_source": used.source,
        }
        return time_steps(work, world.device, run, lambda found: keep(found | settled)) | settled


def our_step(number: int, work: Work, cfg: Config, model: Llava, device: torch.device) -> Step:
    """The step's samples, packed as training packs them."""
    shape = shape_of(model)
    texts = samples_of_steps(work, shape.image_tokens, shape.vocab_size)[number]
    lengths = [shape.image_tokens + len(text) for text in texts]
    ones = np.ones(len(texts), dtype=np.int64)
    costs = shape.cost(np.array(lengths), np.array([len(t) - 1 for t in texts]), ones).tolist()
    (micros,) = pack_step(lengths, costs, 1, cfg.row_tokens)
    labels = sum(len(text) - 1 for text in texts)
    facts = StepFacts(
        number, samples=len(texts), tokens=sum(lengths), label_tokens=labels, images=len(texts),
        token_pairs=sum(n * n for n in lengths), tiles=len(texts),
    )  # fmt: skip
    sizes = shape.image_tokens, shape.image_size, labels
    rows = [packed([texts[i] for i in micro], *sizes) for micro in micros]
    return Step(facts, placed(rows, device))


def placed(rows: list[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """Micro-batches as training's loader delivers them: for a GPU in pinned memory, so that no copy makes the host
    wait."""
    return [row.map(torch.Tensor.pin_memory) for row in rows] if device.type == "cuda" else rows


def packed(texts: list[torch.Tensor], image: int, side: int, labels: int) -> MicroBatch:
    """An image first in every sample, then its text, all of which but the first id is a label."""
    lengths = [image + len(text) for text in texts]
    begins = (torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)).tolist()
    ids = torch.cat([torch.cat([torch.zeros(image, dtype=torch.int64), text]) for text in texts])
    shown = torch.cat([torch.arange(begin, begin + image) for begin in begins])
    asked = torch.cat([torch.arange(b + image, b + n - 1) for b, n in zip(begins, lengths, strict=True)])
    return MicroBatch(
        input_ids=ids[None],
        images={
            "positions": shown,
            "rows": torch.arange(len(shown)),
            "tiles": torch.zeros((len(texts), 3, side, side), dtype=torch.uint8),
        },
        label_positions=asked,
        label_ids=ids[asked + 1],
        scale=1 / labels,
        **boundaries(tuple(lengths)),
    )


# What the device can do, and whether both models are the same


def ceilings(device: torch.device, tiny: bool) -> Report:
    """TFLOPs a second of bf16 products of random numbers, and bytes a second of copies within the device's memory."""
    found: Report = {"products": {}}
    for m, k, n in ((512, 512, 512),) if tiny else PRODUCTS:
        left, right = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((m, k), (k, n)))
        found["products"][f"{m}x{k}x{n}"] = 2 * m * k * n / best_of(device, lambda a=left, b=right: a @ b) / 1e12
    source = torch.empty((1 << 20) if tiny else (1 << 31), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    found["copy_bytes_per_second"] = 2 * source.nbytes / best_of(device, lambda: target.copy_(source))
    return found


def best_of(device: torch.device, action: Any, repeats: int = 20) -> float:
    for _ in range(3):
        action()
    seconds = []
    for _ in range(repeats):
        started = wall(device)
        action()
        seconds.append(wall(device) - started)
    return min(seconds)


def wall(device: torch.device) -> float:
    return clock(device) if device.type == "cuda" else time.perf_counter()


def compare_losses(work: Work) -> dict[str, float]:
    """The first loss of both models, of a cut of two layers with the same weights, packed and padded.

    Raises:
        SystemExit: they differ by more than bf16 explains; nothing that is timed would mean anything.
    """
    import speed_peers

    cfg = configure(work, ("activation_checkpointing=none", *FIXED))
    with distributed(cfg) as world, tempfile.TemporaryDirectory() as folder:
        parts = shapes_of(cfg.model)
        cut = Path(folder)
        for name, config in (("language", parts.language), ("vision", parts.vision)):
            (cut / name).mkdir()
            described = config.to_dict() | ({"num_hidden_layers": 2} if name == "language" else {})
            (cut / name / "config.json").write_text(json.dumps(described, default=str))
        small = Work(**{**vars(work), "model": None, "models": cut, "samples": work.rows})
        cfg = configure(small, ("activation_checkpointing=none", *FIXED))
        state, model = drawn(cfg, world)
        weights = {name: shard.tensors[0] for name, shard in local_shards(model, state.masters).items()}
        theirs = speed_peers.build(small, model.parts.language, model.parts.vision, world.device)
        named = dict(theirs.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                named[name if name.startswith("lm_head") else f"model.{name}"].copy_(value)
        step = our_step(0, small, cfg, model, world.device)
        with torch.no_grad():
            ours = sum(
                float(micro.scale * model(**micro.inputs)) for micro in map(state.loader.to_device, step.micro_batches)
            )
            (micro,) = speed_peers.prepared(small, theirs, speed_peers.by_length, small.rows, world.device)[0]
            with torch.autocast(world.device.type, torch.bfloat16, enabled=small.has_masters):
                other = float(theirs(**micro).loss)
    found = {"ours": ours, "transformers": other, "relative": abs(ours - other) / abs(other)}
    if not found["relative"] < EQUAL_WITHIN:
        raise SystemExit(f"the models do not compute the same: {found}")
    return found


# All of them


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--stage", choices=["finetune", "pretrain"], default="finetune")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--variants", action="store_true", help="ours in several ways, and nobody else")
    which.add_argument("--brief", action="store_true", help="ours in bf16, with changes, in fp8; and no plot")
    parser.add_argument("--tiny", action="store_true", help="a small model and short steps")
    parser.add_argument("--row", type=int, help="tokens of a micro-batch instead of 8192, where it is not planned")
    parser.add_argument("--steps", type=int, help="steps that are timed, behind those of the warm-up")
    parser.add_argument("--limit", type=float, default=110, help="seconds that one way may take in its own process")
    parser.add_argument("--ways", nargs="*", help="only these, by the beginning of their names")
    parser.add_argument("--name", help="of the result, to keep it apart")
    parser.add_argument("--one-process", action="store_true", help="all ways run one after another in this process")
    parser.add_argument("--profile", action="store_true", help="the last step once more, with its seconds by kind")
    parser.add_argument("--no-first-loss", action="store_true", help="ours is not compared with transformers' model")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(json.loads(options.child))))
        return
    report = facts("how fast is a training step on one GPU, compared with others?", options)
    kind = "-variants" if options.variants else "-brief" if options.brief else ""
    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        write_model(Path(folder), 64, 2, 512)
        work = work_of(options, Path(folder))
        report["work"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(work).items() if k != "models"}
        report["work"]["precision"] = precision = precision_of(work)
        report["ways"] = []
        device = "cuda" if torch.cuda.is_available() else "cpu"
        name = options.name or f"speed-{options.stage}{kind}-{precision}-{device}"

        def save() -> None:
            rate(report)
            write_json(report, name, options.folder)

        report["ceilings"] = start("ceilings", work, options)
        save()
        if options.no_first_loss:
            report["first_loss"] = {"not_run": "--no-first-loss"}
        else:
            report["first_loss"] = found = start("first_loss", work, options)
            save()
            if "failed" in found or "not_run" in found:
                raise SystemExit(f"first_loss: {found}")
        for way in VARIANTS if options.variants else BRIEF if options.brief else SIDE_BY_SIDE:
            if wanted(way, options):
                time_way(way, work, options, report["ways"], save)
                save()
    show_rows(report)
    if not options.brief:
        write(report, name, options.folder, draw)
    if any("failed" in row for row in (report["ceilings"], *report["ways"])):
        raise SystemExit(1)


def wanted(way: Way, options: argparse.Namespace) -> bool:
    return not options.ways or way.name.startswith(tuple(options.ways))


def work_of(options: argparse.Namespace, models: Path) -> Work:
    large = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > LARGE
    if options.tiny:
        work = Work(options.stage, None, models, 8, 4, 3, 1, 160, 320, 40, True)
    elif options.stage == "pretrain":
        work = Work("pretrain", "llava_v1_5_7b", models, 128, 32, 6, 2, 2048, 8192, 20, large)
    else:
        work = Work("finetune", "llava_v1_5_7b", models, 64, 16, 6, 2, 2048, 8192, 265, large)
    steps = work.steps if options.steps is None else work.warmup + options.steps
    return replace(work, row=options.row or work.row, steps=steps, profile=options.profile)


def time_way(way: Way, work: Work, options: argparse.Namespace, rows: list[Report], save: Callable[[], None]) -> None:
    """Append the row of a way, and fill it as far as the way comes.

    Args:
        save: writes the rows; called after every step in this process.
    """
    row: Report = {"name": way.name, "failed": "cut off before its end"}
    rows.append(row)

    def keep(found: Report) -> None:
        row.update(found)
        save()

    found: Report
    if way.needs is not None and importlib.util.find_spec(way.needs) is None:
        found = {"not_run": f"{way.needs} is not installed"}
    elif way.peer == "deepspeed" and not torch.cuda.is_available():
        found = {"not_run": "needs a GPU here; benchmarks/peers.py has it on the CPU"}
    else:
        found = start(way.name, replace(work, steps=4, warmup=1) if way.is_move else work, options, way, keep)
    del row["failed"]
    row.update(found)
    why = f"NOT RUN: {row['not_run']}" if "not_run" in row else row.get("failed") or min(row["seconds"])
    print(f"{way.name}: {why}", flush=True)


def start(
    what: str,
    work: Work,
    options: argparse.Namespace,
    way: Way | None = None,
    keep: Callable[[Report], None] = lambda found: None,
) -> Report:
    """What `run_child` finds, in a process of its own, so that nothing of one is left for the next, or in this one; or
    `failed` or `not_run` with the reason.

    Args:
        keep: is given what was found so far, after every step in this process.
    """
    told = {"what": what, "work": {**vars(work), "models": str(work.models)}, "tiny": options.tiny}
    told["way"] = None if way is None else vars(way)
    if options.one_process:
        return run_here(told, keep)
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(told)]
    found = run_json(command, options.limit, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    kind, _, why = found.get("failed", "").partition(": ")
    return {"not_run": why} if kind.endswith(".ConfigError") else found  # this machine cannot do it


def run_here(told: Report, keep: Callable[[Report], None]) -> Report:
    """`run_child` in this process, with what the one before has left freed."""
    extend_segments()
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return run_child(told, keep)
    except ConfigError as error:
        return {"not_run": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": reason(error)}


def run_child(told: Report, keep: Callable[[Report], None] = lambda found: None) -> Report:
    work = Work(**{**told["work"], "models": Path(told["work"]["models"])})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if told["what"] == "ceilings":
        return ceilings(device, told["tiny"])
    if told["what"] == "first_loss":
        return compare_losses(work)
    way = Way(**told["way"])
    if way.peer is None:
        return run_ours(work, way, keep)
    parts = shapes_of(configure(work, ("activation_checkpointing=none", *FIXED)).model)
    gc.collect()
    return PEERS[way.peer](work, parts.language, parts.vision, device)


def rate(report: Report) -> None:
    """Real tokens a second and MFU of every way: the same FLOPs for all, of the real positions, nothing run again."""
    ours = next((row for row in report["ways"] if row.get("seconds") and "flops" in row), None)
    if ours is None:
        return
    ceiling = max(report["ceilings"].get("products", {}).values(), default=None)
    for row in report["ways"]:
        if not row.get("seconds"):
            continue
        flops = row.get("flops", ours["flops"])[len(row["warmup_seconds"]) :]
        rates = [f / s for f, s in zip(flops, row["seconds"], strict=False)]  # a way that was cut has fewer seconds
        row["flops_per_second"] = statistics.median(rates)
        row["samples_per_second"] = report["work"]["samples"] / statistics.median(row["seconds"])
        row["mfu"] = row["flops_per_second"] / ours["peak_flops"] if ours["peak_flops"] else None
        row["of_measured_product"] = row["flops_per_second"] / ceiling / 1e12 if ceiling else None
        row["ours_is_faster_by"] = statistics.median(row["seconds"]) / statistics.median(ours["seconds"])


def show_rows(report: Report) -> None:
    lines = []
    for row in report["ways"]:
        if "not_run" in row or "failed" in row:
            why = f"NOT RUN: {row['not_run']}" if "not_run" in row else f"FAILED: {row['failed']}"
            lines.append((row["name"], why))
            continue
        memory = row["max_memory_allocated"]
        mfu, share = ("unknown" if row[key] is None else f"{row[key]:.1%}" for key in ("mfu", "of_measured_product"))
        lines.append((
            row["name"], f"{statistics.median(row['seconds']):.3f}", f"{row['samples_per_second']:.1f}",
            f"{row['flops_per_second'] / 1e12:.3g}", mfu, share, "" if memory is None else f"{memory / 1e9:.1f}",
            f"{row['ours_is_faster_by']:.2f}",
        ))  # fmt: skip
    heads = ("", "s / step", "samples / s", "TFLOPs / s", "MFU", "of measured product", "GB", "ours is faster by")
    show(f"{report['work']['stage']}, {report['work']['precision']}", heads, lines)


def draw(pyplot: Any, report: Report) -> None:
    rows = [row for row in report["ways"] if "flops_per_second" in row][::-1]
    _, axes = pyplot.subplots(figsize=(10, 0.5 * len(rows) + 1.8), layout="constrained")
    axes.barh(range(len(rows)), [row["flops_per_second"] / 1e12 for row in rows], color="C0")
    for most in sorted(report["ceilings"].get("products", {}).values())[-1:]:
        axes.axvline(most, color="k", linestyle=":", label="fastest product measured")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_xlabel("TFLOPs a second that the real positions need")
    axes.legend(fontsize="small")
    axes.set_title(report["work"]["precision"])


if __name__ == "__main__":
    main()
