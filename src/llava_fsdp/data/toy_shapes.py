"""The built-in data set: generated images of coloured shapes, with LLaVA JSON files of captions and questions.

An image has one to four equal shapes, each in a different corner. Answers cannot be guessed without the image: all
kinds of questions but one have at least four answers, and no answer is much more frequent than the others.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from llava_fsdp.config import DataConfig, Source
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.small_json import parse_object

FORMAT_VERSION = 1
"""Version of the generator, increased whenever the same seed gives other images or texts."""
TRAIN_PICTURES = 3000
"""Number of training images; each has one caption and one conversation."""
HELDOUT_PICTURES = 300
"""Number of held-out images, with one question each."""
TEXT_ONLY_SHARE = 0.08
"""Fraction of the records of ``instructions.json`` that have no image."""
MARKER = "shapes.json"
"""Name of the file with the Recipe of a generated folder."""
GROUND = (122, 116, 104)
"""Background colour (RGB): the mean of CLIP's normalisation, so that background pixels become about zero."""
_DARK, _LIT = GROUND, (255, 255, 255)
COLOURS = {
    "red": (_LIT[0], _DARK[1], _DARK[2]),
    "green": (_DARK[0], _LIT[1], _DARK[2]),
    "blue": (_DARK[0], _DARK[1], _LIT[2]),
    "yellow": (_LIT[0], _LIT[1], _DARK[2]),
    "purple": (_LIT[0], _DARK[1], _LIT[2]),
    "white": _LIT,
}
"""{name: RGB colour}. No channel is darker than the background, so that the difference between a shape and the
background has the same sign in every colour. Then even randomly initialised patch features separate its outline
linearly."""
SHAPES = ("ring", "bar", "cross", "triangle")
PLURALS = {"ring": "rings", "bar": "bars", "cross": "crosses", "triangle": "triangles"}
SIZES = {"small": 0.1, "large": 0.155}
"""Half of a shape's width, as a fraction of the image's short side."""
PLACES = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SPREAD = 2 / 3
"""Distance between the centres of neighbouring shapes, as a fraction of the short side of the image. In a square image
cut into 3 x 3 patches, each shape is in the middle of a patch, where a small vision tower learns it fastest."""
CANVASES = ((56, 56), (64, 64), (64, 56), (56, 64), (72, 64), (64, 72), (96, 84))
"""Image sizes in pixels, (width, height)."""
COUNT_WEIGHTS = (4, 2, 2, 2)
"""Relative frequencies of images with one, two, three and four shapes. Only an image with a single shape can have a
question about the shape's place."""
CAPTION_TURN_SHARE = 0.3
"""Fraction of the conversations with a question for the caption."""
CAPTION_REQUEST = "Describe the picture."


@dataclass(frozen=True)
class Recipe:
    """Parameters of the generated data set. Equal recipes give equal files."""

    seed: int
    train_pictures: int
    heldout_pictures: int
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Scene:
    """Content of an image. ``places`` has the corners in ascending order: 0 top left, 1 top right, 2 bottom left, 3
    bottom right."""

    shape: str
    colour: str
    size: str
    places: tuple[int, ...]


def ensure_shapes(
    root: Path, *, seed: int = 0, train_pictures: int = TRAIN_PICTURES, heldout_pictures: int = HELDOUT_PICTURES
) -> None:
    """Generate the data set in the folder ``root``. If it exists, only check that it was generated with the same
    parameters, and raise DataError if it has other content.

    Several processes may call this at once: each writes a temporary folder beside ``root`` and renames it to ``root``;
    only the first rename succeeds, and the other processes delete their folders.
    """
    root = Path(root)
    recipe = Recipe(seed, train_pictures, heldout_pictures)
    if _is_complete(root, recipe):
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        _write_all(work, recipe)
        work.chmod(0o755)  # mkdtemp gives 0o700, which other users of a shared folder could not read
        os.rename(work, root)
    except OSError:
        # The rename fails if another process was first, whose folder must then have the same recipe.
        if not _is_complete(root, recipe):
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_complete(root: Path, recipe: Recipe) -> bool:
    """Return whether a folder holds this recipe's data set, False if empty. Raise DataError for any other content."""
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    try:
        found = parse_object((root / MARKER).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"data.root={root} exists but is no shapes data set: {MARKER}: {error}") from error
    if found != asdict(recipe):
        raise DataError(
            f"data.root={root} was drawn from {found}, not from {asdict(recipe)}; remove the folder or name another one"
        )
    return True


