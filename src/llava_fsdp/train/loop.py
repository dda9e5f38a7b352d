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
from llava_fsdp.runtime.watchdog import Watchdog
from llava_fsdp.train.gc_schedule import collected_by_plan
from llava_fsdp.train.profiler import NoProfiler
from llava_fsdp.train.state import StepResult, TrainState


def fit(
    state: TrainState,
    plan: ShardPlan,
    cfg: Config,
    after_step: Callable[[StepResult], None],
    between_steps: Callable[[], None] = lambda: None,
    watchdog: Watchdog | None = None,
    profiler: NoProfiler | None = None,
) -> None:
    """Train from the current step to the last one.

    Args:
        after_step: runs on every rank, after the weights have been updated.
        between_steps: runs on every rank once the data of the next step are there, and ends the run where a stop was
            asked for: a rank whose data do not come is asked then too, while the others wait for its answer.
    """
    state.model.train()
    started = time.perf_counter()
    watchdog, profiler = watchdog or Watchdog(), profiler or NoProfiler()
    watchdog.at(Phase.DATA, state.step)
    if state.compilations is not None and state.step < state.loader.total_steps:
        log().info("compiling the language model's blocks: the first steps take much longer than those behind them")
    steps = state.loader.prepared(state.step, watchdog.wants_stop)  # a name keeps its workers alive for watch.check
    try:
        with collected_by_plan(cfg.gc_every) as collect:
            for step in profiler.steps(steps):
                waited = time.perf_counter() - started
                watchdog.at(Phase.AGREEING)
                between_steps()
                assert step is not None, "between_steps raises on every rank when one of them was asked to stop"
                watchdog.at(Phase.COMPUTE)
                result = train_step(state, state.loader.agree(step), plan, cfg, started, watchdog, profiler)
                # counts as progress into the next step: a rank that hangs here is late
                watchdog.at(Phase.REPORT, state.step)
                after_step(replace(result, data_seconds=waited))
                collect(state.step)
                watchdog.at(Phase.DATA)
                started = time.perf_counter()
    except RuntimeError as error:  # the DataLoader's signal handler raises it anywhere when a worker dies
        state.loader.watch.check()
        if is_of_compiler(error) and watchdog.wants_stop_soon():  # the signal to stop has ended the C++ compiler too
            raise Stopped(
                f"{watchdog.stop}: stopped in step {state.step + 1}, while it compiled; the same command continues "
                "from the last checkpoint"
            ) from error
        raise


def train_step(
    state: TrainState,
    step: Step,
    plan: ShardPlan,
    cfg: Config,
    started: float,
    watchdog: Watchdog | None = None,
    profiler: NoProfiler | None = None,
) -> StepResult:
    """Run one optimizer step, or skip the update where the loss or the gradients' norm is not finite. Raises
    NumericError if in fp16, where the loss scale cannot be lowered any more."""
    profiler = profiler or NoProfiler()
    lr = state.learning_rate.apply(state.optimizer, state.step - state.skipped)
    scale = state.scaler.scale if state.scaler is not None else 1.0
    # dropout of a resumed run draws what it would have drawn without the interruption
    torch.manual_seed(derive("step", cfg.seed, state.step, dist.get_rank() if dist.is_initialized() else 0))
    sources = SourceSums(step.facts, state.loader.device)
    loss_sum = torch.zeros((), device=state.loader.device)
    for number, micro in enumerate(step.micro_batches, start=1):
        begin_micro_batch(state.model, plan, is_last=number == len(step.micro_batches))
        with profiler.part("forward"):
            micro = state.loader.to_device(micro)
            each = sources.each()
            loss = micro.scale * state.model(*micro.inputs, each=each)
            sources.add(micro, each)
        with profiler.part("backward"):
            (loss * scale).backward()
        loss_sum += loss.detach()
    with profiler.part("optimizer"):
        norm = clip_gradients(state.masters, cfg.optim.clip, scale)
        # The one place where the host waits for the device; with weights on the host, the norm waits too.
        values = summed(loss_sum.clone()), loss_sum, norm.to(loss_sum.device), *sources.summed().unbind()
        loss, own_loss, grad_norm, *source_sums = torch.stack(values).tolist()
    is_finite = math.isfinite(grad_norm) and math.isfinite(loss)  # the same on every rank: both are sums over all
    if watchdog is not None:
        watchdog.at(Phase.OPTIMIZER)
    update_or_skip(state, is_finite, profiler)
    state.step += 1
    state.samples += step.facts.samples
    return StepResult(
        step.facts,
        loss,
        lr,
        grad_norm,
        time.perf_counter() - started,
        skipped=not is_finite,
        skipped_steps=state.skipped,
        loss_scale=scale if state.scaler is not None else None,
        recompiles=state.compilations.after_step() if state.compilations is not None else 0,
        own_loss_is_finite=math.isfinite(own_loss),
        source_losses=sources.means(loss, source_sums),
    )


