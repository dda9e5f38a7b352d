"""Plans of images whose tokens and tiles depend on their sizes, against real steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import CPU, RankPool, single_world
from live import measure_step
from many_sizes import SIDE, write_many_sizes, write_parts_of_odd_tiles
from packed import build
from small import make_config
from test_simulate import CLOSE
from tiers import slow_after
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llava_fsdp.config import Config
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.statistics import write_report
from llava_fsdp.data.loader import ModelShape, build_loader
from llava_fsdp.data.synthetic import fullest, synthetic_step
from llava_fsdp.model.flops import count_flops
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.plan import workload
from llava_fsdp.plan.planner import peak
from llava_fsdp.plan.workload import PHOTO, samples_in, samples_of
from llava_fsdp.train.setup.build_model import shape_of

UNPADDED = "data.image_aspect_ratio=anyres model.patch_merge=spatial_unpad"
SHRUNK = "data.image_aspect_ratio=anyres_max model.patch_merge=spatial_unpad data.max_tiles=4"
ALL = "model.train=[projector,language,vision]"
CASES = [
    # ranks, sharding, activation checkpointing, more
    (1, "zero3", "none", f"{SHRUNK} tokens_per_micro_batch=1024"),
    (1, "zero3", "full", f"{SHRUNK} {ALL} tokens_per_micro_batch=700"),
    (2, "zero3", "none", f"{SHRUNK} {ALL} tokens_per_micro_batch=1024"),
    (2, "zero2", "selective", f"{SHRUNK} tokens_per_micro_batch=700"),
    (2, "zero3", "full", f"{UNPADDED} {ALL} tokens_per_micro_batch=1024"),
    (1, "zero3", "none", f"{UNPADDED} {ALL} tokens_per_micro_batch=700"),
    (1, "zero3", "none", f"{SHRUNK} {ALL} pack=false micro_batch_size=7"),
]


@pytest.fixture(scope="session")
def odd_parts(wide_parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts_of_odd_tiles(wide_parts, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="session")
def many_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_sizes(tmp_path_factory.mktemp("data") / "many")


def configure(parts: Path, dataset: Path, output: Path, *words: str) -> Config:
    fixed = "precision=fp32", "data.max_length=420", "global_batch_size=28"
    return make_config(parts, dataset, output, *fixed, *words)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "sharding", "mode", "more"),
    slow_after(0, CASES),
)
def test_worst_moment_is_that_of_real_steps(
    ranks: int, sharding: str, mode: str, more: str, odd_parts: Path, many_sizes: Path, pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:  # fmt: skip
    """As close as with one tile for an image."""
    words = f"sharding={sharding}", f"activation_checkpointing={mode}", *more.split()
    cfg = configure(odd_parts, many_sizes, tmp_path, *words)
    steps = [measure_step(single_world(), cfg)] if ranks == 1 else pools[ranks].run(measure_step, cfg)[:2]
    for rank, (most, micros) in enumerate(steps):
        planned = peak(cfg, ranks, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.peak_moment)
        assert any(micro.image_tokens != micro.tiles * SIDE**2 for micro in micros)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_compute_as_much(ranks: int, odd_parts: Path, tmp_path: Path) -> None:
    """By the matrix products that torch counts in the real micro-batches of a step, attention of whole squares
    included."""
    dataset = write_many_sizes(tmp_path / "many", records=32 * ranks)
    words = *SHRUNK.split(), ALL, f"global_batch_size={32 * ranks}", "tokens_per_micro_batch=2048"
    cfg = configure(odd_parts, dataset, tmp_path, *words)
    model = build(cfg).model
    assert isinstance(model, Llava)
    flops, totals, predicted = count_flops(model, activation_checkpointing=False), [], []
    parts = find_parts(cfg.model)
    for rank in range(ranks):
        loader = build_loader(cfg, parts.language_folder, parts.vision_folder, shape_of(model), rank, ranks, CPU)
        total, formula = 0, 0.0
        for micro in loader.steps.prepare(0).micro_batches:
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                model(**loader.to_device(micro).inputs).backward()
            total += counter.get_total_flops()
            pairs = 2 * sum(length**2 for length in micro.lengths)  # the formula has the half below the diagonal
            formula += flops.of(sum(micro.lengths), pairs, len(micro.label_ids), len(micro.images["tiles"]))
        totals.append(total)
        predicted.append(formula)
    assert totals == pytest.approx(predicted, rel=1e-9)
    assert max(totals) <= 1.02 * sum(totals) / ranks


def test_means_are_those_of_the_micro_batches(odd_parts: Path, many_sizes: Path, tmp_path: Path) -> None:
    """And of photos for an index of an older version, whose file of image tokens is missing."""
    words = *SHRUNK.split(), "global_batch_size=60", "tokens_per_micro_batch=2048", f"data.index={tmp_path / 'index'}"
    cfg = configure(odd_parts, many_sizes, tmp_path, *words)
    shape = ModelShape(image_tokens=SIDE**2, image_size=14 * SIDE, max_length=512, vocab_size=10_000)
    loader = build_loader(cfg, odd_parts / "language", odd_parts / "vision", shape, 0, 1, CPU)
    records, rule = loader.steps.records, loader.steps.image_reader.tokens
    micros = loader.steps.prepare(0).micro_batches
    found = samples_in(records, rule)
    tokens, tiles = sum(len(m.images["positions"]) for m in micros), sum(len(m.images["tiles"]) for m in micros)
    assert records.image_tokens is not None and len(records) == 60
    assert found.image_tokens * 60 == pytest.approx(tokens) and found.tiles * 60 == pytest.approx(tiles)
    write_report(records, cfg, (loader.steps.encoder, loader.steps.image_reader), tmp_path / "index")
    reported = samples_of(cfg, rule)
    assert (reported.tiles, reported.tile_tokens) == (found.tiles, found.tile_tokens)
    (records.index.encoded / "image_tokens.npy").unlink()
    older = Records(records.index, cfg.labels, cfg.data.too_long)
    photo = len(rule.of(PHOTO, 1)) / rule.count_tiles(PHOTO, 1)
    assert older.image_tokens is None and samples_in(older, rule).tile_tokens == photo != found.tile_tokens


class Columns(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.lengths)


@pytest.mark.parametrize("block", [3, 11, 1 << 20])
def test_means_are_those_of_whole_columns(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths whose squares do not fit into int32 are added a block at a time."""
    monkeypatch.setattr(workload, "BLOCK", block)
    dice = np.random.default_rng(0)
    names = "lengths", "tiles", "labels", "image_tokens"
    columns = {name: dice.integers(1, 90_000, 11).astype(np.int32) for name in names}
    records: Any = Columns(**columns)
    found = samples_in(records, records)
    assert (found.tokens, found.tiles, found.labels) == tuple(columns[n].mean() for n in names[:3])
    assert found.spread == pytest.approx(columns["lengths"].std(), rel=1e-12)
    assert found.tile_tokens == columns["image_tokens"].sum() / columns["tiles"].sum()


