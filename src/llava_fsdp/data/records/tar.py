"""Read the samples of WebDataset tars as dataset records in JSON.

A sample is a group of files in the tar (members) that differ only in their extensions. Its member `json` is the record,
in any of the forms that a JSON file may have; without an id, the common name of the members is the id. An image of the
record is a member if the record names the member's file name or extension, in any folder. If a record names one image
and the sample has one, that one is meant, whatever its name. A record that names no image has all images of the sample,
in the order of the tar. The keys that `data.question`, `data.answer` and `data.image_column` name may also be
extensions of members.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.containers.tar_container import TarSample, tar_samples
from llava_fsdp.data.records.forms.parse_record import NO_KEYS, RecordKeys
from llava_fsdp.data.records.forms.record_reader import GIVEN_AS
from llava_fsdp.data.records.json_stream import MOST_BYTES
from llava_fsdp.data.records.keys import KeyMeaning, meaning_of
from llava_fsdp.data.records.parquet import json_line
from llava_fsdp.data.records.record import (
    ADDRESS,
    LOCATION,
    TOO_LARGE,
    UNREAD_VALUE,
    decode,
    is_empty,
    without_locations,
)
from llava_fsdp.runtime.text.log import log

RECORD = "json"
"""Extension of the member with a sample's record."""
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
"""Extensions of images, also as the end of a longer extension such as `0.jpg`."""
OTHER_MEDIA = (
    "mp4", "m4v", "mov", "mkv", "webm", "avi", "wav", "mp3", "flac", "ogg", "opus", "m4a",
    "heic", "heif", "avif", "jp2", "jfif", "jxl", "svg",
)  # fmt: skip
"""Extensions of media that are not read."""


class TarRows:
    """Reads the samples of a tar as records in JSON, with images given by their locations. See `RecordRows`."""

    num_rows = 0
    groups = 1
    """A tar is read as a whole."""
    page_bytes = np.zeros(2, dtype=np.int64)
    """A tar has no compressed pages."""

    def __init__(self, file: Reader, keys: RecordKeys = NO_KEYS):
        self.file = file
        self.keys = keys

    def lines(self, _: int = 0, max_bytes: int = MOST_BYTES) -> Iterator[bytes]:
        """Yield the samples as records in JSON; one of more than `max_bytes` is replaced by a placeholder. The first
        argument, the index of a part, is not used: a tar has only one part. Log a warning of members, other than
        folders, that belong to no sample. Raise DataError if the tar is damaged."""
        skipped: Counter[str] = Counter()
        for sample in tar_samples(self.file, skipped):
            yield SampleReader(self.file, sample, self.keys, max_bytes).line()
        del skipped["folder"]
        if skipped:
            said = ", ".join(f"{count} of the kind {kind}" for kind, count in skipped.items())
            log().warning("%s: members that belong to no sample are not read: %s", self.file.name, said)


