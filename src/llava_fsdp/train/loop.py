"""The training loop: for each step, fetch its data, run its micro-batches and update the weights."""

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch, Step, StepFacts
from llava_fsdp.model.loss import LossCollector
from llava_fsdp.parallel.compile import explained_compiler_errors
from llava_fsdp.parallel.local_shards import plain_shard
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.replicas import same_on_every_rank, sharded_norm
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch
from llava_fsdp.runtime.errors import CompileError, Stopped
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.runtime.seeds import derive
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.profiler import part
from llava_fsdp.train.events.run_events import RunEvents, RunStart
from llava_fsdp.train.expert_sums import ExpertSums, expert_load
from llava_fsdp.train.pipeline_step import run_pipeline
from llava_fsdp.train.state import StepResult, TrainState

Reduction = tuple[DeviceMesh, tuple[int, ...]]
"""Over which ranks a norm is reduced: a mesh, and dimensions of the mesh."""
END: Any = object()
"""What comes after the last step."""


def fit(state: TrainState, cfg: Config, events: RunEvents, watchdog: Watchdog | None = None) -> None:
    """Train from the current step to the last one. Collective.

    Args:
        events: the observers, which are told of each moment on every rank. If a stop was requested, `before_step`
            raises an error on every rank. In this case it is also called on ranks whose data have not arrived, because
            the other ranks wait for them.
    """
    watchdog, last_step = watchdog or Watchdog(), state.loader.total_steps
    with closing(events):
        events.on_start(RunStart(cfg, Path(cfg.output_dir), state.parallelism.world.rank, state.step, last_step))
        for root in state.roots:
            root.train()
        started = time.perf_counter()
        watchdog.at(Phase.DATA, state.step)
        if state.compilations is not None and state.step < last_step:
            log().info("compiling the language model's blocks: the first steps take much longer than those behind them")
        steps = state.loader.prepared(state.step, watchdog.wants_stop)  # a variable, so that its workers stay alive
        with explained_step_errors(state, watchdog):
            while (step := next_step(steps)) is not END:
                waited = time.perf_counter() - started
                watchdog.at(Phase.AGREEING)
                events.before_step()
                assert step is not None, "before_step raises on every rank when one of them was asked to stop"
                watchdog.at(Phase.COMPUTE)
                result = train_step(state, state.loader.agree(step), cfg, started, watchdog)
                if state.dynamic is not None:
                    state.dynamic.after_step(result.skipped)
                # the phase counts as progress in the next step, so that a rank that hangs here counts as late
                watchdog.at(Phase.REPORT, state.step)
                watchdog.step_done()
                events.after_step(replace(result, data_seconds=waited))
                watchdog.at(Phase.DATA)
                started = time.perf_counter()
        events.on_end()


@contextmanager
def explained_step_errors(state: TrainState, watchdog: Watchdog) -> Iterator[None]:
    """Context manager around the steps that explains errors of compilers and of data workers, which are raised
    elsewhere."""
    try:
        with explained_compiler_errors():
            yield
    except (RuntimeError, CompileError) as error:
        state.loader.status.check()  # when a worker dies, the DataLoader's signal handler raises RuntimeError anywhere
        if isinstance(error, CompileError) and watchdog.wants_stop_soon():  # the signal also ended the C++ compiler
            raise Stopped(
                f"{watchdog.stop}: stopped in step {state.step + 1}, while it compiled; the same command continues "
                "from the last checkpoint"
            ) from error
        raise


def next_step(steps: Iterator[Step | None]) -> Any:
    """Wait for the data of the next step. Return them, None if a stop was requested before they came, or `END`."""
    with part("data"):
        return next(steps, END)


