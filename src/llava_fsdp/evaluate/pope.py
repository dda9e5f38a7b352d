"""POPE's label files: JSON Lines of question_id, image, text and label, one file a category."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.record import name_record, parse_text, shown
from llava_fsdp.evaluate.question import CATEGORY, Asked
from llava_fsdp.evaluate.references import yes_or_no
from llava_fsdp.runtime.errors import ConfigError, DataError


def annotate_yes_no(asked: list[Asked], path: Path) -> list[Asked]:
    """With the labels of a file, or of a folder of files whose names end in `_CATEGORY.json`.

    As in the original the n-th label of a category belongs to its n-th question: the ids of the label files begin anew
    in each. What a label says of its picture and its question must agree.

    Raises:
        ConfigError: there is no file for a category.
        DataError: numbers, pictures or questions do not agree.
    """
    if not path.is_dir():
        return labelled(asked, path)
    found: dict[int, Asked] = {}
    for category in dict.fromkeys(category_of(a) for a in asked):
        named = sorted(path.glob(f"*_{category}.json*")) if category.replace("_", "").isalnum() else []
        if len(named) != 1:
            raise ConfigError(
                f"annotations={path} has {len(named)} files whose names end in _{category}.json; there must be one for "
                "every category of the questions"
            )
        found |= {a.number: a for a in labelled([a for a in asked if category_of(a) == category], named[0])}
    return [found[a.number] for a in asked]


def category_of(asked: Asked) -> str:
    return dict(asked.groups).get(CATEGORY, "")


def labelled(asked: list[Asked], path: Path) -> list[Asked]:
    labels = read_labels(path)
    if len(labels) != len(asked):
        raise DataError(
            f"{path} has {len(labels)} labels for {len(asked)} questions, from {asked[0].where} on; they are paired in "
            "their order: take both from the same release"
        )
    return [replace(a, references=(label_of(a, *label),)) for a, label in zip(asked, labels, strict=True)]


def read_labels(path: Path) -> list[tuple[dict[str, Any], str]]:
    """JSON Lines, although the name ends in .json; and what a message calls each."""
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


def label_of(asked: Asked, raw: dict[str, Any], where: str) -> str:
    if "image" in raw and (raw["image"],) != asked.images:
        raise DataError(f"{where} is about {shown(raw['image'])}, and {asked.where} about {shown(list(asked.images))}")
    if "text" in raw and not asked.prompt.startswith(str(raw["text"])):
        raise DataError(f"{where} asks {shown(raw['text'])}, and {asked.where} {shown(asked.prompt)}")
    return yes_or_no(raw.get("label"), where)
