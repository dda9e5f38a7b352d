"""This rank's number, the number of ranks, and this rank's device."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.launch import env_rank


@dataclass(frozen=True)
class World:
    """This rank's number, the total number of ranks, and this rank's device. Without torchrun there is one rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read_world() -> World:
    """Read this rank's number, the number of ranks and this rank's device from torchrun's environment variables.

    A launcher may show each rank a single GPU, its own, which is then device 0 of every rank. `join` checks that these
    are different GPUs. Raises ConfigError if torchrun has started more ranks on this machine than it has GPUs."""
    env = os.environ
    rank, size = env_rank(), int(env.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available():
        return World(rank, size, local_rank, local_size, torch.device("cpu"))
    gpus = torch.cuda.device_count()
    if max(local_size, local_rank + 1) <= gpus:
        return World(rank, size, local_rank, local_size, torch.device("cuda", local_rank))
    if gpus == 1 and "TORCHELASTIC_RUN_ID" not in env:  # srun --gpus-per-task=1
        return World(rank, size, local_rank, local_size, torch.device("cuda", 0))
    if gpus == 1 and local_rank == 0:  # torchrun --virtual-local-rank calls every rank the first of its machine
        return World(rank, size, rank % local_size, local_size, torch.device("cuda", 0))
    raise ConfigError(
        f"torchrun started {local_size} ranks on this machine, which has {gpus} GPUs; use --nproc-per-node {gpus}"
    )


def world_of_group() -> World:
    """Return this rank's number, the number of ranks and this rank's device, as a `World`, for an existing process
    group. All its ranks are assumed to be on this machine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank, size, rank, size, device)


def simulated_world(size: int, world: World) -> World:
    """Return the `World` (rank, number of ranks, both again within the node, device) of a process that simulates rank 0
    of `size` ranks on one node. `world`: the real ranks. Raise ConfigError if torchrun has started several of them, as
    a simulation runs in one process."""
    if world.size > 1:
        raise ConfigError(
            f"dry_run={size} simulates rank 0 of {size} ranks in one process, but torchrun started {world.size}; "
            "start it without torchrun"
        )
    return World(0, size, 0, size, world.device)
