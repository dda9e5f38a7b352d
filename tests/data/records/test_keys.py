"""Each key of a record is read, known to be harmless, or told; one that says what is learnt is obeyed or refused."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from harness import CPU
from pyarrow import parquet
from small import make_config
from test_build import FITS, open_again
from test_tar import write as write_tar

from llava_fsdp.config import Config
from llava_fsdp.data.index.examine.bad_records import remarks
from llava_fsdp.data.index.statistics import make_report
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.problems import BITS, Kind
from llava_fsdp.data.records.forms.parse_record import RecordKeys
from llava_fsdp.data.records.record import AnswerWeights, Record, Turn
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.runtime.errors import DataError

CONTAINERS = ("a.json", "a.jsonl", "a.parquet", "a.tar")
PAIR = RecordKeys("query", "response")
TEXTS = ("what is it", "a dog", "and this one", "a cat")
UNLEARNT: list[dict[str, Any]] = [
    {"weight": 0}, {"weight": 0.0}, {"weight": False}, {"weight": "0"}, {"loss": False}, {"loss": 0}, {"loss_scale": 0},
    {"lossScale": 0.0}, {"train": False}, {"training": False}, {"trainable": False}, {"loss_mask": 0},
    {"masked": True}, {"mask": True}, {"weight": 1, "loss": False},
]  # fmt: skip
LEARNT: list[dict[str, Any]] = [
    {"weight": 1}, {"weight": 1.0}, {"weight": None}, {"loss": True}, {"loss": None}, {"loss_scale": 1},
    {"train": True}, {"train_detail": []}, {"train_detail": None}, {"masked": False}, {"mask": False},
    {"reasoning_content": ""}, {"reasoning_content": None}, {"thinking": " \n"}, {"rejected": False},
    {"rejected": None}, {"rejected_response": ""}, {"tool_calls": []}, {"function_call": None}, {"label": 0},
    {"chosen": True}, {"weight": float("nan")},
]  # fmt: skip
REFUSED: list[dict[str, Any]] = [
    {"weight": 1e-9}, {"weight": -1}, {"weight": 2}, {"weight": "often"}, {"loss_scale": 1.3}, {"loss": "maybe"},
    {"loss": 0.5}, {"loss_spans": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
    {"mask": 1}, {"mask": 0}, {"masked": "a.png"}, {"loss_mask": [1, 0]}, {"train": {"a": 1}},
    {"train_detail": [{"begin_offset": 2, "end_offset": 1, "train": False}]},
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": 3}]},
    {"train_detail": [{"begin_offset": 0, "end_offset": 3}]}, {"train_detail": "0-3"},
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": True},
                      {"begin_offset": 3, "end_offset": 4, "train": False}]},
    {"thought": {"text": "x"}}, {"reasoning_details": [{"text": "x"}]}, {"chain_of_thought": "x"},
    {"rejected_response": "no"}, {"rejected": "no"}, {"rejected": True}, {"chosen": "yes"}, {"chosen": False},
    {"label": False}, {"kto_tag": False}, {"rejected_response": [{"role": "assistant", "content": "no"}]},
]  # fmt: skip
FRACTIONS: list[tuple[dict[str, Any], int]] = [
    ({"weight": 0.5}, 32768), ({"loss_scale": 0.3}, 19661), ({"weight": 2**-16}, 1), ({"sampleWeight": 0.25}, 16384),
    ({"weight": 0.5, "loss_weight": 0.5}, 16384), ({"weight": 0.5, "train": True}, 32768), ({"weight": "0.5"}, 32768),
]  # fmt: skip
"""Keys of an answer or of a record, and the weight of the answers in units of 1 / 65536."""
MISPLACED: list[tuple[str, dict[str, Any]]] = [
    ("turn", {"function_call": {"name": "f", "arguments": "{}"}}), ("turn", {"tools": '[{"name": "f"}]'}),
    ("record", {"tool_calls": [{"name": "f", "arguments": "{}"}]}), ("record", {"function_call": {"name": "f"}}),
    ("turn", {"functions": [{"name": "f"}]}),
]  # fmt: skip
"""Tools and calls where they have no place, or an answer that calls a tool and gets no result."""
FORMS = ("conversations", "messages", "texts", "query")


def record(form: str, place: str, keys: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """Two exchanges (with `query`, one). The keys are in the first answer (with `texts`, beside it), or the record."""
    pairs = list(zip(TEXTS[::2], TEXTS[1::2], strict=True))
    names = {"conversations": ("from", "value", "human", "gpt"), "messages": ("role", "content", "user", "assistant")}
    if form == "query":
        return {"id": f"r{number}", "query": TEXTS[0], "response": TEXTS[1], **keys}
    if form == "texts":
        turns: list[dict] = [{"user": question, "assistant": answer} for question, answer in pairs]
    else:
        who, what, human, gpt = names[form]
        turns = [{who: role, what: text} for own in pairs for role, text in zip((human, gpt), own, strict=True)]
    turns[0 if form == "texts" else 1] |= keys if place == "turn" else {}
    return {"id": f"r{number}", form: turns, **(keys if place == "record" else {})}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    match path.suffix:
        case ".parquet":
            names = dict.fromkeys(name for raw in records for name in raw)
            rows = [{name: raw.get(name) for name in names} for raw in records]
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".tar":
            write_tar(path, {f"{n:04d}.json": raw for n, raw in enumerate(records)})
        case ".jsonl":
            path.write_text("".join(json.dumps(raw) + "\n" for raw in records))
        case _:
            path.write_text(json.dumps(records, indent=1))
    return path


def cases(kinds: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Each key in each form and place. A turn that is compared with nulls needs a second exchange, so `query` has its
    keys in the record alone."""
    return [
        (form, place, keys)
        for form in FORMS
        for place in ("turn", "record")
        for keys in kinds
        if not (form == "query" and place == "turn")
    ]


