"""A damaged index is refused with the file's name, whatever was done to which file, and never read as another."""

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import CPU
from planted import write_planted
from small import make_config
from test_build import FITS, open_again, plan_of

from llava_fsdp.data.index import integrity
from llava_fsdp.data.index.build import Index, Plan, open_index
from llava_fsdp.data.index.integrity import check_part, check_sum, read_column, read_json, read_rows, write_done
from llava_fsdp.data.loader import build_loader
from llava_fsdp.runtime.errors import DamagedError, DataError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.text.progress import watch_silently

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "cut": lambda whole: whole[:-1],
    "cut in its head": lambda whole: whole[:60],
    "another byte": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "garbage": lambda whole: bytes(255 for _ in whole),
}


@pytest.fixture(scope="module")
def plan(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("planted")
    path, _ = write_planted(folder, lines=True)
    plan = plan_of(make_config(parts, folder, folder, f"data.path={path}", f"data.images={folder / 'images'}"), parts)
    open_index(plan, watch_silently)
    return plan


def refused(plan: Plan, look_again: bool) -> DamagedError:
    with pytest.raises(DamagedError) as caught:
        index = open_index(plan, watch_silently, look_again)
        list(index.problems())
        index.flags(0, 10)
    assert caught.value.exit_code is ExitCode.USER
    return caught.value


def files_of(index: Index) -> list[Path]:
    parts = index.store.folder, index.records, index.pictures, index.encoded
    found = [path for part in parts for path in sorted(part.iterdir())]
    assert len(found) > 20 and {path.suffix for path in found} == {".npy", ".jsonl", ".json"}
    return found


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_named(damage: str, plan: Plan) -> None:
    index = open_index(plan, watch_silently)
    for path in files_of(index):
        whole = path.read_bytes()
        made = DAMAGES[damage](whole)
        if made == whole or (path.name == "done.json" and damage == "another byte"):
            continue
        path.unlink()
        if made is not None:
            path.write_bytes(made)
        same_size = made is not None and len(made) == len(whole) and path.suffix != ".json"
        for look_again in (True,) if same_size else (False, True):
            said = str(refused(plan, look_again))
            assert said.startswith(f"the index {index.folder} is damaged ({path.relative_to(index.folder)}: "), said
            assert said.endswith("); delete it, and it is made again")
        path.write_bytes(whole)
    assert len(open_index(plan, watch_silently, look_again=True)) == len(index)


def test_what_can_be_found_out_again_is(plan: Plan) -> None:
    index = open_index(plan, watch_silently)
    known, (looked,) = index.folder / "known.json", index.folder.glob("*.looked")
    for content in (b"", b"\xff\xfe", b"[1]", b'{"a": 1}', known.read_bytes()[:-5]):
        known.write_bytes(content)
        looked.write_bytes(content)
        assert open_index(plan, watch_silently).store.folder == index.store.folder
    shutil.rmtree(index.records)
    shutil.rmtree(index.store.folder)
    assert len(open_index(plan, watch_silently)) == len(index)
    shutil.rmtree(index.folder)
    assert len(open_index(plan, watch_silently)) == len(index)


def test_wrong_places_of_the_right_size(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """What only sums find is at least named as what it is where a training meets it."""
    cfg = make_config(parts, dataset, tmp_path, f"data.path={dataset / 'text.json'}", f"data.index={tmp_path / 'i'}")
    store = open_again(cfg, parts).index.store
    folders = parts / "language", parts / "vision"
    column = store.folder / "offset.npy"
    whole = column.read_bytes()
    wrong = {-5: "is damaged", 1 << 50: r"ends before byte \d+", 7: "It was right when the dataset"}
    for value, message in wrong.items():
        column.write_bytes(whole[:128] + value.to_bytes(8, "little", signed=True) + whole[136:])
        loader = build_loader(cfg, *folders, FITS, 0, 1, CPU)
        with pytest.raises(DataError, match=message) as caught:
            loader.steps.read(0)
        assert caught.value.kind is None, "it is no record's, and never left out"


def test_readers_say_what_they_met(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c" / "file"
    path.parent.mkdir(parents=True)
    for content in (b"", b"{", b"[]\n", b"\x93NUMPY\x01\x00v\x00{'descr'"):
        path.write_bytes(content)
        for read in (read_column, read_json, lambda p: list(read_rows(p))):
            if content == b"" and read not in (read_column, read_json):
                continue
            with pytest.raises(DamagedError, match=rf"the index {tmp_path / 'a'} is damaged \(b/c/file: "):
                read(path)


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 14, 17])
def test_every_byte_of_a_large_file_is_in_its_checksum(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are read a block at a time."""
    monkeypatch.setattr(integrity, "BLOCK", 7)
    path, content = tmp_path / "column.npy", bytes(range(1, size + 1))
    path.write_bytes(content)
    assert check_sum(path) == zlib.crc32(content)
    write_done(tmp_path, {})
    check_part(tmp_path, whole=True)
    for at in range(size):
        path.write_bytes(content[:at] + b"\0" + content[at + 1 :])
        with pytest.raises(DamagedError):
            check_part(tmp_path, whole=True)
