"""A training with text, images and videos is the same on any number of ranks, padded and packed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import RankPool, single_world
from reference import EXPORTED, TOLERANCE, difference, outcome, train_on, vocabulary
from small import make_config
from test_build import open_again, plan_of
from tiled import parts_of
from videos import write_mixed, write_video

from llava_fsdp.config import Config
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.token_pass import EncodeRecords
from llava_fsdp.data.problems import BITS, Kind
from llava_fsdp.data.records.record import is_video
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.train import main as train
from llava_fsdp.train.setup.build_state import open_data

ONEVISION = [
    "data.image_aspect_ratio=anyres_max", "data.max_tiles=2", "model.patch_merge=spatial_unpad",
    "model.select_layer=-1", "model.select_feature=auto", "data.max_length=256", "data.video_fps=2",
    "data.video_frames=3",
]  # fmt: skip
STEPS = ["global_batch_size=5", "max_steps=3", "model.train=[projector,language,vision]", *EXPORTED]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed"), times=2)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts_of("siglip_qwen3", tmp_path_factory.mktemp("siglip"))


@pytest.mark.slow
@pytest.mark.ranks
def test_any_number_of_ranks_trains_the_same(
    siglip: Path, mixed: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Of the steps' micro-batches some have only videos, only images, or neither."""

    def config(name: str, *overrides: str) -> Config:
        return make_config(siglip, mixed, tmp_path / name, *ONEVISION, *STEPS, *overrides)

    train.train(config("padded", "pack=false", "micro_batch_size=2"))
    expected = outcome(tmp_path / "padded")
    assert len(expected.losses) == 3
    for size in (1, 2, 4):
        cfg = config(str(size), "tokens_per_micro_batch=300")
        train_on(size, cfg, pools, timeout=120)
        got = outcome(tmp_path / str(size))
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE), size
        assert difference(got.weights, expected.weights, vocabulary(cfg)) < TOLERANCE, size


def test_kinds_of_micro_batches(siglip: Path, mixed: Path, tmp_path: Path) -> None:
    """On four ranks, some have no video in a step, and some no image at all."""
    cfg = make_config(siglip, mixed, tmp_path, *ONEVISION, *STEPS, "tokens_per_micro_batch=300")
    steps = open_data(cfg, single_world(), build_llava(find_parts(cfg.model), cfg.model, torch.float32)).steps
    steps.world_size = 4
    kinds = set()
    for step in range(4):
        for rank in steps.assignment(step, steps.sampler.samples(step)):
            names = [name for micro in rank for number in micro for name in steps.records[number].images]
            kinds.add((any(map(is_video, names)), not all(map(is_video, names))))
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}


def test_the_index_has_the_length_of_each_video(siglip: Path, mixed: Path, tmp_path: Path) -> None:
    """However images are examined; the numbers of tiles and tokens follow from it."""
    for number, mode in enumerate(("head", "decode", "sample")):
        cfg = make_config(
            siglip,
            mixed,
            tmp_path,
            *ONEVISION,
            f"data.index={tmp_path / str(number)}",
            f"data.examine={mode}",
            "data.examine_images=1",
        )
        records = open_again(cfg, siglip)
        found = {name: own for record in records for name, own in zip(record.images, record.frames or (), strict=True)}
        assert found["long.mp4"] == (24, 8.0) and found["wide.png"] == (0, 0.0)
        assert found["short.webm"] == (7, pytest.approx(5))
        assert records.tiles[4] == 3 and records.images[4] == 1
        sample = open_data(
            cfg, single_world(), build_llava(find_parts(cfg.model), cfg.model, torch.float32)
        ).steps.read_row(4)
        assert [len(rows) for rows in sample[0].image_rows] == [3 * 1 + 1] and len(
            sample[0].input_ids
        ) == records.lengths[4]


