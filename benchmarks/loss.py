"""What the loss costs: `python benchmarks/loss.py`.

The logits of all labels at once, ours in chunks, ours as it would be if each chunk ran again in the backward pass, and
torch's `linear_cross_entropy`: forward and backward, with an output layer that trains and with a frozen one. Every
variant's loss and gradients are compared with fp64 first. Time is CPU seconds on the CPU, events on CUDA, interleaved;
memory is that of a process of its own (CPU: how far its resident memory rose), or `max_memory_allocated`.
Writes JSON and a picture.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loss_bytes import loss_bytes
from provenance import commit, machine
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llava_fsdp.model.loss import chunked_loss, whole_loss

MIB = 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    dtype: str
    trains: bool
    labels: int
    vocabulary: int
    width: int
    device: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak_of:
        case, name = Case(**json.loads(args.peak_of[0])), args.peak_of[1]
        print(peak(case, variants(case, args.chunks)[name]))
        return
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for trains in (True, False):
            case = Case(dtype, trains, args.labels, args.vocabulary, args.width, args.device)
            rows += measured(case, args.chunks, args.repeats)
    name = f"loss-{args.device}-{datetime.date.today().isoformat()}"
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    result = {
        "question": "what does the loss cost, in time and memory?",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/loss.py", *sys.argv[1:]]),
        "options": {k: v for k, v in vars(args).items() if k not in ("out", "peak_of")},
        "machine": machine(gpu),
        "torch": torch.__version__,
        "clock": "CUDA events" if gpu else "CPU seconds of one thread",
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, args.out / f"{name}.png")


def variants(case: Case, chunks: list[int]) -> dict[str, Loss]:
    found: dict[str, Loss] = {"whole logits": whole_loss}
    for chunk in chunks:
        found[f"ours, {chunk} labels"] = partial(chunked_loss, chunk_tokens=chunk)
    found[f"run again, {chunks[-2]} labels"] = partial(run_again, chunk=chunks[-2])
    if hasattr(functional, "linear_cross_entropy"):
        found["torch, its choice"] = partial(torchs, chunk=None)
        found[f"torch, {chunks[-2]} labels"] = partial(torchs, chunk=chunks[-2])
    return found


def run_again(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Each chunk's logits once more in the backward pass; its weight gradients are added in the compute dtype."""
    pieces = zip(hidden.split(chunk), ids.split(chunk), strict=True)
    losses = [checkpoint(whole_loss, shown, weight, own, use_reentrant=False) for shown, own in pieces]
    return torch.stack(losses).sum()


def torchs(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, chunk: int | None) -> torch.Tensor:
    given = {} if chunk is None else {"batch_chunk_size": chunk}
    options = torch.nn.LinearCrossEntropyOptions(**given)
    return functional.linear_cross_entropy(hidden, weight, ids, reduction="sum", options=options)


