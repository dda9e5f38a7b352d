"""Parse what records of pairs have in place of a conversation: a prompt, and a chosen and a rejected answer to it.

The prompt is under `conversations`, `messages` or `prompt`, as turns; or it is one question, under `prompt` or
`question`. Each answer is a text, a message, or a list of messages. Without a prompt, both lists are whole
conversations that differ in their last message (trl's implicit prompt). The `text` of RLHF-V is a JSON object with
these keys. Of rated answers under `completions` (VLFeedback), the best and the worst make the pair.
"""

import json
from dataclasses import replace
from statistics import mean
from typing import Any

from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.messages import read_message, read_messages
from llava_fsdp.data.records.forms.record_reader import RecordReader
from llava_fsdp.data.records.record import Turn, decode, is_empty
from llava_fsdp.runtime.errors import DataError

CHOSEN, REJECTED = "chosen", "rejected"
"""Keys of a record for the better and the worse answer."""
TURN_LISTS = ("conversations", "messages")
"""Keys of a prompt that is a list of messages."""
PROMPT, QUESTION = "prompt", "question"
"""Keys of a prompt that is one question; `prompt` may be a list of messages, too."""
PACKED = "text"
"""Key whose value may be a JSON object, as text, with the question and the answers (RLHF-V)."""
RATED = "completions"
"""Key of a list of objects with `response`, an answer, and `annotations`, which have a `Rating` for each aspect
(VLFeedback)."""
PAIR_KEYS = frozenset([*TURN_LISTS, PROMPT, QUESTION, CHOSEN, REJECTED])
"""Keys of a record that are read for a pair."""
PAIR_COLUMNS = (PROMPT, QUESTION, CHOSEN, REJECTED, PACKED, RATED)
"""Columns of tables that are read for a pair, beside those of conversations."""
ANSWERS = (PROMPT, CHOSEN, REJECTED)
"""Those whose values may be lists of messages."""


def unpacked(reader: RecordReader, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a pair with its answers under `chosen` and `rejected`: the JSON object that RLHF-V writes as
    text under `text` is put among its keys, and rated answers under `completions` are replaced by the best and the
    worst. Other records are returned unchanged."""
    inner = raw.get(PACKED)
    if CHOSEN not in raw and not is_empty(raw.get(RATED)):
        chosen, rejected = best_and_worst(reader, raw[RATED])
        return {key: value for key, value in raw.items() if key != RATED} | {CHOSEN: chosen, REJECTED: rejected}
    if CHOSEN in raw or inner is None:
        return raw
    if isinstance(inner, str):
        try:
            inner = decode(inner.encode(errors="surrogatepass"))
        except (ValueError, RecursionError):
            inner = None
    if not isinstance(inner, dict) or not {CHOSEN, REJECTED} <= inner.keys():
        raise reader.bad(PACKED, raw[PACKED], f"a JSON object with {QUESTION}, {CHOSEN} and {REJECTED}")
    return {key: value for key, value in raw.items() if key != PACKED} | inner


def best_and_worst(reader: RecordReader, rated: Any) -> tuple[Any, Any]:
    """Return, of answers with ratings (`rated`), those with the highest and the lowest mean; of equal ones the first.
    Raise DataError if answers have no ratings, or all have the same mean."""
    try:
        columns = ("response", "annotations")
        # tables may have an object of lists in place of a list of objects
        rows = zip(*(rated[key] for key in columns), strict=True) if isinstance(rated, dict) else (
            tuple(rating[key] for key in columns) for rating in rated
        )  # fmt: skip
        means = [(mean([float(rating["Rating"]) for rating in ratings.values()]), answer) for answer, ratings in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise reader.bad(RATED, rated, "objects with response, and annotations that each have a Rating") from error
    best, worst = (choose(means, key=lambda mean_and_answer: mean_and_answer[0]) for choose in (max, min))
    if best[0] == worst[0]:
        raise reader.bad(RATED, rated, "answers with different mean ratings")
    return best[1], worst[1]


def read_preference(reader: RecordReader, raw: dict[str, Any]) -> tuple[list[Turn], Turn]:
    """Parse a record of a pair. Return the turns of the prompt, which are not learnt, and the chosen answer; and the
    rejected answer.

    Raises:
        DataError: the prompt or an answer is missing or has another form, or both answers are equal.
    """
    prompt_key = key_of_prompt(reader, raw)
    chosen, rejected = (read_answer(reader, key, raw.get(key)) for key in (CHOSEN, REJECTED))
    prompt: list[Turn] = []
    if prompt_key is not None:
        value = raw[prompt_key]
        is_list = prompt_key in TURN_LISTS or isinstance(value, list)
        prompt = (
            read_messages(reader, prompt_key, value) if is_list else [Turn("human", reader.text(prompt_key, value))]
        )
    for key, turns in ((CHOSEN, chosen), (REJECTED, rejected)):
        if not turns or turns[-1].role != "gpt":
            raise reader.bad(key, raw.get(key), "an answer: text, or messages of which the last is an assistant's")
        if len(turns) > 1 and prompt:
            raise reader.bad(key, raw.get(key), f"one message, as the prompt is under {prompt_key}")
    if not prompt:
        prompt = chosen[:-1]
        if not prompt or prompt != rejected[:-1]:
            raise reader.bad(REJECTED, raw.get(REJECTED), "the messages of chosen with another last one")
    if prompt[-1].role not in ("human", "tool"):
        raise DataError(
            f"{reader.where}: the prompt ends with a message of {prompt[-1].role}, and must end with one of the user; "
            "the two answers are under chosen and rejected",
            Kind.wrong_roles,
        )
    better, worse = chosen[-1], rejected[-1]
    for key, turn in ((CHOSEN, better), (REJECTED, worse)):
        if not turn.text.strip() and not turn.calls:
            raise DataError(f"{reader.where}: {key} is an answer without text; take the record out", Kind.empty_answer)
    if better == worse:
        raise DataError(
            f"{reader.where}: chosen and rejected are equal, so that nothing can be learnt of them; take the record "
            "out",
            Kind.bad_form,
        )
    read_only = [replace(turn, learnt=False) if turn.role == "gpt" else turn for turn in prompt]
    return [*read_only, replace(better, learnt=True)], replace(worse, learnt=True)


def key_of_prompt(reader: RecordReader, raw: dict[str, Any]) -> str | None:
    """Return the key of a record that has its prompt; None if the answers are whole conversations. Raise DataError if
    the record has no two answers, or has several prompts."""
    missing = [key for key in (CHOSEN, REJECTED) if is_empty(raw.get(key))]
    if missing:
        keys = json.dumps(list(raw), ensure_ascii=False)[:80]
        raise DataError(
            f"{reader.where}: {missing[0]} is missing or empty, the keys are {keys}; data.pairs=true needs records "
            "with chosen and rejected",
            Kind.bad_form,
        )
    filled = [key for key in (*TURN_LISTS, PROMPT, QUESTION) if not is_empty(raw.get(key))]
    if len(filled) > 1:
        raise DataError(f"{reader.where} has the prompts {' and '.join(filled)} at once; keep one", Kind.bad_form)
    return filled[0] if filled else None


def read_answer(reader: RecordReader, key: str, raw: Any) -> list[Turn]:
    """Parse the value of `chosen` or `rejected`: text, a message, or a list of messages."""
    if isinstance(raw, str):
        return [Turn("gpt", reader.text(key, raw))]
    return read_messages(reader, key, raw) if isinstance(raw, list) else read_message(reader, key, raw)
