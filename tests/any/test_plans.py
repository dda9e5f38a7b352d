"""The planner's bytes and FLOPs beside those of real steps of whole models, on images of its size."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import single_world
from live import measure_step
from PIL import Image
from small import write_json
from steps import begin
from tiers import any_but
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from whole_models import TAG, WholeModel, conversation

from llava_fsdp.data.images.image_tokens import PHOTO
from llava_fsdp.plan.planner import peak
from llava_fsdp.train.main import settle_auto

Whole = Callable[[str], WholeModel]
CLOSE = 0.06
"""Share of the most bytes alive. On a CPU torch's kernels hold buffers that those of a GPU do not."""
SAME = 0.02
"""Share of the FLOPs of an image."""
FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "mistral3")


@pytest.fixture
def photos(whole: Whole, tmp_path: Path) -> Callable[[str], WholeModel]:
    """Opens a family's model with four records, of which three have an image."""

    def opened(name: str) -> WholeModel:
        folder = tmp_path / "images"
        folder.mkdir()
        Image.effect_noise(PHOTO, 90).convert("RGB").save(folder / "photo.png")
        asked = [conversation(n, [f"{TAG}\nhow many dogs", "two lazy dogs"], ["photo.png"]) for n in range(3)]
        text = conversation(3, ["how many dogs are there?", "two dogs"])
        write_json(tmp_path / "photos.json", [*asked, text])
        return WholeModel(name, whole(name).folder, folder)

    return opened


@pytest.mark.parametrize("name", any_but([], FAMILIES))
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_most_bytes_alive_in_a_step_are_those_that_are_planned(
    name: str, mode: str, photos: Whole, tmp_path: Path
) -> None:
    """Of the second step, with the optimizer's moments."""
    words = f"activation_checkpointing={mode}", "max_steps=3"
    cfg = settle_auto(photos(name).config(tmp_path / "out", *words, records="photos"), single_world())
    most, micros = measure_step(single_world(), cfg)
    planned = peak(cfg, 1, "cpu", micros, 0)
    assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (planned.moment, planned.bytes)


@pytest.mark.parametrize("name", any_but(["gemma3"], FAMILIES))
def test_the_flops_of_an_image_are_those_of_the_class(name: str, photos: Whole, tmp_path: Path) -> None:
    """Forward and backward pass of all that makes the embeddings of an image, attention included."""
    model = photos(name)
    state = begin(single_world(), settle_auto(model.config(tmp_path / "out", records="photos"), single_world()))
    auto: Any = AutoModelForImageTextToText
    peer = auto.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="eager").train()
    question = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", PHOTO)}]}]
    made = model.processor.apply_chat_template(question, tokenize=True, return_dict=True, return_tensors="pt")
    takes = inspect.signature(peer.model.get_image_features).parameters
    counter = FlopCounterMode(display=False)
    with counter:
        found = peer.model.get_image_features(**{k: v for k, v in made.items() if k in takes})
        features = tree_leaves([found.pooler_output, getattr(found, "deepstack_features", [])])
        sum(own.sum() for own in features).backward()
    tokens = int((made["input_ids"] == peer.config.image_token_id).sum())
    assert state.utilization is not None
    assert state.utilization.flops.vision * tokens == pytest.approx(counter.get_total_flops(), rel=SAME)
