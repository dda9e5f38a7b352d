"""The training loop: fetch a step, run its micro-batches, update."""

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from llava_fsdp.config import Config
from llava_fsdp.data.batch import Step
from llava_fsdp.errors import NumericError
from llava_fsdp.seeds import derive
from llava_fsdp.sharding.precision import MasterWeights
from llava_fsdp.sharding.zero import ShardPlan, begin_micro_batch
from llava_fsdp.state import StepResult, TrainState


def fit(
    state: TrainState,
    plan: ShardPlan,
    cfg: Config,
    after_step: Callable[[StepResult], None],
) -> None:
    """Train to the last step. `after_step` runs on every rank, after the weights have been updated."""
    state.model.train()
    started = time.perf_counter()
    steps = state.loader.from_step(state.step)  # held, so that its workers can be asked after
    try:
        for step in steps:
            result = train_step(state, step, plan, cfg, started)
            after_step(result)
            started = time.perf_counter()
    except RuntimeError:  # the DataLoader's signal handler raises it wherever a worker's death finds us
        state.loader.check_workers()
        raise


def train_step(state: TrainState, step: Step, plan: ShardPlan, cfg: Config, started: float) -> StepResult:
    """One optimizer step.

    Raises:
        NumericError: the gradients are not finite, on every rank alike; the weights are as they were. In fp16 such a
            step is skipped, and this is raised where the loss scale cannot be lowered any more.
    """
    lr = state.learning_rate.apply(state.optimizer, state.step - state.skipped)
    scale = state.scaler.scale if state.scaler is not None else 1.0
    # for dropout, where a model has it: a run that continues draws what it would have drawn
    torch.manual_seed(derive("step", cfg.seed, state.step, dist.get_rank() if dist.is_initialized() else 0))
    loss_sum = torch.zeros((), device=state.loader.device)
    for number, micro in enumerate(step.micro_batches, start=1):
        begin_micro_batch(state.model, plan, is_last=number == len(step.micro_batches))
        micro = state.loader.to_device(micro)
        loss = micro.scale * state.model(*micro.inputs)
        (loss * scale).backward()
        loss_sum += loss.detach()
    grad_norm = clip_gradients(state.masters, cfg.optim.clip, scale)
    loss = float(summed(loss_sum))
    overflowed = not math.isfinite(grad_norm) or not math.isfinite(loss)  # both are sums over all ranks
    if state.scaler is not None:
        state.scaler.update(overflowed, state.step + 1)
    elif overflowed:
        raise NumericError(
            f"step {state.step + 1}: loss {loss}, gradient norm {grad_norm}; the weights were not updated. "
            "A smaller optim.lr, optim.clip=1.0 or precision=fp32 may help"
        )
    if overflowed:
        state.skipped += 1
    else:
        state.optimizer.step()
        state.masters.refresh()
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
    )


@torch.no_grad()
def clip_gradients(masters: MasterWeights, largest: float | None, scale: float = 1.0) -> float:
    """Norm of all gradients over all ranks, before they are scaled down to `largest` where that is smaller.

    Args:
        scale: what the loss was multiplied with; gradients are divided by it, and the norm is of those.
    """
    gradients = [p.grad for p in masters.named.values() if p.grad is not None]
    # bf16 gradients too are added up in fp32, and the norm is no bf16 number
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if scale != 1.0:
        norm = norm / scale
        torch._foreach_mul_(gradients, 1 / scale)
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(masters.named.values(), largest, norm)
    return float(norm)


def summed(value: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
