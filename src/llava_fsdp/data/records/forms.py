"""Parse the records of a dataset, each a conversation about images, from JSON. A record has one of several forms:
LLaVA's `conversations`, `messages`, `texts`, or a question and an answer under the two keys that the settings
`data.question` and `data.answer` name. Its keys tell which form it has.

In the functions, `what` and `where` name a value and the record in error messages, and `form` is a value's place in the
record, such as `messages[].`. A function raises DataError if the value that it parses is wrong.
"""

import base64
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from llava_fsdp.config import DataConfig
from llava_fsdp.data.containers.location import ImageLocation, location_from
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.keys import (
    MOST_KEYS,
    MOST_LETTERS,
    OF_ANSWERS,
    ONLY_OF_RECORDS,
    PREFERENCES,
    REASONS,
    KeyMeaning,
    is_learnt,
    is_thought,
    meaning_of,
    says_nothing,
)
from llava_fsdp.data.records.record import (
    IMAGE_TAG,
    INLINE,
    JSON_NAMES,
    LINES,
    LOCATION,
    PARQUET,
    READS_IMAGES,
    TOO_LARGE,
    Call,
    Record,
    Turn,
    check_bytes,
    check_name,
    check_text,
    id_of,
    is_container,
    is_empty,
    is_video,
    name_place,
    name_record,
    names_media,
    shown,
    unread_media,
    unread_tag,
)
from llava_fsdp.data.records.tools import (
    CALLERS,
    RECORD_TOOLS,
    RESULT_KEYS,
    RESULTS,
    TOOL_KEYS,
    TURN_CALLS,
    has_no_tools,
    joined_calls,
    linked_results,
    read_call,
    read_calls,
    read_tools,
)
from llava_fsdp.runtime.errors import DataError

TURN_KEYS = (("from", "value"), ("role", "content"))
"""Keys of a turn in `conversations` or `messages`: its speaker, and its text or (only `content`) a list of parts."""
ENTRY_KEYS = ("user", "assistant")
"""Keys of an element of `texts`: a question and its answer."""
SPEAKERS = {
    "human": "human", "user": "human",
    "gpt": "gpt", "assistant": "gpt", "model": "gpt", "chatgpt": "gpt", "bing": "gpt", "bard": "gpt",
    "system": "system",
}  # fmt: skip
"""{name of a speaker: role of a turn}. A turn whose speaker has another name keeps the name, and is refused later."""
ROLES = ("human", "gpt")
SYSTEM = "system"
"""Key of a record for a system text, if no turn has it (ShareGPT)."""
IMAGE_KEYS = ("image", "images")
"""Keys of a record for its images, beside the one that `data.image_column` names."""
IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of a turn that are an image."""
GIVEN_AS = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys with an image in a part of a turn, or in an object instead of a path."""
VIDEO = "video"
"""Key of a record for its videos, and type of the parts of a turn that are a video."""
VIDEO_KEYS = (VIDEO, "videos")
"""Keys of a record for its videos."""
VIDEO_GIVEN_AS = (VIDEO, "path")
"""Keys with a video in a part of a turn."""
SIZE_KEYS = ("width", "height")
"""Keys of a record for the sizes in pixels of its images, as they are shown (after turning)."""
LONGEST_SIDE = (1 << 31) - 1
"""Greatest width or height in pixels that a record may give."""
MESSAGE_KEYS = frozenset([key for pair in TURN_KEYS for key in pair] + [*TOOL_KEYS])
"""Keys of a message that are read; those of TOOL_KEYS are refused where they have no place."""
THOUGHT_PARTS, CALL_PART, RESULT_PART = ("thinking", "reasoning"), "tool_use", "tool_result"
"""Types of the parts of a message that are no text and no media, as Anthropic writes them: thoughts and calls of an
answer, and the result of a call in the message after it."""
HIDDEN_PART = "redacted_thinking"
"""Type of a part with an encrypted thought."""
AGENT_PART_KEYS = frozenset("type thinking reasoning text signature id name input tool_use_id content is_error "
                            "cache_control".split())  # fmt: skip
