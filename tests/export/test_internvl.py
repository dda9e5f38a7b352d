"""transformers' InternVL, both ways: a training with pixel shuffle exports to it, and its folders start a training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from PIL import Image
from reference import EXPORTED, outcome, train_on
from small import conversion, make_config, write_json, write_parts
from transformers import (
    AutoProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    PretrainedConfig,
)
from weights import same, weights

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.config import AspectRatio
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.data.text.tokens.detokenize import AnswerText
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.export.source_model import open_source
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts, is_llava
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.provenance import read_notes, write_sealed_notes
from llava_fsdp.train import main as train

SHUFFLE = "model.projector_type=pixel_shuffle2x_mlp2x_gelu"
TOWER = {
    "model_type": "internvl_vision", "hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": [42, 42], "patch_size": [7, 7],
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False, "size": {"height": 42, "width": 42},
    "resample": 3, "image_mean": [0.5, 0.4, 0.5], "image_std": [0.2, 0.2, 0.3],
}  # fmt: skip
RUN = [SHUFFLE, *EXPORTED, "max_steps=2"]
TOKENS = 9
"""Tokens of an image: 6 x 6 patches, of which 2 x 2 become one."""


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts with InternVL's vision tower."""
    folder = write_parts(tmp_path_factory.mktemp("parts"))
    write_json(folder / "vision" / "config.json", TOWER)
    write_json(folder / "vision" / "preprocessor_config.json", IMAGES)
    return folder


