"""`prepare verify=true` finds what size and time do not show: a letter, a byte of an image."""

import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from small import config_of, make_config, write_dataset
from test_build import open_again, plan_of

from llava_fsdp.config import Config, PrepareConfig
from llava_fsdp.data.index import build as index_module
from llava_fsdp.data.index.verify import verify_index
from llava_fsdp.prepare.main import prepare
from llava_fsdp.runtime.errors import ConfigError, DamagedError, DataError
from llava_fsdp.runtime.text.progress import watch_silently


def put(path: Path, content: bytes) -> None:
    """Of equal size, at an equal time."""
    stat = path.stat()
    assert stat.st_size == len(content)
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def verify(cfg: Config, parts: Path, workers: int = 1) -> tuple[int, int]:
    return verify_index(plan_of(cfg, parts, workers), watch_silently)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_a_letter_of_an_answer(suffix: str, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHUNKS", dict.fromkeys(index_module.CHUNKS, 7))
    write_dataset(tmp_path)
    path = tmp_path / f"a.{suffix}"

    rows = json.loads((tmp_path / "mixed.json").read_text())
    rows[17]["conversations"][1]["value"] = "a red circle of its own"
    if suffix == "parquet":
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    cfg = make_config(parts, tmp_path, tmp_path, f"data.path={path}")
    before = open_again(cfg, parts)
    whole = sum(isinstance(row.get("image"), str) for row in rows)
    assert verify(cfg, parts) == (44, whole)
    put(path, path.read_bytes().replace(b"a red circle of its own", b"a bed circle of its own"))
    assert open_again(cfg, parts).fingerprint == before.fingerprint, "a training does not see it"
    with pytest.raises(
        DataError, match=r"^1 records or images (.|\n)*record 17 \(id r17\) is not what it was"
    ) as caught:
        verify(cfg, parts)
    assert caught.value.exit_code == 2 and "take the files from their source again" in str(caught.value)


def test_an_image_and_one_that_is_gone(parts: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path)
    cfg = make_config(parts, tmp_path, tmp_path)
    open_again(cfg, parts)
    assert verify(cfg, parts)[0] == 44
    path = tmp_path / "images" / "3.png"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    put(path, bytes(content))
    (tmp_path / "images" / "5.png").unlink()
    rows = json.loads((tmp_path / "mixed.json").read_text())
    users = {name: [r["id"] for r in rows if r.get("image") == name] for name in ("3.png", "5.png")}
    with pytest.raises(DataError) as caught:
        verify(cfg, parts)
    said = str(caught.value)
    assert said.startswith(f"{sum(map(len, users.values()))} records or images are not what the index")
    assert all(f"(id {name})" in said for own in users.values() for name in own)
    assert said.count(f"image {path} is not what it was, of ") == len(users["3.png"]) and "5.png does not exist" in said


def test_an_index_that_is_damaged_or_not_there(parts: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path)
    cfg = make_config(parts, tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"verify=true: .* has no whole index of these files"):
        verify(cfg, parts)
    index = open_again(cfg, parts).index
    content = bytearray((index.records / "digest.npy").read_bytes())
    content[-3] ^= 1
    put(index.records / "digest.npy", bytes(content))
    with pytest.raises(DamagedError, match=r"digest\.npy"):
        verify(cfg, parts)


def test_images_of_whose_content_nothing_is_known(parts: Path, dataset: Path, tmp_path: Path) -> None:
    given = [
        "data=llava_json", f"data.path={dataset / 'mixed.json'}", f"data.images={dataset / 'images'}",
        f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"verify=true compares whole image files.* set data\.examine=decode"):
        config_of([*given, "verify=true", "data.examine=head"], "prepare")


def test_as_an_entry(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It makes nothing, and says how much agrees; the held-out records too."""
    write_dataset(tmp_path)
    given = [
        "data=llava_json", f"data.path={tmp_path / 'mixed.json'}", f"data.images={tmp_path / 'images'}", "format=json",
        f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}", "model.random_weights=true",
        "data.max_length=256", "val.every=2", f"val.path={tmp_path / 'text.json'}", "prepare.workers=1",
        "model.projector=random",
    ]  # fmt: skip
    made, looked = (config_of([*given, *more], "prepare") for more in ([], ["verify=true"]))
    assert isinstance(made, PrepareConfig) and isinstance(looked, PrepareConfig)
    prepare(made)
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    capsys.readouterr()
    prepare(looked)
    found = json.loads(capsys.readouterr().out)
    assert found["records"] == 44 and found["val"]["records"] == 20 and found["images"] > 0 == found["val"]["images"]
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == files
