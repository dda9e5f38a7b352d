"""A record of a dataset, which is a conversation about images, and checks of its parts. forms.py parses records.

`where` and `what` name a record and a value in error messages.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from llava_fsdp.config import FULL_WEIGHT
from llava_fsdp.data.containers.data_files import DataFiles, RemoteFolder
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.problems import Kind
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*://|data:)", re.IGNORECASE)
WORD = re.compile(r"(?i:md5)|[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
"""One word in a JSON key: finds `image` and `url` in `image_url`, `imageUrl2` and `IMAGE-URL`."""
MEDIA = frozenset(
    "image img picture pic photo screenshot thumbnail frame jpg jpeg png gif "
    "video vid movie clip audio sound speech voice wav media".split()
)
ABOUT = frozenset(
    "id index idx has is num number count size width height shape ratio resolution length duration fps format type "
    "source dataset split caption title description alt text label category quality score hash md5 sha license "
    "author".split()
)
"""Words of JSON keys that describe media (`image_id`, `video_length`) instead of naming a media file."""
IMAGE_TAG = "<image>"
MEDIA_TAG = re.compile(r"<(video|audio)>", re.IGNORECASE)
VIDEO_FORMATS = {
    ".mp4": "mov", ".m4v": "mov", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi",
}  # fmt: skip
"""For each suffix by which a file is a video, PyAV's name of the format."""
VIDEOS_NEED = (
    "videos are only read with data.image_aspect_ratio=anyres_max (LLaVA-OneVision), or for a whole model whose "
    "processor and chat template take them"
)
PARQUET, TAR = ".parquet", ".tar"
LINES = (".jsonl", ".ndjson")
"""Suffixes of JSON Lines files."""
COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
"""Suffixes of compressed tars, which are refused when they are opened."""
TOO_LARGE = "llava_fsdp bytes of a row"
"""Key of the placeholder for a row or a sample of a tar that is too large; its value is [size, limit] in bytes."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
INLINE = "data:"
"""Beginning of the name of an image that is in the record itself or in its file; no path begins so."""
LOCATION = "llava_fsdp place"
"""Key of an object that is written instead of an image's path if the image is in the file of records itself. The value
is the image's location (`ImageLocation.to_json`)."""
UNREAD_VALUE = "..."
"""Placeholder for a value that is not read: media such as audio, or a call of a tool."""
JSON_NAMES = {
    dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number",
    type(None): "null",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call of a tool (function) in an answer."""

    name: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """JSON values by the names of the arguments, in the order of the record."""
    id: str = ""
    """Name of the call, by which its result refers to it."""


@dataclass(frozen=True)
class AnswerWeights:
    """Weights of an answer's labels, in units of 1 / FULL_WEIGHT."""

    whole: int = FULL_WEIGHT
    """Weight of the answer. All weights below are multiplied by it."""
    spans: tuple[tuple[int, int, int], ...] | None = None
    """Ranges of characters of the answer's text, ascending, each as (begin, end, weight). The characters outside of
    them have weight 0; the thought, the calls and what ends the answer have weight 1. None: all have weight 1."""

    def times(self, other: int) -> "AnswerWeights":
        """Return the weights multiplied by `other`, in units of 1 / FULL_WEIGHT; rounded up, so that no weight becomes
        0 unless `other` is 0."""
        return replace(self, whole=product(self.whole, other))


def product(one: int, other: int) -> int:
    """Return the product of two weights in units of 1 / FULL_WEIGHT, rounded up."""
    return -(-one * other // FULL_WEIGHT)


@dataclass(frozen=True)
class Turn:
    """A message of a conversation."""

    role: str
    """The speaker of the turn: human, gpt, or tool, whose text is the result of a call; the first turn may be from
    system."""
    text: str
    learnt: bool = True
    """Whether an answer has labels. If not, it is only read, like a question."""
    parts: tuple[str, ...] | None = field(default=None, compare=False)
    """The parts of `text`, if the record has a list of parts instead of a text; `<image>` for an image or a video."""
    thought: str | None = None
    """What an answer thinks before its text and its calls, if the record has it apart from the text."""
    calls: tuple[Call, ...] = ()
    """The calls of an answer, or for a result the one call that it belongs to."""
    weights: AnswerWeights | None = None
    """Weights of an answer's labels; None: all are 1."""

    def weighted(self, weights: AnswerWeights) -> "Turn":
        """Return this answer with these weights of its labels. With weight 0, it is marked as not learnt."""
        is_full = weights == AnswerWeights()
        return replace(self, learnt=self.learnt and weights.whole > 0, weights=None if is_full else weights)


@dataclass(frozen=True)
class Record:
    """A parsed record of a dataset: a conversation, and the images or videos that it is about."""

    file: str
    """Path or URL of the file of records."""
    index: int
    """Index in the file."""
    id: str
    images: tuple[str, ...]
    """Paths of the images and videos, relative to the image folder; for an image that is embedded in the record or its
    file, its name in `inline`. In `turns`, the tag of a video is <image>, too."""
    turns: tuple[Turn, ...]
    has_image_key: bool
    """Whether the record has the key `image`, even with an empty value, or a key `video` that is read, or any image or
    video; LLaVA treats such a record as one with an image."""
    folder: Path | RemoteFolder | None = None
    """Image folder of the record's data source; None: the one that is set for all sources."""
    sizes: tuple[tuple[int, int], ...] | None = None
    """(width, height) in pixels of each image after turning by its EXIF orientation; None if not known from an
    index."""
    frames: tuple[tuple[int, float], ...] | None = None
    """(number of frames, frames per second) of each of `images`, (0, 0.0) for an image; None if not known from an
    index."""
    has_id: bool = True
    """Whether the record has an id; otherwise `id` is its index."""
    line: int | None = None
    """Line of the file on which the record begins, from 1; None if unknown or not a text file."""
    unread: str | None = None
    """Description of a key or tag for media (video, audio, ...) that is not read."""
    key_not_obeyed: str | None = None
    """Description of a key that says what is learnt and cannot be obeyed."""
    weights_not_obeyed: str | None = None
    """Description of a weight that cannot be obeyed, which matters unless `data.weights=ignore`."""
    unread_keys: tuple[str, ...] = ()
    """The keys with a value that are not read and could change what is learnt, such as `messages[].name`."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the answers may call, as JSON schemas: objects with type and function, as transformers' chat
    templates take them."""
    rejected: Turn | None = None
    """The worse answer to the prompt before the last turn, which is then the better one; None: the record is no
    pair."""
    inline: Mapping[str, bytes | ImageLocation] = field(default_factory=dict, compare=False, repr=False)
    """{name: bytes or location} of the images that are embedded in the record or in its file. Names differ if images
    do."""
    data_files: DataFiles | None = field(default=None, compare=False, repr=False)
    """Reads the images whose locations are in `inline`."""

    @property
    def with_rejected(self) -> "Record":
        """This pair as an ordinary record, with the rejected answer in place of the chosen one."""
        assert self.rejected is not None
        return replace(self, turns=(*self.turns[:-1], self.rejected), rejected=None)

    @property
    def llava_length(self) -> int:
        """Length by which LLaVA sorts: the number of words of all messages, negative if the record has no image and no
        key for one (LLaVA train.py:684-690)."""
        words = sum(len(turn.text.split()) for turn in (*self.turns, *([self.rejected] if self.rejected else ())))
        return words if self.has_image_key else -words

    @cached_property
    def num_images(self) -> int:
        """Number of images, without videos. Cached, because it is needed for each image."""
        return count_images(self.images)

    @property
    def where(self) -> str:
        """Name of the record in messages: its file, line, index in the file, and id."""
        return name_record(self.file, self.index, self.line, self.known_id)

    @property
    def known_id(self) -> str | None:
        """The id in the file; None if it has none."""
        return self.id if self.has_id else None


def name_place(file: str | Path, index: int, line: int | None) -> str:
    """Return the name of a record without its id: its file, line (from 1; None if unknown) and index."""
    place = f"record {index}" if line is None else f"line {line}, record {index}"
    return f"{shown_name(file)}, {place}"


def name_record(file: str | Path, index: int, line: int | None, identity: str | None) -> str:
    """Return the name of a record: its file, line (from 1; None if unknown), index and id."""
    return f"{name_place(file, index, line)} ({'without an id' if identity is None else f'id {shown_name(identity)}'})"


def id_of(raw: dict[str, Any]) -> str | None:
    """Return the id of a record as text (numbers and other values as JSON); None if it is missing or null."""
    value = raw.get("id")
    return value if value is None or isinstance(value, str) else json.dumps(value)


READS_IMAGES = ("human", "tool")
"""Roles of the turns in which `<image>` stands for an image."""


class TwiceError(ValueError):
    """Raised if a JSON object has the same key twice."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from the items of a JSON object; raise TwiceError if a key is repeated."""
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise TwiceError(repr(next(key for key in keys if keys.count(key) > 1)))
    return made


DECODER = json.JSONDecoder(object_pairs_hook=once)
MOST_DEPTH = 100
"""Greatest nesting depth of lists and objects in a record. Python's own limit depends on the depth of the call stack,
so that one part of the program might not be able to write what another has parsed."""


def decode(text: bytes) -> Any:
    """Parse the bytes of a record as JSON.

    Raises:
        ValueError: it is not UTF-8, not JSON, has a key twice, or a number that is too long.
        RecursionError: lists and objects are nested deeper than MOST_DEPTH.
    """
    value = DECODER.decode(text.decode())
    if text.count(b"[") + text.count(b"{") > MOST_DEPTH and is_deep(value):
        raise RecursionError
    return value


def is_deep(value: Any) -> bool:
    """Return whether a JSON value is nested deeper than MOST_DEPTH, without recursion."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return False
    return True


def without_locations(value: Any) -> Any:
    """Replace the value of each key LOCATION in a user's JSON by a placeholder: only the program itself may write under
    this key where in a Parquet file or tar an image lies."""
    if isinstance(value, list):
        return [without_locations(item) for item in value]
    if isinstance(value, dict):
        return {
            key: UNREAD_VALUE if key == LOCATION and not is_empty(item) else without_locations(item)
            for key, item in value.items()
        }
    return value


def parse_text(path: Path | str, index: int, text: bytes, line: int | None = None) -> Any:
    """Parse a record's bytes as JSON; raise DataError if they are not UTF-8 or not valid JSON. `line` is from 1."""
    where = name_place(path, index, line)
    try:
        return decode(text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start} of it is not UTF-8 ({error.reason}); write the file as UTF-8",
            Kind.not_utf8,
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON: {error.msg} at character {error.pos} of it; {json_cure(text)}", Kind.not_json
        ) from error
    except TwiceError as error:
        raise DataError(f"{where} has the key {error} twice; fix it", Kind.bad_form) from error
    except ValueError as error:  # Python converts no integer of more than 4300 digits
        raise DataError(f"{where} holds a number that is too long to be read; fix it", Kind.bad_form) from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply to be read; fix it", Kind.not_json) from error


def json_cure(text: bytes) -> str:
    """Return advice for the error message about a record that is not JSON."""
    if text.startswith(BYTE_ORDER_MARK):
        return "it begins with a byte order mark, as files that were put together leave it: take it out"
    if b"\r" in text.strip():
        return "lines that end in a carriage return alone are one line to JSON: write the file with line feeds"
    return "fix it"


def check_bytes(size: int, max_bytes: int, where: str) -> None:
    """Raise DataError if a record of `size` bytes is larger than `max_bytes`. `where` names it in the message."""
    if size > max_bytes:
        raise DataError(
            f"{where} has {size:,} bytes, over data.max_record_bytes={max_bytes}; make several records of it, or raise "
            "the limit",
            Kind.record_too_large,
        )


def is_container(file: object) -> bool:
    """Return whether a path or URL of a file of records ends as a Parquet file or a tar does. Such a file may contain
    images."""
    return str(file).lower().endswith((PARQUET, TAR, *COMPRESSED_TARS))


def is_video(file: object) -> bool:
    """Return whether a path (or the `str` of an object) ends as a video does."""
    return Path(str(file)).suffix.lower() in VIDEO_FORMATS


def count_images(names: Iterable[object]) -> int:
    """Return how many of the names do not end as a video does."""
    return sum(not is_video(name) for name in names)


def unread_media(raw: dict[str, Any], read_keys: Iterable[str]) -> str | None:
    """Return a description of the first value in a JSON object whose key means media (video, audio, ...) and is not
    among `read_keys`; None if there is no such value."""
    for key, value in raw.items():
        if key not in read_keys and names_media(key) and not is_empty(value):
            return f"the key {shown(key)}, {shown(value)}"
    return None


def names_media(key: str) -> bool:
    """Return whether a key means, by its words, that the value is an image, a video or a sound (such as `audioUrl`),
    and not a fact about one (such as `image_width`)."""
    return has_media_words(key) if len(key) > 100 else short_key_names_media(key)  # long keys would fill the cache


@lru_cache(1024)  # records repeat a few keys millions of times
def short_key_names_media(key: str) -> bool:
    return has_media_words(key)


def has_media_words(key: str) -> bool:
    """Return whether a key has a word for media (MEDIA), and none that makes it a fact about media (ABOUT)."""
    words = {word.lower() for word in WORD.findall(unicodedata.normalize("NFKC", key))}
    words |= {word.removesuffix("s") for word in words}
    return not words.isdisjoint(MEDIA) and words.isdisjoint(ABOUT)


def unread_tag(turns: Sequence[Turn]) -> str | None:
    """Return a description of the first `<video>` or `<audio>` tag in a question. A tag with a closing tag is HTML and
    is ignored."""
    for turn in turns:
        found = MEDIA_TAG.search(turn.text) if turn.role == "human" else None
        if found is not None and f"</{found[1].lower()}>" not in turn.text.lower():
            return f"the tag {found[0]} in a question"
    return None


def is_empty(value: Any) -> bool:
    """Return whether a JSON value is null, false, 0 or an empty text, or a list or object that contains only such
    values. There is no recursion, because values may be nested deeply."""
    inside = [value]
    while inside:
        item = inside.pop()
        if isinstance(item, dict | list):
            inside += item.values() if isinstance(item, dict) else item
        elif item:
            return False
    return True


def unread_reason(where: str, unread: str) -> str:
    """Return an error message about a record with media that are not read, described as in `Record.unread`."""
    if any(word in unread for word in ('"video"', '"videos"', "<video>")):
        return (
            f"{where} has {unread}, and {VIDEOS_NEED}, from the keys video and videos and from video parts, from files "
            f"that end in {', '.join(VIDEO_FORMATS)}, each with one tag in the questions"
        )
    return (
        f"{where} has {unread}, and media are read from the record's keys image and images and from the image parts of "
        "its turns alone, and videos also from the keys video and videos and from video parts: name them there, name "
        "the key of the images by data.image_column, or take it out"
    )


def shown(value: Any) -> str:
    """Return a value as JSON text for an error message, truncated after 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr).encode(errors="backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:80]}..."


def check_name(name: str, where: str, key: str = "image") -> None:
    """Raise DataError if a record's `name` of an image or video is not a relative path below the image folder."""
    if name[:5].lower() == "file:":
        raise DataError(
            f"{where}: {key} is {name[:80]!r}, an address of a local file; give its path below data.images instead",
            Kind.url,
        )
    if ADDRESS.match(name):
        raise DataError(
            f"{where}: {key} is {name[:80]!r}, an address; nothing is fetched: download it, and give its path below "
            "data.images",
            Kind.url,
        )
    if Path(name).is_absolute():
        raise DataError(
            f"{where}: {key} is {name!r}, an absolute path; give its path below data.images", Kind.path_outside
        )
    if ".." in Path(name).parts:
        raise DataError(
            f"{where}: {key} is {name!r}, and .. is not allowed in a path, wherever it leads; give the path below "
            "data.images without it",
            Kind.path_outside,
        )
    if name.endswith("/"):
        raise DataError(f"{where}: {key} is {name!r}, which names a folder; take the / off", Kind.bad_form)
    try:
        named = b"\0" not in name.encode()
    except UnicodeEncodeError:
        named = False
    if not named:
        raise DataError(f"{where}: {key} is {name!r}, which no file can be called; fix it", Kind.bad_form)


def check_text(text: str, what: str) -> None:
    """Raise DataError if a text cannot be encoded as UTF-8, because it contains half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has half of a surrogate pair at character {error.start}, as a cut emoji leaves; fix the text",
            Kind.bad_form,
        ) from error
