"""POPE's label files: JSON Lines of question_id, image, text and label, one file a category."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.record import name_record, parse_text, shown
from llava_fsdp.evaluate.question import CATEGORY, BenchmarkQuestion
from llava_fsdp.evaluate.references import yes_or_no
from llava_fsdp.runtime.errors import ConfigError, DataError


def annotate_yes_no(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    """Add POPE's right answers to questions, from one label file, or from a folder of label files whose names end in
    `_CATEGORY.json`.

    As in the original the n-th label of a category belongs to its n-th question, since ids begin anew in each label
    file. A label's image and text must match the question's.

    Raises:
        ConfigError: a category has no file, or several.
        DataError: a file has another number of labels, or a label's image or text differs.
    """
    if not path.is_dir():
        return with_labels(questions, path)
    found: dict[int, BenchmarkQuestion] = {}
    for category in dict.fromkeys(category_of(q) for q in questions):
        named = sorted(path.glob(f"*_{category}.json*")) if category.replace("_", "").isalnum() else []
        if len(named) != 1:
            raise ConfigError(
                f"annotations={path} has {len(named)} files whose names end in _{category}.json; there must be one for "
                "every category of the questions"
            )
        own = [q for q in questions if category_of(q) == category]
        found |= {q.number: q for q in with_labels(own, named[0])}
    return [found[q.number] for q in questions]


def category_of(question: BenchmarkQuestion) -> str:
    return dict(question.groups).get(CATEGORY, "")


def with_labels(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    labels = read_labels(path)
    if len(labels) != len(questions):
        raise DataError(
            f"{path} has {len(labels)} labels for {len(questions)} questions, from {questions[0].where} on; they are "
            "paired in their order: take both from the same release"
        )
    return [replace(q, references=(label_of(q, *label),)) for q, label in zip(questions, labels, strict=True)]


def read_labels(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Read the labels of a POPE file (JSON Lines, although named .json), each with its name for error messages."""
    if not path.is_file():
        raise ConfigError(f"annotations={path} is neither a file nor a folder")
    lines = [(n, line) for n, line in enumerate(path.read_bytes().splitlines(), 1) if line.strip()]
    labels = []
    for number, (line, content) in enumerate(lines):
        raw = parse_text(path, number, content, line)
        if not isinstance(raw, dict):
            raise DataError(f"{name_record(path, number, line, None)} is {shown(raw)}, not an object with label")
        labels.append((raw, name_record(path, number, line, str(raw.get("question_id")))))
    return labels


def label_of(question: BenchmarkQuestion, raw: dict[str, Any], where: str) -> str:
    if "image" in raw and (raw["image"],) != question.images:
        images = shown(list(question.images))
        raise DataError(f"{where} is about {shown(raw['image'])}, and {question.where} about {images}")
    if "text" in raw and not question.prompt.startswith(str(raw["text"])):
        raise DataError(f"{where} asks {shown(raw['text'])}, and {question.where} asks {shown(question.prompt)}")
    return yes_or_no(raw.get("label"), where)
