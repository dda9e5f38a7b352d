"""Plans of images whose tokens and tiles depend on their sizes, against real steps."""

from pathlib import Path

import pytest
from harness import RankPool, single_world
from live import measure_step
from many_sizes import SIDE, write_many_sizes, write_parts_of_odd_tiles
from small import make_config
from test_simulate import CLOSE
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.plan.planner import peak

UNPADDED = "data.image_aspect_ratio=anyres model.patch_merge=spatial_unpad"
SHRUNK = "data.image_aspect_ratio=anyres_max model.patch_merge=spatial_unpad data.max_tiles=4"
ALL = "model.train=[projector,language,vision]"
CASES = [
    # ranks, sharding, activation checkpointing, more
    (1, "zero3", "none", f"{SHRUNK} tokens_per_micro_batch=1024"),
    (1, "zero3", "full", f"{SHRUNK} {ALL} tokens_per_micro_batch=700"),
    (2, "zero3", "none", f"{SHRUNK} {ALL} tokens_per_micro_batch=1024"),
    (2, "zero2", "selective", f"{SHRUNK} tokens_per_micro_batch=700"),
    (2, "zero3", "full", f"{UNPADDED} {ALL} tokens_per_micro_batch=1024"),
    (1, "zero3", "none", f"{UNPADDED} {ALL} tokens_per_micro_batch=700"),
    (1, "zero3", "none", f"{SHRUNK} {ALL} pack=false micro_batch_size=7"),
]


@pytest.fixture(scope="session")
def odd_parts(wide_parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts_of_odd_tiles(wide_parts, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="session")
def many_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_sizes(tmp_path_factory.mktemp("data") / "many")


def configure(parts: Path, dataset: Path, output: Path, *words: str) -> Config:
    fixed = "precision=fp32", "data.max_length=420", "global_batch_size=28"
    return make_config(parts, dataset, output, *fixed, *words)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "sharding", "mode", "more"),
    slow_after(1, CASES),
)
def test_worst_moment_is_that_of_real_steps(
    ranks: int, sharding: str, mode: str, more: str, odd_parts: Path, many_sizes: Path, pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:  # fmt: skip
    """As close as with one tile for an image."""
    words = f"sharding={sharding}", f"activation_checkpointing={mode}", *more.split()
    cfg = configure(odd_parts, many_sizes, tmp_path, *words)
    steps = [measure_step(single_world(), cfg)] if ranks == 1 else pools[ranks].run(measure_step, cfg)[:2]
    for rank, (most, micros) in enumerate(steps):
        planned = peak(cfg, ranks, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.moment)
        assert any(micro.image_tokens != micro.tiles * SIDE**2 for micro in micros)