FULLEST = [
    # words, tiles and tokens of the image that makes the most tiles of 2100 tokens, and the fewest tokens of an image
    ("data.image_aspect_ratio=pad", 1, 9, 9),
    ("data.image_aspect_ratio=anyres", 3, 27, 27),
    (UNPADDED, 4, 9 + 3 * (9 + 1), 9 + 3 * 7),
    (SHRUNK, 37, 9 + 6 * (6 + 1), 9 + 3 * (3 + 1)),
]


@pytest.mark.parametrize(("words", "tiles", "tokens", "fewest"), FULLEST)
def test_the_largest_micro_batch(
    words: str, tiles: int, tokens: int, fewest: int, odd_parts: Path, many_sizes: Path, tmp_path: Path
) -> None:
    """Each image fills its grid of tiles; a grid of 36 tiles is shrunk to 4 tiles' worth of tokens."""
    cfg = configure(odd_parts, many_sizes, tmp_path, *words.split(), "tokens_per_micro_batch=2100")
    shape = ModelShape(image_tokens=SIDE**2, image_size=14 * SIDE, max_length=512, vocab_size=10_000)
    found, images = fullest(cfg, shape), 2100 // (tokens + 1)
    assert (found.tokens, found.images, found.tiles) == (2100, images, images * tiles)
    assert found.image_tokens == images * tokens and found.labels == 2100 - 5 * (1 + fewest)
    micro = synthetic_step(0, found, shape, cfg, 1).micro_batches[0]
    assert (len(micro.images["positions"]), len(micro.images["tiles"]), len(micro.label_ids)) == (
        found.image_tokens, found.tiles, found.labels,
    )  # fmt: skip
    assert micro.images["weights"].shape == (found.image_tokens if words == SHRUNK else 0, 4)
    assert int(micro.images["rows"].max()) < found.tiles * SIDE**2
