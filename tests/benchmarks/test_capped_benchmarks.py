"""What the benchmarks under a limit on memory decide with."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llava_fsdp.parallel.ranks.world import World

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def capped() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("capped")


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 7, 8, 9, 31, 32, 40])
@pytest.mark.parametrize("start", [1, 8])
def test_the_largest_batch_is_found(answer: int, start: int, capped: ModuleType) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= answer

    assert capped.largest(fits, start, 32) == min(answer, 32)
    assert len(tried) == len(set(tried)) and max(tried) <= 32


def held(world: World, count: int) -> int:
    values = torch.empty(count, dtype=torch.uint8)
    if world.rank == 1 and count < 1000:
        raise ValueError("another mistake")
    return len(values)


@pytest.mark.ranks
def test_what_does_not_fit_is_told_from_what_is_broken(capped: ModuleType) -> None:
    limit = capped.private_bytes() + (256 << 20)
    assert capped.attempt(limit, held, 1 << 20).results == [1 << 20] * 2
    outcome = capped.attempt(limit, held, 1 << 30)
    assert not outcome and "can't allocate memory" in outcome.why
    with pytest.raises(RuntimeError, match="another mistake"):
        capped.attempt(limit, held, 10)
