"""The training loop: for each step, fetch its data, run its micro-batches and update the weights."""

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import Step
from llava_fsdp.parallel.compile import explained_compiler_errors
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch
from llava_fsdp.runtime.errors import CompileError, Stopped
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.runtime.seeds import derive
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.profiler import part
from llava_fsdp.train.events.run_events import RunEvents, RunStart
from llava_fsdp.train.gradients import clip_gradients
from llava_fsdp.train.pipeline_step import run_pipeline
from llava_fsdp.train.state import StepResult, TrainState
from llava_fsdp.train.sums.expert_sums import ExpertSums, expert_load
from llava_fsdp.train.sums.pair_step import PairStep
from llava_fsdp.train.sums.pair_sums import losses_by_source, numbers_by_source
from llava_fsdp.train.sums.source_sums import SourceSums, sum_over_ranks

NO_MORE_STEPS: Any = object()
"""What comes after the last step."""


def fit(state: TrainState, cfg: Config, events: RunEvents, watchdog: Watchdog | None = None) -> None:
    """Train from the current step to the last one. Collective.

    Args:
        events: the observers, which are told of each moment on every rank. If a stop was requested, `before_step`
            raises on every rank, also where the step's data have not arrived, because the others wait for it.
    """
    watchdog, last_step = watchdog or Watchdog(), state.loader.total_steps
    with closing(events):
        events.on_start(RunStart(cfg, Path(cfg.output_dir), state.parallelism.world.rank, state.step, last_step))
        for root in state.roots:
            root.train()
        began_at = time.perf_counter()
        watchdog.at(Phase.DATA, state.step)
        if state.compilations is not None and state.step < last_step:
            log().info("compiling the language model's blocks: the first steps take much longer than those behind them")
        steps = state.loader.steps_from(state.step, watchdog.wants_stop)  # a variable, so that its workers stay alive
        with explained_step_errors(state, watchdog):
            while not state.ends_early and (step := next_step(steps)) is not NO_MORE_STEPS:
                data_seconds = time.perf_counter() - began_at
                watchdog.at(Phase.AGREEING)
                events.before_step()
                assert step is not None, "before_step raises on every rank when one of them was asked to stop"
                watchdog.at(Phase.COMPUTE)
                # `agree` leaves out samples that any rank skipped
                result = train_step(state, state.loader.agree(step), cfg, began_at, watchdog)
                if state.dynamic is not None:
                    state.dynamic.after_step(result.skipped)
                # the phase counts as progress in the next step, so that a rank that hangs here counts as late
                watchdog.at(Phase.REPORT, state.step)
                watchdog.step_done()
                events.after_step(replace(result, data_seconds=data_seconds))
                watchdog.at(Phase.DATA)
                began_at = time.perf_counter()
        events.on_end()


@contextmanager
def explained_step_errors(state: TrainState, watchdog: Watchdog) -> Iterator[None]:
    """Context manager around the steps that explains two kinds of errors. Those of torch.compile become CompileError,
    or Stopped if a signal to stop has also ended the C++ compiler. A RuntimeError that is raised because a data worker
    has died is replaced by an error that says why the worker died."""
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
    """Wait for the next step's data. Return them, None (a stop was requested before they came) or `NO_MORE_STEPS`."""
    with part("data"):
        return next(steps, NO_MORE_STEPS)