class SampleReader:
    """Converts a sample to a record in JSON."""

    def __init__(self, file: Reader, sample: TarSample, keys: RecordKeys, max_bytes: int):
        """Note which members of the sample are images. `max_bytes`: greatest size of a record; `keys`: names of the
        members or keys of question, answer and images."""
        self.file = file
        self.sample = sample
        self.keys = keys
        self.max_bytes = max_bytes
        self.images = [ext for ext in sample.members if ext.rpartition(".")[2] in IMAGES]
        """Extensions of the members that are images."""
        self.given: list[str] = []
        """Names of images in the record."""
        self.is_only = False
        """Whether the record names one image and the sample has one, which is then meant, whatever its name."""

    def line(self) -> bytes:
        """Return the sample's record as one line of JSON, or a placeholder if it has more than `max_bytes`."""
        # the members that are read as text: `json`, and those of the question and the answer
        texts = (RECORD, *(self.keys.pair or ()))
        largest = max(self.sample.members.get(extension, (0, 0))[1] for extension in texts)
        if largest > self.max_bytes:
            return json.dumps({"id": self.sample.key, TOO_LARGE: [largest, self.max_bytes]}).encode()
        raw: Any = {}
        if RECORD in self.sample.members:
            data = self.read(RECORD)
            try:
                raw = decode(data)
            except (ValueError, RecursionError):
                return self.invalid(data)
        if not isinstance(raw, dict):
            return json_line(raw)
        made = json_line(self.record(without_locations(raw)))
        if len(made) > self.max_bytes:
            return json.dumps({"id": self.sample.key, TOO_LARGE: [len(made), self.max_bytes]}).encode()
        return made

    def invalid(self, data: bytes) -> bytes:
        """Return one line that is not valid JSON, made from `data`, an invalid member `json`. The error is then
        reported where lines are parsed."""
        line = data.replace(b"\n", b" ").replace(b"\r", b" ").strip() or b"!"
        try:
            decode(line)
        except (ValueError, RecursionError):
            return line
        # without its line breaks, the text has become valid JSON
        return b"!" + line

    def record(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the sample's record with the locations of its images. If `raw` (the member `json`; empty without one)
        lacks the question or the answer, it is taken from the member that `keys.pair` names. Members that are not read
        (other media, unknown ones) get the placeholder UNREAD_VALUE."""
        made = {"id": self.sample.key} | {key: value for key, value in raw.items() if key != "id" or value is not None}
        made.pop(TOO_LARGE, None)  # only this program writes it
        for key in self.keys.pair or ():
            if key in self.sample.members and is_empty(made.get(key)):
                made[key] = self.read(key).decode(errors="surrogateescape")
        image_key = self.keys.image
        if image_key in self.images and is_empty(made.get(image_key)):
            made[image_key] = image_key
        self.given.clear()  # gets the names of all images that the record names
        # This call only fills `given`. If the record names one image and the sample has one, `is_only` makes the second
        # call take that one, whatever its name.
        self.placed(made)
        self.is_only = len(self.given) == len(self.images) == 1
        if self.given:
            made = self.placed(made)  # names of images become their locations in the tar
        elif self.images:  # the record names no image: it gets all of the sample
            made = {key: value for key, value in made.items() if key not in self.keys.images}
            made["images"] = [self.location(extension) for extension in self.images]
        media = [extension for extension in self.sample.members if extension.rpartition(".")[2] in OTHER_MEDIA]
        read = (RECORD, *self.images, *media, *(self.keys.pair or ()))
        others = [key for key in self.sample.members if key not in read and meaning_of(key) is not KeyMeaning.harmless]
        return (
            made | {f"media {key}": UNREAD_VALUE for key in media} | {f"member {key}": UNREAD_VALUE for key in others}
        )

    def placed(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return a record in which each image that is a member of the sample is replaced by its location. Add the names
        of all images that the record names to `given`."""
        made = raw | {key: self.put(raw[key]) for key in self.keys.images if key in raw}
        for key in ("conversations", "messages"):
            if isinstance(raw.get(key), list):
                made[key] = [self.turn(turn) for turn in raw[key]]
        return made

    def turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), list):
            return turn
        return turn | {"content": [self.part(part) for part in turn["content"]]}

    def part(self, part: Any) -> Any:
        """Return a part of a message, in which the name of an image that is a member of the sample is replaced by its
        location. The name is added to `self.given`, the names of images in the record."""
        if not isinstance(part, dict):
            return part
        return part | {key: self.put(part[key]) for key in GIVEN_AS if key in part}

    def put(self, value: Any) -> Any:
        """Return the value of a key for images (a path, an object with a path, or a list of these), in which each image
        that is a member of the sample is replaced by its location. Add the names in it to `given`."""
        if isinstance(value, list):
            return [self.put(item) for item in value]
        if isinstance(value, dict):
            return self.part(value)
        if not isinstance(value, str) or not value:
            return value
        self.given.append(value)
        extension = self.extension_of(value)
        return value if extension is None else self.location(extension)

    def extension_of(self, name: str) -> str | None:
        """Return the extension of the member that a record means by the name of an image; None if the name is an
        address (URL), or of no member. With `is_only`, the sample's only image is meant, whatever the name."""
        if ADDRESS.match(name):
            return None
        return self.images[0] if self.is_only else self.meant.get(name.rpartition("/")[2].lower())

    @cached_property
    def meant(self) -> dict[str, str]:
        """{name of an image in lower case (a member's file name, or its extension): extension of that member}."""
        key, found = self.sample.key.rpartition("/")[2].lower(), dict[str, str]()
        for extension in self.images:
            found.setdefault(extension, extension)
            found.setdefault(f"{key}.{extension}", extension)
        return found

    def location(self, extension: str) -> dict[str, Any]:
        offset, size = self.sample.members[extension]
        return {LOCATION: ImageLocation(self.file.name, offset, size, name=f"{self.sample.key}.{extension}").to_json()}

    def read(self, extension: str) -> bytes:
        offset, size = self.sample.members[extension]
        return self.file.read(offset, size)
