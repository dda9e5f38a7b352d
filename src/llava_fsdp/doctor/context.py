"""What the checks of `doctor` need: the training's configuration, and facts about this machine."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llava_fsdp.config import Config, DoctorConfig, DType
from llava_fsdp.doctor.findings import output_of
from llava_fsdp.doctor.probes.gpus import QUERY, SECONDS, SmiGpu, TorchFacts, parse_smi, read_torch, seen_gpus
from llava_fsdp.runtime.process.host import Host, cpu_has_bf16, read_host

if TYPE_CHECKING:
    from llava_fsdp.plan.planner import PlanRow


@dataclass(frozen=True)
class Needs:
    """Memory and disk space of the training, as `llava-fsdp plan` predicts them, in bytes."""

    plan: "PlanRow"
    machine: str
    checkpoint: int
    export: int
    step: int
    """Size of the prepared input of one step on one rank. Data workers keep such inputs of the next steps in memory."""


class DoctorContext:
    """Input of all checks: the training's configuration, and facts about this machine, each computed once."""

    def __init__(self, cfg: DoctorConfig):
        """Begin with no facts. Checks set `is_missing` and `unreadable_key`, and later checks read them."""
        self.cfg = cfg
        self.is_missing = False
        """Whether a path that the configuration names does not exist."""
        self.unreadable_key: str | None = None
        """Key of a model part that cannot be read; memory is then not planned. None if all can be read."""

    @cached_property
    def smi(self) -> list[SmiGpu]:
        return parse_smi(output_of(QUERY, SECONDS) or "")

    @property
    def gpus(self) -> list[SmiGpu]:
        """GPUs on which `llava-fsdp train` would run, as nvidia-smi reports them."""
        return seen_gpus(self.smi, os.environ.get("CUDA_VISIBLE_DEVICES"), self.cfg.gpus)

    @cached_property
    def torch(self) -> TorchFacts:
        return read_torch()

    @cached_property
    def host(self) -> Host:
        return read_host()

    @property
    def has_bf16(self) -> bool:
        """Whether the devices of all ranks have instructions for bf16."""
        return all(one["bf16"] for one in self.torch.devices) if self.torch.devices else cpu_has_bf16()

    @cached_property
    def with_chosen_dtype(self) -> DoctorConfig:
        """The configuration with `precision.param_dtype=auto` replaced as a new training here would do."""
        chosen = DType.bf16 if self.has_bf16 or self.cfg.precision.needs_bf16 else DType.fp32
        return replace(self.cfg, precision=self.cfg.precision.settled(chosen))

    @property
    def ranks(self) -> int:
        """Number of ranks that `llava-fsdp train` would start here."""
        return self.cfg.gpus or len(self.torch.devices) or 1

    @property
    def workers(self) -> int:
        """Number of processes with which each rank would prepare its data."""
        workers = self.cfg.data.workers
        return self.host.data_workers(self.ranks) if workers is None else workers

    @property
    def output_dir(self) -> Path:
        return Path(self.cfg.output_dir)

    @cached_property
    def needs(self) -> Needs:
        """Memory and disk space of the training on this machine, in the layout (sharding, offload and so on) that the
        planner finds best. Raises the planner's errors if they cannot be predicted."""
        import torch

        from llava_fsdp.parallel.memory.memory import ITEM_SIZE, checkpoint_bytes
        from llava_fsdp.parallel.ranks.world import World
        from llava_fsdp.plan.model_shapes import shapes_of
        from llava_fsdp.plan.planner import Planner
        from llava_fsdp.plan.search.auto import best_layout, settle_packing
        from llava_fsdp.plan.time.hardware import this_machine

        parts = shapes_of(self.cfg.model)
        cfg, _ = settle_packing(self.with_chosen_dtype, parts)
        device = torch.device("cuda" if self.torch.devices else "cpu")
        world = World(0, self.ranks * self.cfg.nodes, 0, self.ranks, device)

        def planner_of(tried: Config) -> Planner:
            return Planner(tried, this_machine(self.ranks, device.type), parts=parts)

        planner, (row, *_) = best_layout(cfg, world, parts.language, planner_of)
        export = sum(w.count for w in planner.whole_weights) * ITEM_SIZE[self.cfg.export.stored]
        # bytes of inputs that are held for the whole step, and for each micro-batch those held while it runs
        kept, inputs = planner.input_bytes(row.micro_batches)
        return Needs(
            row,
            planner.machine.name,
            checkpoint_bytes(planner.whole_weights, cfg.precision),
            export if self.cfg.export.enabled else 0,
            kept + max(inputs),
        )

    @cached_property
    def known_needs(self) -> Needs | None:
        """Memory and disk space of the training, as `needs` predicts them; None if they cannot be predicted."""
        if self.unreadable_key is not None:  # a part of the model cannot be read, which another check has reported
            return None
        try:
            return self.needs
        except Exception:
            return None

    @property
    def checkpoint_bytes(self) -> int:
        """Predicted size of a checkpoint in bytes; 0 if unknown."""
        return 0 if self.known_needs is None else self.known_needs.checkpoint
