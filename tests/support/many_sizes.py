"""A dataset of images of many sizes, and a model whose tiles have an odd number of features along a side."""

import json
import random
from pathlib import Path

from PIL import Image
from small import record, sentence, write_json

SIDE = 3
"""Features along each side of a tile."""
SIZES = [(37, 113), (301, 299), (97, 31), (45, 45), (127, 91), (19, 260), (211, 83), (163, 161), (7, 9), (255, 131)]
"""Width and height of each image in pixels; a tile has 42."""


def write_parts_of_odd_tiles(parts: Path, folder: Path) -> Path:
    """The parts, with a vision tower of 42 pixels and as wide as its tiles weigh in memory."""
    for part in ("language", "vision"):
        for file in (parts / part).iterdir():
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / file.name).write_bytes(file.read_bytes())
    size = 14 * SIDE
    for name, values in (
        ("config.json", {"image_size": size, "hidden_size": 72, "intermediate_size": 150}),
        ("preprocessor_config.json", {"size": size, "crop_size": size}),
    ):
        path = folder / "vision" / name
        write_json(path, json.loads(path.read_text()) | values)
    return folder


def write_many_sizes(folder: Path, records: int = 60) -> Path:
    """Records with no image, one, two or three, in turn and with texts of very different lengths."""
    dice = random.Random(5)
    (folder / "images").mkdir(parents=True)
    for number, size in enumerate(SIZES):
        Image.effect_noise(size, 80).convert("RGB").save(folder / "images" / f"{number}.png")
    mixed = []
    for number in range(records):
        count = (1, 0, 1, 2, 1, 3, 1)[number % 7]
        made = record(dice, number, text_only=True)
        if count:
            made["image"] = [f"{dice.randrange(len(SIZES))}.png" for _ in range(count)]
            made["conversations"][0]["value"] = " ".join(["<image>"] * count) + "\n" + sentence(dice, 2, 9)
        if number % 5 == 0:
            made["conversations"][-1]["value"] = sentence(dice, 40, 90)
        mixed.append(made)
    write_json(folder / "mixed.json", mixed)
    return folder