def update_or_skip(state: TrainState, is_finite: bool, profiler: NoProfiler) -> None:
    """Update the weights and release the gradients. A step that is not finite is skipped: weights and moments keep
    their bits, the learning rate schedule does not advance, and the step's samples count as consumed. Raises
    NumericError if in fp16, where the loss scale cannot be lowered any more."""
    if state.scaler is not None:
        state.scaler.update(overflowed=not is_finite, step=state.step + 1)
    if is_finite:
        with profiler.part("optimizer"):
            state.optimizer.step()
            state.masters.refresh()
        state.consecutive = 0
    else:
        state.skipped += 1
        # a dynamic loss scale has a limit of its own, precision.scaler.minimum
        state.consecutive += state.scaler is None or not state.scaler.is_dynamic
    state.optimizer.zero_grad(set_to_none=True)


class SourceSums:
    """Losses of a step by data source, kept on the device until the host reads the step's loss.

    With one source this is the step's loss, and nothing is computed or sent. Several need one more small collective.
    """

    def __init__(self, facts: StepFacts, device: torch.device):
        self.labels = facts.source_labels
        self.sums = torch.zeros(len(self.labels) if len(self.labels) > 1 else 0, device=device)
        """Sum of the losses of each data source, float32 [sources]; [0] with one source."""

    def each(self) -> Each | None:
        """A collector of the losses by token of one forward pass; None with one source."""
        return Each() if len(self.sums) else None

    def add(self, micro: MicroBatch, each: Each | None) -> None:
        """Add the losses that one forward pass collected."""
        if each is None or not len(micro.label_sources):
            return
        losses = torch.cat(each.chunks) if each.chunks else self.sums.new_full((1,), math.nan)
        numbers = torch.arange(len(self.sums), device=losses.device)
        # not index_add, which adds in no fixed order on CUDA
        self.sums += torch.where(micro.label_sources == numbers[:, None], losses, 0.0).sum(1)

    def summed(self) -> torch.Tensor:
        """Sum the losses of each source over all ranks: float32 [sources], or [0] with one source."""
        return summed(self.sums) if len(self.sums) else self.sums

    def means(self, loss: float, sums: list[float]) -> dict[str, float | None]:
        """Mean loss of each data source by name, from the step's loss and the result of `summed` on the host.

        None for a source without label tokens; nan where the loss kernel gives only the sum over all sources.
        """
        if not sums:
            return {name: loss if labels else None for name, labels in self.labels.items()}
        found = zip(self.labels.items(), sums, strict=True)
        return {name: total / labels if labels else None for (name, labels), total in found}


@torch.no_grad()
def clip_gradients(masters: MasterWeights, largest: float | None, scale: float = 1.0) -> torch.Tensor:
    """Divide gradients by the loss scale, then scale them down to a norm of at most `largest`; None does not clip.

    Returns:
        float32 []: norm of all gradients over all ranks, after the division by `scale` and before clipping.
    """
    gradients = [p.grad for p in masters.named.values() if p.grad is not None]
    # accumulated in fp32 for bf16 gradients too, so that the norm is not rounded to bf16
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
    norm = same_on_every_rank(norm) if isinstance(norm, DTensor) else norm
    if scale != 1.0:
        norm = norm / scale
        torch._foreach_mul_(gradients, 1 / scale)
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(masters.named.values(), largest, norm)
    return norm


def summed(value: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
