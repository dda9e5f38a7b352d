"""What is kept for the backward pass changes no bit of a training."""

import json
from pathlib import Path

import pytest
import torch
from harness import RankPool
from reference import EXPORTED, Outcome, outcome, run_ranks
from small import make_config, write_json

from llava_fsdp import train
from llava_fsdp.config import Config

EXACT = ["full", "selective", "offload"]
TOWER = "model.train=[projector,language,vision]"


@pytest.fixture(scope="module")
def dropping(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts once more, both with dropout in their attention."""
    folder = tmp_path_factory.mktemp("dropping")
    for part in ("language", "vision"):
        (folder / part).mkdir()
        for file in (parts / part).iterdir():
            (folder / part / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / part / "config.json").read_text())
        write_json(folder / part / "config.json", config | {"attention_dropout": 0.2})
    return folder


def trained(cfg: Config, size: int, pools: dict[int, RankPool]) -> Outcome:
    if size == 1:
        train.train(cfg)
    else:
        pools[size].run(run_ranks, cfg)
    return outcome(Path(cfg.output_dir))


CASES = [
    pytest.param(1, "precision=bf16", "pack=true", False, id="one rank, bf16, packed"),
    pytest.param(2, "precision=bf16", "pack=true", False, id="two ranks, bf16, packed"),
    pytest.param(2, "precision=fp32", "pack=false", True, id="two ranks, fp32, padded, with dropout"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "precision", "pack", "drops"), CASES)
def test_bits_are_those_of_none(
    size: int,
    precision: str,
    pack: str,
    drops: bool,
    parts: Path,
    dropping: Path,
    dataset: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    """Losses, gradient norms and weights, with the tower training too, norms in fp32 and two micro-batches a step."""
    found = {}
    for mode in ("none", *EXACT):
        cfg = make_config(
            dropping if drops else parts, dataset, tmp_path / mode, f"recompute={mode}", precision, pack, TOWER,
            "sharding=zero3", "micro_batch_size=3", "max_steps=2", "optim.warmup_ratio=0", *EXPORTED,
        )  # fmt: skip
        found[mode] = trained(cfg, size, pools)
    for mode in EXACT:
        assert found[mode].losses == found["none"].losses, mode
        assert found[mode].grad_norms == found["none"].grad_norms, mode
        weights = found["none"].weights
        assert all(torch.equal(found[mode].weights[n], weights[n]) for n in weights), mode
