"""How much of the hardware's peak a step makes use of: MFU and HFU, from the FLOP model.

MFU (PaLM, arXiv 2204.02311, appendix B) has what the model needs for the real positions of the step, so that neither
padding nor recomputation counts; HFU adds what runs again in the backward pass.
"""

from dataclasses import dataclass

import torch

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Config, DType
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.distributed.compile import choose_compiling
from llava_fsdp.model.flops import Flops, count_flops
from llava_fsdp.model.llava import Llava
from llava_fsdp.plan.hardware import DEVICES, GPUS
from llava_fsdp.plan.planner import again_share

TERA = 1e12


@dataclass(frozen=True)
class Utilization:
    """Of a run's steps."""

    flops: Flops
    again: Flops
    """What runs again."""
    peak: float | None
    """FLOPs a second of all ranks together; None: unknown."""
    source: str
    """Of the peak, in words."""

    def of(self, facts: StepFacts, seconds: float) -> dict[str, float | None]:
        """`flops` that the step needs on all ranks together, `mfu` and `hfu`, which are shares of the peak."""
        held = facts.tokens, facts.pairs, facts.label_tokens, facts.tiles
        needed = self.flops.of(*held)
        most = None if self.peak is None else self.peak * seconds
        return {
            "flops": needed,
            "mfu": None if most is None else needed / most,
            "hfu": None if most is None else (needed + self.again.of(*held)) / most,
        }


def utilization_of(model: Llava, cfg: Config, device: torch.device, world_size: int) -> Utilization:
    """Of a training on so many devices of this kind."""
    compiled = choose_compiling(cfg, device, model.kernel and model.kernel.attention).on
    needed, everything = (
        count_flops(model, activation_checkpointing=False),
        count_flops(model, activation_checkpointing=True, compiled=compiled),
    )
    share = flops_share(cfg.activation_checkpointing)
    again = Flops(*(share * (more - less) for more, less in zip(everything, needed, strict=True)))
    again = again._replace(label=everything.label - needed.label)  # in fp16, whatever blocks do
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    peak, source = peak_of(name, cfg.precision.param_dtype)
    return Utilization(needed, again, None if peak is None else peak * world_size, source)


def flops_share(activation_checkpointing: ActivationCheckpointingConfig) -> float:
    """How much of a block's products runs again; `selective` keeps the results of all of them."""
    return (
        0.0
        if activation_checkpointing.mode is ActivationCheckpointing.selective
        else again_share(activation_checkpointing)
    )


def peak_of(name: str, dtype: DType) -> tuple[float | None, str]:
    """FLOPs a second of one device in a dtype, dense, as the table of GPUs has it, and where that is from.

    Args:
        name: what CUDA calls the device.
    """
    gpu = GPUS.get(DEVICES.get(name, ""))
    if gpu is None or (dtype is DType.bf16 and gpu.bf16 is None):
        return None, f"unknown hardware: no MFU ({name} has no peak for {dtype.value} in the table of GPUs)"
    peak = gpu.peak(dtype)
    return peak, f"{peak / TERA:g} TFLOPs a second in {dtype.value} for each {name} ({gpu.source})"
