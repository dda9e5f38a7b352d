"""What whole models whose shapes ship with the package make of a black image."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow_after
from transformers import AutoConfig, AutoModelForImageTextToText

from llava_fsdp.plan.memory.blank_images import BlankImages
from llava_fsdp.plan.model_shapes import SHAPES

PHOTO = (640, 480)
PUBLISHED = {
    "google/gemma-3-4b-it": (4_300_079_472, 256),
    "Qwen/Qwen3-VL-2B-Instruct": (2_127_532_032, 20 * 15),
    "Qwen/Qwen2.5-VL-7B-Instruct": (8_292_166_656, 23 * 17),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": (2_246_784_880, 13 * 81),
    "mistral-community/pixtral-12b": (12_682_739_712, 40 * 30),
    "google/gemma-3-12b-it": (12_187_325_040, 256),
    "Qwen/Qwen2.5-VL-3B-Instruct": (3_754_622_976, 23 * 17),
    "Qwen/Qwen3-VL-4B-Instruct": (4_437_815_808, 20 * 15),
    "Qwen/Qwen3-VL-8B-Instruct": (8_767_123_696, 20 * 15),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (31_070_754_032, 20 * 15),
}
"""Name -> number of parameters of the published weights; and tokens of an image of the size PHOTO, by the
rules in the model's report."""


def open_model(name: str) -> tuple[Path, Any]:
    folder = SHAPES / name.replace("/", "--")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return folder, model


@pytest.mark.parametrize("name", slow_after(1, list(PUBLISHED)))
def test_shipped_shapes_are_those_of_the_published_models(name: str) -> None:
    parameters, tokens = PUBLISHED[name]
    folder, model = open_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    images = BlankImages.of_folder(model.model, folder, PHOTO)
    assert images.work().tokens == tokens


def test_an_image_can_have_a_wished_number_of_tokens_where_its_size_decides() -> None:
    folder, model = open_model("Qwen/Qwen3-VL-2B-Instruct")
    images = BlankImages.of_folder(model.model, folder, PHOTO)
    larger = images.size_of(3 * 300)
    assert images.work(larger).tokens == pytest.approx(900, rel=0.1)
    assert images.size_of(300) == PHOTO
    # 16 x 16 pixels, twice because a still image is a short video: float32; and three int64 of its grid
    assert images.work().nbytes == 40 * 30 * 16 * 16 * 3 * 2 * 4 + 24
    # each patch passes 24 blocks of 4 * width^2 + 2 * width * wide weights, attends to all patches, and is merged
    patches, width, wide = 40 * 30, 1024, 4096
    blocks = 24 * patches * (2 * (4 * width**2 + 2 * width * wide) + 4 * patches * width)
    assert 1 < images.work().flops / blocks < 1.15
