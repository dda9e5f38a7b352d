"""The images and videos of a record: which files its keys list, where their tags stand, and the sizes that it gives."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import IMAGE_TAG, READS_IMAGES, Turn, is_video
from llava_fsdp.runtime.errors import DataError

SIZE_KEYS = ("width", "height")
"""Keys of a record for the sizes in pixels of its images, as they are shown (after turning)."""
LONGEST_SIDE = (1 << 31) - 1
"""Greatest width or height in pixels that a record may give."""
ANY_TAG = re.compile(rf"{IMAGE_TAG}|(?i:<video>)")


def given_sizes(raw: Any, count: int) -> list[tuple[int, int]] | None:
    """Return (width, height) in pixels of each of `count` images, as the record's keys `width` and `height` give them:
    each a number, or a list with one number for each image. None if they do not give valid sizes of all images."""
    columns: list[list[int]] = []
    for key in SIZE_KEYS:
        value = raw.get(key)
        values = value if isinstance(value, list) else [value]
        if len(values) != count or not all(is_side(value) for value in values):
            return None
        columns.append([int(value) for value in values])
    return list(zip(*columns, strict=True))


def is_side(value: Any) -> bool:
    """Return whether a JSON value is a valid width or height in pixels. It may be a float, because tables with missing
    values have integers as floats."""
    return type(value) in (int, float) and 1 <= value <= LONGEST_SIDE and value == int(value)


def one_list(where: str, listed: dict[str, list[str]], what: str = "images") -> tuple[str, ...]:
    """Return a record's images (or videos), which several keys may list. Raise DataError if these lists differ."""
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
        """Return a turn with its tags replaced by `take`, if it is one in which images stand."""
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
    """Put an `<image>` tag for each image, on its own line, before the first question, unless there are tags."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "human"), None)
    if not num_images or first is None or any(IMAGE_TAG in turn.text for turn in turns):
        return turns
    return [
        *turns[:first],
        Turn("human", f"{IMAGE_TAG}\n" * num_images + turns[first].text),
        *turns[first + 1 :],
    ]
