"""A later training begins with a run that could not have an export: what the messages name is run here, and works."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import changed_parts, conversion, make_config, write_json
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import newest_alone
from llava_fsdp.export.main import export
from llava_fsdp.model.adapters.lora_files import find_adapter
from llava_fsdp.model.sources.pretrained import (
    NoProjector,
    UnfinishedRun,
    find_projector,
    read_config,
    resolve,
    resolve_model,
)
from llava_fsdp.model.weights.weight_names import ours
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.provenance import NOTES
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.runtime.files.unfinished import earlier_export
from llava_fsdp.train import main as train
from llava_fsdp.train.setup.preflight import warn_if_refused

GEMMA2 = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 6, "pad_token_id": 0}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA3: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
}  # fmt: skip
LINEAR, PLAIN, SHUFFLE = "linear", "mlp2x_gelu", "pixel_shuffle2x_mlp2x_gelu"


def commands(text: str) -> list[list[str]]:
    """The commands `llava-fsdp export` in a message."""
    return [shlex.split(line) for line in re.findall(r"llava-fsdp export (.*)", text)]


def run_command(words: list[str]) -> Path:
    values = dict(word.split("=", 1) for word in words)
    others = [word for word in words if not word.startswith(("source=", "to="))]
    return export(conversion(Path(values["source"]), Path(values["to"]), *others))


def saved_parts(parts: Path, folder: Path, language: dict[str, Any]) -> Path:
    """Parts with weights, whose language model has other values in its configuration."""
    changed_parts(parts, folder, language=language)
    torch.manual_seed(1)
    for part, kind in (("language", AutoModelForCausalLM), ("vision", AutoModel)):
        config = AutoConfig.from_pretrained(folder / part)
        kind.from_config(config, dtype=torch.float32).save_pretrained(folder / part)
    return folder


@pytest.mark.parametrize(
    ("language", "projector", "form"),
    [
        (GEMMA2, PLAIN, None),
        pytest.param(QWEN2, LINEAR, None, marks=pytest.mark.slow),
        pytest.param({}, LINEAR, "llava", marks=pytest.mark.slow),
        pytest.param(QWEN2, PLAIN, "hf", marks=pytest.mark.slow),
        pytest.param(LLAMA3, LINEAR, None, marks=pytest.mark.slow),
        pytest.param(GEMMA2, "mlp3x_gelu", None, marks=pytest.mark.slow),
        pytest.param(QWEN2, SHUFFLE, None, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_stage_2_begins_with_the_projector_of_a_run_without_an_export(
    language: dict[str, Any], projector: str, form: str | None, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """By the run's folder, and found as the run `pretrain` beside the own. Values are equal to the bit. The whole model
    is exported by the command that is named, or none is named."""
    folder, run = saved_parts(parts, tmp_path / "parts", language), tmp_path / "pretrain"
    keys = [f"model.projector_type={projector}", "model.random_weights=false", "max_steps=1"]
    train.train(make_config(folder, dataset, run, *keys, "checkpoint.every=1", stage="pretrain"))
    write_json(run / "run_status.json", {"status": "done", "step": 1})
    said = []
    for given in (str(run), str(run / "export"), "auto"):
        with pytest.raises(NoProjector) as caught:
            find_projector(make_config(folder, dataset, tmp_path / "finetune", *keys, f"model.projector={given}"))
        said.append(str(caught.value))
        assert "stage=pretrain model" not in said[-1]
    found = [commands(text) for text in said]
    assert found[0] == found[1] == found[2] and len(found[0]) == 1
    made = run_command(found[0][0])
    assert made == Path(f"{run}_projector") and all(text.endswith(f"model.projector={made}") for text in said)
    newest = newest_alone(run / "checkpoints")
    assert newest is not None
    trained = saved_weights(newest)
    shuffled = projector == SHUFFLE
    for stored in (load_file(made / "mm_projector.safetensors"), torch.load(made / "mm_projector.bin")):
        values = {name.removeprefix("model.") if shuffled else ours(name): tensor for name, tensor in stored.items()}
        assert values.keys() == {name for name in trained if name.startswith("multi_modal_projector.")}
        assert all(torch.equal(tensor, trained[name].rows(0, len(tensor))) for name, tensor in values.items())
    assert (made / "config.json").is_file() == (form == "llava" or language == {})
    still = ["optim.lr=0", "checkpoint.every=1", f"model.projector={made}"]
    train.train(make_config(folder, dataset, tmp_path / "finetune", *keys, *still))
    after = newest_alone(tmp_path / "finetune" / "checkpoints")
    assert after is not None
    second = saved_weights(after)
    for name, tensor in values.items():
        assert torch.equal(second[name].rows(0, len(tensor)), tensor), name
    other = [f"model.projector={made}", f"model.projector_type={PLAIN if projector != PLAIN else LINEAR}"]
    with pytest.raises(ModelError, match=r"model\.projector="):
        train.train(make_config(folder, dataset, tmp_path / "other", *keys, *other))
    with pytest.raises(ModelError) as refused:
        resolve_model(str(run), "model.checkpoint")
    wholes = commands(str(refused.value))
    if form is None:
        assert not wholes and "model.lora.checkpoint" in str(refused.value)
        for name in ("hf", "llava"):
            with pytest.raises((ConfigError, ModelError), match="format=projector"):
                export(conversion(run, tmp_path / "no", f"format={name}"))
    else:
        assert len(wholes) == 1
        whole = run_command(wholes[0])
        assert str(refused.value).endswith(f"model.checkpoint={whole}")
        assert resolve_model(str(whole), "model.checkpoint") == whole


@pytest.mark.slow
def test_a_run_with_an_adapter_alone_is_told_as_such(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of a model that cannot be exported, whose adapter can be trained on."""
    folder, run = saved_parts(parts, tmp_path / "parts", GEMMA2), tmp_path / "lora"
    keys = ["model.random_weights=false", "model.lora.enabled=true", "model.train=[projector,language]", "max_steps=2"]
    keys += ["export.enabled=true", "export.merge=false"]
    train.train(make_config(folder, dataset, run, *keys))
    write_json(run / "run_status.json", {"status": "done", "step": 2})
    for name in (run, run / "adapter"):
        with pytest.raises(ModelError) as caught:
            resolve_model(str(name), "model.checkpoint")
        said = str(caught.value)
        assert "export.enabled" not in said
        assert not commands(said) and f"model.lora.checkpoint={name}" in said
    with pytest.raises(NoProjector) as no_projector:
        find_projector(make_config(folder, dataset, tmp_path / "next", *keys, f"model.projector={run}"))
    made = run_command(commands(str(no_projector.value))[0])
    assert (made / "mm_projector.safetensors").is_file()
    train.train(make_config(folder, dataset, tmp_path / "next", *keys, f"model.lora.checkpoint={run}"))
    assert (tmp_path / "next" / "adapter").is_dir()


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ({"status": "stopped", "class": "stopped", "exit_code": 75, "reason": "SIGTERM"}, "stopped at step 3: run"),
        (
            {"status": "interrupted", "class": "interrupted", "exit_code": 130, "reason": "SIGINT"},
            "interrupted at step",
        ),
        ({"status": "failed", "class": "model", "exit_code": 3, "reason": "no room"}, r"failed at step 3 \(no room\)"),
        ({"status": "running"}, "was killed after step 3: run its command again"),
    ],
)
def test_every_key_and_every_folder_of_a_run_names_how_it_ended(
    ending: dict[str, Any], said: str, parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With an empty export and with one that was not completed. Of old folders none is read."""
    run = tmp_path / "pretrain"
    saved = run / FOLDER / "step-000003"
    for folder in (saved, run / "export", run / "export.tmp", run / "old-1" / "export"):
        folder.mkdir(parents=True)
        if folder.name.startswith("export") and folder != run / "export":
            write_json(folder / "config.json", {})
            (folder / "mm_projector.bin").touch()
    write_json(run / "run_status.json", ending | {"step": 3})
    for name in (run, run / "export", run / FOLDER, saved):
        cfg = make_config(parts, dataset, tmp_path / "finetune", f"model.projector={name}")
        with pytest.raises(UnfinishedRun, match=said):
            find_projector(cfg)
        with pytest.raises(ModelError, match=said):
            resolve_model(str(name), "model.checkpoint")
    warn_if_refused(make_config(parts, dataset, tmp_path / "finetune", "model.projector=auto"))
    assert re.search(said, caplog.text)
    with pytest.raises(ConfigError, match=said):
        find_adapter(str(run), "model.lora.checkpoint")
    with pytest.raises(ModelError, match=r"model\.checkpoint="):
        read_config(resolve(str(run), "model.language"), "model.language")
    with pytest.raises(ModelError, match=r"export\.tmp"):
        find_projector(make_config(parts, dataset, tmp_path / "finetune", f"model.projector={run / 'export.tmp'}"))


def test_an_export_of_an_earlier_step_is_told(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "step-000007").mkdir(parents=True)
    (tmp_path / "export").mkdir()
    write_json(tmp_path / "export" / NOTES, {"step": 4})
    assert "step 4" in (earlier_export(tmp_path) or "") and "step 7" in (earlier_export(tmp_path) or "")
    write_json(tmp_path / "export" / NOTES, {"step": 7})
    assert earlier_export(tmp_path) is None


def test_a_stopped_run_is_to_be_continued_and_not_to_be_made_again(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Found as the run `pretrain` beside the own, before and after its first checkpoint."""
    run, keys = tmp_path / "pretrain", ["max_steps=1", "model.projector=auto"]
    stopped = {"status": "stopped", "class": "stopped", "exit_code": 75, "step": 1, "reason": "SIGTERM"}
    write_json(run / "run_status.json", stopped)
    cfg = make_config(parts, dataset, tmp_path / "finetune", *keys)
    with pytest.raises(NoProjector, match="run its command again") as caught:
        find_projector(cfg)
    assert "llava-fsdp" not in str(caught.value)
    train.train(make_config(parts, dataset, run, "max_steps=1", "checkpoint.every=1", stage="pretrain"))
    write_json(run / "run_status.json", stopped)
    with pytest.raises(NoProjector, match="run its command again") as caught:
        find_projector(cfg)
    assert "llava-fsdp train" not in str(caught.value)
    (words,) = commands(str(caught.value))
    assert (run_command(words) / "mm_projector.safetensors").is_file()
