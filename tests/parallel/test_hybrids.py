"""Training with several kinds of parallelism at once equals the plain loop, or a training of one process."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from harness import RankPool
from mixtures import mixture_parts
from reference import EXPORTED, Outcome, assert_near, outcome, plain_outcomes, train_on, trained, vocabulary
from small import changed_parts, make_config
from test_adapters import EVERY_ROW, LORA
from tiers import slow_after

from llava_fsdp.train import main as train

BATCH = ("global_batch_size=16", "max_steps=3", "optim.warmup_ratio=0")
VARIANTS = {"full": (), "lora": (*LORA, "model.lora.dropout=0.1"), "muon": ("optim=muon",)}
HYBRID = ("hybrid", "hybrid2")
CASES = [
    ("full", "zero3", 4, ("pipeline=2", "tensor=2")),
    ("full", "zero2", 8, ("pipeline=2", "tensor=2")),
    ("full", "hybrid", 8, ("pipeline=2", "tensor=2")),
    ("full", "zero1", 8, ("pipeline=4", "tensor=2")),
    ("full", "zero3", 8, ("pipeline=2", "tensor=2", "schedule=interleaved")),
    ("lora", "zero3", 8, ("pipeline=2", "tensor=2")),
    ("full", "hybrid2", 8, ("tensor=2", "context=2")),
    ("full", "zero3", 8, ("pipeline=2", "context=2")),
    ("lora", "zero0", 8, ("pipeline=2", "tensor=2", "context=2")),
    ("muon", "zero3", 4, ("tensor=2",)),
    ("muon", "zero2", 8, ("pipeline=2", "tensor=2")),
    ("muon", "hybrid", 8, ("tensor=2", "context=2")),
]
MIXTURES = [
    ("full", "zero3", 4, ("pipeline=2", "expert=2")),
    ("lora", "zero3", 4, ("pipeline=2", "expert=2")),
    ("full", "hybrid", 8, ("pipeline=2", "expert=2")),
    ("full", "zero1", 8, ("pipeline=2", "expert=4")),
    ("full", "zero0", 8, ("pipeline=2", "expert=2", "schedule=interleaved")),
    ("full", "zero2", 8, ("expert=2", "context=2")),
    ("full", "zero3", 8, ("pipeline=2", "expert=2", "context=2")),
    ("full", "zero3", 4, ("tensor=2", "expert=2")),
    ("full", "hybrid", 8, ("tensor=2", "expert=2")),
    ("full", "zero0", 8, ("tensor=2", "expert=4")),
    ("full", "zero2", 8, ("tensor=2", "expert=2", "context=2")),
    ("full", "zero1", 8, ("pipeline=2", "tensor=2", "expert=2")),
    ("full", "zero3", 8, ("pipeline=2", "tensor=2", "expert=2", "context=2")),
    ("muon", "zero3", 8, ("expert=2",)),
    ("muon", "hybrid", 8, ("pipeline=2", "expert=2")),
    ("muon", "zero0", 4, ("expert=2",)),
    ("muon", "zero1", 8, ("tensor=2", "expert=4")),
]


def settings(strategy: str, kinds: tuple[str, ...], recomputes: bool) -> tuple[str, ...]:
    return (
        f"sharding={strategy}", f"sharding.shard_size={2 if strategy in HYBRID else 'null'}", "pack=true",
        f"activation_checkpointing={'full' if recomputes else 'none'}", "tokens_per_micro_batch=256",
        *(f"parallel.{kind}" for kind in kinds),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with enough blocks for four stages, and sizes that two ranks can divide, but for the
    vocabulary."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 52}
    return changed_parts(
        parts, tmp_path_factory.mktemp("deep"), {**sizes, "num_hidden_layers": 5, "vocab_size": 611, "pad_token_id": 2}
    )


@pytest.fixture(scope="module")
def reference(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The plain loop's outcome with a variant, of what trains; computed when it is first asked for."""
    return plain_outcomes(model, dataset, tmp_path_factory.mktemp("start"), BATCH, VARIANTS)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "strategy", "size", "kinds"), CASES)
def test_training_is_that_of_the_plain_loop(
    variant: str, strategy: str, size: int, kinds: tuple[str, ...], reference: Callable[[str], Outcome], model: Path,
    dataset: Path, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    recomputes = CASES.index((variant, strategy, size, kinds)) % 2 == 0
    exported = () if variant == "lora" else EXPORTED
    more = *BATCH, *settings(strategy, kinds, recomputes), *VARIANTS[variant], *exported
    cfg = make_config(model, dataset, tmp_path, *more)
    folder = train_on(size, cfg, pools, timeout=240)
    got, rows = (outcome(folder), vocabulary(cfg)) if exported else (trained(folder), EVERY_ROW)
    assert_near(got, reference(variant), rows, " ".join(kinds))


@pytest.fixture(scope="module")
def mixture(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of four experts with enough blocks for four stages."""
    small = mixture_parts("qwen3_moe", parts, tmp_path_factory.mktemp("mixture") / "parts", 4)
    return changed_parts(small, tmp_path_factory.mktemp("deep"), {"num_hidden_layers": 4})


@pytest.fixture(scope="module")
def of_one_process(
    mixture: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Outcome]:
    """What one process trains and exports with a variant and a factor of the load-balance loss; computed when it is
    first asked for."""

    @cache
    def of(variant: str, balance: str) -> Outcome:
        folder = tmp_path_factory.mktemp("one")
        train.train(make_config(mixture, dataset, folder, *BATCH, *EXPORTED, "pack=false", balance, *VARIANTS[variant]))
        return outcome(folder)

    return of


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "strategy", "size", "kinds"), slow_after(0, MIXTURES))
def test_training_of_a_mixture_is_that_of_one_process(
    variant: str, strategy: str, size: int, kinds: tuple[str, ...], of_one_process: Callable[[str, str], Outcome],
    mixture: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """And what it exports. With a loss that balances the experts where it can be computed: where ranks have whole
    samples."""
    balance = f"model.balance_loss={0 if 'context=2' in kinds else 0.5}"
    recomputes = MIXTURES.index((variant, strategy, size, kinds)) % 2 == 0
    more = *BATCH, *settings(strategy, kinds, recomputes), balance, *VARIANTS[variant]
    cfg = make_config(mixture, dataset, tmp_path, *more, *EXPORTED)
    got = outcome(train_on(size, cfg, pools, timeout=240))
    assert_near(got, of_one_process(variant, balance), EVERY_ROW, " ".join(kinds))
