"""A small model that answers a question about an image only sometimes rightly learns from pairs to do it better."""

import json
import random
from pathlib import Path

import pytest
from small import command_config, write_json
from tool_learning import TOOLS, write_language

import llava_fsdp
from llava_fsdp.config import EvaluateConfig
from llava_fsdp.data.toy_shapes import COLOURS, SIZES, Scene, draw_picture
from llava_fsdp.evaluate.main import evaluate

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


def train(stage: str, folder: Path, *words: str) -> None:
    llava_fsdp.train(llava_fsdp.compose(stage, [
        "activation_checkpointing=none", "micro_batch_size=16", "global_batch_size=16", "data=llava_json",
        f"data.images={folder / 'images'}", "data.examine=lazy", "data.workers=0", "data.template=v1", "precision=fp32",
        "compile=false", "checkpoint.every=null", "export.dtype=fp32", "export.verify=false", "epochs=9",
        "optim.projector_lr=null", f"output_dir={folder / stage}", *words,
    ]))  # fmt: skip


def measured(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[float, float]:
    """Shares of the held-out pairs whose right answer is more probable, and of the right answers that a model gives."""
    data = run.parent
    common = f"model.checkpoint={run}", "data=llava_json", f"data.images={data / 'images'}", "format=json"
    found = []
    for words in (
        ("task=pairs", f"data.path={data / 'held_out_pairs.json'}"),
        (f"data.path={data / 'held_out.json'}", "blank=false", "max_new_tokens=8"),
    ):
        capsys.readouterr()
        evaluate(command_config(EvaluateConfig, "evaluate", *common, *words))
        found.append(json.loads(capsys.readouterr().out)["accuracy"])
    return found[0], found[1]


@pytest.mark.timeout(1800)  # two minutes on an idle core
def test_a_model_prefers_the_right_colour_after_100_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On held-out images, both of its pairs and of its own answers more are right than before. Without the second term
    of the loss (`pref.sft_weight`) the probabilities of both answers fall, and it answers with other words."""
    write_images(tmp_path)
    parts = f"model.language={tmp_path / 'language'}", "model.vision=package:tiny-clip", "model.random_weights=true"
    taught = "model.projector=random", f"data.path={tmp_path / 'taught.json'}", "optim.lr=3e-3", "max_steps=60"
    train("finetune", tmp_path, *parts, *taught)
    before = measured(tmp_path / "finetune", capsys)
    pairs = f"model.checkpoint={tmp_path / 'finetune'}", f"data.path={tmp_path / 'pairs.json'}"
    train("prefer", tmp_path, *pairs, "max_steps=100", "optim.lr=1e-3", "pref.sft_weight=1")
    after = measured(tmp_path / "prefer", capsys)
    assert before[0] < 0.75 and before[1] < 0.5, before
    assert after[0] > 0.9 and after[1] > 0.8, after
