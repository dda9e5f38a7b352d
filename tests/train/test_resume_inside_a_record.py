"""A run whose records give several samples is killed between two samples of one record, and continues there on another
number of ranks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import RankPool, single_world
from lives import Run
from reference import TOLERANCE, train_on, trained
from small import make_config
from steps import begin

CODE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A template that shows the thought of the last answer alone, so that each answer is a sample."""
ANSWERS = [1, 3, 2, 1, 1, 4, 2, 1, 3]
STEPS, SAVED = 8, 2
WORDS = (
    "data.template=chat_template", "data.thoughts=train", "global_batch_size=5", "micro_batch_size=2", "epochs=9",
    f"max_steps={STEPS}", f"checkpoint.every={SAVED}", "checkpoint.keep=9", "optim.lr=3e-3", "optim.projector_lr=null",
    "optim.schedule=cosine", "optim.warmup_ratio=0.1", "compile=false", "sharding=zero3",
)  # fmt: skip


def write(parts: Path, dataset: Path, folder: Path) -> tuple[Path, str]:
    """A small model with the template, and the words that name the records."""
    shutil.copytree(parts, folder / "parts")
    (folder / "parts" / "language" / "chat_template.jinja").write_text(CODE)
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(ANSWERS):
        turns: list[dict[str, Any]] = []
        for place in range(count):
            turns.append({"from": "human", "value": f"{'<image>' * (not place)}what {number} {place}?"})
            thought = {"reasoning_content": f"hm {place}"} if count > 1 else {}
            turns.append({"from": "gpt", "value": f"it is {number} {place}", **thought, "weight": 1 / (1 + place)})
        image = f"{number % 12}.{'png' if number % 12 % 2 else 'jpg'}"
        rows.append({"id": f"r{number}", "image": image, "conversations": turns})
    (folder / "a.json").write_text(json.dumps(rows))
    return folder / "parts", f"data.path={folder / 'a.json'}"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_killed_inside_a_record_continues_on_another_number_of_ranks(
    parts: Path, dataset: Path, tmp_path: Path, start: Callable[..., Run], pools: dict[int, RankPool]
) -> None:
    """Losses, gradient norms, weights and counts of each step are those of a run without interruption on one rank."""
    own, records = write(parts, dataset, tmp_path)
    cfg = make_config(own, dataset, tmp_path / "whole", *WORDS, records)
    loader = begin(single_world(), cfg).loader
    owners = [[loader.steps.records.number_in_index(n) for n in loader.steps.sampler.samples(s)] for s in range(STEPS)]
    assert loader.steps.sampler.per_epoch * 5 - 5 < sum(ANSWERS) and loader.steps.records.weights is not None
    assert {*owners[SAVED - 1]} & {*owners[SAVED]}, "a record has samples before and behind the checkpoint"
    wanted = trained(train_on(1, cfg, pools))
    words = f"model.language={own / 'language'}", f"model.vision={own / 'vision'}"
    killed = start(*words, *WORDS, records, folder=tmp_path / "killed", fault=f"kill:1:{SAVED + 1}")
    assert killed.process.wait(600) and killed.checkpoints == [f"step-{SAVED:06d}"], killed.said
    for size in (1, 4):
        shutil.copytree(killed.output, tmp_path / f"on-{size}")
        again = make_config(own, dataset, tmp_path / f"on-{size}", *WORDS, records)
        found = trained(train_on(size, again, pools, timeout=600))
        assert found.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
        assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=TOLERANCE)
        assert all((found.weights[n] - value).abs().max() < TOLERANCE for n, value in wanted.weights.items())
        rows, whole = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (tmp_path / f"on-{size}", tmp_path / "whole")
        )
        counts = ("step", "samples", "tokens", "label_tokens", "images")
        assert [[row[key] for key in counts] for row in rows] == [[row[key] for key in counts] for row in whole]
