"""What benchmarks/deepspeed_curves.py gives to DeepSpeed's side, and what it makes of the curves; without DeepSpeed."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from harness import CPU
from small import make_config

from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.setup.build_state import open_data

FOLDER = Path(__file__).parents[2] / "benchmarks"
IMAGE = 999


@pytest.fixture(scope="module")
def curves() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("deepspeed_curves")


@pytest.fixture(scope="module")
def starts() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("starts")


def test_transformers_is_given_the_very_samples(starts: ModuleType, parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path / "run", "pack=false", "micro_batch_size=2")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    ranks = [open_data(cfg, World(rank, 2, rank, 2, CPU), model) for rank in range(2)]
    without_image = 0
    for number in range(cfg.max_steps or 0):
        tokens = labels = 0
        for loader in ranks:
            step = loader.steps.prepare(number)
            for micro in step.micro_batches:
                given = starts.transformers_inputs(loader.to_device(micro), IMAGE, model.image_tokens)
                if not len(micro.images["tiles"]):
                    given = without_blank(given, micro.input_ids.shape, model.image_tokens)
                    without_image += 1
                flat = given["input_ids"].flatten()
                assert torch.equal((flat == IMAGE).nonzero().flatten(), micro.images["positions"])
                assert torch.equal(flat[flat != IMAGE], micro.input_ids.flatten()[flat != IMAGE])
                # transformers predicts a label one position before it
                shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].flatten()
                assert torch.equal((shifted != -100).nonzero().flatten(), micro.label_positions)
                assert torch.equal(shifted[micro.label_positions], micro.label_ids)
                lengths = given["attention_mask"].sum(1)
                assert all(row[:n].all() for row, n in zip(given["attention_mask"], lengths, strict=True))
                tokens, labels = tokens + int(lengths.sum()), labels + len(micro.label_ids)
        assert (tokens, labels) == (step.facts.tokens, step.facts.label_tokens)
    assert without_image  # else nothing was said about them


def without_blank(given: dict[str, torch.Tensor], shape: torch.Size, image_tokens: int) -> dict[str, torch.Tensor]:
    """The rows of the samples, after a look at the one that was added: a blank image and nothing else."""
    rows, length = shape
    shown = [IMAGE] * image_tokens
    assert given["input_ids"][rows:].tolist() == [shown + [0] * (given["input_ids"].shape[1] - image_tokens)]
    assert torch.equal(given["attention_mask"][rows], (given["input_ids"][rows] == IMAGE).long())
    assert (given["labels"][rows] == -100).all()
    assert given["pixel_values"].shape[0] == 1 and not given["pixel_values"].any()
    assert (given["labels"][:, length:] == -100).all() and not given["attention_mask"][:rows, length:].any()
    return {name: value[:rows, :length] for name, value in given.items()}


def test_curves_are_compared_step_by_step(curves: ModuleType) -> None:
    exact, other = [4.0, 2.0, 1.0, 0.5], [4.0, 2.5, 1.0, 0.25]
    assert curves.largest_difference(other, exact) == 0.5
    assert curves.distance(other, exact) == 0.75 / 4
    assert curves.steps_alike(other, exact, 0.1) == 1
    assert curves.steps_alike(exact, exact, 0.0) == 4
    with pytest.raises(ValueError):
        curves.distance(other, exact[:3])


def test_without_deepspeed_it_says_so(curves: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"DeepSpeed is not installed here: pip install -e '\.\[bench\]'"):
        curves.check_peer()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_training_that_fails_is_named(curves: ModuleType, tmp_path: Path) -> None:
    """One rank fails and the other waits for it: torchrun ends both, and the message has what was printed."""
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such op')\ntime.sleep(600)\n")
    with pytest.raises(SystemExit, match=r"(?s)no such op.*seed 0: deepspeed fp32: failed with exit code 1"):
        curves.launch([str(script)], "seed 0: deepspeed fp32", tmp_path / "log.txt", 120, 2)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_training_that_hangs_is_ended(curves: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(SystemExit, match=r"seed 0: deepspeed fp32: had not ended after 2 s \(--timeout\)"):
        curves.launch([str(script)], "seed 0: deepspeed fp32", tmp_path / "log.txt", 2, 2)
