"""Does a training give the same losses as with DeepSpeed, which the original uses? About 15 minutes on two idle cores.

    python benchmarks/deepspeed_curves.py

The same weights, samples, optimizer and schedule go through DeepSpeed's ZeRO-2 and ZeRO-3 and through this project's
zero2 and zero3, on two CPU ranks: in fp32, where the losses must agree, and in bf16, where the distance from the fp32
curve is compared. benchmarks/README.md explains the result.

Ours is `llava_fsdp.train` itself; DeepSpeed's side is deepspeed_peer.py. Each training is a torchrun of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import ASSETS, Report, command_line, composed, facts, show, write
from starts import write_llava, write_samples
from torchruns import deepspeed_missing, launch
from zero_json import deepspeed_config

from llava_fsdp.config import Config, DType
from llava_fsdp.data.toy_shapes import ensure_shapes

RANKS = 2
ACCUMULATION = 2
ROWS = 4
"""Samples of a micro-batch."""
FP32_BOUND = 1e-5
AS_THE_ORIGINAL = ["compat=llava_v1_5"]
"""The key that makes a training the original's."""
OUR_PRECISION = ["precision.reduce_dtype=fp32", "precision.norm_dtype=fp32"]
"""What is left as it is without that key: these are the defaults."""
CORPORA = {"pretrain": "captions.json", "finetune": "instructions.json"}
LEARNING_RATES = {"pretrain": 4e-3, "finetune": 1e-3}
"""conf/recipe's for the tiny model."""


@dataclass(frozen=True)
class Case:
    stage: str
    zero: int

    def __str__(self) -> str:
        return f"{self.stage}, ZeRO-{self.zero}"


CASES = [Case("pretrain", 2), Case("finetune", 2), Case("finetune", 3)]

