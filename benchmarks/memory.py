"""Is the planner's peak what a training step really takes? About a quarter of an hour on two idle cores.

    python benchmarks/memory.py
    python benchmarks/memory.py FOLDER --real      # the shape of LLaVA-1.5-7B on a GPU of 80 GB, random weights
    python benchmarks/memory.py FOLDER --compiled  # blocks compiled by torch.compile
    python benchmarks/memory.py FOLDER --tiny      # smallest sizes, to try the script itself

Each configuration runs in processes of its own: one rank, two over gloo, or one of eight simulated (`dry_run=8`).
benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import MIB, Report, command_line, composed, facts, run_json, show, write, write_json

from llava_fsdp.config import Config
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.train.setup.dry_run import measure

MEAN_BOUND, WORST_BOUND = 0.06, 0.12


@dataclass(frozen=True)
class Case:
    """A configuration, and its ranks."""

    ranks: int
    real: bool
    """Whether the ranks are processes over gloo; otherwise one process acts as one of them."""
    model: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        how = "" if self.ranks == 1 else " over gloo" if self.real else " imagined"
        shown = " ".join(value for key, _, value in (o.partition("=") for o in self.overrides) if "size" not in key)
        return f"{self.ranks}{how}, {self.model}: {shown}{' twice' if TWICE in self.overrides else ''}"


MODELS = {"wide": (1024, 5, 4096), "deep": (256, 16, 4096), "tiny": (64, 2, 512)}
"""Hidden size, layers, vocabulary. Steps of the wide one are mostly states, of the deep one mostly activations."""
TWICE = "global_batch_size=1024"
"""Two micro-batches in a step, so that gradients add up; without it, one."""
PADDED = ("pack=false", "micro_batch_size=4")


def case(ranks: int, real: bool, model: str, mode: str, tokens: int | None, *overrides: str) -> Case:
    """A case with packed rows of that many tokens, or with padded rows."""
    rows = PADDED if tokens is None else (f"tokens_per_micro_batch={tokens}",)
    return Case(ranks, real, model, (*overrides, f"activation_checkpointing={mode}", *rows))


ONE, GLOO, IMAGINED = (1, True), (2, True), (8, False)
BF16, FP32 = "precision=bf16", "precision=fp32"
HYBRID = ("sharding=hybrid", "sharding.shard_size=4")
CASES = [
    case(*ONE, "wide", "none", 512, BF16),
    case(*ONE, "deep", "none", 2048, BF16, TWICE),
    case(*ONE, "deep", "full", 4096, FP32),
    case(*GLOO, "wide", "full", 512, "sharding=zero0", BF16),
    case(*GLOO, "wide", "full", 512, "sharding=zero1", FP32, TWICE),
    case(*GLOO, "wide", "full", 512, "sharding=zero2", BF16, TWICE),
    case(*GLOO, "wide", "none", 512, "sharding=zero3", BF16),
    case(*IMAGINED, "wide", "full", 512, "sharding=zero0", BF16),
    case(*IMAGINED, "wide", "none", 512, "sharding=zero1", BF16, TWICE),
    case(*IMAGINED, "wide", "full", 1024, "sharding=zero2", BF16, TWICE),
    case(*IMAGINED, "wide", "full", 1024, *HYBRID, BF16, TWICE),
    case(*IMAGINED, "deep", "none", 2048, "sharding=zero3", BF16),
    case(*IMAGINED, "deep", "none", 4096, "sharding=zero3", BF16),
    case(*IMAGINED, "deep", "selective", 4096, "sharding=zero3", BF16),
    case(*IMAGINED, "deep", "full", 8192, "sharding=zero3", BF16),
    case(*IMAGINED, "deep", "none", 2048, "sharding=zero3", FP32),
    case(*IMAGINED, "deep", "none", 4096, "sharding=zero3", "stage=pretrain", BF16),
]
COMPILED = "compile=true"
PACKED_COMPILED = (0, 3, 4, 5, 6, 8, 1, 2, 15)
"""Indices into CASES of the cases with packed rows that are also run compiled, in fp32."""
CASES_COMPILED = [
    *(replace(CASES[number], overrides=(*(FP32 if o == BF16 else o for o in CASES[number].overrides), COMPILED))
      for number in PACKED_COMPILED),
    case(*ONE, "deep", "selective", None, FP32, COMPILED),
    case(*ONE, "deep", "none", None, FP32, COMPILED),
    case(*ONE, "deep", "full", None, BF16, COMPILED),
]  # fmt: skip
"""Packed rows, for which attention splits a compiled block into two graphs on a CPU, and padded ones, for which a block
is one graph. All but one are in fp32: a CPU without instructions for bf16 takes minutes for a step."""
REAL = "llava_v1_5_7b"
CASES_OF_REAL = [
    case(*IMAGINED, REAL, "full", 8192, "sharding=zero3"),
    case(*IMAGINED, REAL, "full", 16384, "sharding=zero3", TWICE),
    case(*IMAGINED, REAL, "none", 4096, "sharding=zero3"),
    case(*IMAGINED, REAL, "selective", 4096, "sharding=zero3"),
    case(*IMAGINED, REAL, "full", 4096, "sharding=zero2", TWICE),
    case(*IMAGINED, REAL, "full", 4096, *HYBRID),
    case(*IMAGINED, REAL, "none", 4096, "sharding=zero2", "stage=pretrain"),
    case(*ONE, REAL, "full", 8192, "stage=pretrain"),
]
"""For a GPU of 80 GB."""


def write_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """Configurations of a Llama and a CLIP tower; weights are drawn."""
    language = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 64),
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 112,
        "patch_size": 14,
    }
    for name, config in (("language", language), ("vision", vision)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def configure(case: Case, models: Path, model: str) -> Config:
    """Samples of 512 positions, or of 2048 in the real model."""
    folder = models / model
    parts = [f"model.language={folder / 'language'}", f"model.vision={folder / 'vision'}", "data.max_length=512"]
    overrides = [
        "stage=finetune",
        *([f"model={model}"] if model == REAL else parts),
        "model.projector=random",
        "optim.clip=1.0",
        "global_batch_size=1",
        *([] if case.real else [f"dry_run={case.ranks}"]),
        *case.overrides,
        *(["tokens_per_micro_batch=512"] if model == "tiny" and PADDED[0] not in case.overrides else []),
    ]
    return composed(overrides)


def run_case(case: Case, models: Path, is_tiny: bool) -> Report | None:
    """Both steps of a case, in this process; on rank 0 the report, with the peak of the rank that has the highest.

    The same steps of a tiny model come first: what libraries allocate once, when they are first used, is not the
    model's.
    """
    tiny = configure(case, models, "tiny")
    with distributed(tiny) as world:
        with contextlib.redirect_stdout(sys.stderr):
            measure(tiny, world)
            report = measure(configure(case, models, "tiny" if is_tiny else case.model), world)
        peaks: list[Any] = [report["peak"]]
        if case.real and case.ranks > 1:
            peaks = [None] * case.ranks
            dist.all_gather_object(peaks, report["peak"])
        report["peak"] = max(peaks, key=lambda peak: next(iter(peak.values())))
        return report if world.is_first else None


def start_case(number: int, options: argparse.Namespace, work: Path) -> Report:
    """A case in processes of its own: its report, or `failed` with the reason."""
    case = chosen(options)[number]
    command = [sys.executable]
    if case.real and case.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    flags = [f"--{flag}" for flag in ("real", "tiny", "compiled") if getattr(options, flag)]
    command += [str(Path(__file__).resolve()), str(work), "--case", str(number), *flags]
    return run_json(command, options.timeout, {"OMP_NUM_THREADS": str(options.threads)})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one configuration may take")
    parser.add_argument("--tiny", action="store_true", help="models of a few megabytes")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--real", action="store_true", help="the shape of LLaVA-1.5-7B, for a GPU of 80 GB")
    which.add_argument("--compiled", action="store_true", help="blocks are compiled")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the configurations to run; all")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        report = run_case(chosen(options)[options.case], options.folder, options.tiny)
        if report is not None:
            print(json.dumps(report))
        return
    with tempfile.TemporaryDirectory(prefix="memory-") as made:
        work = Path(made)
        for name, sizes in MODELS.items():
            write_model(work / name, *sizes)
        report = facts("is the planner's peak what a training step really takes?", options) | {"rows": []}
        for number in options.cases or range(len(chosen(options))):
            row = row_of(chosen(options)[number], start_case(number, options, work))
            report["rows"].append(row)
            save(report, options)
            print(f"{row['name']}: {row.get('failed') or format(row['error'], '+.1%')}", flush=True)
    if rows_of(report):
        show_rows(report)
        write(report, name_of(options), options.folder, draw)
    if len(rows_of(report)) < len(report["rows"]):
        raise SystemExit(1)


def chosen(options: argparse.Namespace) -> list[Case]:
    if options.compiled:
        return CASES_COMPILED
    return CASES_OF_REAL if options.real else CASES


def row_of(case: Case, report: Report) -> Report:
    row = {"name": case.name, "overrides": case.overrides, "real": case.real}
    if "failed" in report:
        return row | report
    measured, planned = next(iter(report["peak"].values())), report["peak"]["planned"]
    return row | {"measured": measured, "planned": planned, "error": planned / measured - 1, "report": report}


def name_of(options: argparse.Namespace) -> str:
    kind = "7b-" if options.real else "compiled-" if options.compiled else ""
    return f"memory-{kind}{'cuda' if torch.cuda.is_available() else 'cpu'}"


def save(report: Report, options: argparse.Namespace) -> None:
    """Write the result with the cases that were run so far."""
    measured = rows_of(report)
    if measured:
        errors = [abs(row["error"]) for row in measured]
        report["measure"] = next(iter(measured[0]["report"]["peak"]))
        report["error"] = {"mean": statistics.mean(errors), "worst": max(errors), "bounds": [MEAN_BOUND, WORST_BOUND]}
    write_json(report, name_of(options), options.folder)


def rows_of(report: Report) -> list[Report]:
    """The rows of the cases that did not fail."""
    return [row for row in report["rows"] if "failed" not in row]


def show_rows(report: Report) -> None:
    lines = []
    for row in report["rows"]:
        if "failed" in row:
            lines.append((row["name"], f"FAILED: {row['failed']}"))
            continue
        sizes = [f"{row[key] / MIB:,.0f} MiB" for key in ("measured", "planned")]
        lines.append((row["name"], *sizes, f"{row['error']:+.1%}", row["report"]["plan"]["moment"]))
    error = report["error"]
    title = f"mean error {error['mean']:.1%}, worst {error['worst']:.1%}; measured is {report['measure']}"
    show(title, ("ranks, and what they do", "measured", "planned", "error", "worst moment of the plan"), lines)


def draw(pyplot: Any, report: Report) -> None:
    """What the plan is made of, and the measured peak, for every configuration."""
    rows = rows_of(report)[::-1]
    _, axes = pyplot.subplots(figsize=(11, 0.36 * len(rows) + 1.8), layout="constrained")
    left = [0.0] * len(rows)
    for kind in (k for k in rows[0]["report"]["plan"]["bytes"] if k != "total"):
        sizes = [row["report"]["plan"]["bytes"][kind] / MIB for row in rows]
        axes.barh(range(len(rows)), sizes, left=left, label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for place, row in enumerate(rows):
        axes.text(max(row["measured"] / MIB, left[place]), place, f"  {row['error']:+.1%}", va="center")
    axes.plot([row["measured"] / MIB for row in rows], range(len(rows)), "k|", markersize=12, label="measured")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize="small")
    axes.set_xlabel(f"MiB at the worst moment of a step ({report['measure']})")
    axes.margins(x=0.08)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title(f"mean error {report['error']['mean']:.1%}, worst {report['error']['worst']:.1%}")


if __name__ == "__main__":
    main()
