"""AdamW in LLaVA's parameter groups, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from llava_fsdp.config import OptimConfig, Schedule
from llava_fsdp.errors import ConfigError
from llava_fsdp.sharding.precision import MasterWeights
from llava_fsdp.sharding.recompute import clean_name


def cosine(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to 0 (transformers `get_cosine_schedule_with_warmup`)."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))


def linear(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then linearly down to 0 (transformers `get_linear_schedule_with_warmup`)."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def constant(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then no change (transformers `get_constant_schedule_with_warmup`)."""
    return step / warmup if step < warmup else 1.0


def warmup_decay(step: int, total: int, warmup: int) -> float:
    """Logarithmic warm-up, then linearly down to 0 (DeepSpeed `WarmupDecayLR` with its default warm-up)."""
    warmup = max(2, warmup)
    if step < warmup:
        return math.log(step + 1) / math.log(warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def warmup_log(step: int, total: int, warmup: int) -> float:
    """Logarithmic warm-up, then no change (DeepSpeed `WarmupLR` with its default warm-up)."""
    warmup = max(2, warmup)
    return math.log(step + 1) / math.log(warmup) if step < warmup else 1.0


SCHEDULES: dict[Schedule, Callable[[int, int, int], float]] = {
    Schedule.cosine: cosine,
    Schedule.linear: linear,
    Schedule.constant: constant,
    Schedule.warmup_decay: warmup_decay,
    Schedule.warmup_log: warmup_log,
}


@dataclass(frozen=True)
class LearningRate:
    """The factor on every group's own learning rate at a step (0 for the first: LLaVA's first step warms up from 0)."""

    base: float
    schedule: Schedule
    total_steps: int
    warmup_steps: int

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set every group's learning rate for this step; returns that of `optim.lr`."""
        factor = SCHEDULES[self.schedule](step, self.total_steps, self.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return self.base * factor


def build_optimizer(
    model: nn.Module, masters: MasterWeights, cfg: OptimConfig, total_steps: int
) -> tuple[torch.optim.Optimizer, LearningRate]:
    """AdamW over the masters, and its learning rate over `total_steps`."""
    decayed = decayed_names(model)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in masters.named.items():
        groups.setdefault((name not in decayed, base_lr(name, cfg)), []).append(parameter)
    if not groups:
        raise ConfigError("model.train leaves nothing to train")
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters, "base_lr": lr, "lr": lr, "weight_decay": 0.0 if plain else cfg.weight_decay}
            for (plain, lr), parameters in groups.items()
        ],
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.eps,
        fused=True,
    )
    warmup = math.ceil(cfg.warmup_ratio * total_steps) if cfg.warmup_steps is None else cfg.warmup_steps
    return optimizer, LearningRate(cfg.lr, cfg.schedule, total_steps, warmup)


def base_lr(name: str, cfg: OptimConfig) -> float:
    own = {"multi_modal_projector.": cfg.projector_lr, "vision_tower.": cfg.vision_lr}
    for prefix, lr in own.items():
        if name.startswith(prefix) and lr is not None:
            return lr
    return cfg.lr


def decayed_names(model: nn.Module) -> set[str]:
    """Parameters with weight decay: no biases and no norms (LLaVA llava_trainer.py:150-228)."""
    found = set()
    for module_name, module in model.named_modules():
        for leaf, _ in module.named_parameters(recurse=False):
            if "bias" not in leaf and "Norm" not in type(module).__name__:
                found.add(clean_name(".".join(filter(None, (module_name, leaf)))))
    return found
