"""Adapters in files: of peft, of the original LLaVA, and ours, which both load.

A folder holds `adapter_config.json` and `adapter_model.safetensors` (or `.bin`), peft's, and what else was trained in
`non_lora_trainables.safetensors` or `.bin` (LLaVA train.py:974-984): the projector, biases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llava_fsdp.config import LoraConfig
from llava_fsdp.errors import ConfigError, ModelError
from llava_fsdp.log import log
from llava_fsdp.model.files import StoredTensor, open_file
from llava_fsdp.model.lora import LORA_B, is_adapter, module_of, row_lengths
from llava_fsdp.model.names import ours_in_adapter
from llava_fsdp.untrusted import foreign, read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
OTHERS_FILES = ("non_lora_trainables.safetensors", "non_lora_trainables.bin")
FOLDER = "adapter"
"""In a run, and in each of its checkpoints."""


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter as it was found; nothing is read of its tensors yet."""

    folder: Path
    settings: dict[str, Any]
    """adapter_config.json"""
    tensors: dict[str, StoredTensor]
    """All, by the names of our parameters."""

    @property
    def scaling_settings(self) -> dict[str, Any]:
        """What must be the same for the same weights to mean the same, by our keys."""
        return {
            "r": self.settings.get("r"),
            "alpha": self.settings.get("lora_alpha"),
            "use_dora": bool(self.settings.get("use_dora", False)),
            "use_rslora": bool(self.settings.get("use_rslora", False)),
        }


def is_adapter_folder(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def find_adapter(name: str, key: str) -> Path:
    """The adapter's own folder; a run stands for what it saved at its end.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path(name), Path(name) / FOLDER):
        if is_adapter_folder(folder):
            return folder
    raise ConfigError(
        f"{key}={name} has no {ADAPTER_CONFIG}; give the folder of an adapter, or a run or a checkpoint that holds one"
    )


def open_adapter(folder: Path) -> AdapterFolder:
    """
    Raises:
        ModelError: it is no LoRA adapter, a file of it is missing, or it adapts what has no adapters here.
    """
    settings = read_json(folder / ADAPTER_CONFIG)
    with foreign(f"{folder / ADAPTER_CONFIG} is damaged"):
        check_kind(settings, folder)
    file = next((folder / n for n in ADAPTER_FILES if (folder / n).is_file()), None)
    if file is None:
        raise ModelError(f"{folder} has an {ADAPTER_CONFIG}, but none of {', '.join(ADAPTER_FILES)}")
    tensors = dict(open_file(file))
    others = next((folder / n for n in OTHERS_FILES if (folder / n).is_file()), None)
    tensors |= open_file(others) if others is not None else {}
    return AdapterFolder(folder, settings, {ours_in_adapter(name): tensor for name, tensor in tensors.items()})


def check_kind(settings: dict[str, Any], folder: Path) -> None:
    """Raises ModelError where weights would mean something else than LoRA with one rank and one scale for all."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder} is a {kind} adapter; only LoRA is read")
    for key in ("rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save", "layer_replication"):
        if settings.get(key):
            raise ModelError(f"{folder / ADAPTER_CONFIG} has {key}={json.dumps(settings[key])}, which is not supported")


def started_from(found: AdapterFolder, model: nn.Module, cfg: LoraConfig) -> dict[str, StoredTensor]:
    """What a training goes on from: every adapter of this model, and what else was trained beside them.

    Raises:
        ConfigError: the configuration has another rank or scale.
        ModelError: the adapter is of another model, or of other modules.
    """
    ours = {"r": cfg.r, "alpha": cfg.alpha, "use_dora": cfg.use_dora, "use_rslora": cfg.use_rslora}
    different = {k: v for k, v in found.scaling_settings.items() if v != ours[k]}
    if different:
        cure = " ".join(f"model.lora.{key}={str(value).lower()}" for key, value in different.items())
        raise ConfigError(
            f"model.lora.checkpoint={found.folder} was trained with {different}, and this configuration says "
            f"{ {key: ours[key] for key in different} }; give {cure}"
        )
    wanted = {name for name, _ in model.named_parameters()}
    tensors = {n: t for n, t in found.tensors.items() if n in wanted}
    check_strangers(found, found.tensors.keys() - wanted)
    missing = sorted(n for n in wanted - tensors.keys() if is_adapter(n))
    if missing:
        raise ModelError(
            f"model.lora.checkpoint={found.folder} has no adapter for {module_of(missing[0])} and "
            f"{len({module_of(n) for n in missing}) - 1} other modules of this model; is it of another model, or of "
            "other parts than model.train?"
        )
    return tensors


def check_strangers(found: AdapterFolder, names: set[str]) -> None:
    """An adapter of a module that has none here may go only where it does nothing: the original puts some into towers
    that run without gradients, and their B is still 0.

    Raises:
        ModelError: it would be lost.
    """
    for name in sorted(names):
        if not is_adapter(name):
            raise ModelError(f"{found.folder} has {name}, which this model has not; is it of another model?")
        b = found.tensors.get(module_of(name) + LORA_B)
        if b is None or torch.count_nonzero(b.rows(0, b.shape[0])):
            raise ModelError(
                f"{found.folder} adapts {module_of(name)}, which has no adapter here; does model.train name its part "
                "(model.train=[projector,language,vision])?"
            )
    if names:
        modules = {module_of(name) for name in names}
        log().warning(
            "%s: the adapters of %d modules, %s for one, have learnt nothing (B is 0) and are left out",
            found.folder, len(modules), min(modules),
        )  # fmt: skip


@dataclass(frozen=True)
class RowLengths:
    """DoRA's magnitudes of an adapter that adds nothing yet: the lengths of the weight's rows."""

    weight: Any
    """Where the weight comes from."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape[:1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return row_lengths(self.weight.rows(begin, end))


def unchanged_modules(tensors: Mapping[str, Any]) -> list[str]:
    """Adapted modules whose B is still 0, so that they add nothing.

    Args:
        tensors: where an adapter's parameters are, by their names.
    """
    found = {n: t for n, t in tensors.items() if n.endswith(LORA_B)}
    return sorted(module_of(n) for n, t in found.items() if not torch.count_nonzero(t.rows(0, t.shape[0])))
