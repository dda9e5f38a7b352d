"""Tiny whole models that take videos, with records of texts, images and videos."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from families import write_family
from small import write_json
from video_families import ALONE, APART, EQUAL
from videos import write_video
from whole_models import PIECES, TAG, VIDEO_TAG, WholeModel, conversation, write_images

CLIPS = {
    "a.mp4": (24, 10, (48, 32)),
    "b.mp4": (11, 5, (32, 48)),
    "c.mp4": (17, 12, (40, 40)),
    "d.mp4": (37, 9, (64, 20)),
}
"""{file: (frames, frames per second, (width, height))}."""


def shown(images: Sequence[str], videos: Sequence[str], record: dict[str, Any]) -> dict[str, Any]:
    return {**record, **({"image": list(images)} if images else {}), **({"video": list(videos)} if videos else {})}


def few_videos(name: str) -> list[dict[str, Any]]:
    """Text alone, one image, one video in a first and in a second question, two videos; and images beside videos."""
    records = [
        conversation(0, ["how many dogs are there?", "two dogs", "and the fox?", "it jumps"]),
        shown([], ["a.mp4"], conversation(2, [f"{VIDEO_TAG}\nwhat jumps?", "the fox", "over what?", "the lazy dog"])),
        shown(
            [],
            ["b.mp4", "b.mp4" if name in EQUAL else "c.mp4"],
            conversation(3, [f"first {VIDEO_TAG}", "blue", f"and {VIDEO_TAG}?", "none"]),
        ),
    ]
    if name not in APART:
        records.append(shown(["0.png"], [], conversation(1, [f"{TAG}\nWhat is in this image?", "A red square."])))
    both = [
        shown(["1.png", "2.png"], ["c.mp4"], conversation(4, [f"{TAG} or {VIDEO_TAG}\nor {TAG}", "a quick brown fox"])),
        shown(["4.png"], ["a.mp4"], conversation(5, [f"is {VIDEO_TAG} like it?", "it's", f"and {TAG}", "yes"])),
    ]
    return records + ([] if name in ALONE else both)


def random_videos(name: str, count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Conversations of 1 to 3 exchanges with 0 to 3 images and videos anywhere in the questions."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        turns = [" ".join(dice.choices(PIECES, k=dice.randrange(1, 7))) for _ in range(2 * dice.randrange(1, 4))]
        turns = [text.strip() or "yes" for text in turns]
        kinds = dice.choices([TAG, VIDEO_TAG], k=dice.choice([0, 1, 2, 3]))
        if name in ALONE:
            kinds = kinds[:1] * len(kinds)
        for kind in kinds:
            at = 2 * dice.randrange(len(turns) // 2)
            words = turns[at].split(" ")
            words.insert(dice.randrange(len(words) + 1), kind + dice.choice(["", "\n"]))
            turns[at] = " ".join(words)
        images = [f"{dice.randrange(8)}.png" for kind in kinds if kind == TAG]
        videos = [dice.choice([*CLIPS]) for kind in kinds if kind == VIDEO_TAG]
        if name in EQUAL:
            videos = videos[:1] * len(videos)
        made.append(shown(images, videos, conversation(number, turns)))
    return made


def write_video_model(name: str, folder: Path) -> WholeModel:
    write_images(folder / "images")
    for file, (frames, rate, size) in CLIPS.items():
        write_video(folder / "images" / file, frames, rate, size)
    write_json(folder / "few.json", few_videos(name))
    write_json(folder / "random.json", random_videos(name, 40))
    return WholeModel(name, write_family(name, folder / "model"), folder / "images")