# Whose training, its dtype, and what DeepSpeed's configuration adds to the recipe's.
VARIANTS: dict[str, tuple[str, DType, Report]] = {
    "ours fp32": ("ours", DType.fp32, {}),
    "deepspeed fp32": ("deepspeed", DType.fp32, {}),
    "ours bf16": ("ours", DType.bf16, {}),
    "deepspeed bf16": ("deepspeed", DType.bf16, {}),
    "deepspeed bf16, fp32 gradients": (
        "deepspeed",
        DType.bf16,
        {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
    ),
}
T_95 = dict(enumerate([12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201], start=1))
"""Student's t that 95 % lie within on both sides, by degrees of freedom."""
PEERS_IN_BF16 = [v for v, (who, dtype, _) in VARIANTS.items() if who == "deepspeed" and dtype is DType.bf16]


# What both sides start from


def configure(case: Case, dtype: DType, seed: int, steps: int, work: Path, output: Path) -> list[str]:
    """The command line of our training."""
    return [
        f"stage={case.stage}",
        f"sharding=zero{case.zero}",
        f"precision={dtype.value}",
        "model=tiny",
        "data=llava_json",
        f"data.path={work / 'shapes' / CORPORA[case.stage]}",
        f"data.images={work / 'shapes' / 'images'}",
        "data.max_length=512",
        "data.workers=0",
        f"output_dir={output}",
        "pack=false",
        f"micro_batch_size={ROWS}",
        f"global_batch_size={ROWS * ACCUMULATION * RANKS}",
        f"optim.lr={LEARNING_RATES[case.stage]}",
        "optim.projector_lr=null",
        "optim.schedule=cosine",
        "optim.warmup_ratio=0.03",
        f"max_steps={steps}",
        f"seed={seed}",
        "checkpoint.every=null",
        "export.enabled=false",
        *AS_THE_ORIGINAL,
        *OUR_PRECISION,
    ]


def write_start(folder: Path, seed: int, work: Path) -> None:
    """The embedded tiny model with weights drawn from the seed."""
    overrides = configure(CASES[0], DType.fp32, seed, 1, work, folder)
    write_llava(folder, composed([*overrides, "model.projector=random"]), ASSETS / "tiny-llama", ASSETS / "tiny-clip")


# One training


@dataclass(frozen=True)
class Curve:
    """What a training of one variant did at every step, how long the whole took, and of which commit it is."""

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    seconds: float
    commit: str


def train(case: Case, variant: str, seed: int, options: argparse.Namespace, work: Path, commit: str) -> Curve:
    """Run one training to its end, or read it where an earlier run in the same `--work` folder ended it.

    Raises:
        SystemExit: it failed, or took longer than `--timeout`.
    """
    who, dtype, more = VARIANTS[variant]
    start = work / f"start{seed}"
    output = work / "runs" / re.sub(r"\W+", "-", f"{case} {seed} {variant}")  # no sign that Hydra's grammar has
    kept = output / "curve.json"
    if kept.exists():
        return Curve(**json.loads(kept.read_text()))
    shutil.rmtree(output, ignore_errors=True)  # of a training that was cut off
    output.mkdir(parents=True)
    overrides = [*configure(case, dtype, seed, options.steps, work, output), f"model.checkpoint={start}"]
    if who == "ours":
        command = ["-m", "llava_fsdp.train", *overrides]
    else:
        plan = peer_plan(composed(overrides), case, more, options)
        plan |= {"weights": str(start), "samples": str(work / f"samples{seed}-{case.stage}")}
        (output / "plan.json").write_text(json.dumps(plan, indent=1))
        peer = Path(__file__).with_name("deepspeed_peer.py")
        command = [str(peer), str(output / "plan.json"), str(output / "steps.json")]
    began = time.perf_counter()
    launch(command, f"{case}, seed {seed}: {variant}", output / "log.txt", options.timeout, RANKS)
    seconds = time.perf_counter() - began
    if who == "ours":
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    else:
        rows = json.loads((output / "steps.json").read_text())
    assert len(rows) == options.steps
    losses, grad_norms, lrs = ([r[name] for r in rows] for name in ("loss", "grad_norm", "lr"))
    curve = Curve(losses, grad_norms, lrs, seconds, commit)
    with renamed_when_whole(kept) as file:
        file.write_text(json.dumps(asdict(curve)))
    return curve


def peer_plan(cfg: Config, case: Case, more: Report, options: argparse.Namespace) -> Report:
    """What DeepSpeed's side is told: our configuration in its words."""
    bf16 = cfg.precision.param_dtype is DType.bf16
    hidden = json.loads((ASSETS / "tiny-llama" / "config.json").read_text())["hidden_size"]
    return {
        "train": list(cfg.model.train),
        "steps": options.steps,
        "accumulation": ACCUMULATION,
        "lr": cfg.optim.lr,
        "betas": [cfg.optim.beta1, cfg.optim.beta2],
        "eps": cfg.optim.eps,
        "weight_decay": cfg.optim.weight_decay,
        "warmup_steps": math.ceil(cfg.optim.warmup_ratio * options.steps),
        "bf16": bf16,
        "threads": 1,
        "timeout": options.timeout,
        # not there in LLaVA's files: the release that it pins takes that for no clipping, and this one for 1.0
        "deepspeed": deepspeed_config(case.zero, bf16, hidden, ROWS, ACCUMULATION, clipping=0.0) | more,
    }


# What came out


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two curves, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def distance(curve: list[float], exact: list[float]) -> float:
    """Mean absolute difference of two curves."""
    return sum(abs(a - b) for a, b in zip(curve, exact, strict=True)) / len(exact)


def steps_alike(ours: list[float], theirs: list[float], within: float) -> int:
    """How many steps two curves go together before they first differ by more than that, relatively."""
    apart = [abs(a - b) > within * abs(b) for a, b in zip(ours, theirs, strict=True)]
    return apart.index(True) if True in apart else len(apart)


def compare(case: Case, seed: int, curves: dict[str, Curve]) -> Report:
    """The figures of one case and seed: fp32 against fp32, and how far each bf16 curve is from DeepSpeed's fp32."""
    ours, peer = curves["ours fp32"], curves["deepspeed fp32"]
    return {
        "stage": case.stage,
        "zero": case.zero,
        "seed": seed,
        "fp32_largest_relative_difference": {
            "loss": largest_difference(ours.losses, peer.losses),
            "grad_norm": largest_difference(ours.grad_norms, peer.grad_norms),
            "lr": max(abs(a - b) for a, b in zip(ours.lrs, peer.lrs, strict=True)),
        },
        "bf16_distance_from_fp32": {
            name: distance(curve.losses, peer.losses) for name, curve in curves.items() if "bf16" in name
        },
        "bf16_steps_alike": {
            name: steps_alike(curves["ours bf16"].losses, curves[name].losses, FP32_BOUND) for name in PEERS_IN_BF16
        },
        "first_and_last_loss": [peer.losses[0], peer.losses[-1]],
        "commits": sorted({curve.commit for curve in curves.values()}),
        "seconds": {name: round(curve.seconds, 1) for name, curve in curves.items()},
        "curves": {name: {"loss": c.losses, "grad_norm": c.grad_norms} for name, c in curves.items()},
    }


def findings(rows: list[Report]) -> Report:
    """Each requirement and whether it holds. Distances are means over the seeds; single seeds are counted beside."""
    worst = max(r["fp32_largest_relative_difference"]["loss"] for r in rows)
    by_case: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        by_case.setdefault(str(Case(row["stage"], row["zero"])), []).append(row["bf16_distance_from_fp32"])
    means = {case: {name: statistics.mean(f[name] for f in far) for name in far[0]} for case, far in by_case.items()}
    return {
        "fp32_largest_relative_difference_of_loss": worst,
        "fp32_bound": FP32_BOUND,
        "fp32_within_bound": worst <= FP32_BOUND,
        "bf16_mean_distance": means,
        "bf16_ours_no_further_than": {peer: no_further(peer, means, rows) for peer in PEERS_IN_BF16},
        "bf16_ours_minus_peer": {
            peer: {case: paired([f["ours bf16"] - f[peer] for f in far]) for case, far in by_case.items()}
            for peer in PEERS_IN_BF16
        },
    }


def paired(differences: list[float]) -> Report:
    """Mean over the seeds and its 95 % confidence interval (Student's t); no interval for a single seed."""
    mean = statistics.mean(differences)
    if len(differences) == 1:
        return {"mean": mean, "interval": None}
    half = T_95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return {"mean": mean, "interval": [mean - half, mean + half]}


def no_further(peer: str, means: dict[str, dict[str, float]], rows: list[Report]) -> Report:
    far = [r["bf16_distance_from_fp32"] for r in rows]
    return {
        "by_case": {case: mean["ours bf16"] <= mean[peer] for case, mean in means.items()},
        "single_trainings": f"{sum(f['ours bf16'] <= f[peer] for f in far)} of {len(far)}",
    }


# The whole


def main() -> None:
    options = parse()
    check_peer()
    known = facts("does a training give the same losses as with DeepSpeed?", options)
    rows = []
    with open_work(options) as work:
        ensure_shapes(work / "shapes", train_pictures=options.steps * ROWS * ACCUMULATION * RANKS)
        for seed in range(options.seeds):
            prepare(seed, options.steps, work)
            for case in [c for c in CASES if options.stage in (None, c.stage)]:
                curves = {name: train(case, name, seed, options, work, known["commit"]) for name in VARIANTS}
                rows.append(compare(case, seed, curves))
                print(f"{case}, seed {seed}: {describe(rows[-1])}", file=sys.stderr)
    report = known | {
        "commits_of_trainings": sorted({commit for row in rows for commit in row["commits"]}),
        "ranks": RANKS,
        "accumulation": ACCUMULATION,
        "rows_of_a_micro_batch": ROWS,
        "ours": AS_THE_ORIGINAL + OUR_PRECISION,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")},
        "findings": findings(rows),
        "rows": rows,
    }
    show_rows(rows)
    print(json.dumps(report["findings"], indent=1))
    write(report, "deepspeed-curves" + (f"-{options.stage}" if options.stage else ""), options.folder, draw)
    if not report["findings"]["fp32_within_bound"]:
        raise SystemExit(f"losses in fp32 differ by more than {FP32_BOUND:g}")


@contextlib.contextmanager
def open_work(options: argparse.Namespace) -> Iterator[Path]:
    """Where weights, samples and trainings lie: in `--work`, where the next run finds them, or for this run alone."""
    if options.work is None:
        with tempfile.TemporaryDirectory(prefix="deepspeed-curves-") as folder:
            yield Path(folder)
    else:
        yield (options.work / f"{options.steps}-steps").absolute()


def prepare(seed: int, steps: int, work: Path) -> None:
    """What all trainings of a seed begin with, unless it is there."""
    start = work / f"start{seed}"
    if not start.exists():
        with renamed_when_whole(start) as folder:
            write_start(folder, seed, work)
    for stage in CORPORA:
        samples = work / f"samples{seed}-{stage}"
        if not samples.exists():
            overrides = configure(Case(stage, 2), DType.fp32, seed, steps, work, work / "run")
            with renamed_when_whole(samples) as folder:
                cfg = composed([*overrides, f"model.checkpoint={start}"])
                write_samples(folder, cfg, RANKS, steps, ACCUMULATION)


@contextlib.contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """What is there under its own name is whole, whenever this script was ended."""
    beside = path.with_name(f"{path.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.unlink(missing_ok=True)
    yield beside
    beside.replace(path)


def describe(row: Report) -> str:
    exact = row["fp32_largest_relative_difference"]
    distances = ", ".join(f"{name} {value:.3g}" for name, value in row["bf16_distance_from_fp32"].items())
    return f"fp32 loss {exact['loss']:.2g}, norm {exact['grad_norm']:.2g}; distances {distances}"


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of every kind; a seed draws weights and order")
    parser.add_argument("--stage", choices=CORPORA, help="only its rows, in files of their own; default: both stages")
    parser.add_argument(
        "--work", type=Path, help="a folder that keeps every training: one that is there is not run again"
    )
    parser.add_argument("--timeout", type=int, default=300, help="seconds that one training may take")
    options = parser.parse_args()
    if not 1 <= options.seeds <= len(T_95) + 1:
        parser.error(f"--seeds {options.seeds}: give 1 to {len(T_95) + 1}")
    return options


def check_peer() -> None:
    lack = deepspeed_missing()
    if lack is not None:
        raise SystemExit(lack)


def show_rows(rows: list[Report]) -> None:
    names = list(rows[0]["bf16_distance_from_fp32"])
    lines = []
    for row in rows:
        exact, far = row["fp32_largest_relative_difference"], row["bf16_distance_from_fp32"]
        name = f"{row['stage']}, ZeRO-{row['zero']}, seed {row['seed']}"
        lines.append((name, f"{exact['loss']:.1e}", f"{exact['grad_norm']:.1e}", *(f"{far[n]:.5f}" for n in names)))
    heads = ("stage, ZeRO, seed", "fp32 loss", "fp32 gradient norm", *names)
    show("fp32: largest relative difference; bf16: mean distance from fp32", heads, lines)


def draw(pyplot: Any, report: Report) -> None:
    """The fp32 curves over each other with their difference, and the bf16 distances."""
    _, (curves, distances) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    draw_curves(curves, [r for r in report["rows"] if r["seed"] == 0])
    draw_distances(distances, sorted(report["rows"], key=lambda r: (r["stage"] != "pretrain", r["zero"], r["seed"])))


def draw_curves(axis: Any, rows: list[Report]) -> None:
    below = axis.twinx()
    for number, row in enumerate(rows):
        ours, peer = (row["curves"][name]["loss"] for name in ("ours fp32", "deepspeed fp32"))
        steps, label = range(1, len(ours) + 1), f"{row['stage']}, ZeRO-{row['zero']}"
        axis.plot(steps, peer, color=f"C{number}", linewidth=4, alpha=0.35, label=f"{label}: DeepSpeed")
        axis.plot(steps, ours, color=f"C{number}", linewidth=1, label=f"{label}: ours")
        apart = [abs(a - b) / abs(b) or float("nan") for a, b in zip(ours, peer, strict=True)]
        below.plot(steps, apart, color=f"C{number}", linestyle="none", marker=".", markersize=4)
    below.axhline(FP32_BOUND, color="grey", linestyle="--", linewidth=1)
    below.set(yscale="log", ylim=(1e-8, 1e2), ylabel="dots: relative difference (dashed: bound)")
    below.set_yticks([1e-8, 1e-7, 1e-6, 1e-5])
    axis.set(xlabel="step", ylabel="loss", title="fp32, seed 0: the curves lie on each other")
    low, high = axis.get_ylim()
    axis.set_ylim(low - 0.5 * (high - low), high)  # room for the dots
    axis.legend(fontsize="small")


def draw_distances(axis: Any, rows: list[Report]) -> None:
    names = list(rows[0]["bf16_distance_from_fp32"])
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [place + width * (number - (len(names) - 1) / 2) for place in range(len(rows))]
        heights = [row["bf16_distance_from_fp32"][name] for row in rows]
        axis.bar(places, heights, width, color=f"C{number}", label=name)
    labels = [f"{r['stage']}\nZeRO-{r['zero']}\nseed {r['seed']}" for r in rows]
    axis.set_xticks(range(len(rows)), labels, fontsize="x-small")
    axis.set_ylim(0, 1.25 * axis.get_ylim()[1])  # room for the legend
    axis.set(ylabel="mean |loss - fp32 loss|", title="bf16: distance from the fp32 curve")
    axis.legend(fontsize="small")


if __name__ == "__main__":
    main()