def read(path: Path) -> list[Record]:
    file = RecordFile(path, keys=PAIR)
    return [file[number] for number in range(len(file))]


def one_by_one(tmp_path: Path, name: str, kinds: list[dict[str, Any]]) -> list[tuple[str, Record]]:
    """Each case in a file of its own, because a column of a table has one type."""
    found = []
    for number, (form, place, keys) in enumerate(cases(kinds)):
        path = write(tmp_path / f"{number}-{name}", [record(form, place, keys)])
        found.append((f"{form} {place} {keys}", read(path)[0]))
    return found


@pytest.mark.parametrize("name", CONTAINERS)
def test_an_answer_that_is_not_to_be_learnt_is_not(name: str, tmp_path: Path) -> None:
    """Of the record, none of its answers is."""
    for case, found in one_by_one(tmp_path, name, UNLEARNT):
        answers = [turn.learnt for turn in found.turns if turn.role == "gpt"]
        assert not_obeyed(found) is None and found.unread_keys == (), case
        assert answers == ([False] * len(answers) if " record " in case else [False, True]), case
        assert all(turn.learnt for turn in found.turns if turn.role == "human"), case


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_says_nothing_or_that_an_answer_is_learnt_is_harmless(name: str, tmp_path: Path) -> None:
    for case, found in one_by_one(tmp_path, name, LEARNT):
        assert all(turn.learnt and turn.weights is None for turn in found.turns), case
        assert not_obeyed(found) is None and found.unread_keys == (), case


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_cannot_be_obeyed_is_refused(name: str, tmp_path: Path) -> None:
    for case, found in one_by_one(tmp_path, name, REFUSED):
        (key,) = eval(case.partition(" ")[2].partition(" ")[2])  # the dict that the case was made of
        assert f'"{key}"' in str(not_obeyed(found)), case


