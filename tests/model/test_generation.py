"""Which token comes next and which ends an answer, to the last one that may; and what need not be read again."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import write_json
from transformers import DynamicCache, LlamaConfig

from llava_fsdp.data.text.tokens.detokenize import PENDING, AnswerText, find_stops
from llava_fsdp.model.generation import PrefixCache, Prompt, Sampling, check_answers, choose, write_tokens
from llava_fsdp.runtime.errors import ConfigError, ModelError


def tokenizer(**words: list[int]) -> Any:
    """Of texts whose ids are given; every id is a byte."""
    return SimpleNamespace(
        encode=lambda text: [SimpleNamespace(id=number) for number in words[text]],
        find_special=lambda text: [(len(text) - 1, len(text))] if text.endswith("#") else [],
        decode=lambda ids: bytes(ids).decode(errors="replace"),
    )


@pytest.mark.parametrize(
    ("ends", "stop", "expected"),
    [
        (2, "one", {2, 7}),
        ([2, 5], "one", {2, 5, 7}),
        (None, "one", {7}),
        (2, "two", {2}),
        (2, "two#", {2, 9}),
        (2, "none", {2}),
        ([0, True, None, 3.0], "two", {0}),
    ],
)
def test_what_ends_an_answer(ends: Any, stop: str, expected: set[int], tmp_path: Path) -> None:
    """A stop text of several tokens is looked for in the text: its last token alone ends nothing, unless it is
    special. The files of a model's folders add what they name."""
    own = tokenizer(one=[7], two=[8, 9], none=[], **{"two#": [8, 9]})
    assert find_stops(own, [stop], ends, [tmp_path, tmp_path / "absent"]) == expected
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [11, 12], "pad_token_id": 13})
    assert find_stops(own, [stop], ends, [tmp_path]) == expected | {11, 12}
    write_json(tmp_path / "config.json", {"eos_token_id": 14, "text_config": {"eos_token_id": [0, 15]}})
    assert find_stops(own, [stop], ends, [tmp_path]) == expected | {0, 11, 12, 14, 15}
    assert find_stops(None, [stop], None, [tmp_path]) == {0, 11, 12, 14, 15}, "without a tokenizer"


