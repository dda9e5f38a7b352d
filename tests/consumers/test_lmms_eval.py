"""Tasks of lmms-eval with the product's own model: scores are those of `llava-fsdp evaluate`'s answers scored by hand,
and an error while the model answers is an error."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from commands import TORCHRUN
from harness import RankPool
from PIL import Image
from reference import EXPORTED, train_on
from small import command_config, make_config
from unpacked import unpacked

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.config import EvaluateConfig
from llava_fsdp.evaluate.main import evaluate
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError, DataError, ModelError
from llava_fsdp.train import main as train

pytestmark = [pytest.mark.consumers, pytest.mark.filterwarnings("ignore")]
PACKAGES = (
    "dataproperty==1.1.1", "decord==0.6.0", "evaluate==0.4.6", "jsonlines==4.0.0", "lmms_eval==0.7.3",
    "loguru==0.7.3", "lxml==6.1.3", "mbstrdecoder==1.1.5", "numexpr==2.14.2", "pathvalidate==3.3.1",
    "portalocker==4.4.2", "pytablewriter==1.2.1", "sacrebleu==2.6.0", "tabledata==1.3.5", "tabulate==0.10.0",
    "tcolorpy==0.1.7", "tenacity==9.2.1", "tqdm_multiprocess==0.0.11", "typepy==2.0.0", "zstandard==0.25.0",
)  # fmt: skip
"""What `import lmms_eval.evaluator` needs besides the packages of the tests."""
FUNCTIONS = """
def images(doc):
    return [doc["image"].convert("RGB")]

def question(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]

def equal(doc, results):
    return {"exact": float(results[0].strip() == doc["answer"].strip())}

def first_word(doc, results):
    return {"first": float(results[0].split()[:1] == doc["answer"].split()[:1])}

def length(doc, results):
    return {"length": float(len(results[0]))}

def mean(values):
    return sum(values) / len(values)
"""
TASKS = {"equal": ("exact", "mine_equal"), "first_word": ("first", "mine_first"), "length": ("length", "mine_length")}


@pytest.fixture(autouse=True)
def lmms_eval(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts lmms-eval into the path."""
    folder = unpacked("lmms-eval-0.7.3", PACKAGES)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return folder


@pytest.fixture(scope="module")
def run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.train(make_config(parts, dataset, folder, "max_steps=3", "data.template=v1", *EXPORTED))
    return folder


@pytest.fixture(scope="module")
def records(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Questions with right answers, as records for `task=conversations`."""
    return [record for record in json.loads((dataset / "captions.json").read_text()) if record.get("image")][:7]


@pytest.fixture
def tasks(records: list[dict[str, Any]], dataset: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder of three tasks over these questions."""
    rows = [
        {
            "image": Image.open(dataset / "images" / record["image"]).convert("RGB"),
            "question": record["conversations"][0]["value"].replace("<image>", "").strip(),
            "answer": record["conversations"][1]["value"],
        }
        for record in records
    ]
    features = datasets.Features(
        {"image": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}
    )
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows, features)}).save_to_disk(tmp_path / "data")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "functions.py").write_text(FUNCTIONS)
    for function, (metric, name) in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: {tmp_path / "data"}
