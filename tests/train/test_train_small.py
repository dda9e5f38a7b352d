"""examples/train_small.py trains as `llava-fsdp train` does with the same recipe."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TORCHRUN, command
from harness import RankPool
from machine import ROOT
from reference import EXPORTED, outcome, run_ranks
from safetensors.torch import load_file
from small import Configure

from llava_fsdp.checkpoint.verify import Checkpoint, newest_alone
from llava_fsdp.config import Config
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.train import main as train

PROGRAM = ROOT / "examples" / "train_small.py"
SPEC = importlib.util.spec_from_file_location("train_small", PROGRAM)
assert SPEC is not None and SPEC.loader is not None
small: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(small)
ROWS = "pack=true", "tokens_per_micro_batch=256", "max_steps=4"  # an epoch, whose last step has fewer samples


def small_ranks(world: World, cfg: Config) -> list[float]:
    return small.train(cfg)


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def newest(run: Path) -> Checkpoint:
    found = newest_alone(run / FOLDER)
    assert found is not None
    return found


def saved(run: Path) -> dict[str, torch.Tensor]:
    """What each rank has written of weights and moments, by file and name."""
    files = newest(run).folder.glob("*.safetensors")
    return {f"{path.name} {name}": tensor for path in files for name, tensor in load_file(path).items()}


def facts(run: Path) -> dict[str, Any]:
    """All else in the checkpoint, but for what differs between any two runs."""
    found = {key: value for key, value in newest(run).facts.items() if key != "run"}
    return found | {"config": {**found["config"], "output_dir": ""}}


def check_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys() and [n for n in wanted if not torch.equal(found[n], wanted[n])] == [] != wanted


def test_one_rank_has_the_losses_and_the_checkpoint_of_a_training_to_the_bit(configure: Configure) -> None:
    ours, theirs = (configure(*ROWS, *EXPORTED[1:], to=name) for name in ("small", "product"))
    losses = small.train(ours)
    train.train(theirs)
    assert losses == losses_of(Path(theirs.output_dir)) and len(set(losses)) == 4
    check_same(saved(Path(ours.output_dir)), saved(Path(theirs.output_dir)))
    assert facts(Path(ours.output_dir)) == facts(Path(theirs.output_dir))


@pytest.mark.slow
def test_one_rank_exports_the_weights_that_a_training_exports(configure: Configure) -> None:
    ours, theirs = (configure(*ROWS, *EXPORTED[:2], to=name) for name in ("small", "product"))
    small.train(ours)
    train.train(theirs)
    check_same(*(load_file(Path(cfg.output_dir) / "export" / "model.safetensors") for cfg in (ours, theirs)))


@pytest.mark.slow
def test_a_training_continues_from_its_checkpoint(configure: Configure) -> None:
    ours, theirs = (configure(*ROWS, *EXPORTED[1:], to=name) for name in ("small", "product"))
    small.train(ours)
    train.train(theirs)
    for cfg in (ours, theirs):
        cfg.max_steps = 6
        train.train(cfg)
    assert losses_of(Path(ours.output_dir)) == losses_of(Path(theirs.output_dir))[4:]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero0", "zero1", "zero2", "zero3"])
def test_two_ranks_have_the_losses_and_the_checkpoint_of_a_training_to_the_bit(
    sharding: str, configure: Configure, pools: dict[int, RankPool]
) -> None:
    words = *ROWS, *EXPORTED[1:], f"sharding={sharding}"
    ours, theirs = (configure(*words, to=name) for name in ("small", "product"))
    losses, others = pools[2].run(small_ranks, ours)
    pools[2].run(run_ranks, theirs)
    assert losses == others == losses_of(Path(theirs.output_dir))
    check_same(saved(Path(ours.output_dir)), saved(Path(theirs.output_dir)))
    assert facts(Path(ours.output_dir)) == facts(Path(theirs.output_dir))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("records", ["generated", "own"])
def test_the_program_on_two_ranks_does_what_the_command_does(records: str, dataset: Path, tmp_path: Path) -> None:
    """With the generated dataset, and with records of one's own."""
    flags = ["--steps", "3", "--output", "small", "--sharding", "zero2"]
    if records == "own":
        flags += ["--records", str(dataset / "mixed.json"), "--images", str(dataset / "images")]
    done = subprocess.run(
        [*TORCHRUN, "2", str(PROGRAM), *flags], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = re.findall(r"^step +(\d+)  loss ([\d.]+)", done.stdout, re.MULTILINE)
    words = small.words_of(small.parser().parse_args(flags))
    product = command("llava_fsdp.train", "stage=finetune", *words, "output_dir=product", cwd=tmp_path, timeout=300)
    assert product.returncode == 0, product.stderr[-3000:]
    wanted = outcome(tmp_path / "product")
    assert printed == [(str(step), f"{loss:.4f}") for step, loss in enumerate(wanted.losses, start=1)]
    check_same(saved(tmp_path / "small"), saved(tmp_path / "product"))
    check_same(*(load_file(tmp_path / name / "export" / "model.safetensors") for name in ("small", "product")))


def test_the_program_can_be_read_in_one_go_and_has_five_flags() -> None:
    assert len(PROGRAM.read_text().splitlines()) <= 300
    assert len(vars(small.parser().parse_args([]))) == 5
