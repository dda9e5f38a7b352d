"""What whole models whose shapes ship with the package make of a black image."""

import pytest
import torch
from small import config_of
from tiers import slow_after
from transformers import AutoConfig

from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.sources.class_parts import class_parts
from llava_fsdp.plan.memory.blank_images import BlankImages
from llava_fsdp.plan.model_shapes import SHAPES

PHOTO = (640, 480)
PUBLISHED = {
    "google/gemma-3-4b-it": (4_300_079_472, 256),
    "Qwen/Qwen3-VL-2B-Instruct": (2_127_532_032, 20 * 15),
    "Qwen/Qwen2.5-VL-7B-Instruct": (8_292_166_656, 23 * 17),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": (2_246_784_880, 13 * 81),
    "google/gemma-3-12b-it": (12_187_325_040, 256),
    "Qwen/Qwen2.5-VL-3B-Instruct": (3_754_622_976, 23 * 17),
    "Qwen/Qwen3-VL-4B-Instruct": (4_437_815_808, 20 * 15),
    "Qwen/Qwen3-VL-8B-Instruct": (8_767_123_696, 20 * 15),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (31_070_754_032, 20 * 15),
    "mistral-community/pixtral-12b": (12_682_739_712, 40 * 30),
    "OpenGVLab/InternVL3-2B-hf": (2_088_957_440, (4 * 3 + 1) * 256),
    "OpenGVLab/InternVL3-8B-hf": (7_944_373_760, (4 * 3 + 1) * 256),
}
"""Name -> number of parameters of the published weights; and tokens of an image of the size PHOTO, by the
rules in the model's report."""


def open_images(name: str) -> BlankImages:
    folder = SHAPES / name.replace("/", "--")
    parts = class_parts(AutoConfig.from_pretrained(folder), folder)
    own = f"model.checkpoint={folder}", f"model.language={folder}", "model=own", "stage=finetune_task"
    cfg = config_of([*own, "model.train=[vision,projector,language]"])
    return BlankImages.of_parts(build_architecture(parts, cfg.model, torch.bfloat16), parts, PHOTO)


@pytest.mark.parametrize("name", slow_after(1, list(PUBLISHED)))
def test_shipped_shapes_are_those_of_the_published_models(name: str) -> None:
    parameters, tokens = PUBLISHED[name]
    images = open_images(name)
    assert sum(p.numel() for p in images.model.parameters()) == parameters
    assert images.vision_work().tokens == tokens


def test_the_work_of_an_image_follows_from_its_size() -> None:
    images = open_images("Qwen/Qwen3-VL-2B-Instruct")
    # 16 x 16 pixels, twice because a still image is a short video: float32; and three int64 of its grid
    work = images.vision_work()
    assert work.nbytes == 40 * 30 * 16 * 16 * 3 * 2 * 4 + 24
    # each patch passes 24 blocks of 4 * width^2 + 2 * width * wide weights, attends to all patches, and is merged; the
    # backward pass has two products for each of the forward pass
    patches, width, wide = 40 * 30, 1024, 4096
    blocks = 24 * patches * (2 * (4 * width**2 + 2 * width * wide) + 4 * patches * width)
    assert 1 < work.recomputed / blocks < 1.15
    assert 2.9 < work.flops / work.recomputed < 3.3
    assert images.vision_work((1280, 480)).tokens == 2 * work.tokens
