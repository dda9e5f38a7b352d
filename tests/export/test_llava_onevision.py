"""transformers' LLaVA-OneVision, both ways: a training exports to it, and its folders start a training."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import single_world
from jinja2 import TemplateError
from PIL import Image
from reference import EXPORTED
from small import conversion, make_config, write_json, write_parts
from tiers import slow_after
from tiled import SIGLIP_IMAGES, loaded, parts_of, without_older_fields, write_pictures
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
)
from videos import write_mixed
from weights import same, weights

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.config import AspectRatio, PatchMerge, Pixels
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, read_preprocessor
from llava_fsdp.data.loader import pixel_table
from llava_fsdp.data.records.record import Turn, is_video
from llava_fsdp.data.text.templates import TEMPLATES
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.export.source_model import open_source
from llava_fsdp.export.write.chat_template import first_conversation_with_other_ids
from llava_fsdp.model.generation import Sampling
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train import main as train

ONEVISION = [
    "data.image_aspect_ratio=anyres_max", "data.max_tiles=2", "model.patch_merge=spatial_unpad",
    "model.select_layer=-1", "model.select_feature=auto", "data.max_length=512",
]  # fmt: skip
"""Of 93 x 41 pixels, the grid of 3 x 2 tiles is shrunk."""
RUN = [*ONEVISION, *EXPORTED, "export.verify=true", "max_steps=2", "global_batch_size=4", "micro_batch_size=4"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder)
    return folder


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of SigLIP and Qwen3, exported in fp32."""
    folder = tmp_path_factory.mktemp("run")
    parts = parts_of("siglip_qwen3", tmp_path_factory.mktemp("parts"))
    train.train(make_config(parts, pictures, folder, *RUN))
    return folder


@pytest.fixture(scope="module")
def theirs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as on the hub: random weights that transformers has written, and no llava_fsdp.json."""
    folder = tmp_path_factory.mktemp("theirs")
    torch.manual_seed(7)
    model: Any = LlavaOnevisionForConditionalGeneration(LlavaOnevisionConfig.from_pretrained(run / "export"))
    model.save_pretrained(folder)
    for file in (run / "export").glob("*.json*"):
        if file.name not in ("config.json", "llava_fsdp.json") and "model" not in file.name:
            shutil.copyfile(file, folder / file.name)
    return folder


def processor_of(folder: Path) -> Any:
    """transformers' processor without its part for videos, which needs torchvision."""
    settings = json.loads((folder / "processor_config.json").read_text())
    processor: Any = object.__new__(LlavaOnevisionProcessor)
    processor.image_processor = AutoImageProcessor.from_pretrained(folder)
    for name in ("num_image_tokens", "vision_feature_select_strategy", "vision_aspect_ratio", "image_token"):
        setattr(processor, name, settings[name])
    return processor


