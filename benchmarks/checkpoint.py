"""What does a checkpoint cost, compared with a raw write of the same bytes and PyTorch's distributed checkpoint?

    python benchmarks/checkpoint.py                        # two gloo ranks; 1 GiB of state in all; a few minutes
    python benchmarks/checkpoint.py FOLDER --gib 2 --repeats 3 --scratch DIR

Every repeat runs all ways in turn, on the same state: fp32 weights and moments, sharded over the ranks.
benchmarks/README.md explains the result.
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench import Report, command_line, facts, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from llava_fsdp.checkpoint import safetensors_stream
from llava_fsdp.checkpoint.reader import load
from llava_fsdp.checkpoint.saver import SavedState, Saver
from llava_fsdp.checkpoint.verify import Checkpoint, newest_together, verify_together
from llava_fsdp.config import CheckpointConfig, OnSaveError
from llava_fsdp.parallel.ranks.consensus import on_all_ranks

RANKS = 2
COLUMNS = 4096
CHUNK = 8 << 20
GIB = 1 << 30
Tensors = dict[str, torch.Tensor]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of state, in all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of a forward and a backward pass")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder on the disk to measure")
    options = parser.parse_args()
    report = facts(
        "what does a checkpoint cost, compared with a raw write and PyTorch's distributed checkpoint?", options
    )
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        arguments = [(rank, Path(folder), options, results) for rank in range(RANKS)]
        processes = [context.Process(target=on_rank, args=own) for own in arguments]
        for process in processes:
            process.start()
        found = results.get(timeout=3600)
        for process in processes:
            process.join()
            assert process.exitcode == 0, "a rank failed"
    report |= {"ranks": RANKS, **found}
    report["ratios"] = ratios(report["seconds"])
    for name, seconds in report["seconds"].items():
        print(f"{name:32} {min(seconds):7.3f} s (median {median(seconds):.3f})")
    for name, value in report["ratios"].items():
        print(f"{name:64} {value:7.3f}")
    write(report, "checkpoint-cpu", options.folder, draw)


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Of medians, and pairs within one repeat: a slow minute of the disk falls on both."""

    def of(one: str, other: str, and_one: str | None = None) -> float:
        added = seconds[and_one] if and_one else [0.0] * len(seconds[one])
        return median([(a + c) / b for a, b, c in zip(seconds[one], seconds[other], added, strict=True)])

    return {
        "blocked by an asynchronous save / raw write": of("asynchronous: step waits", "raw write and fsync"),
        "synchronous save / raw write": of("synchronous save", "raw write and fsync"),
        "synchronous save / the same without digests": of("synchronous save", "the same without digests"),
        "plain DCP / raw write": of("plain DCP save", "raw write and fsync"),
        "verify and load / plain DCP load": of("verify", "plain DCP load", "load, verified before"),
    }


# On a rank


def on_rank(rank: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=1800))
    tensors = state(options.gib)
    seconds: dict[str, list[float]] = {}
    one = Case(rank, folder, tensors, seconds, options.compute)
    for number in range(options.repeats):
        one.run(number)
    first = {"seconds": seconds, "bytes": sum(t.nbytes for t in tensors.values())}
    if rank == 0:
        results.put(first)
    dist.barrier()
    dist.destroy_process_group()


