"""Parse records: tell the form of a record by its keys, and read it as LLaVA's form would be read.

The forms are those of FORMS, and a question and an answer in two keys that the configuration names (`RecordKeys`).
"""

import base64
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from llava_fsdp.config import DataConfig
from llava_fsdp.data.containers.place import Place, place_from
from llava_fsdp.data.records.problems import Kind
from llava_fsdp.data.records.record import (
    INLINE,
    JSON_NAMES,
    PLACE,
    TOO_LARGE,
    Record,
    Turn,
    check_bytes,
    check_name,
    check_text,
    id_of,
    is_empty,
    is_shard,
    is_video,
    name_place,
    name_record,
    names_media,
    shown,
    unread_media,
    unread_tag,
)
from llava_fsdp.data.text.templates import IMAGE_TAG
from llava_fsdp.runtime.errors import DataError

TURN_KEYS = (("from", "value"), ("role", "content"))
"""Keys of a turn in `conversations` and `messages`: its speaker, and its text or (with `content`) a list of parts."""
ENTRY_KEYS = ("user", "assistant")
"""Keys of an entry of `texts`: a question and its answer."""
SPEAKERS = {
    "human": "human", "user": "human",
    "gpt": "gpt", "assistant": "gpt", "model": "gpt", "chatgpt": "gpt", "bing": "gpt", "bard": "gpt",
    "system": "system",
}  # fmt: skip
"""The role of a turn by the name of its speaker. A turn with another name keeps it, and is refused by name later."""
ROLES = ("human", "gpt")
"""Roles of a question and its answer."""
TOOLS = frozenset("tool function ipython observation tool_call tool_response function_call function_response".split())
"""Names of speakers that are tools, or that call them."""
TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call")
"""Keys of a record in `messages`, or of one of its turns, for tools and calls of tools."""
IMAGE_KEYS = ("image", "images")
"""Keys of a record for its images, beside the one that `data.image_column` names."""
IMAGE_PARTS = ("image", "image_url")
"""Types of the parts that stand for an image."""
GIVEN_AS = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys by which a part, or an object in place of a path, gives an image."""
VIDEO = "video"
"""Key of a record for its videos, and type of the parts that stand for a video."""
VIDEO_KEYS = (VIDEO, "videos")
"""Keys of a record for its videos."""
VIDEO_GIVEN_AS = (VIDEO, "path")
"""Keys by which a part gives a video."""
SIZE_KEYS = ("width", "height")
"""Keys of a record for the sizes of its images in pixels, as an image is shown."""
LONGEST_SIDE = (1 << 31) - 1
ANY_TAG = re.compile(rf"{IMAGE_TAG}|(?i:<video>)")
DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)


@dataclass(frozen=True)
class RecordKeys:
    """Names of keys of a record (of columns, in Parquet) that the configuration gives."""

    question: str | None = None
    """Key of the question; None: no record has this form."""
    answer: str | None = None
    image: str | None = None
    """Another key for the images, beside IMAGE_KEYS."""

    @classmethod
    def of_config(cls, cfg: DataConfig) -> "RecordKeys":
        return cls(cfg.question, cfg.answer, cfg.image_column)

    @property
    def images(self) -> tuple[str, ...]:
        """Keys of a record for its images."""
        own = self.image
        return IMAGE_KEYS if own is None or own in IMAGE_KEYS else (*IMAGE_KEYS, own)

    @property
    def pair(self) -> tuple[str, str] | None:
        """Keys of a record for its question and answer; None if the configuration names none."""
        return None if self.question is None or self.answer is None else (self.question, self.answer)


NO_KEYS = RecordKeys()


@dataclass
class RecordReader:
    """Reads the values of one record; collects the images that are in the record itself, and what is not read."""

    where: str
    """Name of the record in error messages."""
    file: str
    """The file of records."""
    reads_videos: bool = False
    """Whether videos are read; if not, a video is one of the media that are not read."""
    inline: dict[str, bytes | Place] = field(default_factory=dict)
    """Images that are in the record itself or in its file, by the names that `image` gives them."""
    in_parts: list[str] = field(default_factory=list)
    """Names of the images, and of videos that are read, that the parts of turns give."""
    unread: str | None = None
    """Description of the first media that are not read."""

    def bad(self, what: str, value: Any, cure: str) -> DataError:
        return DataError(f"{self.where}: {what} is {shown(value)}; it must be {cure}", Kind.bad_form)

    def note_unread(self, raw: dict[str, Any], read: Iterable[str] = ()) -> None:
        self.unread = self.unread or unread_media(raw, read)

    def image(self, what: str, value: Any, is_nested: bool = False) -> str:
        """Return the name of an image: its path, or for an image in the record itself a name made from its bytes.

        Args:
            what: name of the value in error messages.
            value: a path, a data URL, or an object with one of the keys GIVEN_AS; in an object, `bytes` may be bytes or
                base64 text. In a row of a Parquet file or a tar also an object with the key PLACE.
        """
        if isinstance(value, dict) and PLACE in value and is_shard(self.file):
            return self.place(what, value[PLACE])
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
        """Return the path of a video.

        Args:
            what: name of the value in error messages.
        """
        if not isinstance(value, str) or not value:
            cure = "a path or a list of paths: fix it, or leave the key out of a record without videos"
            raise self.bad(what, value, cure)
        check_name(value, self.where, what)
        if not is_video(value):
            self.unread = self.unread or f"the video {shown(value)}"
        return value

    def decoded(self, what: str, text: Any) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.where}: {what} is {shown(text)}, which is not base64: {error}; encode the image's file again",
                Kind.image_unreadable,
            ) from error

    def keep(self, data: bytes) -> str:
        """Keep the file of an image that is in the record itself, and return a name for it."""
        name = f"{INLINE}{xxh3_128_hexdigest(data)}"
        self.inline[name] = data
        return name

    def place(self, what: str, values: Any) -> str:
        """Return a name for an image that lies in the file of records."""
        try:
            place = place_from(self.file, values)
        except ValueError:
            raise self.bad(what, values, "a path") from None
        page = "" if place.page is None else f"@{place.page.offset}"
        name = f"{INLINE}{place.offset}+{place.size}{page}"
        self.inline[name] = place
        return name

    def turns(self, key: str, raw: Any) -> list[Turn]:
        """Read `conversations` or `messages`."""
        if not isinstance(raw, list):
            raise self.bad(key, raw, "a list of turns, each an object with from and value, or role and content")
        return [self.turn(f"turn {number}", own) for number, own in enumerate(raw)]

    def turn(self, what: str, raw: Any) -> Turn:
        fields = raw if isinstance(raw, dict) else {}
        speakers = [name for key, _ in TURN_KEYS if isinstance(name := fields.get(key), str)]
        self.refuse_tools(what, fields, speakers)
        texts = [key for pair in TURN_KEYS if all(fields.get(own) is not None for own in pair) for key in pair[1:]]
        if len(texts) != 1 or len(speakers) != 1:
            raise self.bad(what, raw, "an object with from and value, or with role and content")
        self.note_unread(fields)
        text = fields[texts[0]]
        if texts == ["content"] and isinstance(text, list):
            text = "".join(self.part(f"{what}, part {number}", own) for number, own in enumerate(text))
        return Turn(SPEAKERS.get(speakers[0]) or speakers[0], self.text(what, text))

    def text(self, what: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.bad(what, value, "text")
        check_text(value, f"{self.where}: {what}")
        return value

    def part(self, what: str, raw: Any) -> str:
        """Return the text of a part of a turn; of an image or a video, `<image>`."""
        kind = raw.get("type") if isinstance(raw, dict) else None
        if not isinstance(kind, str):
            raise self.bad(what, raw, "an object with type (text, image or image_url)")
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

    def refuse_tools(self, what: str, raw: dict[str, Any], speakers: Iterable[str] = ()) -> None:
        """Raise DataError if a record or turn has tools or calls of tools, or a tool is among the speakers."""
        speaker = next((own for own in speakers if own in TOOLS), None)
        called = next((own for own in TOOL_KEYS if not is_empty(raw.get(own))), None)
        if called is not None or speaker is not None:
            said = f"is from {speaker}" if called is None else f"has {called}"
            raise DataError(
                f"{self.where}: {what} {said}, and tools are not read; take the record out", Kind.wrong_roles
            )

    def pairs(self, key: str, raw: Any) -> list[Turn]:
        """Read `texts`."""
        if not isinstance(raw, list):
            raise self.bad(key, raw, "a list of objects with user and assistant")
        turns = []
        for number, own in enumerate(raw):
            if not isinstance(own, dict) or not set(ENTRY_KEYS) <= own.keys():
                raise self.bad(f"{key}, entry {number}", own, "an object with user and assistant")
            self.note_unread(own)
            for role, name in zip(ROLES, ENTRY_KEYS, strict=True):
                turns.append(Turn(role, self.text(f"{key}, entry {number}, {name}", own[name])))
        return turns

    def videos(self, raw: dict[str, Any], keys: Iterable[str]) -> dict[str, list[str]]:
        """Return the paths of the videos in each of the given keys of a record; a value is a path or a list of
        paths."""
        found = {}
        for key in keys:
            value = raw.get(key)
            if value is not None and (key == VIDEO or not is_empty(value)):
                found[key] = [self.video(key, own) for own in (value if isinstance(value, list) else [value])]
        return found

    def images(self, raw: dict[str, Any], keys: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the images in each of the given keys of a record."""
        found = {}
        for key in keys:
            value = raw.get(key)
            if value is not None and (key == "image" or not is_empty(value)):
                found[key] = [self.image(key, own) for own in (value if isinstance(value, list) else [value])]
        return found


