"""What a run is made of."""

import uuid
from dataclasses import dataclass, field

import torch
from torch import nn

from llava_fsdp.data.batch import StepFacts
from llava_fsdp.data.loader import Loader
from llava_fsdp.model.weights import Stored
from llava_fsdp.optim import LearningRate
from llava_fsdp.scaler import LossScaler
from llava_fsdp.sharding.precision import MasterWeights


@dataclass
class TrainState:
    """The parts of a run, and how far it has come."""

    model: nn.Module
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loader: Loader
    sources: dict[str, Stored]
    """Where every parameter's first values came from, by name."""
    fingerprints: dict[str, str]
    """Of the dataset, of what encodes it and of the frozen weights: what a checkpoint must agree with to continue."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this run through all its continuations; rank 0's is the one that is written."""
    step: int = 0
    """Steps finished."""
    samples: int = 0
    """Samples consumed by them."""
    scaler: LossScaler | None = None
    """fp16 only."""
    skipped: int = 0
    """Steps of them that overflowed in fp16 and left the weights as they were."""


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
    """Gradients overflowed in fp16, and the weights are as they were."""
    skipped_steps: int = 0
    """So many until now, this one included."""
    loss_scale: float | None = None
    """What the loss was multiplied with; None: not fp16."""
