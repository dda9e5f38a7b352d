"""A run continues after what it began with has been deleted, as far as its checkpoint has it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import trained_weights
from safetensors.torch import load_file
from saves import interrupted
from small import conversion, make_config

from llava_fsdp.chat.open_model import open_model
from llava_fsdp.config import Config
from llava_fsdp.doctor.config_checks import judge_paths
from llava_fsdp.doctor.findings import Level
from llava_fsdp.export.main import export
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.train import main as train

EXPORTED = ("export.enabled=true", "export.dtype=fp32", "export.verify=false")


def made(parts: Path, dataset: Path, run: Path) -> None:
    train.train(make_config(parts, dataset, run, "max_steps=1", *EXPORTED, stage="pretrain"))


@pytest.fixture
def projector(request: pytest.FixtureRequest, parts: Path, dataset: Path, tmp_path: Path) -> tuple[str, Path]:
    """The value of `model.projector`, and what it is read from."""
    run = tmp_path / "pretrain"
    made(parts, dataset, run)
    if request.param == "auto":
        return "auto", run
    if request.param == "run":
        shutil.move(run, tmp_path / "first")
        return str(tmp_path / "first"), tmp_path / "first"
    file = export(conversion(run, tmp_path / "alone", "format=projector")) / "mm_projector.bin"
    shutil.rmtree(run)
    return str(file), file


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("projector", ["auto", "run", "file"], indirect=True)
def test_a_second_stage_continues_without_the_first(
    projector: tuple[str, Path], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Interrupted, continued without it, interrupted and continued again: weights and export are those of a run that
    was never interrupted, to the bit."""
    given, source = projector
    keys = f"model.projector={given}", "checkpoint.every=1", "checkpoint.keep=9", "max_steps=3", *EXPORTED

    def config(name: str) -> Config:
        return make_config(parts, dataset, tmp_path / name, *keys)

    train.train(config("finetune"))
    remove(source)
    for name, before, step in (("again", "finetune", 1), ("third", "again", 2)):
        cfg = config(name)
        (tmp_path / name).mkdir()
        interrupted(tmp_path / before, tmp_path / name, step)
        assert all(finding.level is not Level.FAIL for finding in judge_paths(cfg))
        train.train(cfg)
    whole, own = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("finetune", "third"))
    assert whole.keys() == own.keys() and all(torch.equal(whole[name], own[name]) for name in whole)
    shutil.rmtree(tmp_path / "third" / "export")
    assert open_model(str(tmp_path / "third"), "v1").sources


def test_a_frozen_projector_still_needs_its_source(parts: Path, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "first"
    made(parts, dataset, run)
    keys = f"model.projector={run}", "checkpoint.every=1", "max_steps=2", "model.train=[language]"
    cfg = make_config(parts, dataset, tmp_path / "run", *keys)
    train.train(cfg)
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match=r"model\.projector="):
        train.train(cfg)


@pytest.mark.slow
def test_a_whole_model_that_is_gone_is_named(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Moved, it may be given anew."""
    first = tmp_path / "first"
    train.train(make_config(parts, dataset, first, "max_steps=1", *EXPORTED))
    keys = "checkpoint.every=1", "max_steps=2"
    cfg = make_config(parts, dataset, tmp_path / "run", f"model.checkpoint={first}", *keys)
    train.train(replace(cfg, max_steps=1))
    shutil.move(first, tmp_path / "moved")
    with pytest.raises(LlavaFsdpError, match=rf"model\.checkpoint={first} is missing, .*model\.checkpoint=PATH"):
        train.train(cfg)
    train.train(make_config(parts, dataset, tmp_path / "run", f"model.checkpoint={tmp_path / 'moved'}", *keys))
    assert trained_weights(tmp_path / "run")


@pytest.mark.slow
def test_adapters_continue_without_the_folder_of_the_adapter_that_they_began_with(
    parts: Path, dataset: Path, tmp_path: Path
) -> None:
    lora = ["model.lora.enabled=true", "model.lora.r=4", "checkpoint.every=1", "checkpoint.keep=9"]
    train.train(make_config(parts, dataset, tmp_path / "first", *lora, "max_steps=2", "optim.warmup_ratio=0"))
    keys = [*lora, f"model.lora.checkpoint={tmp_path / 'first' / 'checkpoints' / 'step-000002'}", "max_steps=3"]
    train.train(make_config(parts, dataset, tmp_path / "whole", *keys))
    cfg = make_config(parts, dataset, tmp_path / "again", *keys)
    (tmp_path / "again").mkdir()
    interrupted(tmp_path / "whole", tmp_path / "again", 1)
    shutil.rmtree(tmp_path / "first")
    train.train(cfg)
    whole, own = (trained_weights(tmp_path / name) for name in ("whole", "again"))
    assert all(torch.equal(whole[name], own[name]) for name in whole)
