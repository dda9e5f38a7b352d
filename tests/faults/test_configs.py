"""Mistakes in a configuration: one message, before anything is read or written."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import Runs
from tiers import slow_after
from transformers import AutoConfig

from llava_fsdp.config import Config, load
from llava_fsdp.config.command_line import cli
from llava_fsdp.config.paths import check_paths
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.train import main as train

WRONG = {
    "+x=1": "x is not a key",
    "++optim.lrr=1": "optim.lrr is not a key of the configuration; did you mean optim.lr",
    "+data.sources.a.b=1": "is not a key",
    "optim.lr=inf": "optim.lr=inf must be a finite number",
    "optim.lr=-inf": "optim.lr=-inf must be a finite number",
    "optim.weight_decay=nan": "optim.weight_decay=nan must be a finite number",
    "optim.eps=-1": "optim.eps=-1.0 must be a finite number",
    "optim.clip=inf": "optim.clip=inf must be a finite number above 0",
    "optim.clip=nan": "optim.clip=nan must be a finite number above 0",
    "optim.beta2=nan": "optim.beta2=nan must be at least 0 and below 1",
    "optim.projector_lr=inf": "optim.projector_lr=inf must be a finite number",
    "optim.warmup_ratio=nan": "optim.warmup_ratio=nan must be a fraction",
    "epochs=0": "epochs=0 must be at least 1",
    "epochs=1e400": "epochs",
    "log_every=0": "log_every=0 must be at least 1",
    "micro_batch_size=0": "micro_batch_size=0 must be at least 1",
    "checkpoint.every=-5": "checkpoint.every=-5 must be at least 1",
    "checkpoint.keep=0": "checkpoint.keep=0 must be at least 2",
    "data.prefetch=0": "data.prefetch=0 must be at least 1",
    "data.stall=0": "data.stall=0 must be at least 1",
    "private=maybe": "private=maybe must be true or false",
    "global_batch_size=null": "global_batch_size=null must be a whole number",
    "stage=null": "stage=null: choose one of finetune,",
    "sharding=zero3 offload=optimizer sharding.strategy=NO_SHARD": "offload=optimizer with sharding=zero0",
    "pack=false attention=varlen": "attention=varlen is for packed rows",
    "pack=false tokens_per_micro_batch=4096": "tokens_per_micro_batch=4096 is for packed rows",
    "tokens_per_micro_batch=many": "tokens_per_micro_batch=many must be a number of tokens, auto or null",
    "tokens_per_micro_batch=16": "tokens_per_micro_batch=16 has no room for a sample",
    "loss.normalize=micro_batch": "loss.normalize=micro_batch is a mean of means",
    "dry_run=0": "dry_run=0 must be at least 1",
    "output_dir=null": "output_dir=null must be text",
    "output_dir='a": "output_dir",
    "seed=[1]": "seed",
}


@pytest.mark.parametrize("words", slow_after(12, WRONG))
def test_values(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", *words.split()])
    with pytest.raises(ConfigError) as caught:
        node = cli.compose("train", Config)
        assert node is not None
        load(Config, node)
    assert WRONG[words] in str(caught.value) and "Traceback" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def run_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *words])
    node = cli.compose("train", Config)
    assert node is not None
    train.train(load(Config, node))


def test_paths_that_are_missing_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["data=llava_json", "data.path=no.json", "data.images=no images", "model.language=/no/model"]
    with pytest.raises(ConfigError, match="4 paths do not exist") as caught:
        run_of(monkeypatch, *words, "checkpoint.resume=no/step-000001")
    for word in ("data.path=no.json", "data.images=no images", "model.language=/no/model", "resume=no/step-000001"):
        assert word in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["images", "link", "model", "model/out", "linked/out"])
def test_a_run_does_not_write_into_what_it_reads(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("images", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "images")
    (tmp_path / "linked").symlink_to(tmp_path / "model")
    (tmp_path / "a.json").write_text("[]")
    words = ["data=llava_json", "data.path=a.json", "data.images=images", "model.language=model", f"output_dir={where}"]
    with pytest.raises(ConfigError, match=f"output_dir={where} is .*which the run reads; give a folder of its own"):
        run_of(monkeypatch, *words)
    assert not list((tmp_path / "images").iterdir()) and not list((tmp_path / "model").iterdir())


def test_a_run_may_write_below_the_folder_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`data.images=/` is where records name pictures in full."""
    (tmp_path / "a.json").write_text("[]")
    words = ["data=llava_json", f"data.path={tmp_path / 'a.json'}", "data.images=/", f"output_dir={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    node = cli.compose("train", Config)
    assert node is not None
    check_paths(load(Config, node))


def test_the_command_says_it_once_and_ends_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "llava_fsdp.train", "output_dir=out", "optim.lr=inf"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 2 and ran.stderr.count("ConfigError") == 1 and "Traceback" not in ran.stderr
    assert time.monotonic() - began < 45, "a hard limit against hangs, not a measure"
    path = tmp_path / "out" / "run_status.json"
    assert not path.exists() or json.loads(path.read_text())["exit_code"] == 2


@pytest.mark.faults
def test_a_model_that_cannot_be_exported_ends_every_rank(runs: Runs, parts: Path, tmp_path: Path) -> None:
    """transformers' LLaVA-NeXT calls a pixtral without its images' sizes; text alone passes."""
    folder = shutil.copytree(parts / "vision", tmp_path / "vision")
    AutoConfig.for_model("pixtral", num_hidden_layers=3, image_size=28, patch_size=14).save_pretrained(folder)
    words = [
        f"model.language={parts / 'language'}", f"model.vision={folder}", "model.random_weights=true",
        "model.select_feature=full", "model.patch_merge=spatial_unpad", "data.image_aspect_ratio=anyres",
        "export.enabled=true",
    ]  # fmt: skip
    ended = runs.run(*words, folder=tmp_path / "run", ranks=2)
    assert (ended.status["class"], ended.status["exit_code"]) == ("model", ExitCode.USER) and not ended.left
    assert ended.code == 1 and "pixtral" in ended.status["reason"]
    assert not (tmp_path / "run" / "out" / "metrics.jsonl").exists()