"""Keys of these parts that are read, or change nothing that is learnt."""
PART_KEYS = frozenset(["type", "text", "detail", "cache_control", *GIVEN_AS, *VIDEO_GIVEN_AS])
"""Keys of a part of a message that are read, or change nothing that is learnt."""
ANY_TAG = re.compile(rf"{IMAGE_TAG}|(?i:<video>)")
DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)


@dataclass(frozen=True)
class RecordKeys:
    """Keys of records (in Parquet files, columns) that the user names: `data.question`, `data.answer` and
    `data.image_column`."""

    question: str | None = None
    """Key of the question; None: records with a question and an answer under two keys are not read."""
    answer: str | None = None
    image: str | None = None
    """Key for the images, in addition to IMAGE_KEYS."""

    @classmethod
    def of_config(cls, cfg: DataConfig) -> "RecordKeys":
        return cls(cfg.question, cfg.answer, cfg.image_column)

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
        """All keys that are read or refused, without those for videos. If the user names the better answer of a pair,
        the other one is known, too."""
        pair = self.pair or ()
        better = PREFERENCES if "chosen" in pair else frozenset[str]()
        return better | {*FORMS, *TOOL_KEYS, *SIZE_KEYS, *self.images, *pair, TOO_LARGE, SYSTEM}


NO_KEYS = RecordKeys()


