"""Parse the records of a dataset, each a conversation about images, from JSON. A record has one of several forms:
LLaVA's `conversations`, `messages`, `texts`, or a question and an answer under the two keys that the settings
`data.question` and `data.answer` name. Its keys tell which form it has.

In the functions, `what` and `where` name a value and the record in error messages, and `form` is a value's place in the
record, such as `messages[].`. A function raises DataError if the value that it parses is wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llava_fsdp.config import FULL_WEIGHT, DataConfig
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.image_places import SIZE_KEYS, images_in_front, one_list, put_videos
from llava_fsdp.data.records.forms.messages import read_messages
from llava_fsdp.data.records.forms.pairs import read_pair, read_pairs
from llava_fsdp.data.records.forms.preferences import PAIR_KEYS, read_preference, unpacked
from llava_fsdp.data.records.forms.record_reader import VIDEO, RecordReader
from llava_fsdp.data.records.keys import OF_ANSWERS, PREFERENCES, REASONS, KeyMeaning, is_thought, says_nothing
from llava_fsdp.data.records.record import (
    JSON_NAMES,
    LINES,
    TOO_LARGE,
    AnswerWeights,
    Record,
    Turn,
    check_bytes,
    id_of,
    is_container,
    is_empty,
    name_place,
    name_record,
    shown,
    unread_tag,
)
from llava_fsdp.data.records.tools import TOOL_KEYS, TURN_CALLS, read_tools
from llava_fsdp.runtime.errors import DataError

SYSTEM = "system"
"""Key of a record for a system text, if no turn has it (ShareGPT)."""
IMAGE_KEYS = ("image", "images")
"""Keys of a record for its images, beside the one that `data.image_column` names."""
VIDEO_KEYS = (VIDEO, "videos")
"""Keys of a record for its videos."""


@dataclass(frozen=True)
class RecordKeys:
    """Keys of records (in Parquet files, columns) that the user names: `data.question`, `data.answer` and
    `data.image_column`."""

    question: str | None = None
    """Key of the question; None: records with a question and an answer under two keys are not read."""
    answer: str | None = None
    image: str | None = None
    """Key for the images, in addition to IMAGE_KEYS."""
    pairs: bool = field(default=False, repr=False)  # indexes of other records are found by the text of the other keys
    """Whether records have a chosen and a rejected answer (`data.pairs`)."""

    @classmethod
    def of_config(cls, cfg: DataConfig) -> "RecordKeys":
        return cls(cfg.question, cfg.answer, cfg.image_column, cfg.pairs)

    @property
    def images(self) -> tuple[str, ...]:
        key = self.image
        return IMAGE_KEYS if key is None or key in IMAGE_KEYS else (*IMAGE_KEYS, key)

    @property
    def pair(self) -> tuple[str, str] | None:
        """Keys of a question and its answer; None if they are not set."""
        return None if self.question is None or self.answer is None else (self.question, self.answer)

    @cached_property
    def read(self) -> frozenset[str]:
        """All keys of a record that are read or refused, without those for videos. With `data.pairs`, these include the
        keys of a pair (PAIR_KEYS). A user who names `chosen` as the key of a question or answer wants to train on it
        alone: then all keys that pairs may have (PREFERENCES) are included, so that no other one is reported."""
        pair = self.pair or ()
        better = PREFERENCES if "chosen" in pair else PAIR_KEYS if self.pairs else frozenset[str]()
        return better | {*FORMS, *TOOL_KEYS, *SIZE_KEYS, *self.images, *pair, TOO_LARGE, SYSTEM}


NO_KEYS = RecordKeys()


FORMS: dict[str, Callable[[RecordReader, str, Any], list[Turn]]] = {
    "conversations": read_messages,
    "messages": read_messages,
    "texts": read_pairs,
}
"""Forms of records: {key with the conversation: function that parses its value}."""


def form_of(where: str, raw: dict[str, Any], keys: RecordKeys) -> str:
    """Return the key that tells in which form a record has its conversation: `conversations`, `messages`, `texts`, or
    one of the two keys of a question and its answer. Raise DataError if it has no form, or the keys of two.

    An empty or null key is ignored beside one with a value: in a table of several forms, a row has the keys of all.
    """
    known = [*FORMS, *(keys.pair or ())]
    named = [key for key in known if key in raw]
    filled = [key for key in named if raw[key]] or named
    if filled and set(filled) <= set(keys.pair or ()):
        return filled[0]
    if len(filled) > 1 and any(raw[key] for key in filled):
        raise DataError(
            f"{where} has the forms {' and '.join(filled)} at once; keep one, and make the other null or empty",
            Kind.bad_form,
        )
    if not filled:
        raise DataError(
            f"{where}: conversations is missing, the keys are {shown(list(raw))}; it must have one of "
            f"{', '.join(known)}, or data.question and data.answer must name its keys",
            Kind.bad_form,
        )
    return filled[0]


def parse_record(
    path: Path | str, index: int, raw: Any, line: int | None = None, keys: RecordKeys = NO_KEYS, videos: bool = False
) -> Record:
    """Make a Record from its JSON.

    Args:
        path, index, line: the file of the record, the record's index in it, and its line, if a line is a record.
        raw: the parsed JSON, or a row of a table with the same keys, in which images may also be bytes.
        keys: names of the keys of question, answer and images, if the user has set them; and whether records are
            `pairs` of a chosen and a rejected answer.
        videos: whether videos are read; if not, the record notes a video as media that are not read (`unread`).

    Raises:
        DataError: the record has none of the supported forms (docs/data.md; LLaVA's: train.py:665-740).
    """
    if not isinstance(raw, dict):
        lists = isinstance(raw, list) and str(path).lower().endswith(LINES)
        cure = "a JSON list belongs into a file whose name ends in .json" if lists else "fix it, or take it out"
        what = f"{JSON_NAMES[type(raw)]}, not an object with id and conversations"
        raise DataError(f"{name_place(path, index, line)} is {what}; {cure}", Kind.bad_form)
    identity = id_of(raw)
    where = name_record(path, index, line, identity)
    # a placeholder, written for a record that was too large to be read from its container
    if TOO_LARGE in raw and is_container(path):
        found, most = raw[TOO_LARGE]
        check_bytes(found, most, where)
    reader = RecordReader(where, str(path), videos)
    raw = unpacked(reader, raw) if keys.pairs else raw
    listed = reader.listed(raw, keys.images, "image")  # {key: names of the images under it}
    video_keys = tuple(key for key in VIDEO_KEYS if key not in keys.images) if videos else ()
    shows = one_list(where, reader.listed(raw, video_keys, VIDEO), "videos")
    reader.note_unread(raw, (*keys.images, *video_keys, *(keys.pair or ())))
    rejected: Turn | None = None
    form = "" if keys.pairs else form_of(where, raw, keys)
    if keys.pairs:
        turns, rejected = read_preference(reader, raw)
    elif form in FORMS:
        turns = FORMS[form](reader, form, raw[form])
    else:
        assert keys.pair is not None
        turns = read_pair(reader, raw, keys.pair)
    reader.refuse_tools("the record", raw, TURN_CALLS)
    turns = with_system(reader, raw, with_thought(reader, raw, turns))
    turns = with_weights(reader, turns, reader.note_keys("the record", raw, keys.read))
    names = one_list(where, {**listed, "the parts of its turns": reader.in_parts})
    if videos:
        names, turns = put_videos(names, shows, turns)
    parsed = tuple(turns if form == "conversations" else images_in_front(turns, len(names)))
    has_image_key = bool(names) or any(key in raw for key in ("image", *video_keys) if key != "videos")
    return Record(
        str(path), index, str(index) if identity is None else identity, names, parsed, has_image_key,
        has_id=identity is not None, line=line, unread=reader.unread or unread_tag(parsed),
        key_not_obeyed=reader.key_not_obeyed, weights_not_obeyed=reader.weights_not_obeyed,
        unread_keys=tuple(reader.unread_keys), tools=read_tools(raw, reader.bad), inline=reader.inline,
        rejected=rejected,
    )  # fmt: skip


def with_weights(reader: RecordReader, turns: list[Turn], weights: AnswerWeights) -> list[Turn]:
    """Multiply the weights of all answers by that of the record. `weights`: what the record says beside its turns.
    Weights for ranges of characters (`spans`) are left out, as their answer is not known; a note says so."""
    if weights.spans is not None:
        reader.note_key_not_obeyed(f"the record has a train_detail beside its answers; {REASONS[KeyMeaning.spans]}")
    if weights.whole == FULL_WEIGHT:
        return turns
    return [
        turn.weighted((turn.weights or AnswerWeights()).times(weights.whole)) if turn.role == "gpt" else turn
        for turn in turns
    ]


def with_thought(reader: RecordReader, raw: dict[str, Any], turns: list[Turn]) -> list[Turn]:
    """Give the thought that a record has beside its conversation to its only answer. With several answers, or another
    thought in the answer, note that the key cannot be obeyed."""
    thought = reader.thought_of("the record", raw)
    answers = [number for number, turn in enumerate(turns) if turn.role == "gpt"]
    if thought is None:
        return turns
    # a record without answers counts like one with several
    (place, *others) = answers or [-1, -1]
    if others or turns[place].thought not in (None, thought):
        key = next(key for key in raw if is_thought(key, raw[key]) and not says_nothing(raw[key]))
        many = f"the record has the key {shown(key)} for {len(answers)} answers"
        reader.key_not_obeyed = reader.key_not_obeyed or f"{many}; {OF_ANSWERS}"
        return turns
    return [replace(turn, thought=thought) if number == place else turn for number, turn in enumerate(turns)]


def with_system(reader: RecordReader, raw: dict[str, Any], turns: list[Turn]) -> list[Turn]:
    """Put the system text that a record has beside its conversation in front of its turns."""
    value = raw.get(SYSTEM)
    if is_empty(value):
        return turns
    text = reader.text(f"the record's {SYSTEM}", value)
    if turns and turns[0].role == "system":
        if turns[0].text != text:
            raise reader.bad(f"the record's {SYSTEM}", value, "the text of its system turn, or absent")
        return turns
    return [Turn("system", text), *turns]
