"""No sample is lost, none is doubled, and what breaks during training is skipped on every rank alike."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CPU, RankPool, single_world
from loaders import agreed_steps
from reference import EXPORTED, TOLERANCE, difference, outcome, plain_loop, run_ranks, vocabulary
from small import make_config, write_json
from tiers import slow_after

from llava_fsdp.config import Config, Normalize
from llava_fsdp.data.batching.batch import SkippedSample, Step
from llava_fsdp.data.loader import Loader, ModelShape, build_loader
from llava_fsdp.parallel.ranks.mesh import gather_lists
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.train import main as train

RECORDS = 1_007
IMAGE_EVERY = 50
TILED = "data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad", "data.max_length=512"
SHAPE = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)


@pytest.fixture(scope="module")
def long_epoch(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1007 records, mostly text, a few with an image of their own."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "images").mkdir()
    records = []
    for n in range(RECORDS):
        turns = [{"from": "human", "value": "how many"}, {"from": "gpt", "value": f"{'a ' * (n % 3)}{n}"}]
        record = {"id": f"r{n}", "conversations": turns}
        if n % IMAGE_EVERY == 0:
            turns[0]["value"] += "\n<image>"
            record["image"] = f"{n}.png"
        records.append(record)
    write_json(folder / "mixed.json", records)
    put_images(dataset, folder)
    return folder


def put_images(dataset: Path, folder: Path) -> None:
    for n in range(0, RECORDS, IMAGE_EVERY):
        shutil.copy(dataset / "images" / "1.png", folder / "images" / f"{n}.png")


class Watched(Loader):
    """Notes which records this rank has read."""

    seen: list[int]

    def steps_from(self, first: int, *args: Any) -> Iterator[Step | None]:
        self.seen = []
        load = self.steps.read_row

        def noting(number: int):
            row = load(number)
            self.seen.append(number)
            return row

        self.steps.read_row = noting
        return super().steps_from(first, *args)


def one_epoch(world: World, parts: Path, dataset: Path, breaks: bool) -> tuple[list[str], int, list[SkippedSample]]:
    """Run the data of one epoch; with `breaks`, rank 0 removes an image half way that comes up soon after."""
    bad = ["data.bad_records=skip"] if breaks else []
    cfg = make_config(parts, dataset, Path("unused"), "max_steps=null", "epochs=1", "global_batch_size=64", *bad)
    folders = parts / "language", parts / "vision"
    steps = build_loader(cfg, *folders, SHAPE, world.rank, world.size, CPU, gather_lists).steps
    loader = Watched(steps, cfg, CPU, gather_lists)
    half = loader.total_steps // 2
    left_out: list[SkippedSample] = []
    samples = 0
    for step in agreed_steps(loader):
        samples += step.facts.samples
        left_out += step.facts.skipped
        if breaks and step.facts.step == half and world.is_first:
            later = [n for s in range(half + 3, loader.total_steps) for n in steps.sampler.samples(s)]
            first = next(n for n in later if steps.records.images[n])
            (dataset / "images" / steps.records[first].images[0]).unlink()
    return [steps.records[n].id for n in loader.seen], samples, left_out


def test_the_loss_is_of_the_labels_that_remain(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path, "micro_batch_size=5", "pack=false")
    steps = build_loader(cfg, parts / "language", parts / "vision", SHAPE, 0, 1, CPU).steps
    step, lacks = steps.prepare(0), steps.facts(0, steps.sampler.samples(0)[:2])
    assert 0 < lacks.label_tokens < step.facts.label_tokens
    out = SkippedSample(0, "a record", "image_missing", "it is gone", lacks)
    left = step.facts.label_tokens - lacks.label_tokens
    assert {micro.scale for micro in step.without([out], Normalize.step).micro_batches} == {1 / left}
    assert {micro.scale for micro in step.without([], Normalize.step).micro_batches} == {1 / step.facts.label_tokens}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "breaks"),
    slow_after(
        1, [(1, True), (2, False), *(pytest.param(size, True, marks=pytest.mark.slow) for size in (2, 4)), (3, True)]
    ),
)
def test_every_sample_once_an_epoch(
    size: int, breaks: bool, long_epoch: Path, parts: Path, dataset: Path, pools: dict[int, RankPool]
) -> None:
    args = (parts, long_epoch, breaks)
    results = [one_epoch(single_world(), *args)] if size == 1 else pools[size].run(one_epoch, *args, timeout=120)
    put_images(dataset, long_epoch)
    seen = Counter(i for ids, _, _ in results for i in ids)
    lost = {f"r{i}" for i in range(RECORDS)} - set(seen)
    assert set(seen.values()) == {1} and len(lost) == breaks
    for _, samples, left_out in results:
        assert samples == RECORDS - breaks
        assert [(o.record.partition("(id ")[2][:-1], o.kind) for o in left_out] == [(i, "image_missing") for i in lost]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ((1, 2), "decode"),
        pytest.param((1, 2, 4), "decode", marks=pytest.mark.slow),
        pytest.param((2,), "lazy", marks=pytest.mark.slow),
        pytest.param((1, 2), "sample", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_training_continues_without_what_broke(
    sizes: tuple[int, ...], how: str, dataset: Path, parts: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """The loss is of what remains, on any number of ranks; the other samples stay in their steps. Where not all images
    are examined, the image is broken before the index is made."""
    own = Path(shutil.copytree(dataset, tmp_path / "dataset"))
    common = ["data.bad_records=skip", "data.max_bad_records=6", f"data.examine={how}", "data.examine_images=1"]
    common += EXPORTED
    start = make_config(parts, own, tmp_path / "start", *common, "optim.lr=0")
    train.train(start)  # and the dataset is examined
    before = rows_of(tmp_path / "start")
    (own / "images" / "3.png").write_bytes((own / "images" / "3.png").read_bytes()[:100])
    if how != "decode":
        common.append(f"data.index={tmp_path / 'index'}")
    reference = plain_loop(make_config(parts, own, tmp_path / "none", *common), tmp_path / "start" / "export")
    lists = []
    for size in sizes:
        cfg = make_config(parts, own, tmp_path / f"{size}", *common, f"micro_batch_size={(12, 2, 0, 1)[size - 1]}")
        if size == 1:
            train.train(cfg)
        else:
            pools[size].run(run_ranks, cfg, timeout=60)
        got = outcome(tmp_path / f"{size}")
        assert got.losses == pytest.approx(reference.losses, rel=TOLERANCE)
        assert got.grad_norms == pytest.approx(reference.grad_norms, rel=TOLERANCE)
        assert difference(got.weights, reference.weights, vocabulary(cfg)) < TOLERANCE
        after = rows_of(tmp_path / f"{size}")
        assert all(a["samples"] + a["skipped_records"] == b["samples"] for a, b in zip(after, before, strict=True))
        lists.append(sorted((tmp_path / f"{size}" / "skipped_records.jsonl").read_text().splitlines()))
    assert all(own == lists[0] for own in lists) and len(lists[0]) == sum(row["skipped_records"] for row in after) > 1
    assert all(json.loads(line)["kind"] == "image_truncated" for line in lists[0])


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "budget", "wrong"), [((), 1, 2), (("5.png",), 3, 4)])
def test_the_budget_stops_every_rank_alike(
    missing: tuple[str, ...],
    budget: int,
    wrong: int,
    dataset: Path,
    parts: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    """Records that were skipped before training count too."""
    own = Path(shutil.copytree(dataset, tmp_path / "dataset"))
    common = ["data.bad_records=skip", f"data.max_bad_records={budget}", "micro_batch_size=1"]
    for name in missing:
        (own / "images" / name).unlink()
    make = lambda name: make_config(parts, own, tmp_path / name, *common)  # noqa: E731
    train.train(make("whole"))
    (own / "images" / "3.png").unlink()
    said = pools[2].run(run_and_say, make("broken"))
    assert said[0] == said[1]
    assert f"{wrong} of 44 records are wrong, more than the {budget} of data.max_bad_records={budget}" in said[0]
    assert "image" in said[0] and "3.png" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(), TILED], ids=["one tile", "tiles"])
def test_training_is_the_same_however_images_are_examined(
    tiles: tuple[str, ...], dataset: Path, parts: Path, tmp_path: Path
) -> None:
    """To the bit. Each way has an index of its own."""
    runs = {}
    for how in ("decode", "head", "sample", *(["lazy"] if not tiles else [])):
        own = f"data.index={tmp_path / f'{how}-index'}", f"data.examine={how}", "data.examine_images=3"
        train.train(make_config(parts, dataset, tmp_path / how, *own, *tiles, *EXPORTED, "max_steps=3"))
        runs[how] = outcome(tmp_path / how)
    for got in runs.values():
        assert (got.losses, got.grad_norms) == (runs["decode"].losses, runs["decode"].grad_norms)
        assert all(torch.equal(own, runs["decode"].weights[name]) for name, own in got.weights.items())


def run_and_say(world: World, cfg: Config) -> str:
    try:
        train.train(cfg)
    except DataError as error:
        return str(error)
    return "nothing"


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
