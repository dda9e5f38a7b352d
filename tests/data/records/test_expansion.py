"""A Parquet file of a few kilobytes does not become gigabytes: it is refused by name, at once and in little memory."""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.records.forms.parse_record import RecordKeys
from llava_fsdp.data.records.json_stream import MOST_BYTES
from llava_fsdp.data.records.record import TOO_LARGE
from llava_fsdp.data.records.rows import all_lines
from llava_fsdp.runtime.errors import DataError

KEYS = RecordKeys("q", "a")
SECONDS, MEMORY = 10, 512 << 20
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
KIND = pyarrow.list_(pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.string())]))
LONG = "x y " * 750_000


def same(value: Any, rows: int, kind: Any = None) -> Any:
    """A column that repeats one value."""
    return pyarrow.array([value], kind).take(pyarrow.array(np.zeros(rows, np.int64)))


def long(rows: int) -> Any:
    """A column that repeats a long text, as one value of a dictionary. In the file it is an ordinary column of text."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(rows, np.int32)), [LONG])


def long_turns(rows: int) -> Any:
    """Conversations whose question is that text."""
    role = pyarrow.array(["human", "gpt"] * rows)
    index = pyarrow.array([0, 1] * rows, pyarrow.int32())
    value = pyarrow.DictionaryArray.from_arrays(index, [LONG, "b"])
    turns = pyarrow.StructArray.from_arrays([role, value], names=["from", "value"])
    return pyarrow.ListArray.from_arrays(pyarrow.array(range(0, 2 * rows + 1, 2), pyarrow.int32()), turns)


def one_row(**columns: Any) -> Any:
    """A table of one row; each column but the conversation is a list."""
    made = {
        n: pyarrow.ListArray.from_arrays(pyarrow.array([0, len(c)], pyarrow.int32()), c) for n, c in columns.items()
    }
    return pyarrow.table({"conversations": pyarrow.array([TURNS], KIND), **made})


def images(count: int, data: Any) -> Any:
    return pyarrow.StructArray.from_arrays([data, pyarrow.nulls(count, pyarrow.string())], names=["bytes", "path"])


def empty_turns(count: int) -> Any:
    fields = [pyarrow.nulls(count, pyarrow.string())] * 2
    return pyarrow.StructArray.from_arrays(fields, names=["from", "value"])


MILLION = 1_000_000
LARGE_ROWS: dict[str, Callable[[], Any]] = {
    "a million empty images": lambda: one_row(images=images(MILLION, same(b"", MILLION, pyarrow.binary()))),
    "a million null images": lambda: one_row(images=images(MILLION, pyarrow.nulls(MILLION, pyarrow.binary()))),
    "a million paths": lambda: one_row(images=same("a", MILLION)),
    "a million videos": lambda: one_row(videos=same("a", MILLION)),
    "a million turns": lambda: pyarrow.table(
        {
            "conversations": pyarrow.ListArray.from_arrays(
                pyarrow.array([0, MILLION], pyarrow.int32()), empty_turns(MILLION)
            )
        }
    ),
    "one long id": lambda: pyarrow.table({"id": ["x" * 5_000_000], "conversations": pyarrow.array([TURNS], KIND)}),
}
BOMBS: dict[str, Callable[[], Any]] = {
    "four million images": lambda: one_row(images=images(4 * MILLION, same(b"", 4 * MILLION, pyarrow.binary()))),
    "four million sounds": lambda: one_row(audio=same(b"", 4 * MILLION, pyarrow.binary())),
    "twenty million turns": lambda: pyarrow.table(
        {"conversations": pyarrow.ListArray.from_arrays(
            pyarrow.array([0, 20 * MILLION], pyarrow.int32()), empty_turns(20 * MILLION)
        )}
    ),
    "one long question": lambda: pyarrow.table({"q": long(300), "a": same("b", 300)}),
    "one long turn": lambda: pyarrow.table({"conversations": long_turns(300)}),
    "one long path": lambda: pyarrow.table({"image": long(300), "conversations": same(TURNS, 300, KIND)}),
    "one long id in many rows": lambda: pyarrow.table({"id": long(300), "conversations": same(TURNS, 300, KIND)}),
    "nulls": lambda: pyarrow.table({"conversations": pyarrow.nulls(120_000, KIND)}),
    "fewer nulls": lambda: pyarrow.table({"conversations": pyarrow.nulls(15_000, KIND)}),
    "one record in all rows": lambda: pyarrow.table({"conversations": same(TURNS, 120_000, KIND)}),
    "half a record in all rows": lambda: pyarrow.table({"conversations": same(TURNS[:1], 120_000, KIND)}),
}  # fmt: skip


def write(path: Path, table: Any, **how: Any) -> Path:
    parquet.write_table(table, path, store_schema=False, **({"compression": "zstd"} | how))
    return path


def read(path: Path) -> list[bytes]:
    return list(all_lines(str(path), KEYS, MOST_BYTES, DataFiles()))


def limited(path: Path, run: Callable[[Path], Any]) -> Any:
    assert path.stat().st_size < 10_000
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = run(path)
    assert time.process_time() - began < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY
    return found


@pytest.mark.parametrize("name", LARGE_ROWS)
def test_a_row_that_would_be_too_large_is_known_before_it_is_built(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", LARGE_ROWS[name]())
    (line,) = limited(path, read)
    assert json.loads(line)[TOO_LARGE][0] > MOST_BYTES and (len(line) < 200 or "id" in name)


SLOW = ("one long turn", "one long path", "one long id in many rows", "half a record in all rows")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in BOMBS])
def test_a_small_file_of_endless_rows_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", BOMBS[name]())

    def refused(path: Path) -> None:
        with pytest.raises(DataError, match=r"a\.parquet.*(claims|take|hold)") as caught:
            read(path)
        assert caught.value.kind is None, "the file is refused, not a record"

    limited(path, refused)


@pytest.mark.slow
def test_a_long_text_of_a_column_of_categories_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"q": long(300), "a": same("b", 300)}), path)
    with pytest.raises(DataError, match=r"a\.parquet.*take"):
        read(path)


@pytest.mark.slow
def test_a_long_text_that_nothing_reads_costs_little(tmp_path: Path) -> None:
    conversations = same(TURNS, 300, KIND)
    for name in ("rejected_response", "foo"):
        path = write(tmp_path / "a.parquet", pyarrow.table({name: long(300), "conversations": conversations}))
        lines = limited(path, read)
        assert len(lines) == 300 and all(len(line) < 200 and name.encode() in line for line in lines)


@pytest.mark.parametrize(
    "how", [{}, {"compression": "snappy"}, {"use_dictionary": False}, {"compression": "none"}], ids=repr
)
def test_files_that_repeat_what_datasets_repeat_are_read(how: dict[str, Any], tmp_path: Path) -> None:
    """One system text and one image path in all rows, and columns of nulls; the questions and answers differ."""
    rows = 3_000
    system = "you are a helpful assistant. " * 100
    messages = [
        [{"role": "system", "content": system}, {"role": "user", "content": f"<image>\n{n}?"},
         {"role": "assistant", "content": f"{n * n}"}] for n in range(rows)
    ]  # fmt: skip
    table = pyarrow.table({
        "messages": messages, "image": same("one.png", rows), "id": pyarrow.nulls(rows, pyarrow.string()),
        "texts": pyarrow.nulls(rows, KIND), "conversations": pyarrow.nulls(rows, KIND),
    })  # fmt: skip
    lines = read(write(tmp_path / "a.parquet", table, **how))
    assert [json.loads(line)["messages"] for line in lines] == messages and len(lines) == rows
    assert len(read(write(tmp_path / "b.parquet", pyarrow.table({"conversations": same(TURNS, 9000, KIND)})))) == 9000


def test_a_few_rows_without_a_value_are_records_with_a_problem(tmp_path: Path) -> None:
    """They are counted where they are; a group of which most rows are empty has the wrong columns."""
    values = [TURNS, None, TURNS] * 500
    path = write(tmp_path / "a.parquet", pyarrow.table({"conversations": pyarrow.array(values, KIND)}))
    assert [line == b"{}" for line in read(path)] == [value is None for value in values]
