"""The state of a training: model, optimizer, data and counters.

Other modules are imported only for type annotations, so that importing this module loads nothing else of the package.
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
    from llava_fsdp.model.experts import RouterOutputs
    from llava_fsdp.model.weights.tensor_files import Stored
    from llava_fsdp.parallel.compile import Compilations
    from llava_fsdp.parallel.memory.dynamic_checkpoint import DynamicCheckpointing
    from llava_fsdp.parallel.parallelism import Parallelism
    from llava_fsdp.parallel.pipeline.own_stages import Elsewhere
    from llava_fsdp.parallel.pipeline.pipeline import Pipeline
    from llava_fsdp.parallel.precision.precision import MasterWeights
    from llava_fsdp.plan.time.mfu import Utilization
    from llava_fsdp.train.average import WeightAverage
    from llava_fsdp.train.loss_scaler import LossScaler
    from llava_fsdp.train.optimizer import LearningRate


@dataclass
class TrainState:
    """Model, optimizer, data, and counters of the progress."""

    model: nn.Module
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loader: Loader
    parallelism: Parallelism
    sources: dict[str, Stored] = field(default_factory=dict)
    """Sources of the parameters' initial values. Empty in a dry run, which saves nothing."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Digests of the dataset, of the encoding and the order of its samples, and of the model. A run does not resume
    from a checkpoint with other fingerprints."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the values of frozen parameters. A hash of them is saved with an adapter, so that its base model can
    be recognized."""
    start_digest: str = ""
    """Digest of all weights as training begins; empty unless the reference of pairs is made from them."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifier of the run, kept when the run resumes. Each rank has its own; files contain that of rank 0."""
    step: int = 0
    """Number of finished steps, including skipped ones."""
    samples: int = 0
    """Number of samples in the finished steps."""
    scaler: LossScaler | None = None
    """None unless the precision is fp16."""
    ends_early: bool = False
    """Whether no step follows, because validations have not become better (`val.patience`)."""
    skipped: int = 0
    """Number of finished steps without an update, because the loss or the gradients were not finite."""
    utilization: Utilization | None = None
    consecutive: int = 0
    """Number of skipped steps since the last update. With a dynamic loss scale (fp16) it stays 0, because skipped steps
    are then limited by the scale's minimum."""
    about: dict[str, Any] = field(default_factory=dict)
    """Description of this start of the run, for `starts.jsonl` and the report. Empty on ranks other than 0."""
    compilations: Compilations | None = None
    """Counter of compiled graphs; None if the model's blocks are not compiled."""
    dynamic: DynamicCheckpointing | None = None
    """None unless `activation_checkpointing=dynamic`."""
    held_out: HeldOut | None = None
    routers: RouterOutputs | None = None
    """Keeps what the routers of a mixture of experts return; None: no routers, or they are not watched."""
    pipeline: Pipeline | None = None
    """This rank's stages of the model; None: it has the whole model."""
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    """Trained parameters that only ranks with other stages have, by name."""
    pair_reference: torch.Tensor | None = None
    """With pref.reference=stored: log-probabilities of the chosen and the rejected answer of each sample by the model
    at the start of the run, float32 [samples, 2]."""
    held_out_pair_reference: torch.Tensor | None = None
    """The same of the held-out samples; NaN for a record that val.limit leaves out."""
    average: WeightAverage | None = None
    """Moving average of the weights (`optim.ema`)."""
    expert_loads: torch.Tensor | None = None
    """Load of each expert in the last finished step, over all ranks: number of (token, choice) pairs, float32 [layers,
    experts]. None without watched routers."""

    @property
    def trained(self) -> list[str]:
        """Names of all trained parameters, also of those that only other ranks have."""
        return sorted({*self.masters.named, *self.elsewhere})

    @property
    def roots(self) -> list[nn.Module]:
        """The modules whose forward is called: the model, or this rank's stages of it."""
        return self.pipeline.roots if self.pipeline is not None else [self.model]


@dataclass(frozen=True)
class ExpertLoad:
    """How evenly a training step used the experts of a mixture, the same on every rank."""

    balance_loss: float
    """Load-balance loss, a mean over layers and tokens, without its coefficient; 1 if the loads are equal."""
    expert_load_max: float
    """Greatest load of an expert, over all layers, divided by the equal share."""
    experts_idle: float
    """Share of the experts of all layers whose load is less than a tenth of the equal share."""


@dataclass(frozen=True)
class PairNumbers:
    """Means over the pairs of a step or of a validation."""

    pairs: int
    """Number of pairs."""
    loss: float
    accuracy: float
    """Share of pairs whose chosen answer has the higher reward."""
    margin: float
    """Reward of the chosen answer minus that of the rejected one."""
    reward_chosen: float
    """pref.beta times the score of the chosen answer."""
    reward_rejected: float
    logp_chosen: float
    """Log-probability of all tokens of the chosen answer."""
    logp_rejected: float


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Fields are the same on every rank, unless their description says otherwise."""

    facts: StepFacts
    loss: float
    lr: float
    grad_norm: float
    """Norm of all gradients before clipping; not finite if the gradients overflowed."""
    seconds: float
    skipped: bool = False
    skipped_steps: int = 0
    """Number of skipped steps of the run so far, with this one."""
    loss_scale: float | None = None
    """Loss scale of this step; None unless the precision is fp16."""
    recompiles: int = 0
    """Number of graphs that this rank has compiled so far, without those of the first steps of its process. Each
    compilation delays a step by seconds."""
    own_loss_is_finite: bool = True
    """Whether this rank's part of the loss is finite. Differs between ranks."""
    source_losses: dict[str, float | None] = field(default_factory=dict)
    """Mean loss of the label tokens of each data source; None if the step has none of this source, not finite if the
    loss kernel returns only the sum over all sources."""
    expert_load: ExpertLoad | None = None
    """None without watched routers."""
    pairs: dict[str, PairNumbers | None] | None = None
    """What is reported of pairs (`data.pairs`), by data source, and of all sources under `pair_sums.ALL`; None for a
    source without pairs in this step."""
    data_seconds: float = 0.0
    """Seconds that this rank waited for the step's data. Differs between ranks."""
