"""Read folders with LoRA adapters that peft, the original LLaVA or llava_fsdp has written. peft and the original LLaVA
can load the folders that llava_fsdp writes.

A folder contains peft's files `adapter_config.json` and `adapter_model.safetensors` (or `.bin`). Other trained
parameters (the projector, biases) are in `non_lora_trainables.safetensors` or `.bin` (LLaVA train.py:974-984).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llava_fsdp.config import LoraBias, LoraConfig
from llava_fsdp.model.adapters.lora_names import LORA_A, LORA_B, MAGNITUDE, is_adapter, module_of, without_base
from llava_fsdp.model.weights.tensor_files import StoredTensor, open_file
from llava_fsdp.model.weights.weight_names import in_class, ours_in_adapter
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.provenance import NOTES, check_folder, read_notes
from llava_fsdp.runtime.files.safe_load import library_errors, read_json
from llava_fsdp.runtime.files.unfinished import is_done, is_run, why_no_export
from llava_fsdp.runtime.text.log import log

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
OTHERS_FILES = ("non_lora_trainables.safetensors", "non_lora_trainables.bin")
FOLDER = "adapter"
"""Name of the adapter folder in a run's output folder and in each of its checkpoints."""
TOWER = "vision_tower."
"""Prefix of the names of the vision tower's parameters."""
OTHER_MEANINGS = (
    "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save", "layer_replication", "lora_bias",
    "use_qalora", "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
)  # fmt: skip
"""Keys of peft's adapter_config.json for features that change how the weights are used, and that are not supported."""
OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Values of peft's `init_lora_weights` with which peft changes the base model's weights before training."""
MOST_NAMES = 8
"""Maximum number of modules that a message lists by name."""


@dataclass(frozen=True)
class AdapterFolder:
    """An opened folder with a LoRA adapter. The values of its tensors are read only when they are needed."""

    folder: Path
    settings: dict[str, Any]
    """Contents of adapter_config.json."""
    lora: LoraConfig
    """LoRA settings read from adapter_config.json, such as rank and scale."""
    tensors: dict[str, StoredTensor]
    """All tensors of the folder, by llava_fsdp's parameter names."""

    @property
    def modules(self) -> list[str]:
        """The names of the modules that have LoRA adapters in this folder, sorted."""
        return sorted({module_of(name) for name in self.tensors if is_adapter(name)})


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder itself has a LoRA adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def adapter_folders(name: str) -> tuple[Path, Path]:
    """Return the two paths at which the folder of a LoRA adapter may be: `name` itself, and its subfolder `adapter`,
    which the output folder of a run has. The paths need not exist."""
    return Path(name), Path(name) / FOLDER


def find_adapter(name: str, key: str) -> Path:
    """Return the folder of the LoRA adapter that a setting names: the folder `name` itself or, if it is the output
    folder of a run, the final adapter in it. If neither is an adapter, raise ConfigError about the setting `key`."""
    for folder in adapter_folders(name):
        if is_adapter_folder(folder):
            return folder
    inside = sorted(path.parent for path in Path(name).glob(f"checkpoints/step-*[0-9]/{FOLDER}"))
    if inside:
        raise ConfigError(f"{key}={name} {why_no_export(Path(name))}; or give a checkpoint of it: {key}={inside[-1]}")
    if is_run(Path(name)) and not is_done(Path(name)):
        raise ConfigError(f"{key}={name} has no adapter yet: it {why_no_export(Path(name))}")
    raise ConfigError(
        f"{key}={name} has no {ADAPTER_CONFIG}; give the folder of an adapter, or a run or a checkpoint that holds one"
    )


def open_adapter(folder: Path, is_of_class: bool = False) -> AdapterFolder:
    """Open a folder with a LoRA adapter that peft, the original LLaVA or llava_fsdp has written. `is_of_class`: whether
    its base is a whole model of transformers, with the parameter names of its class. Raises ModelError if the folder
    has no adapter, or one of an unsupported form, or a file is missing or damaged."""
    check_folder(folder)
    settings = read_json(folder / ADAPTER_CONFIG)
    with library_errors(f"{folder / ADAPTER_CONFIG} is damaged"):
        check_kind(settings, folder)
        lora = read_lora(settings, folder)
    check_meaning(folder, lora)
    file = next((folder / n for n in ADAPTER_FILES if (folder / n).is_file()), None)
    if file is None:
        raise ModelError(f"{folder} has an {ADAPTER_CONFIG}, but none of {', '.join(ADAPTER_FILES)}; copy it there")
    tensors = dict(open_file(file))
    # weights that were trained with the adapter, such as the projector's (non_lora_trainables)
    others = next((folder / n for n in OTHERS_FILES if (folder / n).is_file()), None)
    tensors |= open_file(others) if others is not None else {}
    rename = in_class if is_of_class else ours_in_adapter
    opened = AdapterFolder(folder, settings, lora, {rename(name): t for name, t in tensors.items()})
    if not opened.modules:
        raise ModelError(f"{file} has no LoRA weights: none of its {len(tensors)} tensors is named lora_A or lora_B")
    return opened