@torch.no_grad()
@pytest.mark.parametrize("kind", slow_after(1, ["siglip_qwen3", "clip_llama", "clip_mistral"]))
def test_trains_and_exports(kind: str, pictures: Path, tmp_path: Path) -> None:
    """transformers' image processor makes training's pixels to the bit and its processor as many tokens, and its model
    training's logits: for a single image of several tiles, for several images, and for text."""
    parts = parts_of(kind, tmp_path / "parts")
    cfg = make_config(parts, pictures, tmp_path / "run", *RUN)
    with torch.enable_grad():
        train.train(cfg)
    folder = tmp_path / "run" / "export"
    config: Any = LlavaOnevisionConfig.from_pretrained(folder)
    assert config.vision_aspect_ratio == "anyres_max_2" and config.image_grid_pinpoints[1] == [28, 56]
    assert config.vision_feature_layer == -1 and config.tie_word_embeddings is (kind == "siglip_qwen3")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    assert ids == [config.image_token_index, config.video_token_index] and ids[0] != ids[1]
    processor, model = processor_of(folder), loaded(folder)
    opened = open_source(conversion(folder, tmp_path / "unused"))
    ours = load_copy(opened.source.model, opened.sources, torch.float32)
    loader = train.open_data(cfg, single_world(), build_llava(find_parts(cfg.model), cfg.model, torch.float32))
    for number, record in enumerate(json.loads((pictures / "mixed.json").read_text())):
        shown = [Image.open(pictures / "images" / name) for name in record.get("image", [])]
        sample, tiles = loader.steps.read_row(number)
        ids = torch.from_numpy(sample.input_ids)[None]
        ids = torch.where(ids == IMAGE_ID, config.image_token_id, ids)
        inputs: dict[str, torch.Tensor] = {}
        if shown:
            inputs = dict(processor.image_processor([shown], return_tensors="pt"))
            assert int(inputs["batch_num_images"]) == len(shown)
            text = [processor.replace_image_token(inputs, place) for place in range(len(shown))]
            assert [t.count("<image>") for t in text] == [len(rows) for rows in sample.image_rows]
        for place, image in enumerate(tiles):
            pixels = normalize(torch.from_numpy(image), loader.table)
            assert (len(image) > 1) == (len(shown) == 1)
            assert torch.equal(inputs["pixel_values"][place][: len(image)], pixels)
        micro = loader.to_device(loader.steps.collate([(sample, tiles)], loader.steps.facts(0, [number]), 1))
        seeds = torch.zeros(1, dtype=torch.int64)
        expected = ours(micro.input_ids, None, micro.images, seeds, torch.arange(ids.numel()), return_logits=True)
        found = model(input_ids=ids, **inputs).logits[0, :, : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.slow
def test_videos_have_the_logits_of_transformers(theirs: Path, tmp_path: Path) -> None:
    """A video alone, several, and videos beside one image (of several tiles) and beside two."""
    data = write_mixed(tmp_path)
    checkpoint = [f"model.checkpoint={theirs}", "model.projector=auto", "model.random_weights=false"]
    cfg = make_config(
        theirs, data, tmp_path / "run", *ONEVISION, *checkpoint, "data.video_fps=2", "data.video_frames=3"
    )
    opened = open_source(conversion(theirs, tmp_path / "unused"))
    ours, model = (
        load_copy(opened.source.model, opened.sources, torch.float32),
        loaded(theirs),
    )
    images, processor, config = AutoImageProcessor.from_pretrained(theirs), processor_of(theirs), model.config
    processor.video_token = "<video>"
    loader = train.open_data(cfg, single_world(), build_llava(find_parts(cfg.model), cfg.model, torch.float32))
    kinds = set()
    for number, record in enumerate(loader.steps.records):
        sample, tiles = loader.steps.read_row(number)
        ids, inputs = torch.tensor(sample.input_ids)[None], {}
        tokens = [config.video_token_id if is_video(name) else config.image_token_id for name in record.images]
        lengths = torch.tensor([len(rows) for rows in sample.image_rows], dtype=torch.int64)
        ids[ids == IMAGE_ID] = torch.tensor(tokens, dtype=torch.int64).repeat_interleave(lengths)
        shown = [Image.open(data / "images" / name) for name in record.images if not is_video(name)]
        if shown:
            inputs = dict(images([shown], return_tensors="pt"))
        videos = [own for own, name in zip(tiles, record.images, strict=True) if is_video(name)]
        if videos:
            assert {len(own) for own in videos} == {3}
            pixels = torch.stack([normalize(torch.from_numpy(own), loader.table) for own in videos])
            inputs["pixel_values_videos"] = pixels
            counts = [processor.replace_video_token({"pixel_values_videos": pixels}, n) for n in range(len(videos))]
            assert [text.count("<video>") for text in counts] == [
                len(rows) for rows, name in zip(sample.image_rows, record.images, strict=True) if is_video(name)
            ]
        kinds.add((len(shown), len(videos)))
        micro = loader.to_device(loader.steps.collate([(sample, tiles)], loader.steps.facts(0, [number]), 1))
        seeds = torch.zeros(1, dtype=torch.int64)
        expected = ours(micro.input_ids, None, micro.images, seeds, torch.arange(ids.numel()), return_logits=True)
        found = model(input_ids=ids, **inputs).logits[0, :, : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert kinds == {(1, 0), (2, 0), (0, 0), (0, 1), (1, 1), (0, 2), (2, 1)}


def test_their_folder_comes_back_to_the_bit(theirs: Path, tmp_path: Path) -> None:
    made = export(conversion(theirs, tmp_path / "made"))
    before, after = (
        loaded(theirs).state_dict(),
        loaded(made).state_dict(),
    )
    trained = LlavaOnevisionConfig.from_pretrained(theirs).image_token_index
    rows = {name: slice(trained if "embed_tokens" in name or "lm_head" in name else None) for name in before}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name][rows[name]], after[name][rows[name]]) for name in before)
    for file in ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        before, after = (json.loads((folder / file).read_text()) for folder in (theirs, made))
        assert without_older_fields(after, before) == before, file