def _write_all(root: Path, recipe: Recipe) -> None:
    """Write all files. The marker is written last, so that an unfinished folder is noticed."""
    rng = random.Random(recipe.seed)
    (root / "images").mkdir()
    seen: set[bytes] = set()
    captions, conversations, heldout = [], [], []
    for index in range(recipe.train_pictures):
        name, scene = _new_picture(root, f"train_{index:05d}", rng, seen)
        captions.append(_record(name, name, [(CAPTION_REQUEST, caption(scene))]))
        conversations.append(_record(name, name, _conversation(scene, rng)))
    for index in range(round(recipe.train_pictures * TEXT_ONLY_SHARE / (1 - TEXT_ONLY_SHARE))):
        conversations.append(_record(f"text_{index:05d}", None, rng.sample(text_facts(), rng.randint(2, 4))))
    rng.shuffle(conversations)
    for index in range(recipe.heldout_pictures):
        name, scene = _new_picture(root, f"heldout_{index:05d}", rng, seen)
        heldout.append(_record(name, name, [rng.choice(list(questions(scene).values()))]))
    _dump(root / "captions.json", captions)
    _dump(root / "instructions.json", conversations)
    _dump(root / "heldout.json", heldout)
    _dump(root / MARKER, asdict(recipe))


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _record(name: str, image: str | None, turns: list[tuple[str, str]]) -> dict[str, object]:
    """Return a record in LLaVA's JSON format, with (question, answer) pairs. With an image file (named without its
    suffix), an ``<image>`` tag is put before the first question."""
    record: dict[str, object] = {"id": name}
    if image is not None:
        record["image"] = f"{image}.png"
    messages = []
    for position, (question, answer) in enumerate(turns):
        mark = "<image>\n" if image is not None and position == 0 else ""
        messages.append({"from": "human", "value": mark + question})
        messages.append({"from": "gpt", "value": answer})
    record["conversations"] = messages
    return record


def _new_picture(root: Path, name: str, rng: random.Random, seen: set[bytes]) -> tuple[str, Scene]:
    """Generate an image that differs from all images in ``seen`` (pixels as bytes), add it there, and save it to a PNG
    file. Return its name and what it shows."""
    while True:
        (count,) = rng.choices(range(1, len(PLACES) + 1), COUNT_WEIGHTS)
        places = tuple(sorted(rng.sample(range(len(PLACES)), count)))
        scene = Scene(rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(SIZES)), places)
        picture = draw_picture(scene, rng)
        if picture.tobytes() not in seen:
            seen.add(picture.tobytes())
            picture.save(root / "images" / f"{name}.png")
            return name, scene


