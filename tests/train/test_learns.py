"""The embedded default, from nothing to answers."""

import json
from pathlib import Path

import pytest
from browser import page
from commands import command
from pictured import charts_seen
from reference import Adapters, trained_weights
from small import config_of

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.config import AspectRatio
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.evaluate.main import with_paths
from llava_fsdp.evaluate.read_questions import first_question

CURVES = ["Loss", "Learning rate", "Gradient norm", "Tokens a second", "Time of a step", "Peak memory"]
"""Of a run on a CPU."""
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_embedded_default_learns_to_see(tmp_path: Path) -> None:
    """Both stages as a newcomer runs them: at least 90 % on held-out images, at most half of that on blank ones.
    A browser shows every curve on each stage's page."""
    for stage in ("pretrain", "finetune"):
        ran = command("llava_fsdp.train", f"stage={stage}", cwd=tmp_path, timeout=600)
        assert ran.returncode == 0, ran.stderr
    ran = command("llava_fsdp.evaluate", "format=json", cwd=tmp_path)
    found = json.loads(ran.stdout)
    assert found["accuracy"] >= 0.9
    assert found["accuracy_blank_pictures"] <= found["accuracy"] / 2
    for stage in ("pretrain", "finetune"):
        check_page(tmp_path / "outputs" / stage / "report.html")


def check_page(path: Path) -> None:
    """A browser shows every curve on it, and asks for nothing else."""
    said: list[str] = []

    def note(about: object) -> None:
        said.append(str(about))

    assert path.stat().st_size < 5_000_000
    with page() as shown:
        for event in ("console", "pageerror", "request"):
            shown.on(event, note)
        shown.goto(path.as_uri())
        assert charts_seen(shown) == CURVES
        shown.screenshot(path=path.with_suffix(".png"), full_page=True)
    assert len(said) == 1, f"more than the page itself: {said}"


IN_FULL = ("precision=fp32", "export.dtype=fp32")


@pytest.mark.timeout(1800)  # five minutes on two idle cores
def test_adapters_learn_to_see_and_answer_the_same_once_merged(tmp_path: Path) -> None:
    """A base that cannot answer, the same with adapters beside it in transformers' model, and the merged export."""
    for stage in ("pretrain", "finetune_lora"):
        ran = command("llava_fsdp.train", f"stage={stage}", *IN_FULL, cwd=tmp_path, timeout=900)
        assert ran.returncode == 0, ran.stderr
    runs = tmp_path / "outputs"
    right = {}
    for run in ("pretrain", "finetune_lora"):
        ran = command(
            "llava_fsdp.evaluate", f"model.checkpoint={runs / run}", "format=json", "blank=false", cwd=tmp_path
        )
        right[run] = json.loads(ran.stdout)["accuracy"]
    assert right["finetune_lora"] >= right["pretrain"] + 0.3

    records = RecordFile(runs / "shapes" / "heldout.json")
    questions = [with_paths(first_question(records[n]), runs / "shapes" / "images") for n in range(60)]
    merged, beside = (Assistant(str(runs / r), "v1", AspectRatio.pad) for r in ("finetune_lora", "pretrain"))
    # a projector's stage has captions, and no questions
    beside.template, beside.reader, beside.stops = merged.template, merged.reader, merged.stops
    cfg = config_of(["stage=finetune_lora", "model.lora.dropout=0"])
    Adapters(trained_weights(runs / "finetune_lora")).put_into(beside.model, cfg)
    beside.model.eval()
    answers = beside.answers(questions, 8)
    assert merged.answers(questions, 8) == answers and len(set(answers)) > 5
