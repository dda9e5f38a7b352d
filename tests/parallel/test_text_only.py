"""Batches without a picture, on some ranks or on all, never hang and never change a gradient."""

import json
from pathlib import Path

import pytest
from harness import RankPool
from reference import EXPORTED, assert_near, outcome, plain_loop, train_on, vocabulary
from small import make_config

from llava_fsdp.data.batching.sampler import Shuffle
from llava_fsdp.train import main as train

SEED = 42
BATCH = 4
PICTURES = [1, 0, 4, 2, 0]
"""Samples with a picture in each step: one rank alone has one, none has, all have, half have, none at the end."""


@pytest.fixture(scope="module")
def sparse(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose step s has PICTURES[s] samples with a picture; the others are text only."""
    folder = tmp_path_factory.mktemp("sparse")
    (folder / "images").symlink_to(dataset / "images")
    records = json.loads((dataset / "text.json").read_text())
    assert len(records) == len(PICTURES) * BATCH
    order = Shuffle(len(records), SEED, len(records)).samples(0)
    for step, count in enumerate(PICTURES):
        for index in order[step * BATCH : step * BATCH + count]:
            records[index]["image"] = "0.jpg"
            records[index]["conversations"][0]["value"] += "\n<image>"
    (folder / "mixed.json").write_text(json.dumps(records))
    (folder / "captions.json").write_text(json.dumps(records))
    return folder


ROWS = ("zero0", "null"), ("zero2", "null"), ("zero3", "null"), ("hybrid", "2")
"""Strategies and their shard sizes."""
STAGES = {
    "pretrain": ("pretrain", ["data.template=v1"]),
    "frozen tower": ("finetune", []),
    "trainable tower": ("finetune", ["model.train=[projector,language,vision]"]),
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        pytest.param("trainable tower", (("zero3", "null"),), id="trainable tower"),
        *(pytest.param(n, ROWS, id=f"{n}, all", marks=pytest.mark.slow) for n in STAGES),
    ],
)
def test_steps_with_few_or_no_pictures(
    name: str, strategies: tuple[tuple[str, str], ...],
    sparse: Path, parts: Path, pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    stage, overrides = STAGES[name]
    common = [f"global_batch_size={BATCH}", f"seed={SEED}", f"max_steps={len(PICTURES)}", *overrides]
    start = make_config(parts, sparse, tmp_path / "start", *common, *EXPORTED, "optim.lr=0", stage=stage)
    train.train(start)
    cfg = make_config(parts, sparse, tmp_path / "none", *common, stage=stage)
    reference = plain_loop(cfg, tmp_path / "start" / "export")
    rows = [json.loads(line) for line in (tmp_path / "start" / "metrics.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == PICTURES

    for strategy, shard_size in strategies:
        cfg = make_config(
            parts, sparse, tmp_path / strategy, *common, *EXPORTED, f"sharding={strategy}",
            f"sharding.shard_size={shard_size}", "micro_batch_size=1", stage=stage,
        )  # fmt: skip
        assert_near(outcome(train_on(4, cfg, pools)), reference, vocabulary(cfg), strategy)
