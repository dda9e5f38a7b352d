"""A run continues where it was, as itself, on any number of ranks."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from reference import EXPORTED, TOLERANCE, check_continued, outcome, run_ranks
from safetensors.torch import load_file
from saves import interrupted
from small import Configure, make_config

from llava_fsdp.checkpoint.snapshot import Snapshot
from llava_fsdp.config import Config
from llava_fsdp.config.paths import paths_read
from llava_fsdp.data.batching.sampler import ComputedShuffle
from llava_fsdp.model.weights.weight_names import ours
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.mesh import Meshes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files.run_dir import list_checkpoints
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints.resume import requested_resume, resume
from llava_fsdp.train.setup import preflight

OFTEN = ["max_steps=6", "checkpoint.every=2", "checkpoint.keep=9", *EXPORTED]


@pytest.fixture(scope="module")
def whole_run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on one rank, with a checkpoint after every second; an epoch is four steps."""
    folder = tmp_path_factory.mktemp("whole")

    class NotedWatchdog(Watchdog):
        def __init__(self, *given: Any):
            super().__init__(*given)
            NOTED["watchdog"] = self

    def shorten(meshes: Meshes, seconds: int) -> None:
        NOTED["shortened"].append(seconds)

    cfg = NOTED["cfg"] = make_config(parts, dataset, folder, *OFTEN)
    calls, NOTED["shortened"] = [], []
    NOTED["calls"] = calls
    with pytest.MonkeyPatch.context() as patch:
        for name in CHECKS:
            check = getattr(train, name)
            patch.setattr(train, name, lambda *given, name=name, check=check: calls.append(name) or check(*given))
        patch.setattr(train, "Watchdog", NotedWatchdog)
        patch.setattr(train.ranks, "set_timeout", shorten)
        train.train(cfg)
    return folder


CHECKS = ("check_run", "check_same_software", "check_same_settings", "check_replicas")
NOTED: dict[str, Any] = {}
"""What the whole run has made and told."""


def test_steps_after_the_first_one_have_a_shorter_timeout(whole_run: Path) -> None:
    """In the first one weights are loaded and kernels compiled."""
    comm = NOTED["cfg"].comm
    assert comm.timeout != comm.init_timeout
    assert NOTED["shortened"] == [comm.timeout] and NOTED["watchdog"].limit == comm.timeout


def test_ranks_are_compared_before_the_first_step(whole_run: Path) -> None:
    """Their software and settings before a model is built, and their weights when these are loaded."""
    assert NOTED["calls"] == list(CHECKS)


def test_what_a_private_run_writes_is_read_by_its_user_alone(whole_run: Path) -> None:
    assert NOTED["cfg"].private
    for name in ("checkpoints", "export", "metrics.jsonl", "config.yaml"):
        for path in (whole_run / name, *(whole_run / name).rglob("*")):
            assert not path.stat().st_mode & 0o077, path


