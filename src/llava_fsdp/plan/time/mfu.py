"""Compute MFU and HFU, the shares of the hardware's peak FLOPs that a training step uses, from the model's FLOPs.

MFU (PaLM, arXiv 2204.02311, appendix B) counts the FLOPs that the model needs for the step's tokens, without padding
and recomputation. HFU also counts the FLOPs that run again in the backward pass.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Config, DType
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.flops import Flops, count_flops, pairs_in_windows
from llava_fsdp.parallel.compile import choose_compiling
from llava_fsdp.plan.memory.blank_images import BlankImages, image_rule
from llava_fsdp.plan.time.hardware import DEVICES, GPUS
from llava_fsdp.plan.time.step_time import recomputed_share
from llava_fsdp.runtime.text.log import log

TERA = 1e12


@dataclass(frozen=True)
class Utilization:
    """What MFU and HFU are computed from: the model's FLOPs, and the hardware's peak FLOPs per second."""

    flops: Flops
    language: PretrainedConfig
    recomputed: Flops | None
    """FLOPs that activation checkpointing computes again; None with `dynamic`, with which they change in the run."""
    peak: float | None
    """FLOPs per second of all ranks together; None if the device is unknown."""
    source: str
    """Where the peak comes from (an entry of the table of GPUs), or why it is unknown."""

    def of(self, facts: StepFacts, seconds: float) -> dict[str, float | None]:
        """Return a step's FLOPs on all ranks together, its MFU and its HFU (0 to 1; None if unknown)."""
        pairs = pairs_in_windows(self.language, facts.tokens, facts.token_pairs)

        def flops_of_step(flops: Flops) -> float:
            return flops.of(facts.tokens, pairs, facts.label_tokens, facts.tiles)

        needed = flops_of_step(self.flops)
        possible = None if self.peak is None else self.peak * seconds
        recomputed = None if self.recomputed is None else flops_of_step(self.recomputed)
        return {
            "flops": needed,
            "mfu": None if possible is None else needed / possible,
            "hfu": None if possible is None or recomputed is None else (needed + recomputed) / possible,
        }


def utilization_of(model: Architecture, cfg: Config, device: torch.device, world_size: int) -> Utilization:
    """Return what a run's MFU is computed from: the FLOPs that a step needs; those that it recomputes besides (None if
    they depend on the run); and the peak FLOPs per second of `world_size` devices like `device`. FLOPs are counted on
    the meta device; `images` measures those of images for a model that is not given tiles."""
    compiled = choose_compiling(cfg, device, model.kernel and model.kernel.attention).on
    needed = count_flops(model, activation_checkpointing=False)
    with_recomputed = count_flops(model, activation_checkpointing=True, compiled=compiled)
    images = image_flops(cfg, model)
    if images is not None:
        needed, with_recomputed = images.with_images(needed, False), images.with_images(with_recomputed, True)
    share = recomputed_flops_share(cfg.activation_checkpointing)
    recomputed = Flops._make(share * (more - less) for more, less in zip(with_recomputed, needed, strict=True))
    # In fp16 the loss runs again, under any activation checkpointing. In other dtypes both counts of it are equal.
    recomputed = recomputed._replace(label=with_recomputed.label - needed.label)
    if cfg.activation_checkpointing.mode is ActivationCheckpointing.dynamic:
        recomputed = None  # the steps decide which blocks run again
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    peak, source = peak_of(name, cfg.precision.param_dtype)
    return Utilization(needed, model.language_config, recomputed, None if peak is None else peak * world_size, source)


def image_flops(cfg: Config, model: Architecture) -> BlankImages | None:
    """Return what measures the FLOPs of an image in a whole model of transformers. Return None for a model that is
    given tiles, and if they cannot be measured: then attention in the vision part is left out."""
    try:
        rule = image_rule(cfg, model)
        if not isinstance(rule, BlankImages):
            return None
        rule.vision_work()
        return rule
    except Exception as error:  # only a number of the report becomes too small, which must not end the training
        log().warning("attention in the vision part is not counted in MFU: %s: %s", type(error).__name__, error)
        return None


def recomputed_flops_share(activation_checkpointing: ActivationCheckpointingConfig) -> float:
    """Return the share of a block's matrix-product FLOPs that run again; `selective` keeps all products."""
    if activation_checkpointing.mode is ActivationCheckpointing.selective:
        return 0.0
    return recomputed_share(activation_checkpointing)


def peak_of(name: str, dtype: DType) -> tuple[float | None, str]:
    """Return the peak dense FLOPs per second of the GPU that CUDA calls `name`, and the source of this number; (None,
    reason) if the table of GPUs does not have it."""
    gpu = GPUS.get(DEVICES.get(name, ""))
    if gpu is None or (dtype is DType.bf16 and gpu.bf16 is None):
        return None, f"unknown hardware: no MFU ({name} has no peak for {dtype.value} in the table of GPUs)"
    peak = gpu.peak(dtype)
    return peak, f"{peak / TERA:g} TFLOPs a second in {dtype.value} for each {name} ({gpu.source})"