def draw_picture(scene: Scene, rng: random.Random) -> Image.Image:
    """Return an RGB image of a scene, in one of several sizes, with small random shifts of color and places.

    Shapes are in the corners of the central square, so that a center crop keeps them whole.
    """
    fine = 2  # drawn twice as large and averaged down, for smooth edges
    width, height = (side * fine for side in rng.choice(CANVASES))
    short = min(width, height)
    shift = rng.randint(-6, 6)
    red, green, blue = (level + shift for level in GROUND)
    picture = Image.new("RGB", (width, height), (red, green, blue))
    draw = ImageDraw.Draw(picture)
    for place in scene.places:
        row, column = divmod(place, 2)
        x = width / 2 + short * (column - 0.5) * SPREAD + short * rng.uniform(-0.01, 0.01)
        y = height / 2 + short * (row - 0.5) * SPREAD + short * rng.uniform(-0.01, 0.01)
        _draw_shape(draw, scene.shape, x, y, short * SIZES[scene.size], COLOURS[scene.colour])
    return picture.reduce(fine)


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, half: float, fill: tuple[int, int, int]
) -> None:
    """Draw a shape centered at (x, y). `half`: half the side of the square that it fits into. All are in pixels."""
    if shape == "ring":
        draw.ellipse((x - half, y - half, x + half, y + half), outline=fill, width=round(0.4 * half))
    elif shape == "bar":
        draw.rectangle((x - half, y - half / 3, x + half, y + half / 3), fill=fill)
    elif shape == "triangle":
        draw.polygon(((x, y - half), (x + half, y + half), (x - half, y + half)), fill=fill)
    else:
        arm = half / 3
        draw.rectangle((x - half, y - arm, x + half, y + arm), fill=fill)
        draw.rectangle((x - arm, y - half, x + arm, y + half), fill=fill)


def caption(scene: Scene) -> str:
    """Return a caption, such as ``One small red ring at the top left.``"""
    count = len(scene.places)
    noun = scene.shape if count == 1 else PLURALS[scene.shape]
    places = " and ".join(PLACES[place] for place in scene.places)
    return f"{NUMBERS[count - 1].capitalize()} {scene.size} {scene.colour} {noun} at the {places}."


def questions(scene: Scene) -> dict[str, tuple[str, str]]:
    """Return {kind of question: (question, answer)} for the kinds that are possible for an image."""
    pairs = {
        "colour": ("What colour is shown?", scene.colour),
        "shape": ("What shape is shown?", scene.shape),
        "count": ("How many shapes are there?", NUMBERS[len(scene.places) - 1]),
        "size": ("How large is the shape?", scene.size),
        "content": ("What is shown in the picture?", f"{scene.colour} {scene.shape}"),
    }
    if len(scene.places) == 1:
        pairs["place"] = ("Where is the shape?", PLACES[scene.places[0]])
    return pairs


def _conversation(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    """Return two to five random questions about an image, with their answers, and sometimes the request for its caption
    among them."""
    pairs = list(questions(scene).values())
    pairs = rng.sample(pairs, rng.randint(2, 5))
    if rng.random() < CAPTION_TURN_SHARE:
        pairs.insert(rng.randint(0, len(pairs)), (CAPTION_REQUEST, caption(scene)))
    return pairs


def text_facts() -> list[tuple[str, str]]:
    """Return (question, answer) pairs that need no image."""
    facts = [(f"Which number comes after {a}?", b) for a, b in itertools.pairwise(NUMBERS)]
    facts += [(f"Which number comes before {b}?", a) for a, b in itertools.pairwise(NUMBERS)]
    sides = {"triangle": "three", "square": "four"}
    return facts + [(f"How many sides does a {shape} have?", count) for shape, count in sides.items()]


def draw_shapes(cfg: DataConfig) -> None:
    """Generate the data set in `data.root` if `data.source` is shapes and the folder does not exist yet. With
    `data.pairs`, add the file of pairs to it."""
    if cfg.source is not Source.shapes:
        return
    root = Path(cfg.root or ".")
    ensure_shapes(root)
    path = root / "preferences.json"
    if cfg.pairs and not path.exists():
        captions = json.loads((root / "captions.json").read_text())
        replace_file(path, json.dumps(preferences(captions), indent=1).encode())


def preferences(captions: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return a record of a pair for each image, from the records of captions: the question for the color, the right
    color (the third word of the caption) as the chosen answer, and another one as the rejected answer."""
    rng, records = random.Random(0), []
    for record in captions:
        colour = record["conversations"][1]["value"].split()[2]
        other = rng.choice([name for name in COLOURS if name != colour])
        shown = {"id": record["id"], "image": record["image"], "question": "What colour is shown?"}
        records.append(shown | {"chosen": colour, "rejected": other})
    return records
