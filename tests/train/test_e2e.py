"""Whole commands, as a user types them."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from commands import command
from small import write_json

pytestmark = pytest.mark.e2e


def train(*overrides: str, parts: Path, dataset: Path, cwd: Path, ranks: int = 2) -> subprocess.CompletedProcess:
    return command(
        "llava_fsdp.train",
        f"model.language={parts / 'language'}",
        f"model.vision={parts / 'vision'}",
        "model.random_weights=true",
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


def test_both_stages_then_a_question(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """A user's JSON and images on two ranks; stage 2 finds stage 1."""
    stage1 = ["stage=pretrain", f"data.path={dataset / 'captions.json'}", "max_steps=3"]
    stage2 = ["stage=finetune", f"data.path={dataset / 'mixed.json'}", "max_steps=3", "sharding=zero3"]
    ran = train(*stage1, parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    said = " ".join(ran.stderr.split())  # the first screen is wrapped
    assert "random weights" in said and "step 3/3" in said
    ran = train(*stage2, parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"projector outputs/pretrain/export", " ".join(ran.stderr.split()))

    folder = tmp_path / "outputs" / "finetune"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3]
    wanted = "step loss lr grad_norm label_tokens tokens samples images seconds tokens_per_second peak_memory_bytes"
    assert set(wanted.split()) <= set(rows[0])
    assert all(r["samples"] == 6 and r["label_tokens"] > 0 and r["tokens"] > r["label_tokens"] for r in rows)
    assert json.loads((folder / "run_status.json").read_text())["exit_code"] == 0
    assert "strategy: FULL_SHARD" in (folder / "config.yaml").read_text()

    image = tmp_path / "naïve, file (1).jpg"
    image.write_bytes((dataset / "images" / "0.jpg").read_bytes())
    words = f"image={image}", "question=What's this = red (or blue)?"
    ran = command("llava_fsdp.chat", *words, "max_new_tokens=4", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 1


def test_mistake_is_said_once_and_every_rank_ends(parts: Path, dataset: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    ran = train("data.path=nowhere.json", parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode != 0 and time.monotonic() - started < 40
    message = "ConfigError: data.path=nowhere.json is not a file or a folder; give a JSON, JSON Lines or Parquet file"
    lines = [line for line in ran.stderr.splitlines() if line.startswith(message)]
    assert len(lines) == 1, ran.stderr
    assert 'File "' not in ran.stderr.partition("Traceback (most recent call last)")[0]
    status = json.loads((tmp_path / "outputs" / "finetune" / "run_status.json").read_text())
    assert status["exit_code"] == 2 and "nowhere.json" in status["reason"]


@pytest.mark.slow
def test_broken_image_ends_every_rank(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Only one rank opens it; the message names file and record, and no rank is left waiting."""
    records = json.loads((dataset / "mixed.json").read_text())[:24]
    wrong = next(n for n, r in enumerate(records) if "image" in r)
    records[wrong]["image"] = "gone.jpg"
    write_json(tmp_path / "bad.json", records)
    started = time.monotonic()
    ran = train("data.path=bad.json", "epochs=1", parts=parts, dataset=dataset, cwd=tmp_path)
    assert ran.returncode != 0 and time.monotonic() - started < 40
    assert f"bad.json, line 1, record {wrong} (id {records[wrong]['id']}): image" in ran.stderr
    assert "gone.jpg does not exist; is data.images right?" in ran.stderr
    status = json.loads((tmp_path / "outputs" / "finetune" / "run_status.json").read_text())
    assert status["exit_code"] == 2 and "gone.jpg" in status["reason"]
    assert "Connection closed" not in ran.stderr and ran.stderr.count("Traceback (most recent") <= 1, "torchrun's own"


@pytest.mark.slow
def test_multirun_under_torchrun_names_the_sweep(tmp_path: Path) -> None:
    ran = command("llava_fsdp.train", "-m", "optim.lr=1e-4,2e-4", cwd=tmp_path)
    assert ran.returncode != 0
    assert "use: llava-fsdp sweep -m optim.lr=1e-4,2e-4" in ran.stderr


def test_status_takes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ran = command("llava_fsdp.status", "run", cwd=tmp_path)
    assert ran.returncode == 1 and "run/run_status.json" in ran.stderr
