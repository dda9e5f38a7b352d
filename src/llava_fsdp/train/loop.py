"""The training loop: fetch a step, run its micro-batches, update."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch, Step, StepFacts
from llava_fsdp.distributed.compile import is_of_compiler
from llava_fsdp.distributed.precision import MasterWeights
from llava_fsdp.distributed.replicas import same_on_every_rank
from llava_fsdp.distributed.zero import ShardPlan, begin_micro_batch
from llava_fsdp.model.loss import Each
from llava_fsdp.runtime.errors import Stopped
from llava_fsdp.runtime.heartbeat import Phase
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.seeds import derive
from llava_fsdp.runtime.watchdog import Life
from llava_fsdp.train.gc_schedule import collected_by_plan
from llava_fsdp.train.profiler import Unrecorded
from llava_fsdp.train.state import StepResult, TrainState


def fit(
    state: TrainState,
    plan: ShardPlan,
    cfg: Config,
    after_step: Callable[[StepResult], None],
    between_steps: Callable[[], None] = lambda: None,
    life: Life | None = None,
    recorder: Unrecorded | None = None,
) -> None:
    """Train to the last step.

    Args:
        after_step: runs on every rank, after the weights have been updated.
        between_steps: runs on every rank once the data of the next step are there, and ends the run where a stop was
            asked for: a rank whose data do not come is asked then too, while the others wait for its answer.
        recorder: of a few steps; None: nobody listens.
    """
    state.model.train()
    started = time.perf_counter()
    life, recorder = life or Life(), recorder or Unrecorded()
    life.at(Phase.DATA, state.step)
    if state.compilations is not None and state.step < state.loader.total_steps:
        log().info("compiling the language model's blocks: the first steps take much longer than those behind them")
    steps = state.loader.prepared(state.step, life.wants_stop)  # held, so that its workers can be asked after
    try:
        with collected_by_plan(cfg.gc_every) as collect:
            for step in recorder.steps(steps):
                waited = time.perf_counter() - started
                life.at(Phase.AGREEING)
                between_steps()
                assert step is not None, "a rank that is asked to stop stops all"
                life.at(Phase.COMPUTE)
                result = train_step(state, state.loader.agree(step), plan, cfg, started, life, recorder)
                life.at(Phase.REPORT, state.step)  # the next step's place already: whoever stays here is behind
                after_step(replace(result, data_seconds=waited))
                collect(state.step)
                life.at(Phase.DATA)
                started = time.perf_counter()
    except RuntimeError as error:  # the DataLoader's signal handler raises it wherever a worker's death finds us
        state.loader.watch.check()
        if is_of_compiler(error) and life.was_asked():  # the signal has ended the C++ compiler too
            raise Stopped(
                f"{life.stop}: stopped in step {state.step + 1}, while it compiled; the same command continues from "
                "the last checkpoint"
            ) from error
        raise


def train_step(
    state: TrainState,
    step: Step,
    plan: ShardPlan,
    cfg: Config,
    started: float,
    life: Life | None = None,
    recorder: Unrecorded | None = None,
) -> StepResult:
    """One optimizer step.

    Where the loss or the norm of the gradients is not finite, on every rank alike, the step is skipped: weights and
    moments stay as they are to the bit, the schedule waits, and the samples are spent.

    Raises:
        NumericError: in fp16, where the loss scale cannot be lowered any more.
    """
    recorder = recorder or Unrecorded()
    lr = state.learning_rate.apply(state.optimizer, state.step - state.skipped)
    scale = state.scaler.scale if state.scaler is not None else 1.0
    # for dropout, where a model has it: a run that continues draws what it would have drawn
    torch.manual_seed(derive("step", cfg.seed, state.step, dist.get_rank() if dist.is_initialized() else 0))
    loss_sum = torch.zeros((), device=state.loader.device)
    sources = SourceSums(step.facts, state.loader.device)
    for number, micro in enumerate(step.micro_batches, start=1):
        begin_micro_batch(state.model, plan, is_last=number == len(step.micro_batches))
        with recorder.part("forward"):
            micro = state.loader.to_device(micro)
            each = sources.each()
            loss = micro.scale * state.model(*micro.inputs, each=each)
            sources.add(micro, each)
        with recorder.part("backward"):
            (loss * scale).backward()
        loss_sum += loss.detach()
    with recorder.part("optimizer"):
        norm = clip_gradients(state.masters, cfg.optim.clip, scale)
        # The one place where the host waits for the device. Of weights that lie on the host, the norm does too.
        found = summed(loss_sum.clone()), loss_sum, norm.to(loss_sum.device), *sources.summed().unbind()
        loss, own_loss, grad_norm, *of_sources = torch.stack(found).tolist()
    overflowed = not math.isfinite(grad_norm) or not math.isfinite(loss)  # both are sums over all ranks
    if life is not None:
        life.at(Phase.OPTIMIZER)
    if state.scaler is not None:
        state.scaler.update(overflowed, state.step + 1)
    if overflowed:
        state.skipped += 1
        # a scale that is lowered has a limit of its own, precision.scaler.minimum
        state.consecutive += state.scaler is None or not state.scaler.is_dynamic
    else:
        with recorder.part("optimizer"):
            state.optimizer.step()
            state.masters.refresh()
        state.consecutive = 0
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += step.facts.samples
    return StepResult(
        step.facts,
        loss,
        lr,
        grad_norm,
        time.perf_counter() - started,
        skipped=overflowed,
        skipped_steps=state.skipped,
        loss_scale=scale if state.scaler is not None else None,
        recompiles=state.compilations.after_step() if state.compilations is not None else 0,
        own_loss_is_finite=math.isfinite(own_loss),
        source_losses=sources.means(loss, of_sources),
    )


class SourceSums:
    """The losses of a step by source, on the device, until the host reads the step's loss.

    With one source it is the step's loss: nothing is computed and nothing sent. With several the loss is made as
    without, and one small collective more carries their sums.
    """

    def __init__(self, facts: StepFacts, device: torch.device):
        self.labels = facts.source_labels
        self.sums = torch.zeros(len(self.labels) if len(self.labels) > 1 else 0, device=device)
        """float32 [sources], or none"""

    def each(self) -> Each | None:
        """For one forward pass."""
        return Each() if len(self.sums) else None

    def add(self, micro: MicroBatch, each: Each | None) -> None:
        """What a forward pass found."""
        if each is None or not len(micro.label_sources):
            return
        losses = torch.cat(each.chunks) if each.chunks else self.sums.new_full((1,), math.nan)
        numbers = torch.arange(len(self.sums), device=losses.device)
        # not by index_add, whose order is anybody's guess on CUDA
        self.sums += torch.where(micro.label_sources == numbers[:, None], losses, 0.0).sum(1)

    def summed(self) -> torch.Tensor:
        """float32 [sources], or none: on all ranks together."""
        return summed(self.sums) if len(self.sums) else self.sums

    def means(self, loss: float, sums: list[float]) -> dict[str, float | None]:
        """By source, None where it has no labels; not a number where `loss.kernel` knows the sum of all alone.

        Of one source it is the step's own, by whatever `loss.normalize` says; of several the mean over label tokens.

        Args:
            loss: the whole step's.
            sums: of all ranks.
        """
        if not sums:
            return {name: loss if labels else None for name, labels in self.labels.items()}
        found = zip(self.labels.items(), sums, strict=True)
        return {name: total / labels if labels else None for (name, labels), total in found}


@torch.no_grad()
def clip_gradients(masters: MasterWeights, largest: float | None, scale: float = 1.0) -> torch.Tensor:
    """Norm of all gradients over all ranks, before they are scaled down to `largest` where that is smaller: float32 [].

    Args:
        scale: what the loss was multiplied with; gradients are divided by it, and the norm is of those.
    """
    gradients = [p.grad for p in masters.named.values() if p.grad is not None]
    # bf16 gradients too are added up in fp32, and the norm is no bf16 number
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
    norm = same_on_every_rank(norm) if isinstance(norm, DTensor) else norm
    if scale != 1.0:
        norm = norm / scale
        torch._foreach_mul_(gradients, 1 / scale)
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(masters.named.values(), largest, norm)
    return norm


def summed(value: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
