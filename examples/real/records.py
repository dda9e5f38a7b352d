"""Write the packages' images and questions as LLaVA's records, some of each held out."""

import json
import random
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

EMOJI_FILES = ("package/emoji.json", "package/img/google/64/", "package/en/data.json")
"""Beginnings of the names of the files that are used of the npm packages."""
NAME_QUESTIONS = ("What does this image show?", "Name this emoji.", "What is this?")
KIND_QUESTION = "What kind of thing is this?"
TURNS = 4
"""Questions about one image in a training record of easy-VQA."""
HELD_OUT = 0.15
"""Share of the emoji that are not trained on."""
Record = dict[str, Any]


def record(name: str, image: str, *turns: tuple[str, str]) -> Record:
    """Return a record of LLaVA's form: an image, then questions and answers."""
    said = []
    for number, (question, answer) in enumerate(turns):
        said.append({"from": "human", "value": question if number else f"<image>\n{question}"})
        said.append({"from": "gpt", "value": answer})
    return {"id": name, "image": image, "conversations": said}


def write(records: list[Record], file: Path) -> None:
    file.write_text(json.dumps(records, indent=0))


def copy_easy(package: Path, folder: Path) -> None:
    """Copy the 5,000 images of easy-VQA into a folder, as `train/NUMBER.png` and `test/NUMBER.png`."""
    for split in ("train", "test"):
        shutil.copytree(package / split / "images", folder / split)


def write_easy(package: Path, folder: Path) -> None:
    """Write easy-VQA's records into a folder: `easy_captions.json`, `easy_train.json`, and `easy_test.json`.

    A caption names colour and shape; they come from the answers. A training record has some questions about one image,
    a test record has one question.
    """
    for split in ("train", "test"):
        about: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for question, answer, number in json.loads((package / split / "questions.json").read_text()):
            about[number].append((question, answer))
        draw = random.Random(0)
        if split == "test":
            single = [(number, turn) for number, turns in about.items() for turn in turns]
            draw.shuffle(single)
            tests = [record(f"easy-{i}", f"easy/test/{n}.png", turn) for i, (n, turn) in enumerate(single)]
            write(tests, folder / "easy_test.json")
            continue
        captions, training = [], []
        for number, turns in about.items():
            image = f"easy/train/{number}.png"
            draw.shuffle(turns)
            groups = [turns[first : first + TURNS] for first in range(0, len(turns), TURNS)]
            training += [record(f"easy-{number}-{i}", image, *group) for i, group in enumerate(groups)]
            shown = caption(turns)
            if shown is not None:
                captions.append(record(f"easy-{number}", image, ("Describe the image.", shown)))
        write(captions, folder / "easy_captions.json")
        write(training, folder / "easy_train.json")


def caption(turns: list[tuple[str, str]]) -> str | None:
    """Return the caption of an image, such as "a red circle", from its questions and answers; None if they do not
    name both colour and shape."""
    colour = shape = None
    for question, answer in turns:
        if found := re.fullmatch(r"what (?:color is|is the color of) the (\w+)\?", question):
            colour, named = answer, found[1]
            shape = shape if named == "shape" else named
        elif found := re.fullmatch(r"what is the (\w+) shape\?", question):
            colour, shape = found[1], answer
        elif question.startswith("what shape"):
            shape = answer
    return None if colour is None or shape is None else f"a {colour} {shape}"


def copy_emoji(packages: Path, folder: Path) -> None:
    """Copy the images of the emoji (64 pixels) into a folder."""
    images = packages / "emoji-datasource-google/package/img/google/64"
    for emoji in read_emoji(packages):
        shutil.copy(images / emoji["image"], folder / emoji["image"])


def write_emoji(packages: Path, folder: Path) -> None:
    """Write the emoji's records into a folder: `emoji_captions.json` and `emoji_train.json` of most of them,
    `emoji_test.json`, the question for the kind of thing, of the rest."""
    draw = random.Random(0)
    captions, training, tests = [], [], []
    for emoji in read_emoji(packages):
        image, name = f"emoji/{emoji['image']}", emoji["image"].removesuffix(".png")
        kind = (KIND_QUESTION, emoji["kind"])
        if draw.random() < HELD_OUT:
            tests.append(record(f"emoji-{name}", image, kind))
            continue
        naming = (draw.choice(NAME_QUESTIONS), emoji["name"])
        captions.append(record(f"emoji-{name}", image, ("Describe the image.", f"{emoji['name']}, {emoji['kind']}")))
        training.append(record(f"emoji-{name}", image, *draw.sample([kind, naming], 2)))
    draw.shuffle(tests)  # they are sorted by their kind
    for records, file in ((captions, "captions"), (training, "train"), (tests, "test")):
        write(records, folder / f"emoji_{file}.json")


def read_emoji(packages: Path) -> list[dict[str, str]]:
    """Return the image's file name, the name and the kind of every emoji that has all of them, skin tones left out."""
    listed = json.loads((packages / "emoji-datasource-google/package/emoji.json").read_text())
    named = json.loads((packages / "emojibase-data/package/en/data.json").read_text())
    labels = {item["hexcode"]: item["label"] for item in named}
    found = []
    for emoji in sorted(listed, key=lambda emoji: emoji["sort_order"]):
        label = labels.get(emoji["unified"]) or labels.get(emoji["unified"].replace("-FE0F", ""))
        if emoji["has_img_google"] and emoji["category"] != "Component" and label is not None:
            found.append({"image": emoji["image"], "name": label.lower(), "kind": emoji["category"].lower()})
    return found
