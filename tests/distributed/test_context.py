"""Training with context parallelism equals the plain loop: several ranks process each packed row together."""

from pathlib import Path

import pytest
from harness import RankPool
from reference import EXPORTED, TOLERANCE, Outcome, assert_near, difference, outcome, plain_loop, train_on, vocabulary
from small import Configure, make_config
from tiers import slow_after

from llava_fsdp.train import main as train

BATCH = "global_batch_size=16"
HYBRID = ("hybrid", "hybrid2")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", *HYBRID)


@pytest.fixture(scope="module")
def reference(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    """The plain loop's outcome, and the weights that everything starts from."""
    folder = tmp_path_factory.mktemp("start")
    train.train(make_config(parts, dataset, folder, "max_steps=1", "optim.lr=0", BATCH, *EXPORTED))
    cfg = make_config(parts, dataset, folder / "none", BATCH)
    return plain_loop(cfg, folder / "export"), outcome(folder)


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ulysses", "gather"])
@pytest.mark.parametrize(
    ("strategy", "size", "context"),
    slow_after(1, [("zero3", 2, 2), *((s, 4, c) for s in STRATEGIES for c in (2, 4))]),
)
def test_training_is_that_of_the_plain_loop(
    strategy: str, size: int, context: int, how: str, reference: tuple[Outcome, Outcome],
    configure: Configure, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    cfg = configure(
        f"sharding={strategy}", f"sharding.shard_size={2 if strategy in HYBRID else 'null'}", BATCH, "pack=true",
        f"parallel.context={context}", f"parallel.context_how={how}", "tokens_per_micro_batch=256", *EXPORTED,
    )  # fmt: skip
    got = outcome(train_on(size, cfg, pools))
    assert_near(got, reference[0], vocabulary(cfg), f"{strategy} {how}")
    assert difference(got.weights, reference[1].weights, vocabulary(cfg)) > 100 * TOLERANCE, "nothing was trained"