def train_step(
    state: TrainState,
    step: Step,
    cfg: Config,
    started: float,
    watchdog: Watchdog | None = None,
) -> StepResult:
    """Run one optimizer step. If the loss or the norm of the gradients is not finite, the update is skipped.
    Collective.

    Args:
        started: time (`time.perf_counter`) at which the step began, which is when its data were requested.

    Raises:
        NumericError: in fp16, gradients overflowed although the loss scale is at its minimum.
    """
    lr = state.learning_rate.apply(state.optimizer, state.step - state.skipped)
    scale = state.scaler.scale if state.scaler is not None else 1.0
    # Seeded anew for each step, so that a resumed run draws the same random numbers as a run without interruption.
    torch.manual_seed(derive("step", cfg.seed, state.step, state.parallelism.seed_rank))
    sources = SourceSums(step.facts, state.loader.device)
    experts = ExpertSums(state.routers, step.facts, cfg.model.balance_loss, state.loader.device)
    if state.pipeline is not None:
        loss_sum = run_pipeline(state, step, scale, sources, experts)
    else:
        loss_sum = run_micro_batches(state, step, scale, sources, experts)
    with part("optimizer"):
        norm = clip_gradients(state.masters, cfg.optim.clip, scale, state.parallelism.line)
        # The only place in a step where the host waits for the device (except for the norm, if weights are in host
        # memory).
        expert_numbers, state.expert_loads = experts.summed()
        counted = state.parallelism.ranks_per_loss
        losses = summed(loss_sum / counted), loss_sum, norm.to(loss_sum.device)
        values = *losses, *(sources.summed() / counted), *expert_numbers
        loss, own_loss, grad_norm, *others = torch.stack(values).tolist()
    is_finite = math.isfinite(grad_norm) and math.isfinite(loss)  # the same on all ranks, because both are global
    if watchdog is not None:
        watchdog.at(Phase.OPTIMIZER)
    update_or_skip(state, is_finite)
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
        source_losses=sources.means(loss, others[: len(sources.sums)]),
        expert_load=expert_load(others[len(sources.sums) :]),
    )


def update_or_skip(state: TrainState, is_finite: bool) -> None:
    """Update the weights, or skip the update if the loss or the gradients are not finite, and free the gradients. In a
    skipped step, weights and moments are not changed and the learning rate schedule does not advance, but the step's
    samples count as consumed.

    Raises:
        NumericError: in fp16, gradients overflowed although the loss scale is at its minimum.
    """
    if state.scaler is not None:
        state.scaler.update(overflowed=not is_finite, step=state.step + 1)
    if is_finite:
        with part("optimizer"):
            state.optimizer.step()
            state.masters.refresh()
        state.consecutive = 0
    else:
        state.skipped += 1
        # with a dynamic loss scale, skipped steps are limited by precision.scaler.minimum instead of this counter
        state.consecutive += state.scaler is None or not state.scaler.is_dynamic
    state.optimizer.zero_grad(set_to_none=True)


class SourceSums:
    """Sums of a step's losses by data source, which stay on the device until the host reads the step's loss.

    The loss of a single data source is the loss of the step, and nothing is computed here. Several sources need one
    more small collective.
    """

    def __init__(self, facts: StepFacts, device: torch.device):
        self.labels = facts.source_labels
        self.sums = torch.zeros(len(self.labels) if len(self.labels) > 1 else 0, device=device)
        """Sum of the losses of each data source, float32 [sources]; of shape [0] for a single one."""

    def collector(self) -> LossCollector | None:
        """Return a collector of the loss of each token in one forward pass; None for a single data source."""
        return LossCollector() if len(self.sums) else None

    def add(self, micro: MicroBatch, collector: LossCollector | None) -> None:
        """Add the losses of one forward pass to the sums of their data sources."""
        if collector is None or not len(micro.label_sources):
            return
        losses = torch.cat(collector.chunks) if collector.chunks else self.sums.new_full((1,), math.nan)
        numbers = torch.arange(len(self.sums), device=losses.device)
        # not `index_add`, because the order of its additions is not fixed on CUDA
        self.sums += torch.where(micro.label_sources == numbers[:, None], losses, 0.0).sum(1)

    def summed(self) -> torch.Tensor:
        """Sum the losses of each data source over all ranks: float32 [sources]; [0] for a single one. A collective if
        there are several sources."""
        return summed(self.sums) if len(self.sums) else self.sums

    def means(self, loss: float, sums: list[float]) -> dict[str, float | None]:
        """Return the mean loss per label token (a token that is in the loss) of each data source. It is None for a
        source without label tokens, and nan if the loss kernel returns only the sum over all sources.

        Args:
            loss: the mean loss of the step.
            sums: `summed`, on the host.
        """
        if not sums:
            return {name: loss if labels else None for name, labels in self.labels.items()}
        found = zip(self.labels.items(), sums, strict=True)
        return {name: total / labels if labels else None for (name, labels), total in found}


