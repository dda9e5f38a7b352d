"""Set up the process group and the device of a training, and set the timeouts of its groups."""

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
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llava_fsdp.config import Config
from llava_fsdp.parallel.malloc import extend_segments, keep_freed_memory, limit_kernel_cache
from llava_fsdp.parallel.ranks.consensus import gathered
from llava_fsdp.parallel.ranks.fake_collectives import join_fake
from llava_fsdp.parallel.ranks.meet import ended_ranks, meet, remaining, uses_agent_store
from llava_fsdp.parallel.ranks.progress import gpu_progress, record_collectives
from llava_fsdp.parallel.ranks.world import World, read_world, simulated_world, world_of_group
from llava_fsdp.runtime.errors import CommunicationError, ConfigError
from llava_fsdp.runtime.files.heartbeat import seconds_before_limit
from llava_fsdp.runtime.launch import env_rank, is_one_node
from llava_fsdp.runtime.process.process_end import end_with
from llava_fsdp.runtime.text.log import log

T = TypeVar("T")


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a training. Each contains all ranks in order, unless layers are divided (`tensor`) or ranks
    have different layers (`pipeline`)."""

    states: DeviceMesh | None = None
    """How weights, gradients and optimizer states are sharded, with the dimensions (replicate, shard) or (shard,); all
    ranks with the same stages of the model take part, also those that share a row. None for a single rank, unless
    `offload` needs FSDP to move weights."""
    context: DeviceMesh | None = None
    """Dimensions (data, context). The `context` ranks of a line share their rows. None: no rows are shared."""
    pipeline: DeviceMesh | None = None
    """Dimensions (pipeline, stage). The ranks of a line `pipeline` process the same rows, each with its stages of the
    model; the ranks of a line `stage` have the same stages. `states` contains only these. None: each rank has the whole
    model."""
    tensor: DeviceMesh | None = None
    """Dimension (tensor,): the ranks that compute each layer together with this one. Then `states` contains only the
    ranks that hold the same parts of the weights. None: each rank computes whole layers."""
    experts: DeviceMesh | None = None
    """Dimensions (replicate, shard, expert) or (shard, expert). The `expert` ranks of a line share the experts of a
    mixture; those that hold the same experts replicate and shard them like `states`. Ranks that compute layers together
    (`tensor`) hold different experts, or different shards of them. None: each rank has all experts."""


@contextmanager
def distributed(cfg: Config) -> Iterator[World]:
    """Context manager that joins the process group described by torchrun's environment variables and chooses this
    rank's device.

    At world size 1 there is no process group, unless the setting `offload` needs FSDP. After an error the group is not
    destroyed, because the process ends at once and other ranks may no longer respond. After success the group is ended
    in this order: barrier, destroy, collect garbage, sleep. In another order gloo's background thread aborts about one
    process in seven at interpreter exit (pytorch#179291).

    Yields:
        This rank's number and device, and the number of ranks.

    Raises:
        CommunicationError: ranks have not come in time, or the connection to another rank was lost.
    """
    if dist.is_initialized():  # the caller has created the process group, and destroys it later
        yield world_of_group()
        return
    world = read_world()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())  # otherwise this process would continue if torchrun is killed
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting
        torch.use_deterministic_algorithms(True)
    if world.device.type == "cuda":
        extend_segments()  # torch's allocator then fragments less
        record_collectives()  # for reports of where collectives hang
        torch.cuda.set_device(world.device)
    elif cfg.dry_run is None:
        keep_freed_memory()
        limit_kernel_cache()
    needs_group = cfg.offload.mode.moves_weights
    if cfg.dry_run is not None:
        world = simulated_world(cfg.dry_run, world)
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
    r"connectFullMesh|DistBackendError|DistNetworkError|DistStoreError|wait timeout"
)
"""Pattern for messages of torch.distributed about a lost connection to another rank."""


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def is_lost_peer(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, was raised by torch.distributed because another rank has ended or
    does not answer in time."""
    while error is not None:
        # torch.distributed.checkpoint raises the errors of several ranks as a BaseException
        is_from_torch = isinstance(error, RuntimeError) or not isinstance(error, Exception)
        if isinstance(error, dist.DistError) or (is_from_torch and LOST.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def num_collectives(meshes: Meshes, device: torch.device) -> Callable[[], int]:
    """Return a function that returns how far this rank is in its collectives, in the default process group and those of
    the meshes: a number that is smaller on a rank that lags behind the others. With `parallel.pipeline` only
    collectives of all ranks count, because ranks with other stages start other collectives.

    On a CPU it is the number of collectives that have begun. On a GPU the host only enqueues them, all ranks alike, and
    then waits: the number is that of collectives that the GPU has begun, plus those that it has completed. It comes
    from torch's flight recorder (`record_collectives` turns it on); without one, enqueued collectives are counted.
    """
    if not dist.is_initialized():
        return int  # a function that returns 0
    groups = groups_of(meshes if meshes.pipeline is None else Meshes())
    dump = getattr(c10d, "_dump_nccl_trace_json", None) if device.type == "cuda" else None

    def progress() -> int:
        of_gpu = None if dump is None else gpu_progress(dump(False, True), meshes.pipeline is not None)
        enqueued = (getattr(group, "_get_sequence_number_for_group")() for group in groups)  # noqa: B009  not in its stubs
        return sum(enqueued) if of_gpu is None else of_gpu

    return progress


def groups_of(meshes: Meshes) -> list[dist.ProcessGroup]:
    """Return the default process group and those of the meshes, each once."""
    made = [
        mesh
        for mesh in (meshes.states, meshes.context, meshes.pipeline, meshes.tensor, meshes.experts)
        if mesh is not None
    ]
    groups = [dist.distributed_c10d._get_default_group(), *(group for mesh in made for group in mesh.get_all_groups())]
    return list({id(group): group for group in groups}.values())


def set_timeout(meshes: Meshes, seconds: int) -> None:
    """Set the timeout of all process groups to `seconds`: for the default group and those of the meshes. Do nothing
    without a process group, or with a simulated one."""
    is_real = dist.is_initialized() and dist.get_backend() != "fake"
    for group in groups_of(meshes) if is_real else ():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def own_rank() -> int:
    """Return this rank's number, from the process group or, without one, from torchrun's environment."""
    return dist.get_rank() if dist.is_initialized() else env_rank()


def rank_identities() -> list[tuple[int, str, int]]:
    """Return (rank, host name, process id) of every rank, on every rank. Collective: all ranks must call it."""
    return gather_lists([(own_rank(), socket.gethostname(), os.getpid())])


def check_own_gpus(store: dist.Store, world: World) -> None:
    """Check that no two ranks have the same GPU, where each rank sees a single one. NCCL fails later in that case, on
    some ranks alone. Collective.

    Args:
        store: the store in which the ranks meet.
        world: this rank's number and device, and the number of ranks.

    Raises:
        ConfigError: two ranks have the same GPU; raised on every rank.
    """
    keys = [f"gpu of rank {rank}" for rank in range(world.size)]
    own_gpu = f"{socket.gethostname()} {torch.cuda.get_device_properties(world.device).uuid}"
    store.set(keys[world.rank], own_gpu)
    first: dict[bytes, int] = {}
    for rank, gpu in enumerate(store.multi_get(keys)):
        other = first.setdefault(gpu, rank)
        if other != rank:
            host, _, uuid = gpu.decode().partition(" ")
            raise ConfigError(
                f"ranks {other} and {rank} on {host} both see only the GPU {uuid}; start one rank for each GPU, or "
                "show each rank another GPU (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES)"
            )


def join(world: World, timeout_seconds: int) -> None:
    """Wait until all ranks have come (meet.py), and initialise the process group.

    Args:
        world: this rank's number and device, and the number of ranks.
        timeout_seconds: time limit for all of this, and afterwards the timeout of the group's collectives.

    Raises:
        CommunicationError: ranks have not come in time, or cannot connect to each other.
        ConfigError: the address at which the ranks are to meet is not set, or two ranks have the same GPU.
    """
    env = os.environ
    if uses_agent_store() and not is_one_node() and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        if world.rank == 0:
            log().warning(
                "restarts on several machines may not come up: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each of them"
            )
    # ends before the limit, so that the error about late ranks comes before torch's own
    until = time.monotonic() + timeout_seconds - seconds_before_limit(timeout_seconds)
    store = meet(world.rank, world.size, until)
    if world.device.type == "cuda" and world.local_size > torch.cuda.device_count():
        check_own_gpus(store, world)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=remaining(until),
            # without it NCCL makes a communicator for each pair of ranks at their first message, and messages of a
            # pipeline that are sent together wait for each other for ever
            device_id=world.device if world.device.type == "cuda" else None,
        )
    except RuntimeError as error:
        if world.size == 1 or not is_lost_peer(error):
            raise
        raise unconnected(store, world, error) from error
    set_timeout(Meshes(), timeout_seconds)


def unconnected(store: dist.Store, world: World, error: Exception) -> CommunicationError:
    """Return the error for ranks that have come to the store, but cannot connect to each other.

    Args:
        store: the store in which they have met.
        world: this rank's number, and the number of ranks.
    """
    try:
        ended = ended_ranks(store, world.size)
    except RuntimeError:  # the store is gone, too
        ended = []
    if ended:
        return CommunicationError(f"{ended[0][1]} has ended before the ranks were connected").about(rank=ended[0][0])
    return CommunicationError(
        f"rank {world.rank} on {socket.gethostname()} cannot connect to the other {world.size - 1} ranks: "
        f"{last_line(error)}; do the machines reach each other, and does GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name "
        "the right network interface?"
    )


@contextmanager
def first_rank_first(world: World) -> Iterator[None]:
    """Context manager in which code runs on rank 0 first, and then on all other ranks, so that they can reuse files
    that rank 0 has written. Collective. `world`: this rank's number and the number of ranks."""
    if world.size > 1 and not world.is_first:
        dist.barrier()
    yield
    if world.size > 1 and world.is_first:
        dist.barrier()


def gather_lists(items: list[T]) -> list[T]:
    """Return the lists of all ranks, concatenated in rank order, on every rank. Collective: all ranks must call it. If
    all lists are empty, only one number is all-reduced. The items of `items`, this rank's list, can be pickled."""
    if not dist.is_initialized():
        return items
    count = torch.tensor([len(items)])
    dist.all_reduce(count)
    if not count:
        return []
    return [item for of_rank in gathered(items) for item in of_rank]
