"""Is the plan's peak what a training step really takes?

    python benchmarks/memory.py                    # into benchmarks/results; some minutes on two idle cores
    python benchmarks/memory.py FOLDER --real      # the shape of LLaVA-1.5-7B on a GPU of 80 GB, random weights
    python benchmarks/memory.py FOLDER --compiled  # blocks compiled by torch.compile
    python benchmarks/memory.py FOLDER --tiny      # smallest sizes, to try the script itself

Real steps of models of about a gigabyte, each configuration in a process of its own, one rank, two over gloo, or one of
eight imagined (`dry_run=8`), beside what the planner says of the same configuration. On a GPU the peak is
`max_memory_allocated`, on the CPU what the process grew by. How to read the result is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from capped import write_json
from hydra import compose, initialize_config_dir
from provenance import REPOSITORY, commit, machine
from rich.console import Console
from rich.table import Table

from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.train.setup.dry_run import measure

MEAN_BOUND, WORST_BOUND = 0.06, 0.12
RESULTS = REPOSITORY / "benchmarks" / "results"


@dataclass(frozen=True)
class Case:
    """A configuration, and how its ranks are had."""

    ranks: int
    real: bool
    """Ranks over gloo; else the others are imagined."""
    model: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        how = "" if self.ranks == 1 else " over gloo" if self.real else " imagined"
        shown = " ".join(value for key, _, value in (o.partition("=") for o in self.overrides) if "size" not in key)
        return f"{self.ranks}{how}, {self.model}: {shown}{' twice' if TWICE in self.overrides else ''}"


def case(ranks: int, real: bool, model: str, *overrides: str) -> Case:
    return Case(ranks, real, model, overrides)


MODELS = {"wide": (1024, 5, 4096), "deep": (256, 16, 4096), "tiny": (64, 2, 512)}
"""Hidden size, layers, vocabulary. Steps of the wide one are mostly states, of the deep one mostly activations."""
ONE, GLOO, IMAGINED = (1, True), (2, True), (8, False)
TWICE = "global_batch_size=1024"
"""Two micro-batches in a step, so that gradients add up; without it, one."""
CASES = [
    case(*ONE, "wide", "precision=bf16", "activation_checkpointing=none", "tokens_per_micro_batch=512"),
    case(*ONE, "deep", "precision=bf16", "activation_checkpointing=none", "tokens_per_micro_batch=2048", TWICE),
    case(*ONE, "deep", "precision=fp32", "activation_checkpointing=full", "tokens_per_micro_batch=4096"),
    case(*GLOO, "wide", "sharding=zero0", "precision=bf16", "activation_checkpointing=full",
         "tokens_per_micro_batch=512"),
    case(*GLOO, "wide", "sharding=zero1", "precision=fp32", "activation_checkpointing=full",
         "tokens_per_micro_batch=512", TWICE),
    case(*GLOO, "wide", "sharding=zero2", "precision=bf16", "activation_checkpointing=full",
         "tokens_per_micro_batch=512", TWICE),
    case(*GLOO, "wide", "sharding=zero3", "precision=bf16", "activation_checkpointing=none",
         "tokens_per_micro_batch=512"),
    case(*IMAGINED, "wide", "sharding=zero0", "precision=bf16", "activation_checkpointing=full",
         "tokens_per_micro_batch=512"),
    case(*IMAGINED, "wide", "sharding=zero1", "precision=bf16", "activation_checkpointing=none",
         "tokens_per_micro_batch=512", TWICE),
    case(*IMAGINED, "wide", "sharding=zero2", "precision=bf16", "activation_checkpointing=full",
         "tokens_per_micro_batch=1024", TWICE),
    case(*IMAGINED, "wide", "sharding=hybrid", "sharding.shard_size=4", "precision=bf16",
         "activation_checkpointing=full",
         "tokens_per_micro_batch=1024", TWICE),
    case(*IMAGINED, "deep", "sharding=zero3", "precision=bf16", "activation_checkpointing=none",
         "tokens_per_micro_batch=2048"),
    case(*IMAGINED, "deep", "sharding=zero3", "precision=bf16", "activation_checkpointing=none",
         "tokens_per_micro_batch=4096"),
    case(*IMAGINED, "deep", "sharding=zero3", "precision=bf16", "activation_checkpointing=selective",
         "tokens_per_micro_batch=4096"),
    case(*IMAGINED, "deep", "sharding=zero3", "precision=bf16", "activation_checkpointing=full",
         "tokens_per_micro_batch=8192"),
    case(*IMAGINED, "deep", "sharding=zero3", "precision=fp32", "activation_checkpointing=none",
         "tokens_per_micro_batch=2048"),
    case(*IMAGINED, "deep", "sharding=zero3", "stage=pretrain", "precision=bf16", "activation_checkpointing=none",
         "tokens_per_micro_batch=4096"),
]  # fmt: skip


PADDED = ("pack=false", "micro_batch_size=4")
COMPILED = "compile=true"
PACKED_COMPILED = (0, 3, 4, 5, 6, 8, 1, 2, 15)
"""Indices into CASES of the cases with packed rows that are also run compiled, in fp32."""
CASES_COMPILED = [
    *(replace(CASES[number], overrides=(
        *(o.replace("precision=bf16", "precision=fp32") for o in CASES[number].overrides), COMPILED)
      ) for number in PACKED_COMPILED),
    *(case(*ONE, "deep", f"precision={precision}", f"activation_checkpointing={mode}", COMPILED, *PADDED)
      for precision, mode in (("fp32", "selective"), ("fp32", "none"), ("bf16", "full"))),
]  # fmt: skip
"""Packed rows, for which attention splits a compiled block into two graphs on a CPU, and padded ones, for which a block
is one graph. All but one are in fp32: a CPU without instructions for bf16 takes minutes for a step."""

REAL = "llava_v1_5_7b"
CASES_OF_REAL = [
    case(*IMAGINED, REAL, "sharding=zero3", "activation_checkpointing=full", "tokens_per_micro_batch=8192"),
    case(*IMAGINED, REAL, "sharding=zero3", "activation_checkpointing=full", "tokens_per_micro_batch=16384", TWICE),
    case(*IMAGINED, REAL, "sharding=zero3", "activation_checkpointing=none", "tokens_per_micro_batch=4096"),
    case(*IMAGINED, REAL, "sharding=zero3", "activation_checkpointing=selective", "tokens_per_micro_batch=4096"),
    case(*IMAGINED, REAL, "sharding=zero2", "activation_checkpointing=full", "tokens_per_micro_batch=4096", TWICE),
    case(
        *IMAGINED,
        REAL,
        "sharding=hybrid",
        "sharding.shard_size=4",
        "activation_checkpointing=full",
        "tokens_per_micro_batch=4096",
    ),
    case(
        *IMAGINED,
        REAL,
        "sharding=zero2",
        "stage=pretrain",
        "activation_checkpointing=none",
        "tokens_per_micro_batch=4096",
    ),
    case(*ONE, REAL, "stage=pretrain", "activation_checkpointing=full", "tokens_per_micro_batch=8192"),
]
"""Of the real shape, for a GPU of 80 GB."""


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
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(Config, compose("train", overrides))


def run_case(case: Case, models: Path, is_tiny: bool) -> dict[str, Any] | None:
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


def start_case(number: int, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """A case in processes of its own: its report, or `failed` with the reason."""
    case = chosen(options)[number]
    command = [sys.executable]
    if case.real and case.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    flags = [f"--{flag}" for flag in ("real", "tiny", "compiled") if getattr(options, flag)]
    command += [str(Path(__file__).resolve()), str(work), "--case", str(number), *flags]
    threads = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=threads, timeout=options.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {options.timeout:g} s"}
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {"failed": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help="for the JSON and the picture")
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
        report = facts_of(options)
        for number in options.cases or range(len(chosen(options))):
            row = row_of(chosen(options)[number], start_case(number, options, work))
            report["rows"].append(row)
            save(report, options)
            print(f"{row['name']}: {row.get('failed') or format(row['error'], '+.1%')}", flush=True)
    finish(report, options)


def chosen(options: argparse.Namespace) -> list[Case]:
    if options.compiled:
        return CASES_COMPILED
    return CASES_OF_REAL if options.real else CASES


def row_of(case: Case, report: dict[str, Any]) -> dict[str, Any]:
    row = {"name": case.name, "overrides": case.overrides, "real": case.real}
    if "failed" in report:
        return row | report
    measured, planned = next(iter(report["peak"].values())), report["peak"]["planned"]
    return row | {"measured": measured, "planned": planned, "error": planned / measured - 1, "report": report}


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "question": "is the plan's peak what a training step really takes?",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["python benchmarks/memory.py", *[a for a in sys.argv[1:] if a != str(options.folder)]]),
        "machine": machine(torch.cuda.get_device_name() if torch.cuda.is_available() else None),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "options": {k: v for k, v in vars(options).items() if k not in ("folder", "case")},
        "rows": [],
    }


def save(report: dict[str, Any], options: argparse.Namespace) -> Path:
    """Write the result with the cases that were run so far."""
    measured = rows_of(report)
    if measured:
        errors = [abs(row["error"]) for row in measured]
        report["measure"] = next(iter(measured[0]["report"]["peak"]))
        report["error"] = {"mean": statistics.mean(errors), "worst": max(errors), "bounds": [MEAN_BOUND, WORST_BOUND]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = "7b-" if options.real else "compiled-" if options.compiled else ""
    return write_json(report, f"memory-{kind}{device}", options.folder)


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the cases that did not fail."""
    return [row for row in report["rows"] if "failed" not in row]


