"""Replicas that differ in a bit: which rank and tensor, under every strategy, and nothing of it is saved."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankPool
from loaders import agreed_steps
from small import Configure, make_config, with_heads
from steps import begin
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.ranks import replicas
from llava_fsdp.parallel.ranks.replicas import (
    Difference,
    RankChecksums,
    checksums,
    compare,
    digest_on_host,
    find_differences,
    shared_tensors,
    weighted_sum,
)
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ReplicaError
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.train.checkpoints.replica_check import SHOWN, all_tensors, check_replicas, replica_error
from llava_fsdp.train.events.save_and_stop import open_saver
from llava_fsdp.train.loop import train_step

WEIGHT = "language_model.layers.1.mlp.down_proj.weight"
FROZEN = "model.vision_tower."
SHARDED = (f"model.{WEIGHT}", f"optim.{WEIGHT}.exp_avg", f"optim.{WEIGHT}.exp_avg_sq")
WHOLE = (f"optim.{WEIGHT}.step",)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """One bit of this rank's rows; the same again repairs it."""
    content = local(tensor).view(-1).view(torch.uint8)
    content[(len(content) // 2) // 4 * 4 + bit // 8] ^= 1 << bit % 8


@dataclass(frozen=True)
class Told:
    """What a ReplicaError says, on one rank."""

    culprit: dict
    message: str
    ending: str


def flipped(world: World, cfg: Config, flips: list[tuple[str, int]], rank: int) -> list[Told | None]:
    """What the comparison says of each flip on one rank, and then a save with the last of them.

    Args:
        flips: tensors and bits; an ending of a name will do.
    """
    state = begin(world, cfg)
    parent = Path(cfg.output_dir) / FOLDER
    check_replicas(state, parent)
    saver = open_saver(state, cfg)
    steps = agreed_steps(state.loader)
    state.model.train()
    train_step(state, next(steps), cfg, 0.0)
    saver.save()
    train_step(state, next(steps), cfg, 0.0)
    saver.wait()
    said: list[Told | None] = []
    tensors = all_tensors(state)
    for name, bit in flips:
        wrong = tensors[name] if name in tensors else next(t for n, t in tensors.items() if n.startswith(name))
        if world.rank == rank:
            flip(wrong, bit)
        said.append(told(lambda: check_replicas(state, parent)))
        if world.rank == rank:
            flip(wrong, bit)
    check_replicas(state, parent)
    state.skipped += world.rank == rank
    said.append(told(saver.save))
    state.skipped -= world.rank == rank
    names = [path.name for path in parent.iterdir() if path.name.startswith("step-")]
    assert names == ["step-000001"], names
    saver.save()
    saver.close()
    return said


def told(action) -> Told | None:
    try:
        action()
    except ReplicaError as error:
        return Told(error.culprit, str(error), error.ending)
    return None


STRATEGIES = [
    (2, "zero0", True), (4, "zero0", True), (2, "zero1", False), (2, "zero2", False), (2, "zero3", False),
    (4, "hybrid", True), (4, "hybrid2", True),
]  # fmt: skip
SLOWER = ((2, "zero0"), (2, "zero1"), (2, "zero2"), (4, "zero0"), (4, "hybrid2"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "sharding", "has_replicas"),
    slow_after(1, [pytest.param(*each, marks=pytest.mark.slow if each[:2] in SLOWER else ()) for each in STRATEGIES]),
)
def test_a_flipped_bit_is_found_wherever_it_is(
    size: int, sharding: str, has_replicas: bool, configure: Configure, pools: dict[int, RankPool]
) -> None:
    """Weights and moments where they have replicas; what every rank has whole, under every strategy."""
    values = f"sharding={sharding} max_steps=9 global_batch_size=4 micro_batch_size=1".split()
    cfg = configure(*values, *["sharding.shard_size=2"] * sharding.startswith("hybrid"))
    flips = [(name, bit) for name in (*SHARDED, *WHOLE, FROZEN) for bit in (24, 0)]
    said = pools[size].run(flipped, cfg, flips, 1, timeout=120)
    assert all(each == said[0] for each in said), "every rank ends alike"
    for (name, _), one in zip([*flips, ("skipped steps", 0)], said[0], strict=True):
        if name in SHARDED and not has_replicas:
            assert one is None, "a shard that nobody else has"
            continue
        assert one is not None and one.ending == "corruption"
        assert len(one.culprit["tensors"]) == 1 and one.culprit["tensors"][0].startswith(name)
        among = [1, 3] if name in SHARDED and sharding != "zero0" else list(range(size))
        assert (one.culprit["rank"], "rank 1 (" in one.message) == (1 if len(among) > 2 else among[0], True)
        assert ("rank 0 (" in one.message) == (len(among) == 2 and among[0] == 0)
        assert "step-000001" in one.message, "where the run continues"


@pytest.mark.ranks
def test_a_flipped_bit_of_a_weight_that_is_not_divided_is_found(
    parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Two ranks that compute layers together each have the whole norms, and moments of them, but parts of the rest."""
    keys = ("model.language_model.norm.weight", "optim.multi_modal_projector.linear_1.weight.exp_avg", FROZEN)
    divided = ("model.lm_head.weight", "optim.lm_head.weight.exp_avg")
    flips = [(name, 0) for name in (*keys, *divided)]
    values = "sharding=zero3 max_steps=9 global_batch_size=4 micro_batch_size=1 parallel.tensor=2".split()
    cfg = make_config(with_heads(parts, tmp_path / "parts", 4, 2), dataset, tmp_path, *values)
    said = pools[2].run(flipped, cfg, flips, 1, timeout=120)
    for (name, _), one in zip(flips, said[0], strict=False):
        assert (one is None) == (name in divided), name
        assert one is None or one.culprit["tensors"] == [name] or name == FROZEN


@pytest.mark.parametrize("checksum", [lambda t: int(weighted_sum(t)), digest_on_host], ids=["GPU", "CPU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_every_bit_and_every_place_counts(checksum, dtype: torch.dtype) -> None:
    values = torch.arange(1, 40).to(dtype) if dtype is not torch.bfloat16 else torch.linspace(-3, 3, 39).to(dtype)
    right = checksum(values)
    content = values.view(torch.uint8)
    for byte in range(len(content)):
        for bit in range(8):
            content[byte] ^= 1 << bit
            assert checksum(values) != right
            content[byte] ^= 1 << bit
    for one in range(len(values)):
        for other in range(one):
            swapped = values.clone()
            swapped[[one, other]] = values[[other, one]]
            assert checksum(swapped) != right
    assert checksum(values.clone()) == right
    assert checksum(values[:0]) == checksum(values[:0].clone())


def test_signs_and_zeros_count() -> None:
    """-0.0 equals 0.0, NaN equals nothing, and a sign is the highest bit of a word."""
    nan, zero = torch.tensor([float("nan"), 0.0, 1.5, -1.5]), torch.tensor([0.0, -0.0])
    for checksum in (lambda t: int(weighted_sum(t)), digest_on_host):
        assert checksum(nan) == checksum(nan.clone())
        assert checksum(zero) != checksum(zero.abs()) and checksum(zero) != checksum(zero.flip(0))
        assert checksum(nan) != checksum(nan[[0, 1, 3, 2]])


def test_a_tensor_is_summed_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = int(weighted_sum(values))
    words = values.view(torch.int32).tolist()
    exact = sum(word * (2 * place + 1) for place, word in enumerate(words))
    assert (whole - exact) % (1 << 64) == 0
    monkeypatch.setattr("llava_fsdp.parallel.ranks.replicas.CHUNK", 37)
    assert int(weighted_sum(values)) == whole


def test_shards_without_replicas_are_not_read() -> None:
    """Only what several ranks hold costs anything."""
    plain = torch.zeros(3)
    of_mesh, everywhere = shared_tensors({"a": plain}, 1)
    assert not of_mesh and list(everywhere) == ["a"] and everywhere["a"].data_ptr() == plain.data_ptr()
    assert checksums({}) == {}


def test_most_replicas_outvote_one() -> None:
    right, wrong = RankChecksums(0, {"w": 1, "m": 2}, {"f": 3}), RankChecksums(0, {"w": 1, "m": 9}, {"f": 3})
    assert compare([right, right, wrong]) == [Difference("m", (2,), True)]
    assert compare([right, wrong]) == [Difference("m", (0, 1), False)]
    other = RankChecksums(1, {"w": 7, "m": 8}, {"f": 3})
    assert compare([right, other, right, other]) == []
    assert compare([right, other, wrong, other]) == [Difference("m", (0, 2), False)]
    assert compare([right, RankChecksums(1, {"w": 7, "m": 8}, {"f": 4}), right, other]) == [Difference("f", (1,), True)]
    assert compare([right, RankChecksums(0, {"w": 1, "m": 2}, {})]) == [Difference("f", (0, 1), False)], "one lacks it"


@pytest.mark.parametrize("wrong", [RankChecksums(0, {"w": 9}, {}), RankChecksums(0, {"w": 1}, {"f": 1})])
def test_checksums_travel_only_where_they_differ(wrong: RankChecksums) -> None:
    right, sent = RankChecksums(0, {"w": 1}, {}), []

    def gather(items: list, other: RankChecksums = right) -> list:
        sent.append(items[0])
        return [*items, other.totals if items == [right.totals] else other]

    assert find_differences(right, gather) == [] and sent == [right.totals]
    assert find_differences(right, lambda items: gather(items, wrong))
    assert sent[1:] == [right.totals, right]


def test_an_error_names_the_ranks_that_are_outvoted(tmp_path: Path) -> None:
    """With their hosts; a checkpoint that is there, and as many names as one reads."""
    hosts = [f"host{rank}" for rank in range(SHOWN + 5)]
    one = replica_error([Difference("a", (3,), True)], hosts, 7, tmp_path)
    assert str(one).startswith("after step 7, rank 3 (host3) differs from its replicas in 1 of the tensors")
    assert "checkpoint is none" in str(one)
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000006").mkdir()
    found = [Difference("a", (2, 1), True), Difference("b", (2, 0), False)]
    two = replica_error(found, hosts, 7, tmp_path)
    assert "rank 0 (host0), rank 1 (host1), rank 2 (host2) differ from each other in 2 of" in str(two)
    assert f"checkpoint is {tmp_path / 'step-000006'}," in str(two) and ": a, b. Memory" in str(two)
    assert two.culprit == {"rank": 0, "host": "host0", "tensors": ["a", "b"]}
    many = replica_error(
        [Difference(f"t{n}", tuple(range(SHOWN + 2)), True) for n in range(SHOWN + 1)], hosts, 7, tmp_path
    )
    assert f"(host{SHOWN - 1}) and 2 more differ from their replicas" in str(many)
    assert f"t{SHOWN - 1}. Memory" in str(many) and len(many.culprit["tensors"]) == SHOWN + 1


@pytest.mark.parametrize(
    ("shape", "reduces"),
    [((8,), False), ((1, 8), False), ((8, 1), False), ((2, 4), True), ((4,), True), ((1, 4), True)],
)
def test_ranks_that_may_add_in_another_order_take_the_largest_norm(
    shape: tuple[int, ...], reduces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight ranks: where a mesh has two dimensions, or does not contain all ranks."""
    operations: list[object] = []
    monkeypatch.setattr(replicas, "sharded_norm", lambda norms, mesh, sharded: norms.sum())
    monkeypatch.setattr(replicas.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda value, operation: operations.append(operation))
    mesh: Any = SimpleNamespace(shape=shape, size=lambda: math.prod(shape))
    assert float(replicas.same_on_every_rank(torch.tensor([1.0, 2.0]), mesh, (0,))) == 3
    assert operations == ([replicas.dist.ReduceOp.MAX] if reduces else [])
