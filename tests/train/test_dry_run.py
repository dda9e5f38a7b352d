"""A dry run holds what the ranks of a real run hold, moves what they move, and leaves nothing behind."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import single_world
from small import make_config
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.fsdp.parts import parts_of
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.memory.memory import bytes_per_rank
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.runtime.errors import ConfigError, OutOfMemory
from llava_fsdp.train import main as train
from llava_fsdp.train import run as entry
from llava_fsdp.train.setup import dry_run

RANKS = 8
ROWS = [
    ("hybrid2", 2, True), ("zero1", None, True), ("zero3", None, True), ("zero0", None, True), ("zero2", None, True),
    ("zero3", None, False), ("hybrid", 4, True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def ordinary_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set there stays set for the process, and this one has other tests to run."""
    monkeypatch.setattr(dry_run, "return_freed_memory", lambda: None)


def config(parts: Path, dataset: Path, folder: Path, *overrides: str, ranks: int = RANKS) -> Config:
    small = ["data.max_length=64", "micro_batch_size=1", "global_batch_size=32", "precision=bf16"]
    return make_config(parts, dataset, folder / "run", *small, f"dry_run={ranks}", "format=json", *overrides)


def reported(cfg: Config, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    train.train(cfg)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("row", "shard_size", "pack"), slow_after(0, ROWS))
def test_states_are_those_of_the_plan(
    row: str, shard_size: int | None, pack: bool, parts: Path, dataset: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    size = "null" if shard_size is None else shard_size
    cfg = config(parts, dataset, tmp_path, f"sharding={row}", f"sharding.shard_size={size}", f"pack={pack}")
    report = reported(cfg, capsys)
    model = build_llava(find_parts(cfg.model), cfg.model, DTYPES[cfg.precision.param_dtype])
    weights = list(weights_of(model, parts_of(model), cfg.precision).values())
    expected = bytes_per_rank(weights, cfg.sharding.strategy, cfg.precision, RANKS, shard_size or RANKS)
    held = (expected.parameters, expected.gradients, expected.optimizer)
    assert tuple(own["measured"] for own in report["bytes"].values()) == held
    assert tuple(own["planned"] for own in report["bytes"].values()) == held
    assert report["peak"]["peak_resident"] > sum(held)
    assert report["micro_batches"] == 2 and report["micro_batch"]["positions"] == 64
    gathered = cfg.sharding.strategy.value != "NO_SHARD"
    assert (report["collectives"]["all_gather"]["bytes"] > 0) == gathered
    assert not (tmp_path / "run").exists() and not dist.is_initialized()


@pytest.mark.parametrize(
    ("ranks", "precision", "offload"),
    [
        (RANKS, "bf16", "params"),
        pytest.param(1, "fp16", "none", marks=pytest.mark.slow),
        *(
            pytest.param(*own, marks=pytest.mark.slow)
            for own in ((1, "bf16", "params"), (1, "fp16", "params"), (RANKS, "fp16", "none"))
        ),
    ],
)
@pytest.mark.slow
def test_every_state_is_planned_wherever_it_lies(
    ranks: int, precision: str, offload: str, parts: Path, dataset: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One rank has working copies of its masters, unless FSDP wraps it to offload them; fp16 skips no step here."""
    keys = [f"precision={precision}", f"offload={offload}"]
    report = reported(config(parts, dataset, tmp_path, *keys, ranks=ranks), capsys)
    assert all(own["measured"] == own["planned"] > 0 for own in report["bytes"].values())
    assert any(own["calls"] for own in report["collectives"].values()) == (ranks > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), [pytest.param("nf4", RANKS, marks=pytest.mark.slow), ("int8", 1)])
def test_a_packed_base_is_planned(
    mode: str, ranks: int, parts: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits, and what they are unpacked with, are parameters of every rank."""
    found = {}
    for quantized in (mode, "none"):
        keys = ["stage=finetune_qlora", f"model.quantize.mode={quantized}", "sharding=zero3", "model.lora.r=2"]
        report = reported(config(parts, dataset, tmp_path, *keys, ranks=ranks), capsys)
        assert all(own["measured"] == own["planned"] > 0 for own in report["bytes"].values())
        found[quantized] = {name: own["measured"] for name, own in report["bytes"].items()}
    if ranks == 1:  # a shard of so small a model is less than what is whole everywhere
        assert found[mode]["parameters"] < found["none"]["parameters"]
    assert found[mode]["gradients"] == found["none"]["gradients"]


def test_out_of_memory_is_said_with_its_cures(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(dry_run, "train_step", full)
    with pytest.raises(OutOfMemory, match=r"out of GPU memory.*less is needed with"):
        train.train(config(parts, dataset, tmp_path, ranks=1))


@pytest.mark.slow
def test_the_table_is_printed_and_a_run_that_is_there_stays_as_it_is(
    parts: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run_status.json").write_text("as it was")
    keys = ["dry_run=2", "data.max_length=32", "micro_batch_size=1", f"output_dir={run}", "sharding=auto"]
    monkeypatch.setattr(sys, "argv", ["train", *keys])
    entry.run()
    said = capsys.readouterr().out
    assert "rank 0 of 2 simulated ranks" in said and "peak resident" in said
    assert "auto" not in said and any(strategy.value in said for strategy in SHARD_PLANS)
    assert [f.name for f in tmp_path.rglob("*")] == ["run", "run_status.json"]
    assert (run / "run_status.json").read_text() == "as it was"


@pytest.mark.parametrize("named", [False, True])
def test_files_of_offloaded_states_are_in_a_folder_that_goes_again(
    named: bool, parts: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Not in the folder of a run, and in the named folder if there is one. What is printed is as the format says."""
    (tmp_path / "disk").mkdir()
    seen: list[Config] = []

    def measure(cfg: Config, world: World) -> dict[str, int]:
        seen.append(cfg)
        assert Path(cfg.offload.folder or "").is_dir()
        return {"ranks": 8}

    monkeypatch.setattr(dry_run, "measure", measure)
    monkeypatch.setattr(dry_run, "warn_if_refused", lambda cfg: "")
    monkeypatch.setattr(dry_run, "distributed", lambda cfg: contextlib.nullcontext(single_world()))
    more = [f"offload.folder={tmp_path / 'disk'}"] if named else []
    dry_run.dry_run(config(parts, dataset, tmp_path, "offload=nvme", "sharding=zero3", "format=json", *more))
    assert json.loads(capsys.readouterr().out) == {"ranks": 8}
    folder = Path(seen[0].offload.folder or "")
    assert folder.exists() is named and (folder == tmp_path / "disk") is named
    assert not (tmp_path / "run").exists()


def test_refusals(parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"dry_run=0 must be at least 1"):
        config(parts, dataset, tmp_path, ranks=0)
    with pytest.raises(ConfigError, match=r"dry_run=8 cannot tell how many.*set sharding\.shard_size"):
        config(parts, dataset, tmp_path, "sharding=hybrid")
    with pytest.raises(ConfigError, match=r"format=json is for dry_run=N"):
        train.train(config(parts, dataset, tmp_path, "dry_run=null"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"dry_run=8 simulates .*torchrun started 2"):
        train.train(config(parts, dataset, tmp_path))
    assert not (tmp_path / "run").exists()
