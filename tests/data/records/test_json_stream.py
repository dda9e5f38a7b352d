"""Records are found in a file a stretch at a time, wherever the stretches begin and end."""

import gzip
import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest
from tiers import slow_after

from llava_fsdp.data.containers.file_reader import reading as source_of
from llava_fsdp.data.records import json_stream
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.json_stream import spans
from llava_fsdp.data.records.record import Record, Turn, parse_text
from llava_fsdp.data.text.conversation import check_turns
from llava_fsdp.runtime.errors import DataError, SourceError

NASTY = [
    {"id": 'a "]},{[\\', "text": "größe 中 \U0001f600 \u2028", "deep": [[{"a": [{}]}], {"b": {"c": []}}]},
    {},
    [],
    {"a": -1.5e-10, "b": [0, 12, 345], "c": True, "d": None},
    12,
    -3.25e10,
    "a ] string , [",
    "",
    True,
    None,
    {"escapes": '\\\\" \\u005d \t \n'},
]


def found(path: Path) -> list:
    """The records; their lines are checked beside."""
    content = path.read_bytes()
    for offset, _, line in spans(path):
        assert line == content[:offset].count(b"\n") + 1
    return [json.loads(content[offset : offset + size]) for offset, size, _ in spans(path)]


WRITTEN = {
    "ascii": json.dumps(NASTY),
    "utf-8": json.dumps(NASTY, ensure_ascii=False),
    "indented": json.dumps(NASTY, indent=3, ensure_ascii=False),
    "bare": json.dumps(NASTY, separators=(",", ":")),
    "spaces": " \r\n[ \t\n" + " ,\r\n ".join(json.dumps(v) for v in NASTY) + " ] \n",
    "numbers": "[1,23,456 ,7e5]",
    "one": "[ {} ]",
    "none": " [ ] ",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_lists_are_cut_right_wherever_a_stretch_ends(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text(WRITTEN[name], encoding="utf-8")
    for block in (*range(1, 24), 64, 1 << 20):
        monkeypatch.setattr(json_stream, "BLOCK", block)
        assert found(path) == json.loads(WRITTEN[name]), block


@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
def test_goes_on_behind_any_record(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps(value) + "\n" for value in NASTY)
    texts = {"a.json": (WRITTEN["utf-8"], WRITTEN["spaces"], WRITTEN["indented"]), "a.jsonl": (lines, lines[:-1])}
    for name, text in [(name, text) for name, own in texts.items() for text in own]:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(json_stream, "BLOCK", 1 << 20)
        whole = list(spans(path))
        monkeypatch.setattr(json_stream, "BLOCK", block)
        for number, span in enumerate(whole):
            assert list(spans(path, span)) == whole[number + 1 :]


@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
def test_lines(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "BLOCK", block)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": 2} \nnot json\n[3]')
    content = path.read_bytes()
    whole = list(spans(path))
    found = [content[o : o + s].rstrip(b" ") for o, s, _ in whole]  # a space may be in the next block
    assert found == [b'{"a": 1}', b'{"b": 2}', b"not json", b"[3]"]
    assert [line for _, _, line in whole] == [1, 4, 5, 6]
    for number, span in enumerate(whole):
        assert list(spans(path, span)) == whole[number + 1 :]


BROKEN = {
    "cut": ('[{"a": 1},\n{"a', r"a\.json is not JSON: Unterminated string .*line 2, byte 12"),
    "cut between": ("[1,\n 2", r"Expecting ',' delimiter, line 2, byte 6"),
    "trailing comma": ("[1,\n]", r"Illegal trailing comma .*line 2, byte 4"),
    "no comma": ("[1\n 2]", r"Expecting ',' delimiter, line 2, byte 4"),
    "two commas": ("[1,,2]", r"Expecting value, line 1, byte 3"),
    "more behind": ("[1]\n\n[2]", r"Extra data, line 3, byte 5"),
    "single quotes": ("[{'a': 1}]", r"double quotes, line 1, byte 2"),
    "nothing": ("", r"a\.json is empty \(0 bytes\)"),
    "lines": ('{"a": 1}\n{"a": 2}', r"holds a JSON object, and is not a list of records; .* or JSON Lines in a file"),
    "deep": ("[" * 100_000, r"nested too deeply"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_broken_lists_are_named_by_line_and_byte(
    case: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = BROKEN[case]
    (tmp_path / "a.json").write_text(text)
    monkeypatch.setattr(json_stream, "BLOCK", block)
    with pytest.raises(DataError, match=message):
        list(spans(tmp_path / "a.json"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_encodings_are_refused(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]", encoding=encoding)
    with pytest.raises(DataError, match=r"a\.json is UTF-\d\d; write it as UTF-8"):
        list(spans(tmp_path / "a.json"))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_memory_does_not_grow_with_the_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "BLOCK", 1 << 14)
    record = json.dumps({"id": "x", "text": "words and " * 40})

    def peak(count: int) -> int:
        path = tmp_path / f"a{suffix}"
        path.write_text("\n".join([record] * count) if suffix == ".jsonl" else f"[{','.join([record] * count)}]")
        tracemalloc.start()
        assert sum(1 for _ in spans(path)) == count
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(4000) < 1.1 * peak(400) < 1 << 20


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_file_of_something_else_is_not_read_to_its_end(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "BLOCK", 1 << 10)
    (tmp_path / f"a{suffix}").write_text('["' + "a" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError):
        list(spans(tmp_path / f"a{suffix}", max_bytes=1 << 12))
    assert tracemalloc.get_traced_memory()[1] < 1 << 17
    tracemalloc.stop()


LARGE = [
    {"a": 'quotes " and \\ and ]},{[' * 40},
    [[1, [2, "x]"]]] * 90,
    "a string by itself \\ " * 40,
    ["\\"] * 200,
]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("gap", [",", " ,\r\n ", "\n,"])
def test_large_records_are_passed_by(block: int, gap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they end is found without parsing them; those around them are what they were."""
    monkeypatch.setattr(json_stream, "BLOCK", block)
    values = [value for pair in zip(LARGE, NASTY, strict=False) for value in pair]
    texts = [json.dumps(value, ensure_ascii=False) for value in values] + ["1" * 700 + ".5", '{"b": 2}']
    path = tmp_path / "a.json"
    path.write_text(f"[{gap.join(texts)}]", encoding="utf-8")
    content = path.read_bytes()
    for most in (100, 1 << 20):
        found = [content[at : at + size].decode().rstrip() for at, size, _ in spans(path, max_bytes=most)]
        assert found == texts
        assert [line for _, _, line in spans(path, max_bytes=most)] == [
            content[:at].count(b"\n") + 1 for at, _, _ in spans(path, max_bytes=most)
        ]
    whole = list(spans(path, max_bytes=100))
    assert all(list(spans(path, span, max_bytes=100)) == whole[n + 1 :] for n, span in enumerate(whole))


@pytest.mark.parametrize("text", ['[{"a": "' + "b" * 900, '[{"a": 1]' + " " * 900, '[{"a" 1}, ' + '"b", ' * 300 + "1]"])
def test_what_is_broken_is_not_called_large(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json is not JSON: .* line 1, byte \d+; fix it") as few:
        list(spans(tmp_path / "a.json", max_bytes=50))
    with pytest.raises(DataError) as many:
        list(spans(tmp_path / "a.json"))
    assert str(few.value) == str(many.value)


def test_a_record_of_exactly_the_most_bytes_is_looked_into(tmp_path: Path) -> None:
    """A larger one that is broken is passed by, and a larger list in a file of lines is refused."""
    (tmp_path / "a.json").write_text('[{"a" 1}, 23]')
    assert [size for _, size, _ in spans(tmp_path / "a.json", max_bytes=6)] == [7, 2]
    with pytest.raises(DataError):
        list(spans(tmp_path / "a.json", max_bytes=7))
    (tmp_path / "a.jsonl").write_text("[1, 2]\n3")
    assert [size for _, size, _ in spans(tmp_path / "a.jsonl", max_bytes=7)] == [6, 1]
    with pytest.raises(DataError):
        list(spans(tmp_path / "a.jsonl", max_bytes=6))


@pytest.mark.parametrize("suffix", slow_after(1, [".json", ".jsonl"]))
def test_memory_does_not_grow_with_a_record(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "BLOCK", 1 << 12)
    large = json.dumps({"id": "x", "text": ["words and "] * 100_000})
    (tmp_path / f"a{suffix}").write_text(f"{large}\n1\n" if suffix == ".jsonl" else f"[{large}, 1]")
    tracemalloc.start()
    assert [size for _, size, _ in spans(tmp_path / f"a{suffix}", max_bytes=1 << 12)] == [len(large), 1]
    assert tracemalloc.get_traced_memory()[1] < 1 << 17 < len(large)
    tracemalloc.stop()


def test_a_list_in_a_file_of_lines_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"[{', '.join(['1'] * 2000)}]")
    with pytest.raises(DataError, match=r"line 1 is a list .* ends in \.json"):
        list(spans(tmp_path / "a.jsonl", max_bytes=1000))


RAW = {
    "null": ({"id": None}, "without an id", None),
    "none": ({}, "without an id", None),
    "text": ({"id": "a"}, "id a", "a"),
    "empty": ({"id": ""}, "id ", ""),
    "number": ({"id": 7}, "id 7", "7"),
    "truth": ({"id": True}, "id true", "true"),
    "list": ({"id": ["a"]}, 'id ["a"]', '["a"]'),
}


@pytest.mark.parametrize("case", RAW)
def test_a_record_is_named_by_line_index_and_id(case: str) -> None:
    raw, name, identity = RAW[case]
    record = parse_record(Path("a.jsonl"), 4, {**raw, "conversations": []}, 6)
    assert record.where == f"a.jsonl, line 6, record 4 ({name})"
    assert record.known_id == identity and record.id == ("4" if identity is None else identity)


UNREADABLE = {
    "order mark": (b'\xef\xbb\xbf{"a": 1}', r"begins with a byte order mark, .*: take it out"),
    "carriage returns": (b'{"a": 1}\r{"a": 2}', r"end in a carriage return alone .*: write the file with line feeds"),
    "null": (b"null", r"line 2, record 1 is null, not an object"),
    "number": (b"5", r"is a number, not an object"),
    "truth": (b"true", r"is true or false, not an object"),
    "list": (b"[]", r"is a list, not an object"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_record_is_called_what_it_is(case: str) -> None:
    text, message = UNREADABLE[case]
    with pytest.raises(DataError, match=message):
        parse_record(Path("a.jsonl"), 1, parse_text(Path("a.jsonl"), 1, text, 2), 2)


HEADS = {
    "gzip": (gzip.compress(b"[]"), "a gzip file; unpack it"),
    "zip": (b"PK\x03\x04...", "a zip file; unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd...", "a zstd file; unpack it"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:a\n", "a pointer of git-LFS"),
    "html": (b"\n<!DOCTYPE html><html>", "a page of HTML"),
    "parquet": (b"PAR1\0\0", "a Parquet file; give it a name that ends in .parquet"),
    "empty": (b"", r"empty \(0 bytes\)"),
}


@pytest.mark.parametrize("case", HEADS)
def test_files_of_another_kind_are_named(case: str, tmp_path: Path) -> None:
    content, message = HEADS[case]
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} is {message}"):
            list(spans(tmp_path / name))


def test_names_in_capitals_and_lone_numbers(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL").write_text("1\n2\n")
    assert found(tmp_path / "A.JSONL") == [1, 2]
    (tmp_path / "a.json").write_text("42")
    with pytest.raises(DataError, match="holds a number, and is not a list of records"):
        list(spans(tmp_path / "a.json"))


OK = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CURES = {
    "no conversations": (
        {"id": 1, "message": []},
        r'missing, the keys are \["id", "message"\]; it must have one of conversations, messages, texts',
    ),
    "null": ({"conversations": None}, r"conversations is null; it must be a list of turns"),
    "other keys": (
        {"conversations": [{"role": "user", "text": "a"}]},
        r'turn 0 is {"role": "user", "text": "a"}; it must be .*role and content',
    ),
    "not a number": (
        {"conversations": [{"from": "gpt", "value": math.nan}]},
        r"turn 0 is NaN; it must be text",
    ),
    "dots": ({"image": "a/../b.png", "conversations": OK}, r"\.\. is not allowed in a path, wherever it leads"),
    "slash": ({"image": "b.png/", "conversations": OK}, r"'b\.png/', which names a folder; take the / off"),
    "no picture": ({"image": False, "conversations": OK}, r"image is false; it must be a path .* leave the key out"),
}


@pytest.mark.parametrize("case", CURES)
def test_every_message_has_a_cure(case: str) -> None:
    raw, message = CURES[case]
    with pytest.raises(DataError, match=message):
        parse_record(Path("a.json"), 0, raw)


ROLES = {
    "User": "rename User to user",
    "Human": "rename Human to human",
    "system": "reads one system turn, at the beginning",
    "gpt": r"human \(user\) and gpt \(assistant\) take turns, human first",
    "narrator": "rename it to system, human or gpt",
}


@pytest.mark.parametrize("role", ROLES)
def test_roles_are_mended_by_name(role: str) -> None:
    turns = tuple(Turn(name, "a") for name in ("human", "gpt", role, "gpt"))
    with pytest.raises(DataError, match=f"turn 2 is from '{role}', not from 'human'; .*{ROLES[role]}"):
        check_turns(Record("a.json", 0, "a", (), turns, False))


@pytest.mark.parametrize(("code", "cure"), [(13, "let this user read it"), (2, "put it back"), (5, "run it again")])
def test_a_file_that_cannot_be_read(code: int, cure: str) -> None:
    with (
        pytest.raises(SourceError, match=rf"a\.json cannot be read: [A-Z][a-z/ ]+; .*{cure}"),
        source_of(Path("a.json")),
    ):
        raise OSError(code, os.strerror(code), "a.json")
