"""The function with which a Python program plans a training: `plan` of the package llava_fsdp."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from llava_fsdp.config import Config, Format, PlanConfig

if TYPE_CHECKING:
    from llava_fsdp.plan.planner import PlanRow


def plan(cfg: Config, gpus: int = 1, nodes: int = 1, gpu: str = "auto") -> list[PlanRow]:
    """Predict memory and time of the ways to run a training. Return the predictions, the best first; `fits` of each
    says whether it fits into memory. `gpus`: number of ranks on each node. `gpu`: name of a GPU, as for `llava-fsdp
    plan`; auto: that of this machine.

    Raises:
        ConfigError: the GPU is not known, or no layout of so many ranks is possible.
        ModelError: the model cannot be read or computed.
    """
    from llava_fsdp.plan.main import plan_objects

    keys: dict[str, Any] = {field.name: getattr(cfg, field.name) for field in fields(Config)} | {"format": Format.text}
    return plan_objects(PlanConfig(**keys, gpus=gpus, nodes=nodes, gpu=gpu, rows=1, page="", longest=False))
