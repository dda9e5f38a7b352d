"""What a run exports, transformers loads; what others wrote, a run starts from."""

import json
import logging
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge_notes, swap_in_exports
from harness import CPU, RankPool, single_world
from PIL import Image
from reference import EXPORTED, outcome, run_ranks, train_on
from safetensors.torch import load_file, save_file
from small import command_config, conversion, make_config, write_json, write_parts
from tiers import slow_after
from transformers import AutoProcessor, LlavaForConditionalGeneration
from weights import same, weights

from llava_fsdp.config import Config, ConversionConfig
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.data.batching.collate import Collator
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.images.preprocess import load_image
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.conversation import prompt
from llava_fsdp.data.text.encode import encode_prompt
from llava_fsdp.data.text.templates import TEMPLATES
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.rehearsal import CannotBeExported
from llava_fsdp.export.write import formats, weights_writer
from llava_fsdp.export.write.formats import source_of_run
from llava_fsdp.export.write.weights_writer import Weights, plan_files, plan_renamed, publish_folder
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights, load_weights
from llava_fsdp.model.packed_attention.attention import choose_kernel
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.sources.pretrained_config import read_model
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.model.weights.lazy_tensor import LazyTensor
from llava_fsdp.model.weights.tensor_files import StoredTensor
from llava_fsdp.parallel.fsdp.materialize import materialize
from llava_fsdp.parallel.local_shards import local_shards
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train import final_export
from llava_fsdp.train import main as train
from llava_fsdp.train.setup import preflight


def load_ours(cfg: Config, checkpoint: Path) -> torch.nn.Module:
    """Our model with the weights of a folder, in fp32, on one rank."""
    cfg.model.checkpoint, cfg.model.random_weights = str(checkpoint), False
    parts = find_parts(cfg.model)
    kernel = choose_kernel(cfg.attention, parts.language, CPU, torch.float32) if cfg.packs else None
    model = build_llava(parts, cfg.model, torch.float32, kernel)
    sources, buffers = find_weights(model, parts, cfg.model), computed_buffers(model)
    materialize(model, lambda empty: empty.to_empty(device="cpu"))
    load_weights(sources, local_shards(model, MasterWeights({})))
    restore_buffers(model, buffers)
    return model.eval()


def refuse_and_run(world: World, cfg: Config) -> None:
    """A training whose export cannot be what transformers computes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(final_export, "logits_of_class", lambda *_: torch.full((1, 1), torch.nan))
        run_ranks(world, cfg)


def probe(cfg: Config):
    return train.open_data(cfg, single_world(), build_llava(find_parts(cfg.model), cfg.model, torch.float32))


@torch.no_grad()
def assert_same_as_transformers(cfg: Config, folder: Path) -> None:
    """Our logits and those of transformers' own model on the same samples, one at a time there."""
    theirs, info = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    loader = probe(cfg)
    model = load_ours(cfg, folder)
    padded = Collator(loader.steps.image_reader, cfg.loss.normalize, pack=False)
    rows = [loader.steps.read_row(i) for i in range(6)]
    assert {bool(sample.images) for sample, _ in rows} == {True, False}
    for sample, pictures in rows:
        micro = loader.to_device(padded([(sample, pictures)], StepFacts(0), 1))
        ours = model(**replace(micro, label_positions=torch.arange(micro.input_ids.numel())).inputs, return_logits=True)
        ids = torch.from_numpy(sample.input_ids)[None]
        ids = torch.where(ids == IMAGE_ID, theirs.config.image_token_id, ids)
        tiles = micro.images["tiles"]
        logits = theirs(input_ids=ids, pixel_values=tiles if len(tiles) else None).logits[0]
        torch.testing.assert_close(logits[:, : ours.shape[1]], ours, rtol=1e-4, atol=1e-5)