def finish(report: dict[str, Any], options: argparse.Namespace) -> None:
    path = save(report, options)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    if rows_of(report):
        console.print(table_of(report))
        drawn = draw(report, path.with_suffix(".png"))
        console.print(
            f"wrote {path}" + (f" and {path.with_suffix('.png')}" if drawn else "; no picture: no matplotlib")
        )
    if len(rows_of(report)) < len(report["rows"]):
        raise SystemExit(1)


def table_of(report: dict[str, Any]) -> Table:
    table = Table("ranks, and what they do", "measured", "planned", "error", "worst moment of the plan")
    for row in report["rows"]:
        if "failed" in row:
            table.add_row(row["name"], f"FAILED: {row['failed']}")
            continue
        sizes = [f"{row[key] / 2**20:,.0f} MiB" for key in ("measured", "planned")]
        table.add_row(row["name"], *sizes, f"{row['error']:+.1%}", row["report"]["plan"]["moment"])
    error = report["error"]
    table.caption = f"mean error {error['mean']:.1%}, worst {error['worst']:.1%}; measured is {report['measure']}"
    return table


def draw(report: dict[str, Any], path: Path) -> bool:
    """What the plan is made of, and the measured peak, for every configuration. False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(report)[::-1]
    figure, axes = pyplot.subplots(figsize=(11, 0.36 * len(rows) + 1.8), layout="constrained")
    left = [0.0] * len(rows)
    for number, kind in enumerate(k for k in rows[0]["report"]["plan"]["bytes"] if k != "total"):
        sizes = [row["report"]["plan"]["bytes"][kind] / 2**20 for row in rows]
        axes.barh(range(len(rows)), sizes, left=left, color=f"C{number}", label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for place, row in enumerate(rows):
        measured = row["measured"] / 2**20
        axes.plot([measured, measured], [place - 0.45, place + 0.45], "k", linewidth=2)
        axes.text(max(measured, left[place]), place, f"  {row['error']:+.1%}", va="center", fontsize="small")
    axes.plot([], [], "k", linewidth=2, label="measured")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize="small")
    axes.set_xlabel(f"MiB at the worst moment of a step ({report['measure']})")
    axes.margins(x=0.08)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    error = report["error"]
    axes.set_title(
        f"plan and measurement: mean error {error['mean']:.1%}, worst {error['worst']:.1%}\n"
        f"{report['machine']['device']}, torch {report['torch']}, {report['date'][:10]}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=90)
    return True


if __name__ == "__main__":
    main()
