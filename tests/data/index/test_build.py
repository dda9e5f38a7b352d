"""The index of a dataset: made once, resumed after any kill, the same whoever makes it and in whatever format."""

import contextlib
import errno
import gzip
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from containers import CONTAINERS, HOLD_IMAGES, write_container
from PIL import Image
from planted import with_picture, write_planted
from small import make_config, write_json

from llava_fsdp.config import Config
from llava_fsdp.data.index import build as index_module
from llava_fsdp.data.index import record_store, worker_pool
from llava_fsdp.data.index.build import Index, Plan, is_foreign, open_index
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine import duplicate_ids
from llava_fsdp.data.index.examine.duplicate_ids import find_duplicates
from llava_fsdp.data.index.record_store import SourceFile
from llava_fsdp.data.index.worker_pool import chunk_file, chunk_files, join, run_chunks
from llava_fsdp.data.loader import ModelShape, open_encoding
from llava_fsdp.runtime.errors import ConfigError, DataError, SourceError, WorkerError
from llava_fsdp.runtime.text.progress import watch_silently

FITS = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)


def plan_of(cfg: Config, parts: Path, workers: int = 1) -> Plan:
    return Plan(cfg.data, *open_encoding(cfg, parts / "language", parts / "vision", FITS), workers)


def open_again(cfg: Config, parts: Path, workers: int = 1, look_again: bool = False) -> Records:
    index = open_index(plan_of(cfg, parts, workers), watch_silently, look_again)
    return Records(index, cfg.labels, cfg.data.too_long)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that a few records make many."""
    monkeypatch.setattr(index_module, "CHUNKS", dict.fromkeys(index_module.CHUNKS, 7))


@pytest.fixture
def workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes are started for the second chunk, however short the pass."""
    monkeypatch.setattr(worker_pool, "ALONE_SECONDS", 1e-4)


def content(index: Index) -> dict[str, bytes]:
    """Every file of the index by its name within."""
    parts = index.store.folder, index.records, index.pictures, index.encoded
    return {f"{part.name}/{p.name}": p.read_bytes() for part in parts for p in sorted(part.iterdir())}


@pytest.mark.slow
@pytest.mark.usefixtures("chunks", "workers_at_once")
def test_any_number_of_workers_makes_the_same(parts: Path, tmp_path: Path) -> None:
    path, _ = write_planted(tmp_path, lines=True)
    made = []
    for workers in (1, 2):
        cfg = make_config(
            parts, tmp_path, tmp_path, f"data.path={path}", f"data.images={tmp_path / 'images'}",
            f"data.index={tmp_path / str(workers)}",
        )  # fmt: skip
        made.append(content(open_again(cfg, parts, workers).index))
    assert made[0] == made[1] and len(made[0]) > 20


