"""The loss in chunks on several ranks: the number of chunks is in no collective."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import RankPool
from loaders import agreed_steps
from small import changed_parts, make_config
from steps import begin
from tiers import slow_after
from torch.utils._python_dispatch import TorchDispatchMode

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith(("c10d", "_c10d")):
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def cut(micro: MicroBatch, rank: int, number: int) -> MicroBatch:
    """Rank 1 has no label at all in the first micro-batch and a single one in the second."""
    if rank == 0:
        return micro
    kept = slice(0, number)
    return replace(micro, label_positions=micro.label_positions[kept], label_ids=micro.label_ids[kept])


def ran(world: World, configs: list[Config]) -> list[tuple[Counter[str], list[float], list[int], dict[str, Any]]]:
    """Of each: collectives, losses and numbers of chunks of two micro-batches, and this rank's gradients."""
    found = []
    for cfg in configs:
        state = begin(world, cfg)
        step = next(iter(agreed_steps(state.loader)))
        losses, chunks = [], []
        with Collectives() as collectives:
            for number, micro in enumerate(step.micro_batches[:2]):
                begin_micro_batch(state.model, state.parallelism.plan, is_last=number == 1)
                shown = cut(state.loader.to_device(micro), world.rank, number)
                loss = shown.scale * state.model(**shown.inputs)
                loss.backward()
                losses.append(loss.item())
                chunks.append(-(-len(shown.label_ids) // cfg.loss.chunk_tokens))
        gradients = {n: local(p.grad) for n, p in state.masters.named.items() if p.grad is not None}
        found.append((collectives.counts, losses, chunks, gradients))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("sharding", "tied"), slow_after(1, [("zero3", False), ("zero2", True)]))
def test_chunks_are_in_no_collective(
    sharding: str, tied: bool, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    folder = changed_parts(parts, tmp_path / "parts", {"tie_word_embeddings": tied})
    common = [f"sharding={sharding}", "pack=false", "micro_batch_size=3", "global_batch_size=12"]
    configs = [make_config(folder, dataset, tmp_path, *common, f"loss.chunk_tokens={chunk}") for chunk in (10**6, 7)]
    (whole, chunked), (whole_1, chunked_1) = pools[2].run(ran, configs)
    assert whole[2] == [1, 1] and whole_1[2] == [0, 1]
    assert min(chunked[2]) > 1 and chunked_1[2] == [0, 1]
    assert whole[0] and whole[0] == chunked[0] == whole_1[0] == chunked_1[0]
    for one, several in ((whole, chunked), (whole_1, chunked_1)):
        assert several[1] == pytest.approx(one[1], rel=1e-6)
        assert several[3].keys() == one[3].keys() and ("lm_head.weight" in one[3]) != tied
        for name, gradient in one[3].items():
            assert (several[3][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
