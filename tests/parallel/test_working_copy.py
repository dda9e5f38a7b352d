"""At world size 1 nothing is wrapped, and the arithmetic is still that of `fully_shard` on one rank, bit for bit.

The bodies take a device, so that the GPU tests run the very same ones (gpu/test_cuda.py).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import CPU
from loaders import agreed_steps
from small import Configure
from tiers import slow_after
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlavaForConditionalGeneration

from llava_fsdp.config import Config
from llava_fsdp.parallel.local_shards import whole
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import COLUMNS, GradientInto, MasterWeights, gradient_adder
from llava_fsdp.parallel.ranks.mesh import Meshes, join
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.train import final_export
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.state import TrainState

STEPS = 3
ACCUMULATION = 2
BF16 = ("precision=bf16", "pack=false", "micro_batch_size=6", f"max_steps={STEPS}", "optim.clip=0.5")


@dataclass
class Trace:
    """What a few steps of training did."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, torch.Tensor]


@contextlib.contextmanager
def one_rank_mesh(device: torch.device) -> Iterator[DeviceMesh]:
    """A process group of this process alone, as `train` begins it, and its mesh."""
    join(World(0, 1, 0, 1, device), timeout_seconds=60)
    try:
        yield init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.2)  # gloo's thread may abort the interpreter otherwise (pytorch#179291)


def build_run(cfg: Config, device: torch.device, mesh: DeviceMesh | None) -> TrainState:
    """A run before its first step, as `train` builds it, on any device and mesh."""
    plan = SHARD_PLANS[cfg.sharding.strategy]
    state = build_state(cfg, Parallelism(World(0, 1, 0, 1, device), cfg.parallel, plan, Meshes(mesh)))
    state.model.train()
    return state


def run_steps(state: TrainState, cfg: Config) -> Trace:
    losses, norms = [], []
    for step in agreed_steps(state.loader):
        result = train_step(state, step, cfg, 0.0)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return Trace(losses, norms, {n: whole(p).cpu().clone() for n, p in state.masters.named.items()})


def train_alone(cfg: Config, device: torch.device) -> Trace:
    """Training of one rank as users get it: nothing wrapped, no process group."""
    state = build_run(cfg, device, None)
    assert state.loader.num_micro_batches == cfg.global_batch_size // cfg.micro_batch_size
    return run_steps(state, cfg)


def train_sharded(cfg: Config, device: torch.device) -> Trace:
    """The same through `fully_shard`, on a mesh of one rank."""
    with one_rank_mesh(device) as mesh:
        return run_steps(build_run(cfg, device, mesh), cfg)


def assert_same_bits(ours: Trace, theirs: Trace) -> None:
    assert len(ours.losses) == STEPS
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    assert ours.masters.keys() == theirs.masters.keys()
    different = [n for n, value in ours.masters.items() if not torch.equal(value, theirs.masters[n])]
    assert not different


def assert_close_losses(trace: Trace, reference: Trace, bound: float) -> None:
    for ours, exact in zip(trace.losses, reference.losses, strict=True):
        assert abs(ours - exact) <= bound * abs(exact), f"{trace.losses} is not within {bound} of {reference.losses}"


def assert_transfers_whole(cfg: Config, device: torch.device) -> int:
    """Every micro-batch reaches the device as it was made, although nothing waits for the copies.

    On a GPU the stream is kept busy first, so that each copy is still to come when the host's tensors are dropped and
    their pinned memory is given to the next step.

    Returns:
        Micro-batches compared.
    """
    state = build_run(cfg, device, None)
    loader, steps = state.loader, state.loader.steps
    placed = []
    for step in agreed_steps(loader):
        for micro in step.micro_batches:
            if device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            placed.append(loader.to_device(micro))
    originals = [micro for number in range(loader.total_steps) for micro in steps.prepare(number).micro_batches]
    for got, made in zip(placed, originals, strict=True):
        assert got.lengths == made.lengths
        for name, values in made.tensors.items():
            if name != "images.tiles":
                assert torch.equal(got.tensors[name].cpu(), values), name
        channel = torch.arange(3).view(1, 3, 1, 1)
        assert torch.equal(got.images["tiles"].cpu(), loader.table.cpu()[channel, made.images["tiles"].long()])
    return len(placed)


def export_and_reload(cfg: Config, device: torch.device) -> float:
    """Train, export, load the folder with transformers on the device; the largest relative difference of logits."""
    state = build_run(cfg, device, None)
    run_steps(state, cfg)
    folder = final_export.export(state, cfg, is_first_rank=True)
    micro = state.loader.to_device(state.loader.steps.probe()[0])
    reloaded = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    state.model.eval()
    ids = micro.input_ids.clone()
    ids.view(-1)[micro.images["positions"]] = reloaded.config.image_token_id
    with torch.no_grad():
        ours = state.model(**micro.inputs, return_logits=True)
        theirs = reloaded(input_ids=ids, pixel_values=micro.images["tiles"]).logits.flatten(0, 1)[micro.label_positions]
    return float((theirs[:, : ours.shape[1]] - ours).abs().max() / ours.abs().max())