@pytest.mark.slow
def test_their_model_trains_and_exports_again(theirs: Path, pictures: Path, tmp_path: Path) -> None:
    cfg = make_config(
        theirs, pictures, tmp_path / "run", *RUN, f"model.checkpoint={theirs}", "model.projector=auto",
        "model.random_weights=false", "model.train=[projector]",
    )  # fmt: skip
    train.train(cfg)
    before, after = (
        loaded(theirs).state_dict(),
        loaded(tmp_path / "run" / "export").state_dict(),
    )
    trained = LlavaOnevisionConfig.from_pretrained(theirs).image_token_index
    changed = {name for name in before if not torch.equal(before[name][:trained], after[name][:trained])}
    assert {name.removeprefix("model.").partition(".")[0] for name in changed} == {
        "multi_modal_projector", "image_newline",
    }  # fmt: skip


@pytest.mark.slow
def test_to_the_original_and_back(pictures: Path, tmp_path: Path) -> None:
    """The original's language model is a Llama."""
    parts = parts_of("clip_llama", tmp_path / "parts")
    train.train(make_config(parts, pictures, tmp_path / "run", *RUN))
    theirs = tmp_path / "run" / "export"
    made = export(conversion(theirs, tmp_path / "llava", "format=llava", "vision=some/tower"))
    config = json.loads((made / "config.json").read_text())
    assert config["image_aspect_ratio"] == "anyres_max_2" and config["image_grid_pinpoints"][1] == [56, 28]
    again = export(conversion(made, tmp_path / "again"))
    assert same(weights(again), weights(theirs))
    assert LlavaOnevisionConfig.from_pretrained(again).vision_aspect_ratio == "anyres_max_2"


CONTRADICTIONS = [
    ("data.max_tiles=3", "data.max_tiles=2"),
    ("data.image_aspect_ratio=anyres", "data.image_aspect_ratio=anyres_max"),
    ("data.grid_pinpoints=[[28,56],[56,28]]", "set data.grid_pinpoints="),
    ("model.select_layer=-2", "trained with"),
]


@pytest.mark.parametrize(("value", "said"), slow_after(2, CONTRADICTIONS))
def test_what_contradicts_their_folder_is_refused(
    value: str, said: str, theirs: Path, pictures: Path, tmp_path: Path
) -> None:
    checkpoint = [f"model.checkpoint={theirs}", "model.projector=auto", "model.random_weights=false"]
    cfg = make_config(theirs, pictures, tmp_path / "run", *ONEVISION, *checkpoint, value)
    with pytest.raises(ConfigError, match=said):
        train.train(cfg)


@pytest.mark.parametrize("value", ["model.patch_merge=spatial", "model.patch_merge=flat", "data.pixels=llava_v1_5"])
def test_a_form_that_onevision_does_not_have_is_refused(
    value: str, theirs: Path, pictures: Path, tmp_path: Path
) -> None:
    """Only the key that is wrong is named."""
    with pytest.raises(ConfigError, match="anyres_max is LLaVA-OneVision's") as caught:
        make_config(theirs, pictures, tmp_path / "run", *ONEVISION, value)
    keys = ("model.patch_merge", "data.pixels", "labels")
    assert [key for key in keys if f"{key}=" in str(caught.value)] == [value.partition("=")[0]]


def test_a_way_to_cut_images_that_is_not_known_is_refused(theirs: Path, tmp_path: Path) -> None:
    shutil.copytree(theirs, tmp_path / "changed")
    config = json.loads((theirs / "config.json").read_text())
    write_json(tmp_path / "changed" / "config.json", config | {"vision_aspect_ratio": "anyres"})
    with pytest.raises(ModelError, match="vision_aspect_ratio=anyres; only anyres_max_N"):
        export(conversion(tmp_path / "changed", tmp_path / "made"))


