"""How ranks learn who they are and how they meet, and what each learns of the others."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from harness import CPU, RankPool, single_world
from small import Configure

from llava_fsdp.config import Config, ParallelConfig, Strategy
from llava_fsdp.parallel.parallelism import make_meshes
from llava_fsdp.parallel.ranks import meet as meet_module
from llava_fsdp.parallel.ranks import mesh
from llava_fsdp.parallel.ranks.consensus import Votes, gathered_on_first, on_all_ranks, on_first_rank
from llava_fsdp.parallel.ranks.meet import meet
from llava_fsdp.parallel.ranks.mesh import (
    first_rank_first,
    gather_lists,
    groups_of,
    join,
    num_collectives,
    rank_identities,
    set_timeout,
)
from llava_fsdp.parallel.ranks.progress import gpu_progress
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.parallel.ranks.world import World, read_world, simulated_world
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.runtime.errors import CommunicationError, ConfigError, LlavaFsdpError


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_rank_is_who_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks of the second of two nodes; the first rank of a node is not yet the first of all."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert read_world() == World(3, 4, 1, 2, CPU)
    assert not World(2, 4, 0, 2, CPU).is_first and World(0, 4, 0, 2, CPU).is_first


def machine_with_gpus(count: int, patch: pytest.MonkeyPatch, **environment: str) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        patch.delenv(name, raising=False)
    for name, value in environment.items():
        patch.setenv(name, value)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "torchrun", "expected"),
    [
        (4, "3", True, World(7, 8, 3, 4, torch.device("cuda", 3))),
        (1, "0", True, World(7, 8, 3, 4, torch.device("cuda", 0))),  # --virtual-local-rank
        (1, "3", False, World(7, 8, 3, 4, torch.device("cuda", 0))),  # srun --gpus-per-task=1
        (1, "3", True, None),
        (2, "0", True, None),
        (2, "3", False, None),
    ],
)
def test_a_rank_may_see_its_own_gpu_alone(
    gpus: int, local_rank: str, torchrun: bool, expected: World | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of four ranks of the second of two machines."""
    given = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "4"}
    machine_with_gpus(gpus, monkeypatch, **given, **({"TORCHELASTIC_RUN_ID": "none"} if torchrun else {}))
    if expected is not None:
        assert read_world() == expected
        return
    with pytest.raises(ConfigError, match=rf"4 ranks .* {gpus} GPUs"):
        read_world()


