"""Trainings whose folder goes away under them, in one process and whole."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small import make_config

from llava_fsdp.checkpoint.commit import Committer
from llava_fsdp.checkpoint.verify import verify
from llava_fsdp.config import Config
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, FolderLost
from llava_fsdp.runtime.files.run_dir import list_checkpoints
from llava_fsdp.runtime.files.status_file import read_status
from llava_fsdp.train import final_export
from llava_fsdp.train import main as train
from llava_fsdp.train.events.save_and_stop import RunController


def configured(parts: Path, dataset: Path, folder: Path, *words: str) -> Config:
    return make_config(parts, dataset, folder, "max_steps=4", "checkpoint.every=2", *words)


def after(step: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something as soon as a step is over, before anything of it is written."""
    kept, done = RunController.folder_change, []

    def folder_change(self: RunController) -> object:
        if self.state.step == step and not done:
            done.append(step)
            action()
        return kept(self)

    monkeypatch.setattr(RunController, "folder_change", folder_change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "step", "words"),
    [("deleted", 1, ()), ("moved", 4, ()), ("deleted", 4, ()), ("moved", 2, ("checkpoint.asynchronous=false",))],
)
def test_the_state_of_a_run_outlives_its_folder(
    how: str, step: int, words: tuple[str, ...], parts: Path, dataset: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Saved into a new folder of the name, which the same command continues, to the same weights."""
    folder = tmp_path / "out"
    cfg = configured(parts, dataset, folder, *words)
    gone = {"deleted": lambda: shutil.rmtree(folder), "moved": lambda: folder.rename(tmp_path / "moved")}[how]
    after(step, gone, monkeypatch)
    with pytest.raises(FolderLost, match=f"deleted or moved away.*step {step} has been saved") as caught:
        train.train(cfg)
    assert caught.value.exit_code == 3 and caught.value.may_be_recorded
    assert [p.name for p in list_checkpoints(folder / "checkpoints")] == [f"step-{step:06d}"]
    assert (read_status(folder) or {})["status"] == "running" and (folder / ".lock").is_file()
    monkeypatch.undo()
    train.train(cfg)
    whole = replace(cfg, output_dir=str(tmp_path / "whole"))
    train.train(whole)
    found = [verify(Path(own.output_dir) / "checkpoints" / "step-000004").manifest for own in (cfg, whole)]
    ranks = [{name: own for name, own in each.files.items() if name.startswith("rank-")} for each in found]
    assert ranks[0] == ranks[1]


def test_nothing_is_written_into_another_folder(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"

    def exchange() -> None:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("another run's\n")

    after(1, exchange, monkeypatch)
    with pytest.raises(FolderLost, match="another folder") as caught:
        train.train(configured(parts, dataset, folder))
    assert caught.value.exit_code == 3 and not caught.value.may_be_recorded
    assert os.listdir(folder) == ["metrics.jsonl"] and (folder / "metrics.jsonl").read_text() == "another run's\n"


@pytest.mark.slow
def test_another_recipe_is_refused_before_the_folder_is_touched(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a finished run nothing changes, and nothing is loaded; what may change still may."""
    folder = tmp_path / "out"
    cfg = configured(parts, dataset, folder)
    train.train(cfg)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(train, "distributed", lambda *_: pytest.fail("nothing is begun"))
    other = configured(parts, dataset, folder, "seed=7", "optim.lr=0.5")
    with pytest.raises(ConfigError, match=r"seed: 42 -> 7") as caught:
        train.train(other)
    assert caught.value.exit_code == 2 and set(caught.value.culprit["keys"]) == {"seed", "optim.lr"}
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    monkeypatch.undo()
    words = "max_steps=5", "activation_checkpointing=none", "data.workers=0", "checkpoint.every=3"
    train.train(make_config(parts, dataset, folder, *words))
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("what", ["folder", "checkpoints", "checkpoint", "file", "lock"])
def test_what_is_deleted_while_a_checkpoint_is_written(
    what: str, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error of its class where the run cannot go on, and none where it can."""
    folder = tmp_path / "out"
    paths = {
        "folder": folder, "checkpoints": folder / "checkpoints", "checkpoint": folder / "checkpoints/step-000004.tmp",
        "file": folder / "checkpoints/step-000004.tmp/rank-00000.safetensors", "lock": folder / ".lock",
    }  # fmt: skip
    complete, done = Committer.complete, []

    def hurt(self: Committer, staged: Path, *rest: object) -> None:
        if staged.name == "step-000004.tmp" and not done:
            done.append(staged)
            shutil.rmtree(paths[what]) if paths[what].is_dir() else paths[what].unlink()
        complete(self, staged, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "complete", hurt)
    cfg = configured(parts, dataset, folder)
    if what == "lock":
        train.train(cfg)
    elif what == "file":  # written and forced to the disk already; whoever reads it finds out
        train.train(cfg)
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is missing"):
            verify(folder / "checkpoints" / "step-000004")
    else:
        with pytest.raises(FolderLost if what == "folder" else CheckpointError) as caught:
            train.train(cfg)
        assert caught.value.exit_code == 3
    monkeypatch.undo()
    train.train(cfg)
    assert verify(folder / "checkpoints" / "step-000004").facts["step"] == 4


@pytest.mark.slow
def test_a_folder_that_goes_during_the_export(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    export = final_export.export

    def late(*args: object) -> Path:
        found = export(*args)  # type: ignore[arg-type]
        shutil.rmtree(folder)
        return found

    monkeypatch.setattr(final_export, "export", late)
    with pytest.raises(FolderLost) as caught:
        train.train(configured(parts, dataset, folder, "export.enabled=true", "export.verify=false"))
    assert caught.value.exit_code == 3