def run_micro_batches(
    state: TrainState,
    step: Step,
    scale: float,
    sources: SourceSums,
    experts: ExpertSums,
) -> torch.Tensor:
    """Run the forward and backward passes of a step's micro-batches, one after the other, and add their losses to
    `sources` and `experts`. Return this rank's part of the loss, float32 []. `scale`: the loss scale."""
    loss_sum = torch.zeros((), device=state.loader.device)
    for number, micro in enumerate(step.micro_batches, start=1):
        begin_micro_batch(state.model, state.parallelism.plan, is_last=number == len(step.micro_batches))
        with part("forward"):
            micro = state.loader.to_device(micro)
            collector = sources.collector()
            with experts.keep() as kept:
                loss = micro.scale * state.model(*micro.inputs, collector=collector)
            sources.add(micro, collector)
            trained_loss = experts.add(micro, kept, loss)
        with part("backward"):
            (trained_loss * scale).backward()
        loss_sum += loss.detach()
    return loss_sum


@torch.no_grad()
def clip_gradients(
    masters: MasterWeights, largest: float | None, scale: float = 1.0, line: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Divide the gradients by the loss scale, and then scale them down so that their norm is at most `largest`; None:
    they are not clipped.

    Args:
        line: the ranks that together have all stages of the model, this one included; None: each rank has the whole
            model.

    Returns:
        float32 []: norm of all gradients over all ranks, after the division by `scale` and before clipping.
    """
    gradients = [gradient for p in masters.named.values() if (gradient := p.grad) is not None]
    shards = [plain_shard(gradient) for gradient in gradients]
    norm = gradient_norm(gradients, shards, line)
    if scale != 1.0:
        norm = norm / scale
        if shards:
            torch._foreach_mul_(shards, 1 / scale)
    if largest is not None:
        factor = torch.clamp(largest / (norm + 1e-6), max=1.0)  # that of torch.nn.utils.clip_grads_with_norm_
        of_kinds: dict[Any, list[torch.Tensor]] = {}
        for shard in shards:  # one kernel for all tensors of a kind
            of_kinds.setdefault((shard.device, shard.dtype), []).append(shard)
        for (device, _), of_kind in of_kinds.items():
            torch._foreach_mul_(of_kind, factor.to(device))
    return norm


def gradient_norm(
    gradients: list[torch.Tensor], shards: list[torch.Tensor], line: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the norm of all gradients over all ranks, float32 [], with the same bits on every rank. Collective: all
    ranks must call it.

    Gradients that are DTensors may have several meshes. If a mesh does not contain all ranks, the other ranks hold
    copies of these gradients, which count once, or have other stages of the model.

    Args:
        shards: this rank's shards of the gradients, as plain tensors: operations on DTensors take the host much longer.
        line: the ranks that together have all stages of the model, this one included; None: each rank has the whole
            model.
    """
    groups: dict[Reduction | None, list[torch.Tensor]] = {}
    previous, together = None, []
    # the norm is computed in fp32 also for bf16 gradients, so that it is not rounded to bf16
    every_norm = torch._foreach_norm(shards, 2, dtype=torch.float32) if shards else ()
    for gradient, norm in zip(gradients, every_norm, strict=True):
        kind = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None, ())
        # those that are sharded over the same ranks are reduced together; most are sharded like the one before, and
        # comparing is faster than hashing a mesh
        if kind != previous:
            previous, together = kind, groups.setdefault(reduction(gradient), [])
        together.append(norm)
    norm_of = same_on_every_rank if line is None else sharded_norm
    whole = [
        torch.linalg.vector_norm(torch.stack(norms)) if own is None else norm_of(torch.stack(norms), *own)
        for own, norms in groups.items()
    ]
    if line is not None:
        return norm_over_stages(whole, line)
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def norm_over_stages(norms: list[torch.Tensor], line: dist.ProcessGroup) -> torch.Tensor:
    """Return the norm of the gradients of all stages, float32 [], with the same bits on every rank. Collective.

    Args:
        norms: norms of the gradients of this rank's stages; empty if they train nothing.
        line: the ranks that together have all stages, this one included.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(square, group=line)
    norm = square.sqrt()
    dist.all_reduce(norm, dist.ReduceOp.MAX)  # ranks with the same stages may have added in another order
    return norm


def reduction(gradient: torch.Tensor) -> Reduction | None:
    """Return over which ranks a gradient is sharded, and so its norm is reduced; None if it is not a DTensor."""
    if not isinstance(gradient, DTensor):
        return None
    return gradient.device_mesh, tuple(n for n, own in enumerate(gradient.placements) if not own.is_replicate())


def summed(value: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place, and return it. Collective."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
