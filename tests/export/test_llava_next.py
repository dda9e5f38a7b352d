"""transformers' LLaVA-NeXT, both ways: a training on tiles exports to it, and its folders start a training."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import single_world
from PIL import Image
from reference import EXPORTED
from safetensors.torch import save_file
from small import conversion, make_config, write_json, write_parts
from tiers import slow_after
from tiled import SIGLIP_IMAGES, loaded, parts_of, without_older_fields, write_pictures
from transformers import AutoImageProcessor, AutoProcessor, LlavaNextConfig, LlavaNextForConditionalGeneration
from weights import same, weights

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.config import AspectRatio, PatchMerge, Pixels
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, read_preprocessor
from llava_fsdp.data.loader import pixel_table
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.data.text.tokens.detokenize import AnswerText
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.export.source_model import open_source
from llava_fsdp.export.write.processor import write_preprocessor
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train import main as train

GRIDS = [[56, 28], [28, 56], [84, 56]]
"""(width, height); two of the three hold a square picture equally well, so that their order matters."""
ANYRES = ["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad", "data.max_length=512"]
TILED = [*ANYRES, f"data.grid_pinpoints={GRIDS}", "model.select_feature=auto"]
RUN = [*TILED, *EXPORTED, "export.verify=true", "max_steps=2", "global_batch_size=4", "micro_batch_size=4"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder)
    return folder


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of CLIP and Llama on tiles, exported in fp32."""
    folder = tmp_path_factory.mktemp("run")
    parts = parts_of("clip_llama", tmp_path_factory.mktemp("parts"))
    train.train(make_config(parts, pictures, folder, *RUN))
    return folder


@pytest.fixture(scope="module")
def theirs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as on the hub: random weights and files that transformers has written, and no llava_fsdp.json."""
    folder = tmp_path_factory.mktemp("theirs")
    torch.manual_seed(7)
    model: Any = LlavaNextForConditionalGeneration(LlavaNextConfig.from_pretrained(run / "export"))
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(run / "export").save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("kind", slow_after(1, ["siglip_qwen3", "clip_llama", "clip_mistral"]))
@pytest.mark.slow
def test_trains_on_tiles_and_exports(kind: str, pictures: Path, tmp_path: Path) -> None:
    """transformers' processor makes training's pixels and ids to the bit, and its model training's logits."""
    parts = parts_of(kind, tmp_path / "parts")
    cfg = make_config(parts, pictures, tmp_path / "run", *RUN)
    with torch.enable_grad():
        train.train(cfg)
    folder = tmp_path / "run" / "export"
    config: Any = LlavaNextConfig.from_pretrained(folder)
    assert config.image_grid_pinpoints == [[28, 56], [56, 28], [56, 84]]
    assert config.tie_word_embeddings is (kind == "siglip_qwen3")
    assert config.vision_feature_select_strategy == ("full" if kind == "siglip_qwen3" else "default")
    processor, model = AutoProcessor.from_pretrained(folder), loaded(folder)
    assert type(processor).__name__ == "LlavaNextProcessor"
    opened = open_source(conversion(folder, tmp_path / "unused"))
    ours = load_copy(opened.source.model, opened.sources, torch.float32)
    loader = train.open_data(cfg, single_world(), build_llava(find_parts(cfg.model), cfg.model, torch.float32))
    for number, record in enumerate(json.loads((pictures / "mixed.json").read_text())):
        shown = [Image.open(pictures / "images" / name) for name in record.get("image", [])]
        question, answer = (turn["value"] for turn in record["conversations"])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = processor.apply_chat_template(messages)
        inputs = processor(text=text, images=shown or None, add_special_tokens=False, return_tensors="pt")
        sample, tiles = loader.steps.read_row(number)
        ids = torch.from_numpy(sample.input_ids)
        assert torch.equal(inputs["input_ids"][0], torch.where(ids == IMAGE_ID, config.image_token_id, ids))
        for place, image in enumerate(tiles):
            pixels = normalize(torch.from_numpy(image), loader.table)
            assert len(image) > 1 and torch.equal(inputs["pixel_values"][place][: len(image)], pixels)
        micro = loader.to_device(loader.steps.collate([(sample, tiles)], loader.steps.facts(0, [number]), 1))
        seeds = torch.zeros(1, dtype=torch.int64)
        expected = ours(micro.input_ids, None, micro.images, seeds, torch.arange(len(ids)), return_logits=True)
        found = model(**inputs).logits[0, :, : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_their_folder_comes_back_to_the_bit(theirs: Path, tmp_path: Path) -> None:
    """Only rows that no token has are written anew."""
    made = export(conversion(theirs, tmp_path / "made"))
    before, after = (
        loaded(theirs).state_dict(),
        loaded(made).state_dict(),
    )
    trained = LlavaNextConfig.from_pretrained(theirs).image_token_index
    rows = {name: slice(trained if "embed_tokens" in name or "lm_head" in name else None) for name in before}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name][rows[name]], after[name][rows[name]]) for name in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (theirs, made)]
    assert without_older_fields(configs[1], configs[0]) == configs[0]
    processors = [AutoProcessor.from_pretrained(folder).to_dict() for folder in (theirs, made)]
    assert processors[0] == processors[1]