def train_step(
    state: TrainState,
    step: Step,
    cfg: Config,
    began_at: float,
    watchdog: Watchdog | None = None,
) -> StepResult:
    """Run one optimizer step. If the loss or the norm of the gradients is not finite, the update is skipped.
    Collective. `began_at`: time (`time.perf_counter`) at which the step began, which is when its data were requested.
    Raises NumericError if, in fp16, gradients overflowed although the loss scale is at its minimum."""
    lr = state.learning_rate.apply(state.optimizer, state.step - state.skipped)
    scale = state.scaler.scale if state.scaler is not None else 1.0
    # Seeded anew for each step, so that a resumed run draws the same random numbers as a run without interruption.
    torch.manual_seed(derive("step", cfg.seed, state.step, state.parallelism.seed_rank))
    sources = SourceSums(step.facts, state.loader.device)
    experts = ExpertSums(state.routers, step.facts, cfg.model.balance_loss, state.loader.device)
    pairs = PairStep(cfg, state.loader.device, state.pair_reference) if cfg.data.pairs else None
    if state.pipeline is not None:
        loss_sum = run_pipeline(state, step, scale, sources, experts)
    else:
        loss_sum = run_micro_batches(state, step, scale, sources, experts, pairs)
    with part("optimizer"):
        norm = clip_gradients(state.masters, cfg.optim.clip, scale, state.parallelism.pipeline_group)
        # The only place in a step where the host waits for the device (except for the norm, if weights are in host
        # memory).
        expert_numbers, state.expert_loads = experts.summed()
        ranks_per_loss = state.parallelism.ranks_per_loss  # so many ranks add the same losses to the sum over all ranks
        losses = sum_over_ranks(loss_sum / ranks_per_loss), loss_sum, norm.to(loss_sum.device)
        values = *losses, *(sources.sum_over_ranks() / ranks_per_loss), *expert_numbers
        if pairs is not None:
            values = *values, *sum_over_ranks(pairs.sums.values).flatten()
        loss, own_loss, grad_norm, *others = torch.stack(values).tolist()
    of_sources, others = others[: len(sources.sums)], others[len(sources.sums) :]
    of_experts, of_pairs = others[: len(expert_numbers)], others[len(expert_numbers) :]
    pair_results = numbers_by_source(of_pairs, cfg.data.source_names) if of_pairs else None
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
        time.perf_counter() - began_at,
        skipped=not is_finite,
        skipped_steps=state.skipped,
        loss_scale=scale if state.scaler is not None else None,
        recompiles=state.compilations.after_step() if state.compilations is not None else 0,
        own_loss_is_finite=math.isfinite(own_loss),
        source_losses=sources.means(loss, of_sources) if pair_results is None else losses_by_source(pair_results),
        expert_load=expert_load(of_experts),
        pairs=pair_results,
    )


def update_or_skip(state: TrainState, is_finite: bool) -> None:
    """Update the weights, or skip the update if the loss or the gradients are not finite, and free the gradients. A
    skipped step changes no weights, moments or learning rate, but its samples count as consumed.

    Raises:
        NumericError: in fp16, gradients overflowed although the loss scale is at its minimum.
    """
    if state.scaler is not None:
        state.scaler.update(overflowed=not is_finite, step=state.step + 1)
    if is_finite:
        with part("optimizer"):
            state.optimizer.step()
            state.masters.refresh()  # updates the parameters that are copies of master weights in another dtype
            if state.average is not None:
                state.average.update()
        state.consecutive = 0
    else:
        state.skipped += 1
        # with a dynamic loss scale, skipped steps are limited by precision.scaler.minimum instead of this counter
        state.consecutive += state.scaler is None or not state.scaler.is_dynamic
    state.masters.free_gradients()


def run_micro_batches(
    state: TrainState,
    step: Step,
    scale: float,
    sources: SourceSums,
    experts: ExpertSums,
    pairs: PairStep | None = None,
) -> torch.Tensor:
    """Run the forward and backward passes of a step's micro-batches, one after the other, and add their losses to
    `sources` and `experts`. Return this rank's part of the label loss, float32 []: without `scale` (the loss scale) and
    the load-balance loss of experts, which is trained too. `pairs` makes losses of pairs from those of labels."""
    loss_sum = torch.zeros((), device=state.loader.device)
    for number, micro in enumerate(step.micro_batches, start=1):
        begin_micro_batch(state.model, state.parallelism.plan, is_last=number == len(step.micro_batches))
        with part("forward"):
            micro = state.loader.to_device(micro)
            collector = sources.collector()
            reference = pairs.reference(state.model, micro) if pairs is not None else None
            with experts.keep() as kept:
                output = state.model(**micro.inputs, collector=collector)
            loss = micro.scale * (output if pairs is None else pairs.loss(micro, output, reference))
            if pairs is None:
                sources.add(micro, collector)
            trained_loss = experts.add(micro, kept, loss)
        with part("backward"):
            (trained_loss * scale).backward()
        loss_sum += loss.detach()
    return loss_sum
