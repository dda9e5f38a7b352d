"""Read the right answers of POPE from its label files: JSON Lines with the keys question_id, image, text and label, in
one file for each category of questions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.record import name_place, parse_text, shown
from llava_fsdp.evaluate.benchmarks.references import yes_or_no
from llava_fsdp.evaluate.question import CATEGORY, BenchmarkQuestion
from llava_fsdp.runtime.errors import ConfigError, DataError


def annotate_yes_no(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    """Return questions of POPE with the right answers from its label files.

    As in the original LLaVA, the n-th label of a category is for its n-th question, since ids restart in each file.

    Args:
        path: a label file; or a folder of label files, whose names end in `_CATEGORY.json`.

    Raises:
        ConfigError: a category of the questions has no label file, or several.
        DataError: labels and questions differ in number, or a label has another image or text than its question.
    """
    if not path.is_dir():
        return with_labels(questions, path)
    categories: dict[str, list[BenchmarkQuestion]] = {}
    for question in questions:
        categories.setdefault(dict(question.groups).get(CATEGORY, ""), []).append(question)
    labelled_questions: dict[int, BenchmarkQuestion] = {}
    for category, members in categories.items():
        named = sorted(path.glob(f"*_{category}.json*")) if category.replace("_", "").isalnum() else []
        if len(named) != 1:
            raise ConfigError(
                f"annotations={path} has {len(named)} files whose names end in _{category}.json; there must be one for "
                "every category of the questions"
            )
        labelled_questions |= {q.number: q for q in with_labels(members, named[0])}
    return [labelled_questions[q.number] for q in questions]


def with_labels(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    """Return questions with the labels of a file as right answers. Such a file is JSON Lines, though named `.json`."""
    if not path.is_file():
        raise ConfigError(f"annotations={path} is neither a file nor a folder")
    lines = [(n, line) for n, line in enumerate(path.read_bytes().splitlines(), 1) if line.strip()]
    if len(lines) != len(questions):
        raise DataError(
            f"{path} has {len(lines)} labels for {len(questions)} questions, from {questions[0].where} on; they are "
            "paired in their order: take both from the same release"
        )
    labelled_questions = []
    for number, (question, (line, content)) in enumerate(zip(questions, lines, strict=True)):
        label = label_of(question, parse_text(path, number, content, line), name_place(path, number, line))
        labelled_questions.append(replace(question, references=(label,)))
    return labelled_questions


def label_of(question: BenchmarkQuestion, raw: Any, where: str) -> str:
    """Return the right answer, `yes` or `no`, in the label `raw` of a question. Raises DataError, whose message begins
    with `where`, if it is malformed, or is about another image or text than the question."""
    if not isinstance(raw, dict):
        raise DataError(f"{where} is {shown(raw)}, not an object with label")
    if "image" in raw and (raw["image"],) != question.images:
        images = shown(list(question.images))
        raise DataError(f"{where} is about {shown(raw['image'])}, and {question.where} about {images}")
    if "text" in raw and not question.prompt.startswith(str(raw["text"])):
        raise DataError(f"{where} asks {shown(raw['text'])}, and {question.where} asks {shown(question.prompt)}")
    return yes_or_no(raw.get("label"), where)