@pytest.mark.parametrize("last", ["c", "a"])
def test_ranks_that_see_one_gpu_each_must_see_different_ones(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank; the last of three may have the GPU of the first."""
    machine_with_gpus(1, monkeypatch)
    store, uuids = dist.HashStore(), dict(enumerate(("a", "b", last)))
    begun: list[str] = []
    monkeypatch.setattr(mesh, "meet", lambda *_: store)
    monkeypatch.setattr(mesh.dist, "init_process_group", lambda backend, **_: begun.append(backend))
    results: list[Any] = []
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuids[own.rank]))

    def begin(number: int) -> None:
        own.rank = number
        try:
            results.append(join(World(number, 3, number, 3, torch.device("cuda", 0)), 77))
        except ConfigError as error:
            results.append(str(error))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if last == "c":
        assert results == [None] * 3 and len(begun) == 3
    else:
        assert len(results) == 3 and all("ranks 0 and 2" in str(found) for found in results) and not begun


def test_a_simulated_rank_has_all_others_on_its_node() -> None:
    assert simulated_world(8, single_world()) == World(0, 8, 0, 8, CPU)
    with pytest.raises(ConfigError, match=r"dry_run=8 simulates rank 0 of 8 .* torchrun started 2"):
        simulated_world(8, World(0, 2, 0, 2, CPU))


@pytest.mark.parametrize(
    ("rank", "values", "expected"),
    [
        (5, {"context": 2}, (2, 4)),
        (5, {"context": 4}, (1, 2)),
        (5, {"context": 1}, (5, 8)),
        (5, {"tensor": 2}, (2, 4)),
        (5, {"context": 2, "tensor": 2}, (1, 2)),
        (5, {"pipeline": 2}, (1, 4)),
        (6, {"pipeline": 2, "tensor": 2}, (1, 2)),
    ],
)
def test_neighbours_share_rows(rank: int, values: dict[str, int], expected: tuple[int, int]) -> None:
    """Ranks of a row are consecutive; those with other stages of the model process the same rows."""
    assert RankLayout(ParallelConfig(**values), 8).row_group(rank) == expected


@pytest.mark.parametrize(("offload", "dry_run", "joins"), [("none", "null", None), ("params", "null", "join"),
    ("none", "4", "join_fake"), ("none", "1", None), ("params", "1", "join_fake")])  # fmt: skip
def test_when_ranks_meet(
    offload: str, dry_run: str, joins: str | None, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single rank has a process group where FSDP moves its weights; a dry run has one without other ranks, and keeps
    the allocator's settings. After an error the group is left as it is, and a lost connection has an error of its
    own."""
    told: list[str] = []
    for name in ("join", "join_fake", "keep_freed_memory", "limit_kernel_cache"):
        monkeypatch.setattr(mesh, name, lambda *_, name=name: told.append(name))
    monkeypatch.setattr(mesh, "read_world", single_world)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: told.append(f"deterministic {on}"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cfg = configure("sharding=zero3", f"offload={offload}", f"dry_run={dry_run}")
    with mesh.distributed(cfg) as world:
        assert world.size == (4 if dry_run == "4" else 1)
    kept = ["keep_freed_memory", "limit_kernel_cache"] if dry_run == "null" else []
    assert told == [*kept, *([joins] if joins else [])]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    told.clear()
    with mesh.distributed(replace(cfg, deterministic=True)):
        assert told[0] == "deterministic True" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    for error, kind in ((RuntimeError("Connection reset by peer"), CommunicationError), (KeyError("x"), KeyError)):
        with pytest.raises(Exception) as caught, mesh.distributed(cfg):
            raise error
        assert caught.type is kind


@pytest.mark.parametrize(
    ("environment", "prefix", "warns"),
    [
        ({}, "attempt_new", False),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, "attempt_new", False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}, "attempt_2", False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, "attempt_0", False),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"},
            "attempt_0", True,
        ),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}, "attempt_0", False),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"}, "attempt_new", False),
    ],
)  # fmt: skip
def test_addresses_of_dead_ranks_are_not_read(
    environment: dict[str, str],
    prefix: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torchrun's store outlives a restart of its ranks, unless it makes a new one for each."""
    names = ("USE_AGENT_STORE", "RESTART_COUNT", "MAX_RESTARTS")
    for name in ("GROUP_WORLD_SIZE", *(f"TORCHELASTIC_{name}" for name in names)):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    begun: list[Any] = []
    shortened: list[int] = []
    monkeypatch.setattr(mesh, "set_timeout", lambda _, seconds: shortened.append(seconds))
    monkeypatch.setattr(mesh.dist, "PrefixStore", lambda prefix, store: prefix)
    monkeypatch.setattr(mesh.dist, "init_process_group", lambda backend, **given: begun.append((backend, given)))
    with caplog.at_level("WARNING"):
        join(single_world(), 77)
    ((backend, given),) = begun
    assert (backend, given["store"]) == ("gloo", prefix) and 60 < given["timeout"].total_seconds() <= 77 - 7.7
    assert shortened == [77]  # the time that ranks took to meet is not taken from the collectives that follow
    assert (given["rank"], given["world_size"], given["device_id"]) == (0, 1, None)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in caplog.text) is warns


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Returns a function that lets ranks, given as (rank, number of ranks, seconds until it comes), meet within a
    second, and returns what each got: `met`, or its error, and how many seconds that took at most."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    stores: list[dist.Store] = []
    hosts = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: getattr(hosts, "name", "here"))

    def run(*ranks: tuple[int, int, float]) -> list[Any]:
        until = time.monotonic() + 1
        results: list[Any] = [None] * len(ranks)

        def come(place: int, rank: int, size: int, late: float) -> None:
            time.sleep(late)
            hosts.name = f"host {place}"  # threads of one process are told apart by it
            try:
                stores.append(meet(rank, size, until))
                results[place] = "met"
            except Exception as error:
                results[place] = error

        threads = [threading.Thread(target=come, args=(place, *rank)) for place, rank in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert time.monotonic() < until + 1.5
        return results

    return run


def test_the_store_stays_until_all_ranks_know_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with rank 0, and the others would only report that they have lost it. One of two may have ended."""
    store = dist.HashStore()
    store.add("come", 2)
    store.add("told", 1)
    begun = time.monotonic()
    threading.Timer(0.4, store.add, ("told", 1)).start()
    meet_module.await_readers(store)
    assert 0.4 <= time.monotonic() - begun < meet_module.READERS_SECONDS
    store.add("come", 1)
    monkeypatch.setattr(meet_module, "READERS_SECONDS", 0.3)
    begun = time.monotonic()
    meet_module.await_readers(store)
    assert 0.3 <= time.monotonic() - begun < 3


@pytest.mark.parametrize(
    ("ranks", "culprit"),
    [
        ([(0, 3, 0), (2, 3, 0)], 1),  # one never starts
        ([(1, 3, 0)], 1),  # rank 0, whose store it is, never starts
        pytest.param([(0, 2, 0), (1, 2, 1.3)], 1, marks=pytest.mark.slow),  # one is too late
        ([(0, 2, 0), (1, 3, 0)], None),  # they disagree about their number
        ([(0, 3, 0), (2, 4, 0.3)], 2),
        ([(0, 3, 0), (1, 3, 0), (1, 3, 0)], 1),  # two are the same rank
    ],
)
def test_ranks_that_do_not_meet_say_who_is_missing_within_their_limit(
    ranks: list[tuple[int, int, float]], culprit: int | None, meeting: Callable[..., list[Any]]
) -> None:
    for found, (_, _, late) in zip(meeting(*ranks), ranks, strict=True):
        assert isinstance(found, CommunicationError), found
        assert late > 1 or culprit is None or found.culprit["rank"] == culprit


def test_who_waits_for_a_rank_says_so(
    meeting: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At intervals, and only the first of those that have come."""
    monkeypatch.setattr(meet_module, "TELL", 0.3)
    with caplog.at_level("WARNING"):
        assert meeting((0, 3, 0), (1, 3, 0), (2, 3, 0.95)) == ["met"] * 3
    said = [record.message for record in caplog.records if "waiting" in record.message]
    assert 1 <= len(said) <= 3 and all("rank 2 of 3" in text for text in said)


def test_a_rank_that_is_late_but_in_time_meets_the_others(meeting: Callable[..., list[Any]]) -> None:
    assert meeting((0, 3, 0.3), (1, 3, 0), (2, 3, 0.5)) == ["met"] * 3


@pytest.mark.parametrize(
    ("host", "rank", "kind"),
    [
        pytest.param("no-such-host.invalid", 1, CommunicationError, marks=pytest.mark.slow),
        ("no-such-host.invalid", 0, CommunicationError),
        ("a" * 70, 1, CommunicationError),  # no name of a host is as long
        ("", 1, ConfigError),
    ],
)
def test_a_wrong_address_is_told(
    host: str, rank: int, kind: type, meeting: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    (found,) = meeting((rank, 2, 0))
    assert type(found) is kind and "MASTER_ADDR" in str(found)


def test_a_port_that_another_program_uses_is_told(meeting: Callable[..., list[Any]]) -> None:
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        (found,) = meeting((0, 2, 0))
    assert isinstance(found, CommunicationError) and "MASTER_PORT" in str(found)


def test_a_rank_alone_ends_with_a_communication_error(
    configure: Configure, meeting: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("keep_freed_memory", "limit_kernel_cache"):
        monkeypatch.setattr(mesh, name, lambda *_: None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(mesh, "read_world", lambda: World(0, 2, 0, 2, CPU))
    with pytest.raises(CommunicationError), mesh.distributed(configure("comm.init_timeout=1")):
        pytest.fail("a rank that is alone has met others")


def test_the_group_of_a_gpu_also_reduces_what_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors and counts of ranks are on the CPU, where NCCL reduces nothing."""
    machine_with_gpus(1, monkeypatch)
    begun: list[Any] = []
    monkeypatch.setattr(mesh.dist, "init_process_group", lambda backend, **given: begun.append((backend, given)))
    join(replace(single_world(), device=torch.device("cuda", 0)), 77)
    ((backend, given),) = begun
    assert set(backend.split(",")) == {"cpu:gloo", "cuda:nccl"} and given["device_id"] == torch.device("cuda", 0)


def shapes(world: World, configs: list[Config]) -> list[tuple[dict[str, int], ...]]:
    """Names and sizes of the meshes' dimensions with two ranks on each node."""
    found = []
    for cfg in configs:
        made = make_meshes(replace(world, local_size=2), SHARD_PLANS[cfg.sharding.strategy], cfg)
        meshes = [mesh for mesh in (made.states, made.context) if mesh is not None]
        own = [group for one in meshes for group in one.get_all_groups()]
        assert {*map(id, groups_of(made))} == {*map(id, [dist.group.WORLD, *own])}
        before = num_collectives(made, CPU)()
        dist.barrier(group=own[-1])
        assert num_collectives(made, CPU)() == before + 1
        found.append(tuple(dict(zip(one.mesh_dim_names or (), one.shape, strict=True)) for one in meshes))
    return found


@pytest.mark.ranks
def test_a_hybrid_shards_within_a_node_unless_told_otherwise(configure: Configure, pools: dict[int, RankPool]) -> None:
    cfg, row = configure(), ParallelConfig(context=4)
    hybrid = replace(cfg, sharding=replace(cfg.sharding, strategy=Strategy.HYBRID_SHARD))
    ways = [
        hybrid,
        replace(cfg, sharding=replace(cfg.sharding, strategy=Strategy.FULL_SHARD), parallel=row, pack=True),
    ]
    for found in pools[4].run(shapes, ways):
        assert found == [({"replicate": 2, "shard": 2},), ({"shard": 4}, {"data": 1, "context": 4})]


def timeouts_of(groups: list[dist.ProcessGroup]) -> set[int]:
    """Timeouts of process groups in seconds."""
    return {group._get_backend(CPU).options._timeout.seconds for group in groups}


def groups_of_divided(world: World, configs: list[Config]) -> list[tuple[str, ...]]:
    """Names of the meshes of each configuration, whose groups are all known, counted and given a shorter timeout."""
    found = []
    for cfg in configs:
        made = make_meshes(world, SHARD_PLANS[cfg.sharding.strategy], cfg)
        meshes = {field.name: mesh for field in fields(made) if (mesh := getattr(made, field.name)) is not None}
        own = {id(group): group for mesh in meshes.values() for group in mesh.get_all_groups()}
        assert {*map(id, groups_of(made))} == {id(dist.group.WORLD), *own}
        groups = [dist.distributed_c10d._get_default_group(), *own.values()]
        assert timeouts_of(groups) == {cfg.comm.init_timeout}, "until the first step is finished"
        several = {id(group) for group in groups if group.size() > 1}
        assert made.states is not None
        shape = (1, made.states.size()) if made.states.ndim == 1 else (made.states.size(0), made.states.size(1))
        assert RankLayout(cfg.parallel, world.size).num_groups(shape) == len(several)
        set_timeout(made, 77 + len(found))
        assert timeouts_of(groups) == {77 + len(found)}
        count = num_collectives(made, CPU)
        before = count()
        for group in own.values():
            dist.barrier(group=group)
        of_groups = count() - before
        before = count()
        dist.barrier()
        assert count() == before + 1
        assert of_groups == (0 if made.pipeline is not None else len(own)), "other stages start other collectives"
        found.append(tuple(meshes))
    return found


@pytest.mark.ranks
def test_the_groups_of_all_meshes_are_known(configure: Configure, pools: dict[int, RankPool]) -> None:
    cfg = configure("sharding=zero3")
    ways = [ParallelConfig(**values) for values in ({"tensor": 2}, {"expert": 2}, {"context": 2}, {"pipeline": 2})]
    configs = [replace(cfg, parallel=way, pack=True) for way in ways]
    configs += [configure("sharding=hybrid", "sharding.shard_size=2"), cfg]
    for found in pools[4].run(groups_of_divided, configs):
        of_ways = [("states", "tensor"), ("states", "experts"), ("states", "context"), ("states", "pipeline")]
        assert found == [*of_ways, ("states",), ("states",)]


STATUS = {"last_enqueued_collective": "9", "last_started_collective": "-1", "last_completed_collective": "5"}


@pytest.mark.parametrize(
    ("groups", "default_alone", "expected"),
    [
        ({}, False, None),
        ({"0": {}}, False, None),  # the moments are not recorded
        ({"0": {"last_started_collective": "7"}}, False, 12),
        ({"0": {"last_started_collective": "7"}, "1": {"last_started_collective": "2"}}, False, 19),
        ({"0": {"last_started_collective": "7"}, "1": {"last_started_collective": "2"}}, True, 12),
        ({"0": {"last_started_collective": "1", "last_completed_collective": "-1"}}, False, 1),
    ],
)
def test_a_rank_whose_gpu_has_begun_fewer_collectives_is_late(
    groups: dict[str, dict[str, str]], default_alone: bool, expected: int | None
) -> None:
    """All ranks have enqueued the same."""
    trace = {"version": "2.10", "pg_status": {number: STATUS | values for number, values in groups.items()}}
    assert gpu_progress(json.dumps(trace).encode(), default_alone) == expected


def recorded(world: World) -> tuple[int | None, int, int]:
    """What torch's flight recorder has of gloo's collectives, and the count on a GPU whose recorder knows of 4 of them,
    and of none."""
    for _ in range(3):
        dist.barrier()
    own = gpu_progress(c10d._dump_fr_trace_json(False, True), False)
    of_gpu = []
    for begun in ("4", "-1"):
        dump = json.dumps({"pg_status": {"0": STATUS | {"last_started_collective": begun}}}).encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c10d, "_dump_nccl_trace_json", lambda *_, dump=dump: dump, raising=False)
            of_gpu.append(num_collectives(mesh.Meshes(), torch.device("cuda", world.rank))())
    return own, of_gpu[0], of_gpu[1]


@pytest.mark.ranks
def test_progress_on_a_gpu_is_what_its_flight_recorder_says(pools: dict[int, RankPool]) -> None:
    """gloo's has the same form, without the moments at which collectives begin; then the enqueued ones count."""
    assert pools[2].run(recorded) == [(None, 9, 3)] * 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("2000", "1")),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_ENABLE_TIMING": "0"}, ("0", "0")),
        ({"TORCH_FR_BUFFER_SIZE": "77"}, (None, "1")),
    ],
)
def test_the_flight_recorder_is_on_unless_the_environment_says_otherwise(
    given: dict[str, str], expected: tuple[str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_ENABLE_TIMING", "TORCH_FR_BUFFER_SIZE")
    monkeypatch.setattr(os, "environ", dict(given))
    mesh.record_collectives()
    assert tuple(os.environ.get(name) for name in names[:2]) == expected


def exchanged(world: World, folder: Path) -> dict[str, Any]:
    """What a rank learns of the others."""
    late = folder / "of the first rank"
    with first_rank_first(world):
        if world.is_first:
            time.sleep(0.05)
            late.write_text("")
        was_there = late.is_file()
    names = ("stop", "save", "failed", "lost")
    return {
        "lists": [gather_lists([world.rank] * count) for count in (world.rank, 1, 0)],
        "identities": [(rank, pid) for rank, _, pid in rank_identities()],
        "process": os.getpid(),
        "first": gathered_on_first(world.rank + 1),
        "of the first": on_first_rank(lambda: f"rank {world.rank}", "?"),
        "own": on_all_ranks(lambda: f"rank {world.rank}", "?"),
        "votes": [Votes(**{names[n]: world.rank == n}).agreed() for n in range(4)],
        "was there": was_there,
    }


@pytest.mark.ranks
def test_every_rank_learns_the_same_of_all(pools: dict[int, RankPool], tmp_path: Path) -> None:
    found = pools[4].run(exchanged, tmp_path)
    processes = list(enumerate(of_rank["process"] for of_rank in found))
    for rank, of_rank in enumerate(found):
        assert of_rank["lists"] == [[1, 2, 2, 3, 3, 3], [0, 1, 2, 3], []]
        assert of_rank["identities"] == processes
        assert of_rank["first"] == ([] if rank else [1, 2, 3, 4])
        assert of_rank["of the first"] == "rank 0" and of_rank["own"] == f"rank {rank}"
        assert of_rank["votes"] == [Votes(stop=True), Votes(save=True), Votes(failed=True), Votes(lost=True)]
        assert of_rank["was there"]


def errors(world: World) -> list[tuple[str, str]]:
    """Classes and messages of errors: of the two last of three ranks, and of the first."""

    def typed() -> None:
        if world.rank > 0:
            raise ConfigError(f"a key of rank {world.rank}")

    def of_file() -> None:
        raise PermissionError(13, "Permission denied", "there/name")

    found = []
    for run, act in ((on_all_ranks, typed), (on_first_rank, of_file), (on_first_rank, lambda: {}["key"])):
        try:
            run(act, "it cannot be done")
        except LlavaFsdpError as error:
            found.append((type(error).__name__, str(error).partition(";")[0]))
    return found


@pytest.mark.ranks
def test_an_error_of_one_rank_is_raised_on_all(pools: dict[int, RankPool]) -> None:
    for found in pools[3].run(errors):
        (kind, said), (kind_of_file, said_of_file), of_bug = found
        assert (kind, said) == ("ConfigError", "rank 1: a key of rank 1")
        assert kind_of_file == "CheckpointError" and said_of_file.startswith("it cannot be done: ")
        assert "there/name" in said_of_file
        assert of_bug == ("CheckpointError", "it cannot be done: KeyError: 'key'")
