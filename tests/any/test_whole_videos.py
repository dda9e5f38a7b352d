"""Videos of whole models of each family: token ids, labels, losses and gradients are those of transformers' processor
and class, which get the same files."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness import RankPool, single_world
from reference import train_on, trained
from small import write_json
from video_families import APART, VIDEO_FAMILIES
from video_models import shown, write_video_model
from videos import write_sound, write_video
from whole_loop import begun, difference
from whole_models import (
    TAG,
    VIDEO_TAG,
    WholeModel,
    assert_same_gradients,
    conversation,
    example_of,
    messages_of,
    own_gradients,
    peer_gradients,
)

from llava_fsdp.chat.answerer import Question
from llava_fsdp.chat.class_assistant import ClassAssistant
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.config import Config, Pixels, TooLong
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.data.processor.encoder import ProcessorEncoder, check_processor
from llava_fsdp.data.processor.frames import open_frames
from llava_fsdp.data.processor.image_template import open_image_template
from llava_fsdp.data.processor.images import ProcessorImages
from llava_fsdp.data.processor.processor import open_processor
from llava_fsdp.data.records.clip import Clip
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError, DataError, ModelError
from llava_fsdp.train.main import train

pytestmark = pytest.mark.any
Whole = Callable[[str], WholeModel]


@pytest.fixture(scope="session")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Writes a family's model once, with images, videos and records."""
    made: dict[str, WholeModel] = {}

    def write(name: str) -> WholeModel:
        if name not in made:
            made[name] = write_video_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return write


def encoder_of(model: WholeModel, fps: float | None = None, most: int | None = None) -> ProcessorEncoder:
    tokenizer, processor = open_tokenizer(model.folder), open_processor(model.folder)
    template = open_image_template("chat_template", model.folder, tokenizer)
    frames = open_frames(template, processor, fps, most)
    assert frames is not None
    reader = ProcessorImages(model.images, processor, Pixels.exact, frames)
    made = ProcessorEncoder(tokenizer, template, processor, reader.shape, 100_000, TooLong.fail)
    check_processor(made, has_videos=True)
    return made


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_ids_of_videos_are_the_processors_and_labels_the_answers(name: str, moving: Whole) -> None:
    model = moving(name)
    encode, wrong = encoder_of(model), []
    for number, raw in enumerate(model.records("random")):
        sample, example = encode(parse_record("random.json", number, raw, videos=True)), example_of(model, raw)
        assert sample is not None
        if not np.array_equal(sample.input_ids, example.ids):
            wrong.append((raw["id"], "ids"))
        elif not np.array_equal(sample.labels, example.labels):
            wrong.append((raw["id"], "labels"))
    assert not wrong, json.dumps(wrong[:5])


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_loss_and_gradients_with_videos_are_the_sum_over_the_samples(name: str, moving: Whole, tmp_path: Path) -> None:
    model = moving(name)
    loss, gradients = peer_gradients(model)
    own_loss, own, _ = own_gradients(begun(single_world(), model.config(tmp_path)))
    assert own_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(own, gradients, 1e-4 if name == "qwen3_5" else 1e-5)


def four_records(model: WholeModel) -> WholeModel:
    """Writes a text, an image, a video, and a text, which are a step of two ranks with two samples each."""
    few = {record["id"]: record for record in model.records("few")}
    image = shown(["0.png"], [], conversation(1, [f"{TAG}\nWhat is in this image?", "A red square."]))
    write_json(model.images.parent / "four.json", [few["r0"], image, few["r2"], {**few["r0"], "id": "r9"}])
    return model