@dataclass
class RecordReader:
    """Parses the values in the JSON of one record. It also collects the images that are embedded in the record, and
    notes media (such as audio) that are not read."""

    where: str
    file: str
    """Path or URL of the file of records."""
    reads_videos: bool = False
    """Whether videos are read; if not, a video counts as media that are not read."""
    inline: dict[str, bytes | ImageLocation] = field(default_factory=dict)
    """{name: bytes or location} of the images that are embedded in the record or in its file."""
    in_parts: list[str] = field(default_factory=list)
    """Names of the images and videos in the parts of turns."""
    unread: str | None = None
    """Description of the first media that are not read."""
    not_obeyed: str | None = None
    """Description of the first key that says what is learnt and cannot be obeyed."""
    unread_keys: list[str] = field(default_factory=list)
    """The keys with a value that are not read and could change what is learnt."""

    def bad(self, what: str, value: Any, cure: str) -> DataError:
        """Return an error that says what a wrong value must be (`cure`, such as `a path`)."""
        return DataError(f"{self.where}: {what} is {shown(value)}; it must be {cure}", Kind.bad_form)

    def note_unread(self, raw: dict[str, Any], read_keys: Iterable[str] = ()) -> None:
        """Note the first value in a record, or in an object in it, that is media which are not read. The media of
        `read_keys` are read."""
        self.unread = self.unread or unread_media(raw, read_keys)

    def note_keys(
        self, what: str, raw: dict[str, Any], read_keys: Collection[str], form: str = "", is_answer: bool = True
    ) -> bool:
        """Read the keys of a record, or of an object in it, that say whether an answer is learnt. Note those that
        cannot be obeyed, and those that are not read. Return whether the answer is learnt.

        Args:
            what: name of the object in messages.
            read_keys: keys of the object that are read elsewhere.
            form: where in the record the object is, such as `messages[].`; empty for the record itself.
            is_answer: whether the object has an answer; a question is never learnt.
        """
        learnt = True
        for key in raw:
            if key in read_keys:
                continue
            meaning, value = meaning_of(key[:MOST_LETTERS]), raw[key]  # all known keys are shorter
            if meaning is KeyMeaning.harmless and not (form and key in ONLY_OF_RECORDS):
                continue
            if is_answer and is_thought(key, value):  # read by `thought_of`
                continue
            if says_nothing(value) or names_media(key):
                continue
            if meaning in REASONS:
                try:
                    learns = is_learnt(key, value)
                except ValueError as error:
                    if is_answer:
                        self.not_obeyed = self.not_obeyed or f"{what} has the key {shown(key)}, {shown(value)}; {error}"
                        continue
                    learns = True  # of a question: the key is only noted as one that is not read
                if is_answer or not learns:
                    learnt &= learns
                    continue
            name = f"{form}{key[:MOST_LETTERS]}"
            if name not in self.unread_keys and len(self.unread_keys) < MOST_KEYS:
                self.unread_keys.append(name)
        return learnt

    def image(self, what: str, value: Any, is_nested: bool = False) -> str:
        """Return the name of an image: its path or, for an image that is embedded in the record, a name made from its
        bytes.

        Args:
            value: a path, a data URL, or an object with one of the keys `image`, `image_url`, `url`, `path`, `base64`
                and `bytes` (bytes or base64 text). In a row of a Parquet file or a tar also an object with the image's
                location in the file.
            is_nested: whether `value` is itself the value of a key `image` or `image_url` of an object.
        """
        if isinstance(value, dict) and LOCATION in value and is_container(self.file):
            return self.located(what, value[LOCATION])
        given = given_images(value) if isinstance(value, dict) else {}
        if len(given) == 1:
            ((key, inner),) = given.items()
            if key in IMAGE_PARTS and isinstance(inner, dict) and not is_nested:
                return self.image(what, inner, is_nested=True)
            if key in ("bytes", "base64"):
                return self.keep(inner if isinstance(inner, bytes) else self.decoded(what, inner))
            value = inner
        if not isinstance(value, str) or not value:
            cure = "a path or a list of paths, or a data URL: fix it, or leave the key out of a record without images"
            raise self.bad(what, value, cure)
        if value[:5].lower() == "data:":
            head = DATA_URL.match(value)
            if head is None:
                raise self.bad(what, value, "data:image/TYPE;base64,DATA if it is a data URL")
            return self.keep(self.decoded(what, value[head.end() :]))
        check_name(value, self.where)
        if is_video(value) and not self.reads_videos:
            self.unread = self.unread or f"the video {shown(value)}"
        return value

    def video(self, what: str, value: Any) -> str:
        """Check the path of a video and return it."""
        if not isinstance(value, str) or not value:
            cure = "a path or a list of paths: fix it, or leave the key out of a record without videos"
            raise self.bad(what, value, cure)
        check_name(value, self.where, what)
        if not is_video(value):
            self.unread = self.unread or f"the video {shown(value)}"
        return value

    def decoded(self, what: str, text: Any) -> bytes:
        """Return the bytes of an image that is given as base64 text."""
        try:
            return base64.b64decode(text, validate=True)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.where}: {what} is {shown(text)}, which is not base64: {error}; encode the image's file again",
                Kind.image_unreadable,
            ) from error

    def keep(self, data: bytes) -> str:
        """Store the bytes of an image that is embedded in the record; return a name made from their hash."""
        name = f"{INLINE}{xxh3_128_hexdigest(data)}"
        self.inline[name] = data
        return name

    def located(self, what: str, values: Any) -> str:
        """Store where an image lies in the Parquet file or tar of the record (as `ImageLocation.to_json` writes it);
        return a name made from this location."""
        try:
            location = location_from(self.file, values)
        except ValueError:
            raise self.bad(what, values, "a path") from None
        page = "" if location.page is None else f"@{location.page.offset}"
        name = f"{INLINE}{location.offset}+{location.size}{page}"
        self.inline[name] = location
        return name

    def turns(self, key: str, raw: Any) -> list[Turn]:
        """Parse the value of the key `conversations` or `messages`."""
        if not isinstance(raw, list):
            raise self.bad(key, raw, "a list of turns, each an object with from and value, or role and content")
        made = [turn for number, own in enumerate(raw) for turn in self.turn(f"turn {number}", own, f"{key}[].")]
        if all(turn.role != "tool" and not turn.calls for turn in made):
            return made
        return linked_results(joined_calls(made, self.bad), self.refuse_turn)

    def refuse_turn(self, number: int, why: str) -> DataError:
        """Return an error about a turn whose role or calls do not fit the turns before it."""
        return DataError(
            f"{self.where}: turn {number} {why}; fix the conversation, or take the record out", Kind.wrong_roles
        )

    def turn(self, what: str, raw: Any, form: str = "") -> list[Turn]:
        """Parse one message of `conversations` or `messages`. It is one turn, but for a message with the results of
        calls as parts, each of which is a turn before it."""
        fields = raw if isinstance(raw, dict) else {}
        speakers = [name for key, _ in TURN_KEYS if isinstance(name := fields.get(key), str)]
        speaker = speakers[0] if speakers else ""
        role = "tool" if speaker in RESULTS else "call" if speaker in CALLERS else SPEAKERS.get(speaker) or speaker
        is_answer = role in ("gpt", "call")
        self.refuse_tools(what, fields, RECORD_TOOLS if role == "gpt" else TOOL_KEYS)
        texts = [key for pair in TURN_KEYS if all(fields.get(own) is not None for own in pair) for key in pair[1:]]
        thought = self.thought_of(what, fields) if role == "gpt" else None
        calls = self.calls_of(what, fields) if role == "gpt" else ()
        is_bare = not texts and bool(calls or thought is not None)  # an answer may have no text beside its calls
        if (len(texts) != 1 and not is_bare) or len(speakers) != 1:
            raise self.bad(what, raw, "an object with from and value, or with role and content")
        self.note_unread(fields)
        known = MESSAGE_KEYS | RESULT_KEYS if role == "tool" else MESSAGE_KEYS
        learnt = self.note_keys(what, fields, known, form, is_answer) or not is_answer
        content = "" if is_bare else fields[texts[0]]
        if role == "call":
            found = read_calls(what, content, self.bad, self.is_table)
            return [Turn("call", "", learnt, calls=found)]
        if role == "tool":
            names = fields.get("name"), fields.get("tool_call_id") or fields.get("id")
            named, identity = (name if isinstance(name, str) else "" for name in names)
            calls = (Call(named, {}, identity),)
        if texts != ["content"] or not isinstance(content, list):
            return [Turn(role, self.text(what, content), learnt, thought=thought, calls=calls)]
        return self.message(what, content, Turn(role, "", learnt, thought=thought, calls=calls), f"{form}content[].")

    def message(self, what: str, content: list[Any], turn: Turn, form: str) -> list[Turn]:
        """Parse a message whose content is a list of parts: the results of calls, then the rest of the message, if it
        is more than results. `turn` is the message without its content."""
        texts, thoughts, results = list[str](), list[str](), list[Turn]()
        calls = list(turn.calls)
        for number, part in enumerate(content):
            own, kind = f"{what}, part {number}", part.get("type") if isinstance(part, dict) else None
            if kind == HIDDEN_PART:
                raise self.bad(own, kind, "a thought that can be read, as an encrypted one cannot be learnt or shown")
            if kind == RESULT_PART and turn.role == "human":
                if texts:
                    raise self.bad(own, kind, "before the other parts of its message")
                results.append(self.result(own, part, form))
            elif kind in (*THOUGHT_PARTS, CALL_PART) and turn.role == "gpt":
                self.note_keys(own, part, AGENT_PART_KEYS, form)
                if kind == CALL_PART:
                    calls.append(read_call(own, part, self.bad, self.is_table))
                else:
                    thoughts.append(self.text(own, part.get(kind) or part.get("text") or ""))
            else:
                texts.append(self.part(own, part, form=form, is_answer=turn.role == "gpt"))
        if results and not texts:
            return results
        thought = "".join(thoughts) if "".join(thoughts).strip() else None
        if None not in (thought, turn.thought) and thought != turn.thought:
            raise self.bad(what, [turn.thought, thought], "an answer with one thought")
        text, parts = "".join(texts), tuple(texts) if texts else None
        made = replace(turn, text=text, parts=parts, thought=thought or turn.thought, calls=tuple(calls))
        return [*results, made]

    def result(self, what: str, raw: dict[str, Any], form: str) -> Turn:
        """Parse a part of a message that is the result of a call."""
        self.note_keys(what, raw, AGENT_PART_KEYS, form, is_answer=False)
        content, parts = raw.get("content"), None
        if isinstance(content, list):
            parts = tuple(self.part(f"{what}, part {number}", own, form) for number, own in enumerate(content))
            content = "".join(parts)
        text = self.text(what, "" if content is None else content)
        return Turn("tool", text, parts=parts, calls=(Call("", {}, str(raw.get("tool_use_id") or "")),))

    def calls_of(self, what: str, raw: dict[str, Any]) -> tuple[Call, ...]:
        """Return the calls of an answer from its keys `tool_calls` and `function_call`."""
        given = [key for key in TURN_CALLS if not has_no_tools(raw.get(key))]
        if len(given) > 1:
            raise self.bad(what, raw, f"an answer with one of {' and '.join(given)}")
        return tuple(own for key in given for own in read_calls(f"{what}, {key}", raw[key], self.bad, self.is_table))

    @property
    def is_table(self) -> bool:
        """Whether the record is a row of a Parquet file."""
        return self.file.lower().endswith(PARQUET)

    def thought_of(self, what: str, raw: dict[str, Any]) -> str | None:
        """Return the thought of an answer from the keys that are for one; None without one. Raise an error if they
        have different thoughts."""
        found = {raw[key] for key in raw if is_thought(key, raw[key]) and not says_nothing(raw[key])}
        if len(found) > 1:
            raise self.bad(what, sorted(found), "an answer with one thought")
        return self.text(what, found.pop()) if found else None

    def text(self, what: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.bad(what, value, "text")
        check_text(value, f"{self.where}: {what}")
        return value

    def part(self, what: str, raw: Any, form: str = "", is_answer: bool = False) -> str:
        """Return the text of one part of a message whose content is a list of parts, as in OpenAI's chat format. For a
        part that is an image or a video, the text is `<image>`, and its name is stored; for other media, it is empty.

        Args:
            what: name of the part in error messages.
            form: where in the record the part is, such as `messages[].content[].`, for the names of unread keys.
            is_answer: whether the part belongs to an answer.
        """
        kind = raw.get("type") if isinstance(raw, dict) else None
        if not isinstance(kind, str):
            raise self.bad(what, raw, "an object with type (text, image or image_url)")
        if not self.note_keys(what, raw, PART_KEYS, form, is_answer):
            self.not_obeyed = self.not_obeyed or f"{what} is not to be learnt; {REASONS[KeyMeaning.spans]}"
        given = given_images(raw)
        if kind == "text":
            self.note_unread(raw)
            self.note_unread({"image": given})
            return self.text(what, raw.get("text"))
        if kind in IMAGE_PARTS and is_empty(raw.get("text")):
            self.note_unread(raw, GIVEN_AS)
            if given:
                self.in_parts.append(self.image(what, raw))
            return IMAGE_TAG
        named = [raw[key] for key in VIDEO_GIVEN_AS if not is_empty(raw.get(key))]
        if kind == VIDEO and self.reads_videos and len(named) == 1 and is_empty(raw.get("text")):
            self.note_unread(raw, VIDEO_GIVEN_AS)
            self.in_parts.append(self.video(what, named[0]))
            return IMAGE_TAG
        if kind in IMAGE_PARTS or not names_media(kind):
            raise self.bad(what, raw, "of type text, image or image_url, and have either text or an image")
        self.note_unread({kind: raw})
        return ""

    def refuse_tools(self, what: str, raw: dict[str, Any], keys: Iterable[str] = TOOL_KEYS) -> None:
        """Raise DataError if a record or a message has a value under a key for tools, or calls of tools, that is not
        read there."""
        called = next((own for own in keys if own in raw and not has_no_tools(raw[own])), None)
        if called is not None:
            raise DataError(
                f"{self.where}: {what} has {called}, which is read of answers (calls) and of records (tools) alone; "
                "move it there, or take the record out",
                Kind.wrong_roles,
            )

    def pairs(self, key: str, raw: Any) -> list[Turn]:
        """Parse the value of the key `texts`, objects with a question (`user`) and its answer (`assistant`), into two
        messages each."""
        if not isinstance(raw, list):
            raise self.bad(key, raw, "a list of objects with user and assistant")
        turns = []
        for number, entry in enumerate(raw):
            if not isinstance(entry, dict) or not set(ENTRY_KEYS) <= entry.keys():
                raise self.bad(f"{key}, entry {number}", entry, "an object with user and assistant")
            self.note_unread(entry)
            self.refuse_tools(f"entry {number}", entry)
            learnt = self.note_keys(f"entry {number}", entry, (*ENTRY_KEYS, *TOOL_KEYS), f"{key}[].")
            question, answer = (self.text(f"{key}, entry {number}, {name}", entry[name]) for name in ENTRY_KEYS)
            turns.append(Turn("human", question))
            turns.append(Turn("gpt", answer, learnt, thought=self.thought_of(f"entry {number}", entry)))
        return turns

    def with_thought(self, raw: dict[str, Any], turns: list[Turn]) -> list[Turn]:
        """Give the thought that a record has beside its conversation to its only answer. With several answers, the key
        cannot be obeyed."""
        thought = self.thought_of("the record", raw)
        answers = [number for number, turn in enumerate(turns) if turn.role == "gpt"]
        if thought is None:
            return turns
        (place, *others) = answers or [-1, -1]
        if others or turns[place].thought not in (None, thought):
            key = next(key for key in raw if is_thought(key, raw[key]) and not says_nothing(raw[key]))
            many = f"the record has the key {shown(key)} for {len(answers)} answers"
            self.not_obeyed = self.not_obeyed or f"{many}; {OF_ANSWERS}"
            return turns
        return [replace(turn, thought=thought) if number == place else turn for number, turn in enumerate(turns)]

    def with_system(self, raw: dict[str, Any], turns: list[Turn]) -> list[Turn]:
        """Put the system text that a record has beside its conversation in front of its turns."""
        value = raw.get(SYSTEM)
        if is_empty(value):
            return turns
        text = self.text(f"the record's {SYSTEM}", value)
        if turns and turns[0].role == "system":
            if turns[0].text != text:
                raise self.bad(f"the record's {SYSTEM}", value, "the text of its system turn, or absent")
            return turns
        return [Turn("system", text), *turns]

    def listed(self, raw: dict[str, Any], keys: Iterable[str], main: str) -> dict[str, list[str]]:
        """Return the images or the videos as {key of the record: names of those under it}, without keys that have no
        value.

        Args:
            keys: the keys to read. The value of a key is an image (or video), or a list of them.
            main: `image` or `video`: what is read, and the one of `keys` whose value must not be empty.
        """
        read = self.video if main == VIDEO else self.image
        found = {}
        for key in keys:
            value = raw.get(key)
            if value is not None and (key == main or not is_empty(value)):
                found[key] = [read(key, own) for own in (value if isinstance(value, list) else [value])]
        return found


def given_sizes(raw: Any, count: int) -> list[tuple[int, int]] | None:
    """Return (width, height) in pixels of each of `count` images, as the record's keys `width` and `height` give them:
    each a number, or a list with one number for each image. None if they do not give valid sizes of all images."""
    columns: list[list[int]] = []
    for key in SIZE_KEYS:
        value = raw.get(key)
        values = value if isinstance(value, list) else [value]
        if len(values) != count or not all(is_side(own) for own in values):
            return None
        columns.append([int(own) for own in values])
    return list(zip(*columns, strict=True))


def is_side(value: Any) -> bool:
    """Return whether a JSON value is a valid width or height in pixels. It may be a float, because tables with missing
    values have integers as floats."""
    return type(value) in (int, float) and 1 <= value <= LONGEST_SIDE and value == int(value)


def given_images(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the items of a JSON object whose keys contain an image (GIVEN_AS). A path next to bytes is left out,
    because it is only their name, as Hugging Face datasets writes it."""
    given = {key: raw[key] for key in GIVEN_AS if not is_empty(raw.get(key))}
    return {key: value for key, value in given.items() if key != "path" or "bytes" not in given}


FORMS: dict[str, Callable[[RecordReader, str, Any], list[Turn]]] = {
    "conversations": RecordReader.turns,
    "messages": RecordReader.turns,
    "texts": RecordReader.pairs,
}
"""Forms of records: {key with the conversation: method that parses its value}."""


def form_of(where: str, raw: dict[str, Any], keys: RecordKeys) -> str:
    """Return the key that tells in which form a record has its conversation: `conversations`, `messages`, `texts`, or
    one of the two keys of a question and its answer. Raise DataError if it has no form, or the keys of two.

    A key that is null or empty is ignored if another one has a value, because in a table with records of several forms,
    each row has the keys of all forms.
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
        raw: the parsed JSON, or a row of a table with the same keys, in which images may also be bytes.
        keys: names of the keys of question, answer and images, if the user has set them.
        videos: whether videos are read; if not, a video counts as media that are not read.

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
    if TOO_LARGE in raw and is_container(path):
        found, most = raw[TOO_LARGE]
        check_bytes(found, most, where)
    reader = RecordReader(where, str(path), videos)
    listed = reader.listed(raw, keys.images, "image")
    video_keys = tuple(key for key in VIDEO_KEYS if key not in keys.images) if videos else ()
    shows = one_list(where, reader.listed(raw, video_keys, VIDEO), "videos")
    reader.note_unread(raw, (*keys.images, *video_keys, *(keys.pair or ())))
    form = form_of(where, raw, keys)
    if form in FORMS:
        turns = FORMS[form](reader, form, raw[form])
    else:
        turns = [Turn(role, reader.text(key, raw.get(key))) for role, key in zip(ROLES, keys.pair or (), strict=True)]
    reader.refuse_tools("the record", raw, TURN_CALLS)
    turns = reader.with_system(raw, reader.with_thought(raw, turns))
    if not reader.note_keys("the record", raw, keys.read):
        turns = [replace(turn, learnt=turn.role != "gpt") for turn in turns]
    names = one_list(where, {**listed, "the parts of its turns": reader.in_parts})
    if videos:
        names, turns = put_videos(names, shows, turns)
    parsed = tuple(turns if form == "conversations" else images_in_front(turns, len(names)))
    has_image_key = bool(names) or any(key in raw for key in ("image", *video_keys) if key != "videos")
    return Record(
        str(path), index, str(index) if identity is None else identity, names, parsed, has_image_key,
        has_id=identity is not None, line=line, unread=reader.unread or unread_tag(parsed),
        not_obeyed=reader.not_obeyed, unread_keys=tuple(reader.unread_keys), tools=read_tools(raw, reader.bad),
        inline=reader.inline,
    )  # fmt: skip


def one_list(where: str, listed: dict[str, list[str]], what: str = "images") -> tuple[str, ...]:
    """Return the names of a record's images (or videos), which several of its keys may list. Raise DataError if the
    keys list different ones."""
    filled = {key: names for key, names in listed.items() if names}
    if len({tuple(names) for names in filled.values()}) > 1:
        raise DataError(f"{where} has different {what} in {' and '.join(filled)}; keep one", Kind.bad_form)
    return tuple(next(iter(filled.values()), ()))


def put_videos(
    images: Sequence[str], videos: Sequence[str], turns: Sequence[Turn]
) -> tuple[tuple[str, ...], list[Turn]]:
    """Return the names of a record's images and videos in the order of their tags in its messages, and the messages
    with each tag <video> replaced by <image>.

    The tag <video> stands for the next video. The tag <image> stands for the next of `images` or, if there are none,
    for the next video, as in LLaVA-Video-178K. Files without a tag come last.

    Args:
        images: names under the keys for images and in the parts of messages; some may be videos.
        videos: names under the keys `video` and `videos`.
    """
    images_left, videos_left, ordered = list(images), list(videos), list[str]()

    def take(tag: re.Match[str]) -> str:
        """Return <image> for a tag, and move the file that it stands for into `ordered`; without a file, keep the
        tag."""
        wants_video = tag[0] != IMAGE_TAG
        names = videos_left if not images or (wants_video and videos_left) else images_left
        found = next((name for name in names if is_video(name) or not wants_video), None)
        if found is None:
            return tag[0]  # the checks of tags report it
        names.remove(found)
        ordered.append(found)
        return IMAGE_TAG

    def read(turn: Turn) -> Turn:
        tags = re.compile(IMAGE_TAG) if "</video>" in turn.text.lower() else ANY_TAG  # <video> is HTML with </video>
        if turn.role not in READS_IMAGES:
            return turn
        if turn.parts is None:
            return replace(turn, text=tags.sub(take, turn.text))
        parts = tuple(tags.sub(take, part) for part in turn.parts)
        return replace(turn, text="".join(parts), parts=parts)

    read_turns = [read(turn) for turn in turns]
    return (*ordered, *images_left, *videos_left), read_turns


def images_in_front(turns: list[Turn], num_images: int) -> list[Turn]:
    """Put one `<image>` tag for each image, on a line of its own, before the first question, unless the messages have
    image tags already."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "human"), None)
    if not num_images or first is None or any(IMAGE_TAG in turn.text for turn in turns):
        return turns
    return [
        *turns[:first],
        Turn("human", f"{IMAGE_TAG}\n" * num_images + turns[first].text),
        *turns[first + 1 :],
    ]
