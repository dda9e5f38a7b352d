"""What does the update of 300 sharded weights cost the host, beside torch's own optimizer?

    python benchmarks/update.py [FOLDER]                 # into benchmarks/results; --weights, --rounds, --steps

The weights are DTensors of one rank and so small that almost all is the cost of calls: the norm of the gradients,
clipping, AdamW, and freeing the gradients. The ways take turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capped import facts, write_json
from provenance import REPOSITORY
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llava_fsdp.parallel.precision.fused_adamw import FusedAdamW
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.train.loop import clip_gradients

SHAPE = (8, 8)
CLIP = 1.0


def drawn(count: int, mesh: DeviceMesh) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    return [distribute_tensor(torch.randn(SHAPE, generator=dice), mesh, [Shard(0)]) for _ in range(count)]


def update_here(weights: list[nn.Parameter]) -> Callable[[], None]:
    masters = MasterWeights({str(number): weight for number, weight in enumerate(weights)})
    optimizer = FusedAdamW(weights, fused=True)

    def step() -> None:
        clip_gradients(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def update_by_torch(weights: list[nn.Parameter]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(weights, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def update_by_kernels(weights: list[nn.Parameter]) -> Callable[[], None]:
    """Norm, clipping and AdamW alone, on lists of plain tensors that are made before; no gradient is freed."""
    own = [weight.to_local().detach() for weight in weights]  # type: ignore[attr-defined]
    first, second = ([torch.zeros_like(tensor) for tensor in own] for _ in range(2))
    steps = [torch.zeros(()) for _ in own]
    gradients = [torch.ones_like(tensor) for tensor in own]

    def step() -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
        torch._foreach_mul_(gradients, torch.clamp(CLIP / (norm + 1e-6), max=1.0))
        torch._foreach_add_(steps, torch.ones(()), alpha=1.0)
        torch._fused_adamw_(
            own, gradients, first, second, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


WAYS = {
    "this project": update_here, "torch's clip_grad_norm_ and AdamW(fused=True)": update_by_torch,
    "the kernels alone": update_by_kernels,
}  # fmt: skip


def measure(options: argparse.Namespace, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """A row for each way: CPU seconds of each step, in rounds in which all ways take turns."""
    gradients = drawn(options.weights, mesh)
    every = {name: [nn.Parameter(weight) for weight in drawn(options.weights, mesh)] for name in WAYS}
    steps = {name: make(every[name]) for name, make in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(options.rounds + 1):  # the first one makes the states and is not timed
        for name, step in steps.items():
            for _ in range(options.steps):
                for weight, gradient in zip(every[name], gradients, strict=True):
                    weight.grad = gradient.clone()
                began = time.process_time()
                step()
                if number:
                    seconds[name].append(time.process_time() - began)
    here, by_torch, _ = every.values()
    pairs = zip(here, by_torch, strict=True)
    assert all(torch.equal(own.to_local(), other.to_local()) for own, other in pairs), "both must update alike"  # type: ignore[attr-defined]
    return [
        {"way": name, "cpu_seconds": {"min": min(own), "median": statistics.median(own), "all": own}}
        for name, own in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="What does the update of sharded weights cost the host?")
    parser.add_argument("folder", nargs="?", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--weights", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="that each way takes in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = facts("what does the update of many sharded weights cost the host?", options)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        try:
            report["rows"] = measure(options, init_device_mesh("cpu", (1,)))
        finally:
            dist.destroy_process_group()
    for row in report["rows"]:
        seconds = row["cpu_seconds"]
        print(f"{row['way']}: {1e3 * seconds['median']:.2f} CPU ms, at least {1e3 * seconds['min']:.2f}")
    print(f"wrote {write_json(report, 'update-cpu', options.folder)}")


if __name__ == "__main__":
    main()
