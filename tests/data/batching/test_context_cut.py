"""The parts of a row that several ranks process together are the row."""

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import CPU
from small import make_config
from tiers import slow_after

from llava_fsdp.data.batching.batch import MicroBatch, SkippedSample
from llava_fsdp.data.batching.collate import shown_images
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.images.image_tokens import BLENDED, NEWLINE_ROW, as_blended, needed_tiles
from llava_fsdp.data.loader import Loader, ModelShape, build_loader
from llava_fsdp.data.records.record import Record
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID

SHAPE = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)
LORA = "model.lora.enabled=true", "model.lora.dropout=0.1"
TILED = "data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad"
BLENDS = "data.image_aspect_ratio=anyres_max", "model.patch_merge=spatial_unpad"
KINDS = [[*TILED, *LORA], [], [*LORA], [*BLENDS, *LORA]]


def opened(parts: Path, dataset: Path, cut: ContextCut | None, *overrides: str, gather: Any = list) -> Loader:
    own = "data.max_length=512", "tokens_per_micro_batch=600", "pack=true", *overrides
    cfg = make_config(parts, dataset, Path("unused"), *own)
    return build_loader(cfg, parts / "language", parts / "vision", SHAPE, 0, 1, CPU, gather, cut=cut)


def tokens_of(micro: MicroBatch, positions: list[int]) -> dict[int, Any]:
    """What is known of each position of a row: id, position, dropout, label, and the feature of an image."""
    seeds = micro.seeds.expand(1, len(positions))
    found: dict[int, list[Any]] = {
        place: [int(micro.input_ids[0, at]), int(micro.position_ids[0, at]), int(seeds[0, at])]
        for at, place in enumerate(positions)
    }
    for at, label in zip(micro.label_positions.tolist(), micro.label_ids.tolist(), strict=True):
        found[positions[at]].append(("label", label))
    for number, at in enumerate(micro.images["positions"].tolist()):
        rows = np.atleast_1d(micro.images["rows"][number].numpy())
        weights = micro.images["weights"][number].tolist() if len(micro.images["weights"]) else [1.0]
        for row, weight in zip(rows.tolist(), weights, strict=True):
            tile, feature = divmod(row, SHAPE.image_tokens)
            shown: Any = "newline"
            if tile < len(micro.images["tiles"]):
                seed = int(micro.images["seeds"][tile]) if len(micro.images["seeds"]) else 0
                shown = hashlib.sha256(micro.images["tiles"][tile].numpy().tobytes()).hexdigest(), seed, feature
            found[positions[at]].append(shown if weight else "weight 0")
    return found


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("overrides", slow_after(1, KINDS), ids=["tiles", "plain", "dropout", "blended"])
@pytest.mark.parametrize("size", slow_after(1, [3, 2, 4]))
def test_parts_are_the_row(size: int, overrides: list[str], paired: bool, parts: Path, dataset: Path) -> None:
    whole = opened(parts, dataset, None, *overrides).steps
    cuts = [ContextCut(size, index, paired) for index in range(size)]
    split = [opened(parts, dataset, cut, *overrides).steps for cut in cuts]
    for number in range(3):
        row, *own = (steps.prepare(number) for steps in (whole, *split))
        for at, micro in enumerate(row.micro_batches):
            pieces = [step.micro_batches[at] for step in own]
            length = sum(pieces[0].lengths)
            padding = length - micro.input_ids.shape[1]
            assert padding == cuts[0].padding(micro.input_ids.shape[1])
            assert pieces[0].lengths == (*micro.lengths, padding)[: len(micro.lengths) + (padding > 0)]
            expected = tokens_of(micro, list(range(length - padding)))
            got: dict[int, Any] = {}
            for cut, piece in zip(cuts, pieces, strict=True):
                assert piece.scale == micro.scale and piece.cu_seqlens.tolist()[-1] == length
                got |= tokens_of(piece, cut.positions(length).tolist())
            ends = {place: [0, place - length + padding, 0] for place in range(length - padding, length)}
            assert got == {**expected, **ends}


