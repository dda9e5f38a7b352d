"""States that lie elsewhere give the same weights, to the bit; and they do lie there."""

import contextlib
import mmap
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import CPU, RankPool, alone
from loaders import agreed_steps
from reference import EXPORTED, assert_same_bits, outcome, train_on
from small import Configure
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from llava_fsdp.config import ActivationCheckpointing, Config, OffloadMode, Strategy
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.memory import host_memory, offload
from llava_fsdp.parallel.memory.host_memory import PAGE, Arena, Memory
from llava_fsdp.parallel.memory.offload import (
    cures,
    describe_offload,
    explained_memory_errors,
    filesystem,
    fsdp_parameters,
)
from llava_fsdp.parallel.memory.streamed_buffers import DeviceStaging, FileStaging
from llava_fsdp.parallel.memory.streamed_optimizer import StreamedOptimizer, padded, split_into_buckets
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError, OffloadError, OutOfMemory
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.state import TrainState

MODES = [mode.value for mode in OffloadMode]
# two micro-batches a step on every number of ranks, and a norm that is clipped in every step
TRAINING = ["precision=bf16", "optim.clip=0.5", "pack=false", "max_steps=2", *EXPORTED]


PAIRS = {  # by ranks: row of the table and mode, against the first one's outcome
    1: [("zero3", "none"), ("zero2", "params"), ("zero3", "nvme")],
    2: [("zero2", "none"), ("zero2", "optimizer"), ("zero3", "params"), ("zero2", "nvme"), ("zero3", "nvme")],
}
ALL = {size: [(row, mode) for row in ("zero2", "zero3") for mode in MODES] for size in (1, 2)}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "pairs"),
    [
        # ranks are forked first: they would wait for threads that one rank leaves in this process
        pytest.param(2, PAIRS[2], id="2", marks=pytest.mark.slow),
        pytest.param(1, PAIRS[1], id="1"),
        *(pytest.param(size, pairs, id=f"{size}-all", marks=pytest.mark.slow) for size, pairs in ALL.items()),
    ],
)
def test_weights_are_those_without_offload_to_the_bit(
    world_size: int, pairs: list[tuple[str, str]], configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    found = []
    for strategy, mode in pairs:
        folder = tmp_path / f"{strategy}-{mode}"
        values = [*TRAINING, f"sharding={strategy}", f"offload={mode}", f"micro_batch_size={6 // world_size}"]
        found.append(outcome(train_on(world_size, configure(*values, to=folder), pools, 180)))
        assert len(found[-1].losses) == 2 and min(found[-1].grad_norms) > 0.5
        assert_same_bits(found[-1], found[0], folder.name)


@pytest.mark.slow
@pytest.mark.ranks
def test_hybrid_rows_and_frozen_shards(configure: Configure, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Gradients that wait to be reduced over replicas, and a frozen language model in shards."""
    cases = {"hybrid": ["sharding.shard_size=2"], "hybrid2": ["sharding.shard_size=2"], "zero3": []}
    for strategy, more in cases.items():
        found = []
        for mode in ("none", "params", "nvme"):
            folder = tmp_path / f"{strategy}-{mode}"
            values = [*TRAINING, f"sharding={strategy}", f"offload={mode}", "micro_batch_size=2", *more]
            stage = "pretrain" if strategy == "zero3" else "finetune"
            found.append(outcome(train_on(4, configure(*values, stage=stage, to=folder), pools, 180)))
            assert_same_bits(found[-1], found[0], folder.name)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_continues_with_and_without_offload(configure: Configure, tmp_path: Path) -> None:
    """Checkpoints hold the states, not where they lay."""
    values = [*TRAINING, "optim.schedule=constant", "optim.warmup_ratio=0"]
    train.train(configure(*values, "max_steps=4", to="straight"))
    for steps, mode in enumerate(("none", "nvme", "optimizer", "none"), start=1):
        more = [f"max_steps={steps}", f"offload={mode}", f"export.enabled={str(steps == 4).lower()}"]
        train.train(configure(*values, *more, to="cut"))
    assert_same_bits(outcome(tmp_path / "cut"), outcome(tmp_path / "straight"), "cut")


def where_states_lie(world: World, cfg: Config) -> dict[str, bool]:
    """After a step: whether every shard, gradient and moment is in the arena made for it, and what else is."""
    held: dict[str, bool] = {}
    released: list[Arena] = []
    release_all = Arena.release_all
    Arena.release_all = lambda arena: released.append(arena) or release_all(arena)  # type: ignore[method-assign]
    with train.distributed(cfg) as world:
        state = train.build_state(cfg, Parallelism.of(cfg, world))
        Arena.release_all = release_all  # type: ignore[method-assign]
        assert released == [state_arenas(state)[1]], "the weights have been loaded into the memory of this process"
        state.model.train()
        for name, parameter in state.model.named_parameters():
            if local(parameter).numel():
                held[name] = state_arenas(state)[1].owns(local(parameter))
        step = next(iter(agreed_steps(state.loader)))
        state.masters.free_gradients = lambda: None  # type: ignore[method-assign]
        train_step(state, step, cfg, 0.0)
        moments, shards, gradients = state_arenas(state)
        masters = {n: p for n, p in state.masters.named.items() if local(p).numel()}
        assert all(gradients.owns(local(p.grad)) for p in masters.values() if p.grad is not None)
        assert all(moments.owns(local(state.optimizer.state[p]["exp_avg"])) for p in masters.values())
        units = [module for module in state.model.modules() if isinstance(module, FSDPModule)]
        sharded = {p for unit in units for p in fsdp_parameters(unit)}
        assert sharded and all(shards.owns(p._sharded_param_data) for p in sharded)
        assert shards.size == sum(Arena.room(p.padded_sharded_param_size, p.sharded_param.dtype) for p in sharded)
        assert all(arena.taken == arena.size for arena in (moments, shards, gradients)), "room was asked for in vain"
    return held


def state_arenas(state: TrainState) -> list[Arena]:
    optimizer = state.optimizer
    assert isinstance(optimizer, StreamedOptimizer) and isinstance(optimizer.staging, FileStaging)
    return optimizer.staging.arenas


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stage", "blocks_per_unit"), [("pretrain", 1), pytest.param("finetune", 2, marks=pytest.mark.slow)]
)
def test_states_lie_in_the_files(
    stage: str, blocks_per_unit: int, configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Uneven shards too, which FSDP would copy to pad them; whole frozen weights stay on the device."""
    values = ["precision=bf16", "sharding=zero3", "offload=nvme", "micro_batch_size=2"]
    units = f"sharding.blocks_per_unit={blocks_per_unit}"
    cfg = configure(*values, units, stage=stage, to="run")
    for held in pools[4].run(where_states_lie, cfg):
        tower = {n for n in held if n.startswith("vision_tower")}
        kept_whole = tower | ({n for n in held if "norm" in n} if stage == "pretrain" else set())
        assert tower and {n for n, mapped in held.items() if not mapped} == kept_whole
    assert not [p for p in (tmp_path / "run").glob("**/*") if p.is_file()], "the files have names"


SHAPES = [(700,), (33, 91), (1,), (5000,), (2048,), (64, 64), (9,), (3, 3)]


@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_elementwise_optimizer_in_pieces_is_the_same_to_the_bit(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Small parameters share a bucket, large ones are cut; groups keep their settings, and one has no gradient."""
    dice = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=dice).to(dtype) for shape in SHAPES]
    gradients = [[torch.randn(v.shape, generator=dice).to(dtype) for v in values] for _ in range(4)]
    makers = {
        "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
        "foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
        "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    }
    for name, make in makers.items():
        results = []
        for streamed in (False, True):
            parameters = [nn.Parameter(v.clone()) for v in values]
            optimizer = make(
                [
                    {"params": parameters[:2], "weight_decay": 0.1},
                    {"params": parameters[2:], "weight_decay": 0.0, "lr": 3e-2},
                ]
            )
            if streamed:
                folder = tmp_path if kind == "file" else None
                optimizer = StreamedOptimizer(
                    optimizer,
                    lambda size, folder=folder: Arena(size, folder),
                    (lambda made: FileStaging(made, [])) if kind == "file" else (lambda made: DeviceStaging(made, CPU)),
                    bucket_bytes=12288,
                )
                assert len(optimizer.buckets) >= 3 and max(map(len, optimizer.buckets)) > 1
            for step in gradients:
                for parameter, gradient in zip(parameters, step, strict=True):
                    parameter.grad = gradient.clone()
                parameters[4].grad = None
                optimizer.step()
            results.append(parameters)
            state = {n: v for p in parameters for n, v in optimizer.state[p].items() if p is parameters[3]}
            results.append([v for _, v in sorted(state.items())])
        assert not torch.equal(results[0][3], values[3])
        for plain, ours in ((results[0], results[2]), (results[1], results[3])):
            assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), name


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("shapes", [[(0, 4), (300, 3)], [(0, 4)]])
def test_steps_of_empty_shards_are_counted(kind: str, shapes: list[tuple[int, int]], tmp_path: Path) -> None:
    """Also where a rank has nothing else."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = StreamedOptimizer(
        torch.optim.AdamW(parameters, fused=True),
        lambda size: Arena(size, tmp_path if kind == "file" else None),
        (lambda made: FileStaging(made, [])) if kind == "file" else (lambda made: DeviceStaging(made, CPU)),
    )
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [3.0] * len(shapes)


def test_weights_and_gradients_in_files_are_read_ahead_like_moments(tmp_path: Path) -> None:
    """`each` is called with what is read ahead and what is removed from memory: two moments, a weight, its gradient."""
    shards, gradients = (Arena(PAGE, tmp_path) for _ in range(2))
    weight = nn.Parameter(shards.take((9,), torch.float32))
    weight.grad = gradients.take((9,), torch.float32)
    optimizer = StreamedOptimizer(
        torch.optim.AdamW([weight]),
        lambda size: Arena(size, tmp_path),
        lambda made: FileStaging(made, [shards, gradients]),
    )
    staging = optimizer.staging
    assert isinstance(staging, FileStaging)
    seen: list[Arena] = []
    staging.each(0, lambda arena, tensor: seen.append(arena))
    assert seen == [optimizer.arena, optimizer.arena, shards, gradients]


def three_buckets(make_arena: Any, make_staging: Any) -> StreamedOptimizer:
    """An optimizer of three weights, each of which fills a bucket, with a gradient of ones."""
    weights = [nn.Parameter(torch.ones(256)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(256)
    made = StreamedOptimizer(torch.optim.AdamW(weights, lr=0.1), make_arena, make_staging, bucket_bytes=2048)
    assert [len(bucket) for bucket in made.buckets] == [1, 1, 1]
    return made


def test_moments_in_a_file_are_read_a_bucket_ahead_and_leave_memory_after_their_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the update of a bucket runs, the next one has been asked for; nothing is read or removed twice."""
    optimizer = three_buckets(lambda size: Arena(size, tmp_path), lambda made: FileStaging(made, []))
    number_of = {
        moment.data_ptr(): number
        for number, (piece,) in enumerate(optimizer.buckets)
        for moment in optimizer.moments(piece).values()
    }
    events: list[tuple[str, int]] = []
    for name in ("fetch", "release"):
        act = getattr(Arena, name)

        def noted(arena: Arena, tensor: torch.Tensor, name: str = name, act: Any = act) -> None:
            act(arena, tensor)
            events.append((name, number_of[tensor.data_ptr()]))

        monkeypatch.setattr(Arena, name, noted)
    for _ in range(2):
        events.clear()
        optimizer.step()
        for name in ("fetch", "release"):
            assert [number for own, number in events if own == name] == [0, 0, 1, 1, 2, 2]
        staging = optimizer.staging
        assert isinstance(staging, FileStaging) and staging.ahead is None
    submitted: list[int] = []
    monkeypatch.setattr(staging, "each", lambda number, act: submitted.append(number))
    staging.begin()
    staging.fetch(0)
    staging.end()
    assert submitted == [0, 1]


def test_buffers_on_the_device_are_there_during_a_step_alone() -> None:
    """Two of them, each as large as the largest bucket; one if there is a single bucket."""
    optimizer = three_buckets(Arena, lambda made: DeviceStaging(made, CPU))
    staging = optimizer.staging
    assert isinstance(staging, DeviceStaging)
    staging.begin()
    assert [len(buffer) for buffer in staging.buffers] == [2048, 2048]
    staging.staged.clear()
    for _ in range(2):
        optimizer.step()
        assert not staging.buffers and not staging.staged
    optimizer.buckets = optimizer.buckets[:1]
    single = DeviceStaging(optimizer, CPU)
    single.begin()
    assert len(single.buffers) == 1


def test_the_inner_optimizer_keeps_nothing_of_a_step() -> None:
    """Its states are views of buffers, which would stay in memory; its groups are the whole ones again."""
    optimizer = three_buckets(Arena, lambda made: DeviceStaging(made, CPU))
    assert not optimizer.inner.state, "what it kept was found out with a parameter of its own"
    optimizer.step()
    assert not optimizer.inner.state
    assert [len(group["params"]) for group in optimizer.inner.param_groups] == [3]


def test_a_mapped_file_has_no_descriptor_but_that_of_its_mapping(tmp_path: Path) -> None:
    """Neither does one for which there is no room."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    arena = Arena(PAGE, tmp_path)
    assert descriptors() <= before + 1
    with pytest.raises(OffloadError):
        Arena(1 << 55, tmp_path)
    assert arena.is_file_backed and descriptors() <= before + 1


@pytest.mark.parametrize("bucket", [1, 256, 2048, 2304, 4096, 1 << 20])
def test_buckets_hold_every_element_once_and_are_filled_up_to_their_bound(bucket: int) -> None:
    """256 elements of 8 bytes are the least that is moved; sizes at, below and above multiples of it."""
    counts = [1, 255, 256, 257, 512, 0, 700]
    groups = [{"params": [nn.Parameter(torch.zeros(n)) for n in own]} for own in (counts[:3], counts[3:])]
    buckets = list(split_into_buckets(groups, {torch.float32: 8}, bucket))
    pieces = [piece for own in buckets for piece in own]
    sizes = [sum(padded(piece.end - piece.begin) * 8 for piece in own) for own in buckets]
    assert all(size <= max(bucket, 2048) for size in sizes)
    assert all(size + padded(after[0].end - after[0].begin) * 8 > bucket
               for size, after in zip(sizes, buckets[1:], strict=False))  # fmt: skip
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            own = [piece for piece in pieces if piece.parameter is parameter]
            assert {piece.group for piece in own} == {number}, "an empty shard's steps are counted, too"
            assert [n for piece in own for n in range(piece.begin, piece.end)] == list(range(parameter.numel()))
            assert all(piece.begin % 256 == 0 for piece in own)


def test_state_that_is_no_moment_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["code"] = torch.zeros(7)

    with pytest.raises(ConfigError, match=r"Odd keeps code .* offload=none or offload=params"):
        StreamedOptimizer(Odd([nn.Parameter(torch.zeros(3))], lr=0.1), Arena, lambda made: DeviceStaging(made, CPU))


def test_an_arenas_file_has_no_name_and_its_pages_come_back(tmp_path: Path) -> None:
    arena = Arena(64 * PAGE, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    first, second = arena.take((30 * PAGE // 4,), torch.float32), arena.take((3, 5), torch.bfloat16)
    assert not first.any() and first.untyped_storage().nbytes() == first.nbytes
    assert second.data_ptr() % mmap.PAGESIZE == 0
    first.copy_(torch.arange(len(first)))
    second.fill_(7)
    arena.release(first)
    arena.release_all()
    arena.fetch(first)
    assert torch.equal(first, torch.arange(len(first), dtype=torch.float32)) and (second == 7).all()
    assert not arena.owns(torch.zeros(3))


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets a name in the folder, which is removed at once."""
    opened = os.open

    def refuse(path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        assert Path(path).parent == tmp_path
        return opened(path, flags, *rest)

    monkeypatch.setattr(host_memory.os, "open", refuse)
    arena = Arena(2 * PAGE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    taken = arena.take((5,), torch.float32).fill_(3)
    arena.release_all()
    assert taken.tolist() == [3] * 5


@pytest.mark.parametrize(
    ("shape", "pages"), [((1,), 1), ((PAGE // 4,), 1), ((PAGE // 4 + 1,), 2), ((2, PAGE // 4), 2), ((0, 7), 0), ((), 1)]
)
def test_every_tensor_has_pages_of_its_own(shape: tuple[int, ...], pages: int) -> None:
    assert Arena.room(shape, torch.float32) == pages * PAGE
    arena = Arena(3 * PAGE)
    before, own = arena.take((3,), torch.float32), arena.take(shape, torch.float32)
    assert arena.taken == (1 + pages) * PAGE and arena.owns(before) and own.shape == shape
    assert arena.owns(own) == bool(pages)
    assert arena.pages(before) == (0, PAGE) and arena.pages(own) == ((PAGE, pages * PAGE) if pages else (0, 0))
    if own.ndim and pages:
        assert arena.pages(own[-1:]) == (pages * PAGE if own.ndim == 1 else PAGE * pages, PAGE)
    assert not any(arena.owns(other.take((1,), torch.float32)) for other in (Arena(PAGE), Arena(PAGE)))


def test_disk_space_is_what_a_user_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, and not in blocks; the last byte may be taken."""
    for free, fits in ((4, True), (3, False)):
        disk = SimpleNamespace(f_bavail=free, f_bfree=9, f_frsize=PAGE)
        monkeypatch.setattr(host_memory.os, "fstatvfs", lambda _, disk=disk: disk)
        with contextlib.nullcontext() if fits else pytest.raises(OffloadError, match="are free"):
            assert Arena(4 * PAGE, tmp_path).size == 4 * PAGE


def test_no_room_says_how_much_and_where(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"needs .* GiB more in .*, where .* GiB are free.*offload\.folder=DIR"):
        Arena(1 << 55, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="file"):
        Arena(PAGE, tmp_path / "file")
    with pytest.raises(OffloadError, match="host memory"):
        Arena(1 << 55)


@pytest.mark.parametrize("kind", ["file", "absent"])
def test_a_folder_that_is_none_is_refused_and_not_made(kind: str, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg = configure("offload=nvme", f"offload.folder={tmp_path / kind}", to="run")
    with pytest.raises(ConfigError, match=rf"offload\.folder=.*{kind} is not a folder"):
        describe_offload(cfg, CPU)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["sharding=zero0", "offload=optimizer"], "once for every rank"),
        (["sharding=zero1", "offload=params"], "through the whole step"),
        (["offload=params", "offload.folder=/x"], "writes no files"),
    ],
)
def test_combinations_without_sense_are_refused(values: list[str], message: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(*values)


def test_one_message_where_memory_runs_out(configure: Configure) -> None:
    cfg = configure("activation_checkpointing=none", "sharding=zero2")
    with pytest.raises(
        OutOfMemory, match=r"out of host memory \([\d.e+]+ GiB more.*activation_checkpointing=full.*offload=nvme"
    ):
        with explained_memory_errors(lambda: cfg, CPU):
            torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(OutOfMemory), explained_memory_errors(lambda: cfg, CPU):
        raise MemoryError
    with pytest.raises(RuntimeError, match="another"), explained_memory_errors(lambda: cfg, CPU):
        raise RuntimeError("another")


@pytest.mark.parametrize(
    ("keys", "smaller", "shared"),
    [
        (["tokens_per_micro_batch=300"], True, True),
        (["tokens_per_micro_batch=128", "parallel.context=2"], False, True),
        (["tokens_per_micro_batch=129", "parallel.context=2"], True, True),
        (["sampler=llava_v1_5", "micro_batch_size=1"], False, False),
        (["tokens_per_micro_batch=auto"], True, True),
    ],
)
def test_advice_against_full_memory_can_be_followed(
    keys: list[str], smaller: bool, shared: bool, configure: Configure
) -> None:
    """A row must have room for the longest sample, and only some rows can be shared by more ranks."""
    found = cures(configure("pack=true", "data.max_length=256", *keys), CPU)
    assert not any("activation_checkpointing.budget" in cure for cure in found)
    assert any("tokens_per_micro_batch" in cure for cure in found) == smaller
    assert any("parallel.context" in cure for cure in found) == shared


def test_a_smaller_share_is_advised_where_activations_fill_the_memory(configure: Configure) -> None:
    assert "activation_checkpointing.budget" in cures(configure("activation_checkpointing=dynamic"), CPU)[0]
    assert cures(configure("activation_checkpointing=none"), CPU)[0] == "activation_checkpointing=full"


def test_a_machine_without_a_gpu_is_told_that_nothing_is_saved(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = configure("offload=optimizer", "max_steps=1")
    with caplog.at_level("WARNING"):
        train.build_state(cfg, alone(cfg))
    assert "this saves nothing" in caplog.text
    assert "will hardly change the model" in caplog.text, "what else is wrong with a run is told too"


def test_cures_are_those_that_are_left(configure: Configure) -> None:
    """The quickest first; moving states to memory is one on a GPU alone."""
    cfg = configure("activation_checkpointing=none", "sharding=zero2", "pack=false")
    more = "more ranks under sharding=zero3"
    first = ["activation_checkpointing=full", "a smaller micro_batch_size", "sharding=zero3"]
    gpu = torch.device("cuda")
    moves = [f"offload={mode.value}" for mode in OffloadMode if mode is not OffloadMode.none]
    assert cures(cfg, CPU) == [*first, "offload=nvme", more]
    assert cures(cfg, gpu) == [*first, *moves, more] and moves[-1] == "offload=nvme"
    mode = ActivationCheckpointing.full
    least = replace(
        cfg, sharding=replace(cfg.sharding, strategy=Strategy.FULL_SHARD), tokens_per_micro_batch=512, pack=True,
        activation_checkpointing=replace(cfg.activation_checkpointing, mode=mode),
        offload=replace(cfg.offload, mode=OffloadMode.nvme),
    )  # fmt: skip
    assert (
        cures(least, CPU)
        == cures(least, gpu)
        == ["a smaller tokens_per_micro_batch", "a larger parallel.context", more]
    )
    first_move = replace(least, offload=replace(cfg.offload, mode=OffloadMode(moves[0].partition("=")[2])))
    assert cures(first_move, gpu)[2:-1] == moves[1:]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), "out of GPU memory (2.50 GiB more"),
        (torch.OutOfMemoryError("out of memory"), "out of GPU memory; less"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2048 bytes."),
         "out of host memory (2 KiB more were requested); less"),
        (MemoryError("unable to allocate 2048 bytes"), "out of host memory (2 KiB more were requested); less"),
    ],
)  # fmt: skip
def test_how_much_was_asked_for(error: Exception, said: str, configure: Configure) -> None:
    with pytest.raises(OutOfMemory) as caught, explained_memory_errors(configure, CPU):
        raise error
    assert str(caught.value).startswith(said), str(caught.value)


def test_the_last_mount_of_a_device_is_the_one_that_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    own, other = f"{os.major(device)}:{os.minor(device)}", "9999:1"
    lines = [f"21 {other} {own} / /a rw - ext4 /dev/a rw", f"22 1 {own} / /b rw shared:1 - tmpfs x rw",
             f"23 1 {own} / /c rw - overlay x rw", f"24 1 {other} / /d rw - xfs x rw"]  # fmt: skip
    monkeypatch.setattr(offload.Path, "read_text", lambda self: "\n".join(lines))
    assert filesystem(tmp_path) == "overlay"
    monkeypatch.setattr(offload.Path, "read_text", lambda self: lines[-1])
    assert filesystem(tmp_path) is None


@pytest.mark.parametrize(
    ("mode", "device", "offloads", "pins"),
    [
        (OffloadMode.none, "cuda", False, False), (OffloadMode.optimizer, "cuda", False, False),
        (OffloadMode.params, "cuda", True, True), (OffloadMode.params, "cpu", True, False),
        (OffloadMode.nvme, "cuda", True, False),
    ],
)  # fmt: skip
def test_what_fsdp_is_told_to_offload(
    mode: OffloadMode, device: str, offloads: bool, pins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped files are not pinned: all of their pages would stay in memory."""
    monkeypatch.setattr(offload, "return_freed_memory", lambda: None)
    cfg: Any = SimpleNamespace(offload=SimpleNamespace(mode=mode, folder=None), output_dir=str(tmp_path))
    policy = offload.Offload(cfg, torch.device(device)).policy
    assert isinstance(policy, CPUOffloadPolicy) is offloads
    assert not offloads or policy.pin_memory is pins


def test_what_is_offloaded_in_words(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that lies in memory saves nothing, nor does a machine without a GPU."""
    assert describe_offload(configure(), CPU) == "none"
    kinds = subprocess.run(["df", "--output=fstype", tmp_path], check=True, capture_output=True, text=True)
    assert (
        filesystem(tmp_path / "absent" / "folder") == kinds.stdout.split()[-1] and filesystem(Path("/proc")) == "proc"
    )
    cfg = configure()
    to_memory = replace(cfg, offload=replace(cfg.offload, mode=OffloadMode.optimizer))
    assert describe_offload(to_memory, torch.device("cuda")) == "optimizer, in host memory"
    assert describe_offload(to_memory, CPU).endswith(
        "in host memory: without a GPU the device is the host, and this saves nothing"
    )
    to_files = replace(cfg, offload=replace(cfg.offload, mode=OffloadMode.nvme, folder=str(tmp_path)))
    for kind, shown in (
        (None, "(unknown filesystem)"),
        ("ext4", "(ext4)"),
        ("tmpfs", "(tmpfs, which is memory: this saves nothing; "),
    ):
        monkeypatch.setattr(offload, "filesystem", lambda _, kind=kind: kind)
        assert describe_offload(to_files, CPU).startswith(f"nvme, in files without names in {tmp_path} {shown}")


def test_large_pages_are_asked_for_before_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning makes the pages, and pinned pages keep their size."""
    calls: list[str] = []
    monkeypatch.setattr(Memory, "madvise", lambda *_: calls.append("large pages"))
    monkeypatch.setattr(Memory, "register", lambda *_: calls.append("pinned"))
    Arena(3 * PAGE, pin=True)
    assert calls == ["large pages", "pinned"]
