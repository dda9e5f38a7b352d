"""The page of a dataset shows samples as a training makes them: their tokens, labels and images."""

import base64
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import make_config, write_json
from test_build import open_again, plan_of
from videos import write_mixed

from llava_fsdp.config import Config
from llava_fsdp.data.index.examine import examples as examples_module
from llava_fsdp.data.index.examine.examples import draw_examples, draw_numbers
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.detokenize import spell
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.report.examples import Example, Gap, Images, Text, examples_body


def examples_of(cfg: Config, parts: Path) -> list[Example]:
    plan = plan_of(cfg, parts)
    return draw_examples(open_again(cfg, parts), plan.encoder, plan.reader)


def texts_of(example: Example, has_labels: bool) -> list[str]:
    found = [own for own in example.parts if isinstance(own, Text) and own.has_labels is has_labels]
    return ["".join(text for text, _ in own.pieces) for own in found]


def tile_of(url: str) -> np.ndarray:
    data = base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))
    return np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)


@pytest.mark.parametrize("labels", ["exact", "llava_v1_5"])
def test_what_is_marked_is_what_has_labels(labels: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    more = ["data.special_tokens=parse", "data.pixels=llava_v1_5"] if labels != "exact" else []
    cfg = make_config(parts, dataset, tmp_path, "data.max_length=90", f"labels={labels}", *more)
    plan, records = plan_of(cfg, parts), open_again(cfg, parts)
    raw = {own["id"]: own for own in json.loads((dataset / "mixed.json").read_text())}
    shown = examples_of(cfg, parts)
    assert len(shown) == 20 and sum(own.cut > 0 for own in shown) > 2
    for own in shown:
        sample = plan.encoder(records.index.store.record(own.index))
        assert sample is not None and (own.length, own.labels) == (len(sample.input_ids), sample.num_labels)
        at = 0
        for part in own.parts:
            assert not isinstance(part, Gap)
            assert not at or (isinstance(part, Images) == (sample.input_ids[at] == IMAGE_ID))
            ids, marks = sample.input_ids[at : at + part.count], sample.labels[at : at + part.count] != IGNORE
            at += part.count
            if isinstance(part, Images):
                assert (ids == IMAGE_ID).all() and part.name == raw[own.id]["image"]
            else:
                assert (marks == part.has_labels).all() and part.pieces == [
                    (piece.text, piece.is_special) for piece in spell(plan.encoder.tokenizer, ids.tolist())
                ]
        assert at == own.length
        answers = [turn["value"] for turn in raw[own.id]["conversations"] if turn["from"] == "gpt"]
        said = [text.removesuffix("</s>").strip() for text in texts_of(own, has_labels=True)]
        if not own.cut and own.labels:
            assert said == answers
    if labels == "exact":
        assert {(part.role, part.has_labels) for own in shown for part in own.parts if isinstance(part, Text)} == {
            ("human", False), ("gpt", True),
        }  # fmt: skip


def test_the_page_marks_labels_cuts_and_special_tokens(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path, "data.max_length=120")
    shown = examples_of(cfg, parts)
    cut = next(own for own in shown if own.cut)
    page = "".join(examples_body([cut]))
    tokens = sum(len(part.pieces) for part in cut.parts if isinstance(part, Text) and part.has_labels)
    marked = page.partition("<article")[2]
    assert sum(own.partition("</mark>")[0].count("<i") for own in marked.split("<mark")[1:]) == tokens
    assert (
        f"{cut.cut:,} tokens here" in page and "<i class=special>&lt;s&gt;</i>" in page and "tokens with labels" in page
    )


def test_images_are_shown_as_they_are_read(parts: Path, tmp_path: Path) -> None:
    """Tiles and frames in order. Which image or video has which tokens, as well."""
    write_mixed(tmp_path)
    words = [
        "data.image_aspect_ratio=anyres_max",
        "model.patch_merge=spatial_unpad",
        "data.video_frames=3",
        "data.max_length=512",
    ]
    cfg = make_config(parts, tmp_path, tmp_path / "out", *words)
    plan, records = plan_of(cfg, parts), open_again(cfg, parts)
    shown = examples_of(cfg, parts)
    assert len(shown) == len(records) > 8
    kinds = set()
    for own in shown:
        record = records.index.store.record(own.index)
        pictures = [part for part in own.parts if isinstance(part, Images)]
        assert [part.name for part in pictures] == list(record.images)
        for number, part in enumerate(pictures):
            tiles = plan.reader.tiles(record, part.name)
            assert len(tiles) == len(part.tiles) and part.count == len(plan.reader.image_rows(record, number))
            for tile, url in zip(tiles, part.tiles, strict=True):
                assert np.abs(tile_of(url).astype(int) - tile).mean() < 25
            kinds.add((part.title.partition(" ")[0], part.tile))
    assert kinds == {("image", "tile"), ("video", "frame")}


def test_a_record_with_many_tiles_shows_some(parts: Path, dataset: Path, tmp_path: Path, monkeypatch) -> None:
    tags = "<image>" * 5
    turns = [{"from": "human", "value": tags}, {"from": "gpt", "value": "a"}]
    write_json(tmp_path / "a.json", [{"id": "1", "image": [f"{2 * n}.jpg" for n in range(5)], "conversations": turns}])
    monkeypatch.setattr(examples_module, "TILES", 3)
    (own,) = examples_of(make_config(parts, dataset, tmp_path, f"data.path={tmp_path / 'a.json'}"), parts)
    pictures = [part for part in own.parts if isinstance(part, Images)]
    assert [len(part.tiles) for part in pictures] == [1, 1, 1, 0, 0]
    assert [bool(part.note) for part in pictures] == [False, False, False, True, True]


def test_the_middle_of_a_long_sample_is_left_out(parts: Path, dataset: Path, tmp_path: Path, monkeypatch) -> None:
    cfg = make_config(parts, dataset, tmp_path)
    whole = {own.index: own for own in examples_of(cfg, parts)}
    monkeypatch.setattr(examples_module, "HEAD", 41)
    monkeypatch.setattr(examples_module, "TAIL", 7)
    for own in examples_of(cfg, parts):
        gaps = [part for part in own.parts if isinstance(part, Gap)]
        texts = sum(part.count for part in own.parts if isinstance(part, Text))
        pictures = sum(part.count for part in own.parts if isinstance(part, Images))
        before = whole[own.index]
        all_texts = sum(part.count for part in before.parts if isinstance(part, Text))
        assert texts == min(all_texts, 48) and len(gaps) == (all_texts > 48)
        assert own.labels == before.labels
        assert sum(g.count for g in gaps) + texts + pictures == own.length
        marked = sum(part.count for part in own.parts if isinstance(part, Text) and part.has_labels)
        assert marked + sum(gap.labels for gap in gaps) == own.labels
        images = [part.name for part in own.parts if isinstance(part, Images)]
        assert len(images) + sum(gap.images for gap in gaps) == sum(isinstance(p, Images) for p in before.parts)


def test_an_image_that_broke_since_is_named(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path)
    plan, records = plan_of(cfg, parts), open_again(cfg, parts)
    elsewhere = replace(plan.reader, folder=tmp_path)
    store = records.index.store
    store._folders = dict.fromkeys(store._folders, tmp_path)
    shown = draw_examples(records, plan.encoder, elsewhere)
    broken = [own for own in shown if own.error]
    assert broken and len(broken) < len(shown) and all(".jpg" in own.error or ".png" in own.error for own in broken)
    assert "does not exist" in "".join(examples_body(broken))


@pytest.mark.parametrize(("counts", "most", "shares"), [
    ([0, 0], 20, [0, 0]), ([5], 20, [5]), ([1000], 20, [20]), ([1000, 3, 0, 1000], 20, [9, 3, 0, 8]),
    ([7] * 5, 20, [4] * 5), ([1] * 7, 20, [1] * 7),
])  # fmt: skip
def test_records_are_drawn_from_all_sources(counts: list[int], most: int, shares: list[int]) -> None:
    drawn = draw_numbers(counts, most)
    assert drawn == sorted(set(drawn)) == draw_numbers(counts, most)
    found = np.bincount(np.searchsorted(np.cumsum(counts), drawn, side="right"), minlength=len(counts))
    assert sorted(found.tolist()) == sorted(shares)
    assert all(share <= count for share, count in zip(found, counts, strict=True))


def test_of_many_sources_some_are_drawn() -> None:
    drawn = draw_numbers([3] * 100, 20)
    assert len({number // 3 for number in drawn}) == 20 and max(drawn) > 150 and any(n % 3 for n in drawn)


@pytest.mark.parametrize("text", ["größe 中文 of 👩‍🚀 it", "a  b\n\n\tc ", "�x", "", "中"])
def test_pieces_are_the_whole_text(text: str, parts: Path) -> None:
    tokenizer = open_tokenizer(parts / "language")
    ids = [token.id for token in tokenizer.encode(f"so {text}", [])]
    pieces = spell(tokenizer, [1, *ids, 2])
    assert pieces[0].is_special and pieces[-1].is_special and (pieces[0].text, pieces[-1].text) == ("<s>", "</s>")
    assert "".join(piece.text for piece in pieces[1:-1]).strip(" ") == f"so {text}".strip(" ")
    assert not any(piece.is_special for piece in pieces[1:-1])
    if "中" in text:
        assert "中" in [piece.text.strip() for piece in pieces], "its bytes are one piece"


@pytest.mark.parametrize("counts", [[1, 100], [5, 1000], [3, 100, 3], [5, 100, 100], [0, 2], [7] * 30])
def test_every_source_gives_what_it_has(counts: list[int]) -> None:
    drawn = draw_numbers(counts, 20)
    assert len(drawn) == len(set(drawn)) == min(20, sum(counts)) and drawn == sorted(drawn)
    ends = list(itertools.accumulate(counts))
    shares = [sum(end - count <= number < end for number in drawn) for end, count in zip(ends, counts, strict=True)]
    assert all(share == count for share, count in zip(shares, counts, strict=True) if count <= 20 // len(counts))
