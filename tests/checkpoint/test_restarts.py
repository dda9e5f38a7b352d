"""What a run wishes to begin from is for its start: ranks that are started again continue what they saved."""

import time
from pathlib import Path

import pytest
from harness import single_world
from saves import save_steps
from small import Configure

from llava_fsdp.checkpoint.retention import set_aside_later
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files import status_file
from llava_fsdp.runtime.files.run_dir import FOLDER, mark_begun
from llava_fsdp.train.checkpoints.resume import choose_checkpoint


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")


def test_starting_over_is_done_once(launch: None, configure: Configure, tmp_path: Path) -> None:
    save_steps(single_world(), tmp_path / FOLDER, [8])
    cfg = configure("checkpoint.resume=never")
    assert choose_checkpoint(cfg) is None and (tmp_path / "old-1" / FOLDER / "step-000008").is_dir()
    assert choose_checkpoint(cfg) is None, "killed before its first checkpoint"
    save_steps(single_world(), tmp_path / FOLDER, [2])
    found = choose_checkpoint(cfg)
    assert found is not None and found.folder == tmp_path / FOLDER / "step-000002"
    assert [path.name for path in tmp_path.glob("old-*")] == ["old-1"]


def test_another_launch_starts_over(
    launch: None, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure("checkpoint.resume=never")
    assert choose_checkpoint(cfg) is None
    save_steps(single_world(), tmp_path / FOLDER, [2])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run8")
    assert choose_checkpoint(cfg) is None and (tmp_path / "old-1" / FOLDER / "step-000002").is_dir()


@pytest.mark.parametrize(("name", "goes_on"), [("run7", True), ("none", False)])
def test_a_requeued_job_goes_on_with_what_it_began(
    name: str, goes_on: bool, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its own name, by a torchrun that is younger than what was begun. Without a name it is another run."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    cfg = configure("checkpoint.resume=never")
    assert choose_checkpoint(cfg) is None
    save_steps(single_world(), tmp_path / FOLDER, [2])
    monkeypatch.setattr(status_file, "start_time", lambda _: time.time() + 1)
    found = choose_checkpoint(cfg)
    assert (found is not None) == goes_on and (tmp_path / "old-1").exists() != goes_on


@pytest.mark.parametrize("strict", [False, True])
def test_a_damaged_newest_checkpoint_is_passed_over_unless_told_otherwise(
    strict: bool, configure: Configure, tmp_path: Path
) -> None:
    save_steps(single_world(), tmp_path / FOLDER, [2, 4])
    (tmp_path / FOLDER / "step-000004" / "state.json").unlink()
    cfg = configure(f"checkpoint.strict={str(strict).lower()}")
    if strict:
        with pytest.raises(CheckpointError):
            choose_checkpoint(cfg)
    else:
        found = choose_checkpoint(cfg)
        assert found is not None and found.folder == tmp_path / FOLDER / "step-000002"


def test_a_branch_begins_once(launch: None, configure: Configure, tmp_path: Path) -> None:
    """From another run's step 4: what is older here is of another branch, and not continued from."""
    (tmp_path / "out").mkdir()
    save_steps(single_world(), tmp_path / "other", [4])
    save_steps(single_world(), tmp_path / "out" / FOLDER, [2, 4, 6])
    wish = tmp_path / "other" / "step-000004"
    cfg = configure(f"checkpoint.resume={wish}", to="out")

    def chosen() -> Path:
        found = choose_checkpoint(cfg)
        assert found is not None
        return found.folder

    assert chosen() == wish
    set_aside_later(tmp_path / "out", wish, 4)
    mark_begun(tmp_path / "out", str(wish), 4)
    assert chosen() == wish, "nothing has been saved since"
    save_steps(single_world(), tmp_path / "out" / FOLDER, [5])
    assert chosen() == tmp_path / "out" / FOLDER / "step-000005"


def test_every_later_checkpoint_is_of_the_branch_that_is_left(tmp_path: Path) -> None:
    """The next step's too; and `latest` names the checkpoint that the run goes back to."""
    folders = [tmp_path / FOLDER / f"step-00000{step}" for step in (2, 4, 5, 9)]
    for folder in folders:
        folder.mkdir(parents=True)
    set_aside_later(tmp_path, folders[1], 4)
    assert [folder.exists() for folder in folders] == [True, True, False, False]
    assert sorted(path.name for path in (tmp_path / "old-1" / FOLDER).iterdir()) == ["step-000005", "step-000009"]
    assert (tmp_path / FOLDER / "latest").read_text() == "step-000004\n"