dataset_kwargs: {{load_from_disk: true}}
test_split: test
output_type: generate_until
doc_to_visual: !function functions.images
doc_to_text: !function functions.question
doc_to_target: answer
process_results: !function functions.{function}
generation_kwargs: {{max_new_tokens: 6, until: ["\\n\\n"]}}
metric_list: [{{metric: {metric}, aggregation: !function functions.mean, higher_is_better: true}}]
metadata: [{{version: 0.0}}]
""")
    yield folder


def keys_of_tasks(tasks: Path) -> list[str]:
    names = ",".join(name for _, name in TASKS.values())
    return [f"tasks=[{names}]", f"tasks_folder={tasks}", "format=json"]


def keys(run: Path, tasks: Path) -> list[str]:
    return [f"model.checkpoint={run}", *keys_of_tasks(tasks), "batch_size=3"]


def ask(*overrides: str) -> None:
    evaluate(command_config(EvaluateConfig, "evaluate", *overrides))


def by_hand(run: Path, records: list[dict[str, Any]], dataset: Path, tmp_path: Path) -> dict[str, float]:
    """The scores of the answers that `evaluate task=conversations` writes to a file."""
    (tmp_path / "records.json").write_text(json.dumps(records))
    data = [
        "data.source=llava_json", f"data.path={tmp_path / 'records.json'}", f"data.images={dataset / 'images'}",
        f"answers={tmp_path / 'by_hand.jsonl'}", "max_new_tokens=6", "blank=false", "batch_size=3",
    ]  # fmt: skip
    ask(f"model.checkpoint={run}", *data)
    said = [json.loads(line)["text"] for line in (tmp_path / "by_hand.jsonl").read_text().splitlines()]
    right = [record["conversations"][1]["value"] for record in records]
    count = len(records)
    return {
        "mine_equal": sum(a.strip() == b.strip() for a, b in zip(said, right, strict=True)) / count,
        "mine_first": sum(a.split()[:1] == b.split()[:1] for a, b in zip(said, right, strict=True)) / count,
        "mine_length": sum(len(answer.strip()) for answer in said) / count,
    }


def scores_in(printed: str) -> dict[str, float]:
    found = json.loads(printed.splitlines()[-1])["tasks"]
    return {name: found[name][metric] for metric, name in TASKS.values()}


def test_scores_are_those_of_the_answers(
    run: Path, tasks: Path, records: list[dict[str, Any]], dataset: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    expected = by_hand(run, records, dataset, tmp_path)
    capsys.readouterr()
    ask(*keys(run, tasks))
    printed = capsys.readouterr().out
    assert scores_in(printed) == pytest.approx(expected) and expected["mine_length"] > 1
    recorded = json.loads((run / "results.json").read_text())["evaluations"]
    assert {entry["task"] for entry in recorded} >= {f"lmms-eval {name}" for _, name in TASKS.values()}
    assert all(entry["questions"] == len(records) for entry in recorded)


def test_two_processes_and_a_file_of_answers(
    run: Path, tasks: Path, records: list[dict[str, Any]], dataset: Path, tmp_path: Path, lmms_eval: Path
) -> None:
    expected = by_hand(run, records, dataset, tmp_path)
    command = [*TORCHRUN, "2", "-m", "llava_fsdp.evaluate", *keys(run, tasks)]
    environment = {**os.environ, "PYTHONPATH": str(lmms_eval), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"answers={tmp_path / 'answers.jsonl'}"], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert scores_in(done.stdout) == pytest.approx(expected)
    assert (tmp_path / "answers_mine_equal_6.jsonl").read_text().count("\n") == len(records)


def test_a_crash_while_answering_is_an_error(run: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> list[str]:
        raise ModelError("broken in the middle")

    monkeypatch.setattr(Assistant, "answers", crash)
    with pytest.raises(ModelError, match="broken in the middle"):
        ask(*keys(run, tasks))


def test_a_crash_while_scoring_is_an_error(run: Path, tasks: Path) -> None:
    functions = tasks / "functions.py"
    functions.write_text(functions.read_text().replace("float(len(results[0]))", "1 / 0"))
    with pytest.raises(DataError, match="lmms-eval failed"):
        ask(*keys(run, tasks))


def test_an_unknown_task_is_named(run: Path, tasks: Path) -> None:
    with pytest.raises(ConfigError, match="mine_other"):
        ask(f"model.checkpoint={run}", "tasks=[mine_other]", f"tasks_folder={tasks}")


def test_other_kinds_of_requests_are_refused_first(run: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in tasks.glob("mine_length.yaml"):
        path.write_text(path.read_text().replace("output_type: generate_until", "output_type: loglikelihood"))
    monkeypatch.setattr(Assistant, "answers", lambda *_, **__: pytest.fail("answered before"))
    with pytest.raises(DataError, match="loglikelihood"):
        ask(*keys(run, tasks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_asks_the_tasks(
    ranks: int, tasks: Path, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool], lmms_eval: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """At each validation; with the scores of the exported model, and without a change of the weights."""
    names = ",".join(name for _, name in TASKS.values())
    held_out = [f"val.path={dataset / 'captions.json'}", f"val.images={dataset / 'images'}", "val.answers=5"]
    keys = ["max_steps=4", "data.template=v1", *held_out, "val.every=2", "val.limit=3", *EXPORTED]
    weights = {}
    for kind, more in (("with", [f"val.tasks=[{names}]", f"val.tasks_folder={tasks}"]), ("without", [])):
        cfg = make_config(parts, dataset, tmp_path / kind, *keys, *more)
        if ranks > 1:
            pools[ranks].run(add_packages, str(lmms_eval))
        train_on(ranks, cfg, pools)
        weights[kind] = (tmp_path / kind / "export" / "model.safetensors").read_bytes()
    assert weights["with"] == weights["without"]
    rows = [json.loads(line) for line in (tmp_path / "with" / "validation.jsonl").read_text().splitlines()]
    capsys.readouterr()
    ask(f"model.checkpoint={tmp_path / 'with'}", *keys_of_tasks(tasks), "limit=5", "batch_size=1")
    assert [row["step"] for row in rows] == [2, 4] and all(len(row["tasks"]) == len(TASKS) for row in rows)
    found = {name: rows[-1]["tasks"][name][metric] for metric, name in TASKS.values()}
    assert found == pytest.approx(scores_in(capsys.readouterr().out)) and found["mine_length"] > 1


def add_packages(_world: World, folder: str) -> None:
    """Put lmms-eval into the path of a rank."""
    sys.path.insert(0, folder)
    os.environ["HF_DATASETS_OFFLINE"] = "1"
