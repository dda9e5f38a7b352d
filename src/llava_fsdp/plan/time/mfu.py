"""Compute MFU and HFU, the shares of the hardware's peak FLOPs that a training step uses, from the model's FLOPs.

MFU (PaLM, arXiv 2204.02311, appendix B) counts the FLOPs that the model needs for the step's tokens, without padding
and recomputation. HFU also counts the FLOPs that run again in the backward pass.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Config, DType
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.model.flops import Flops, count_flops, pairs_in_windows
from llava_fsdp.model.llava import Llava
from llava_fsdp.parallel.compile import choose_compiling
from llava_fsdp.plan.time.hardware import DEVICES, GPUS
from llava_fsdp.plan.time.step_time import recomputed_share

TERA = 1e12


@dataclass(frozen=True)
class Utilization:
    """FLOPs of a run's model, and the hardware's peak FLOPs per second, from which MFU and HFU are computed."""

    flops: Flops
    language: PretrainedConfig
    recomputed: Flops | None
    """FLOPs that activation checkpointing computes again in the backward pass; None with the mode `dynamic`, in which
    they change in the run."""
    peak: float | None
    """Peak FLOPs per second of all ranks together; None if the device is unknown."""
    source: str
    """Where the peak comes from (an entry of the table of GPUs), or the reason why it is unknown."""

    def of(self, facts: StepFacts, seconds: float) -> dict[str, float | None]:
        """Return the FLOPs of a training step on all ranks together (`flops`), and its MFU and HFU, from 0 to 1 (`mfu`,
        `hfu`; None if the peak or, for `hfu`, what is recomputed is unknown).

        Args:
            facts: numbers of tokens, samples and images in the step.
            seconds: duration of the step.
        """
        pairs = pairs_in_windows(self.language, facts.tokens, facts.pairs)
        counts = facts.tokens, pairs, facts.label_tokens, facts.tiles
        needed = self.flops.of(*counts)
        most = None if self.peak is None else self.peak * seconds
        again = None if self.recomputed is None else self.recomputed.of(*counts)
        return {
            "flops": needed,
            "mfu": None if most is None else needed / most,
            "hfu": None if most is None or again is None else (needed + again) / most,
        }


def utilization_of(model: Llava, cfg: Config, device: torch.device, world_size: int) -> Utilization:
    """Count the model's FLOPs and find the peak FLOPs per second of `world_size` devices of the kind of `device`. The
    result computes MFU and HFU of steps."""
    compiled = choose_compiling(cfg, device, model.kernel and model.kernel.attention).on
    needed = count_flops(model, activation_checkpointing=False)
    everything = count_flops(model, activation_checkpointing=True, compiled=compiled)
    share = recomputed_flops_share(cfg.activation_checkpointing)
    recomputed = Flops(*(share * (more - less) for more, less in zip(everything, needed, strict=True)))
    # in fp16 the loss runs again, under any activation checkpointing
    recomputed = recomputed._replace(label=everything.label - needed.label)
    if cfg.activation_checkpointing.mode is ActivationCheckpointing.dynamic:
        recomputed = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    peak, source = peak_of(name, cfg.precision.param_dtype)
    return Utilization(needed, model.parts.language, recomputed, None if peak is None else peak * world_size, source)


def recomputed_flops_share(activation_checkpointing: ActivationCheckpointingConfig) -> float:
    """Return the share of a block's matrix-product FLOPs that run again in the backward pass; 0 with `selective`
    activation checkpointing, which keeps the results of all matrix products."""
    if activation_checkpointing.mode is ActivationCheckpointing.selective:
        return 0.0
    return recomputed_share(activation_checkpointing)


def peak_of(name: str, dtype: DType) -> tuple[float | None, str]:
    """Return the peak dense FLOPs per second of one GPU in a dtype, from the table of GPUs, and the source of this
    number; (None, reason) if the table does not have it.

    Args:
        name: the GPU's name, as CUDA reports it.
    """
    gpu = GPUS.get(DEVICES.get(name, ""))
    if gpu is None or (dtype is DType.bf16 and gpu.bf16 is None):
        return None, f"unknown hardware: no MFU ({name} has no peak for {dtype.value} in the table of GPUs)"
    peak = gpu.peak(dtype)
    return peak, f"{peak / TERA:g} TFLOPs a second in {dtype.value} for each {name} ({gpu.source})"
