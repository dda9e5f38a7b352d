"""Records of pairs: the forms in which people publish a prompt with a chosen and a rejected answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from containers import write_container

from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.parse_record import RecordKeys, parse_record
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.runtime.errors import DataError

KEYS = RecordKeys(pairs=True)
PLAIN = {"id": "1", "image": "a.png", "question": "What?", "chosen": "A cat.", "rejected": "A dog."}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def rated(*values: tuple[str, list[str]]) -> list[dict[str, Any]]:
    """Completions as VLFeedback has them."""
    aspects = ("Helpfulness", "Ethical Considerations", "Visual Faithfulness")
    return [
        {
            "model": f"m{n}",
            "response": text,
            "annotations": {a: {"Rating": r, "Rationale": "x"} for a, r in zip(aspects, ratings, strict=True)},
        }
        for n, (text, ratings) in enumerate(values)
    ]


COMPLETIONS = rated(
    ("So so.", ["3", "5", "4"]), ("A dog.", ["1", "5", "1"]), ("A cat.", ["5", "5", "4"]), ("Late.", ["5", "5", "4"])
)
PUBLISHED: dict[str, dict[str, Any]] = {
    "RLAIF-V, MMPR": PLAIN,
    "RLHF-V": {
        "id": "1",
        "image": "a.png",
        "text": json.dumps({key: PLAIN[key] for key in ("question", "chosen", "rejected")}),
    },
    "VLFeedback": {"id": "1", "image": "a.png", "prompt": "What?", "completions": COMPLETIONS},
    "VLFeedback, a table": {
        "id": "1",
        "image": "a.png",
        "prompt": "What?",
        "completions": {key: [own[key] for own in COMPLETIONS] for key in COMPLETIONS[0]},
    },
    "trl": {
        "id": "1",
        "images": ["a.png"],
        "prompt": [said("user", "What?")],
        "chosen": [said("assistant", "A cat.")],
        "rejected": [said("assistant", "A dog.")],
    },
    "trl, parts": {
        "id": "1",
        "images": ["a.png"],
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat?"}]}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "A dog."}]}],
    },
    "trl, implicit prompt": {
        "id": "1",
        "images": ["a.png"],
        "chosen": [said("user", "What?"), said("assistant", "A cat.")],
        "rejected": [said("user", "What?"), said("assistant", "A dog.")],
    },
    "LLaVA": {
        "id": "1",
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}],
        "chosen": {"from": "gpt", "value": "A cat."},
        "rejected": {"from": "gpt", "value": "A dog."},
    },
}


def parse(raw: Any) -> Record:
    return parse_record(Path("a.json"), 0, raw, keys=KEYS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_form_is_the_same_pair(name: str) -> None:
    record = parse(PUBLISHED[name])
    assert record.turns == (Turn("human", "<image>\nWhat?"), Turn("gpt", "A cat."))
    assert record.rejected == Turn("gpt", "A dog.")
    assert record.images == ("a.png",) and record.key_not_obeyed is None and record.unread is None


# A column of a table has one type.
HELD = {
    "json": list(PUBLISHED), "lines": list(PUBLISHED), "tar": list(PUBLISHED),
    "parquet with paths": ["RLAIF-V, MMPR", "RLHF-V", "VLFeedback", "trl", "LLaVA"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in HELD.items() for name in names])
def test_every_container_has_pairs(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"an image")
    row = {key: value for key, value in PUBLISHED[name].items() if key != "images"} | {"image": "a.png"}
    (path,) = write_container(kind, tmp_path / "files", [row], tmp_path)
    record = RecordFile(path, keys=KEYS)[0]
    assert record.rejected == Turn("gpt", "A dog.") and len(record.images) == 1
    assert record.turns == (Turn("human", "<image>\nWhat?"), Turn("gpt", "A cat."))


def test_earlier_answers_belong_to_the_prompt_and_are_not_learnt() -> None:
    turns = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    record = parse({"id": "1", "messages": turns, "chosen": "d", "rejected": "e"})
    assert [turn.learnt for turn in record.turns] == [True, False, True, True]
    assert record.with_rejected.turns == (*record.turns[:-1], Turn("gpt", "e")) and not record.with_rejected.rejected


WRONG: list[tuple[dict[str, Any], Kind]] = [
    ({"rejected": "A cat."}, Kind.bad_form),
    ({"rejected": ""}, Kind.bad_form),
    ({"rejected": " "}, Kind.empty_answer),
    ({"chosen": None}, Kind.bad_form),
    ({"chosen": [said("user", "A cat.")]}, Kind.bad_form),
    ({"chosen": [said("user", "What?"), said("assistant", "A cat.")]}, Kind.bad_form),
    ({"prompt": "What?"}, Kind.bad_form),
    ({"question": None}, Kind.bad_form),
    ({"question": None, "messages": [said("user", "a"), said("assistant", "b")]}, Kind.wrong_roles),
    ({"question": 3}, Kind.bad_form),
]


@pytest.mark.parametrize(("change", "kind"), WRONG)
def test_what_is_no_pair_is_refused(change: dict[str, Any], kind: Kind) -> None:
    with pytest.raises(DataError) as caught:
        parse(PLAIN | change)
    assert caught.value.kind is kind


@pytest.mark.parametrize(
    "completions", [rated(("a", ["1", "2", "3"]), ("b", ["3", "2", "1"])), [{"response": "a"}], ["a", "b"], "text"]
)
def test_answers_that_are_not_rated_or_rated_alike_make_no_pair(completions: Any) -> None:
    with pytest.raises(DataError) as caught:
        parse({"id": "1", "prompt": "What?", "completions": completions})
    assert caught.value.kind is Kind.bad_form


def test_a_pair_that_is_not_asked_for_is_refused_as_before() -> None:
    assert parse_record(Path("a.json"), 0, PUBLISHED["LLaVA"] | {"messages": None}).key_not_obeyed is not None