def gradients_on_a_rank(world: World, cfg: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """This rank's loss, and the gradients over all ranks."""
    loss, found, _ = own_gradients(begun(world, cfg))
    return loss, found


@pytest.mark.ranks
@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_ranks_with_a_video_an_image_and_text_alone_train_together(
    name: str, moving: Whole, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """The vision part runs equally often on both: otherwise they would wait for each other for ever."""
    model = four_records(moving(name))
    loss, gradients = peer_gradients(model, "four")
    cfg = model.config(tmp_path, "sharding=zero3", "pack=false", "micro_batch_size=1", records="four")
    results = pools[2].run(gradients_on_a_rank, cfg)
    assert sum(own for own, _ in results) == pytest.approx(loss, rel=1e-5)
    for _, own in results:
        assert_same_gradients(own, gradients, 1e-4 if name == "qwen3_5" else 1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["qwen2_5_vl", "glm46v", "smolvlm"])
def test_a_stopped_run_with_videos_continues_on_another_number_of_ranks(
    name: str, moving: Whole, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    model = moving(name)

    def cfg(folder: str, steps: int, *more: str) -> Config:
        adam = ["optim.lr=1e-3", "optim.projector_lr=null", "optim.vision_lr=null", "optim.eps=1e-4"]
        each = ["global_batch_size=4", f"micro_batch_size={4 if not more else 2}", f"max_steps={steps}"]
        return model.config(tmp_path / folder, "optim.schedule=constant", "optim.warmup_ratio=0", *adam, *each, *more)

    train_on(1, cfg("whole", 4), pools)
    train_on(2, cfg("parts", 2, "sharding=zero3"), pools)
    train_on(1, cfg("parts", 4), pools)
    wanted, found = trained(tmp_path / "whole"), trained(tmp_path / "parts")
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert difference(found.weights, wanted.weights, ()) < 1e-5


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_an_export_answers_videos_in_chat_as_transformers_generate(name: str, moving: Whole, tmp_path: Path) -> None:
    model = moving(name)
    train(model.config(tmp_path, "export.enabled=true", "export.dtype=fp32", "optim.lr=1e-3"))
    exported = WholeModel(name, tmp_path / "export", model.images)
    assistant = open_assistant(str(exported.folder))
    assert isinstance(assistant, ClassAssistant)
    kind: Any = transformers.AutoModelForImageTextToText
    peer = kind.from_pretrained(exported.folder, dtype=torch.float32).eval()
    peer.generation_config = transformers.GenerationConfig()
    questions, expected = [], []
    for number, raw in enumerate(model.records("few")[1:]):
        record = parse_record("few.json", number, raw, videos=True)
        tags = record.turns[0].text.count(TAG)
        files: list[ImageFile] = [model.images / file for file in record.images[:tags]]
        questions.append(Question([record.turns[0]], files, record.where))
        prompt = exported.processor.apply_chat_template(
            messages_of({**raw, "conversations": raw["conversations"][:1]}, model.images),
            exported.processor.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        taken = inspect.signature(peer.forward).parameters
        given = {key: value for key, value in prompt.items() if key in taken}
        made = peer.generate(**given, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        text = assistant.new_text()
        for token in made.tolist():
            text.push(token)
        text.close()
        expected.append(text.text)
    assert [assistant.answers([question], 5)[0] for question in questions] == expected
    if name not in APART:
        assert assistant.answers(questions, 5) == expected, "in one batch, padded on the left"


def test_keys_of_the_data_limit_the_frames_of_the_processor(moving: Whole) -> None:
    model, raw = moving("qwen3_vl"), moving("qwen3_vl").records("few")[1]
    record = parse_record("few.json", 0, raw, videos=True)

    def clip(fps: float | None, most: int | None) -> Clip:
        found = encoder_of(model, fps, most).shape(record, 0)
        assert isinstance(found, Clip)
        return found

    own = clip(None, None)
    assert (own.frames, own.rate, own.size) == (24, 10, (48, 32))
    assert own.numbers == (0, 8, 15, 23), "two of each second, and at least four"
    assert clip(5, None).numbers == (0, 2, 4, 6, 8, 10, 13, 15, 17, 19, 21, 23)
    assert clip(5, 3).numbers == (0, 10, 23)
    fetch = model.processor.apply_chat_template
    peer = fetch(messages_of(raw, model.images), tokenize=True, return_dict=True, processor_kwargs={"fps": 5})
    sample = encoder_of(model, 5)(record)
    assert sample is not None and sample.input_ids.tolist() == peer["input_ids"][0]


@pytest.mark.parametrize(
    ("name", "videos", "more", "kind"),
    [
        ("qwen2_5_vl", ["sound.mp4"], [], "image_unreadable"),
        ("qwen2_5_vl", ["empty.mp4"], [], "image_empty"),
        ("qwen2_5_vl", ["none.mp4"], [], "image_missing"),
        ("qwen2_5_vl", ["d.mp4"], ["data.max_length=200", "data.too_long=fail"], "too_long"),
        ("qwen3_vl", ["one.mp4"], [], "image_shape"),
        ("smolvlm", ["a.mp4", "d.mp4"], [], "image_shape"),
        ("perception_lm", ["a.mp4"], [], "media_not_read"),
    ],
)
def test_a_video_that_cannot_be_used_is_named_before_the_first_step(
    name: str, videos: list[str], more: list[str], kind: str, moving: Whole, tmp_path: Path
) -> None:
    model = moving(name)
    write_sound(model.images / "sound.mp4")
    write_video(model.images / "one.mp4", 1)
    (model.images / "empty.mp4").write_bytes(b"")
    asked = [VIDEO_TAG] * len(videos)
    write_json(model.images.parent / "bad.json", [shown([], videos, conversation(0, [" ".join(asked), "yes"]))])
    with pytest.raises(DataError, match=f"{videos[0]}|r0") as raised:
        begun(single_world(), model.config(tmp_path, *more, records="bad"))
    assert kind in str(raised.value)


def test_images_and_videos_that_a_class_cannot_tell_apart_are_refused_in_one_row(moving: Whole, tmp_path: Path) -> None:
    model = four_records(moving("glm4v"))
    with pytest.raises(ConfigError, match=r"set pack=false and micro_batch_size=1"):
        begun(single_world(), model.config(tmp_path, records="four"))


def test_videos_that_a_class_cannot_compute_are_refused_before_the_first_step(moving: Whole, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="fails with a black video"):
        begun(single_world(), moving("kimi_k25").config(tmp_path))


def test_a_limited_process_reads_the_frames_that_training_reads(moving: Whole) -> None:
    model = moving("qwen3_vl")
    limited, free = (open_assistant(str(model.folder), limited_images=own) for own in (True, False))
    assert limited.image_process is not None
    try:
        one, other = (own.load_image(model.images / "d.mp4", "here") for own in (limited, free))
    finally:
        limited.image_process.stop()
    assert one.shape == other.shape and np.array_equal(one.pixels, other.pixels)
