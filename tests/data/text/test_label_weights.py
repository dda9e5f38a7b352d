"""Weights of labels: a token has the greatest weight of its characters, or the answer's if it has none of the
answer's text."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat_templates import published
from conversations import open_form, rows_of
from tokenizers import Tokenizer as FastTokenizer

from llava_fsdp.config import FULL_WEIGHT, EmptyThoughts, LabelWeights, Thoughts, TooLong
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import AnswerWeights, Record, Turn, product
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.data.text.templates import template
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.runtime.errors import DataError

FORMS = ("v1", "chatml", "qwen3_vl", "qwen3", "glm4moe")
"""Two of LLaVA's templates; one whose plain conversations have a layout, one that gives several samples, and one whose
answers are taught one by one."""
TEACHING = Teaching(Thoughts.train, EmptyThoughts.context)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ExactEncoder, FastTokenizer]]:
    made, codes = {}, published()
    for name in FORMS:
        folder = tmp_path_factory.mktemp(name)
        own = open_form(codes.get(name, codes["qwen3_vl"]), folder)
        form = TEACHING.template(own) if name in codes else template(name)
        encoder = ExactEncoder(own.tokenizer, form, rows_of, UNLIMITED, TooLong.fail, teaching=TEACHING)
        made[name] = encoder, FastTokenizer.from_file(str(folder / "tokenizer.json"))
    return made


def turns_of(dice: random.Random) -> tuple[Turn, ...]:
    """Two exchanges. The first answer has white space that templates strip, and ranges of characters."""
    answers = "  the circle is red, <|im_end|> how many? 12 34 circles \n", "user assistant system, the circle"
    borders = sorted(dice.sample(range(len(answers[0])), 4))
    spans = tuple((a, b, w) for a, b, w in zip(borders[::2], borders[1::2], (FULL_WEIGHT, 999), strict=True))
    weights = AnswerWeights(FULL_WEIGHT // 2, spans), AnswerWeights(dice.choice([FULL_WEIGHT, 7]))
    return (
        Turn("human", "how many?"), Turn("gpt", answers[0]).weighted(weights[0]),
        Turn("human", "and red"), Turn("gpt", answers[1]).weighted(weights[1]),
    )  # fmt: skip


def expected_weights(sample: Sample, turns: tuple[Turn, ...], tokenizer: FastTokenizer) -> tuple[np.ndarray, int]:
    """The weight of each label of a sample that was made without weights, and how many tokens straddle a border."""
    texts = [tokenizer.decode([own], skip_special_tokens=False) for own in sample.input_ids.tolist()]
    begins = np.cumsum([0, *map(len, texts)])
    labelled = sample.labels != IGNORE
    found, straddling = np.zeros(len(texts), dtype=np.int64), 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], labelled, [0]]))).reshape(-1, 2)
    for first, end in edges.tolist():
        text = "".join(texts[first:end])
        turn = next(t for t in turns if t.role == "gpt" and t.text.strip() in text)
        weights = turn.weights or AnswerWeights()
        characters = np.full(len(text), weights.whole)
        if weights.spans is not None:
            whole = np.zeros(len(turn.text), dtype=np.int64)
            for begin, stop, weight in weights.spans:
                whole[begin:stop] = product(weight, weights.whole)
            said = turn.text.strip() if turn.text not in text else turn.text
            at = text.index(said)
            characters[at : at + len(said)] = whole[turn.text.index(said) :][: len(said)]
        for token in range(first, end):
            own = characters[begins[token] - begins[first] : begins[token + 1] - begins[first]]
            found[token], straddling = own.max(), straddling + (own.min() < own.max())
    return found, straddling


@pytest.mark.parametrize("name", FORMS)
def test_a_token_has_the_greatest_weight_of_its_characters(
    name: str, opened: dict[str, tuple[ExactEncoder, FastTokenizer]]
) -> None:
    encoder, tokenizer = opened[name]
    straddling = 0
    for seed in range(20):
        turns = turns_of(random.Random(seed))
        record = Record("data.json", seed, "r", (), turns, has_image_key=False)
        plain = replace(record, turns=tuple(replace(turn, weights=None) for turn in turns))
        samples, wholes = (encoder.samples(own, UNLIMITED) for own in (record, plain))
        assert len(samples) == len(wholes) == (2 if name == "qwen3" else 1)
        for sample, whole in zip(samples, wholes, strict=True):
            wanted, found = expected_weights(whole, turns, tokenizer)
            straddling += found
            assert whole.weights is None and np.array_equal(sample.input_ids, whole.input_ids)
            assert np.array_equal(sample.labels, np.where(wanted > 0, whole.labels, IGNORE))
            is_full = (wanted[wanted > 0] == FULL_WEIGHT).all()
            assert (sample.weights is None) == is_full
            if sample.weights is not None:
                assert np.array_equal(sample.weights[wanted > 0], wanted[wanted > 0])
            assert sample.weight == wanted[1:].sum()
            cut = len(sample.input_ids) - 3
            short = replace(encoder, max_length=cut, too_long=TooLong.truncate).cut(record, sample)
            assert short.weight == wanted[1:cut].sum()
    assert straddling > 9


def test_weights_that_cannot_be_obeyed_are_refused_or_ignored(
    opened: dict[str, tuple[ExactEncoder, FastTokenizer]],
) -> None:
    """A thought in the text moves its characters."""
    encoder, _ = opened["qwen3_vl"]
    turns = turns_of(random.Random(0))
    record = Record("data.json", 0, "r", (), turns, has_image_key=False, weights_not_obeyed="a weight of 3")
    with pytest.raises(DataError) as caught:
        encoder.samples(record, UNLIMITED)
    assert caught.value.kind is Kind.key_not_obeyed
    ignoring = replace(encoder, teaching=replace(TEACHING, weights=LabelWeights.ignore))
    (sample,) = ignoring.samples(replace(record, turns=(*turns[:3], replace(turns[3], learnt=False))), UNLIMITED)
    plain = replace(record, turns=tuple(replace(own, weights=None) for own in turns), weights_not_obeyed=None)
    (whole,) = encoder.samples(plain, UNLIMITED)
    assert sample.weights is None and np.array_equal(sample.labels, whole.labels)
    assert encoder.fingerprint != ignoring.fingerprint
    thinking, _ = opened["qwen3"]
    moved = replace(turns[1], text="<think>hm</think>" + turns[1].text)
    with pytest.raises(DataError) as caught:
        thinking.samples(replace(plain, turns=(turns[0], moved)), UNLIMITED)
    assert caught.value.kind is Kind.key_not_obeyed


@pytest.mark.parametrize("weights", [LabelWeights.use, LabelWeights.ignore])
def test_settings_are_read_from_their_text(weights: LabelWeights, tmp_path: Path) -> None:
    own = replace(TEACHING, weights=weights)
    assert Teaching.of_text(str(own)) == own
    assert Teaching.of_text("train context template all") == TEACHING, "as written before there were weights"