def test_several_files_of_records_with_videos(siglip: Path, tmp_path: Path) -> None:
    """Only the new file is examined, a model without videos keeps its own chunks beside them, and the chunks of tokens
    depend on the lengths of the videos."""
    write_mixed(tmp_path)
    records, folder = json.loads((tmp_path / "mixed.json").read_text()), tmp_path / "records"
    folder.mkdir()

    def examined(index: str, *overrides: str) -> Records:
        skip = ["data.bad_records=skip", "data.max_bad_records=99%", f"data.index={tmp_path / index}"]
        own = [f"data.path={folder}", *skip, *overrides]
        return open_again(make_config(siglip, tmp_path, tmp_path / "run", *ONEVISION, *own), siglip)

    (folder / "a.json").write_text(json.dumps(records[:6]))
    (folder / "b.json").write_text(json.dumps(records[6:8]))
    examined("index")
    before = set((tmp_path / "index").glob("chunks/*/*.npz"))
    other = examined("index", "data.image_aspect_ratio=pad", "model.patch_merge=flat")
    assert len(other) == 4
    (folder / "c.json").write_text(json.dumps(records[8:]))
    found, fresh = examined("index"), examined("fresh")
    after = set((tmp_path / "index").glob("chunks/*/*.npz"))
    assert before <= after
    names = {path.parent.name for path in after}
    assert {"records", "records-videos"} <= names and len([n for n in names if n.startswith("pictures-")]) == 2
    assert len(found) == len(fresh) == 10
    assert found.tiles.tolist() == fresh.tiles.tolist() and found.lengths.tolist() == fresh.lengths.tolist()
    index, plan = found.index, plan_of(make_config(siglip, tmp_path, tmp_path / "run", *ONEVISION), siglip)
    shutil.copytree(index.pictures, tmp_path / "changed")
    frames = np.load(tmp_path / "changed" / "frames.npy")
    np.save(tmp_path / "changed" / "frames.npy", frames + (frames == 24))
    keys = [
        EncodeRecords(
            index.store.folder, 9, plan.reader.sampling, plan.cache, index.records, pictures, plan.encoder, plan.reader
        ).key_of(range(4, 6))
        for pictures in (index.pictures, tmp_path / "changed")
    ]
    assert keys[0] != keys[1]


FAULTS = {
    "cut": Kind.image_truncated, "empty": Kind.image_empty, "gone": Kind.image_missing, "text": Kind.image_unreadable,
}  # fmt: skip


def test_broken_videos_are_found_before_training(siglip: Path, tmp_path: Path) -> None:
    write_mixed(tmp_path)
    folder = tmp_path / "images"
    data = (folder / "long.mp4").read_bytes()
    for name, content in {"cut": data[:900], "empty": b"", "text": b"no video"}.items():
        (folder / f"{name}.mp4").write_bytes(content)
    records = json.loads((tmp_path / "mixed.json").read_text())
    turns = records[4]["conversations"]
    records += [{"id": name, "video": f"{name}.mp4", "conversations": turns} for name in FAULTS]
    (tmp_path / "mixed.json").write_text(json.dumps(records))
    skip = ["data.bad_records=skip", "data.max_bad_records=99%"]
    found = open_again(make_config(siglip, tmp_path, tmp_path / "run", *ONEVISION, *skip), siglip)
    flags = found.index.flags(0, len(found.index)).tolist()
    assert flags == [0] * 10 + [BITS[kind] for kind in FAULTS.values()]
    assert len(found) == 10 and found.num_wrong == 4
    with pytest.raises(DataError):
        train.train(make_config(siglip, tmp_path, tmp_path / "run", *ONEVISION, *STEPS))
    # a model of one tile reads no videos, and keeps its own columns in the same index
    other = open_again(make_config(siglip, tmp_path, tmp_path / "run", *skip, "data.image_aspect_ratio=pad"), siglip)
    flags = np.array(other.index.flags(0, len(other.index)))
    assert ((flags & BITS[Kind.media_not_read]) > 0).tolist() == [False] * 4 + [True] * 4 + [False] * 2 + [True] * 4
    assert len(other) == 6
    again = open_again(make_config(siglip, tmp_path, tmp_path / "run", *ONEVISION, *skip), siglip)
    assert len(again) == 10


@pytest.mark.slow
@pytest.mark.parametrize("change", ["gone", "shorter"])
def test_a_video_that_changes_during_training_is_skipped(change: str, siglip: Path, tmp_path: Path) -> None:
    """On a worker, too; the message names the video."""
    write_mixed(tmp_path)
    skip = ["data.bad_records=skip", "data.max_bad_records=50%", "sampler=shuffle", "data.workers=1", "pack=false"]
    cfg = make_config(siglip, tmp_path, tmp_path / "run", *ONEVISION, *skip, "global_batch_size=10", "max_steps=1",
                      "micro_batch_size=5", *EXPORTED)  # fmt: skip
    assert len(open_again(cfg, siglip)) == 10
    (tmp_path / "images" / "short.webm").unlink()
    if change == "shorter":
        write_video(tmp_path / "images" / "short.webm", 2, 5)
    train.train(cfg)
    [row] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    listed = (tmp_path / "run" / "skipped_records.jsonl").read_text().splitlines()
    assert len(listed) == 2 and all("short.webm" in line for line in listed), row
