"""A run on tars or Parquet files with images continues, on any number of ranks, as one on a JSON file would."""

import json
from pathlib import Path

import pytest
import torch
from containers import HOLD_IMAGES, write_container
from harness import RankPool
from reference import EXPORTED, check_continued, outcome, run_ranks
from saves import interrupted
from test_containers import config, rows_of

from llava_fsdp.config import Config
from llava_fsdp.train import main as train

OFTEN = ["max_steps=4", "checkpoint.every=1", "checkpoint.keep=9", "global_batch_size=5", *EXPORTED]
COUNTS = ("step", "samples", "tokens", "label_tokens", "images", "lr")


def configured(kind: str, parts: Path, dataset: Path, folder: Path, to: Path) -> Config:
    return config(parts, dataset, to, str(folder / kind), kind in HOLD_IMAGES, f"data.index={folder / 'index'}", *OFTEN)


def steps_of(folder: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[row[key] for key in COUNTS] for row in rows]


@pytest.fixture(scope="module")
def of_json(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    write_container("json", folder / "json", rows_of(dataset), dataset / "images", 3)
    train.train(configured("json", parts, dataset, folder, folder / "out"))
    return folder / "out"


@pytest.mark.ranks
@pytest.mark.parametrize("kind, sizes", [
    pytest.param("tar", (3,), marks=pytest.mark.slow),
    pytest.param("tar", (1, 2, 4), marks=pytest.mark.slow),
    pytest.param("parquet with images", (1, 2, 3), marks=pytest.mark.slow),
    pytest.param("parquet with compressed images", (1, 3), marks=pytest.mark.slow),
    pytest.param("gzip", (1, 3), marks=pytest.mark.slow),
])  # fmt: skip
def test_resumes_at_the_next_sample(
    kind: str,
    sizes: tuple[int, ...],
    of_json: Path,
    parts: Path,
    dataset: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    write_container(kind, tmp_path / kind, rows_of(dataset), dataset / "images", 3)
    cfg = configured(kind, parts, dataset, tmp_path, tmp_path / "whole")
    train.train(cfg)
    expected, whole = outcome(of_json), outcome(tmp_path / "whole")
    assert steps_of(tmp_path / "whole") == steps_of(of_json) and whole.losses == expected.losses
    assert all(torch.equal(whole.weights[n], expected.weights[n]) for n in expected.weights)
    for size in sizes:
        folder = tmp_path / str(size)
        cfg = configured(kind, parts, dataset, tmp_path, interrupted(tmp_path / "whole", folder, 1 + size % 3))
        if size == 1:
            train.train(cfg)
        else:
            pools[size].run(run_ranks, cfg)
        got = outcome(folder)
        assert steps_of(folder) == steps_of(of_json)
        check_continued(size, got, expected, cfg)
