"""What a run is made of."""

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
    """The parts of a run, and how far it has come."""

    model: nn.Module
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loader: Loader
    sources: dict[str, Stored] = field(default_factory=dict)
    """Where every parameter's first values came from, by name; empty where nothing is ever saved: a dry run."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of the dataset, of what encodes it and of the frozen weights: what a checkpoint must agree with to continue."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of every frozen weight, by name: what an adapter is for."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this run through all its continuations; rank 0's is the one that is written."""
    step: int = 0
    """Steps finished."""
    samples: int = 0
    """Samples consumed by them."""
    scaler: LossScaler | None = None
    """fp16 only."""
    skipped: int = 0
    """Steps of them that were not finite and left the weights as they were."""
    utilization: Utilization | None = None
    """What its steps cost, and of which peak that is a share; None: nobody asks."""
    consecutive: int = 0
    """So many of the last steps, without those for which fp16's loss scale was lowered."""
    about: dict[str, Any] = field(default_factory=dict)
    """What this start of the run is, as its page says it; rank 0's alone."""
    compilations: Compilations | None = None
    """Of the model's blocks; None: they are not compiled."""
    held_out: HeldOut | None = None
    """What it is measured on while it trains; None: it is not."""


@dataclass(frozen=True)
class StepResult:
    """What one step reports, on every rank alike."""

    facts: StepFacts
    loss: float
    lr: float
    grad_norm: float
    """Not finite where the step was skipped."""
    seconds: float
    skipped: bool = False
    """The loss or the gradients were not finite, and the weights are as they were."""
    skipped_steps: int = 0
    """So many until now, this one included."""
    loss_scale: float | None = None
    """What the loss was multiplied with; None: not fp16."""
    recompiles: int = 0
    """Graphs that this rank has compiled since the first steps of its process: each took its step seconds."""
    own_loss_is_finite: bool = True
    """This rank's part of the loss; a field that differs between ranks."""
    source_losses: dict[str, float | None] = field(default_factory=dict)
    """Mean over the label tokens of each source of the dataset; None: the step has none of it. Not finite where
    `loss.kernel` knows the sum of all alone."""
    data_seconds: float = 0.0
    """What this rank waited for the step's data; a field that differs between ranks."""


def assemble(
    model: Llava,
    loader: Loader,
    fill: Callable[[Llava, MasterWeights], None],
    cfg: Config,
    world: World,
    plan: ShardPlan,
    mesh: DeviceMesh | None,
) -> TrainState:
    """A meta-device model made into a run at step 0, on this rank.

    The order matters: what trains, activation checkpointing, sharding, weights into shards, optimizer.

    Args:
        fill: gives the shards their values.
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
