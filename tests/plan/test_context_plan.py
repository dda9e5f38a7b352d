"""What is planned for ranks that process a row together, against real steps and against a dry run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from harness import RankPool
from live import measure_step
from small import changed_parts, make_config, with_heads
from test_plan import of_parts, printed
from tiers import slow_after

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    Config,
    ContextHow,
    OffloadMode,
    Strategy,
)
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.loader import ModelShape
from llava_fsdp.data.synthetic import fullest
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import Choice, Planner, PlanRow, peak
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search import auto
from llava_fsdp.plan.search.auto import Decision, decide, with_each_context
from llava_fsdp.plan.search.longest import MOST_TOKENS
from llava_fsdp.plan.time.hardware import machine_named
from llava_fsdp.plan.time.step_time import Volume, context_volume
from llava_fsdp.plan.workload import Samples, configured_split
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.setup.dry_run import measure

CLOSE = 0.05
"""Share of the most bytes alive."""
NONE = ActivationCheckpointing.none
WINDOWED = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 100}
CAPPED = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
          "query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 3}  # fmt: skip
CASES = [
    # ranks, ranks per row, how, sharding, activation checkpointing, tokens of a rank
    (2, 2, "ulysses", "zero3", "full", 256),
    (2, 2, "gather", "zero3", "full", 256),
    (2, 2, "ulysses", "zero2", "none", 300),
    (2, 2, "gather", "zero1", "none", 150),
    (2, 2, "ulysses", "zero0", "selective", 128),
    (4, 2, "ulysses", "hybrid", "full", 256),
    (4, 2, "gather", "hybrid2", "none", 256),
    (4, 4, "gather", "zero3", "none", 128),
    (4, 4, "gather", "zero2", "full", 64),
    (4, 2, "ulysses", "zero3", "selective", 200),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "context", "how", "sharding", "mode", "tokens"), slow_after(0, CASES))
def test_worst_moment_is_that_of_real_steps(
    ranks: int, context: int, how: str, sharding: str, mode: str, tokens: int, wide_parts: Path, dataset: Path,
    pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    words = f"sharding={sharding}", f"activation_checkpointing={mode}", "pack=true", "global_batch_size=24"
    own = f"parallel.context={context}", f"parallel.context_how={how}", f"tokens_per_micro_batch={tokens}"
    size = ["sharding.shard_size=2"] * sharding.startswith("hybrid")
    parts = with_heads(wide_parts, tmp_path / "parts", 10, 5)
    cfg = make_config(parts, dataset, tmp_path / "run", *words, *own, *size)
    for rank, (most, micros) in enumerate(pools[ranks].run(measure_step, cfg)):
        assert all(micro.context == context for micro in micros)
        planned = peak(cfg, ranks, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.peak_moment)


def test_auto_tries_the_numbers_that_are_possible(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Six heads, eight or twelve ranks, and a row that one rank has no room for."""
    words = "parallel=auto", "pack=true", "tokens_per_micro_batch=128", "data.max_length=256"

    def tried(world_size: int, *more: str) -> list[int]:
        cfg = make_config(parts, dataset, tmp_path, *words, *more)
        language = find_parts(cfg.model).language
        return [own.parallel.num_context for own in with_each_context(cfg, world_size, language)]

    assert tried(8) == [2, 4, 8]
    assert tried(12, "parallel.context_how=ulysses") == [2, 3, 6]
    with pytest.raises(ConfigError, match="tokens_per_micro_batch"):
        tried(1)
    with pytest.raises(ConfigError, match="3 does not divide 8,"):
        tried(8, "parallel.context=3")
    with pytest.raises(ConfigError, match="does not divide them"):
        tried(8, "parallel.context=4", "parallel.context_how=ulysses")