@pytest.mark.parametrize("name", CONTAINERS)
def test_weights_between_0_and_1_are_read(name: str, tmp_path: Path) -> None:
    """Several keys multiply; a record's weight is that of all its answers."""
    for number, (keys, units) in enumerate(FRACTIONS):
        for form, place, _ in cases([keys]):
            (found,) = read(write(tmp_path / f"{number}-{form}-{place}-{name}", [record(form, place, keys)]))
            answers = [turn.weights for turn in found.turns if turn.role == "gpt"]
            expected = [AnswerWeights(units)] * len(answers)
            assert answers == (expected if place == "record" else [expected[0], None]), (form, place, keys)
            assert not_obeyed(found) is None and all(turn.learnt for turn in found.turns)


@pytest.mark.parametrize("name", CONTAINERS)
def test_weights_of_characters_are_read(name: str, tmp_path: Path) -> None:
    """Ranges that the text does not have, those of a record, and weights of questions and of parts are refused."""
    spans = [{"begin_offset": 3, "end_offset": 4, "train": 0.5}, {"begin_offset": 0, "end_offset": 0, "train": 1.0}]
    for form in ("conversations", "messages", "texts"):
        keys = {"train_detail": spans, "weight": 0.5}
        (found,) = read(write(tmp_path / f"{form}-{name}", [record(form, "turn", keys)]))
        answer = next(turn for turn in found.turns if turn.role == "gpt")
        assert answer.weights == AnswerWeights(32768, ((0, 1, 65536), (3, 5, 32768))) and not_obeyed(found) is None
        (found,) = read(write(tmp_path / f"record-{form}-{name}", [record(form, "record", {"train_detail": spans})]))
        assert "train_detail" in str(found.weights_not_obeyed)
    beyond = [{"begin_offset": 3, "end_offset": 5, "train": 0.5}]
    (found,) = read(write(tmp_path / f"beyond-{name}", [record("messages", "turn", {"train_detail": beyond})]))
    assert "5 characters" in str(found.weights_not_obeyed)
    raw = record("messages", "turn", {})
    raw["messages"][2]["weight"] = 1
    assert '"weight"' in str(read(write(tmp_path / f"question-{name}", [raw]))[0].weights_not_obeyed)


def not_obeyed(found: Record) -> str | None:
    return found.key_not_obeyed or found.weights_not_obeyed


@pytest.mark.parametrize("name", CONTAINERS)
def test_tools_are_refused_where_they_have_no_place(name: str, tmp_path: Path) -> None:
    for form in FORMS:
        for place, keys in MISPLACED if form != "query" else MISPLACED[2:4]:
            path = write(tmp_path / name, [record(form, place, keys)])
            with pytest.raises(DataError) as caught:
                read(path)
            assert caught.value.kind == Kind.wrong_roles, (form, place, keys)
        assert read(write(tmp_path / name, [record(form, "record", {"tools": "[]"})]))[0].tools == ()
        (found,) = read(write(tmp_path / name, [record(form, "record", {"tools": '[{"name": "f"}]'})]))
        assert [tool["function"]["name"] for tool in found.tools] == ["f"]


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_thought_belongs_to_its_answer(name: str, tmp_path: Path) -> None:
    """Beside the conversation it belongs to the only answer; with several, it cannot be obeyed."""
    for key in ("reasoning_content", "reasoning", "thinking", "thought", "reasoningContent"):
        for form in FORMS:
            thought = "a longer thought than twenty letters"
            (found,) = read(write(tmp_path / name, [record(form, "record", {key: thought})]))
            answers = [turn.thought for turn in found.turns if turn.role == "gpt"]
            if form == "query":
                assert answers == [thought] and found.key_not_obeyed is None
                continue
            assert answers == [None, None] and f'"{key}"' in str(found.key_not_obeyed)
            (found,) = read(write(tmp_path / name, [record(form, "turn", {key: thought})]))
            assert [turn.thought for turn in found.turns if turn.role == "gpt"] == [thought, None]
            assert found.key_not_obeyed is None and found.unread_keys == ()


