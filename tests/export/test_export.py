"""The export entry: what it reads, what it writes, what it refuses, and that its proof can fail."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forged import forge_facts, forge_notes, swap_in_exports
from reference import EXPORTED, outcome
from safetensors.torch import load_file, save_file
from small import conversion, make_config, write_json, write_parts
from tiers import slow_after
from transformers import AutoProcessor, LlavaForConditionalGeneration
from weights import same, weights

from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.main import export
from llava_fsdp.export.write import formats, weights_writer
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.sources.pretrained_config import read_model
from llava_fsdp.model.weights.weight_names import original_name, ours
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, ModelError
from llava_fsdp.train import main as train

TOWER = "vision=some/tower"
STEPS = ["max_steps=2", "checkpoint.every=1", *EXPORTED]


@pytest.fixture(scope="module")
def run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of stage 2 with a checkpoint after each, exported in fp32."""
    folder = tmp_path_factory.mktemp("run")
    train.train(make_config(parts, dataset, folder, *STEPS))
    return folder


@pytest.fixture(scope="module")
def llava(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in the original's format."""
    return export(conversion(run, tmp_path_factory.mktemp("llava") / "model", "format=llava"))


def changed(folder: Path, to: Path, **keys: object) -> Path:
    """A copy with other keys in its config.json, as if it had been written so; None removes one."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | keys
    write_json(to / "config.json", {k: v for k, v in config.items() if v is not None})
    forge_notes(to)
    return to


def test_checkpoint_gives_what_the_run_exports(run: Path, tmp_path: Path) -> None:
    """Trained weights from the checkpoint, frozen ones drawn again, beside the same files."""
    made = export(conversion(run / "checkpoints" / "step-000002", tmp_path / "made"))
    assert same(weights(made), weights(run / "export"))
    for file in (run / "export").iterdir():
        if file.name not in ("model.safetensors", "llava_fsdp.json"):
            assert (made / file.name).read_bytes() == file.read_bytes(), file.name
    first = export(conversion(run / "checkpoints" / "step-000001", tmp_path / "first", "verify=false"))
    assert not same(weights(first), weights(made))
    assert json.loads((first / "llava_fsdp.json").read_text())["step"] == 1


def test_run_means_its_newest_state(run: Path, tmp_path: Path) -> None:
    """The export, where it is as new and has the dtype; else the newest checkpoint."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    tensors = weights(copied / "export")
    marked = {**tensors, "language_model.model.norm.weight": tensors["language_model.model.norm.weight"] + 1}
    save_file(marked, copied / "export" / "model.safetensors", metadata={"format": "pt"})
    forge_notes(copied / "export")
    assert same(weights(export(conversion(copied, tmp_path / "a", "verify=false"))), marked)
    forge_notes(copied / "export", dtype="bf16")
    assert same(weights(export(conversion(copied, tmp_path / "b", "dtype=fp32", "verify=false"))), tensors)
    forge_notes(copied / "export", dtype="fp32", step=1)
    assert same(weights(export(conversion(copied, tmp_path / "c", "verify=false"))), tensors)
    shutil.rmtree(copied / "checkpoints")
    assert same(weights(export(conversion(copied, tmp_path / "d", "verify=false"))), marked)
    shutil.rmtree(copied / "export")
    with pytest.raises(CheckpointError, match=r"run its command again.*it has no checkpoint either"):
        export(conversion(copied, tmp_path / "e"))


def test_exports_cache_though_training_does_not(llava: Path, run: Path) -> None:
    """Training turns the cache of keys and values off, and whoever loads an export generates with one."""
    cfg = read_model(run / "export")
    found = find_parts(cfg)
    model = build_llava(found, cfg, torch.float32)
    assert model.language_model.config.use_cache is False
    assert json.loads((run / "export" / "config.json").read_text())["text_config"]["use_cache"] is True
    assert LlavaForConditionalGeneration.from_pretrained(run / "export").config.text_config.use_cache is True
    assert json.loads((llava / "config.json").read_text())["use_cache"] is True


def test_original_format_of_a_run(llava: Path, run: Path, parts: Path, tmp_path: Path) -> None:
    """The original's names, rows and keys; back in transformers' format it is the run's own export."""
    config = json.loads((llava / "config.json").read_text())
    assert config["model_type"] == "llava_llama" and config["architectures"] == ["LlavaLlamaForCausalLM"]
    assert config["mm_vision_tower"] == str(parts / "vision") and config["image_aspect_ratio"] == "pad"
    assert config["mm_use_im_patch_token"] is False and "unfreeze_mm_vision_tower" not in config
    vocabulary = json.loads((parts / "language" / "config.json").read_text())["vocab_size"]
    expected = {original_name(n, "mlp2x_gelu"): t for n, t in outcome(run).weights.items()}
    cut = {n: t[:vocabulary] if "embed_tokens" in n or "lm_head" in n else t for n, t in expected.items()}
    assert same(weights(llava), cut)
    back = export(conversion(llava, tmp_path / "back"))
    assert same(weights(back), weights(run / "export"))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        kept = back / "original" / name
        assert kept.is_file() and kept.read_bytes() == (llava / name).read_bytes(), "for the way back"


@pytest.mark.slow
def test_training_starts_from_the_original_format(llava: Path, run: Path, dataset: Path, tmp_path: Path) -> None:
    """A folder of the original's with its tower's configuration beside it: nothing else is read."""
    start = [f"model.checkpoint={llava}", "model.random_weights=false", "model.vision=no/tower", "max_steps=1"]
    train.train(make_config(tmp_path / "none", dataset, tmp_path / "on", *EXPORTED, *start))
    before, after = outcome(run).weights, outcome(tmp_path / "on").weights
    assert all(torch.equal(before[n], after[n]) for n in before), "the first step's learning rate is 0"
    assert (tmp_path / "on" / "export" / "original" / "config.json").is_file()


@pytest.mark.slow
def test_projector_of_a_stage_1_run(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Written from a checkpoint, it starts stage 2 with the same bits."""
    values = ["max_steps=1", "checkpoint.every=1"]
    train.train(make_config(parts, dataset, tmp_path / "one", *values, stage="pretrain"))
    step = tmp_path / "one" / "checkpoints" / "step-000001"
    made = export(conversion(step, tmp_path / "projector", "format=projector"))
    config = json.loads((made / "config.json").read_text())
    assert config["tune_mm_mlp_adapter"] is True and config["image_aspect_ratio"] == "square"
    stored = torch.load(made / "mm_projector.bin", weights_only=True)
    assert list(stored) == [f"model.mm_projector.{n}.{k}" for n in (0, 2) for k in ("weight", "bias")]
    cfg = make_config(
        parts, dataset, tmp_path / "two", *EXPORTED, f"model.projector={made / 'mm_projector.bin'}", "max_steps=1"
    )
    train.train(cfg)
    after = outcome(tmp_path / "two").weights
    assert all(torch.equal(after[ours(n)], t) for n, t in stored.items())


def as_transformers_saves(folder: Path, to: Path) -> None:
    LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).save_pretrained(to)
    AutoProcessor.from_pretrained(folder).save_pretrained(to)


def in_memory_names(folder: Path, to: Path, tower: str) -> None:
    shutil.copytree(folder, to)
    names = {
        n: ours(n) if n.endswith("lm_head.weight") else "model." + ours(n).replace("vision_tower.", tower)
        for n in weights(to)
    }
    save_file({names[n]: t for n, t in weights(to).items()}, to / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def like_the_hub(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A language model without a row to spare, as Vicuna: its folder, and an export without our notes."""
    folder = tmp_path_factory.mktemp("hub")
    parts = write_parts(folder / "parts", spare_rows=0)
    train.train(make_config(parts, dataset, folder / "run", *EXPORTED, "max_steps=1"))
    (folder / "run" / "export" / "llava_fsdp.json").unlink()
    return parts / "language", folder / "run" / "export"


@pytest.mark.parametrize("kind", slow_after(1, ["saved by transformers", "in memory", "in memory, older tower", "bin"]))
def test_transformers_folders_as_users_have_them(kind: str, like_the_hub: tuple[Path, Path], tmp_path: Path) -> None:
    """Every naming; 64 rows more than were trained, and two tokens; preprocessing where transformers puts it."""
    language, hub = like_the_hub
    folder = tmp_path / "hub"
    if kind == "saved by transformers":
        as_transformers_saves(hub, folder)
        assert not (folder / "preprocessor_config.json").exists()
    elif kind.startswith("in memory"):
        in_memory_names(hub, folder, "vision_tower.vision_model." if "older" in kind else "vision_tower.")
    else:
        shutil.copytree(hub, folder)
    if kind == "bin":
        torch.save(weights(folder), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    made = export(conversion(folder, tmp_path / "made", "format=llava", TOWER))
    size = open_tokenizer(language).size
    expected = {original_name(ours(n), "mlp2x_gelu"): t for n, t in weights(hub).items()}
    assert same(
        weights(made), {n: t[:size] if "embed_tokens" in n or "lm_head" in n else t for n, t in expected.items()}
    )
    config = json.loads((made / "config.json").read_text())
    assert config["mm_vision_tower"] == "some/tower" and config["image_aspect_ratio"] == "pad"
    assert config["vocab_size"] == size == open_tokenizer(made).size
    assert (made / "vision_tower" / "preprocessor_config.json").is_file()
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    assert "<image>" not in json.dumps(tokenizer) and isinstance(tokenizer["model"]["merges"][0], str)
    assert tokenizer["pre_tokenizer"]["pretokenizers"][0]["add_prefix_space"] is True, "tokenizers 0.15 asks for it"
    text = "what colour is  the circle\n"
    assert open_tokenizer(made).encode(text) == open_tokenizer(language).encode(text)
    assert same(weights(export(conversion(made, tmp_path / "back", "verify=false"))), weights(hub))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", pytest.param("mlp3x_gelu", marks=pytest.mark.slow), "identity"])
def test_projectors_that_transformers_has_not(kind: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    shutil.copytree(parts, folder)
    if kind == "identity":
        vision = json.loads((folder / "vision" / "config.json").read_text())
        write_json(folder / "vision" / "config.json", {**vision, "hidden_size": 36})
    values = [f"model.projector_type={kind}", "max_steps=1", "export.enabled=false"]
    train.train(make_config(folder, dataset, tmp_path / "run", *values))
    made = export(conversion(tmp_path / "run", tmp_path / "made", "format=llava"))
    names = sorted(n for n in weights(made) if "mm_projector" in n and n.endswith("weight"))
    expected = {"linear": ["model.mm_projector.weight"], "identity": []}
    assert names == expected.get(kind, [f"model.mm_projector.{n}.weight" for n in (0, 2, 4)])
    again = export(conversion(made, tmp_path / "again", "format=llava", "verify=false"))
    assert same(weights(again), weights(made))
    assert json.loads((again / "config.json").read_text()) == json.loads((made / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"transformers' LLaVA has no {kind} projector; choose format=llava"):
        export(conversion(made, tmp_path / "hf"))
    assert not (tmp_path / "hf").exists() and not (tmp_path / "hf.tmp").exists()
    if kind == "identity":
        with pytest.raises(ConfigError, match="an identity projector has no weights"):
            export(conversion(made, tmp_path / "p", "format=projector"))
        return
    made = export(conversion(made, tmp_path / "p", "format=projector"))
    assert sorted(n for n in torch.load(made / "mm_projector.bin", weights_only=True) if n.endswith("weight")) == names


@pytest.mark.slow
def test_dtypes(llava: Path, tmp_path: Path) -> None:
    rounded = export(conversion(llava, tmp_path / "a", "format=llava", "dtype=bf16"))
    assert all(torch.equal(t.bfloat16(), weights(rounded)[n]) for n, t in weights(llava).items())
    assert {t.dtype for t in weights(rounded).values()} == {torch.bfloat16}
    assert json.loads((rounded / "config.json").read_text())["torch_dtype"] == "bfloat16"
    kept = export(conversion(rounded, tmp_path / "b", "verify=false"))
    assert {t.dtype for t in weights(kept).values()} == {torch.bfloat16}
    assert json.loads((kept / "config.json").read_text())["dtype"] == "bfloat16"
    widened = export(conversion(kept, tmp_path / "c", "format=llava", "dtype=fp32", "verify=false"))
    assert all(torch.equal(t.float(), weights(widened)[n]) for n, t in weights(rounded).items())


@pytest.mark.slow
def test_buffers_that_the_original_saved_are_left_out(llava: Path, tmp_path: Path) -> None:
    """Older releases save position ids and rotary frequencies, which every program computes."""
    folder = tmp_path / "older"
    shutil.copytree(llava, folder)
    more = {
        "model.vision_tower.vision_tower.vision_model.embeddings.position_ids": torch.arange(5)[None],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(3),
    }
    save_file({**weights(llava), **more}, folder / "model.safetensors", metadata={"format": "pt"})
    forge_notes(folder)
    assert same(weights(export(conversion(folder, tmp_path / "made", "format=llava"))), weights(llava))


@pytest.mark.slow
def test_tower_outside(llava: Path, run: Path, tmp_path: Path) -> None:
    """An original's folder without its tower reads it from where it names it, or where it is told."""
    whole = weights(llava)
    prefix = "model.vision_tower.vision_tower."
    folder = tmp_path / "models" / "llava-without"
    shutil.copytree(llava, folder)
    shutil.move(folder / "vision_tower", tmp_path / "models" / "tower")
    inside = {n.removeprefix(prefix): t for n, t in whole.items() if n.startswith(prefix)}
    save_file(inside, tmp_path / "models" / "tower" / "model.safetensors")
    save_file({n: t for n, t in whole.items() if n.removeprefix(prefix) not in inside}, folder / "model.safetensors")
    forge_notes(folder)
    told = export(conversion(folder, tmp_path / "told", f"vision={tmp_path / 'models' / 'tower'}", "verify=false"))
    assert same(weights(told), weights(run / "export"))
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "mm_vision_tower": "tower"})
    forge_notes(folder)
    assert same(weights(export(conversion(folder, tmp_path / "beside"))), weights(run / "export"))
    write_json(folder / "config.json", {**config, "mm_vision_tower": "nowhere"})
    forge_notes(folder)
    with pytest.raises(ConfigError, match="mm_vision_tower=nowhere, which is no folder here; give the tower with vis"):
        export(conversion(folder, tmp_path / "none"))


def test_tower_inside_wins(llava: Path, run: Path, tmp_path: Path) -> None:
    """The original reads the tower that it names, whatever was trained; we read what the folder holds."""
    folder = tmp_path / "model"
    shutil.copytree(llava, folder)
    shutil.move(folder / "vision_tower", tmp_path / "tower")
    prefix = "model.vision_tower.vision_tower."
    other = {n.removeprefix(prefix): t + 1 for n, t in weights(llava).items() if n.startswith(prefix)}
    save_file(other, tmp_path / "tower" / "model.safetensors")
    forge_notes(folder)
    made = export(conversion(folder, tmp_path / "made", f"vision={tmp_path / 'tower'}"))
    assert same(weights(made), weights(run / "export"))


@pytest.mark.parametrize(
    ("source", "keys", "message"),
    [
        ("llava", {"s2": True}, "has s2=True; only False is supported"),
        ("llava", {"model_type": "llava_mpt"}, "=llava_mpt; of the original's models, llava_llama is supported"),
        ("llava", {"image_aspect_ratio": "highres"}, "=highres; give image_aspect_ratio=square or pad"),
        ("llava", {"vocab_size": 99}, r"lm_head\.weight|embed_tokens\.weight has shape"),
        ("hf", {"model_type": "vipllava"}, "has no weights for model.multi_modal_projector.projector_layernorm"),
        ("hf", {"vision_feature_layer": [-2, -1]}, r"takes tower layers \[-2, -1\]; only one is supported"),
    ],
)
def test_other_models_are_refused(
    source: str, keys: dict[str, object], message: str, llava: Path, run: Path, tmp_path: Path
) -> None:
    folder = changed(llava if source == "llava" else run / "export", tmp_path / "other", **keys)
    if source == "llava":
        (folder / "llava_fsdp.json").unlink()
    if "vocab_size" in keys:  # more rows in the file are rows of an export; fewer are another model
        write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"vocab_size": 9999})
    with pytest.raises(ModelError, match=message):
        export(conversion(folder, tmp_path / "made", "format=llava" if source == "hf" else "format=hf"))
    assert not (tmp_path / "made").exists() and not (tmp_path / "made.tmp").exists()


def test_the_originals_first_name(llava: Path, run: Path, tmp_path: Path) -> None:
    """LLaVA 1.0 called its model_type `llava`, as transformers calls another one."""
    folder = changed(llava, tmp_path / "older", model_type="llava")
    assert same(weights(export(conversion(folder, tmp_path / "made"))), weights(run / "export"))


def test_a_weight_without_a_place_is_refused(llava: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(llava, folder)
    save_file({**weights(llava), "model.image_newline": torch.zeros(36)}, folder / "model.safetensors")
    forge_notes(folder)
    with pytest.raises(ModelError, match=r"1 weights that this model has no place for, image_newline"):
        export(conversion(folder, tmp_path / "made"))


def test_projector_with_rows_of_the_vocabulary_is_refused(parts: Path, dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "mm_projector.bin"
    torch.save({"model.mm_projector.0.weight": torch.zeros(3), "model.embed_tokens.weight": torch.zeros(3)}, file)
    cfg = make_config(parts, dataset, tmp_path / "run", f"model.projector={file}")
    with pytest.raises(ModelError, match=r"holds model\.embed_tokens\.weight beside a projector; mm_use_im_start_end"):
        train.train(cfg)


def test_a_projector_alone_needs_a_language_model(llava: Path, tmp_path: Path) -> None:
    made = export(conversion(llava, tmp_path / "projector", "format=projector", "verify=false"))
    with pytest.raises(ConfigError, match="holds a projector alone; give the language model with language=PATH"):
        export(conversion(made, tmp_path / "made"))


@pytest.mark.parametrize("form", slow_after(1, ["hf", "llava", "projector"]))
def test_the_proof_can_fail(form: str, llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that puts two weights in each other's place: nothing has the name that was asked for."""
    q, k = "language_model.layers.0.self_attn.q_proj.weight", "language_model.layers.1.self_attn.q_proj.weight"
    if form == "projector":
        monkeypatch.setattr(
            weights_writer, "save_file", lambda t, f, metadata: save_file({n: -v for n, v in t.items()}, f)
        )
    elif form == "hf":
        swap_in_exports(monkeypatch, q, k)
    else:
        rename = formats.original_name
        monkeypatch.setattr(formats, "original_name", lambda n, *a, **kw: rename({q: k, k: q}.get(n, n), *a, **kw))
    with pytest.raises(ModelError, match=r"but its logits differ by(.|\n)*was not made; .*made\.tmp has what was wri"):
        export(conversion(llava, tmp_path / "made", f"format={form}"))
    assert not (tmp_path / "made").exists()


def test_target(llava: Path, tmp_path: Path) -> None:
    """What is there stays, unless it is a model that may be replaced and that nothing is read from."""
    source = tmp_path / "source"
    shutil.copytree(llava, source)
    taken = tmp_path / "taken"
    write_json(taken / "notes.json", {})
    with pytest.raises(ConfigError, match="is not empty; give another folder, or replace it with overwrite=true"):
        export(conversion(source, taken))
    with pytest.raises(ConfigError, match="is not a model folder, so overwrite=true keeps it"):
        export(conversion(source, taken, "overwrite=true"))
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        export(conversion(source, taken / "notes.json"))
    for to in (source, tmp_path):
        shutil.copyfile(llava / "config.json", to / "config.json")
        with pytest.raises(ConfigError, match=r"would replace .*, which holds source="):
            export(conversion(source, to, "overwrite=true"))
    write_json(taken / "config.json", {})
    assert (taken / "notes.json").is_file()
    export(conversion(source, taken, "overwrite=true", "verify=false"))
    assert not (taken / "notes.json").exists() and (taken / "model.safetensors").is_file()
    (tmp_path / "empty").mkdir()
    export(conversion(source, tmp_path / "empty", "format=projector", "verify=false"))


def test_other_frozen_weights_are_noticed(run: Path, parts: Path, tmp_path: Path) -> None:
    """A checkpoint holds what trains; the rest must be what the run had."""
    step = tmp_path / "step-000002"
    shutil.copytree(run / "checkpoints" / "step-000002", step)
    forge_facts(step, lambda facts: facts["config"].update(seed=facts["config"]["seed"] + 1))  # draws the frozen tower
    with pytest.raises(CheckpointError, match="was written by a run with other frozen weights"):
        export(conversion(step, tmp_path / "made"))


def test_other_versions_configuration(run: Path, tmp_path: Path) -> None:
    step = tmp_path / "step-000002"
    shutil.copytree(run / "checkpoints" / "step-000002", step)
    forge_facts(step, lambda facts: facts["config"]["optim"].pop("lr"))
    with pytest.raises(CheckpointError, match=r"a configuration of another version: optim\.lr is not set"):
        export(conversion(step, tmp_path / "made"))


def test_without_a_name_for_the_tower(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    shutil.copytree(run / "export", folder)
    (folder / "llava_fsdp.json").unlink()
    with pytest.raises(ConfigError, match=r"name their vision tower, and the source does not: give vision=NAME"):
        export(conversion(folder, tmp_path / "made", "format=llava"))


@pytest.mark.e2e
def test_command(llava: Path, tmp_path: Path) -> None:
    """As it is typed: one line at the end, and nothing on standard output."""
    command = [sys.executable, "-m", "llava_fsdp.export", f"source={llava}", f"to={tmp_path / 'a, b'}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr.splitlines()[-1].endswith("its logits are the source's")
    assert (tmp_path / "a, b" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["flat", "spatial"])
def test_tiles_that_transformers_does_not_join_so(merge: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """They go to the original's format alone."""
    tiled = ["data.image_aspect_ratio=anyres", f"model.patch_merge={merge}", "max_steps=1"]
    with pytest.raises(ConfigError, match=f"model.patch_merge={merge} has no equal in transformers"):
        make_config(parts, dataset, tmp_path / "run", *EXPORTED, *tiled)
    train.train(make_config(parts, dataset, tmp_path / "run", *tiled))
    with pytest.raises(ConfigError, match=f"=anyres with patch_merge={merge} has no equal .* choose format=llava"):
        export(conversion(tmp_path / "run", tmp_path / "hf"))
    made = export(conversion(tmp_path / "run", tmp_path / "made", "format=llava"))
    assert json.loads((made / "config.json").read_text())["mm_patch_merge_type"] == merge


@pytest.mark.slow
def test_a_model_of_tiles_goes_to_the_original(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The original's folder has their grids and the end of a line."""
    tiled = ["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad", "max_steps=2"]
    train.train(make_config(parts, dataset, tmp_path / "run", *tiled))
    made = export(conversion(tmp_path / "run", tmp_path / "made", "format=llava"))
    config = json.loads((made / "config.json").read_text())
    assert (config["image_aspect_ratio"], config["mm_patch_merge_type"]) == ("anyres", "spatial_unpad")
    assert config["image_grid_pinpoints"] == [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    assert weights(made)["model.image_newline"].any()
    again = export(conversion(made, tmp_path / "again", "format=llava", "verify=false"))
    assert same(weights(again), weights(made))


def test_what_is_written_first_replaces_nothing_of_the_users(llava: Path, tmp_path: Path) -> None:
    """`TO.tmp` may be a folder of the user's, or the very source."""
    (tmp_path / "made.tmp").mkdir()
    (tmp_path / "made.tmp" / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"made\.tmp first, which exists and is not from an export"):
        export(conversion(llava, tmp_path / "made"))
    assert (tmp_path / "made.tmp" / "precious.txt").read_text() == "mine"
    shutil.copytree(llava, tmp_path / "other.tmp")
    with pytest.raises(ConfigError, match=r"would replace .*other\.tmp, which holds source="):
        export(conversion(tmp_path / "other.tmp", tmp_path / "other"))
    assert (tmp_path / "other.tmp" / "config.json").is_file()


def test_a_projector_in_another_dtype(llava: Path, tmp_path: Path) -> None:
    """Both files of it, and what is said beside them."""
    made = export(conversion(llava, tmp_path / "made", "format=projector", "dtype=bf16", "verify=false"))
    whole = {n: t for n, t in weights(llava).items() if "mm_projector" in n}
    for stored in (
        torch.load(made / "mm_projector.bin", weights_only=True),
        load_file(made / "mm_projector.safetensors"),
    ):
        assert stored.keys() == whole.keys()
        assert all(t.dtype == torch.bfloat16 and torch.equal(t, whole[n].bfloat16()) for n, t in stored.items())
    assert json.loads((made / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((made / "llava_fsdp.json").read_text())["dtype"] == "bf16"


def test_a_checkpoint_without_what_its_run_trained_is_refused(run: Path, tmp_path: Path) -> None:
    """A weight that is trained, and that no file of the checkpoint has, would be that of the base."""
    step = tmp_path / "step-000002"
    shutil.copytree(run / "checkpoints" / "step-000002", step)
    forge_facts(step, lambda facts: facts["trainable"].append("vision_tower.embeddings.class_embedding"))
    with pytest.raises(CheckpointError):
        export(conversion(step, tmp_path / "made", "verify=false"))


def test_nothing_is_left_of_an_export_that_fails(llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is being written; what was there before stays."""

    def fails(form: object, source: object, weights: object, staged: Path, notes: object) -> None:
        staged.mkdir()
        (staged / "half").write_text("x")
        raise ModelError("a weight cannot be read")

    monkeypatch.setattr("llava_fsdp.export.main.write_folder", fails)
    write_json(tmp_path / "made" / "config.json", {})
    with pytest.raises(ModelError):
        export(conversion(llava, tmp_path / "made", "overwrite=true"))
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and (tmp_path / "made" / "config.json").is_file()