def test_their_folder_answers_as_their_model(theirs: Path, pictures: Path) -> None:
    """With one image in a conversation and with two: the first image is then read again, as one tile."""
    ours, model = Assistant(str(theirs), "v1", AspectRatio.pad), loaded(theirs)
    assert ours.reader.tokens.aspect is AspectRatio.anyres_max and ours.reader.tokens.max_tiles == 2
    images = AutoImageProcessor.from_pretrained(theirs)
    paths = [pictures / "images" / f"{name}.png" for name in ("wide", "high")]
    alone = ours.load_image(paths[0], "here")
    assert len(alone.tiles) > 1 and ours.prepare_images([alone]) == [alone]
    both = ours.prepare_images([alone, ours.load_image(paths[1], "here")])
    assert [len(image.tiles) for image in both] == [1, 1] and ours.prepare_images(both)[0] is both[0]
    for shown in ([alone], both):
        turns = [Turn("human", "<image>\n" * len(shown) + "what is it")]
        ids = torch.from_numpy(ours.encode(turns, shown, "here"))[None]
        inputs = images([[Image.open(image.path) for image in shown]], return_tensors="pt")
        given = torch.where(ids == IMAGE_ID, model.config.image_token_id, ids)
        written = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), **inputs, do_sample=False, max_new_tokens=8
        )[0, ids.shape[1] :]
        answer = ours.answers([Question(turns, paths[: len(shown)], "here")], 8)[0]
        ended = [n for n, token in enumerate(written.tolist()) if token in ours.stops] or [len(written)]
        assert answer and answer == ours.tokenizer.decode(written.tolist()[: ended[0]]).strip()


def test_a_conversation_takes_videos(theirs: Path, tmp_path: Path) -> None:
    """A video does not count as an image: beside it, a single image keeps its tiles."""
    write_mixed(tmp_path)
    ours = Assistant(str(theirs), "v1", AspectRatio.pad)
    conversation = Conversation(ours)
    for name in ("short.webm", "wide.png"):
        conversation.add(tmp_path / "images" / name, "here")
    answer = "".join(conversation.ask("what is it", Sampling(4)))
    assert [len(image.tiles) for image in conversation.images] == [2, 9]
    paths = [tmp_path / "images" / name for name in ("short.webm", "wide.png")]
    turns = [Turn("human", "<image>\n<image>\nwhat is it")]
    assert ours.answers([Question(turns, paths, "here")], 4)[0] == answer.strip()


@pytest.mark.parametrize(("kind", "number"), slow_after(2, [("clip", 40), ("siglip", 40), ("siglip", 1000)]))
def test_pixels_of_their_processor(kind: str, number: int, run: Path, tmp_path: Path) -> None:
    """Bit for bit, for pictures of any size, alone and several in a sample."""
    write_parts(tmp_path)
    if kind == "siglip":
        write_json(tmp_path / "vision" / "preprocessor_config.json", SIGLIP_IMAGES)
    own = read_preprocessor(tmp_path / "vision")
    sizes = tuple(grid_sizes([], 28, AspectRatio.anyres_max))
    processor = AutoImageProcessor.from_pretrained(run / "export", image_mean=list(own.mean), image_std=list(own.std))
    rule = ImageTokens(AspectRatio.anyres_max, 28, 4, sizes, PatchMerge.spatial_unpad)
    reader = ImageReader(None, own, rule, Pixels.exact)
    table, dice, file = pixel_table(own, torch.device("cpu")), random.Random(number), tmp_path / "picture.png"
    for _ in range(number):
        size = dice.choice([4, 9, 30, 150]), dice.randrange(4, 150)
        size = size[:: dice.choice([1, -1])]
        Image.effect_noise(size, 90).convert("RGB").save(file)
        for images in (1, 2):
            made = processor(images=[[Image.open(file)] * images], return_tensors="pt")["pixel_values"][0]
            found = normalize(torch.from_numpy(reader.load(file, "here", images)), table)
            assert len(found) == rule.count_tiles(size, images) and torch.equal(made, found), (size, images)


def test_the_chat_template_takes_videos(run: Path) -> None:
    """As parts and as tags, each in the place where training has its tokens; others are refused."""
    tokenizer: Any = AutoTokenizer.from_pretrained(run / "export")
    parts = [{"type": "video"}, {"type": "text", "text": " or "}, {"type": "image"}]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True)
        for said in (
            parts,
            "<video> or <image>",
            [{"type": "text", "text": "what"}, {"type": "video"}],
            "<video>\nwhat",
        )
    ]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    assert [re.findall("<video>|<image>|what", text) for text in texts[1:3]] == [
        ["<video>", "<image>"],
        ["<video>", "what"],
    ]
    ours = open_tokenizer(run / "export", tokenizer.convert_tokens_to_ids("<image>"))
    assert first_conversation_with_other_ids(run / "export", ours, TEMPLATES["v1"], False) is None
    with pytest.raises(TemplateError, match="images belong to"):
        answer = {"role": "assistant", "content": "<video>"}
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}, answer], tokenize=False)