def test_only_the_images_that_show_are_read(parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = opened(parts, dataset, ContextCut(4, 0, paired=False)).steps
    read: list[tuple[int, int]] = []
    tiles = steps.tiles

    def noted(record: Record, number: int, place: int) -> np.ndarray:
        read.append((number, place))
        return tiles(record, number, place)

    monkeypatch.setattr(steps, "tiles", noted)
    ahead: list[dict[int, set[str]]] = []
    monkeypatch.setattr(steps.records, "fetch_ahead", lambda numbers, names: ahead.append(names) or list(numbers))
    images = sum(len(micro.images["tiles"]) for micro in steps.prepare(0).micro_batches)
    downloaded = {(number, name) for names in ahead for number, own in names.items() for name in own}
    assert downloaded == {(number, steps.records[number].images[place]) for number, place in read}
    assert 0 < len(read) == images < steps.facts(0, steps.sampler.samples(0)).images


def test_an_image_of_a_record_that_is_twice_in_a_row_is_downloaded(
    parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank has the first half of the row, in which the record comes with its image; it needs not the second."""
    steps = opened(parts, dataset, ContextCut(2, 0, paired=False)).steps
    number = next(n for n in range(len(steps.records)) if steps.records.images[n] == 1)
    twice: Any = SimpleNamespace(samples=lambda step: [number] * 2, assignment=lambda step: [[[number] * 2]])
    steps.sampler = twice
    ahead: list[dict[int, set[str]]] = []
    monkeypatch.setattr(steps.records, "fetch_ahead", lambda numbers, names: ahead.append(names))
    (micro,) = steps.prepare(0).micro_batches
    assert len(micro.images["tiles"]) == 1 and ahead == [{number: set(steps.records[number].images)}]


@pytest.mark.parametrize("bad", ["skip", "fail"])
def test_labels_know_their_records_only_where_these_may_be_skipped(bad: str, parts: Path, dataset: Path) -> None:
    (micro, *_) = (
        opened(parts, dataset, ContextCut(2, 0, paired=False), f"data.bad_records={bad}").steps.prepare(0).micro_batches
    )
    assert len(micro.label_records) == (len(micro.label_ids) if bad == "skip" else 0)


@pytest.mark.parametrize("kind", ["context", "tensor"])
def test_ranks_of_a_row_have_the_same_records(kind: str, parts: Path, dataset: Path) -> None:
    """Consecutive ranks; and those of another stage of a pipeline, here from rank 4 on."""
    cut = ContextCut(2, 1, paired=False) if kind == "context" else None
    steps = opened(parts, dataset, cut, f"parallel.{kind}=2", "parallel.pipeline=2").steps
    steps.world_size = 2
    first, second, third, *_, other = (steps.record_names_of_ranks(0, [rank]) for rank in (0, 1, 2, 3, 4))
    assert first == second == other != third and sorted(first + third) == sorted(steps.record_names_of_ranks(0, []))


def test_what_breaks_on_one_rank_is_left_out_on_all(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """An image is gone after the records were examined. The other rank of the row does not read it."""
    shutil.copytree(dataset, tmp_path / "data")
    cuts = [ContextCut(2, index, paired=False) for index in range(2)]
    told: list[SkippedSample] = []
    own = "data.bad_records=skip", "data.max_bad_records=1"
    loaders = [opened(parts, tmp_path / "data", cut, *own, gather=lambda _: told) for cut in cuts]
    whole = opened(parts, tmp_path / "data", None, *own)
    steps = whole.steps
    gone = next(n for n in steps.sampler.samples(0) if steps.records.images[n] == 1)
    (tmp_path / "data" / "images" / steps.records[gone].images[0]).unlink()
    pieces = [loader.steps.prepare(0) for loader in loaders]
    told += [sample for piece in pieces for sample in piece.facts.skipped]
    named = {sample.number for sample in told}
    assert gone in named and any(len(piece.facts.skipped) < len(told) for piece in pieces), "one rank did not see it"
    expected = whole.agree(steps.prepare(0))
    agreed = [loader.agree(piece) for loader, piece in zip(loaders, pieces, strict=True)]
    for step in agreed:
        assert step.facts.label_tokens == expected.facts.label_tokens
        assert {micro.scale for micro in step.micro_batches} == {1 / expected.facts.label_tokens}
    labels = sorted(int(i) for step in agreed for micro in step.micro_batches for i in micro.label_ids)
    assert labels == sorted(int(i) for micro in expected.micro_batches for i in micro.label_ids)


def test_an_image_on_a_border_is_read_on_both_sides() -> None:
    """Two tiles of four tokens; the border lies within the second."""
    ids = np.array([5, *[IMAGE_ID] * 8, 6])
    sample = Sample(ids, np.full(10, IGNORE), ("a.png",), (np.arange(8),), 0, 0)
    pixels = np.arange(2)[:, None, None, None] * np.ones((2, 3, 1, 1))
    here = np.arange(10) < 7
    found = [shown_images(sample, part, 4, lambda _: pixels, [3]) for part in (here, ~here)]
    ((first, tiles), numbers), ((second, again), own) = found
    assert (numbers, own) == ([3, 4], [4])
    assert [rows.tolist() for rows in (*first.image_rows, *second.image_rows)] == [[0, 1, 2, 3, 4, 5], [2, 3]]
    assert np.array_equal(tiles[0], pixels) and np.array_equal(again[0], pixels[1:])


def test_chunks_are_shared_out() -> None:
    assert ContextCut(2, 1, paired=False).chunks(12) == [(6, 12)]
    assert ContextCut(2, 0, paired=True).chunks(12) == [(0, 3), (9, 12)]
    assert [ContextCut(3, 2, paired=True).padding(tokens) for tokens in (12, 13)] == [0, 5]


def test_tiles_that_tokens_need() -> None:
    tiles, tokens = needed_tiles(np.array([9, NEWLINE_ROW, 21, 8]), 4)
    assert tiles.tolist() == [2, 5] and tokens.tolist() == [1, NEWLINE_ROW, 5, 0]
    tiles, tokens = needed_tiles(as_blended(np.array([NEWLINE_ROW, NEWLINE_ROW])), 4)
    assert not len(tiles) and tokens.dtype == BLENDED and (tokens["row"] == NEWLINE_ROW).all()
