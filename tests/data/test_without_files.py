"""Steps of a run without a dataset, and prompts of validation: their counts and places, worked out by hand."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small import config_of
from test_edges import CLIP, RECORD, TINY, exact

from llava_fsdp.config import AspectRatio, Config, Normalize, Pixels, TooLong
from llava_fsdp.data import validation_set
from llava_fsdp.data.batching.collate import Collator
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.index.examine.image_sample import Examined
from llava_fsdp.data.index.record_store import DataSource, SourceFile
from llava_fsdp.data.index.source_state import check_unchanged, stamp
from llava_fsdp.data.loader import ModelShape
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.synthetic import Contents, dry_run_micro_batches, fullest, synthetic_micro_batch, synthetic_step
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.data.validation_prompts import ask, lay_out_prompts
from llava_fsdp.runtime.errors import ConfigError, DataError, SourceError

SHAPE = ModelShape(image_tokens=9, image_size=28, max_length=512, vocab_size=10_000)


def config(*values: str) -> Config:
    return config_of([*values])


def test_the_counts_of_a_step_of_ranks_that_share_rows() -> None:
    """Four ranks, two of which process a row together: its samples are counted once, its tokens by each rank."""
    contents = Contents((100, 60), images=3, tiles=6, labels=70, image_tokens=60, ranks_per_row=2)
    assert contents.tokens == 80
    for batch, count in ((1, 1), (4, 1), (5, 2), (1000, 2)):
        cfg = config(f"global_batch_size={batch}")
        assert dry_run_micro_batches(contents, cfg, 4) == count
        step = synthetic_step(7, contents, SHAPE, cfg, 4)
        facts = dataclasses.asdict(step.facts)
        assert len(step.micro_batches) == count and facts["step"] == 7
        own = {
            "samples": 4,
            "tokens": 320,
            "token_pairs": 2 * (100**2 + 60**2),
            "label_tokens": 280,
            "images": 12,
            "tiles": 24,
        }
        assert {name: facts[name] for name in own} == {name: number * count for name, number in own.items()}


def test_a_micro_batch_without_data() -> None:
    contents = Contents((100, 60), images=3, tiles=6, labels=70, image_tokens=60, ranks_per_row=2)
    micro = synthetic_micro_batch(contents, SHAPE, pack=True)
    assert micro.input_ids.shape == (1, 80) and micro.images["tiles"].shape == (6, 3, 28, 28)
    assert micro.cu_seqlens.tolist() == [0, 100, 160] and micro.position_ids.tolist() == [[*range(80)]]
    assert micro.images["rows"].tolist() == [n % 54 for n in range(60)] and micro.scale == 1 / 70
    assert (len(micro.label_ids), len(micro.images["seeds"]), micro.seeds.shape) == (70, 6, (1, 80))
    blended = synthetic_micro_batch(contents, SHAPE, pack=True, blends=True)
    assert blended.images["rows"][59].tolist() == [5] * 4 and blended.images["weights"].sum(1).tolist() == [1.0] * 60
    padded = synthetic_micro_batch(Contents((50, 50), 2, 2, 10, 18), SHAPE, pack=False)
    assert padded.input_ids.shape == (2, 50) and padded.segments is None and padded.seeds.shape == (2, 1)


def test_rows_of_several_ranks_are_whole_chunks() -> None:
    """Two ranks have four chunks of a row: 202 tokens are padded to 204."""
    cfg = config("parallel.context=2", "data.max_length=101", "tokens_per_micro_batch=101")
    found = fullest(cfg, SHAPE, ContextCut(2, 0, paired=True))
    assert (found.lengths, found.ranks_per_row, found.tokens) == ((101, 101, 2), 2, 102)


class Images(ImageReader):
    """Stands for the reader of images: an image has four tokens."""

    def __init__(self) -> None:
        pass

    def image_rows(self, record: Any, number: int) -> np.ndarray:
        assert record.sizes is None or len(record.sizes) == len(record.images)
        return np.arange(4)

    def checked_path(self, record: Any, name: str) -> Path:
        return Path("images") / name


def test_a_question_of_validation_is_the_first_one() -> None:
    """With its images alone; their tags are not in the text that is shown."""
    turns = (Turn("human", "what <image> is"), Turn("gpt", "red"), Turn("human", "<image> blue"), Turn("gpt", "green"))
    record = dataclasses.replace(
        RECORD, images=("a.png", "b.png"), turns=turns, has_image_key=True, sizes=((3, 4), (5, 6)),
        frames=((0, 0.0), (0, 0.0)),
    )  # fmt: skip
    cfg = config("data.template=v1")
    encoder = exact(open_tokenizer(TINY), 99, TooLong.fail)
    reader: Any = Images()
    found = ask(record, encoder, reader, cfg)
    assert (found.question, found.reference) == ("what  is", "red") and found.sizes == ((3, 4),)
    assert found.images == (Path("images/a.png"),) and found.sample.images == ("a.png",)
    assert (found.sample.input_ids == IMAGE_ID).sum() == 4 and (found.sample.labels == IGNORE).all()
    plain = dataclasses.replace(RECORD, turns=(Turn("human", "what <image>"), Turn("gpt", "red")))
    assert ask(plain, encoder, reader, cfg).question == "what <image>"
    markers = "<im_start>", "<im_end>"
    for is_on in (True, False):
        own = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, image_start_end=is_on))
        tokenizer = open_tokenizer(TINY, extra=markers)
        made = ask(record, exact(tokenizer, 99, TooLong.fail), reader, own).sample.input_ids.tolist()
        assert [made.count(tokenizer.special(marker)) for marker in markers] == [is_on, is_on]
    wrong = dataclasses.replace(RECORD, turns=(Turn("human", "what"), Turn("human", "red")))
    with pytest.raises(DataError):
        ask(wrong, encoder, reader, cfg)


class EachAlone(list[int]):
    """Records of one sample each, which are their numbers."""

    def is_first(self, number: int) -> bool:
        return True


def questions_of(cfg: Any, length: int, monkeypatch: pytest.MonkeyPatch, most: int = 100) -> list[int]:
    """Numbers of the records that are asked about, of two sources with 4 and 6 records in steps of three, when the
    question of each has so many tokens."""
    monkeypatch.setattr(
        validation_set, "ask",
        lambda number, *_: SimpleNamespace(record=number, sample=SimpleNamespace(input_ids=range(length))),
    )  # fmt: skip
    loader: Any = SimpleNamespace(steps=SimpleNamespace(records=EachAlone(range(10)), encoder=None, image_reader=None))
    sampler = validation_set.held_out_sampler([4, 6], None, 3)
    return [own.record for own in validation_set.choose_questions(loader, sampler, cfg, most)]  # type: ignore[misc]


def validated(answers: int, ranks: int = 1) -> Any:
    """A configuration in which answers have at most 7 tokens, and a rank has 40 of a row."""
    val = SimpleNamespace(answers=answers, max_new_tokens=7)
    return SimpleNamespace(val=val, parallel=SimpleNamespace(num_context=ranks, context=ranks), rank_tokens=40)


def test_which_questions_are_asked_at_a_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly, of the whole validation set; and the answer must fit behind each, where ranks share rows on one rank."""
    assert questions_of(validated(5), 1, monkeypatch) == [0, 2, 4, 6, 8]
    assert questions_of(validated(0), 1, monkeypatch) == [] and len(questions_of(validated(99), 1, monkeypatch)) == 10
    for ranks, most in ((1, 93), (2, 33)):
        assert questions_of(validated(1, ranks), most, monkeypatch) == [0]
        with pytest.raises(ConfigError):
            questions_of(validated(1, ranks), most + 1, monkeypatch)