@pytest.fixture(scope="module")
def run(tower: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.train(make_config(tower, dataset, folder, *RUN, "export.verify=true", "data.image_aspect_ratio=pad"))
    return folder


def loaded(folder: Path) -> Any:
    model, info = InternVLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def ours(folder: Path, to: Path) -> Any:
    opened = open_source(conversion(folder, to))
    return load_copy(opened.source.model, opened.sources, torch.float32)


@torch.no_grad()
def test_transformers_computes_what_was_trained(run: Path, tower: Path, dataset: Path, tmp_path: Path) -> None:
    """Its processor makes training's pixels and ids to the bit, and its model training's logits."""
    folder = run / "export"
    config: Any = InternVLConfig.from_pretrained(folder)
    assert config.architectures == ["InternVLForConditionalGeneration"]
    assert (config.downsample_ratio, config.image_seq_length, config.vision_feature_layer) == (0.5, TOKENS, -2)
    processor, model, own = AutoProcessor.from_pretrained(folder), loaded(folder), ours(folder, tmp_path / "unused")
    assert own.image_tokens == TOKENS
    cfg = make_config(tower, dataset, tmp_path / "run", *RUN, "data.image_aspect_ratio=pad")
    loader = train.open_data(cfg, single_world(), build_llava(find_parts(cfg.model), cfg.model, torch.float32))
    shown = 0
    for number, record in enumerate(json.loads((dataset / "mixed.json").read_text())[:8]):
        image = Image.open(dataset / "images" / record["image"]) if "image" in record else None
        roles = {"human": "user", "gpt": "assistant"}
        messages = [{"role": roles[t["from"]], "content": t["value"]} for t in record["conversations"]]
        text = processor.apply_chat_template(messages)
        inputs = processor(text=text, images=image, add_special_tokens=False, return_tensors="pt")
        sample, tiles = loader.steps.read_row(number)
        ids = torch.from_numpy(sample.input_ids)
        assert torch.equal(inputs["input_ids"][0], torch.where(ids == IMAGE_ID, config.image_token_id, ids))
        assert int((ids == IMAGE_ID).sum()) == TOKENS * len(tiles)
        if image is not None:
            assert torch.equal(inputs["pixel_values"], normalize(torch.from_numpy(tiles[0]), loader.table))
            shown += 1
        micro = loader.to_device(loader.steps.collate([(sample, tiles)], loader.steps.facts(0, [number]), 1))
        seeds = torch.zeros(1, dtype=torch.int64)
        expected = own(micro.input_ids, None, micro.images, seeds, torch.arange(len(ids)), return_logits=True)
        found = model(**inputs).logits[0, :, : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert shown > 3


@pytest.mark.slow
@pytest.mark.ranks
def test_equal_on_two_ranks_and_padded(
    run: Path, tower: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Some ranks get no image in some steps."""
    expected = outcome(run)
    for name, size, values in (("two", 2, ["sharding=zero3", "micro_batch_size=1"]), ("padded", 1, ["pack=false"])):
        values = [*RUN, "data.image_aspect_ratio=pad", *values]
        found = outcome(train_on(size, make_config(tower, dataset, tmp_path / name, *values), pools))
        assert found.losses == pytest.approx(expected.losses, rel=1e-5), name
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5), name
        differences = [(found.weights[n] - expected.weights[n]).abs().max() for n in expected.weights]
        assert max(differences) < 1e-5, name


def test_our_folder_comes_back_to_the_bit(run: Path, tmp_path: Path) -> None:
    made = export(conversion(run / "export", tmp_path / "made"))
    assert same(weights(made), weights(run / "export"))
    for name in ("config.json", "processor_config.json", "preprocessor_config.json", "tokenizer.json"):
        assert (made / name).read_text() == (run / "export" / name).read_text(), name


def test_it_answers_as_transformers_does(run: Path, dataset: Path) -> None:
    path = dataset / "images" / "1.png"
    own = Assistant(str(run / "export"), "v1", AspectRatio.square)
    assert (own.reader.tokens.aspect, own.reader.tokens.features) == (AspectRatio.pad, TOKENS)
    processor, model = AutoProcessor.from_pretrained(run / "export"), loaded(run / "export")
    messages = [{"role": "user", "content": "<image>\nwhat is it"}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=text, images=[Image.open(path)], add_special_tokens=False, return_tensors="pt")
    written = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    answer = AnswerText(own.tokenizer, own.template.stop, own.stops)
    for token in written.tolist():
        answer.push(token)
    answer.close()
    found = own.answers([Question([Turn("human", "<image>\nwhat is it")], [path], "here")], 8)
    assert found == [answer.text] and answer.text


def whole(folder: Path) -> list[str]:
    return [f"model.checkpoint={folder}", "model.projector=auto", "model.random_weights=false"]


@pytest.mark.slow
def test_stage_2_starts_from_the_projector_of_stage_1(tower: Path, dataset: Path, tmp_path: Path) -> None:
    """The run's folder and a folder with the projector alone have the same projector."""
    values = [*RUN, "model.train=[projector]"]
    train.train(make_config(tower, dataset, tmp_path / "one", *values, stage="pretrain"))
    alone = export(conversion(tmp_path / "one", tmp_path / "alone", "format=projector", "dtype=fp32", VISION))
    stored = [n for n in weights(tmp_path / "one" / "export") if "multi_modal_projector" in n]
    assert len(stored) == 6
    for number, source in enumerate((tmp_path / "one", alone)):
        run = tmp_path / f"two{number}"
        frozen = [*RUN, "model.train=[language]", f"model.projector={source}"]
        train.train(make_config(tower, dataset, run, *frozen))
        one, two = weights(tmp_path / "one" / "export"), weights(run / "export")
        assert all(torch.equal(one[name], two[name]) for name in stored)


VISION = "vision=some/tower"


@pytest.mark.slow
def test_the_projector_alone_beside_a_language_model_that_the_original_lacks(
    tower: Path, dataset: Path, tmp_path: Path
) -> None:
    """Nothing of the original reads it, so it needs neither the original's config.json nor the name of a tower. It can
    be written again."""
    shutil.copytree(tower, tmp_path / "parts")
    config = json.loads((tower / "language" / "config.json").read_text())
    changed = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 6}
    write_json(tmp_path / "parts" / "language" / "config.json", config | changed)
    train.train(make_config(tmp_path / "parts", dataset, tmp_path / "run", *RUN, "max_steps=1"))
    for more in ([], ["overwrite=true"]):
        made = export(conversion(tmp_path / "run", tmp_path / "alone", "format=projector", *more))
        assert (made / "mm_projector.safetensors").is_file() and not (made / "config.json").exists()


@pytest.mark.slow
def test_the_last_layer_is_taken_before_the_towers_norm(tower: Path, dataset: Path, tmp_path: Path) -> None:
    """InternVL puts the tower's norm, if it has one, behind layer -1 only; so the layer is written as 3."""
    shutil.copytree(tower, tmp_path / "parts")
    write_json(tmp_path / "parts" / "vision" / "config.json", TOWER | {"use_mean_pooling": False})
    values = [*RUN, "max_steps=1", "model.select_layer=-1", "export.verify=true"]
    train.train(make_config(tmp_path / "parts", dataset, tmp_path / "run", *values))
    assert json.loads((tmp_path / "run" / "export" / "config.json").read_text())["vision_feature_layer"] == 3
    made = export(conversion(tmp_path / "run" / "export", tmp_path / "made"))
    assert same(weights(made), weights(tmp_path / "run" / "export"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "internvl_vision"),
        (["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad"], "image_aspect_ratio=anyres"),
    ],
    ids=["another tower", "tiles"],
)
def test_what_transformers_cannot_compute_is_refused_before_the_first_step(
    values: list[str], said: str, tower: Path, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    cfg = make_config(tower if values else parts, dataset, tmp_path / "run", *RUN, *values)
    with pytest.raises(ConfigError, match=f"{SHUFFLE} .*{said}.*export.enabled=false"):
        train.train(cfg)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_original_has_no_such_projector(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pixel_shuffle2x_mlp2x_gelu projector"):
        export(conversion(run / "export", tmp_path / "made", "format=llava", VISION))
    assert not (tmp_path / "made").exists() and not (tmp_path / "made.tmp").exists()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.projector_type=mlp2x_gelu", "set model.projector_type=pixel_shuffle2x_mlp2x_gelu"),
        ("model.select_layer=-1", "model.select_layer"),
        ("model.select_feature=full", "select strategy"),
    ],
)
def test_what_contradicts_a_folder_is_refused(key: str, said: str, run: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(run, dataset, tmp_path / "run", SHUFFLE, *whole(run), key)
    with pytest.raises(ConfigError, match=said):
        train.train(cfg)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"downsample_ratio": 0.3}, "downsample_ratio=0.3"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act=relu"),
        ({"image_seq_length": 36}, "image_seq_length=36"),
        ({"use_mean_pooling": False, "vision_feature_layer": -1}, "use_mean_pooling"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_folder_of_another_form_is_refused(values: dict[str, Any], said: str, run: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(run / "export", tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text()) | values
    config["vision_config"] |= {k: v for k, v in values.items() if k in config["vision_config"]}
    notes = read_notes(changed)
    write_json(changed / "config.json", config)
    write_sealed_notes(changed, {key: value for key, value in notes.items() if key not in ("files", "digest")})
    with pytest.raises(ModelError, match=said):
        export(conversion(changed, tmp_path / "made"))


@pytest.mark.parametrize("notes", [None, {"run": "of the class"}, {"vocab_size": 300}], ids=str)
@pytest.mark.parametrize(
    "config", [InternVLConfig(vision_config=TOWER), LlavaConfig(vision_config={"model_type": "pixtral"})], ids=type
)
def test_what_this_package_has_trained_with_one_tile_is_no_class_of_transformers(
    config: PretrainedConfig, notes: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The notes of a training of the class do not have the size of the vocabulary."""
    if notes is not None:
        write_sealed_notes(tmp_path, notes)
    assert is_llava(config, tmp_path) is (notes is not None and "vocab_size" in notes)
