"""A small model that answers a question about an image only sometimes rightly learns from pairs to do it better."""

import json
import random
from pathlib import Path

import pytest
from small import write_json
from tool_learning import TOOLS, write_language

import llava_fsdp
from llava_fsdp.data.toy_shapes import COLOURS, SIZES, Scene, draw_picture

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUESTION = "<image>\nWhat colour is shown?"
TAUGHT, PAIRS, HELD_OUT = 600, 1200, 150
"""Numbers of images with an answer, with a pair of answers, and of those that are not trained on."""


def write_images(folder: Path) -> None:
    """Write three sets of images: `taught.json` has records with the colour as the answer, `pairs.json` pairs of the
    right and of another colour, `held_out.json` and `held_out_pairs.json` both of the same images."""
    dice, images = random.Random(0), folder / "images"
    images.mkdir(parents=True)
    records, pairs = [], []
    for number in range(TAUGHT + PAIRS + HELD_OUT):
        places = tuple(sorted(dice.sample(range(4), dice.randint(1, 4))))
        scene = Scene(dice.choice([*TOOLS]), dice.choice([*COLOURS]), dice.choice([*SIZES]), places)
        draw_picture(scene, dice).save(images / f"{number:05}.png")
        wrong = dice.choice([colour for colour in COLOURS if colour != scene.colour])
        asked, answer = {"from": "human", "value": QUESTION}, {"from": "gpt", "value": scene.colour}
        own = {"id": f"{number:05}", "image": f"{number:05}.png"}
        records.append({**own, "conversations": [asked, answer]})
        pairs.append({**own, "conversations": [asked], "chosen": scene.colour, "rejected": wrong})
    write_json(folder / "taught.json", records[:TAUGHT])
    write_json(folder / "pairs.json", pairs[TAUGHT : TAUGHT + PAIRS])
    write_json(folder / "held_out.json", records[TAUGHT + PAIRS :])
    write_json(folder / "held_out_pairs.json", pairs[TAUGHT + PAIRS :])
    write_language(folder / "language", [json.dumps(record) for record in records[:300]])


def train(stage: str, folder: Path, *words: str) -> list[dict[str, float]]:
    """Train on the images of `write_images`; return the rows of its validations."""
    cfg = llava_fsdp.compose(stage, [
        "activation_checkpointing=none", "micro_batch_size=16", "global_batch_size=16", "data=llava_json",
        f"data.images={folder / 'images'}", f"val.images={folder / 'images'}", "data.examine=lazy", "data.workers=0",
        "data.template=v1", "precision=fp32", "compile=false", "checkpoint.every=null", "export.dtype=fp32",
        "export.verify=false", "epochs=9", "optim.projector_lr=null", f"output_dir={folder / stage}", *words,
    ])  # fmt: skip
    llava_fsdp.train(cfg)
    return [json.loads(line) for line in (folder / stage / "validation.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1800)  # two minutes on an idle core
def test_a_model_prefers_the_right_colour_after_100_steps(tmp_path: Path) -> None:
    """Its accuracy on held-out pairs, and that of its own answers, both rise."""
    write_images(tmp_path)
    parts = f"model.language={tmp_path / 'language'}", "model.vision=package:tiny-clip"
    random_weights = "model.projector=random", "model.random_weights=true"
    taught = f"data.path={tmp_path / 'taught.json'}", f"val.path={tmp_path / 'held_out.json'}"
    common = *parts, *random_weights, *taught
    (before,) = train("finetune", tmp_path, *common, "optim.lr=3e-3", "max_steps=60", "val.every=60")
    pairs = f"data.path={tmp_path / 'pairs.json'}", f"val.path={tmp_path / 'held_out_pairs.json'}"
    steps = "max_steps=100", "val.every=1", "optim.lr=1e-3"
    rows = train("prefer", tmp_path, f"model.checkpoint={tmp_path / 'finetune'}", *pairs, *steps)
    print(before, rows[0], rows[-1])