SAME_BITS_CASES = [
    ("finetune", "zero1", "none"),
    ("pretrain", "zero3", "full"),
    ("pretrain", "zero2", "none"),
    ("finetune", "zero2", "full"),
    ("finetune", "zero3", "full"),
    ("tower", "zero3", "full"),
]


def same_bits_values(stage: str, sharding: str, activation_checkpointing: str) -> tuple[str, list[str]]:
    """The stage and the values of one of SAME_BITS_CASES; `tower` is the second stage with a trained vision tower."""
    values = [*BF16, f"sharding={sharding}", f"activation_checkpointing={activation_checkpointing}"]
    if stage == "tower":
        return "finetune", [*values, "model.train=[projector,language,vision]"]
    return stage, values


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "sharding", "activation_checkpointing"), slow_after(1, SAME_BITS_CASES))
def test_one_rank_equals_fully_shard_bit_for_bit(
    stage: str, sharding: str, activation_checkpointing: str, configure: Configure
) -> None:
    stage, values = same_bits_values(stage, sharding, activation_checkpointing)
    cfg = configure(*values, stage=stage, to="run")
    assert cfg.global_batch_size // cfg.micro_batch_size == ACCUMULATION
    assert_same_bits(train_alone(cfg, CPU), train_sharded(cfg, CPU))


OTHER_PRECISIONS = {
    "fp16": ["precision=fp16", "sharding=zero3"],
    "bf16_pure": ["precision=bf16_pure", "sharding=zero1"],
    "bf16_pure, gradients added in fp32": ["precision=bf16_pure", "precision.reduce_dtype=fp32", "sharding=zero2"],
    "int8 moments": ["precision.moment_dtype=int8", "sharding=zero2"],
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", slow_after(1, OTHER_PRECISIONS))
def test_one_rank_equals_fully_shard_in_other_precisions(name: str, configure: Configure) -> None:
    cfg = configure(*BF16, *OTHER_PRECISIONS[name], to="run")
    assert_same_bits(train_alone(cfg, CPU), train_sharded(cfg, CPU))


@pytest.mark.slow
def test_bf16_is_near_fp32(configure: Configure) -> None:
    exact = configure(*BF16, "precision=fp32", to="run")
    cfg = configure(*BF16, to="run")
    assert_close_losses(train_alone(cfg, CPU), train_alone(exact, CPU), 0.03)


def test_micro_batches_arrive_whole(configure: Configure) -> None:
    cfg = configure(*BF16, to="run")
    assert assert_transfers_whole(cfg, CPU) == STEPS * ACCUMULATION
    cfg = configure(*BF16, "pack=true", "micro_batch_size=1", to="run")
    assert assert_transfers_whole(cfg, CPU) > STEPS


def test_export_reloads(configure: Configure) -> None:
    cfg = configure(f"max_steps={STEPS}", "export.enabled=true", "export.dtype=fp32", to="run")
    assert export_and_reload(cfg, CPU) < 1e-4


class BytesMoved(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "detach" not in str(func):
            self.total += sum(each.nbytes for each in (*args, result) if isinstance(each, torch.Tensor))
        return result


def test_a_gradient_is_added_in_fp32_without_a_copy() -> None:
    """At most 10 bytes a weight: the sum is read and written, the bf16 gradient is read."""
    weight = torch.nn.Parameter(torch.zeros(33, 7, dtype=torch.bfloat16))
    masters = MasterWeights({"w": weight})
    gradients = torch.randn(5, 33, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.zeros(33, 7)
    for number, gradient in enumerate(gradients):
        moved = BytesMoved()
        weight.grad = gradient.clone()
        with moved, torch.no_grad():
            GradientInto(masters.named["w"], gradient_adder(compiled=False))(weight)
        assert moved.total == weight.numel() * (10 if number else 6) and weight.grad is None
        expected += gradient.float()
    assert torch.equal(masters.named["w"].grad, expected)


ADDED_SHAPES = [(33, 7), (COLUMNS, 3), (5, 2, COLUMNS), (COLUMNS,)]


@pytest.mark.parametrize("shape", slow_after(1, map(pytest.param, ADDED_SHAPES)))
def test_a_compiled_kernel_adds_the_same_bits(shape: tuple[int, ...]) -> None:
    """Also sizes that it leaves to torch's own kernel, and gradients that are not contiguous."""
    dice = torch.Generator().manual_seed(0)
    total = torch.randn(shape, generator=dice)
    gradient = torch.randn(shape, generator=dice).bfloat16()
    add = gradient_adder(compiled=True)
    for given in (gradient, gradient.t().contiguous().t() if len(shape) == 2 else gradient):
        found, expected = total.clone(), total + given.float()
        add(found, given)
        assert torch.equal(found, expected)
