"""Token ids and labels of whole models: the ids are those of transformers' processor, the labels the answers."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from tiers import any_but
from whole_models import IGNORE, WHOLE, WholeModel, example_of

from llava_fsdp.config import TooLong
from llava_fsdp.data.processor.encoder import ProcessorEncoder
from llava_fsdp.data.processor.image_template import open_image_template
from llava_fsdp.data.processor.processor import open_processor
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer


def encoder_of(model: WholeModel) -> ProcessorEncoder:
    tokenizer = open_tokenizer(model.folder)
    template = open_image_template("chat_template", model.folder, tokenizer)
    sizes = {path.name: Image.open(path).size for path in model.images.iterdir()}
    return ProcessorEncoder(
        tokenizer,
        template,
        open_processor(model.folder),
        lambda record, number: sizes[record.images[number]],
        max_length=4000,
        too_long=TooLong.fail,
    )


def parsed(raw: dict) -> Record:
    turns = tuple(Turn(turn["from"], turn["value"]) for turn in raw["conversations"])
    return Record("random.json", int(raw["id"][1:]), raw["id"], tuple(raw.get("image", ())), turns, "image" in raw)


@pytest.mark.parametrize("name", any_but(["gemma3", "idefics3", "aya_vision"], WHOLE))
def test_ids_are_the_processors_and_labels_the_answers_with_their_ends(
    name: str, whole: Callable[[str], WholeModel]
) -> None:
    model = whole(name)
    encode = encoder_of(model)
    records = model.records("random")
    is_fast = name in ("gemma3", "idefics3", "aya_vision")
    wrong = []
    for raw in records[:60] if is_fast else records:
        sample, example = encode(parsed(raw)), example_of(model, raw)
        assert sample is not None
        if not np.array_equal(sample.input_ids, example.ids):
            wrong.append((raw["id"], "ids"))
        elif not np.array_equal(sample.labels, example.labels):
            wrong.append((raw["id"], "labels"))
    assert not wrong, json.dumps(wrong[:5])
    assert IGNORE in sample.labels