def test_a_checkpoint_of_the_own_folder_may_be_named_without_its_path(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the current folder has one of this name, it is that one; a name that is nowhere stays as it is."""
    monkeypatch.chdir(tmp_path)
    cfg = configure("checkpoint.resume=step-000002", to=str(tmp_path / "run"))
    assert requested_resume(cfg) == "step-000002"
    own = tmp_path / "run" / "checkpoints" / "step-000002"
    own.mkdir(parents=True)
    assert requested_resume(cfg) == str(own) and "checkpoint.resume" not in paths_read(cfg)
    (tmp_path / "step-000002").mkdir()
    assert requested_resume(cfg) == "step-000002" and "checkpoint.resume" in paths_read(cfg)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("step", "size", "overrides"),
    [
        (4, 2, ["sharding=zero3"]),
        pytest.param(2, 1, [], marks=pytest.mark.slow),
        pytest.param(
            2, 4, ["sharding=zero2", "micro_batch_size=2", "activation_checkpointing=full"], marks=pytest.mark.slow
        ),
        pytest.param(4, 4, ["sharding=hybrid", "sharding.shard_size=2"], marks=pytest.mark.slow),
    ],
)
def test_resumes_at_the_next_sample(
    step: int, size: int, overrides: list[str], whole_run: Path, configure: Configure, pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Step 2 lies within an epoch, step 4 at its end. One rank continues to the bit."""
    cfg = configure(*OFTEN, *overrides, to=interrupted(whole_run, tmp_path, step))
    if size == 1:
        train.train(cfg)
    else:
        pools[size].run(run_ranks, cfg)
    expected, got = outcome(whole_run), outcome(tmp_path)
    assert [json.loads(r)["step"] for r in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    check_continued(size, got, expected, cfg)


@pytest.mark.slow
def test_bf16_masters_resume_to_the_bit(configure: Configure, tmp_path: Path) -> None:
    """The working copies are made anew from the masters, which hold more than bf16."""
    values = [*OFTEN, "max_steps=3", "precision=bf16"]
    train.train(configure(*values, to="whole"))
    folder = interrupted(tmp_path / "whole", tmp_path / "again", 2)
    train.train(configure(*values, to=folder))
    expected, got = outcome(tmp_path / "whole"), outcome(folder)
    assert got.losses == expected.losses
    assert all(torch.equal(got.weights[n], expected.weights[n]) for n in expected.weights)


def test_finished_run_does_nothing(whole_run: Path, configure: Configure, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole_run, folder)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != "config.yaml"}
    train.train(configure(*OFTEN, to=folder))
    for path, changed in before.items():
        if path.name not in (
            "metrics.jsonl",
            "run_status.json",
            ".lock",
            ".stepped",
            "rank-0.json",
            "report.html",
        ):  # cut back to the step it was at; says what runs
            assert path.stat().st_mtime_ns == changed, path
    assert (folder / "metrics.jsonl").read_text() == (whole_run / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_more_steps_continue(whole_run: Path, configure: Configure, tmp_path: Path) -> None:
    shutil.copytree(whole_run, tmp_path / "copy")
    train.train(configure(*OFTEN, "max_steps=7", to="copy"))
    got = outcome(tmp_path / "copy")
    assert len(got.losses) == 7 and got.losses[:6] == outcome(whole_run).losses
    assert json.loads((tmp_path / "copy" / "export" / "llava_fsdp.json").read_text())["step"] == 7


CHANGES = {
    "seed": "seed=7",
    "global_batch_size": "global_batch_size=6",
    "optim.lr": "optim.lr=1e-3",
    "optim.schedule": "optim.schedule=linear",
    "loss.normalize": "loss.normalize=micro_batch pack=false",
    "model.train": "model.train=[projector]",
    "data.max_length": "data.max_length=100",
    "data.template": "data.template=chatml",
    "sampler.name": "sampler=computed_shuffle",
}


@pytest.mark.parametrize("key", CHANGES)
def test_another_recipe_is_refused(key: str, whole_run: Path, configure: Configure, tmp_path: Path) -> None:
    cfg = configure(*OFTEN, *CHANGES[key].split(), to=interrupted(whole_run, tmp_path, 4))
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as caught:
        train.train(cfg)
    assert "checkpoint.resume=never" in str(caught.value) and "output_dir" in str(caught.value)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6, "a refused run must not touch anything"


@pytest.mark.ranks
@pytest.mark.slow
def test_the_computed_order_resumes_in_its_own_version_alone(
    configure: Configure, pools: dict[int, RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another number of ranks, too."""
    values = [*OFTEN, "sampler=computed_shuffle", "max_steps=4"]
    train.train(configure(*values, to="whole"))
    cfg = configure(*values, "sharding=zero3", to=interrupted(tmp_path / "whole", tmp_path / "again", 2))
    pools[2].run(run_ranks, cfg)
    expected, got = outcome(tmp_path / "whole"), outcome(tmp_path / "again")
    assert len(got.losses) == 4 and got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    monkeypatch.setattr(ComputedShuffle, "shape", "computed_shuffle, version 0")
    older = configure(*values, to=interrupted(tmp_path / "whole", tmp_path / "older", 2))
    with pytest.raises(CheckpointError, match="sampler: it gives another order"):
        train.train(older)


@pytest.mark.slow
def test_another_dataset_is_refused_and_a_moved_one_is_not(
    whole_run: Path, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    records = json.loads((dataset / "mixed.json").read_text())
    folder = interrupted(whole_run, tmp_path / "run", 4)
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps(records[:-1]))
    with pytest.raises(CheckpointError, match=r"data\.path: a file of records was added"):
        train.train(make_config(parts, dataset, folder, *OFTEN, f"data.path={moved}"))
    shutil.copyfile(dataset / "mixed.json", moved)
    train.train(make_config(parts, dataset, folder, *OFTEN, f"data.path={moved}"))
    assert outcome(folder).losses == outcome(whole_run).losses


@pytest.mark.slow
def test_another_model_is_refused(
    whole_run: Path, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights are in no checkpoint, so another vision tower of the same shape must be noticed."""
    first = tmp_path / "first"
    values = ["max_steps=2", *EXPORTED]
    train.train(configure(*values, stage="pretrain", to=first))
    shutil.rmtree(first / "export")
    other = ["model.random_weights=false", f"model.checkpoint={whole_run / 'export'}", "max_steps=3"]
    cfg = configure(*values, *other, stage="pretrain", to=first)
    with pytest.raises(ConfigError, match=r"model\.random_weights: True -> False"):
        train.train(cfg)
    monkeypatch.setattr(preflight, "check_settings", lambda _: None)  # as of a folder that was filled with another
    with pytest.raises(CheckpointError, match="the model is another one"):
        train.train(cfg)


def test_another_tokenizer_is_refused(whole_run: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Two words swapped: the same shapes, other ids."""
    shutil.copytree(parts, tmp_path / "parts")
    path = tmp_path / "parts" / "language" / "tokenizer.json"
    frozen = json.loads(path.read_text())
    vocabulary = frozen["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(frozen))
    folder = interrupted(whole_run, tmp_path / "run", 4)
    with pytest.raises(CheckpointError, match="the tokenizer or the preprocessor is another one"):
        train.train(make_config(tmp_path / "parts", dataset, folder, *OFTEN))


def resumed_step(world: World, cfg: Config, older: Path) -> int:
    """Where this rank continues, when every rank but the first sees an older checkpoint as the newest."""
    if world.rank:
        cfg.checkpoint.resume = str(older)
    state = train.build_state(cfg, Parallelism.of(cfg, world))
    assert resume(state, cfg)
    return state.step


@pytest.mark.ranks
def test_rank_0_chooses_the_checkpoint(
    whole_run: Path, configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Ranks that each looked for themselves would train different steps together."""
    cfg = configure(*OFTEN, to=interrupted(whole_run, tmp_path / "run", 4))
    older = whole_run / "checkpoints" / "step-000002"
    assert pools[2].run(resumed_step, cfg, older) == [4, 4]


def test_checkpoint_that_is_none(configure: Configure, tmp_path: Path) -> None:
    cfg = configure(f"checkpoint.resume={tmp_path / 'nothing'}")
    with pytest.raises(CheckpointError, match=r"nothing is not a checkpoint; give auto, never, or a step-NNNNNN"):
        train.train(cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["precision=bf16"], marks=pytest.mark.slow),
        ["precision=bf16_pure", "precision.moment_dtype=int8"],
    ],
)
def test_a_save_beside_the_steps_is_of_its_step(
    values: list[str], configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the copy is made: the update waits for it."""
    values = ["max_steps=2", "checkpoint.every=1", "export.enabled=false", *values]
    train.train(configure(*values, "checkpoint.asynchronous=false", to="waits"))
    fill = Snapshot.fill

    def late(snapshot: Snapshot, tensors: dict[str, torch.Tensor]) -> None:
        time.sleep(0.3)
        fill(snapshot, tensors)

    monkeypatch.setattr(Snapshot, "fill", late)
    train.train(configure(*values, to="beside"))
    for step in (1, 2):
        folders = [tmp_path / name / "checkpoints" / f"step-{step:06d}" for name in ("waits", "beside")]
        one, other = ((folder / "rank-00000.safetensors").read_bytes() for folder in folders)
        assert one == other, step


def test_never_starts_over_and_loses_nothing(whole_run: Path, configure: Configure, tmp_path: Path) -> None:
    shutil.copytree(whole_run, tmp_path / "copy")
    cfg = configure(*OFTEN, "checkpoint.resume=never", "seed=9", to=tmp_path / "copy")
    train.train(cfg)
    assert outcome(tmp_path / "copy").losses != outcome(whole_run).losses
    old = tmp_path / "copy" / "old-1"
    kept = [p.name for p in list_checkpoints(old / "checkpoints")]
    assert kept == ["step-000002", "step-000004", "step-000006"]
    assert (old / "metrics.jsonl").read_text() == (whole_run / "metrics.jsonl").read_text()
    before, after = outcome(whole_run).weights, outcome(tmp_path / "copy").weights
    assert all(torch.equal(t, before[n]) for n, t in load_export(old).items()), "the old export is kept"
    assert not all(torch.equal(after[n], before[n]) for n in before), "and is not taken for the new one's"


def load_export(folder: Path) -> dict[str, torch.Tensor]:
    return {ours(n): t for n, t in load_file(folder / "export" / "model.safetensors").items()}


@pytest.mark.slow
def test_going_back_starts_a_branch(whole_run: Path, configure: Configure, tmp_path: Path) -> None:
    """From an earlier checkpoint by name: the later ones are another branch, and never continued from again."""
    folder = tmp_path / "copy"
    shutil.copytree(whole_run, folder)
    back = f"checkpoint.resume={whole_run / 'checkpoints' / 'step-000002'}"
    train.train(configure(*OFTEN, "checkpoint.every=1", "max_steps=4", back, to=folder))
    found = [p.name for p in list_checkpoints(folder / "checkpoints")]
    assert found == ["step-000002", "step-000003", "step-000004"]
    kept = list_checkpoints(folder / "old-1" / "checkpoints")
    assert [p.name for p in kept] == ["step-000004", "step-000006"]
    assert len(outcome(folder).losses) == 4
