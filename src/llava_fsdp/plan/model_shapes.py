"""Read a model's configurations without weights or network, and choose the attention kernel of the planned device."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from llava_fsdp.config import Attention, Config, ModelConfig
from llava_fsdp.model.packed_attention.attention import Kernel, choose_kernel, not_for_flash
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.gguf_source import is_gguf
from llava_fsdp.model.sources.pretrained import PACKAGE, find_parts, resolve, separate_parts
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.runtime.errors import ConfigError

SHAPES = Path(__file__).parents[1] / "assets" / "shapes"


def shapes_of(cfg: ModelConfig) -> Parts:
    """Read the configurations of a model's parts from the folders that `cfg` names or, if these do not exist, from the
    copies that this package ships. Raise ConfigError if there is neither, as a plan downloads nothing."""
    shipped = SHAPES / str(cfg.checkpoint).replace("/", "--")
    whole = next((path for path in (Path(str(cfg.checkpoint)), shipped) if path.is_dir()), None)
    if whole is not None:
        # a folder of the original LLaVA names its vision tower but does not contain it
        vision = str(folder_of(cfg.vision, "model.vision"))
        return find_parts(replace(cfg, checkpoint=str(whole), vision=vision))
    language, vision = folder_of(cfg.language, "model.language"), folder_of(cfg.vision, "model.vision")
    return separate_parts(language, vision)


def folder_of(name: str, key: str) -> Path:
    """Return the folder of the model `name`: a folder of this name or, if there is none, the one that this package
    ships for the model's name. A name that begins with `package:` always stands for a shipped folder. `key` is named in
    the error message.

    Raises:
        ConfigError: there is no such folder.
    """
    if name.startswith(PACKAGE) or Path(name).is_dir() or is_gguf(name):
        return resolve(name, key)
    folder = SHAPES / name.replace("/", "--")
    if not folder.is_dir():
        shipped = ", ".join(sorted(p.name.replace("--", "/") for p in SHAPES.iterdir()))
        raise ConfigError(
            f"{key}={name} is not a folder, and a plan reads nothing from the network; give a folder with its "
            f"config.json, or one of {shipped}"
        )
    return folder


def kernel_for(cfg: Config, language: PretrainedConfig, device: str, bf16: bool) -> Kernel | None:
    """Choose the attention kernel that a training would use on `device` (cuda or cpu), which this machine need not
    have. None if each sample has a padded row, so that no kernel for packed rows is needed. `bf16`: whether the device
    has bf16. It then also has FlashAttention-2: both begin with compute capability 8.0.

    Raises:
        ConfigError: the configuration names a kernel that cannot run on the device.
    """
    if not cfg.packs:
        return None
    compute = DTYPES[cfg.precision.param_dtype]
    if device == "cpu":
        return choose_kernel(cfg.attention, language, torch.device("cpu"), compute)
    if cfg.attention is Attention.sdpa:
        return Kernel(Attention.sdpa, "attention=sdpa")
    what = "flash-attn" if cfg.attention is Attention.flash else "varlen_attn"
    reason = not_for_flash(language, compute, what) if bf16 else f"{what} needs a GPU of compute capability 8.0"
    if reason is None:  # flash-attn needs the same memory as varlen_attn, and need not be installed here
        return Kernel(Attention.varlen, f"{what}, or a kernel that needs as much memory")
    if cfg.attention is not Attention.auto:
        raise ConfigError(f"attention={cfg.attention.value}: {reason}; set attention=auto")
    return Kernel(Attention.sdpa, f"SDPA, one sample at a time: {reason}")