@pytest.mark.parametrize("tied", slow_after(1, [False, True]))
def test_it_is_tied_as_its_own_configuration_says(tied: bool, theirs: Path, tmp_path: Path) -> None:
    """transformers goes by the value of the whole model, whatever that of the language model is."""
    shutil.copytree(theirs, tmp_path / "theirs")
    config: Any = LlavaNextConfig.from_pretrained(theirs)
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = tied, not tied
    LlavaNextForConditionalGeneration(config).save_pretrained(tmp_path / "theirs")
    made = export(conversion(tmp_path / "theirs", tmp_path / "made"))
    assert ("language_model.lm_head.weight" in weights(made)) is not tied
    trained = config.image_token_index
    heads = [loaded(folder).lm_head.weight[:trained] for folder in (tmp_path / "theirs", made)]
    assert torch.equal(*heads)


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
    trained = LlavaNextConfig.from_pretrained(theirs).image_token_index
    changed = {name for name in before if not torch.equal(before[name][:trained], after[name][:trained])}
    assert {name.removeprefix("model.").partition(".")[0] for name in changed} == {
        "multi_modal_projector", "image_newline",
    }  # fmt: skip


@pytest.mark.slow
def test_adapters_on_their_model(theirs: Path, pictures: Path, tmp_path: Path) -> None:
    """Merged at the end of the run, and from the folder of the adapter with its base: the same model."""
    cfg = make_config(
        theirs, pictures, tmp_path / "run", *RUN, f"model.checkpoint={theirs}", "model.projector=auto",
        "model.random_weights=false", "optim.warmup_ratio=0", "model.lora.r=4", stage="finetune_lora",
    )  # fmt: skip
    train.train(cfg)
    made = export(conversion(tmp_path / "run" / "adapter", tmp_path / "made", "dtype=fp32"))
    assert same(weights(made), weights(tmp_path / "run" / "export"))
    grids = [LlavaNextConfig.from_pretrained(folder).image_grid_pinpoints for folder in (made, theirs)]
    assert grids[0] == grids[1]


CONTRADICTIONS = [
    (
        "model.patch_merge=flat",
        r"says model\.patch_merge=flat; set model\.patch_merge=spatial_unpad and data\.image_as",
    ),
    ("model.patch_merge=spatial", r"model\.patch_merge=spatial; set model\.patch_merge=spatial_unpad"),
    ("data.grid_pinpoints=[]", r"grid_pinpoints=\[\]; set data\.grid_pinpoints=\[\[56,28\],\[28,56\],\[84,56\]\]"),
    ("data.grid_pinpoints=[[28,56],[56,28],[84,56]]", r"set data\.grid_pinpoints=\[\[56,28\],\[28,56\],\[84,56\]\]"),
    ("model.select_layer=-1", r"trained with \{'model\.select_layer': -2, "),
    ("model.select_feature=full", "'select strategy': 'full'"),
]


@pytest.mark.parametrize(("value", "said"), slow_after(3, CONTRADICTIONS))
def test_what_contradicts_their_folder_is_refused(
    value: str, said: str, theirs: Path, pictures: Path, tmp_path: Path
) -> None:
    checkpoint = [f"model.checkpoint={theirs}", "model.projector=auto", "model.random_weights=false"]
    cfg = make_config(theirs, pictures, tmp_path / "run", *TILED, *checkpoint, value)
    with pytest.raises(ConfigError, match=said):
        train.train(cfg)
    with pytest.raises(ConfigError, match=r"model\.patch_merge=spatial_unpad is for data\.image_aspect_ratio=anyres"):
        make_config(theirs, pictures, tmp_path / "run", *checkpoint, "model.patch_merge=spatial_unpad")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image_grid_pinpoints": [28, 56]}, r"image_grid_pinpoints=\[28, 56\], which are no \[height, width\]"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act=relu; only gelu is supported"),
        ({"vision_feature_layer": [-2, -1]}, "only one is supported"),
    ],
)
def test_a_folder_that_is_not_understood_is_refused(
    values: dict[str, Any], said: str, theirs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(theirs, folder)
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | values)
    with pytest.raises(ModelError, match=said):
        export(conversion(folder, tmp_path / "made"))


