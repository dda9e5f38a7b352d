"""Only files that are new, changed or renamed are indexed again; a truncated one is refused by name."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from containers import write_container
from small import make_config
from test_build import open_again

from llava_fsdp.data.index.dataset import Records
from llava_fsdp.runtime.errors import DataError

PASSES = 4
"""Positions, records, images and tokens: each makes one file of a file with few records."""


class Shards:
    """A folder of tars of one record each, and how its index changes."""

    def __init__(self, parts: Path, dataset: Path, folder: Path, count: int):
        rows = json.loads((dataset / "mixed.json").read_text())
        self.rows = [{**rows[n % len(rows)], "id": f"n{n}"} for n in range(count)]
        self.parts, self.images, self.folder, self.index = (
            parts,
            dataset / "images",
            folder / "shards",
            folder / "index",
        )
        self.files = write_container("tar", self.folder, self.rows, self.images, count)
        values = f"data.path={self.folder}", "data.images=null", f"data.index={self.index}"
        self.cfg = make_config(parts, dataset, folder, *values)
        self.made: set[Path] = set()

    def write(self, file: Path, row: dict) -> None:
        (made,) = write_container("tar", self.folder.parent / "aside", [row], self.images)
        made.replace(file)

    def open(self, what: str) -> tuple[Records | None, int]:
        """The records, None if the index was refused; and the number of chunk files made."""
        begun, records, said = time.monotonic(), None, ""
        try:
            records = open_again(self.cfg, self.parts)
        except DataError as error:
            said = str(error)
        seconds = time.monotonic() - begun
        found = {*self.index.glob("chunks/*/*.npz")}
        assert self.made <= found
        new, self.made = len(found - self.made), found
        print(f"{len(self.files)} files, {what}: {new} chunk files in {seconds:.2f} s {said}")
        return records, new


def ids(records: Records | None) -> list[str]:
    assert records is not None
    return [records[n].id for n in range(len(records))]


def only_what_changed(shards: Shards, capsys: pytest.CaptureFixture[str]) -> None:
    count, files = len(shards.files), shards.files
    expected = [f"n{n}" for n in range(count)]

    def check(what: str, new: int, wanted: list[str]) -> None:
        records, made = shards.open(what)
        assert made == new and ids(records) == wanted

    check("all new", PASSES * count, expected)
    check("none changed", 0, expected)
    shards.write(shards.folder / "part-9999.tar", {**shards.rows[0], "id": "added"})
    check("one added", PASSES, [*expected, "added"])
    shards.write(files[3], {**shards.rows[3], "id": "changed"})
    changed = [*expected[:3], "changed", *expected[4:], "added"]
    check("one changed", PASSES, changed)
    (shards.folder / "part-9999.tar").unlink()
    check("one removed", 0, changed[:-1])
    files[5].rename(shards.folder / "part-9999.tar")
    check("one renamed", PASSES, [*changed[:5], *changed[6:-1], changed[5]])
    whole = files[7].read_bytes()
    files[7].write_bytes(whole[: len(whole) // 2 + 1])
    with pytest.raises(DataError, match=files[7].name):
        open_again(shards.cfg, shards.parts)
    records, made = shards.open("one truncated")
    assert records is None and made == 0
    files[7].write_bytes(whole)
    check("one restored", 0, [*changed[:5], *changed[6:-1], changed[5]])
    with capsys.disabled():
        print("\n" + capsys.readouterr().out)


Count = Callable[[int], Shards]


@pytest.fixture
def shards_of(parts: Path, dataset: Path, tmp_path: Path) -> Count:
    return lambda count: Shards(parts, dataset, tmp_path, count)


def test_thirty_files(shards_of: Count, capsys: pytest.CaptureFixture[str]) -> None:
    only_what_changed(shards_of(30), capsys)


@pytest.mark.slow
def test_a_thousand_files(shards_of: Count, capsys: pytest.CaptureFixture[str]) -> None:
    only_what_changed(shards_of(1000), capsys)
