"""The reader of the values in the JSON of one record, for all forms of records: texts, thoughts, images and videos.

In the functions, `what` and `where` name a value and the record in error messages, and `form` is a value's place in the
record, such as `messages[].`. A function raises DataError if the value that it parses is wrong.
"""

import base64
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from xxhash import xxh3_128_hexdigest

from llava_fsdp.data.containers.location import ImageLocation, location_from
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.keys import (
    MOST_KEYS,
    MOST_LETTERS,
    ONLY_OF_RECORDS,
    REASONS,
    WEIGHTS,
    WEIGHTS_OF_QUESTION,
    KeyMeaning,
    is_thought,
    meaning_of,
    read_weights,
    says_nothing,
)
from llava_fsdp.data.records.record import (
    INLINE,
    LOCATION,
    PARQUET,
    AnswerWeights,
    Turn,
    check_name,
    check_text,
    is_container,
    is_empty,
    is_video,
    names_media,
    shown,
    unread_media,
)
from llava_fsdp.data.records.tools import TOOL_KEYS, has_no_tools
from llava_fsdp.runtime.errors import DataError

IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of a turn that are an image."""
GIVEN_AS = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys with an image in a part of a turn, or in an object instead of a path."""
VIDEO = "video"
"""Key of a record for its videos, and type of the parts of a turn that are a video."""
VIDEO_GIVEN_AS = (VIDEO, "path")
"""Keys with a video in a part of a turn."""
DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)


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
    key_not_obeyed: str | None = None
    """Description of the first key that says what is learnt and cannot be obeyed."""
    weights_not_obeyed: str | None = None
    """Description of the first weight that cannot be obeyed."""
    unread_keys: list[str] = field(default_factory=list)
    """The keys with a value that are not read and could change what is learnt."""

    def bad(self, what: str, value: Any, cure: str) -> DataError:
        """Return an error that says what a wrong value must be (`cure`, such as `a path`)."""
        return DataError(f"{self.where}: {what} is {shown(value)}; it must be {cure}", Kind.bad_form)

    def turn_error(self, number: int, why: str) -> DataError:
        """Return an error about a turn whose role or calls do not fit the turns before it."""
        return DataError(
            f"{self.where}: turn {number} {why}; fix the conversation, or take the record out", Kind.wrong_roles
        )

    def note_unread(self, raw: dict[str, Any], read_keys: Iterable[str] = ()) -> None:
        """Note the first value in a record, or in an object in it, that is media which are not read. The media of
        `read_keys` are read."""
        self.unread = self.unread or unread_media(raw, read_keys)

    def note_keys(
        self, what: str, raw: dict[str, Any], read_keys: Collection[str], form: str = "", is_answer: bool = True
    ) -> AnswerWeights:
        """Read the keys of a record, or of an object in it, that say whether an answer is learnt. Note in `self` those
        that cannot be obeyed, and those that are not read. Return the weights of the answer's labels: the product of
        `whole`, the answer's weight, under all keys, and the first list of `spans`, weights of parts of its text.

        Args:
            what: name of the object in messages.
            read_keys: keys of the object that are read elsewhere.
            form: where in the record the object is, such as `messages[].`; empty for the record itself.
            is_answer: whether the object has an answer; a question is never learnt.
        """
        weights = AnswerWeights()
        for key in raw:
            if key in read_keys:
                continue
            meaning, value = meaning_of(key[:MOST_LETTERS]), raw[key]  # all known keys are shorter
            # a `name` changes nothing in a record, but in a turn: templates show it as the name of the speaker
            if meaning is KeyMeaning.harmless and not (form and key in ONLY_OF_RECORDS):
                continue
            if is_answer and is_thought(key, value):  # read by `thought_of`
                continue
            if says_nothing(value) or names_media(key):
                continue
            # the key says whether, or how much, an answer is learnt
            if meaning in REASONS:
                # None if the key is of a kind that is not read for a question
                weights_here = self.weights_under(what, key, value, is_answer)
                if weights_here is not None:
                    weights = replace(weights.times(weights_here.whole), spans=weights.spans or weights_here.spans)
                    continue
            name = f"{form}{key[:MOST_LETTERS]}"
            if name not in self.unread_keys and len(self.unread_keys) < MOST_KEYS:
                self.unread_keys.append(name)
        return weights

    def weights_under(self, what: str, key: str, value: Any, is_answer: bool) -> AnswerWeights | None:
        """Return the weights that a key gives the labels of an answer. If the key cannot be obeyed, note this, and
        return weights of 1.

        A question (`is_answer=False`) is never learnt. A key that gives it a weight above 0 is noted, too. If the key
        is of another kind, such as a verdict (whether an answer is a good one), None is returned: it counts as a key
        that is not read.
        """
        meaning, said = meaning_of(key[:MOST_LETTERS]), f"{what} has the key {shown(key)}, {shown(value)}"
        try:
            weights = read_weights(key, value)
        except ValueError as error:
            if is_answer:
                self.note_key_not_obeyed(f"{said}; {error}", meaning)
            weights = AnswerWeights()
        if is_answer or not weights.whole:  # a weight of 0 agrees with a question, which is not learnt
            return weights
        if meaning in (KeyMeaning.learnt, KeyMeaning.spans):
            self.note_key_not_obeyed(f"{said}; {WEIGHTS_OF_QUESTION}", meaning)
            return weights
        return None

    def note_key_not_obeyed(self, why: str, meaning: KeyMeaning = KeyMeaning.learnt) -> None:
        """Note that training cannot do what a key of the record demands, and `why`; only the first is kept. Keys for
        loss weights (with a `meaning` in WEIGHTS), which `data.weights=ignore` ignores, are noted apart."""
        if meaning in WEIGHTS:
            self.weights_not_obeyed = self.weights_not_obeyed or why
        else:
            self.key_not_obeyed = self.key_not_obeyed or why

    def weighted(self, what: str, turn: Turn, weights: AnswerWeights) -> Turn:
        """Return an answer with the weights of its labels. If they are of characters beyond the end of its text, note
        that they cannot be obeyed."""
        if weights.spans and weights.spans[-1][1] > len(turn.text):
            why = f"{what} has a train_detail to character {weights.spans[-1][1] - 1} and {len(turn.text)} characters"
            self.note_key_not_obeyed(f"{why}; {REASONS[KeyMeaning.spans]}")
        return turn.weighted(weights)

    def note_part_weights(self, what: str, weights: AnswerWeights) -> None:
        """Note that a part of an answer has its own weights, which cannot be obeyed; nothing if all weights are 1."""
        if weights != AnswerWeights():
            self.note_key_not_obeyed(f"{what} has a weight of its own; {REASONS[KeyMeaning.spans]}")

    def image(self, what: str, value: Any, is_nested: bool = False) -> str:
        """Return the name of an image: its path or, for an image that is embedded in the record, a name made from its
        bytes, which are stored in `inline`. A path of a video is noted as not read, unless videos are read.

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
        """Check the path of a video and return it. A file that is no video by its suffix is noted as not read."""
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

    @property
    def is_table(self) -> bool:
        """Whether the record is a row of a Parquet file."""
        return self.file.lower().endswith(PARQUET)

    def thought_of(self, what: str, raw: dict[str, Any]) -> str | None:
        """Return the thought of an answer from the keys for one; None without one. Raise an error if two differ."""
        found = {raw[key] for key in raw if is_thought(key, raw[key]) and not says_nothing(raw[key])}
        if len(found) > 1:
            raise self.bad(what, sorted(found), "an answer with one thought")
        return self.text(what, found.pop()) if found else None

    def text(self, what: str, value: Any) -> str:
        """Return a value that must be a valid text; raise DataError if it is not."""
        if not isinstance(value, str):
            raise self.bad(what, value, "text")
        check_text(value, f"{self.where}: {what}")
        return value

    def refuse_tools(self, what: str, raw: dict[str, Any], keys: Iterable[str] = TOOL_KEYS) -> None:
        """Raise DataError if a record or message has a value under a key for tools, or their calls, not read there."""
        called = next((key for key in keys if key in raw and not has_no_tools(raw[key])), None)
        if called is not None:
            raise DataError(
                f"{self.where}: {what} has {called}, which is read of answers (calls) and of records (tools) alone; "
                "move it there, or take the record out",
                Kind.wrong_roles,
            )

    def listed(self, raw: dict[str, Any], keys: Iterable[str], main: str) -> dict[str, list[str]]:
        """Return the images or the videos as {key of the record: their names}, without keys that have no value.

        Args:
            keys: the keys to read. The value of a key is an image (or video), or a list of them.
            main: `image` or `video`: what is read, and the one of `keys` whose value must not be empty.
        """
        read = self.video if main == VIDEO else self.image
        found = {}
        for key in keys:
            value = raw.get(key)
            if value is not None and (key == main or not is_empty(value)):
                found[key] = [read(key, item) for item in (value if isinstance(value, list) else [value])]
        return found


def given_images(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the items of a JSON object whose keys contain an image (GIVEN_AS). A path next to bytes is left out,
    because it is only their name, as Hugging Face datasets writes it."""
    given = {key: raw[key] for key in GIVEN_AS if not is_empty(raw.get(key))}
    return {key: value for key, value in given.items() if key != "path" or "bytes" not in given}