def test_a_missing_end_of_a_line_is_not_drawn(theirs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(theirs, folder)
    kept = {name: tensor for name, tensor in weights(folder).items() if "image_newline" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="has no weights for image_newline"):
        export(conversion(folder, tmp_path / "made"))


@pytest.mark.slow
def test_to_the_original_and_back(run: Path, theirs: Path, tmp_path: Path) -> None:
    """The original has sizes as (width, height)."""
    to_llava = ["format=llava", "vision=some/tower"]
    made = export(conversion(theirs, tmp_path / "llava", *to_llava))
    config = json.loads((made / "config.json").read_text())
    assert (config["image_aspect_ratio"], config["image_grid_pinpoints"]) == ("anyres", GRIDS)
    again = export(conversion(made, tmp_path / "again"))
    assert same(weights(again), weights(export(conversion(theirs, tmp_path / "straight"))))
    assert LlavaNextConfig.from_pretrained(again).image_grid_pinpoints == [[28, 56], [56, 28], [56, 84]]
    assert same(weights(export(conversion(again, tmp_path / "back", *to_llava))), weights(made))
    with pytest.raises(ConfigError, match="image_aspect_ratio=pad with patch_merge=spatial_unpad has no equal"):
        export(conversion(run, tmp_path / "padded", "image_aspect_ratio=pad"))


def test_their_folder_answers_as_their_model(theirs: Path, pictures: Path) -> None:
    """Neither tiles nor their sizes have to be named."""
    path = pictures / "images" / "wide.png"
    ours = Assistant(str(theirs), "v1", AspectRatio.pad)
    assert (ours.reader.tokens.aspect, [list(size) for size in ours.reader.tokens.sizes]) == (AspectRatio.anyres, GRIDS)
    processor, model = AutoProcessor.from_pretrained(theirs), loaded(theirs)
    text = processor.apply_chat_template(
        [{"role": "user", "content": "<image>\nwhat is it"}], add_generation_prompt=True
    )
    inputs = processor(text=text, images=[Image.open(path)], add_special_tokens=False, return_tensors="pt")
    written = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    answer = AnswerText(ours.tokenizer, ours.template.stop, ours.stops)
    for token in written.tolist():
        answer.push(token)
    answer.close()
    found = ours.answers([Question([Turn("human", "<image>\nwhat is it")], [path], "here")], 8)
    assert found == [answer.text] and answer.text


@pytest.mark.parametrize(("kind", "number"), slow_after(2, [("clip", 60), ("siglip", 60), ("clip", 1000)]))
def test_pixels_of_their_processor(kind: str, number: int, tmp_path: Path) -> None:
    """Bit for bit, for pictures of any size: also one pixel high, and where the tower's own files name another filter
    than bicubic, with which tiles are always cut."""
    write_parts(tmp_path)
    if kind == "siglip":
        write_json(tmp_path / "vision" / "preprocessor_config.json", SIGLIP_IMAGES)
    (tmp_path / "export").mkdir()
    sizes = grid_sizes([], 28)
    write_preprocessor(tmp_path / "vision", tmp_path / "export", False, [[height, width] for width, height in sizes])
    processor = AutoImageProcessor.from_pretrained(tmp_path / "export")
    own = read_preprocessor(tmp_path / "vision")
    rule = ImageTokens(AspectRatio.anyres, 28, 4, tuple(sizes), PatchMerge.spatial_unpad)
    reader = ImageReader(None, own, rule, Pixels.exact)
    table, dice, file = pixel_table(own, torch.device("cpu")), random.Random(number), tmp_path / "picture.png"
    for _ in range(number):
        size = dice.choice([1, 2, 3, 9, 30, 150]), dice.randrange(1, 150)
        size = size[:: dice.choice([1, -1])]
        Image.effect_noise(size, 90).convert("RGB").save(file)
        made = processor(images=Image.open(file), return_tensors="pt")
        assert made["image_sizes"].tolist() == [[size[1], size[0]]]
        assert torch.equal(made["pixel_values"][0], normalize(torch.from_numpy(reader.load(file, "here")), table)), size
