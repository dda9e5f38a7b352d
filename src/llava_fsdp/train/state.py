"""The state of a training run: model, optimizer, data and counters, and how they are put together."""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from llava_fsdp.config import Config, DType
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.validation_set import HeldOut
from llava_fsdp.distributed.compile import Compilations, choose_compiling
from llava_fsdp.distributed.mesh import World
from llava_fsdp.distributed.offload import Offload, warn_of_no_use
from llava_fsdp.distributed.parallelize import parallelize, without_use
from llava_fsdp.distributed.precision import MasterWeights
from llava_fsdp.distributed.zero import ShardPlan
from llava_fsdp.model.init_weights import computed_buffers, restore_buffers
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.tensor_files import Stored
from llava_fsdp.plan.mfu import Utilization
from llava_fsdp.runtime.log import log
from llava_fsdp.train.loss_scaler import LossScaler, build_scaler
from llava_fsdp.train.optimizer import LearningRate, build_optimizer


@dataclass
class TrainState:
    """Model, optimizer and data of a run, and the counters of its progress."""

    model: nn.Module
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loader: Loader
    sources: dict[str, Stored] = field(default_factory=dict)
    """Parameter name -> where its initial values are read from; empty in a dry run, which saves nothing."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Digests of the dataset, of its encoding and of the frozen weights; a checkpoint with others is refused."""
    digests: dict[str, str] = field(default_factory=dict)
    """Frozen parameter name -> digest; an adapter records them to recognize its base model."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifier of the run, kept when it resumes; rank 0's is the one that is written to files."""
    step: int = 0
    """Finished steps, skipped ones included."""
    samples: int = 0
    """Samples consumed by the finished steps."""
    scaler: LossScaler | None = None
    """None unless the precision is fp16."""
    skipped: int = 0
    """Finished steps without an update, because the loss or the gradients were not finite."""
    utilization: Utilization | None = None
    """Computes FLOPs and MFU of a step; None leaves them out of the metrics."""
    consecutive: int = 0
    """Skipped steps since the last update, without those after which fp16's loss scale was lowered."""
    about: dict[str, Any] = field(default_factory=dict)
    """Description of this start for `starts.jsonl` and the report; empty on other ranks than 0."""
    compilations: Compilations | None = None
    """Counts compilations of the model's blocks; None if they are not compiled."""
    held_out: HeldOut | None = None
    """Validation data; None without validation."""


@dataclass(frozen=True)
class StepResult:
    """Result of one step; the same on every rank except where noted."""

    facts: StepFacts
    loss: float
    lr: float
    grad_norm: float
    """Norm of all gradients before clipping; not finite if the gradients overflowed."""
    seconds: float
    skipped: bool = False
    """The loss or the gradients were not finite, and the weights were not updated."""
    skipped_steps: int = 0
    """Skipped steps of the run so far, this one included."""
    loss_scale: float | None = None
    """Factor on the loss in fp16; None in other precisions."""
    recompiles: int = 0
    """Graphs that this rank compiled after the first steps of its process. Each delayed a step by seconds."""
    own_loss_is_finite: bool = True
    """Whether this rank's part of the loss is finite; differs between ranks."""
    source_losses: dict[str, float | None] = field(default_factory=dict)
    """Data source -> mean loss over its label tokens; None if the step has none of them. Not finite with a
    `loss.kernel` that returns only the sum over all sources."""
    data_seconds: float = 0.0
    """Seconds that this rank waited for the step's data; differs between ranks."""


def assemble(
    model: Llava,
    loader: Loader,
    fill: Callable[[Llava, MasterWeights], None],
    cfg: Config,
    world: World,
    plan: ShardPlan,
    mesh: DeviceMesh | None,
) -> TrainState:
    """Parallelize a meta-device model, load its weights and build its optimizer: a run at step 0.

    The order matters: what trains, activation checkpointing, sharding, weights into shards, optimizer.

    Args:
        fill: loads values into the shards.
    """
    buffers = computed_buffers(model)
    offload = Offload(cfg, world.device)
    warn_of_no_use(cfg, world)
    compiling = choose_compiling(cfg, world.device, model.kernel and model.kernel.attention)
    compilations = Compilations() if compiling.on else None
    masters = parallelize(model, model.blocks(), mesh, plan, cfg, offload, model.whole_while_frozen(), compilations)
    for said in without_use(cfg.sharding, model.blocks(), mesh["shard"].size() if mesh is not None else None):
        log().log(logging.WARNING if world.is_first else logging.DEBUG, said)
    fill(model, masters)
    restore_buffers(model, buffers)
    offload.loaded()
    optimizer, learning_rate = build_optimizer(model, masters, cfg, loader.total_steps)
    optimizer = offload.optimizer(optimizer)
    scaler = build_scaler(cfg.precision.scaler) if cfg.precision.param_dtype is DType.fp16 else None
    return TrainState(model, masters, optimizer, learning_rate, loader, scaler=scaler, compilations=compilations)