@pytest.mark.slow
@pytest.mark.usefixtures("chunks", "workers_at_once")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_workers_read_each_kind_of_file(kind: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Each pass begins in this process, which keeps files open."""
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]
    names = ("0.jpg", "1.png", "2.jpg")
    rows = [{"id": str(n), "image": names[n % 3], "conversations": turns} for n in range(31)]
    write_container(kind, tmp_path / "files", rows, dataset / "images", files=3)
    images = "null" if kind in HOLD_IMAGES else dataset / "images"
    made = []
    for workers in (1, 2, 4):
        paths = [f"data.path={tmp_path}/files", f"data.images={images}", f"data.index={tmp_path / str(workers)}"]
        made.append(content(open_again(make_config(parts, tmp_path, tmp_path, *paths), parts, workers).index))
        made[-1].pop("texts/done.json")  # has the paths of texts that are in the index
    assert made[0] == made[1] == made[2] and len(made[0]) > 20


BUILD = """
import pickle, sys
from llava_fsdp.data.index import build as index
from llava_fsdp.runtime.text.progress import watch_silently
index.CHUNKS = dict.fromkeys(index.CHUNKS, 7)
plan = pickle.load(sys.stdin.buffer)
print(len(index.open_index(plan, watch_silently)), flush=True)
"""


def builder(parts: Path, path: Path, folder: Path) -> subprocess.Popen:
    """Another process that makes the index."""
    cfg = make_config(
        parts, path.parent, path.parent, f"data.path={path}", f"data.images={path.parent / 'images'}",
        f"data.index={folder}",
    )  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", BUILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    pickle.dump(plan_of(cfg, parts), process.stdin)
    process.stdin.flush()
    return process


def wait_for(process: subprocess.Popen, folder: Path, pattern: str) -> None:
    """Until a file is there; folders come and go."""
    while True:
        assert process.poll() is None, "it ended before it could be killed"
        with contextlib.suppress(FileNotFoundError):
            if list(folder.glob(pattern)):
                return


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["encoded", "records", "pictures"])
@pytest.mark.usefixtures("chunks")
def test_killed_and_run_again_it_is_the_same(killed_in: str, parts: Path, tmp_path: Path) -> None:
    path, planted = write_planted(tmp_path, lines=True)
    process = builder(parts, path, tmp_path / "index")
    wait_for(process, tmp_path / "index", f"chunks/{killed_in}*/*-000000014.npz")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "index").glob("*/encoded-*[0-9a-f]/done.json"))
    common = f"data.path={path}", f"data.images={tmp_path / 'images'}"
    again = open_again(make_config(parts, tmp_path, tmp_path, *common, f"data.index={tmp_path / 'index'}"), parts)
    at_once = open_again(make_config(parts, tmp_path, tmp_path, *common, f"data.index={tmp_path / 'other'}"), parts)
    assert len(again.index) == len(planted)
    assert content(again.index) == content(at_once.index)


def test_two_at_once_wait_for_each_other(parts: Path, tmp_path: Path) -> None:
    path, planted = write_planted(tmp_path, lines=True)
    builders = [builder(parts, path, tmp_path / "index") for _ in range(2)]
    assert [int(b.communicate(timeout=120)[0]) for b in builders] == [len(planted)] * 2
    assert len(list((tmp_path / "index").glob("*/encoded-*/done.json"))) == 1


@pytest.mark.slow
def test_who_waits_goes_on_when_the_builder_dies(parts: Path, tmp_path: Path) -> None:
    path, planted = write_planted(tmp_path, lines=True)
    first = builder(parts, path, tmp_path / "index")
    wait_for(first, tmp_path / "index", "chunks/records/*.npz")
    os.kill(first.pid, signal.SIGSTOP)  # it holds the lock, and does nothing
    second = builder(parts, path, tmp_path / "index")
    time.sleep(1)
    os.kill(first.pid, signal.SIGKILL)
    assert int(second.communicate(timeout=120)[0]) == len(planted)
    first.wait()


def test_an_index_is_made_once_and_again_when_the_file_has_changed(parts: Path, tmp_path: Path) -> None:
    record = {"id": 1, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    write_json(tmp_path / "a.json", [record])
    cfg = make_config(parts, tmp_path, tmp_path, f"data.path={tmp_path / 'a.json'}", "data.images=null")
    first = open_again(cfg, parts)
    marks = {p: p.stat().st_mtime_ns for p in (tmp_path / "a.json.index").rglob("*.npy")}
    again = open_again(cfg, parts)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "a.json.index").rglob("*.npy")} == marks
    os.utime(tmp_path / "a.json", (1, 1))  # touched, the same content
    assert open_again(cfg, parts).fingerprint == first.fingerprint == again.fingerprint
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "a.json.index").rglob("*.npy")} == marks
    write_json(tmp_path / "a.json", [record, {**record, "id": 2}])
    changed = open_again(cfg, parts)
    assert len(changed) == 2 and changed.fingerprint != first.fingerprint
    assert first[0].id == "1", "who has the old one open still reads it"
    longer = make_config(
        parts, tmp_path, tmp_path, f"data.path={tmp_path / 'a.json'}", "data.images=null", "data.max_length=200"
    )
    other = open_again(longer, parts).index
    assert other.encoded != changed.index.encoded and other.records == changed.index.records


TILED = "data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad", "data.max_length=512"


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("tiles", [(), pytest.param(TILED, marks=pytest.mark.slow)], ids=["one tile", "tiles"])
def test_mended_pictures_are_found_when_looking_again(tiles: tuple[str, ...], parts: Path, tmp_path: Path) -> None:
    """Also where their sizes decide how long a record is."""
    path, planted = write_planted(tmp_path, lines=False)
    here = f"data.path={path}", f"data.images={tmp_path / 'images'}", *tiles
    cfg = make_config(parts, tmp_path, tmp_path, *here)
    before = open_again(cfg, parts)
    (tmp_path / "images" / "gone.jpg").write_bytes((tmp_path / "images" / "good.jpg").read_bytes())
    assert open_again(cfg, parts).num_wrong == before.num_wrong
    after = open_again(cfg, parts, look_again=True)
    assert after.num_wrong == before.num_wrong - 1 and after.counts["image_missing"] == 0
    mended = planted.index("image_missing")
    assert mended in [after[n].index for n in range(len(after))]
    fresh = make_config(parts, tmp_path, tmp_path, *here, f"data.index={tmp_path / 'fresh'}")
    assert list(content(after.index).values()) == list(content(open_again(fresh, parts).index).values())


def test_sizes_come_from_the_index(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """With tiles, lengths depend on the pictures: known without opening one."""
    cfg = make_config(parts, dataset, tmp_path, *TILED, f"data.index={tmp_path / 'index'}")
    records, encoder = open_again(cfg, parts), plan_of(cfg, parts).encoder
    by_hand = []
    for number in range(len(records)):
        record = records[number]
        known = encoder(record)
        by_hand.append(len(encoder(replace(record, sizes=None)).input_ids))
        assert len(known.input_ids) == by_hand[-1] == records.lengths[number]
    assert len(set(by_hand)) > 5


def test_several_sources(parts: Path, dataset: Path, tmp_path: Path) -> None:
    sources = [
        f"+data.sources.mixed={{path: {dataset / 'mixed.json'}}}",
        f"+data.sources.text={{path: {dataset / 'text.json'}, images: {tmp_path}}}",
    ]
    cfg = make_config(parts, dataset, tmp_path, "data.path=null", *sources, f"data.index={tmp_path / 'index'}")
    records = open_again(cfg, parts)
    assert records.source_counts == [44, 20] and len(records) == 64
    assert records[43].where.startswith(f"{dataset / 'mixed.json'}, line 1, record 43 (id r43)")
    assert records[44].where.startswith(f"{dataset / 'text.json'}, line 1, record 0 (id r0)"), (
        "ids are those of a source"
    )
    assert records[0].folder == dataset / "images" and records[44].folder == tmp_path
    assert not records.counts["duplicate_id"]
    moved = tmp_path / "text.json"
    moved.write_bytes((dataset / "text.json").read_bytes())
    sources[1] = f"+data.sources.text={{path: {moved}}}"
    cfg = make_config(parts, dataset, tmp_path, "data.path=null", *sources, f"data.index={tmp_path / 'index'}")
    assert open_again(cfg, parts).fingerprint == records.fingerprint, "content, not paths"


def test_images_of_one_name_in_two_folders(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Each record has the size of its own source's image, and the image that is broken is the other source's."""
    record = with_picture("a.png") | {"id": "r"}
    folders = {"one": (20, 30), "two": (40, 11), "broken": None}
    sources = []
    for name, size in folders.items():
        (tmp_path / name).mkdir()
        if size:
            Image.new("RGB", size).save(tmp_path / name / "a.png")
        else:
            (tmp_path / name / "a.png").write_bytes(b"no image")
        (tmp_path / f"{name}.json").write_text(json.dumps([record]))
        sources.append(f"+data.sources.{name}={{path: {tmp_path / name}.json, images: {tmp_path / name}}}")
    cfg = make_config(parts, dataset, tmp_path, "data.path=null", "data.bad_records=skip", "data.max_bad_records=2",
         *sources,
                      f"data.index={tmp_path / 'index'}")  # fmt: skip
    records = open_again(cfg, parts)
    assert [(r.where.partition(",")[0], r.sizes) for r in (records[0], records[1])] == [
        (f"{tmp_path / 'one.json'}", ((20, 30),)), (f"{tmp_path / 'two.json'}", ((40, 11),)),
    ]  # fmt: skip
    assert records.source_counts == [1, 1, 0]


@pytest.mark.parametrize("lines", [False, True])
def test_no_record_is_lost_between_pieces(lines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of records are found a piece at a time; a number of records that fills its pieces, and one beside it."""
    monkeypatch.setattr(record_store, "PIECE", 3)
    for count in (1, 2, 3, 4, 6, 7, 10):
        path, folder = tmp_path / f"{count}.json{'l' * lines}", tmp_path / f"pieces{count}"
        records = [json.dumps({"id": f"r{n}"}) for n in range(count)]
        path.write_text("\n".join(records) if lines else f"[{', '.join(records)}]")
        for lost in (0, 0, 1, 2):  # at first all is to be found, then nothing, then the last pieces
            for piece in sorted(folder.glob("*.npy"))[::-1][:lost]:
                piece.unlink()
            pieces = record_store.split_file(path, folder, 1 << 20)
            assert [len(np.load(piece)) for piece in pieces] == [min(3, count - n) for n in range(0, count, 3)]
        spans = np.concatenate([np.load(piece) for piece in pieces])
        content = path.read_bytes()
        assert [json.loads(content[begin:][:size])["id"] for begin, size, _ in spans] == [f"r{n}" for n in range(count)]


def test_an_index_that_cannot_be_written_names_the_key(parts: Path, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg = make_config(parts, dataset, tmp_path, f"data.index={tmp_path / 'file' / 'index'}")
    with pytest.raises(ConfigError, match=r"name another folder: data\.index=DIR"):
        open_again(cfg, parts)


def test_duplicates_in_any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(0)
    hashes = dice.integers(0, 60, 200).astype(np.uint64)
    first: dict[int, int] = {}
    expected = [[n, first[h]] for n, h in enumerate(hashes.tolist()) if h and first.setdefault(h, n) != n]
    for block in (1000, 64, 7):
        monkeypatch.setattr(duplicate_ids, "BLOCK", block)
        assert find_duplicates(hashes, 0, 200).tolist() == expected
    assert json.dumps(find_duplicates(hashes, 200, 200).tolist()) == "[]"


def test_a_chunk_that_is_not_whole_is_made_again(tmp_path: Path) -> None:
    """Empty, or zeros, as a machine that lost power leaves them; and what is broken within is said, and removed."""

    def task(chunk: int) -> dict[str, np.ndarray]:
        return {"a": np.array([chunk])}

    files = chunk_files(tmp_path / "parts", 3)
    run_chunks(task, files, 1, lambda _: None)
    chunk_file(tmp_path / "parts", 0).write_bytes(b"")
    chunk_file(tmp_path / "parts", 1).write_bytes(bytes(chunk_file(tmp_path / "parts", 1).stat().st_size))
    run_chunks(task, files, 1, lambda _: None)
    join(files, [0, 0, 0], tmp_path / "whole", lambda _: {})
    assert np.load(tmp_path / "whole" / "a.npy").tolist() == [0, 1, 2]
    broken = bytearray(chunk_file(tmp_path / "parts", 2).read_bytes())
    broken[80] ^= 255
    chunk_file(tmp_path / "parts", 2).write_bytes(broken)
    join(files[:2], [0, 0], tmp_path / "less", lambda _: {}, not_joined=["a"])
    assert not (tmp_path / "less" / "a.npy").exists()
    with pytest.raises(SourceError, match=r"00000002\.npz is broken .* run it again"):
        join(files, [0, 0, 0], tmp_path / "again", lambda _: {})
    assert not chunk_file(tmp_path / "parts", 2).exists()


LONG = """
import multiprocessing, signal, sys, threading, time
from functools import partial
from pathlib import Path
from llava_fsdp.data.index import worker_pool
from llava_fsdp.data.index.worker_pool import chunk_files, run_chunks
worker_pool.ALONE_SECONDS = 0
def tell():
    while len(workers := multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    print(*(worker.pid for worker in workers), flush=True)
threading.Thread(target=tell).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
run_chunks(partial(sum, range(10**12)), chunk_files(Path(sys.argv[1]), 2), 2, lambda _: None)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone ends a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_builder(number: signal.Signals, tmp_path: Path) -> None:
    """In the middle of a chunk too, and at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", LONG, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Fails:
    """A task whose second chunk fails in a way that a number names: an error, or the death of the process."""

    def __init__(self, code: int):
        self.code = code

    def __call__(self, chunk: int) -> dict[str, np.ndarray]:
        if chunk == 1 and self.code < 0:
            os.kill(os.getpid(), -self.code)
        if chunk == 1:
            raise OSError(self.code, os.strerror(self.code))
        return {"a": np.array([chunk])}


def test_a_short_pass_starts_no_worker(tmp_path: Path) -> None:
    def pid(chunk: int) -> dict[str, np.ndarray]:
        return {"a": np.array([os.getpid(), chunk])}

    run_chunks(pid, chunk_files(tmp_path, 3), 2, lambda _: None)
    made = [np.load(file)["a"].tolist() for file in chunk_files(tmp_path, 3)]
    assert made == [[os.getpid(), chunk] for chunk in range(3)]


@pytest.mark.usefixtures("workers_at_once")
def test_a_full_disk_is_said_by_workers_too(tmp_path: Path) -> None:
    for workers in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            run_chunks(Fails(errno.ENOSPC), chunk_files(tmp_path, 2), workers, lambda _: None)


@pytest.mark.usefixtures("workers_at_once")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_is_reported(number: signal.Signals, tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    with pytest.raises(WorkerError, match=rf"ended with {-number} while .*prepare\.workers=") as raised:
        run_chunks(Fails(-number), chunk_files(tmp_path, 5), 2, lambda _: None)
    assert raised.value.exit_code == 2 and set(multiprocessing.active_children()) <= others


@pytest.mark.usefixtures("workers_at_once")
def test_without_room_for_locks_no_worker_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without /dev/shm."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(worker_pool, "ProcessPoolExecutor", full)
    done: list[int] = []
    run_chunks(lambda chunk: {"a": np.array([chunk])}, chunk_files(tmp_path, 3), 2, done.append)
    assert done == [0, 1, 1, 1] and chunk_file(tmp_path, 2).is_file()


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    """Half-written files are deleted, and a folder that was half joined is joined again."""
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "left.npz.123.tmp").write_bytes(b"half")
    run_chunks(lambda chunk: {"a": np.array([chunk])}, chunk_files(folder, 2), 1, lambda _: None)
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in chunk_files(folder, 2)]
    staged = tmp_path / "whole.tmp"
    staged.mkdir()
    (staged / "a.npy").write_bytes(b"half")
    with contextlib.suppress(FileExistsError):
        join(chunk_files(folder, 2), [0, 0], tmp_path / "whole", lambda _: {})
    assert (tmp_path / "whole" / "a.npy").is_file()
    assert np.load(tmp_path / "whole" / "a.npy").tolist() == [0, 1] and not staged.exists()


def test_threads_of_libraries_are_limited_for_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set is set again afterwards, and what was not set is not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    before = dict(os.environ)
    with contextlib.suppress(KeyError), worker_pool.one_thread_each():
        assert {name: os.environ[name] for name in worker_pool.ONE_THREAD} == worker_pool.ONE_THREAD
        raise KeyError
    assert dict(os.environ) == before


def test_whose_fault_an_error_of_the_system_is(tmp_path: Path) -> None:
    assert is_foreign(PermissionError(13, "denied", "/data/a.json"), tmp_path)
    assert not is_foreign(PermissionError(13, "denied", str(tmp_path / "lock")), tmp_path)
    assert not is_foreign(OSError(28, "No space left on device"), tmp_path)
    assert is_foreign(PermissionError(13, "denied", f"{tmp_path}-2/a.json"), tmp_path), "a folder beside it"
    for own in (str(tmp_path), str(tmp_path.parent), str(tmp_path).encode()):
        assert not is_foreign(PermissionError(13, "denied", own), tmp_path), "or one that it is in"


def test_workers_do_without_torch() -> None:
    names = (
        "index.worker_pool",
        "index.examine.examine_passes",
        "index.token_pass",
        "index.examine.duplicate_ids",
        "records.parquet",
    )
    code = f"import sys, {', '.join(f'llava_fsdp.data.{name}' for name in names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    """The copy of a whole Parquet file is there, and beside it parts that it was joined from."""
    (tmp_path / "key").mkdir(parents=True)
    for name in ("rows.jsonl", "00000000-00000001.jsonl", "00000000-00000001.npz"):
        (tmp_path / "rows" / "key").mkdir(parents=True, exist_ok=True)
        (tmp_path / "rows" / "key" / name).write_text("{}")
    plan: Any = SimpleNamespace(cfg=SimpleNamespace(index_folder=tmp_path), workers=1)
    (text,) = index_module.write_record_texts([SourceFile("a", "a.parquet", None)], ["key"], plan, watch_silently)
    assert text.path == tmp_path / "rows" / "key" / "rows.jsonl" and text.key == "key"
    assert [path.name for path in text.path.parent.iterdir()] == ["rows.jsonl"]


def test_an_error_of_the_index_is_that_of_the_rank_which_makes_it(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The others wait for its lock."""
    (tmp_path / "a.json").write_text("[]")
    cfg = make_config(parts, dataset, tmp_path, f"data.path={tmp_path / 'a.json'}", "data.images=null")
    with pytest.raises(DataError) as caught:
        open_again(cfg, parts)
    assert not caught.value.on_every_rank


def test_of_a_file_that_changes_meanwhile_what_was_made_before_stays(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second file is added to an index, and changes while it is read: nothing of the first one is made again."""
    rows = json.loads((dataset / "text.json").read_text())
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    for path in (first, second):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows[:3]).encode()))
    values = f"data.index={tmp_path / 'index'}", "data.images=null"
    open_again(make_config(parts, dataset, tmp_path, f"data.path={first}", *values), parts)
    before = {path for path in (tmp_path / "index").rglob("*") if path.is_file()}
    own = index_module.join_positions
    monkeypatch.setattr(index_module, "join_positions", lambda *a: (os.utime(second, (1, 1)), own(*a))[1])
    with pytest.raises(SourceError):
        open_again(make_config(parts, dataset, tmp_path, f"data.path='{first},{second}'", *values), parts)
    after = {path for path in (tmp_path / "index").rglob("*") if path.is_file()}
    assert before == after


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_a_file_that_changes_meanwhile_leaves_nothing(
    name: str, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made from it is deleted, and of a compressed file also the unpacked copy."""
    path = tmp_path / name
    content = (dataset / "text.json").read_bytes()
    if name == "a.jsonl.gz":
        content = gzip.compress("".join(json.dumps(row) + "\n" for row in json.loads(content)).encode())
    path.write_bytes(content)
    cfg = make_config(parts, dataset, tmp_path, f"data.path={path}", "data.images=null")
    for step in ("join_positions", "encoded_facts"):
        with monkeypatch.context() as patch:
            own = getattr(index_module, step)
            patch.setattr(index_module, step, lambda *a, own=own: (os.utime(path, (1, 1)), own(*a))[1])
            with pytest.raises(SourceError, match="changed while being read; run it again"):
                open_again(cfg, parts)
        index = tmp_path / f"{name}.index"
        assert not [p for p in index.rglob("*") if p.is_file() and p.parent != index]
        os.utime(path)
    assert len(open_again(cfg, parts)) == 20
