"""Muon: its updates are torch's own, on any number of ranks those of a plain loop; its memory and its resumes."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import RankPool, alone
from plain_muon import orthogonal
from reference import EXPORTED, Outcome, assert_near, check_continued, outcome, plain_outcomes, train_on
from small import Configure, make_config
from steps import begin
from torch import nn

from llava_fsdp.config import Config, MasterDType, MomentDType, OffloadMode
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel import muon
from llava_fsdp.parallel.fsdp.parts import parts_of
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.memory.memory import Weight
from llava_fsdp.parallel.muon import MOMENTUM, Muon, Stack, deal_out, orthogonalize, stacks_of
from llava_fsdp.parallel.ranks.comm_volume import CollectiveBytes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.time.muon_cost import muon_cost
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step

SHAPES = [(7, 13), (13, 7), (9, 9), (1, 5), (33, 1)]
OFTEN = ("global_batch_size=8", "checkpoint.every=2", "optim.schedule=constant")


@pytest.mark.parametrize("shape", SHAPES)
def test_updates_are_those_of_torch(shape: tuple[int, int], configure: Configure) -> None:
    """To the bit, in torch's dtype, over 12 steps with weight decay; and AdamW's for the rest."""
    dice = torch.Generator().manual_seed(shape[0])
    ours, theirs = ([nn.Parameter(torch.ones(s)) for s in (shape, shape[:1])] for _ in range(2))
    group = {"params": ours, "lr": 1e-2, "weight_decay": 0.1}
    mine = Muon([group], {ours[0]}, 0.9, torch.bfloat16, alone(configure()), betas=(0.9, 0.99), fused=True)
    peers = [
        torch.optim.Muon(theirs[:1], 1e-2, 0.1, 0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[1:], 1e-2, (0.9, 0.99), weight_decay=0.1, fused=True),
    ]
    for _ in range(12):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=dice)
            other.grad = own.grad.clone()
        for optimizer in (mine, *peers):
            optimizer.step()
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], torch.ones(shape))


@pytest.mark.parametrize("shape", [*SHAPES, (5, 6, 8)])
def test_singular_values_are_brought_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = orthogonalize(matrices.reshape(-1, *shape[-2:]))
    torch.testing.assert_close(got, orthogonal(matrices).view_as(got), rtol=0, atol=1e-5)
    values = torch.linalg.svdvals(orthogonalize(torch.eye(6)[None]))
    assert bool(((values > 0.6) & (values < 1.3)).all())


def test_work_is_dealt_out_evenly_and_stays_where_matrices_are_whole() -> None:
    split = [s for i in range(24) for s in stacks_of(i, (64, 48), [((16 * r, 16 * r + 16), (0, 48)) for r in range(4)])]
    rounds = deal_out(split, 4)
    assert [sum(len(r[rank]) for r in rounds) for rank in range(4)] == [6] * 4
    assert all(set(owned.senders.values()) == {0, 1, 2, 3} for r in rounds for of_rank in r for owned in of_rank)
    whole = list(stacks_of(0, (6, 8, 5), [((0, 2), (0, 8), (0, 5)), ((2, 6), (0, 8), (0, 5))]))
    [experts] = deal_out(whole, 2)
    assert [(o.stack.experts, o.owner, o.stays) for of_rank in experts for o in of_rank] == [
        ((0, 2), 0, True), ((2, 6), 1, True)
    ]  # fmt: skip
    cut = list(stacks_of(0, (2, 8, 5), [((0, 2), (0, 4), (0, 5)), ((0, 2), (4, 8), (0, 5))]))
    assert [stack.experts for stack in cut] == [(0, 1), (1, 2)]


def test_a_round_holds_so_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = [Stack(i, (0, 1), 10, 10, {0: ((0, 10), (0, 10)), 1: ((0, 10), (0, 10))}) for i in range(14)]
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 350)
    assert [[len(of_rank) for of_rank in r] for r in deal_out(stacks, 2)] == [[3, 3], [3, 3], [1, 1]]


@pytest.fixture(scope="module")
def reference(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The plain loop's 60 steps."""
    common = "optim=muon", "max_steps=60", "global_batch_size=8"
    return plain_outcomes(parts, dataset, tmp_path_factory.mktemp("start"), common, {"muon": ()})


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("size", "strategy"), [(1, "zero3"), (2, "zero1"), (4, "zero3"), (4, "hybrid")])
def test_sixty_steps_are_those_of_the_plain_loop(
    size: int, strategy: str, reference: Callable[[str], Outcome], configure: Configure, pools: dict[int, RankPool]
) -> None:
    cfg = configure(
        "optim=muon", "max_steps=60", "global_batch_size=8", f"sharding={strategy}", *EXPORTED,
        f"sharding.shard_size={2 if strategy == 'hybrid' else 'null'}",
    )  # fmt: skip
    assert_near(outcome(train_on(size, cfg, pools)), reference("muon"), 600, strategy)


@pytest.fixture(scope="module")
def whole_run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on one rank, with checkpoints at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    train.train(make_config(parts, dataset, folder, "optim=muon", "max_steps=6", *OFTEN, *EXPORTED))
    return folder