def given_sizes(raw: Any, count: int) -> list[tuple[int, int]] | None:
    """Return the width and height of each image of a record, as its keys SIZE_KEYS give them: each a number, or a list
    with one for each of the record's `count` images. None if they do not give the sizes of all."""
    columns: list[list[int]] = []
    for key in SIZE_KEYS:
        value = raw.get(key)
        values = value if isinstance(value, list) else [value]
        if len(values) != count or not all(is_side(own) for own in values):
            return None
        columns.append([int(own) for own in values])
    return list(zip(*columns, strict=True))


def is_side(value: Any) -> bool:
    """Return whether a JSON value is a number of pixels; tables with missing values have integers as floats."""
    return type(value) in (int, float) and 1 <= value <= LONGEST_SIDE and value == int(value)


def given_images(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys, with their values, by which an object gives an image. A path beside bytes is only their name, as
    Hugging Face datasets writes it."""
    given = {key: raw[key] for key in GIVEN_AS if not is_empty(raw.get(key))}
    return {key: value for key, value in given.items() if key != "path" or "bytes" not in given}


FORMS: dict[str, Callable[[RecordReader, str, Any], list[Turn]]] = {
    "conversations": RecordReader.turns,
    "messages": RecordReader.turns,
    "texts": RecordReader.pairs,
}
"""Forms of records: the key that has the conversation, and the function that reads its value."""


def form_of(where: str, raw: dict[str, Any], keys: RecordKeys) -> str:
    """Return the key that tells the form of a record: one of FORMS, or the key of the question. A key that is
    null or empty counts as missing beside one with a value: where records of several forms are rows of one table, each
    row has the keys of all. Raise DataError if the record has no form, or the keys of two."""
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
    """Make a Record from parsed JSON, or from a row with the same keys, in which images may also be bytes.

    Args:
        videos: read videos; if false, a record that names a video has media that are not read.

    Raises:
        DataError: the record has none of the forms (docs/data.md; LLaVA's: train.py:665-740).
    """
    if not isinstance(raw, dict):
        lists = isinstance(raw, list) and str(path).lower().endswith(".jsonl")
        cure = "a JSON list belongs into a file whose name ends in .json" if lists else "fix it, or take it out"
        what = f"{JSON_NAMES[type(raw)]}, not an object with id and conversations"
        raise DataError(f"{name_place(path, index, line)} is {what}; {cure}", Kind.bad_form)
    identity = id_of(raw)
    where = name_record(path, index, line, identity)
    if TOO_LARGE in raw and is_shard(path):
        found, most = raw[TOO_LARGE]
        check_bytes(found, most, where)
    reader = RecordReader(where, str(path), videos)
    listed = reader.images(raw, keys.images)
    video_keys = tuple(key for key in VIDEO_KEYS if key not in keys.images) if videos else ()
    shows = one_list(where, reader.videos(raw, video_keys), "videos")
    reader.note_unread(raw, (*keys.images, *video_keys, *(keys.pair or ())))
    form = form_of(where, raw, keys)
    if form in FORMS:
        turns = FORMS[form](reader, form, raw[form])
    else:
        turns = [Turn(role, reader.text(key, raw.get(key))) for role, key in zip(ROLES, keys.pair or (), strict=True)]
    if form == "messages":
        reader.refuse_tools("the record", raw)
    names = one_list(where, {**listed, "the parts of its turns": reader.in_parts})
    if videos:
        names, turns = put_videos(names, shows, turns)
    parsed = tuple(turns if form == "conversations" else images_in_front(turns, len(names)))
    has_image_key = bool(names) or any(key in raw for key in ("image", *video_keys) if key != "videos")
    return Record(
        str(path), index, str(index) if identity is None else identity, names, parsed, has_image_key,
        has_id=identity is not None, line=line, unread=reader.unread or unread_tag(parsed), inline=reader.inline,
    )  # fmt: skip


def one_list(where: str, listed: dict[str, list[str]], what: str = "images") -> tuple[str, ...]:
    """Return the images (or videos: `what`) of a record, which one place lists. Raise DataError if two places list
    different ones."""
    filled = {place: names for place, names in listed.items() if names}
    if len({tuple(names) for names in filled.values()}) > 1:
        raise DataError(f"{where} has different {what} in {' and '.join(filled)}; keep one", Kind.bad_form)
    return tuple(next(iter(filled.values()), ()))


def put_videos(
    images: Sequence[str], videos: Sequence[str], turns: Sequence[Turn]
) -> tuple[tuple[str, ...], list[Turn]]:
    """Return the images and videos of a record in the order of their tags, and its turns with the tag <image> in place
    of each tag of a video.

    The tag <video> stands for the next video. The tag <image> stands for the next of `images` or, if there are none,
    for the next video, as in LLaVA-Video-178K. Files without a tag come last.

    Args:
        images: the files that the keys of images or the parts of turns name; some may be videos.
        videos: the files under the keys `video` and `videos`.
    """
    images_left, videos_left, ordered = list(images), list(videos), list[str]()

    def take(tag: re.Match[str]) -> str:
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
        return replace(turn, text=tags.sub(take, turn.text)) if turn.role == "human" else turn

    read_turns = [read(turn) for turn in turns]
    return (*ordered, *images_left, *videos_left), read_turns


def images_in_front(turns: list[Turn], images: int) -> list[Turn]:
    """Return turns in whose first question the tags of all images are in front, each on a line of its own; unchanged if
    the turns have image tags."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "human"), None)
    if first is None or any(IMAGE_TAG in turn.text for turn in turns):
        return turns
    return [
        *turns[:first],
        replace(turns[first], text=f"{IMAGE_TAG}\n" * images + turns[first].text),
        *turns[first + 1 :],
    ]
