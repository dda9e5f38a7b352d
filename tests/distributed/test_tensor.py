"""Training with tensor parallelism equals the plain loop: several ranks compute each layer together."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from harness import RankPool
from reference import (
    EXPORTED,
    Adapters,
    Outcome,
    assert_near,
    outcome,
    plain_loop,
    train_on,
    trained_weights,
    vocabulary,
)
from small import changed_parts, make_config
from test_adapters import EVERY_ROW, LORA, first_values
from tiers import slow_after

from llava_fsdp.train import main as train

BATCH = "global_batch_size=16"
HYBRID = ("hybrid", "hybrid2")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", *HYBRID)
TOWER = "model.train=[projector,language,vision]"
VARIANTS = {"full": (), "tower": (TOWER,), "lora": (*LORA, "model.lora.dropout=0.1")}
CASES = [
    ("full", "zero3", 4, 2),
    *((variant, "zero2", 2, 2) for variant in VARIANTS),
    *(("full", strategy, 4, tensor) for strategy in STRATEGIES for tensor in (2, 4)),
    *(("lora", strategy, 4, 2) for strategy in STRATEGIES),
    ("tower", "hybrid", 4, 2),
]


@pytest.fixture(scope="module")
def model(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with sizes that four ranks can divide, but for the vocabulary. Its padding token, whose embedding
    gets no gradient, is in the text."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 52}
    sizes |= {"vocab_size": 611, "pad_token_id": 2}
    return changed_parts(parts, tmp_path_factory.mktemp("even"), sizes)


@pytest.fixture(scope="module")
def reference(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The plain loop's outcome with a variant, of what trains; computed when it is first asked for."""
    folder = tmp_path_factory.mktemp("start")
    train.train(make_config(model, dataset, folder, "max_steps=1", "optim.lr=0", BATCH, *EXPORTED))

    @cache
    def of_variant(name: str) -> Outcome:
        cfg = make_config(model, dataset, folder / "none", BATCH, *VARIANTS[name])
        first = first_values(cfg) if cfg.model.lora.enabled else None
        found = plain_loop(cfg, folder / "export", None if first is None else Adapters(first))
        if first is not None:
            found.weights = {key: found.weights[key] for key in first}
        return found

    return of_variant


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "strategy", "size", "tensor"), slow_after(1, CASES))
def test_training_is_that_of_the_plain_loop(
    variant: str, strategy: str, size: int, tensor: int, reference: Callable[[str], Outcome], model: Path,
    dataset: Path, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Several rows a step on each group of ranks, with recomputation where the strategy's place is odd."""
    recompute = ("none", "full")[STRATEGIES.index(strategy) % 2]
    cfg = make_config(
        model, dataset, tmp_path, f"sharding={strategy}", BATCH, "pack=true",
        f"sharding.shard_size={1 if strategy in HYBRID else 'null'}", f"activation_checkpointing={recompute}",
        f"parallel.tensor={tensor}", "tokens_per_micro_batch=300",
        *VARIANTS[variant], *(EXPORTED if variant != "lora" else ()),
    )  # fmt: skip
    folder = train_on(size, cfg, pools)
    if variant == "lora":
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        got = Outcome([r["loss"] for r in rows], [r["grad_norm"] for r in rows], trained_weights(folder))
    else:
        got = outcome(folder)
    assert_near(got, reference(variant), EVERY_ROW if variant == "lora" else vocabulary(cfg), strategy)
