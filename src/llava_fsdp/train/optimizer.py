"""The optimizer with LLaVA's parameter groups, and learning rate schedules: functions that return the factor of
the learning rate at `step` (from 0) of `total` steps."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llava_fsdp.config import Config, DType, MasterDType, MomentDType, OptimConfig, Part, Schedule
from llava_fsdp.model.architecture import Architecture, NamedPart, part_name
from llava_fsdp.parallel.fsdp.parts import parts_of
from llava_fsdp.parallel.fsdp.weights import matrix_names
from llava_fsdp.parallel.local_shards import clean_name, local
from llava_fsdp.parallel.muon import Muon
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.fused_adamw import FusedAdamW
from llava_fsdp.parallel.precision.lowbit_adamw import LowBitAdamW
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.runtime.errors import ConfigError


def cosine(step: int, total: int, warmup: int) -> float:
    """Return the factor of the learning rate: linear warm-up for `warmup` steps, then half a cosine down to 0
    (transformers `get_cosine_schedule_with_warmup`)."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))


def linear(step: int, total: int, warmup: int) -> float:
    """Return the factor of the learning rate: linear warm-up for `warmup` steps, then a linear decay to 0 (transformers
    `get_linear_schedule_with_warmup`)."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def sqrt(step: int, total: int, warmup: int) -> float:
    """Return the factor of the learning rate: linear warm-up for `warmup` steps, then 1 minus the root of the progress
    (Hägele et al. 2024, arXiv 2405.18392, section 3)."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, 1 - math.sqrt((step - warmup) / max(1, total - warmup)))


def constant(step: int, total: int, warmup: int) -> float:
    """Linear warm-up for `warmup` steps, then 1 (transformers `get_constant_schedule_with_warmup`)."""
    return step / warmup if step < warmup else 1.0


def warmup_decay(step: int, total: int, warmup: int) -> float:
    """Return the factor of the learning rate: logarithmic warm-up, then linear decay to 0 (DeepSpeed's default
    `WarmupDecayLR`)."""
    warmup = max(2, warmup)
    if step < warmup:
        return math.log(step + 1) / math.log(warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def warmup_log(step: int, total: int, warmup: int) -> float:
    """Logarithmic warm-up, then 1 (DeepSpeed `WarmupLR` with its default warm-up)."""
    warmup = max(2, warmup)
    return math.log(step + 1) / math.log(warmup) if step < warmup else 1.0


SCHEDULES: dict[Schedule, Callable[[int, int, int], float]] = {
    Schedule.cosine: cosine,
    Schedule.linear: linear,
    Schedule.sqrt: sqrt,
    Schedule.constant: constant,
    Schedule.warmup_decay: warmup_decay,
    Schedule.warmup_log: warmup_log,
}


@dataclass(frozen=True)
class LearningRate:
    """Schedule of a training: the base learning rate of every parameter group is multiplied by a factor, which is 0 at
    the first step of a warm-up."""

    optim: OptimConfig
    total_steps: int

    @property
    def warmup_steps(self) -> int:
        """Number of steps of the warm-up, which the configuration gives as such or as a share of all steps."""
        given = self.optim.warmup_steps
        return math.ceil(self.optim.warmup_ratio * self.total_steps) if given is None else given

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0."""
        shape, total, warmup = SCHEDULES[self.optim.schedule], self.total_steps, self.warmup_steps
        if step < warmup:
            return shape(step, total, warmup)
        ratio, least = self.optim.decay_ratio, self.optim.min_lr_ratio
        begin = warmup if ratio is None else max(warmup, total - math.ceil(ratio * total))
        if step < begin:
            return 1.0
        fall = shape(step, total, begin)  # as if the warm-up had ended at `begin`: the factor falls from 1 there
        return fall if not least else least + (1 - least) * fall

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the learning rate of all parameter groups for a step, from 0 on. Return that with the base `optim.lr`."""
        factor = self.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return self.optim.lr * factor


def build_optimizer(
    model: nn.Module,
    masters: MasterWeights,
    cfg: Config,
    total_steps: int,
    is_part: bool = False,
    compiles: bool = False,
    parallelism: Parallelism | None = None,
) -> tuple[torch.optim.Optimizer, LearningRate]:
    """Build the optimizer, and the learning rate schedule.

    Args:
        is_part: whether the model is one of several stages. A stage need not have trainable parameters.
        compiles: whether torch.compile makes the kernels that convert int8 moments.
        parallelism: the ranks that share the work of Muon, which needs it; other optimizers do not.
    """
    optim = cfg.optim
    decayed, parts = decayed_names(model), model.named_parts if isinstance(model, Architecture) else {}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in masters.named.items():
        part = local(parameter)
        assert part.is_contiguous(), f"{name}: {tuple(part.shape)} with strides {part.stride()} cannot be trained"
        groups.setdefault((name not in decayed, base_lr(name, optim, parts)), []).append(parameter)
    if not groups and not is_part:
        raise ConfigError("model.train leaves nothing to train")
    groups = groups or {(True, optim.lr): []}  # torch refuses to have no group
    settings = [
        {"params": parameters, "base_lr": lr, "lr": lr, "weight_decay": 0.0 if has_no_decay else optim.weight_decay}
        for (has_no_decay, lr), parameters in groups.items()
    ]
    betas = optim.beta1, optim.beta2
    if optim.is_muon:
        assert isinstance(model, Architecture) and parallelism is not None
        names = matrix_names(model, parts_of(model))
        matrices = {parameter for name, parameter in masters.named.items() if name in names}
        dtype = torch.bfloat16 if cfg.precision.param_dtype is DType.bf16 else torch.float32
        optimizer = Muon(settings, matrices, optim.momentum, dtype, parallelism, betas=betas, eps=optim.eps, fused=True)
    elif (cfg.precision.master_dtype, cfg.precision.moment_dtype) == (MasterDType.fp32, MomentDType.fp32):
        optimizer = FusedAdamW(settings, betas=betas, eps=optim.eps, fused=True)
    else:
        optimizer = LowBitAdamW(settings, cfg.precision.moment_dtype, betas, optim.eps, cfg.seed, compiles)
    return optimizer, LearningRate(optim, total_steps)


def prepare_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's missing states, as zeros, so that a checkpoint can be loaded before the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                assert isinstance(optimizer, (FusedAdamW, LowBitAdamW)), "other optimizers create states when built"
                optimizer.state[parameter] = optimizer.new_state(parameter)


def base_lr(name: str, cfg: OptimConfig, parts: Mapping[str, NamedPart]) -> float:
    """Return the base learning rate of a parameter: projector and vision encoder may have their own. `parts`: the
    model's parts (`Architecture.named_parts`)."""
    part = part_name(name, parts)
    lr = None if part is None else rate_of(parts[part], cfg)
    return cfg.lr if lr is None else lr


def rate_of(part: NamedPart, cfg: OptimConfig) -> float | None:
    """Return the base learning rate of a part that has its own; None: it has `optim.lr`."""
    return {Part.projector: cfg.projector_lr, Part.vision: cfg.vision_lr}.get(part.rate) if part.rate else None


def decayed_names(model: nn.Module) -> set[str]:
    """Return the parameters with weight decay: all except biases and norms (LLaVA llava_trainer.py:150-228)."""
    names = set()
    for module_name, module in model.named_modules():
        for leaf, _ in module.named_parameters(recurse=False):
            if "bias" not in leaf and "Norm" not in type(module).__name__:
                names.add(clean_name(".".join(filter(None, (module_name, leaf)))))
    return names