def test_a_validation_set_is_opened_with_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with its limit for each source and the size of its steps; errors about its files name the keys of val."""
    made: list[Any] = []
    data = SimpleNamespace(source_names=["a", "b"])
    held = SimpleNamespace(data=data)
    cfg: Any = SimpleNamespace(held_out=held, val=SimpleNamespace(limit=2), global_batch_size=3)

    def open_loader(own: Any, choose: Any) -> Any:
        assert own is held
        sampler = choose(SimpleNamespace(source_counts=[5, 4]))
        return SimpleNamespace(steps=SimpleNamespace(sampler=sampler))

    monkeypatch.setattr(validation_set, "sources_of", lambda *given: made.append(given))
    monkeypatch.setattr(validation_set, "choose_questions", lambda loader, sampler, own, most: [own is held, most])
    found = validation_set.open_held_out(cfg, open_loader, 77)
    assert made == [(data, "val")] and found.names == ["a", "b"] and found.questions == [True, 77]
    assert found.sampler.steps == ((0, [0, 2]), (1, [5, 7]))
    assert [found.sampler.source(n) for n in range(found.sampler.per_epoch)] == [0, 1]


def test_prompts_are_padded_on_the_left() -> None:
    reader = ImageReader(None, CLIP, ImageTokens(AspectRatio.pad, CLIP.size, 2), Pixels.exact)
    collate = Collator(reader, Normalize.step, pack=False)
    ids = [np.array([5, IMAGE_ID, IMAGE_ID]), np.array([6]), np.array([IMAGE_ID, IMAGE_ID, 7, 8])]
    rows = [np.arange(2)]
    samples = [Sample(own, own, (), tuple(rows if (own < 0).any() else ()), 0, 0) for own in ids]
    tiles = [np.full((1, 3, 28, 28), n, dtype=np.uint8) for n in (1, 2)]
    found = lay_out_prompts([(samples[0], [tiles[0]]), (samples[1], []), (samples[2], [tiles[1]])], collate)
    micro = found.micro
    assert micro.input_ids.tolist() == [[0, 5, 0, 0], [0, 0, 0, 6], [0, 0, 7, 8]]
    assert found.mask.tolist() == [[False, True, True, True], [False] * 3 + [True], [True] * 4]
    assert micro.images["positions"].tolist() == [2, 3, 8, 9] and micro.images["rows"].tolist() == [0, 1, 2, 3]
    assert micro.images["tiles"][:, 0, 0, 0].tolist() == [1, 2] and micro.label_positions.tolist() == [3, 7, 11]
    none = lay_out_prompts([], collate)
    assert none.micro.input_ids.tolist() == [[0]] and none.mask.tolist() == [[True]]


def test_what_is_said_of_decoded_images() -> None:
    some = Examined(2000, 1000, 5, 100, 0)
    assert some.bound == pytest.approx(1 - 0.05**0.01)
    assert "1,000 of 2,000 images" in some.summary and "5 of them are bad; at most 3 % of all" in some.summary
    assert some.as_json() == {
        "images": 2000, "decoded": 1000, "bad": 5, "bound": some.bound, "summary": some.summary,
    }  # fmt: skip
    whole = Examined(1000, 1000, 5, 100, 0)
    assert whole.bound is None and "at most" not in whole.summary and "5 of them" in whole.summary


def sources(path: Path) -> list[DataSource]:
    return [DataSource("a", str(path), (SourceFile("a", str(path), None),))]


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    """Or vanish: what was made of them is taken back."""
    path, undone = tmp_path / "a.json", list[int]()
    path.write_text("[1]")
    now = stamp(sources(path), 9)
    check_unchanged(sources(path), 9, now, lambda: undone.append(1))
    assert not undone
    os.utime(path, ns=(1, 1))
    for number in (1, 2):
        with pytest.raises(SourceError):
            check_unchanged(sources(path), 9, now, lambda: undone.append(1))
        assert len(undone) == number
        path.unlink(missing_ok=True)
