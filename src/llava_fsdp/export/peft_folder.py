"""Write LoRA adapters for programs that put them on transformers' LLaVA class, such as peft and vLLM.

The adapter folders of a training (`adapter_folder.py`) have the names of the original LLaVA, which are those of a
language model alone. `format=peft` writes a model folder for transformers with the base model and everything that was
trained besides the adapters, such as the projector, and in its subfolder `adapter` the adapters with the names that
modules have in transformers' class.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.export.prove.logit_distance import distance
from llava_fsdp.export.prove.verify_logits import (
    Adapted,
    Rounded,
    compute_dtype,
    exported_logits,
    has_experts,
    load_copy,
    logits,
    open_export,
    random_rows,
)
from llava_fsdp.export.write.adapter_folder import whole_rows
from llava_fsdp.model.adapters.lora import import_peft
from llava_fsdp.model.adapters.lora_files import ADAPTER_CONFIG, ADAPTER_FILES, FOLDER
from llava_fsdp.model.adapters.lora_names import is_adapter, without_base
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.sources.llava_v1_5_config import write_json
from llava_fsdp.model.weights.conversions import whole_model_of
from llava_fsdp.model.weights.weight_names import PEFT
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.text.log import log


def write_adapters(export_folder: Path, adapted: Adapted) -> None:
    """Write the LoRA adapters of a model, and their adapter_config.json, into the subfolder `adapter` of its exported
    base model `export_folder`, which has its configuration already."""
    folder = export_folder / FOLDER
    folder.mkdir()
    tensors = {n: whole_rows(t).contiguous() for n, t in adapted.sources.items() if is_adapter(n)}
    save_file({in_class(name): tensor for name, tensor in tensors.items()}, folder / ADAPTER_FILES[0])
    config = AutoConfig.from_pretrained(export_folder, trust_remote_code=False, local_files_only=True)
    write_json(folder / ADAPTER_CONFIG, settings(adapted, whole_model_of(copy.deepcopy(config))))


def in_class(name: str) -> str:
    """Translate llava_fsdp's name of an adapter's parameter to its name in peft's file for transformers' LLaVA class.
    peft leaves the adapter's name `default` out of files."""
    name = f"{PEFT}model.{name}"
    return name.replace(".default.weight", "" if ".lora_magnitude_vector." in name else ".weight")


def settings(adapted: Adapted, model: nn.Module) -> dict[str, Any]:
    """Return the contents of adapter_config.json for LoRA adapters. `model` is transformers' model to which they
    belong, on the meta device.

    vLLM needs the last parts of the modules' names in `target_modules`. To peft these mean every module whose name ends
    so, also in the vision tower; those that have no adapter are in `exclude_modules` (peft 0.14 and later).
    """
    wanted = {f"model.{module}" for module in adapted.modules}  # names in transformers' class
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if wanted - linear:
        raise ModelError(f"transformers' {type(model).__name__} has no linear layer {min(wanted - linear)}")
    kinds = {name.rpartition(".")[2] for name in wanted}
    lora = adapted.lora
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "exclude_modules": sorted(name for name in linear - wanted if name.rpartition(".")[2] in kinds) or None,
        "inference_mode": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.r,
        "target_modules": sorted(kinds),
        "use_dora": lora.use_dora,
        "use_rslora": lora.use_rslora,
    }


def with_rounded_base(adapted: Adapted, dtypes: dict[str, torch.dtype]) -> Adapted:
    """Return a copy of `adapted`, the stored values of a model with LoRA adapters, in which those of the base model are
    rounded to the dtypes of an export. `dtypes` are by parameter name in a model without adapters."""
    rounded = {n: t if is_adapter(n) else Rounded(t, dtypes[without_base(n)]) for n, t in adapted.sources.items()}
    return replace(adapted, sources=rounded)


def prove_adapters(export_folder: Path, model: Llava, adapted: Adapted, rule: ImageTokens) -> None:
    """Load an exported base model with transformers, put its adapters on it with peft, and compare the logits with
    those of the source. Raises ModelError if they differ, or peft does not use every adapter.

    Args:
        export_folder: the exported folder: the base model, and the adapters in the subfolder `adapter`.
        model: a model of the same architecture without adapters; its weights are not used.
        adapted: the source: its adapters, and the values of its base model, rounded as they were exported.
        rule: computes which tokens an image gets.
    """
    compute, (micro, sizes) = compute_dtype(model), random_rows(model, rule)
    expected = logits(load_copy(model, adapted.sources, compute, adapted), micro)
    peft = import_peft()
    loaded = peft.PeftModel.from_pretrained(open_export(export_folder, compute), export_folder / FOLDER).eval()
    layers = [name for name, module in loaded.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    if len(layers) != len(adapted.modules):
        raise ModelError(
            f"peft adapts {len(layers)} modules with {export_folder / FOLDER}, and not {len(adapted.modules)}"
        )
    adapted_model, tiles = loaded.base_model.model.to(compute), micro.images["tiles"]
    difference = distance(exported_logits(adapted_model, micro, tiles, sizes), expected)
    log().info("logits with peft's adapters differ by %.2g of the largest logit, %s", difference.largest, difference)
    error = difference.exceeds(compute, has_experts(model))
    if error:
        raise ModelError(f"{export_folder} was written, but with its adapters {error} from the source's")
