"""An adapter is used only with a base whose configuration computes what the base of its training computed, although the
weights are equal. The base is a granite, whose configuration scales embeddings, residuals, attention and logits."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds_of_models import TEXT
from small import conversion, make_config, write_json, write_parts
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from llava_fsdp.chat.open_model import open_model
from llava_fsdp.export.main import export
from llava_fsdp.export.source_model import open_source
from llava_fsdp.model.adapters.base_config import BASE_CONFIG, base_config, differences
from llava_fsdp.model.sources.pretrained import separate_parts
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.provenance import NOTES, read_notes, write_sealed_notes
from llava_fsdp.train import main as train

GRANITE = {
    "logits_scaling": 3.3, "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
    "tie_word_embeddings": False,
}  # fmt: skip
LORA = [
    "model.random_weights=false", "model.lora.r=3", "model.lora.dropout=0", "optim.lr=0.1", "global_batch_size=4",
    "micro_batch_size=4", "optim.warmup_ratio=0", "data.max_length=160", "checkpoint.every=1", "export.enabled=false",
]  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "type": (
        "language", {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "logits_scaling": 1.0},
        r"language\.model_type",
    ),
    "logits": ("language", {"logits_scaling": 9.9}, r"language\.logits_scaling=3\.3, .* 9\.9"),
    "residual": ("language", {"residual_multiplier": 0.7}, r"language\.residual_multiplier=0\.6, .* 0\.7"),
    "rope": ("language", {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}, r"rope_theta"),
    "rope's type": (
        "language", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, r"rope_type",
    ),
    "norm": ("language", {"rms_norm_eps": 0.01}, r"language\.rms_norm_eps"),
    "tower": ("vision", {"hidden_act": "gelu"}, r"vision\.hidden_act=\"quick_gelu\", .*\"gelu\"; .*vision"),
    "tower's norm": ("vision", {"layer_norm_eps": 0.01}, r"vision\.layer_norm_eps"),
}  # fmt: skip
"""Changed configurations: the folder of the part, the changed values, and what the message names."""


@dataclass(frozen=True)
class Made:
    run: Path
    parts: Path
    dataset: Path

    @property
    def adapter(self) -> Path:
        return self.checkpoint / "adapter"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step-000001"

    def train(self, run: Path, *values: str) -> None:
        train.train(make_config(self.parts, self.dataset, run, *LORA, *values, stage="finetune_lora"))


@pytest.fixture(scope="module")
def made(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("granite")
    parts = write_parts(folder / "parts")
    torch.manual_seed(3)
    rows = json.loads((parts / "language" / "config.json").read_text())["vocab_size"]
    granite = AutoConfig.for_model("granite", **(TEXT | GRANITE), vocab_size=rows)
    AutoModelForCausalLM.from_config(granite, dtype=torch.float32).save_pretrained(parts / "language")
    tower = AutoConfig.from_pretrained(parts / "vision")
    AutoModel.from_config(tower, dtype=torch.float32).save_pretrained(parts / "vision")
    found = Made(folder / "run", parts, dataset)
    found.train(found.run, "max_steps=1")
    return found


@contextmanager
def changed(part: Path, values: dict[str, Any]) -> Iterator[None]:
    """The folder of a part has other values in its config.json for a while."""
    file = part / "config.json"
    content = file.read_text()
    write_json(file, json.loads(content) | values)
    try:
        yield
    finally:
        file.write_text(content)


def other_base(made: Made, kind: str, to: Path) -> tuple[str, str]:
    """A copy of a part with changed values: the name of the part, and the folder."""
    part, values, _ = OTHERS[kind]
    shutil.copytree(made.parts / part, to)
    write_json(to / "config.json", json.loads((to / "config.json").read_text()) | values)
    return part, str(to)


@pytest.mark.parametrize("kind", OTHERS)
def test_an_export_refuses_a_base_of_another_configuration(kind: str, made: Made, tmp_path: Path) -> None:
    part, folder = other_base(made, kind, tmp_path / "other")
    key = {"language": "base", "vision": "vision"}[part]
    with pytest.raises(ModelError, match=OTHERS[kind][2]) as caught:
        export(conversion(made.adapter, tmp_path / "to", f"{key}={folder}"))
    assert f"{key}=PATH" in str(caught.value)
    assert folder in str(caught.value)
    assert not (tmp_path / "to").exists()


def exports(source: str) -> Callable[[Made, Path], object]:
    return lambda made, to: open_source(conversion(getattr(made, source), to))


def chats(source: str) -> Callable[[Made, Path], object]:
    return lambda made, to: open_model(str(getattr(made, source)), "vicuna_v1")


COMMANDS: dict[str, Callable[[Made, Path], object]] = {
    "export of an adapter": exports("adapter"),
    "export of a checkpoint": exports("checkpoint"),
    "export of a run": exports("run"),
    "chat and evaluate with an adapter": chats("adapter"),
    "chat and evaluate with a checkpoint": chats("checkpoint"),
    "chat and evaluate with a run": chats("run"),
    "a training that continues an adapter": lambda made, to: made.train(
        to, "max_steps=1", f"model.lora.checkpoint={made.adapter}"
    ),
    "a training that resumes": lambda made, to: made.train(shutil.copytree(made.run, to), "max_steps=2"),
}


SLOW = (
    "a training that resumes",
    "export of a run",
    "chat and evaluate with a checkpoint",
    "chat and evaluate with a run",
    "a training that continues an adapter",
)


@pytest.mark.parametrize("command", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in COMMANDS])
def test_every_command_refuses_a_base_whose_configuration_has_changed(command: str, made: Made, tmp_path: Path) -> None:
    """In its own folder; nothing else changes, and the unchanged base is accepted."""
    for kind in ("type", "logits", "rope", "tower"):
        part, values, said = OTHERS[kind]
        with changed(made.parts / part, values), pytest.raises(ModelError, match=f"is for another base: .*{said}"):
            COMMANDS[command](made, tmp_path / kind)
    COMMANDS[command](made, tmp_path / "same")


def test_the_same_base_is_accepted_from_another_folder(made: Made, tmp_path: Path) -> None:
    """Copied; saved again by transformers; and with other values of keys that change nothing outside of training."""
    copied, saved, other = tmp_path / "copied", tmp_path / "saved", tmp_path / "other"
    for folder in (copied, saved, other):
        shutil.copytree(made.parts / "language", folder)
    AutoModelForCausalLM.from_pretrained(made.parts / "language", dtype=torch.float32).save_pretrained(saved)
    idle = {
        "use_cache": False, "dtype": "bfloat16", "transformers_version": "4.40.0", "attention_dropout": 0.25,
        "pad_token_id": None, "initializer_range": 0.5, "max_position_embeddings": 1024, "_name_or_path": "elsewhere",
        "architectures": None,
    }  # fmt: skip
    write_json(other / "config.json", json.loads((other / "config.json").read_text()) | idle)
    shutil.copytree(made.parts / "vision", tmp_path / "tower")
    AutoModel.from_pretrained(made.parts / "vision", dtype=torch.float32).save_pretrained(tmp_path / "tower")
    for folder in (copied, saved, other):
        words = [f"base={folder}", f"vision={tmp_path / 'tower'}"]
        parts = open_source(conversion(made.adapter, tmp_path / "to", *words)).source.model.parts
        assert (parts.language_folder, parts.vision_folder) == (folder, tmp_path / "tower")


def test_a_folder_that_records_no_configuration_is_read_as_before(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(made.adapter, folder)
    notes = read_notes(folder)
    assert notes.pop(BASE_CONFIG)["language"]["model_type"] == "granite"
    (folder / NOTES).unlink()
    write_sealed_notes(folder, notes)
    for base in (str(made.parts / "language"), other_base(made, "logits", tmp_path / "other")[1]):
        open_source(conversion(folder, tmp_path / "to", f"base={base}"))


def test_positions_count_where_the_rotary_embedding_uses_them(made: Made) -> None:
    """And keys that only one of two versions of transformers has are not compared."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    found = []
    for positions in (512, 1024):
        parts = separate_parts(made.parts / "language", made.parts / "vision")
        parts.language.update({"rope_parameters": rope, "max_position_embeddings": positions})
        found.append(base_config(parts))
    assert differences(*found) == {"language.max_position_embeddings": (512, 1024)}
    assert differences({"language": {"newer": 1, "both": 2}}, {"language": {"older": 3, "both": 2}}) == {}
