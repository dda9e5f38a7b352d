"""Whole commands, as a user types them."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from commands import TORCHRUN, command
from small import write_json

pytestmark = pytest.mark.e2e


def train(*overrides: str, parts: Path, dataset: Path, cwd: Path, ranks: int = 2) -> subprocess.CompletedProcess:
    return command(
        "llava_fsdp.train",
        f"model.language={parts / 'language'}",
        f"model.vision={parts / 'vision'}",
        "data=llava_json",
        f"data.images={dataset / 'images'}",
        "data.workers=1",
        "data.max_length=256",
        "global_batch_size=6",
        "micro_batch_size=2",
        *overrides,
        cwd=cwd,
        ranks=ranks,
    )


def test_both_stages_then_questions(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """A user's JSON and pictures on two ranks; stage 2 finds stage 1; the same command again does nothing."""
    stage1 = ["stage=pretrain", f"data.path={dataset / 'captions.json'}", "max_steps=3"]
    stage2 = ["stage=finetune", f"data.path={dataset / 'mixed.json'}", "max_steps=3", "sharding=zero3"]
    ran = train(*stage1, parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "This run uses a model with random weights." in ran.stderr and "step 3/3" in ran.stderr
    assert "6 samples packed into rows of at most" in ran.stderr and "sdpa (SDPA a sample" in ran.stderr
    ran = train(*stage2, parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"projector +outputs/pretrain/export", ran.stderr)

    folder = tmp_path / "outputs" / "finetune"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3]
    wanted = "step loss lr grad_norm label_tokens tokens samples images seconds tokens_per_second peak_memory_bytes"
    assert set(wanted.split()) <= set(rows[0])
    assert all(r["samples"] == 6 and r["label_tokens"] > 0 and r["tokens"] > r["label_tokens"] for r in rows)
    assert json.loads((folder / "run_status.json").read_text())["exit_code"] == 0
    assert "strategy: FULL_SHARD" in (folder / "config.yaml").read_text()
    before = (folder / "export" / "model.safetensors").stat().st_mtime_ns

    ran = train(*stage2, parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode == 0 and "this run has finished" in ran.stderr
    assert (folder / "export" / "model.safetensors").stat().st_mtime_ns == before

    ran = command(
        "llava_fsdp.evaluate", "data=llava_json", f"data.path={dataset / 'mixed.json'}",
        f"data.images={dataset / 'images'}", "limit=6", "format=json", cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["questions"] == 6 and 0 <= found["accuracy"] <= 1 and "accuracy_blank_pictures" in found

    picture = tmp_path / "naïve, file (1).jpg"
    picture.write_bytes((dataset / "images" / "0.jpg").read_bytes())
    for words in ([f"image={picture}", "question=What's this, red (or blue)?"], ["question=hello = you"]):
        ran = command("llava_fsdp.chat", *words, "max_new_tokens=4", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert len(ran.stdout.splitlines()) == 1


def test_one_process_without_torchrun(parts: Path, dataset: Path, tmp_path: Path) -> None:
    ran = train(
        f"data.path={dataset / 'mixed.json'}", "max_steps=1", parts=parts, dataset=dataset, cwd=tmp_path, ranks=0
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"projector +random: there is no stage=pretrain run", ran.stderr)
    assert "exported to outputs/finetune/export" in ran.stderr
    assert ran.stderr.splitlines()[-1].strip() == "report: outputs/finetune/report.html"
    assert (tmp_path / "outputs" / "finetune" / "report.html").is_file()


def test_mistake_is_said_once_and_every_rank_ends(parts: Path, dataset: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    ran = train("data.path=nowhere.json", parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode != 0 and time.monotonic() - started < 40
    message = "ConfigError: data.path=nowhere.json is not a file; give a LLaVA JSON, JSON Lines or Parquet file"
    lines = [line for line in ran.stderr.splitlines() if line.startswith(message)]
    assert len(lines) == 1, ran.stderr
    assert 'File "' not in ran.stderr.partition("Traceback (most recent call last)")[0]
    status = json.loads((tmp_path / "outputs" / "finetune" / "run_status.json").read_text())
    assert status["exit_code"] == 2 and "nowhere.json" in status["reason"]


def test_broken_picture_ends_every_rank(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Only one rank opens it; the message names file and record, and no rank is left waiting."""
    records = json.loads((dataset / "mixed.json").read_text())[:24]
    with_picture = next(n for n, r in enumerate(records) if "image" in r)
    records[with_picture]["image"] = "gone.jpg"
    write_json(tmp_path / "bad.json", records)
    started = time.monotonic()
    ran = train("data.path=bad.json", "epochs=1", parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode != 0 and time.monotonic() - started < 40
    assert f"bad.json, line 1, record {with_picture} (id {records[with_picture]['id']}): image" in ran.stderr
    assert "gone.jpg does not exist; is data.images right?" in ran.stderr
    status = json.loads((tmp_path / "outputs" / "finetune" / "run_status.json").read_text())
    assert status["exit_code"] == 2 and "gone.jpg" in status["reason"]
    assert "Connection closed" not in ran.stderr and ran.stderr.count("Traceback (most recent") <= 1, "torchrun's own"


@pytest.mark.slow
def test_status_of_a_run_that_is_killed_or_never_starts(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The word that a run is under way stays behind it; a mistake in a key is not taken for the run before."""
    path = tmp_path / "out" / "run_status.json"
    words = [*TORCHRUN, "1", "-m", "llava_fsdp.train", "stage=pretrain", "output_dir=out", "log_every=1"]
    running = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("step 3/"):
            break
    running.kill()
    assert running.wait(30) != 0
    assert json.loads(path.read_text())["status"] == "running"
    ran = command("llava_fsdp.train", "output_dir=out", "optim.lrr=1", cwd=tmp_path, ranks=0)
    assert ran.returncode == 2
    assert json.loads(path.read_text())["exit_code"] == 2
    (tmp_path / "file").write_text("")
    ran = command("llava_fsdp.train", "output_dir=file/x", cwd=tmp_path, ranks=0)
    assert ran.returncode == 2 and "ConfigError: output_dir=file/x cannot be written" in ran.stderr


def test_multirun_under_torchrun_names_the_sweep(tmp_path: Path) -> None:
    ran = command("llava_fsdp.train", "-m", "optim.lr=1e-4,2e-4", cwd=tmp_path)
    assert ran.returncode != 0
    assert "use: python -m llava_fsdp.sweep -m optim.lr=1e-4,2e-4" in ran.stderr


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_flags_of_the_command_line_itself(flag: str, tmp_path: Path) -> None:
    ran = command("llava_fsdp.chat", flag, cwd=tmp_path)
    assert ran.returncode == 0 and ran.stdout and "Traceback" not in ran.stderr
    if flag == "--help":
        assert ran.stdout.startswith("chat ") and "max_new_tokens" in ran.stdout and "sharding" not in ran.stdout


def test_a_path_without_its_key_is_told_which_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ran = command("llava_fsdp.status", "run", cwd=tmp_path)
    assert ran.returncode == 2 and "ConfigError: run has no key" in ran.stderr and "output_dir=run?" in ran.stderr