def check_meaning(folder: Path, lora: LoraConfig) -> None:
    """Raise ModelError if LoRA settings in an adapter's adapter_config.json differ from those of the training, which
    llava_fsdp wrote into `llava_fsdp.json` beside it. Users may change others, such as the base model's path."""
    trained = read_notes(folder).get("lora", {})
    with library_errors(f"{folder / NOTES} is not what was written"):
        for key in ("alpha", "use_dora", "use_rslora"):  # another r would give other shapes
            if key in trained and trained[key] != getattr(lora, key):
                raise ModelError(
                    f"{folder / ADAPTER_CONFIG} says {key} {getattr(lora, key)}, and the adapter was trained with "
                    f"{trained[key]}, as {NOTES} beside it says; copy it again"
                )


def check_kind(settings: dict[str, Any], folder: Path) -> None:
    """Raise ModelError unless an adapter_config.json (`settings`) describes plain LoRA with one rank and one scale for
    all modules. OTHER_MEANINGS are its keys for other features, and OTHER_BASES are initializations that change the
    base model's weights, too."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder} is a {kind} adapter; only LoRA is read")
    for key in OTHER_MEANINGS:
        if settings.get(key):
            raise ModelError(f"{folder / ADAPTER_CONFIG} has {key}={json.dumps(settings[key])}, which is not supported")
    initialisation = settings.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.partition("_")[0] in OTHER_BASES:
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} has init_lora_weights={initialisation}: it is for a base that peft has "
            "changed; convert it with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )


def read_lora(settings: dict[str, Any], folder: Path) -> LoraConfig:
    """Return the LoRA settings in an adapter_config.json. Raises ModelError if rank or scale is not a valid number."""
    r: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    dropout: Any = settings.get("lora_dropout") or 0.0
    if type(r) is not int or r < 1:
        raise ModelError(f"{folder / ADAPTER_CONFIG} has r={r!r}, which is no rank: a whole number of at least 1")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ModelError(f"{folder / ADAPTER_CONFIG} has lora_alpha={alpha!r}, which is no scale: a number above 0")
    return LoraConfig(
        enabled=True,
        r=r,
        alpha=float(alpha),
        dropout=float(dropout) if 0 <= dropout < 1 else 0.0,  # does not affect how the weights are used
        bias=LoraBias(settings.get("bias") or "none"),
        use_dora=bool(settings.get("use_dora", False)),
        use_rslora=bool(settings.get("use_rslora", False)),
    )


def initial_values_from(adapter: AdapterFolder, model: nn.Module, cfg: LoraConfig) -> dict[str, StoredTensor]:
    """Return the initial values for a run that continues the training of a LoRA adapter, by parameter name: the
    adapter's parameters, and the other weights that were trained with it.

    Raises:
        ConfigError: the run's configuration has another rank or scale.
        ModelError: the adapter belongs to another model, or adapts other modules than the run.
    """
    keys = ("r", "alpha", "use_dora", "use_rslora")
    different = {key: getattr(adapter.lora, key) for key in keys if getattr(adapter.lora, key) != getattr(cfg, key)}
    if different:
        cure = " ".join(f"model.lora.{key}={str(value).lower()}" for key, value in different.items())
        raise ConfigError(
            f"model.lora.checkpoint={adapter.folder} was trained with {different}, and this configuration says "
            f"{ {key: getattr(cfg, key) for key in different} }; give {cure}"
        )
    # a module may have an adapter only in the folder or only in the model, and its bias then has two different names
    here = {without_base(name): name for name, _ in model.named_parameters()}
    tensors = {here.get(without_base(name), name): tensor for name, tensor in adapter.tensors.items()}
    names_here = set(here.values())
    check_unknown_tensors(adapter, tensors.keys() - names_here)
    missing = sorted(n for n in names_here - tensors.keys() if is_adapter(n))
    if missing:
        raise ModelError(
            f"model.lora.checkpoint={adapter.folder} has no adapter for {module_of(missing[0])} and "
            f"{len({module_of(n) for n in missing}) - 1} other modules of this model; is it of another model, or of "
            "other parts than model.train?"
        )
    return {name: tensor for name, tensor in tensors.items() if name in names_here}


def check_unknown_tensors(adapter: AdapterFolder, names: set[str]) -> None:
    """Check the tensors (`names`) of an adapter's folder that the model has no parameters for. Adapters whose matrix B
    is 0 have no effect and are ignored with a warning; the original LLaVA adds such adapters to vision towers. Raise
    ModelError if B is not 0, or a tensor is not part of an adapter, so that training results would be lost."""
    for name in sorted(names):
        if not is_adapter(name):
            raise ModelError(f"{adapter.folder} has {name}, which this model has not; is it of another model?")
        b = adapter.tensors.get(module_of(name) + LORA_B)
        if b is None or torch.count_nonzero(b.rows(0, b.shape[0])):
            raise ModelError(
                f"{adapter.folder} adapts {module_of(name)}, which has no adapter here; does model.train name its part "
                "(model.train=[projector,language,vision])?"
            )
    if names:
        warn_of_ignored(adapter.folder, {module_of(name) for name in names})


def without_idle_tower(adapter: AdapterFolder) -> AdapterFolder:
    """Return an adapter folder without those adapters of the vision tower that were never trained. The original LLaVA
    adds such adapters (LLaVA#1647)."""
    idle = {module for module in unchanged_modules(adapter.tensors) if module.startswith(TOWER)}
    if not idle:
        return adapter
    warn_of_ignored(adapter.folder, idle)
    kept = {n: t for n, t in adapter.tensors.items() if not (is_adapter(n) and module_of(n) in idle)}
    return replace(adapter, tensors=kept)


def warn_of_ignored(folder: Path, modules: set[str]) -> None:
    """Log a warning that untrained LoRA adapters (those whose matrix B is 0) of these modules are ignored."""
    log().warning(
        "%s: the adapters of %d modules, such as %s, were not trained (B is 0) and are ignored",
        folder, len(modules), min(modules),
    )  # fmt: skip


def check_fits(adapter: AdapterFolder, shapes: Mapping[str, tuple[int, ...]], base: str) -> None:
    """Check that a LoRA adapter fits a base model, whose parameters have these shapes; `base` is its name in messages.
    Raise ModelError if the model lacks a module that the adapter adapts, the adapter lacks a weight, or a weight has
    another shape."""
    for module in adapter.modules:
        shape = shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2:
            raise ModelError(
                f"{adapter.folder} adapts {module}, which {base} has not; give its own base with base=PATH"
            )
        wanted = {LORA_A: (adapter.lora.r, shape[1]), LORA_B: (shape[0], adapter.lora.r)}
        wanted |= {MAGNITUDE: shape[:1]} if adapter.lora.use_dora else {}
        for end, expected in wanted.items():
            tensor = adapter.tensors.get(module + end)
            if tensor is None:
                raise ModelError(f"{adapter.folder} has no {module}{end}; the file is incomplete")
            if tensor.shape != expected:
                raise ModelError(
                    f"{module}{end} has shape {list(tensor.shape)} in {adapter.folder}, and {list(expected)} fits r="
                    f"{adapter.lora.r} and {base}; give its own base with base=PATH"
                )
    for name, tensor in adapter.tensors.items():
        plain = without_base(name)
        if not is_adapter(name) and shapes.get(plain) != tensor.shape:
            other = f"{list(shapes[plain])} in {base}" if plain in shapes else f"{base} has no such weight"
            raise ModelError(f"{plain} has shape {list(tensor.shape)} in {adapter.folder}: {other}; give base=PATH")


def unchanged_modules(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules whose LoRA matrix B is still 0, so that their adapters have no effect."""
    found = {n: t for n, t in tensors.items() if n.endswith(LORA_B)}
    return sorted(module_of(n) for n, t in found.items() if not torch.count_nonzero(t.rows(0, t.shape[0])))


def check_changed(tensors: Mapping[str, Any], what: str, cure: str) -> None:
    """Check that training has changed a model's LoRA adapters. Log a warning if it has changed only some of them.

    Args:
        what: how messages name the adapters, such as their folder.
        cure: what the user can do, for the error's message.

    Raises:
        ModelError: the LoRA matrix B is still 0 in every module.
    """
    unchanged = unchanged_modules(tensors)
    modules = sum(name.endswith(LORA_B) for name in tensors)
    if len(unchanged) == modules:
        raise ModelError(
            f"{what} was not changed by training: B is 0 in all {modules} adapted modules, so that the model is its "
            f"base; {cure}"
        )
    if unchanged:
        and_more = f" and {len(unchanged) - MOST_NAMES} more" if len(unchanged) > MOST_NAMES else ""
        log().warning(
            "%s was not changed by training in %d of %d modules (B is 0): %s%s",
            what, len(unchanged), modules, ", ".join(unchanged[:MOST_NAMES]), and_more,
        )  # fmt: skip