@pytest.mark.parametrize("name", CONTAINERS)
def test_keys_that_nothing_reads_are_told(name: str, tmp_path: Path) -> None:
    """Not those that are known to be harmless, empty, or null; a question is never learnt, and its thoughts are no
    answer's."""
    harmless = {"source": "web", "score": 0.5, "metadata": {"weight": 0}, "created_at": "today", "category": 3}
    turns = record("messages", "turn", {"name": "bot", "foo": None, "timestamp": 3})["messages"]
    turns[0] |= {"name": "ann", "weight": 0, "reasoning_content": "hm", "loss": None}
    turns[2] |= {"mask_loss": False}
    rows = [
        {"messages": turns, **harmless, "system": "be kind", "history": [["a", "b"]], "name": "set"},
        {"messages": turns[:2], "system": "", "history": [], "enabled": False},
    ]
    first, second = read(write(tmp_path / name, rows))
    assert first.turns[0] == Turn("system", "be kind")
    assert {*first.unread_keys} == {
        "history", "messages[].name", "messages[].reasoning_content", "messages[].mask_loss",
    }  # fmt: skip
    assert {*second.unread_keys} == {"enabled", "messages[].name", "messages[].reasoning_content"}
    part: dict[str, Any] = {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "min_pixels": 4, "detail": "low"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b", "weight": None}]},
    ]}  # fmt: skip
    (third,) = read(write(tmp_path / name, [part]))
    assert third.unread_keys == ("messages[].content[].min_pixels",) and third.key_not_obeyed is None
    part["messages"][1]["content"][0]["weight"] = 0
    assert "part 0" in str(read(write(tmp_path / name, [part]))[0].weights_not_obeyed)


def test_members_of_a_sample_that_nothing_reads_are_told(tmp_path: Path) -> None:
    members = {"0.json": record("messages", "turn", {}), "0.txt": "a caption", "0.source": "web"}
    assert read(write_tar(tmp_path / "a.tar", members))[0].unread_keys == ("member txt",)


def test_the_better_answer_that_the_user_names_is_read(tmp_path: Path) -> None:
    raw = {"prompt": "a", "chosen": "b", "rejected": "c", "rejected_response": "d"}
    path = write(tmp_path / "a.jsonl", [raw])
    named = RecordFile(path, keys=RecordKeys("prompt", "chosen"))[0]
    assert named.key_not_obeyed is None and named.turns[1].text == "b"
    assert RecordFile(write(path, [raw | {"response": "b"}]), keys=RecordKeys("prompt", "response"))[0].key_not_obeyed


def test_large_columns_are_told_from_their_statistics(tmp_path: Path) -> None:
    """Without being read: each row of a row group counts if one has a value."""
    rng = np.random.default_rng(0)
    rows = [{**record("messages", "turn", {}, n), "vector": rng.normal(size=400).tolist(), "nothing": [None] * 9}
            for n in range(70)]  # fmt: skip
    rows[3]["vector"] = None
    found = read(write(tmp_path / "a.parquet", rows))
    assert all(own.unread_keys[:1] == ("vector",) for own in found)


def config(parts: Path, dataset: Path, path: Path, *keys: str) -> Config:
    bad = "data.bad_records=skip", "data.max_bad_records=100%"
    index = f"data.index={path.parent / 'index'}"
    return make_config(parts, dataset, path.parent, f"data.path={path}", *bad, index, *keys)


def steps(cfg: Config, parts: Path) -> Any:
    return build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps


def runs(labels: np.ndarray) -> list[range]:
    """The stretches of tokens with labels."""
    marked = np.flatnonzero(np.diff(np.concatenate([[0], labels != IGNORE, [0]])))
    return [range(begin, end) for begin, end in zip(marked[::2].tolist(), marked[1::2].tolist(), strict=True)]