def test_export_gives_the_same_logits_in_transformers(noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    assert_same_as_transformers(make_config(parts, dataset, tmp_path), noise / "export")


def test_processor_loads_and_makes_our_ids(noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """transformers' processor with the exported chat template gives the ids that training saw."""
    processor = AutoProcessor.from_pretrained(noise / "export")
    picture = Image.new("RGB", (40, 30), (200, 10, 10))
    image = {"type": "image", "image": picture}

    def text_of(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    messages = [
        {"role": "user", "content": [text_of("what colour is the circle"), image]},
        {"role": "assistant", "content": [text_of("red")]},
        {"role": "user", "content": [text_of("is "), image, text_of(" left of"), image]},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text.startswith("<s> A chat between") and text.endswith(" left of<image>  ASSISTANT:")
    call: dict[str, Any] = {"tokenize": True, "add_generation_prompt": True}
    inputs = processor.apply_chat_template(messages, **call, return_dict=True, return_tensors="pt")
    assert inputs["pixel_values"].shape == (3, 3, 28, 28)
    image_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    steps = probe(make_config(parts, dataset, tmp_path)).steps
    turns = [
        Turn("human", "<image>\nwhat colour is the circle"),
        Turn("gpt", "red"),
        Turn("human", "is <image> left of<image>"),
    ]
    for each in (4, 1):
        asked = prompt(turns, TEMPLATES["v1"], False, True)
        ours = encode_prompt(asked, steps.encoder.tokenizer, [each] * 3)
        wanted = [image_id if i == IMAGE_ID else i for i in ours.tolist()]
        if each == 4:
            assert inputs["input_ids"][0].tolist() == wanted and wanted.count(processor.tokenizer.bos_token_id) == 1
            again = processor(text=text, images=[picture] * 3, add_special_tokens=False)
            assert again["input_ids"] == [wanted]
        else:
            assert processor.tokenizer.apply_chat_template(messages, **call, return_dict=False) == wanted


@pytest.mark.ranks
@pytest.mark.slow
def test_sharded_export_equals_the_single_one(
    noise: Path, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Before any update (the first step's learning rate is 0) the bits are the same, gathered or not, of the run and of
    its checkpoint."""
    values = ["max_steps=1", "checkpoint.every=1", "sharding=zero3", "export.verify=true"]
    pools[2].run(run_ranks, make_config(parts, dataset, tmp_path / "two", *EXPORTED, *values))
    assert same(weights(tmp_path / "two" / "export"), weights(noise / "export"))
    step = tmp_path / "two" / "checkpoints" / "step-000001"
    assert same(weights(export(conversion(step, tmp_path / "made", "verify=false"))), weights(noise / "export"))


@pytest.mark.slow
def test_export_in_another_dtype_is_made_again(noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """In bf16 it is the rounded one in fp32; it is verified."""
    run = Path(shutil.copytree(noise, tmp_path / "run"))
    values = ["max_steps=1", "checkpoint.every=1", "export.enabled=true", "export.verify=true", "export.dtype=bf16"]
    train.train(make_config(parts, dataset, run, *values))
    assert same(weights(run / "export"), {n: t.bfloat16() for n, t in weights(noise / "export").items()})
    assert json.loads((run / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_broken_export_is_refused(parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that swaps two weights is found before the first step. The proof of the run's own export finds it, too:
    such a run does not count as done."""
    swap_in_exports(monkeypatch, "lm_head.weight", "language_model.embed_tokens.weight")
    cfg = make_config(parts, dataset, tmp_path, *EXPORTED, "export.verify=true", "max_steps=1")
    with pytest.raises(CannotBeExported):
        train.train(cfg)
    assert not (tmp_path / "metrics.jsonl").exists()
    monkeypatch.setattr(preflight, "rehearse", lambda *_: None)
    with pytest.raises(ModelError, match=r"embed_tokens.weight in it is not the trained one"):
        train.train(cfg)
    assert not (tmp_path / "export").exists()


def test_one_bit_that_differs_is_refused(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bit of one bf16 number, which no bound on logits would find."""

    def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
        bits = tensors[name].clone()
        bits.view(torch.int16)[3, 2] ^= 1
        save_file({**tensors, name: bits}, path, metadata)

    monkeypatch.setattr(preflight, "rehearse", lambda *_: None)
    monkeypatch.setattr(weights_writer, "save_file", save)
    values = ["export.enabled=true", "export.dtype=bf16", "export.verify=true", "max_steps=1"]
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight in it is not the trained one"):
        train.train(make_config(parts, dataset, tmp_path, *values))


@pytest.mark.slow
def test_a_refused_export_is_made_by_the_command_that_its_message_gives(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last checkpoint, with the weights that the run would have exported; the run then has an export. The same
    with an older export in its place, and again if the run is started again."""
    run = tmp_path / "a run"
    values = ["export.enabled=true", "export.dtype=bf16", "export.verify=true"]
    for steps in ("max_steps=1", "max_steps=2"):
        cfg = make_config(parts, dataset, run, *values, steps)
        with monkeypatch.context() as patched:
            patched.setattr(final_export, "logits_of_class", lambda *_: torch.full((1, 1), torch.nan))
            for _ in range(2):
                with pytest.raises(ModelError) as refused:
                    train.train(cfg)
        command = shlex.split(str(refused.value).rpartition(": ")[2])
        assert command[:2] == ["llava-fsdp", "export"] and (run / "export.tmp").is_dir()
        export(command_config(ConversionConfig, *command[1:]))
        exported = weights(run / "export")
        assert not (run / "export.tmp").exists()
        train.train(cfg)
        assert same(weights(run / "export"), exported), "it counts as the run's own export"
        shutil.copytree(run / "export", tmp_path / steps)
        shutil.rmtree(run / "export")
        train.train(cfg)
        assert same(weights(run / "export"), exported), "it is what the run writes"
    assert not same(weights(tmp_path / "max_steps=1"), exported)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("stage", ["finetune", "finetune_lora"])
def test_an_export_of_two_ranks_that_is_refused_is_made_from_the_checkpoint(
    stage: str, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Each rank gives the same message; with adapters their folder is there already."""
    values = ["sharding=zero3", "export.enabled=true", "export.dtype=bf16", "export.verify=true", "max_steps=2"]
    cfg = make_config(parts, dataset, tmp_path / "run", *values, "optim.lr=0.1", "optim.warmup_ratio=0", stage=stage)
    with pytest.raises(Exception, match="transformers computes something else") as refused:
        pools[2].run(refuse_and_run, cfg)
    (command,) = set(re.findall(r"the comparison: llava-fsdp (export .*verify=false)", str(refused.value)))
    export(command_config(ConversionConfig, *shlex.split(command)))
    exported = weights(tmp_path / "run" / "export")
    assert (tmp_path / "run" / "adapter").exists() is (stage == "finetune_lora")
    pools[2].run(run_ranks, cfg)
    assert same(weights(tmp_path / "run" / "export"), exported), "it counts as the run's own export"
    shutil.rmtree(tmp_path / "run" / "export")
    pools[2].run(run_ranks, cfg)
    assert same(weights(tmp_path / "run" / "export"), exported), "it is what the run writes"


def test_the_effect_of_rounding_is_said_and_no_reason_to_refuse(
    noise: Path, parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention that chooses one token: where two are nearly equal, rounding to bf16 chooses the other, and a logit
    moves by a large share of the largest."""
    sharp = Path(shutil.copytree(noise / "export", tmp_path / "sharp"))
    tensors = load_file(sharp / "model.safetensors")
    save_file({n: t * 1000 if "q_proj" in n else t for n, t in tensors.items()}, sharp / "model.safetensors")
    forge_notes(sharp)
    values = ["export.enabled=true", "export.verify=true", "max_steps=1", "model.random_weights=false"]
    caplog.set_level(logging.INFO)
    for dtype in ("bf16", "fp32"):
        run = tmp_path / dtype
        cfg = make_config(parts, dataset, run, *values, f"model.checkpoint={sharp}", f"export.dtype={dtype}")
        train.train(cfg)
        told = [r.getMessage() for r in caplog.records if "rounded to export.dtype=" in r.getMessage()]
        (kl,) = map(float, re.findall(r"KL ([\d.e-]*\d)", told[-1]))
        assert (kl > 1e-3) is (dtype == "bf16"), told[-1]
        loaded = LlavaForConditionalGeneration.from_pretrained(run / "export", dtype=torch.float32)
        assert loaded.dtype == torch.float32


def write_original(noise: Path, folder: Path, kind: str) -> Path:
    """The same weights as the original LLaVA saves them: its names, its config, without padding rows."""
    config = json.loads((noise / "config.json").read_text())
    vocabulary = json.loads((noise / "llava_fsdp.json").read_text())["vocab_size"]
    tensors = {}
    for name, tensor in weights(noise).items():
        if "embed_tokens" in name or "lm_head" in name:
            tensor = tensor[:vocabulary].clone()
        name = name.replace("language_model.model.", "model.").replace("language_model.lm_head.", "lm_head.")
        name = name.replace("multi_modal_projector.linear_1.", "model.mm_projector.0.")
        name = name.replace("multi_modal_projector.linear_2.", "model.mm_projector.2.")
        name = name.replace("vision_tower.vision_model.", "model.vision_tower.vision_tower.vision_model.")
        tensors[name] = tensor
    theirs = {
        **config["text_config"],
        "model_type": "llava_llama",
        "architectures": ["LlavaLlamaForCausalLM"],
        "mm_projector_type": "mlp2x_gelu",
        "vocab_size": vocabulary,
    }
    write_json(folder / "config.json", theirs)
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((noise / file).read_bytes())
    return folder


def start(folder: Path) -> list[str]:
    return [f"model.checkpoint={folder}", "model.random_weights=false"]


@pytest.mark.parametrize("kind", slow_after(1, ["ours", "original bin"]))
def test_starts_from_a_whole_model(kind: str, noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    folder = noise if kind == "ours" else write_original(noise / "export", tmp_path / "original", "bin")
    values = [*EXPORTED, *start(folder), "max_steps=1"]
    train.train(make_config(parts, dataset, tmp_path / "run", *values))
    before, after = outcome(noise).weights, outcome(tmp_path / "run").weights
    assert all(torch.equal(before[n], after[n]) for n in before), "the first step's learning rate is 0"


@pytest.mark.slow
def test_starts_from_a_projector(noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of a run; everything else is drawn."""
    values = [*EXPORTED, f"model.projector={noise}", "seed=7", "max_steps=1"]
    train.train(make_config(parts, dataset, tmp_path, *values))
    first, after = outcome(noise).weights, outcome(tmp_path).weights
    equal = {n: torch.equal(first[n], after[n]) for n in first}
    assert all(is_equal for n, is_equal in equal.items() if n.startswith("multi_modal_projector."))
    assert not all(equal.values())


@pytest.mark.slow
def test_projector_of_the_stage_before_is_found(parts: Path, dataset: Path, tmp_path: Path) -> None:
    pretrain = make_config(parts, dataset, tmp_path / "pretrain", *EXPORTED, "max_steps=1", stage="pretrain")
    train.train(pretrain)
    cfg = make_config(parts, dataset, tmp_path / "finetune", *EXPORTED, "model.projector=auto", "max_steps=1")
    train.train(cfg)
    made, used = outcome(tmp_path / "pretrain").weights, outcome(tmp_path / "finetune").weights
    assert all(torch.equal(made[n], used[n]) for n in made), "everything else is drawn alike"

    cfg = make_config(parts, dataset, tmp_path / "other", "model.projector=auto", "model.vision=package:tiny-clip")
    with pytest.raises(ConfigError, match=r"was trained for model\.vision="):
        train.train(cfg)


def test_real_model_without_a_projector_names_the_command(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path / "finetune", "model.projector=auto", "model.random_weights=false")
    with pytest.raises(ConfigError, match=r"stage=pretrain model=tiny(.|\n)*model\.projector=random"):
        train.train(cfg)


def qwen_and_siglip(parts: Path, folder: Path) -> Path:
    """Another language model, with tied embeddings and biases, and another tower, without CLS."""
    language = json.loads((parts / "language" / "config.json").read_text())
    language |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    write_json(folder / "language" / "config.json", language)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "language" / file).write_bytes((parts / "language" / file).read_bytes())
    vision = {"model_type": "siglip_vision_model", "hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    write_json(folder / "vision" / "config.json", vision)
    preprocessor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}, "resample": 3}
    preprocessor |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_resize": True}
    write_json(folder / "vision" / "preprocessor_config.json", preprocessor)
    return folder


OTHER = ["model.select_feature=auto"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("tower", [pytest.param("frozen", marks=pytest.mark.slow), "trainable"])
def test_another_language_model_and_tower(
    tower: str, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Sharded on two ranks as on one, exported, and read back."""
    folder = qwen_and_siglip(parts, tmp_path / "parts")
    trained = [*OTHER, "model.train=[projector,language,vision]"] if tower == "trainable" else OTHER
    runs = {}
    for size in (1, 2):
        values = [*EXPORTED, *trained, "sharding=zero3", "max_steps=2"]
        cfg = make_config(folder, dataset, tmp_path / str(size), *values)
        cfg.export.verify = size == 2
        runs[size] = outcome(train_on(size, cfg, pools))
    assert runs[2].losses == pytest.approx(runs[1].losses, rel=1e-5)
    assert_same_as_transformers(make_config(folder, dataset, tmp_path / "none", *OTHER), tmp_path / "1" / "export")


def test_tower_without_cls_refuses_to_drop_one(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(qwen_and_siglip(parts, tmp_path / "parts"), dataset, tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"model\.select_feature=patch drops a CLS token.*set model\.select_feature=full"
    ):
        train.train(cfg)


@pytest.mark.slow
def test_weights_from_another_model(noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """A file whose shapes or names do not fit: the message has the parameter, the file and both shapes."""
    config = json.loads((noise / "export" / "config.json").read_text())
    folder = Path(shutil.copytree(noise / "export", tmp_path / "other"))
    for rows in (51, 49):  # more than the file has, and fewer, which would be cut off
        config["text_config"]["intermediate_size"] = rows
        write_json(folder / "config.json", config)
        forge_notes(folder)
        with pytest.raises(
            ModelError, match=rf"layers\.0\.mlp\.down_proj\.weight has shape \[36, 50\] in .*other, .*\[36, {rows}\]"
        ):
            train.train(make_config(parts, dataset, tmp_path / "run", *start(folder)))
    # rows alone: keys and values of fewer heads, which nothing else depends on
    config["text_config"] |= {"intermediate_size": 50, "num_key_value_heads": 1}
    write_json(folder / "config.json", config)
    forge_notes(folder)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.[kv]_proj\.weight has shape"):
        train.train(make_config(parts, dataset, tmp_path / "run", *start(folder)))
    tensors = weights(noise / "export")
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", json.loads((noise / "export" / "config.json").read_text()))
    forge_notes(folder)
    with pytest.raises(ModelError, match=r"other has no weights for language_model\.norm\.weight"):
        train.train(make_config(parts, dataset, tmp_path / "run", *start(folder)))


@pytest.mark.slow
def test_export_in_several_files(
    noise: Path, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of more than one file: an index that transformers reads, and the same logits."""
    monkeypatch.setattr(weights_writer, "SHARD_BYTES", 40_000)
    made = export(conversion(noise / "export", tmp_path / "made"))
    files = sorted(p.name for p in made.glob("model*"))
    assert len(files) > 3 and files[-1] == "model.safetensors.index.json"
    single = weights(noise / "export")
    index = json.loads((made / files[-1]).read_text())["weight_map"]
    assert index.keys() == single.keys()
    for name, file in index.items():
        assert torch.equal(load_file(made / file)[name], single[name]), name
    assert_same_as_transformers(make_config(parts, dataset, tmp_path / "none"), made)


def test_files_of_weights_are_filled_up_to_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is larger, unless one weight alone is."""
    monkeypatch.setattr(weights_writer, "SHARD_BYTES", 100)
    shapes = {"a": (10,), "b": (15,), "c": (1,), "d": (30,), "e": (24,), "f": (2,)}
    to_write = Weights(shapes, dict.fromkeys(shapes, torch.float32), torch.zeros)

    def planned(outputs: dict[str, LazyTensor]) -> list[list[str]]:
        return [[n for group in file for n in group.outputs] for file in plan_files(outputs, to_write)]

    def nothing(name: str, box: object) -> torch.Tensor:
        raise AssertionError("a plan reads no values")

    outputs = plan_renamed(shapes, str.upper, nothing)
    assert planned(outputs) == [["A", "B"], ["C"], ["D"], ["E"], ["F"]]
    # what shares a parameter is in one file; "c" and "f" share none
    joined = {"x": torch.cat([outputs["A"], outputs["F"]]), "y": outputs["C"], "z": outputs["F"][:1]}
    assert planned(joined) == [["x", "z", "y"]]  # type: ignore[arg-type]


def test_rows_that_were_not_trained_are_the_mean_of_those_that_were() -> None:
    """Of the vocabulary alone; rows behind it, which no token has, are left out first."""
    held = torch.tensor([[1.0, 2.0], [3.0, 6.0], [99.0, 99.0]])
    expected = torch.tensor([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0], [2.0, 4.0]])
    assert torch.equal(weights_writer.with_rows(held, 2, 4), expected)


@pytest.mark.slow
def test_vocabulary_without_a_row_to_spare(dataset: Path, tmp_path: Path) -> None:
    """The image tag and the padding token of an export are left out on the way back, with our notes or without."""
    parts = write_parts(tmp_path / "parts", spare_rows=0)
    train.train(make_config(parts, dataset, tmp_path / "one", *EXPORTED, "max_steps=1"))
    folder = tmp_path / "one" / "export"
    config = json.loads((folder / "config.json").read_text())
    rows = json.loads((folder / "llava_fsdp.json").read_text())["vocab_size"]
    assert config["image_token_index"] == rows and config["text_config"]["vocab_size"] % 64 == 0
    for has_notes in (True, False):
        if not has_notes:
            (folder / "llava_fsdp.json").unlink()
        assert find_parts(read_model(folder)).language.vocab_size == rows
    train.train(make_config(parts, dataset, tmp_path / "two", *EXPORTED, *start(folder), "max_steps=1"))
    one, two = outcome(tmp_path / "one"), outcome(tmp_path / "two")
    assert one.losses == two.losses
    assert all(torch.equal(one.weights[n], two.weights[n]) for n in one.weights)


@pytest.mark.parametrize("aspect", ["square", "pad"])
@pytest.mark.parametrize(("tower", "tokens"), slow_after(1, [("clip", 4), ("clip with CLS", 5), ("siglip", 4)]))
def test_exported_processor_makes_our_pixels_and_tokens(
    tower: str, tokens: int, aspect: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    folder = qwen_and_siglip(parts, tmp_path / "parts") if tower == "siglip" else parts
    overrides = {"clip": [], "siglip": OTHER, "clip with CLS": ["model.select_feature=full"]}[tower]
    cfg = make_config(folder, dataset, tmp_path / "run", *overrides, f"data.image_aspect_ratio={aspect}")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    (tmp_path / "export").mkdir()
    formats.write_hf_except_weights(source_of_run(model, cfg, "run", 1), torch.float32, tmp_path / "export")
    processor = AutoProcessor.from_pretrained(tmp_path / "export")
    picture = Image.effect_noise((50, 31), 80).convert("RGB")
    picture.save(tmp_path / "a.png")
    inputs = processor(text="<image>\nwhat", images=picture, return_tensors="pt")
    loader = probe(cfg)
    ours = load_image(tmp_path / "a.png", loader.steps.image_reader.preprocessor, cfg.data.image_aspect_ratio, "x")
    assert torch.equal(normalize(torch.from_numpy(ours)[None], loader.table), inputs["pixel_values"])
    image_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert int((inputs["input_ids"] == image_id).sum()) == loader.steps.image_reader.tokens.features == tokens


def test_checkpoint_brings_its_projector(noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    values = [*start(noise), "model.projector=/nowhere"]
    with pytest.raises(ConfigError, match=r"model\.projector=/nowhere and model\.checkpoint=.*give one of the two"):
        train.train(make_config(parts, dataset, tmp_path, *values))


@pytest.mark.slow
def test_samples_without_labels_can_still_be_verified(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """All answers are cut off, and the original trains on that; the proof compares every token, so it needs none."""
    values = [*EXPORTED, "export.verify=true", "max_steps=1", "data.max_length=40", "labels=llava_v1_5"]
    train.train(make_config(parts, dataset, tmp_path, *values))
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["label_tokens"] < row["tokens"] and (tmp_path / "export").is_dir()


def test_weights_that_nobody_would_read_are_refused(noise: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """model=tiny draws its weights; a folder with weights was meant to be read."""
    folder = tmp_path / "parts"
    shutil.copytree(parts, folder)
    (folder / "language" / "model.safetensors").write_bytes((noise / "export" / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"model\.language=.* has weights, which model\.random_weights=true"):
        train.train(make_config(folder, dataset, tmp_path / "run"))


@pytest.mark.parametrize("layer", [0, 4, -4])
def test_layer_that_a_tower_has_not(layer: int, parts: Path, dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model\.select_layer={layer}: clip_vision_model has 3 layers"):
        train.train(make_config(parts, dataset, tmp_path, f"model.select_layer={layer}"))


def rows_read(world: World, cfg: Config) -> dict[str, list[tuple[int, int]]]:
    """Which rows of every stored tensor this rank reads while it builds its part of the model."""
    read: dict[str, list[tuple[int, int]]] = {}
    rows = StoredTensor.rows

    def watched(self: StoredTensor, begin: int, end: int) -> torch.Tensor:
        read.setdefault(self.name, []).append((begin, end))
        return rows(self, begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTensor, "rows", watched)
        train.build_state(cfg, Parallelism.of(cfg, world))
    return read


@pytest.mark.ranks
def test_a_rank_reads_its_own_rows_and_no_others(
    noise: Path, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Sharded weights are read once by all ranks together; no rank ever holds a whole one."""
    reads = pools[4].run(rows_read, make_config(parts, dataset, tmp_path, *start(noise), "sharding=zero3"))
    stored = weights(noise / "export")
    vocabulary = json.loads((noise / "export" / "llava_fsdp.json").read_text())["vocab_size"]
    for name, tensor in stored.items():
        rows = vocabulary if "embed_tokens" in name or "lm_head" in name else tensor.shape[0]
        ranges = [r for read in reads for r in read[name] if r[0] < r[1]]
        if "vision_tower" in name:  # frozen and whole on every rank; one of them digests it for the fingerprint
            assert ranges == [(0, rows)] * 5
        else:
            assert [i for begin, end in sorted(ranges) for i in range(begin, end)] == list(range(rows)), name
            assert max(end - begin for begin, end in ranges) == -(-rows // 4), name


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, final = tmp_path / "export.tmp", tmp_path / "export"
    (staged / "tower").mkdir(parents=True)
    for name in ("model.safetensors", "tower/config.json"):
        (staged / name).write_text(name)
    forced: list[int] = []
    fsync, rename = os.fsync, os.rename

    def seen(descriptor: int) -> None:
        forced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def last(source: Path, target: Path) -> None:
        assert {path.stat().st_ino for path in (staged, *staged.rglob("*"))} == set(forced)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(os, "rename", last)
    publish_folder(staged, final)
    assert final.is_dir() and tmp_path.stat().st_ino in forced