@pytest.mark.ranks
def test_a_run_continues_on_three_layouts_of_ranks(
    whole_run: Path, configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Two steps each: on one rank, on two with zero3, on four with hybrid."""
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:06d}")
    shutil.rmtree(tmp_path / "export")
    for size, steps, layout in ((2, 4, ("sharding=zero3",)), (4, 6, ("sharding=hybrid", "sharding.shard_size=2"))):
        cfg = configure("optim=muon", *OFTEN, *EXPORTED, *layout, f"max_steps={steps}")
        train_on(size, cfg, pools)
    check_continued(4, outcome(tmp_path), outcome(whole_run), cfg)


def test_a_run_does_not_continue_with_another_optimizer(whole_run: Path, configure: Configure, tmp_path: Path) -> None:
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        train.train(configure(*OFTEN, "max_steps=8"))
    assert "optim.name" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        *(f"offload={mode.value}" for mode in OffloadMode if mode is not OffloadMode.none),
        *(f"precision.moment_dtype={dtype.value}" for dtype in MomentDType if dtype is not MomentDType.fp32),
        f"precision.master_dtype={MasterDType.bf16.value}",
    ],
)
def test_what_does_not_go_with_muon_is_refused(key: str, configure: Configure) -> None:
    with pytest.raises(ConfigError):
        configure("optim=muon", key)


def traffic_of_update(world: World, cfg: Config) -> tuple[int, int, int]:
    """Bytes of this rank's exchanges in an update; elements of its shards of matrices, and of all matrices."""
    state = begin(world, cfg)
    with CollectiveBytes() as counter:
        train_step(state, state.loader.agree(state.loader.steps.prepare(0)), cfg, 0.0)
    assert isinstance(state.optimizer, Muon)
    matrices = state.optimizer.matrices
    assert all(set(state.optimizer.state[p]) == {MOMENTUM} for p in matrices)
    moved = counter.moved["all_to_all"]["bytes"]
    assert counter.moved["all_to_all"]["calls"] == 2 * len(state.optimizer.rounds)
    return moved, sum(local(p).numel() for p in matrices), sum(p.numel() for p in matrices)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_an_update_sends_parts_of_matrices_twice(
    strategy: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    """To the rank that orthogonalises them, unless it has them, and back; nothing is sent whole to all ranks."""
    found = pools[2].run(traffic_of_update, configure("optim=muon", f"sharding={strategy}", "precision=fp32"))
    sent = sum(moved for moved, _, _ in found) / 4  # bytes, in fp32
    shards, whole = sum(own for _, own, _ in found), found[0][2]
    # each matrix goes to one rank (with zero0, that is no way), and its results to all ranks that hold the parts
    assert whole + shards <= sent <= 1.2 * (whole + shards)


def elements_sent(world: World, cfg: Config) -> tuple[int, int]:
    """Elements that all ranks together send to others in an update, and the collectives."""
    optimizer = begin(world, cfg).optimizer
    assert isinstance(optimizer, Muon)
    sent = 0
    for owned in (owned for round_ in optimizer.rounds for of_rank in round_.dealt for owned in of_rank):
        stack = owned.stack
        sent += sum(stack.count * muon.area(part) for part, rank in owned.senders.items() if rank != owned.owner)
        sent += sum(stack.count * muon.area(part) for rank, part in stack.parts.items() if rank != owned.owner)
    return sent, 2 * len(optimizer.rounds)


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "shards"), [("zero0", 1), ("zero1", 4), ("hybrid", 2)])
def test_the_plan_knows_the_bytes_of_an_update(
    strategy: str, shards: int, configure: Configure, pools: dict[int, RankPool]
) -> None:
    shard_size = shards if strategy == "hybrid" else "null"
    cfg = configure("optim=muon", f"sharding={strategy}", f"sharding.shard_size={shard_size}", "precision=fp32")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    weights = list(weights_of(model, parts_of(model), cfg.precision, 1, cfg.parallel, cfg.optim).values())
    planned = muon_cost(weights, shards, 4, 4)
    [(sent, calls)] = set(pools[4].run(elements_sent, cfg))
    assert planned.calls == calls
    # the largest shard is planned, and rows that four ranks do not divide evenly make others smaller
    assert planned.received == pytest.approx(4 * sent / 4, rel=0.05)


def test_the_plan_knows_the_work_of_an_update() -> None:
    """Of a 7B: 0.68 PFLOP over all ranks, whole matrices of tensor parallelism too."""
    width, inner = 4096, 11008
    shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    weights = [Weight(shape, True, False, False, muon=True, moments=MomentDType.fp32) for shape in shapes] * 32
    assert muon_cost(weights, 8, 8, 2).flops == pytest.approx(0.6844e15 / 8, rel=1e-3)
    cut = [replace(w, shape=(w.shape[0] // 2, w.shape[1]), whole_shape=w.shape) for w in weights]
    assert muon_cost(cut, 4, 8, 2).flops == muon_cost(weights, 8, 8, 2).flops
    assert muon_cost(weights, 1, 1, 2).received == 0