def state(gib: float) -> Tensors:
    """Weights and two moments, in matrices of 32 MiB, of numbers that no disk compresses."""
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = 32 * (1 << 20) // 4 // COLUMNS
    count = max(3, round(gib * GIB / (rows * COLUMNS * 4)))
    dice = torch.Generator().manual_seed(dist.get_rank())
    found = {}
    for number in range(count):
        kind = ("model", "optim.exp_avg", "optim.exp_avg_sq")[number % 3]
        own = torch.randn(rows // RANKS, COLUMNS, generator=dice)
        found[f"{kind}.{number // 3}"] = DTensor.from_local(own, mesh, [Shard(0)])
    return found


class Case:
    """All ways, each timed from a barrier to a barrier."""

    def __init__(self, rank: int, folder: Path, tensors: Tensors, seconds: dict[str, list[float]], compute: float):
        self.rank, self.folder, self.tensors, self.seconds, self.compute = rank, folder, tensors, seconds, compute
        self.asynchronous = self.saver("async", True)
        self.asynchronous.save()  # pages of the copy are there when it is timed, as in a run from its second save
        self.asynchronous.wait()

    def saver(self, name: str, asynchronous: bool) -> Saver:
        cfg = CheckpointConfig(
            every=1, keep=2, keep_every=None, resume="auto", strict=False, asynchronous=asynchronous,
            on_save_error=OnSaveError["raise"],
        )  # fmt: skip
        self.step = 1
        return Saver(self.folder / name, cfg, SavedState(lambda: self.tensors, lambda: run_facts(self.step)))

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        os.sync()
        dist.barrier()
        started = time.perf_counter()
        result = action()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    def run(self, number: int) -> None:
        self.step = number + 2
        self.timed("raw write and fsync", self.raw)
        self.seconds.setdefault("asynchronous: step waits", []).append(self.step_with_save())
        self.timed("asynchronous: until it is there", self.asynchronous.wait)
        saver = self.saver("sync", False)
        self.step = number + 2
        self.timed("synchronous save", saver.save)
        saver.close()
        digest, safetensors_stream.xxh3_128 = safetensors_stream.xxh3_128, Undigested  # type: ignore[assignment]
        saver = self.saver("undigested", False)
        self.step = number + 2
        self.timed("the same without digests", saver.save)
        saver.close()
        safetensors_stream.xxh3_128 = digest
        self.timed("plain DCP save", lambda: dcp.save(self.tensors, checkpoint_id=self.folder / "dcp"))
        found: Checkpoint = self.timed("verify", lambda: verify_together(self.newest()))
        into = {name: torch.zeros_like(t) for name, t in self.tensors.items()}
        self.timed("load, verified before", lambda: on_all_ranks(lambda: load(found, into), "cannot load"))
        assert all(torch.equal(into[n].to_local(), t.to_local()) for n, t in self.tensors.items())
        self.timed("plain DCP load", lambda: dcp.load(into, checkpoint_id=self.folder / "dcp"))
        dist.barrier()
        if self.rank == 0:
            for name in ("dcp", "sync", "undigested"):
                shutil.rmtree(self.folder / name)
        dist.barrier()

    def step_with_save(self) -> float:
        """Seconds that the slowest rank's step stands still: where it asks for the save, and where it would update."""
        os.sync()
        dist.barrier()
        started = time.perf_counter()
        self.asynchronous.save()
        waited = time.perf_counter() - started
        compute(self.compute)
        started = time.perf_counter()
        self.asynchronous.before_update()
        slowest = torch.tensor(waited + time.perf_counter() - started)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def newest(self) -> Path:
        found = newest_together(self.folder / "async", strict=True)
        assert found is not None and found.manifest.step == self.step
        return found.folder

    def raw(self) -> None:
        path = self.folder / f"raw-{self.rank}"
        with path.open("wb", buffering=0) as file:
            for tensor in self.tensors.values():
                memory = tensor.to_local().reshape(-1).view(torch.uint8).numpy().data
                for begin in range(0, len(memory), CHUNK):
                    file.write(memory[begin : begin + CHUNK])
            os.fsync(file.fileno())
        path.unlink()


class Undigested:
    """What takes the place of a digest to see what digests cost."""

    def update(self, chunk: memoryview) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


def compute(seconds: float) -> None:
    """What stands for a forward and a backward pass: products, for so long."""
    left = torch.randn(512, 512)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        left @ left


def run_facts(step: int) -> Report:
    return {
        "format": 6, "run": "benchmark", "step": step, "samples": step, "skipped": 0, "seed": 0, "scaler": None,
        "broken": [], "fingerprints": dict.fromkeys(("dataset", "encoding", "order", "model"), ""), "trainable": [],
        "versions": {}, "written_by": {}, "config": {},
    }  # fmt: skip


# What is shown


def draw(pyplot: Any, report: Report) -> None:
    """Seconds of each way, the median, and every repeat as a dot."""
    seconds = report["seconds"]
    _, axes = pyplot.subplots(figsize=(9, 0.45 * len(seconds) + 1.5), layout="constrained")
    for place, (name, values) in enumerate(seconds.items()):
        axes.barh(place, median(values), color="C0" if name.startswith(("async", "sync")) else "C7")
        axes.plot(values, [place] * len(values), "k.", markersize=4)
    axes.set_yticks(range(len(seconds)), list(seconds))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"{report['ranks']} ranks, {report['bytes'] / GIB:.2g} GiB in all", fontsize="medium")


if __name__ == "__main__":
    main()