@pytest.mark.parametrize("value", ["2", [2, "3"], True, -1, 2.0, {"a": 1}])
def test_an_end_that_is_not_a_token_is_named(value: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(ModelError, match=r"generation_config\.json has eos_token_id="):
        find_stops(None, [], 2, [tmp_path])


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, {3}), (0.5, {3}), (0.51, {1, 3}), (0.75, {1, 3}), (0.76, {0, 1, 3})]
)
def test_the_fewest_tokens_that_have_the_probability_together(top_p: float, kept: set[int]) -> None:
    """Of shares of exactly an eighth, a quarter, an eighth and a half."""
    shares = torch.tensor([0.125, 0.25, 0.0625, 0.5, 0.0625])
    logits = shares.log().expand(3000, 5).contiguous()
    assert torch.equal(torch.softmax(logits[0], -1), shares)
    drawn = choose(logits, Sampling(1, temperature=1.0, top_p=top_p), torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == kept


def test_temperature_divides_the_logits() -> None:
    """At 2 the shares are as their square roots: a third and two thirds of 1 and 4."""
    logits = torch.tensor([0.0, math.log(4)]).expand(20_000, 2).contiguous()
    drawn = choose(logits, Sampling(1, temperature=2.0), torch.Generator().manual_seed(0))
    assert float(drawn.double().mean()) == pytest.approx(2 / 3, abs=0.015)


def test_bytes_wait_for_their_character_no_longer_than_so_many_tokens() -> None:
    text = AnswerText(tokenizer(), "</s>", frozenset())
    assert [bool(text.push(0xFF)) for _ in range(PENDING + 1)] == [False] * PENDING + [True]
    assert PENDING == 8


LANGUAGE = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
MODEL: Any = SimpleNamespace(language=SimpleNamespace(config=LANGUAGE))


def filled(tokens: list[int], lengths: tuple[int, int]) -> PrefixCache:
    cache = DynamicCache(config=LANGUAGE)
    for layer, length in enumerate(lengths):
        states = torch.arange(length).float().view(1, 1, length, 1)
        cache.update(states, states, layer)
    return PrefixCache(cache, tokens)


@pytest.mark.parametrize(
    ("asked", "common"),
    [
        ([5, 6, 7, 8], 3),  # all that is cached
        ([5, 6, 7], 2),  # the same again: a token is left to read
        ([5, 6, 9, 7], 2),
        ([5, 6], 1),
        ([5, -6, 7], 1),
        ([9, 6, 7], 0),
        ([5], 0),
    ],
)
def test_the_common_beginning_is_kept_but_for_the_last_token(asked: list[int], common: int) -> None:
    own = filled([5, 6, 7], (3, 3))
    before = own.cache
    cache, found = own.reuse(MODEL, asked)
    assert found == common == cache.get_seq_length() and own.tokens == asked[:common] and own.cache is cache
    assert (cache is before) == (common > 0)


@pytest.mark.parametrize("lengths", [(3, 2), (4, 4), (2, 3)])
def test_a_cache_of_other_lengths_is_not_used(lengths: tuple[int, int]) -> None:
    own = filled([5, 6, 7], lengths)
    assert own.reuse(MODEL, [5, 6, 7, 8])[1] == 0 and own.tokens == []


def test_a_cache_that_cannot_be_cropped_is_used_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llava_fsdp.model.generation.can_be_cropped", lambda _: False)
    assert filled([5, 6, 7], (3, 3)).reuse(MODEL, [5, 6, 7, 8])[1] == 3
    assert filled([5, 6, 7], (3, 3)).reuse(MODEL, [5, 6, 8, 8])[1] == 0


def test_what_the_model_reads_for_each_token() -> None:
    """The prompt after a cached token, one row padded on the left; then each chosen token, without images."""
    calls: list[dict[str, Any]] = []

    def model(ids: Any, cached: Any, images: Any, seeds: Any, last: Any, **more: Any) -> Any:
        own = {"ids": ids, "positions": cached.position_ids, "mask": cached.mask.int(), "last": last}
        calls.append({name: value.tolist() for name, value in own.items()} | {"images": images, **more})
        logits = torch.zeros(2, 9)
        logits[0, len(calls)], logits[1, len(calls) + 4] = 1, 1
        return logits

    ids, mask = torch.tensor([[0, 0, 3], [4, 5, 6]]), torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]]).bool()
    images: Any = {"positions": torch.tensor([5])}
    cache = DynamicCache(config=LANGUAGE)
    found = [one.tolist() for one in write_tokens(model, Prompt(ids, mask, images), cache, Sampling(3))]
    assert found == [[1, 5], [2, 6], [3, 7]]
    assert [call["ids"] for call in calls] == [ids.tolist(), [[1], [5]], [[2], [6]]]
    assert [call["positions"] for call in calls] == [[[0, 0, 0], [1, 2, 3]], [[1], [4]], [[2], [5]]]
    assert [call["mask"] for call in calls] == [
        [[0, 0, 0, 1, *[1] * n], [1, 1, 1, 1, *[1] * n]] for n in range(3)
    ]  # fmt: skip
    assert [call["last"] for call in calls] == [[2, 5], [0, 1], [0, 1]]
    assert calls[0]["images"] is images and calls[1]["images"] == calls[2]["images"] == {}
    assert all(call["return_logits"] for call in calls)


@pytest.mark.parametrize("kind", [TypeError, AttributeError, NotImplementedError, ValueError, None])
@pytest.mark.parametrize("call", [1, 2])
def test_a_language_model_that_cannot_answer_is_refused(kind: type[Exception] | None, call: int) -> None:
    """Whether the first token fails, or the second, for which the cache is read."""
    calls = 0

    def model(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if kind is not None and calls == call:
            raise kind("no cache")
        return torch.zeros(1, 9)

    found = None
    try:
        ids = torch.zeros((1, 2), dtype=torch.int64)
        check_answers(model, LANGUAGE, Prompt(ids, torch.ones_like(ids, dtype=torch.bool), {}))
    except Exception as error:
        found = type(error)
    assert found is (None if kind is None else ConfigError)
    assert calls == (call if kind is not None else 2)
