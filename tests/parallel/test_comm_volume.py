"""What ranks send in a step is what the ZeRO paper says (arXiv 1910.02054, section 7), counted on real collectives."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from small import make_config
from steps import begin
from tiers import slow_after
from torch.distributed import _functional_collectives

from llava_fsdp.config import Config
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.fsdp.parts import parts_of
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.comm_volume import KINDS, CollectiveBytes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch

Moved = dict[str, dict[str, int]]
ROWS = ("zero0", "zero1", "zero2", "zero3")
CASES = [
    *[(4, row, 2, 2) for row in ("hybrid", "hybrid2")],
    *[(2, row, None, 2) for row in reversed(ROWS)],
    *[(4, row, None, 1) for row in ROWS],
]


def config(
    parts: Path, dataset: Path, folder: Path, row: str, shard_size: int | None, ranks: int, count: int
) -> Config:
    """fp32 throughout, so that weights and gradients have the same bytes, as in the paper."""
    size = "null" if shard_size is None else shard_size
    cut = ["pack=false", "micro_batch_size=1", f"global_batch_size={ranks * count}"]
    return make_config(parts, dataset, folder, f"sharding={row}", f"sharding.shard_size={size}", *cut)


def backward_alone(world: World, cfg: Config) -> Moved:
    """The collectives of a step's forward and backward passes, without those of the loss and the gradient norm."""
    state = begin(world, cfg)
    micro_batches = state.loader.steps.prepare(0).micro_batches
    with CollectiveBytes() as counter:
        for number, micro in enumerate(micro_batches, start=1):
            begin_micro_batch(state.model, state.parallelism.plan, is_last=number == len(micro_batches))
            state.model(**state.loader.to_device(micro).inputs).backward()
    return counter.moved


def trained_bytes(cfg: Config, ranks: int, shards: int) -> tuple[int, int]:
    """fp32 bytes of all trainable parameters and of those in blocks, each padded to equal shards."""
    model = build_llava(find_parts(cfg.model), cfg.model, DTYPES[cfg.precision.param_dtype])
    weights = weights_of(model, parts_of(model), cfg.precision)
    sizes = {name: 4 * w.padded(shards) * shards for name, w in weights.items() if w.trainable}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers." in name)


def test_compiled_functions_run_compiled_while_bytes_are_counted() -> None:
    """Else a dry run would measure uncompiled blocks, which keep more for the backward pass."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    with CollectiveBytes():
        torch.compile(lambda x: x + 1, backend=keep)(torch.ones(3))
    assert len(graphs) == 1


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "row", "shard_size", "count"), slow_after(1, CASES))
def test_a_step_moves_what_the_table_says(
    ranks: int,
    row: str,
    shard_size: int | None,
    count: int,
    parts: Path,
    dataset: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    """Of `count` micro-batches; zero0's volume is DDP's. All ranks move the same."""
    cfg = config(parts, dataset, tmp_path, row, shard_size, ranks, count)
    shards = {"zero0": 1}.get(row, shard_size or ranks)
    whole, blocks = trained_bytes(cfg, ranks, shards)
    expected = {
        "zero0": (0, 0, whole),
        "zero1": (whole, whole, 0),
        "zero2": (count * whole, count * whole, 0),
        "zero3": (count * (whole + blocks), count * whole, 0),
        "hybrid": (count * (whole + blocks), count * whole, whole // shards),
        "hybrid2": (count * whole, count * whole, whole // shards),
    }[row]
    for moved in pools[ranks].run(backward_alone, cfg):
        assert tuple(moved[kind]["bytes"] for kind in KINDS) == (*expected, 0, 0, 0)
        if count == 1 and not shard_size:
            # 2 P, 2 P, 2 P and 3 P, of which a rank sends (n - 1) / n: 1, 1, 1 and 1.5 times DDP. The root unit stays
            # gathered between forward and backward, and so falls out of zero3's third P.
            volume = 3 * whole - (whole - blocks) if row == "zero3" else 2 * whole
            sent = sum(moved[kind]["sent"] for kind in KINDS)
            assert sent == pytest.approx(volume * (ranks - 1) / ranks, abs=30)


def refused(_: World, is_functional: bool) -> bool:
    """Whether a collective that is not in the table ends the count."""
    own, everyone = torch.zeros(3), dist.group.WORLD
    assert everyone is not None
    try:
        with CollectiveBytes():
            if is_functional:
                _functional_collectives.broadcast(own, 0, everyone)
            else:
                dist.broadcast(own, 0)
    except AssertionError:
        return True
    return False


@pytest.mark.ranks
@pytest.mark.parametrize("is_functional", [False, True])
def test_no_collective_is_left_out_of_the_count(is_functional: bool, pools: dict[int, RankPool]) -> None:
    assert pools[2].run(refused, is_functional) == [True, True]