@pytest.mark.parametrize("template", ["v1", "chatml", "mistral_instruct", "v0", "chat_template"])
def test_labels_are_those_of_the_answers_that_are_learnt(
    template: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """The tokens are the same, and an answer that is not learnt loses all of its labels, with those of its end."""
    if template == "chat_template":
        parts = with_chat_template(parts, tmp_path)
    plain = record("messages", "turn", {}, 0)
    last: dict[str, Any] = copy.deepcopy(plain) | {"id": "r2"}
    last["messages"][3]["loss"] = False
    both = record("messages", "record", {"weight": 0}, 3)
    path = write(tmp_path / "a.jsonl", [plain, record("messages", "turn", {"weight": 0}, 1), last, both])
    own = steps(config(parts, dataset, path, f"data.template={template}"), parts)
    whole, first, second = (own.read(number)[0] for number in range(3))
    stretches = runs(whole.labels)
    assert len(stretches) == 2 and len(own.records) == 3
    for sample, gone in ((first, stretches[0]), (second, stretches[1])):
        assert sample.input_ids.tolist() == whole.input_ids.tolist()
        expected = whole.labels.copy()
        expected[gone.start : gone.stop] = IGNORE
        assert sample.labels.tolist() == expected.tolist()
    assert own.records.index.flags(3, 4)[0] == BITS[Kind.no_labels]


def with_chat_template(parts: Path, folder: Path) -> Path:
    import shutil

    shutil.copytree(parts, folder / "parts")
    code = (
        "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '</s>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
    )
    (folder / "parts" / "language" / "chat_template.jinja").write_text(code)
    return folder / "parts"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_refused_records_and_unread_keys_are_counted(name: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """By source; the first screen of a training names the keys, and the original's labels obey nothing."""
    rows = [record("conversations", "turn", {"reasoning_content": "hm", "weight": None}, 0)]
    rows += [record("conversations", "turn", {"reasoning_content": None, "weight": 0}, 1)]
    rows += [record("conversations", "turn", {"reasoning_content": "", "weight": 1}, n) for n in range(2, 5)]
    rows[3]["persona"] = rows[4]["persona"] = "be kind"
    path = write(tmp_path / name, rows)
    other = write(tmp_path / f"other-{name}", [record("messages", "turn", {"name": "x"}, 0)])
    sources = [f"+data.sources.one.path={path}", f"+data.sources.two.path={other}"]
    cfg = config(parts, dataset, path, "data.path=null", *sources)
    records = open_again(cfg, parts)
    refused = BITS[Kind.key_not_obeyed]
    assert records.index.flags(0, 6).tolist() == [refused, 0, 0, 0, 0, 0] and len(records) == 5
    assert records.index.unread_keys == {"one": {"persona": 2}, "two": {"messages[].name": 1}}
    assert make_report(records, cfg)["unread_keys"] == records.index.unread_keys
    assert "source one has keys that are not read: persona (2 records)" in remarks(records)
    (row,) = records.index.problems()
    assert row["kind"] == Kind.key_not_obeyed and "data.thoughts=train" in row["reason"] and row["id"] == "r0"
    original = open_again(config(parts, dataset, path, "data.path=null", *sources, *ORIGINAL), parts)
    assert original.index.flags(0, 6).tolist() == [refused, refused, 0, 0, 0, 0]


ORIGINAL = ("labels=llava_v1_5", "data.special_tokens=parse")


def test_a_record_with_many_keys_is_told_by_a_few(tmp_path: Path) -> None:
    raw = record("messages", "turn", {}) | {f"key{n}": n + 1 for n in range(5000)} | {"x" * 3000: 1}
    (found,) = read(write(tmp_path / "a.jsonl", [raw]))
    assert len(found.unread_keys) == 32 and max(map(len, found.unread_keys)) <= 100
