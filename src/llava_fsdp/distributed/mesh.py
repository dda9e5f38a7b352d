"""The ranks of a run: process group, device, and the mesh of a plan. Left in order when the run ends well."""

import gc
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llava_fsdp.config import Config
from llava_fsdp.distributed.fake_collectives import join_fake
from llava_fsdp.distributed.malloc import keep_freed_memory, limit_kernel_cache
from llava_fsdp.distributed.zero import Mesh, ShardPlan
from llava_fsdp.runtime.errors import CommunicationError, ConfigError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.process_end import end_with

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks, as torchrun's environment describes them; one rank where there was no torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def distributed(cfg: Config) -> Iterator[World]:
    """Join the process group of torchrun's environment and pick this rank's device.

    At world size 1 there is no process group, unless `offload` wraps the model all the same. On an error nothing is
    torn down: the process is about to end at once, and a peer may never answer. On success the order barrier, destroy,
    collect, pause matters: without it gloo's background thread aborts about one process in seven at interpreter exit
    (pytorch#179291).
    """
    if dist.is_initialized():  # whoever made the group ends it
        yield world_of_group()
        return
    world = read_world()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())  # else it would train on as an orphan where torchrun is killed
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a workspace
        torch.use_deterministic_algorithms(True)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    elif cfg.dry_run is None:
        keep_freed_memory()
        limit_kernel_cache()
    needs_group = cfg.offload.mode.moves_weights
    if cfg.dry_run is not None:
        world = imagined(cfg.dry_run, world)
        if world.size > 1 or needs_group:
            join_fake(world.size)
    elif world.size > 1 or needs_group:
        join(world, cfg.comm.init_timeout)
    try:
        yield world
    except Exception as error:
        if is_lost_peer(error):
            raise CommunicationError(f"the connection to another rank was lost: {last_line(error)}") from error
        raise
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.2)


LOST = re.compile(
    r"Connection (closed|reset|refused)|remote worker crashing|Timed out waiting|gloo/transport|Broken pipe|NCCL|"
    r"DistBackendError|DistNetworkError|DistStoreError|wait timeout"
)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether torch.distributed failed because another rank is gone or late: as the error, or behind it."""
    while error is not None:
        # what checkpoints raise for several ranks is no Exception
        is_torchs = isinstance(error, RuntimeError) or not isinstance(error, Exception)
        if isinstance(error, dist.DistError) or (is_torchs and LOST.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def num_collectives(mesh: DeviceMesh | None) -> Callable[[], int]:
    """Counts what this rank has begun of them: the late rank of several has begun fewer."""
    if not dist.is_initialized():
        return int
    groups = groups_of(mesh)
    return lambda: sum(getattr(group, "_get_sequence_number_for_group")() for group in groups)  # noqa: B009  not in its stubs


def groups_of(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    found = [dist.distributed_c10d._get_default_group()]
    for group in mesh.get_all_groups() if mesh is not None else []:
        if all(group is not other for other in found):
            found.append(group)
    return found


def shorten_timeout(mesh: DeviceMesh | None, seconds: int) -> None:
    """From `comm.init_timeout` to `comm.timeout`, once weights are loaded and a step has compiled what it needs."""
    if not dist.is_initialized():
        return
    for group in groups_of(mesh):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def own_rank() -> int:
    """Before and after the ranks have met."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def meet() -> list[tuple[int, str, int]]:
    """Rank, host and process of every rank. A collective."""
    return gather_lists([(own_rank(), socket.gethostname(), os.getpid())])


def read_world() -> World:
    env = os.environ
    rank, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available():
        return World(rank, size, local_rank, local_size, torch.device("cpu"))
    if local_size > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started {local_size} ranks on this machine, which has {torch.cuda.device_count()} GPUs; "
            f"use --nproc-per-node {torch.cuda.device_count()}"
        )
    return World(rank, size, local_rank, local_size, torch.device("cuda", local_rank))


def world_of_group() -> World:
    """The ranks of a process group that exists already, all on this machine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank, size, rank, size, device)


def imagined(size: int, world: World) -> World:
    """Rank 0 of `size` ranks of one node, of which this process is the only one.

    Raises:
        ConfigError: there are several processes.
    """
    if world.size > 1:
        raise ConfigError(
            f"dry_run={size} is rank 0 of {size} imagined ranks, in one process; torchrun started {world.size}: start "
            "it without torchrun"
        )
    return World(0, size, 0, size, world.device)


def join(world: World, timeout_seconds: int) -> None:
    """Initialise the process group on a store of this restart attempt.

    torchrun's own store outlives a restart, and workers would read the addresses of the dead ones (pytorch#135712), so
    that what they write is prefixed with the number of restarts. That number is counted by node: where nodes come and
    go it differs between them, and only a store that is new with every start will do, which
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 asks torchrun for. It needs no prefix.
    """
    env = os.environ
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and env.get("GROUP_WORLD_SIZE", "1") != "1" and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        if world.rank == 0:
            log().warning(
                "restarts on several machines may not come up: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each of them"
            )
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.HashStore() if world.size == 1 else next(dist.rendezvous("env://", timeout=timeout))[0]
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "new"
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt_{attempt}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if world.device.type == "cuda" else None,
    )


@contextmanager
def first_rank_first(world: World) -> Iterator[None]:
    """Rank 0 does something while the others wait, then they do it too and find it done."""
    if world.size > 1 and not world.is_first:
        dist.barrier()
    yield
    if world.size > 1 and world.is_first:
        dist.barrier()


def gather_lists(items: list[T]) -> list[T]:
    """Every rank's items, in the order of ranks. Where none has any, the cost is one number summed on the host."""
    if not dist.is_initialized():
        return items
    count = torch.tensor([len(items)])
    dist.all_reduce(count)
    if not count:
        return []
    gathered: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, items)
    return [item for own in gathered for item in own]


def make_mesh(world: World, plan: ShardPlan, cfg: Config) -> DeviceMesh | None:
    """The (replicate, shard) mesh of a plan; None at world size 1, where nothing is sharded.

    FSDP is what moves weights between host and device, so `offload=params` and `nvme` wrap one rank too.

    Raises:
        ConfigError: `sharding.shard_size` does not divide the ranks.
    """
    shape = mesh_shape(plan, world.size, cfg.sharding.shard_size or world.local_size)
    if world.size == 1 and not cfg.offload.mode.moves_weights:
        return None
    if plan.mesh is Mesh.SHARD:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def mesh_shape(plan: ShardPlan, world_size: int, shard_size: int) -> tuple[int, int]:
    """(replicate, shard) sizes of a plan's mesh."""
    if plan.mesh is Mesh.REPLICATE:
        return world_size, 1
    if plan.mesh is Mesh.SHARD:
        return 1, world_size
    if world_size % shard_size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"sharding.shard_size={shard_size} does not divide the {world_size} ranks of this run; "
            f"choose one of {divisors}"
        )
    return world_size // shard_size, shard_size
