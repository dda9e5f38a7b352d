"""Which lengths and numbers of ranks are tried for the longest sample."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small import command_config

from llava_fsdp.config import ActivationCheckpointing, PlanConfig, Strategy
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import Choice
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search import longest as module
from llava_fsdp.plan.search.longest import MOST_TOKENS, PIECE, longest_row, one_sample
from llava_fsdp.plan.time.hardware import GPUS, Machine
from llava_fsdp.plan.workload import Samples

SAMPLES = Samples(tokens=1000.0, tiles=1.5, labels=200.0, spread=10.0, source="", tile_tokens=400.0)


def test_the_longest_sample_that_fits_is_found() -> None:
    """To the piece of 1024 tokens for each rank of a row; as many of them as make it too long do not fit."""
    limits = *range(0, 1030, 103), 1, 2, 511, 512, 513, 1023, 1024, 10**9
    for context, most in itertools.product((1, 2, 4), limits):

        def row(choice: Any, ranks: Any, micros: list[MicroBatchSizes], between: Any, most: int = most) -> Any:
            [micro] = micros
            return SimpleNamespace(tokens=micro.tokens, fits=micro.tokens <= most * PIECE)

        parallel = SimpleNamespace(parallel=SimpleNamespace(num_context=context))
        own: Any = SimpleNamespace(cfg=parallel, samples=SAMPLES, kernel=None, row=row, grows_with_square=False)
        found = longest_row(own, cast(Any, None), cast(Any, None))
        assert (found.tokens if found else 0) == min(most, MOST_TOKENS // PIECE // context) * PIECE


def test_a_long_sample_has_the_shares_of_the_dataset() -> None:
    assert one_sample(SAMPLES, 10_000, 1) == MicroBatchSizes(1, 10_000, 1, 15, 2000, 6000)
    of_two = one_sample(SAMPLES, 10_000, 2)
    assert (of_two.length, of_two.samples, of_two.labels, of_two.context) == (5000, 1, 1000, 2)


def planned(monkeypatch: pytest.MonkeyPatch, gpus: int, nodes: int, device: str = "cuda") -> list[dict[str, Any]]:
    """The longest samples, if offload fits 100 times as many tokens as GPUs in a row's ranks, and full a tenth."""

    def row(planner: Any, choice: Choice, ranks: RankCounts) -> Any:
        assert choice.strategy is Strategy.FULL_SHARD and (ranks.shard_size, ranks.node_size) == (
            ranks.world_size,
            gpus,
        )
        mode = choice.activation_checkpointing.mode
        if ranks.world_size == 1:
            return None
        tokens = ranks.world_size * (100 if mode is ActivationCheckpointing.offload else 10)
        return SimpleNamespace(tokens=tokens, choice=choice, bytes={"total": tokens + planner.cfg.parallel.context})

    monkeypatch.setattr(module, "Planner", lambda cfg, *_, **__: SimpleNamespace(cfg=cfg))
    monkeypatch.setattr(module, "longest_row", row)
    words = "pack=true", "parallel.context=auto", f"gpus={gpus}", f"nodes={nodes}"
    cfg = command_config(PlanConfig, "plan", *words)
    machine = Machine(GPUS["h100"] if device == "cuda" else None, "test", 1 << 30, 1e9)
    heads = SimpleNamespace(language=SimpleNamespace(num_attention_heads=12))
    return module.longest(cfg, machine, cast(Any, heads))


def test_every_number_of_gpus_and_of_ranks_a_row_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six GPUs in two nodes: 1, 2, 4 and 6 of them, each with the powers of two that divide it."""
    points = planned(monkeypatch, 3, 2)
    assert [(p["gpus"], p["context"]) for p in points] == [
        (1, 1),
        (2, 1),
        (4, 1),
        (6, 1),
        (2, 2),
        (4, 2),
        (6, 2),
        (4, 4),
    ]
    assert points[0] == {"gpus": 1, "context": 1, "tokens": 0, "activation_checkpointing": None, "bytes": None}
    assert points[5] == {"gpus": 4, "context": 2, "tokens": 800, "activation_checkpointing": "offload", "bytes": 402}
    assert planned(monkeypatch, 2, 1, "cpu")[1]["activation_checkpointing"] == "full"
    assert {p["context"] for p in planned(monkeypatch, 100, 2)} == {1, 2, 4, 8, 16, 32, 64}


def test_which_numbers_of_ranks_a_row_are_possible() -> None:
    def sizes(*words: str) -> list[int]:
        cfg = command_config(PlanConfig, "plan", "gpus=8", *words)
        return module.context_sizes(cfg, cast(Any, SimpleNamespace(language=SimpleNamespace(num_attention_heads=12))))

    assert sizes("pack=true") == [1, 2, 4, 8]
    assert sizes("pack=true", "parallel.context_how=ulysses") == [1, 2, 4]
    assert sizes("pack=false") == sizes("pack=true", "sampler.name=llava_v1_5") == [1]
