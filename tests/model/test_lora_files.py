"""What the files of an adapter may say: whatever would make its weights mean something else is refused."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small import write_json

from llava_fsdp.config import LoraBias, LoraConfig
from llava_fsdp.export.write.adapter_folder import is_projector, prove_adapter
from llava_fsdp.model.adapters.lora_files import (
    AdapterFolder,
    check_changed,
    check_fits,
    check_kind,
    check_meaning,
    check_unknown_tensors,
    open_adapter,
    read_lora,
    unchanged_modules,
    without_idle_tower,
)
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train.final_export import MemoryTensor

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "init_lora_weights": True}
CHANGES = (
    "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save", "layer_replication", "lora_bias",
    "use_qalora", "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
)  # fmt: skip
MODULE = "language_model.layers.0.self_attn.q_proj"
A, B, MAGNITUDE = (f"{MODULE}.lora_{end}.default.weight" for end in ("A", "B", "magnitude_vector"))


def test_a_plain_adapter_is_taken(tmp_path: Path) -> None:
    """Empty values of keys that would change its meaning too."""
    for empty in (None, {}, [], False):
        check_kind({**PLAIN, **dict.fromkeys(CHANGES, empty)}, tmp_path)
    for start in (True, False, "gaussian", "eva", None):
        check_kind({**PLAIN, "init_lora_weights": start}, tmp_path)
    assert read_lora(PLAIN, tmp_path) == LoraConfig(enabled=True, r=3, alpha=5.0, dropout=0.0, bias=LoraBias.none)
    more = {"lora_dropout": 0.25, "bias": "lora_only", "use_dora": True, "use_rslora": True}
    expected = LoraConfig(
        enabled=True, r=3, alpha=5.0, dropout=0.25, bias=LoraBias.lora_only, use_dora=True, use_rslora=True
    )
    assert read_lora({**PLAIN, **more}, tmp_path) == expected
    assert read_lora({**PLAIN, "lora_dropout": 1.0}, tmp_path).dropout == 0


@pytest.mark.parametrize("change", [{}, {"alpha": 4.0}, {"use_dora": True}, {"use_rslora": True}, {"dropout": 0.5}])
def test_settings_are_those_of_the_training(change: dict[str, Any], tmp_path: Path) -> None:
    """All that change what the weights mean."""
    trained = {"alpha": 5.0, "use_dora": False, "use_rslora": False, "dropout": 0.0}
    write_json(tmp_path / "llava_fsdp.json", {"lora": trained | change})
    is_refused = bool(change) and "dropout" not in change
    with pytest.raises(ModelError) if is_refused else nullcontext():
        check_meaning(tmp_path, read_lora(PLAIN, tmp_path))


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_the_meaning_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=key):
        check_kind({**PLAIN, key: True}, tmp_path)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_a_start_that_changes_the_base_is_refused(start: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=start):
        check_kind({**PLAIN, "init_lora_weights": start}, tmp_path)


@pytest.mark.parametrize(
    "values",
    [{"r": v} for v in (0, -1, True, 2.0, "3", None)]
    + [{"lora_alpha": v} for v in (0, -1, True, math.inf, math.nan, "3", None)],
)
def test_what_is_no_rank_and_no_scale_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=next(iter(values))):
        read_lora({**PLAIN, **values}, tmp_path)


def found(folder: Path, others: dict[str, tuple[int, ...]] | None = None, use_dora: bool = True) -> AdapterFolder:
    """An adapter of rank 3 for a weight of 7 x 5, with its magnitude."""
    shapes = {A: (3, 5), B: (7, 3), MAGNITUDE: (7,), f"{MODULE}.base_layer.bias": (7,)} | (others or {})
    tensors: Any = {name: MemoryTensor(torch.zeros(shape)) for name, shape in shapes.items() if shape != (0,)}
    return AdapterFolder(folder, {}, LoraConfig(enabled=True, r=3, use_dora=use_dora), tensors)


@pytest.mark.parametrize(
    "others",
    [
        {A: (3, 6)}, {A: (2, 5)}, {A: (5, 3)}, {B: (6, 3)}, {B: (7, 2)}, {MAGNITUDE: (5,)}, {MAGNITUDE: (0,)},
        {B: (0,)}, {f"{MODULE}.base_layer.bias": (5,)}, {"language_model.extra": (3,)},
    ],
)  # fmt: skip
def test_every_tensor_of_an_adapter_fits_its_base(others: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """A shape of (0,) stands for a tensor that is missing."""
    base = {f"{MODULE}.weight": (7, 5), f"{MODULE}.bias": (7,)}
    check_fits(found(tmp_path), base, "base")
    check_fits(found(tmp_path, {MAGNITUDE: (0,)}, use_dora=False), base, "base")
    with pytest.raises(ModelError):
        check_fits(found(tmp_path, others), base, "base")
    for lacks in ({}, {f"{MODULE}.weight": (35,), f"{MODULE}.bias": (7,)}):
        with pytest.raises(ModelError):
            check_fits(found(tmp_path), lacks, "base")


def test_adapters_are_left_out_only_where_they_do_nothing(tmp_path: Path) -> None:
    """A single element of B that is not 0 is something."""
    idle = found(tmp_path)
    check_unknown_tensors(idle, {A, B})
    learnt = torch.zeros(7, 3)
    learnt[6, 2] = -1e-30
    tensors: Any = {**idle.tensors, B: MemoryTensor(learnt)}
    with pytest.raises(ModelError):
        check_unknown_tensors(AdapterFolder(tmp_path, {}, idle.lora, tensors), {A, B})
    with pytest.raises(ModelError):
        check_unknown_tensors(idle, {f"{MODULE}.base_layer.bias"})


def test_what_lies_with_the_projector() -> None:
    names = ["multi_modal_projector.linear_1.bias", "image_newline", A, f"{MODULE}.base_layer.bias"]
    assert [is_projector(name) for name in names] == [True, True, False, False]


def test_an_adapter_that_is_read_again_is_what_was_written(tmp_path: Path) -> None:
    """Values, dtypes and names, in the files with a pickle and without."""
    newline = "base_model.model.model.image_newline"
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    held = {A: torch.rand(3, 5), B: torch.rand(7, 3), "image_newline": torch.rand(5)}
    write_json(tmp_path / "adapter_config.json", PLAIN)
    save_file(
        {f"{layer}.lora_A.weight": held[A], f"{layer}.lora_B.weight": held[B]}, tmp_path / "adapter_model.safetensors"
    )
    for place in ("non_lora_trainables.safetensors", "non_lora_trainables.bin"):
        save = save_file if place.endswith("safetensors") else torch.save
        save({newline: held["image_newline"]}, tmp_path / place)
    expected: dict[str, Any] = {name: MemoryTensor(tensor) for name, tensor in held.items()}
    prove_adapter(tmp_path, expected)
    nudged = held[B].clone()
    nudged[6, 2] += 1e-6
    for wrong in (
        {B: MemoryTensor(nudged)},
        {A: MemoryTensor(held[A].double())},
        {f"{MODULE}.base_layer.bias": MemoryTensor(torch.zeros(7))},
    ):
        with pytest.raises(ModelError):
            prove_adapter(tmp_path, expected | wrong)
    torch.save({newline: held["image_newline"] + 1}, tmp_path / "non_lora_trainables.bin")
    with pytest.raises(ModelError):
        prove_adapter(tmp_path, expected)


def adapters_of(**values: float) -> dict[str, Any]:
    """The two matrices of an adapter for each module; those of B have this value in one place."""
    tensors: dict[str, Any] = {}
    for name, value in values.items():
        b = torch.zeros(7, 3)
        b[4, 1] = value
        module = name.replace("__", ".")
        tensors[f"{module}.lora_A.default.weight"] = MemoryTensor(torch.ones(3, 5))
        tensors[f"{module}.lora_B.default.weight"] = MemoryTensor(b)
    return tensors


def test_which_adapters_training_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    """None at all is an error, and some of them are a warning."""
    check_changed(adapters_of(a=1.0, b=-1e-30), "x", "train")
    assert caplog.records == []
    some = adapters_of(a=1.0, b=0.0, c=0.0)
    assert unchanged_modules(some) == ["b", "c"]
    check_changed(some, "x", "train")
    assert len(caplog.records) == 1 and "2 of 3 modules" in caplog.text
    with pytest.raises(ModelError, match="all 2 adapted modules"):
        check_changed(adapters_of(a=0.0, b=0.0), "x", "train")


def test_only_idle_adapters_of_a_tower_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With all their matrices; a bias that trained beside them stays."""
    tensors = adapters_of(vision_tower__a=0.0, vision_tower__b=1.0, language_model__c=0.0)
    bias = "vision_tower.a.base_layer.bias"
    opened = AdapterFolder(tmp_path, {}, found(tmp_path).lora, {**tensors, bias: MemoryTensor(torch.ones(7))})
    kept = without_idle_tower(opened)
    assert kept.modules == ["language_model.c", "vision_tower.b"] and bias in kept.tensors
    assert len(kept.tensors) == len(opened.tensors) - 2 and len(caplog.records) == 1
    assert without_idle_tower(kept) is kept and len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_has_its_adapters_and_what_trained_beside_them(kind: str, tmp_path: Path) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    save = save_file if kind == "safetensors" else torch.save
    write_json(tmp_path / "adapter_config.json", PLAIN)
    with pytest.raises(ModelError, match="adapter_model"):
        open_adapter(tmp_path)
    save({"base_model.model.model.image_newline": torch.ones(5)}, tmp_path / f"adapter_model.{kind}")
    with pytest.raises(ModelError, match="no LoRA weights"):
        open_adapter(tmp_path)
    pair = {f"{layer}.lora_A.weight": torch.ones(3, 5), f"{layer}.lora_B.weight": torch.ones(7, 3)}
    save(pair, tmp_path / f"adapter_model.{kind}")
    assert open_adapter(tmp_path).tensors.keys() == {A, B}
    save({"base_model.model.model.image_newline": torch.ones(5)}, tmp_path / f"non_lora_trainables.{kind}")
    opened = open_adapter(tmp_path)
    assert opened.tensors.keys() == {A, B, "image_newline"} and opened.modules == [MODULE]
    assert opened.lora.r == 3 and opened.settings == PLAIN
