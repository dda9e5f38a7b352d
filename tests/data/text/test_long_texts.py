"""Of a text that is far too long only the beginning is tokenized, and what is trained on is the same."""

import json
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llava_fsdp.config import TooLong
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.record import Record
from llava_fsdp.data.text import encode
from llava_fsdp.data.text.encode import ExactEncoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.templates import template
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.runtime.errors import DataError, ModelError

LIMITS = [64, 100, 512]


def encoder(parts: Path, too_long: TooLong = TooLong.truncate) -> ExactEncoder:
    own = open_tokenizer(parts / "language")
    return ExactEncoder(own, template("v1"), lambda record, number: np.arange(7), 100, too_long)


def record(*texts: str, images: int = 0) -> Record:
    turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    return parse_record("a.json", 0, {"conversations": turns, **({"image": ["a.png"] * images} if images else {})})


def said(sample: Sample | None) -> object:
    if sample is None:
        return None
    return sample.input_ids.tolist(), sample.labels.tolist(), sample.images, [r.tolist() for r in sample.image_rows]


def texts(length: int) -> dict[str, Record]:
    dice = random.Random(3)
    words = " ".join("".join(dice.choices("abcdefg", k=dice.randint(1, 9))) for _ in range(length // 5))
    return {
        "a long question": record(words, "b"),
        "a long answer": record("what", words),
        "the second answer": record("what", "a cat", "and this", words, "or this", "a dog"),
        "one letter": record("a" * length, "b"),
        "blanks": record("a" + " " * length + "b", "c"),
        "special tokens": record("</s> <image> " * (length // 10), "b"),
        "images in front": record("<image>\n<image>\n" + words, "b", images=2),
        "images behind": record(f"{words} <image> {words} <image>", "b", images=2),
    }


@pytest.mark.parametrize("name", texts(100))
def test_the_beginning_is_that_of_the_whole_text(name: str, parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each length that is asked for, and also where a token needs more text than is tried first."""
    (whole,) = encoder(parts).measure(texts(20_000)[name], LIMITS)
    monkeypatch.setattr(encode, "LONG", 1000)
    monkeypatch.setattr(encode, "LEAST_CHARACTERS", 1)
    (made,) = encoder(parts).measure(texts(20_000)[name], LIMITS)
    assert 512 < len(made.whole.input_ids) < len(whole.whole.input_ids) // 2, "the work is bounded"
    assert said(made.sample) == said(whole.sample)
    assert {limit: said(own) for limit, own in made.at.items()} == {n: said(own) for n, own in whole.at.items()}
    assert said(encoder(parts)(texts(20_000)[name])) == said(whole.sample)


def test_a_long_text_of_few_tokens_is_read_further(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has more tokens than are asked for, whatever was tried first."""
    monkeypatch.setattr(encode, "LONG", 10)
    monkeypatch.setattr(encode, "LEAST_CHARACTERS", 0)
    own = encoder(parts).tokenizer
    text = "the red circle " * 3000
    found = encode.beginning(text, own, [], 600)
    assert len(own.encode(found, [])) > 600 + encode.MARGIN and len(found) < len(text)
    assert encode.beginning(text[:300], own, [], 600) == text[:300]


def test_what_is_too_long_is_skipped_or_refused_as_before(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "LONG", 1000)
    long = record("what", "the red circle " * 3000)
    assert encoder(parts, TooLong.skip)(long) is None
    with pytest.raises(DataError) as caught:
        encoder(parts, TooLong.fail)(long)
    assert caught.value.kind == Kind.too_long
    fits = replace(encoder(parts, TooLong.fail), max_length=1 << 20)(long)
    assert fits is not None and fits.positions_cut == 0 and len(fits.input_ids) > 3000, "a long text that fits is whole"


def test_the_longest_record_takes_seconds(parts: Path) -> None:
    long = record("what? " * 690_000, "b")
    began = time.process_time()
    (made,) = encoder(parts).measure(long, [512, 8192])
    assert len(made.sample.input_ids) == 100 and time.process_time() - began < 10


@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer"])
def test_a_tokenizer_whose_rules_fail_is_named(place: str, parts: Path, tmp_path: Path) -> None:
    """A pattern that goes back without end makes the library panic, which is no Exception of Python's."""
    folder = tmp_path / "language"
    shutil.copytree(parts / "language", folder)
    frozen = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"pattern": {"Regex": "(?:(?:x|xx)+)+$"}}
    frozen[place] = {
        "normalizer": {"type": "Replace", "content": "b", **pattern},
        "pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": False, **pattern},
    }[place]
    (folder / "tokenizer.json").write_text(json.dumps(frozen))
    own = open_tokenizer(folder)
    assert own.encode("abc", [])
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        own.encode("x" * 40 + "!", [])
