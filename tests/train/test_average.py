"""An exponential moving average of the weights: its values on any number of ranks, after a resume, and its export."""

import shutil
from pathlib import Path

import pytest
import torch
from harness import RankPool, single_world
from reference import TOLERANCE, difference, train_on, trained_weights
from safetensors.torch import load_file
from small import Configure, command_config, make_config
from steps import begin, held_masters

from llava_fsdp.checkpoint.reader import AVERAGE_PREFIX, saved_weights
from llava_fsdp.checkpoint.verify import newest_alone
from llava_fsdp.config import Config, ConversionConfig
from llava_fsdp.export.main import export
from llava_fsdp.model.weights.weight_names import ours
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files.provenance import read_notes
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step

RISES = "optim.ema=0.75", "max_steps=6", "global_batch_size=8", "checkpoint.every=3", "optim.lr=1e-2"
EXPORTED = "export.enabled=true", "export.dtype=fp32", "export.verify=false", "export.which=average"
EVERY_ROW = 10**6


def plain_average(cfg: Config) -> dict[str, torch.Tensor]:
    """Of the weights after each step, by a loop of its own."""
    state = begin(single_world(), cfg)
    average = held_masters(state)
    for number in range(6):
        train_step(state, state.loader.agree(state.loader.steps.prepare(number)), cfg, 0.0)
        average = {name: 0.75 * average[name] + 0.25 * weight for name, weight in held_masters(state).items()}
    return average


def saved_average(run: Path) -> dict[str, torch.Tensor]:
    newest = newest_alone(run / FOLDER)
    assert newest is not None
    return {name: saved.rows(0, saved.shape[0]) for name, saved in saved_weights(newest, AVERAGE_PREFIX).items()}


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {ours(name): values for name, values in load_file(folder / "model.safetensors").items()}


@pytest.fixture(scope="module")
def whole_run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train.train(make_config(parts, dataset, folder, *RISES, *EXPORTED))
    return folder


def test_it_is_that_of_a_plain_loop(whole_run: Path, configure: Configure) -> None:
    average = saved_average(whole_run)
    assert difference(average, plain_average(configure(*RISES)), EVERY_ROW) < 1e-6
    assert difference(average, trained_weights(whole_run), EVERY_ROW) > 100 * TOLERANCE


def test_it_is_exported_at_the_end_and_by_the_command(whole_run: Path, tmp_path: Path) -> None:
    average, last = saved_average(whole_run), trained_weights(whole_run)
    for source in (whole_run, whole_run / FOLDER / "step-000006"):
        words = f"source={source}", f"to={tmp_path / 'made'}", "verify=false", "dtype=fp32", "overwrite=true"
        for which, weights in (("average", average), ("last", last)):
            folder = export(command_config(ConversionConfig, "export", *words, f"which={which}"))
            found = exported(folder)
            assert all(torch.equal(found[name], values) for name, values in weights.items()), which
            assert read_notes(folder).get("which") == (None if which == "last" else which)
    with pytest.raises(ConfigError):
        words = f"source={tmp_path / 'made'}", f"to={tmp_path / 'again'}", "verify=false"
        export(command_config(ConversionConfig, "export", *words, "which=average"))
    found = exported(whole_run / "export")
    assert all(torch.equal(found[name], values) for name, values in average.items())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "strategy"), [(2, "zero3"), *(pytest.param(4, s, marks=pytest.mark.slow) for s in ("zero1", "hybrid"))]
)
def test_it_continues_on_other_ranks(
    size: int, strategy: str, whole_run: Path, configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / FOLDER / "step-000006")
    shutil.rmtree(tmp_path / "export")
    shard_size = 2 if strategy == "hybrid" else "null"
    train_on(size, configure(*RISES, *EXPORTED, f"sharding={strategy}", f"sharding.shard_size={shard_size}"), pools)
    assert difference(saved_average(tmp_path), saved_average(whole_run), EVERY_ROW) < TOLERANCE


def test_a_finished_run_exports_anew_if_other_weights_are_asked_for(
    whole_run: Path, configure: Configure, tmp_path: Path
) -> None:
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    train.train(configure(*RISES, *EXPORTED[:-1]))
    found = exported(tmp_path / "export")
    assert all(torch.equal(found[name], values) for name, values in trained_weights(tmp_path).items())


def test_bf16_weights_have_an_average_in_fp32(configure: Configure, tmp_path: Path) -> None:
    train.train(configure(*RISES, "precision=bf16_pure", "max_steps=3", "export.enabled=false"))
    average = saved_average(tmp_path)
    assert {values.dtype for values in average.values()} == {torch.float32}
    assert any(not torch.equal(values, values.bfloat16().float()) for values in average.values())


def test_what_cannot_be_averaged_or_exported_is_refused(configure: Configure, tmp_path: Path) -> None:
    for keys in (("export.which=average",), ("optim.ema=0.9", "offload=optimizer")):
        with pytest.raises(ConfigError):
            configure(*keys)
    train.train(configure("max_steps=1", "export.enabled=false", "checkpoint.every=1"))
    words = f"source={tmp_path}", f"to={tmp_path / 'made'}", "verify=false", "which=average"
    with pytest.raises(CheckpointError):
        export(command_config(ConversionConfig, "export", *words))
