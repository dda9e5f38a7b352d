"""The state of a training run: model, optimizer, data and counters.

Its parts are imported for their types alone: the training loop needs no more of the package than it calls.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from llava_fsdp.data.batching.batch import StepFacts
    from llava_fsdp.data.loader import Loader
    from llava_fsdp.data.validation_set import HeldOut
    from llava_fsdp.distributed.compile import Compilations
    from llava_fsdp.distributed.precision import MasterWeights
    from llava_fsdp.model.tensor_files import Stored
    from llava_fsdp.plan.mfu import Utilization
    from llava_fsdp.train.loss_scaler import LossScaler
    from llava_fsdp.train.optimizer import LearningRate


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
    scaler: LossScaler | None = None
    """None unless the precision is fp16."""
    skipped: int = 0
    """Finished steps without an update, because the loss or the gradients were not finite."""
    utilization: Utilization | None = None
    consecutive: int = 0
    """Skipped steps since the last update, without those after which fp16's loss scale was lowered."""
    about: dict[str, Any] = field(default_factory=dict)
    """Description of this start for `starts.jsonl` and the report; empty on other ranks than 0."""
    compilations: Compilations | None = None
    """None if the model's blocks are not compiled."""
    held_out: HeldOut | None = None


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
    skipped_steps: int = 0
    """Of the run so far, this step included."""
    loss_scale: float | None = None
    """None in other precisions than fp16."""
    recompiles: int = 0
    """Graphs that this rank compiled after the first steps of its process. Each delayed a step by seconds."""
    own_loss_is_finite: bool = True
    """Whether this rank's part of the loss is finite; differs between ranks."""
    source_losses: dict[str, float | None] = field(default_factory=dict)
    """Data source -> mean loss over its label tokens; None if the step has none of them. Not finite with a
    `loss.kernel` that returns only the sum over all sources."""
    data_seconds: float = 0.0
    """Seconds that this rank waited for the step's data; differs between ranks."""