def test_auto_shares_no_rows_with_an_old_torch(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    cfg = make_config(parts, dataset, tmp_path, "parallel=auto", "pack=true", "tokens_per_micro_batch=256")
    assert [own.parallel.context for own in with_each_context(cfg, 8, find_parts(cfg.model).language)] == [1]
    short = make_config(parts, dataset, tmp_path, "parallel=auto", "pack=true", "tokens_per_micro_batch=128")
    with pytest.raises(ConfigError, match=r"torch 2\.13"):
        with_each_context(short, 8, find_parts(short.model).language)


AUTO_KEYS = "parallel.context=auto", "pack=true", "sharding=auto", "tokens_per_micro_batch=auto"
WORLD = World(0, 8, 0, 8, torch.device("cpu"))


def decided(cfg: Config, continues: bool = False) -> Decision:
    return decide(cfg, WORLD, find_parts(cfg.model), Samples(120, 0.6, 12, 30, "test", 4), continues)


def write_recorded(folder: Path, context: int, tokens: str) -> None:
    (folder / "config.yaml").write_text(
        f"sharding: {{strategy: {Strategy.SHARD_GRAD_OP.value}}}\nparallel: {{context: {context}}}\n"
        f"tokens_per_micro_batch: {tokens}\n"
    )


def test_a_model_that_is_not_planned_resumes_as_it_started(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a planner the values that need the least memory are chosen, and then kept."""

    def fails(*_: object) -> NoReturn:
        raise RuntimeError("not on the meta device")

    monkeypatch.setattr(auto, "rows_for", fails)
    cfg = make_config(parts, dataset, tmp_path, *AUTO_KEYS)
    first = decided(cfg)
    assert (first.parallel.num_context, first.strategy, first.tokens) == (8, Strategy.FULL_SHARD, None)
    write_recorded(tmp_path, 2, "null")
    kept = decided(cfg, continues=True)
    assert (kept.parallel.num_context, kept.strategy, kept.tokens) == (2, Strategy.SHARD_GRAD_OP, None)


def test_recorded_values_that_are_not_possible_are_chosen_again(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks cannot share six heads, three do not divide eight ranks, and a row must hold the longest sample."""
    row = SimpleNamespace(fits=True, tokens=77, bytes={"total": 1}, usable=2, step=SimpleNamespace(seconds=1.0))
    row.choice = Choice(Strategy.NO_SHARD, ActivationCheckpointingConfig(mode=NONE, budget=None), OffloadMode.none)
    monkeypatch.setattr(auto, "rows_for", lambda *_: [row])
    cfg = make_config(parts, dataset, tmp_path, *AUTO_KEYS, "parallel.context_how=ulysses")
    for context, tokens, keeps in ((2, "200", True), (4, "200", False), (3, "200", False), (2, "100", False)):
        write_recorded(tmp_path, context, tokens)
        found = decided(cfg, continues=True)
        assert found.tokens == (int(tokens) if keeps else 77)
        assert (found.parallel.num_context, found.strategy) == (
            (2, Strategy.SHARD_GRAD_OP) if keeps else (1, Strategy.NO_SHARD)
        )


def test_the_nearest_number_needs_the_fewest_bytes(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Where nothing fits; else the smallest that fits."""
    cfg = make_config(parts, dataset, tmp_path, *AUTO_KEYS)
    sizes = {1: 9, 2: 5, 4: 6, 8: 3}

    def chosen(memory: int) -> int:
        def plan(tried: Config) -> Any:
            total = sizes[tried.parallel.num_context]
            return tried, [SimpleNamespace(fits=total <= memory, bytes={"total": total})]

        found: Any = auto.smallest_context(cfg, 8, find_parts(cfg.model).language, plan)[0]
        return found.parallel.context

    assert [chosen(memory) for memory in (9, 6, 4, 3, 1)] == [1, 2, 8, 8, 8]
    sizes[8] = 7
    assert chosen(1) == 2


def test_rows_with_ranks_on_two_nodes_use_the_network() -> None:
    def is_slow(context: int, node: int, world: int) -> bool:
        sent = Volume(context=1e9, exchanges=1, context_size=context, shards=world, node_size=node)
        return sent.attention_seconds(1e12, 1e9) > 0.5

    found = {(context, node, world): is_slow(context, node, world) for context, node, world in STRADDLING}
    assert found == STRADDLING


STRADDLING = {
    (2, 8, 16): False, (8, 8, 16): False, (16, 8, 16): True, (3, 8, 24): True, (4, 6, 12): True, (4, 6, 4): False,
    (3, 6, 12): False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("attention", "changes", "context", "how", "grows"),
    slow_after(
        1,
        [
            ("sdpa", WINDOWED, 1, "auto", True),
            ("sdpa", {}, 1, "auto", False),
            ("sdpa", {}, 2, "ulysses", False),
            ("sdpa", {}, 2, "gather", False),
            ("auto", {}, 2, "gather", False),
            ("auto", WINDOWED, 1, "auto", False),
            ("auto", CAPPED, 1, "auto", True),
        ],
    ),
)
def test_masks_and_scores_grow_with_the_square(
    attention: str, changes: dict[str, Any], context: int, how: str, grows: bool, parts: Path, dataset: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """As measured: a sample of twice the tokens. Only what does not grow with the square is interpolated."""
    wide = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    parts = changed_parts(parts, tmp_path / "parts", language=wide | changes)
    words = f"attention={attention}", "precision=bf16", f"parallel.context={context}", f"parallel.context_how={how}"
    cfg = make_config(parts, dataset, tmp_path, *words, "pack=true", "tokens_per_micro_batch=512")
    planner = Planner(cfg, machine_named("h100", 8))

    def activations(tokens: int) -> int:
        micro = MicroBatchSizes(1, tokens, 1, 0, 1, 0, context, context - 1)
        return max(part.peak_with_fsdp.activations for part in planner.segments(ActivationCheckpointing.full, micro))

    one, two, four = (activations(tokens) for tokens in (1024, 2048, 4096))
    assert (four - two > 2.5 * (two - one)) == grows == planner.grows_with_square
    small, large = MicroBatchSizes(1, 64, 1, 0, 1, 0, context), MicroBatchSizes(1, 300, 1, 0, 1, 0, context)
    measured = [(micro.length, micro.samples, micro.context) for micro in planner.sizes_to_measure([[large], [small]])]
    assert measured == ([] if grows else [(64, 1, context), (1024, 4 * context, context)])
    assert planner.sizes_to_measure([[small]]) == []


@pytest.mark.parametrize("how", ["ulysses", "gather"])
def test_budget_keeps_what_collectives_give(how: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """torch's partitioner runs no collective again, so that even a budget of 0 keeps more than the blocks' inputs."""
    words = (
        "pack=true",
        "tokens_per_micro_batch=128",
        "parallel.context=2",
        f"parallel.context_how={how}",
    )
    cfg = make_config(parts, dataset, tmp_path, *words, "global_batch_size=4")
    planner = Planner(cfg, replace(machine_named("h100", 8), has_compiler=False))
    split = configured_split(cfg, planner.samples, 2)

    def row_of(mode: ActivationCheckpointing, budget: float | None = None) -> PlanRow:
        checkpointing = ActivationCheckpointingConfig(mode=mode, budget=budget)
        return planner.row(Choice(Strategy.FULL_SHARD, checkpointing, OffloadMode.none), RankCounts(2, 2, 8), split)

    full, budget, none = row_of(ActivationCheckpointing.full), row_of(ActivationCheckpointing.budget, 0.0), row_of(NONE)
    kept = 3 * split[0].tokens * 4 * (6 * 6 * 2 + 6 * 6 * 2 if how == "ulysses" else 3 * 6 * 2 * 2)
    assert planner.gathered_for_attention(split[0]) == kept
    most = min(kept, none.bytes["activations"] - full.bytes["activations"])
    assert budget.bytes["activations"] - full.bytes["activations"] == most > 0
    assert budget.sent.context == none.sent.context < full.sent.context


def test_a_plan_names_the_number_that_it_chose(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Odd lengths of a part are planned as well."""
    keys = (
        *of_parts(parts),
        "gpus=4",
        "gpu=h100",
        "parallel.context=auto",
        "parallel.context_how=gather",
        "compile=false",
    )
    found = printed(capsys, *keys, "data.max_length=257", "tokens_per_micro_batch=131")
    assert {row["context"] for row in found["rows"]} == {2}
    command = found["recommended"]["command"].split()
    assert "parallel.context=2" in command and "parallel.context_how=gather" in command
    assert not any(word.startswith("parallel=") for word in command)


@pytest.mark.slow
def test_two_ranks_a_row_train_longer_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "longest.html"
    keys = "model=llava_v1_5_7b", "stage=finetune", "gpus=2", "gpu=h100"
    found = printed(capsys, *keys, "longest=true", f"page={page}")
    tokens = {(point["gpus"], point["context"]): point["tokens"] for point in found["longest"]}
    assert tokens.keys() == {(1, 1), (2, 1), (2, 2)} and tokens[1, 1] < tokens[2, 1] < tokens[2, 2] < MOST_TOKENS
    assert page.read_text().count("<path class='line") == 2


@pytest.mark.parametrize("how", ["ulysses", "gather"])
def test_a_dry_run_exchanges_what_the_arithmetic_says(how: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Bytes of attention in a step on imagined ranks, against those of the planner."""
    words = "pack=true", "tokens_per_micro_batch=150", f"parallel.context_how={how}", "global_batch_size=4"
    more = *words, "data.max_length=256", "activation_checkpointing=none", "sharding=zero0", "format=json"
    cfg = make_config(parts, dataset, tmp_path, *more, "parallel.context=2", "dry_run=2")
    with distributed(cfg) as world:
        report = measure(cfg, world)
    language, own = find_parts(cfg.model).language, report["micro_batch"]["positions"] * report["micro_batches"]
    moved, count = context_volume(ContextHow(how), 2, language, 4, own, 0.0)
    kinds = ("all_to_all",) if how == "ulysses" else ("all_gather", "reduce_scatter")
    sent = sum(report["collectives"][kind]["sent"] for kind in kinds)
    calls = sum(report["collectives"][kind]["calls"] for kind in kinds)
    assert (sent, calls) == (moved, count * report["micro_batches"])


def test_images_at_borders_of_a_part_are_counted(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """A part of 300 tokens has 60 images of 4 tokens and one of text, and one more at each end of each chunk."""
    shape = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)
    found = {}
    for how in ("ulysses", "gather"):
        words = "pack=true", "tokens_per_micro_batch=300", "parallel.context=3", f"parallel.context_how={how}"
        cfg = make_config(parts, dataset, tmp_path, *words)
        found[how] = fullest(cfg, shape, ContextCut(3, 0, paired=how == "gather"))
    assert {how: own.images for how, own in found.items()} == {"ulysses": 62, "gather": 64}
    assert {own.tokens for own in found.values()} == {300}