def drawn(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    hidden = torch.randn((case.labels, case.width), generator=dice)
    weight = torch.randn((case.vocabulary, case.width), generator=dice) * 0.02
    ids = torch.randint(case.vocabulary, (case.labels,), generator=dice)
    dtype = DTYPES[case.dtype]
    placed = [t.to(case.device, dtype).requires_grad_() for t in (hidden, weight)]
    placed[1].requires_grad_(case.trains)
    return placed[0], placed[1], ids.to(case.device)


def one(loss: Loss, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    hidden, weight, ids = given
    found = loss(hidden, weight, ids)
    wanted = [t for t in (hidden, weight) if t.requires_grad]
    return found.detach(), list(torch.autograd.grad(found / len(ids), wanted))


def measured(case: Case, chunks: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each variant: errors against fp64, seconds, bytes."""
    given = drawn(case)
    exact_given = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in given[:2])
    exact_loss = functional.cross_entropy(exact_given[0] @ exact_given[1].t(), given[2], reduction="sum")
    wanted = [t for t in exact_given if t.requires_grad]
    exact = torch.autograd.grad(exact_loss / case.labels, wanted)
    rows, seconds = {}, {}
    found = variants(case, chunks)
    for name, loss in found.items():
        value, gradients = one(loss, given)
        rows[name] = {
            **asdict(case),
            "variant": name,
            "loss_error": abs(value.double() - exact_loss.detach()).item() / exact_loss.item(),
            "gradient_error": [
                ((g.double() - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True)
            ],
        }
        seconds[name] = []
    del exact, exact_loss, exact_given, wanted, gradients
    for turn in range(repeats):
        order = list(found) if turn % 2 == 0 else list(reversed(found))
        for name in order:
            seconds[name].append(timed(case, partial(one, found[name], given)))
    for name, row in rows.items():
        child = [sys.executable, __file__, "--chunks", *map(str, chunks), "--peak-of", json.dumps(asdict(case)), name]
        # large blocks go back to the system when they are freed, so that the peak is of what is needed at once
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        row["peak_mib"] = int(subprocess.check_output(child, env=env)) / MIB
        row["seconds_min"], row["seconds_median"] = min(seconds[name]), statistics.median(seconds[name])
        row["seconds"] = seconds[name]
        if name.startswith("ours"):
            chunk = int(name.split()[1])
            size = DTYPES[case.dtype].itemsize
            told = loss_bytes(case.labels, case.vocabulary, case.width, size, case.trains, chunk)
            row["formula_mib"] = told[0] / MIB
        whole = rows["whole logits"]
        row["time_ratio"] = row["seconds_min"] / whole["seconds_min"]
        row["memory_ratio"] = row["peak_mib"] / whole["peak_mib"]
        print(
            f"{case.dtype} {'trains' if case.trains else 'frozen'}  {name:24s} {row['seconds_min']:7.3f} s "
            f"({row['time_ratio']:.2f})  {row['peak_mib']:7.0f} MiB ({row['memory_ratio']:.2f})  "
            f"loss {row['loss_error']:.1e}  gradients {' '.join(f'{e:.1e}' for e in row['gradient_error'])}",
            flush=True,
        )
    return list(rows.values())


def timed(case: Case, run: Callable[[], Any]) -> float:
    if case.device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000
    begin = time.process_time()
    run()
    return time.process_time() - begin


def peak(case: Case, loss: Loss) -> int:
    """Bytes above what the inputs take, of one forward and backward pass in a process that has done little else."""
    small = Case(case.dtype, case.trains, 8, 64, 16, case.device)
    one(loss, drawn(small))  # libraries load
    given = drawn(case)
    if case.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        one(loss, given)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    one(loss, given)
    return resident("VmHWM") - before


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line for line in lines if line.startswith(what)]
    return int(found[0].split()[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def draw(result: dict[str, Any], path: Path) -> None:
    """Time and memory beside the whole logits', by case."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: no matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    cases = list(dict.fromkeys((r["dtype"], r["trains"]) for r in rows))
    names = list(dict.fromkeys(r["variant"] for r in rows))
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained", sharey=True)
    for axis, key, title in zip(axes, ("time_ratio", "memory_ratio"), ("time", "peak memory"), strict=True):
        for place, (dtype, trains) in enumerate(cases):
            own = {r["variant"]: r[key] for r in rows if (r["dtype"], r["trains"]) == (dtype, trains)}
            bars = [n + 0.2 * (place - 1.5) for n in range(len(names))]
            label = f"{dtype}, output layer {'trains' if trains else 'frozen'}"
            axis.barh(bars, [own[n] for n in names], height=0.18, label=label)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlabel(f"{title}, whole logits = 1")
        axis.set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(cases))  # beside the bars
    first = rows[0]
    figure.suptitle(
        f"loss of {first['labels']} labels, {first['vocabulary']} words, width {first['width']}; torch "
        f"{result['torch']}, {result['machine']['device']}"
    )
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
