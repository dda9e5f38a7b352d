"""What grows with the number of ranks, up to 1,024? Some minutes on an idle core.

    python benchmarks/imagined_ranks.py                 # --ranks, --quick

For each number of ranks a process of its own acts as rank 0. Steps are those of a small model, all else is of
LLaVA-1.5-7B with empty weights. benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench import Report, command_line, composed, facts, show, write_json
from samples import draw_lengths, write_model

from llava_fsdp.checkpoint.commit import Entries, merge_entries
from llava_fsdp.checkpoint.layout import written_rows
from llava_fsdp.checkpoint.manifest import STATE_FILE, Manifest, RowRange, TensorEntry, parse, rank_file, render
from llava_fsdp.config import PlanConfig
from llava_fsdp.data.batching.packing import pack_step
from llava_fsdp.data.synthetic import Contents, SyntheticLoader
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.plan.main import plan
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.plan.planner import peak
from llava_fsdp.runtime.files.digests import Digest
from llava_fsdp.train.checkpoints.checkpoint_contents import tensors
from llava_fsdp.train.optimizer import prepare_moments
from llava_fsdp.train.setup import dry_run
from llava_fsdp.train.setup.build_model import build_model
from llava_fsdp.train.setup.build_state import assemble

HIDDEN, SIDE, VOCABULARY = 1024, 6, 2048
LENGTH, SAMPLES = 100, 4
"""Tokens of a sample, and samples of a rank, in the steps of the small model."""
SEVEN_B = ("stage=finetune", "model=llava_v1_5_7b")
PACKED = 16
"""Samples of a rank in a step of the 7B model."""
ROW_TOKENS = PACKED * 2048
REPEATS = 3


def measure_step(ranks: int, folder: Path) -> Report:
    """Two steps of the small model: what a rank holds and sends, beside what the planner says."""
    cfg = composed([
        "stage=finetune", f"model.language={folder / 'language'}", f"model.vision={folder / 'vision'}",
        "model.projector=random", f"output_dir={folder / 'run'}", "precision=fp32", "activation_checkpointing=none",
        f"micro_batch_size={SAMPLES}", f"global_batch_size={SAMPLES * ranks}", f"dry_run={ranks}",
    ])  # fmt: skip
    labels = SAMPLES * (LENGTH - SIDE * SIDE) // 2
    contents = Contents((LENGTH,) * SAMPLES, SAMPLES, SAMPLES, labels, SAMPLES * SIDE * SIDE)
    with distributed(cfg) as world:
        found = dry_run.measure(cfg, world, contents)
        sent = dry_run.planned_memory_of(cfg, world, contents).sent
    moved = [found["collectives"][kind] for kind in ("all_gather", "reduce_scatter")]
    held = found["bytes"].values()
    return {
        "at_rest": {key: sum(kind[key] for kind in held) for key in ("measured", "planned")},
        "peak": {"measured": next(iter(found["peak"].values())), "planned": found["peak"]["planned"]},
        "collectives": {"measured": sum(kind["calls"] for kind in moved), "planned": sent.gathers},
        "sent": {"measured": sum(kind["sent"] for kind in moved), "planned": sent.sharded},
    }


def measure_run(ranks: int, folder: Path) -> Report:
    """Build rank 0's state of the 7B model, and the manifest of a checkpoint of all ranks."""
    more = [f"output_dir={folder / 'run'}", f"global_batch_size={PACKED * ranks}", f"dry_run={ranks}"]
    chosen = ["activation_checkpointing=full", f"tokens_per_micro_batch={ROW_TOKENS}"]  # nothing is left to a planner
    cfg = composed([*SEVEN_B, *more, *chosen])
    with distributed(cfg) as world:
        began = time.process_time()
        model = build_model(cfg, shapes_of(cfg.model), world.device)
        loader = SyntheticLoader(world.device, 1)
        state = assemble(model, cfg, Parallelism.of(cfg, world), loader, lambda *_: None)
        start_seconds = time.process_time() - began
        prepare_moments(state.optimizer)
        held, planned = dry_run.held_bytes(state), peak(cfg, ranks, world.device).at_rest
        whole = tensors(state)
        own, values = written_rows(whole, rank_file(0))
    assert own == entries_of(0, ranks, whole), "FSDP's rule is not as this benchmark says"
    entries = [entries_of(rank, ranks, whole) for rank in range(ranks)]
    digest = Digest(1, "0" * 32)
    seconds, read_seconds = [], []
    for _ in range(REPEATS):
        began = time.process_time()
        files = dict.fromkeys([*map(rank_file, range(ranks)), STATE_FILE], digest)
        content = render(Manifest(1, files, merge_entries(entries)))
        seconds.append(time.process_time() - began)
        began = time.process_time()
        assert parse(content).files == files
        read_seconds.append(time.process_time() - began)
    return {
        "start_seconds": start_seconds,
        "weights_and_moments": {
            "measured": held["parameters"] + held["optimizer"],
            "planned": planned["parameters"] + planned["optimizer"],
        },
        "file_bytes": sum(value.nbytes for value in values.values()),
        "ranges": sum(map(len, entries)),
        "gathered_bytes": ranks * max(len(pickle.dumps((digest, own))) for own in entries),
        "manifest_bytes": len(content),
        "manifest_seconds": statistics.median(seconds),
        "manifest_read_seconds": statistics.median(read_seconds),
    }


