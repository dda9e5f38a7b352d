"""One rank of `doctor`'s check of communication: join the process group as a training does, run collectives and check
their results.

`torchrun --nnodes 2 --nproc-per-node 8 ... -m llava_fsdp.doctor.probes.collectives_worker FOLDER` tests several
machines. Each rank R writes how far it has come (started, joined, ...) into FOLDER/rank-R.
"""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from llava_fsdp.parallel.ranks.mesh import join
from llava_fsdp.parallel.ranks.world import World, read_world
from llava_fsdp.runtime.process.process_end import end_with

MIB = 1 << 20
ROUNDS = 5


def main() -> None:
    """Run one rank of the check: join the others, and test each collective. The folder is the first argument of the
    command; a line is appended to its file `rank-N` for each stage (started, joined, ...) that this rank reaches."""
    # torch 2.13 deprecates both collectives on whole tensors; 2.11 has no other name for them
    warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning)
    end_with(os.getppid())  # this process ends when torchrun does
    world = read_world()
    path = Path(sys.argv[1]) / f"rank-{world.rank}"

    def record_stage(stage: str, more: str = "") -> None:
        """Append a line with the stage that this rank has reached, from which `doctor` sees where ranks hang."""
        with path.open("a") as file:
            file.write(f"{stage} {more}\n")

    record_stage("started")
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    join(world, timeout_seconds=600)  # longer than doctor waits
    record_stage("joined")
    values = torch.full((1024,), float(world.rank + 1), device=world.device)
    dist.all_reduce(values)
    expect(values, sum(range(1, world.size + 1)), "all_reduce")
    record_stage("summed")
    gathered = torch.empty(world.size * 4, device=world.device)
    dist.all_gather_into_tensor(gathered, torch.full((4,), float(world.rank), device=world.device))
    expect(gathered, torch.arange(world.size, device=world.device).repeat_interleave(4), "all_gather")
    record_stage("gathered")
    part = torch.empty(4, device=world.device)
    dist.reduce_scatter_tensor(part, torch.ones(world.size * 4, device=world.device))
    expect(part, world.size, "reduce_scatter")
    record_stage("scattered")
    check_exchange(world)
    record_stage("exchanged")
    check_messages(world)
    record_stage("passed")
    record_stage("measured", f"{speed(world.device, world.size):.6g}")
    dist.barrier()
    dist.destroy_process_group()


def check_exchange(world: World) -> None:
    """Check the all-to-all, by which experts on several ranks exchange tokens: each rank sends one number to each."""
    ranks = torch.arange(world.size, device=world.device)
    received = torch.empty_like(ranks)
    dist.all_to_all_single(received, world.rank * world.size + ranks)
    expect(received, ranks * world.size + world.rank, "all_to_all")


def check_messages(world: World) -> None:
    """Check messages as between stages of a pipeline: each rank sends numbers to the next, the last to the first."""
    sent = torch.full((4,), float(world.rank), device=world.device)
    received = torch.empty_like(sent)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect(received, before, "a message of another rank")


def expect(found: torch.Tensor, wanted: torch.Tensor | float, what: str) -> None:
    """Raise RuntimeError, which names the collective `what`, unless its result is the wanted one."""
    if not bool((found == wanted).all()):
        raise RuntimeError(f"{what} returned {found.tolist()[:8]} instead of {wanted}")


def speed(device: torch.device, size: int) -> float:
    """Return the bytes per second that each of `size` ranks sends in an all-reduce, as nccl-tests' bus bandwidth."""
    count = (64 if device.type == "cuda" else 4) * MIB
    values = torch.ones(count // 4, device=device)
    dist.all_reduce(values)
    wait_for_device(device)
    start = time.monotonic()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    wait_for_device(device)
    return ROUNDS * count * 2 * (size - 1) / size / (time.monotonic() - start)


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