def entries_of(rank: int, ranks: int, whole: dict[str, torch.Tensor]) -> Entries:
    """What a rank writes of each tensor: its part of the rows under FSDP, and some of the scalars."""
    found = {}
    for number, (name, tensor) in enumerate(sorted(whole.items())):
        each = -(-len(tensor) // ranks) if tensor.ndim else 0
        begin, end = each * rank, min(len(tensor), each * (rank + 1)) if tensor.ndim else 0
        if not tensor.ndim and number % ranks == rank:
            end = begin + 1
        if begin < end:
            rows = RowRange(rank_file(rank), begin, end)
            found[name] = TensorEntry(tensor.dtype, tuple(tensor.shape), (rows,))
    return found


def measure_order(ranks: int) -> float:
    """CPU seconds to assign the samples of a step to all ranks, which every rank does for itself."""
    lengths = [length for length, _ in draw_lengths("medium", PACKED * ranks, 0)]
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        pack_step(lengths, lengths, ranks, ROW_TOKENS)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def measure_plan(ranks: int, folder: Path) -> float:
    """CPU seconds of `llava-fsdp plan` for nodes of 8 H100s, without imports."""
    more = ["gpu=h100", "gpus=8", f"nodes={ranks // 8}", f"global_batch_size={PACKED * ranks}", "format=json"]
    cfg = composed([*SEVEN_B, *more, f"page={folder / 'page.html'}"], PlanConfig, "plan")
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        plan(cfg)
    return time.process_time() - began


def measure(ranks: int, folder: Path) -> Report:
    torch.set_num_threads(1)
    own = {"order_seconds": measure_order(ranks), "plan_seconds": measure_plan(ranks, folder)}
    return {"ranks": ranks} | measure_step(ranks, folder) | measure_run(ranks, folder) | own


def show_rows(rows: list[Report]) -> None:
    lines = []
    for name in (name for name in rows[0] if name != "ranks"):
        values = [row[name] for row in rows]
        texts = [f"{v['measured']:,} / {v['planned']:,.0f}" if isinstance(v, dict) else f"{v:,.4g}" for v in values]
        lines.append((name, *texts))
    show("rank 0 of that many ranks: measured / planned", ("", *(f"{row['ranks']:,}" for row in rows)), lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024], help="multiples of 8")
    parser.add_argument("--quick", action="store_true", help="8 and 16 ranks")
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point is not None:
        (options.folder / "row.json").write_text(json.dumps(measure(options.point, options.folder)))
        return
    if any(ranks < 8 or ranks % 8 for ranks in options.ranks):
        parser.error("--ranks must be multiples of 8, the GPUs of a node")
    report = facts("what grows with the number of ranks?", options)
    rows = []
    for ranks in [8, 16] if options.quick else options.ranks:
        with tempfile.TemporaryDirectory(prefix="imagined-ranks-") as folder:
            write_model(Path(folder), HIDDEN, 2, SIDE, VOCABULARY)
            subprocess.run([sys.executable, __file__, folder, "--point", str(ranks)], check=True)
            rows.append(json.loads(Path(folder, "row.json").read_text()))
    show_rows(rows)
    print(f"wrote {write_json(report | {'rows': rows}, 'imagined-ranks-cpu', options.folder)}")


if __name__ == "__main__":
    main()
