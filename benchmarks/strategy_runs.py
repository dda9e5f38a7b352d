"""A training step by DDP or by a sharding strategy, from one configuration: the subjects of several benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import ASSETS, composed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from llava_fsdp.config import Config, DType, ShardingConfig, Strategy
from llava_fsdp.data.batching.batch import Step
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights, load_weights
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.parallel.local_shards import clean_name, local_shards
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import DTYPES, MasterWeights, store_weights
from llava_fsdp.parallel.ranks.mesh import Meshes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Mesh
from llava_fsdp.train.gradients import clip_gradients
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.optimizer import build_optimizer
from llava_fsdp.train.setup.build_state import build_state, open_data
from llava_fsdp.train.state import TrainState
from llava_fsdp.train.sums.source_sums import sum_over_ranks

STRATEGIES = {plan.zero: strategy for strategy, plan in SHARD_PLANS.items()}
CORPORA = {"pretrain": "captions.json", "finetune": "instructions.json"}


@dataclass(frozen=True)
class Case:
    """The work: a stage, and the number of micro-batches of a step. Its samples do not depend on that number."""

    stage: str
    accumulation: int

    def __str__(self) -> str:
        return f"{self.stage}, accumulation {self.accumulation}"


@dataclass
class Run:
    """A variant that was built for a case, and what was measured of it."""

    variant: str
    cfg: Config
    state: TrainState
    ddp: DistributedDataParallel | None
    allocated_before: int
    """Bytes on the GPU before it was built."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    moved: dict[str, dict[str, int]] = field(default_factory=dict)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)

    def step(self, step: Step) -> None:
        if self.ddp is not None:
            loss, norm = ddp_step(self.state, self.ddp, step, self.cfg)
        else:
            result = train_step(self.state, step, self.cfg, 0.0)
            loss, norm = result.loss, result.grad_norm
        self.losses.append(loss)
        self.norms.append(norm)


def ddp_step(state: TrainState, ddp: DistributedDataParallel, step: Step, cfg: Config) -> tuple[float, float]:
    """`train_step` as one writes it with DDP: the same loss, the same sum of gradients, the same update."""
    lr_source, device = state.learning_rate, state.loader.device
    lr_source.apply(state.optimizer, state.step)
    loss_sum = torch.zeros((), device=device)
    bf16 = cfg.precision.param_dtype is DType.bf16
    for number, micro in enumerate(step.micro_batches, start=1):
        last = number == len(step.micro_batches)
        with contextlib.nullcontext() if last else ddp.no_sync():
            micro = state.loader.to_device(micro)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = micro.scale * ddp(**micro.inputs)
            (loss * dist.get_world_size()).backward()  # DDP averages over the ranks, and the step's loss is a sum
        loss_sum += loss.detach()
    norm = float(clip_gradients(state.masters, cfg.optim.clip))
    loss_of_step = float(sum_over_ranks(loss_sum))
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    return loss_of_step, norm


def configure(case: Case, options: argparse.Namespace, work: Path, ranks: int) -> Config:
    """The project's own configuration of a run, read as `train` reads it; without what differs between variants."""
    rows = options.rows // case.accumulation
    overrides = [
        f"stage={case.stage}",
        f"activation_checkpointing={options.activation_checkpointing}",
        f"model.language={work / 'language'}",
        "model.projector=random",
        "data=llava_json",
        f"data.path={work / 'shapes' / CORPORA[case.stage]}",
        f"data.images={work / 'shapes' / 'images'}",
        "data.max_length=512",
        "data.workers=0",
        f"output_dir={work / 'run'}",
        "pack=false",
        f"micro_batch_size={rows}",
        f"global_batch_size={rows * case.accumulation * ranks}",
        "optim.lr=1e-3",  # one that shows in the losses after a step, so that their equality means something
        "optim.schedule=constant",
        "optim.warmup_ratio=0",
        "max_steps=1000",
        "export.enabled=false",
    ]
    return composed(overrides)


def specialize(cfg: Config, variant: str, precision: str) -> Config:
    plan = STRATEGIES.get(variant, Strategy.FULL_SHARD)
    shard_size = 2 if SHARD_PLANS[plan].mesh is Mesh.HYBRID else None
    sharding = ShardingConfig(strategy=plan, shard_size=shard_size)
    dtypes = replace(cfg.precision, param_dtype=DType(precision), reduce_dtype=DType.fp32, norm_dtype=DType.fp32)
    return replace(cfg, sharding=sharding, precision=dtypes)


def build(variant: str, cfg: Config, world: World) -> Run:
    allocated = torch.cuda.memory_allocated(world.device) if world.device.type == "cuda" else 0
    with contextlib.redirect_stderr(io.StringIO()):  # without the screen that a run begins with
        if variant == "ddp":
            state = build_whole(cfg, world)
        else:
            state = build_state(cfg, parallelism_of(variant, cfg, world))
    state.model.train()
    return Run(variant, cfg, state, wrap(state.model, world) if variant == "ddp" else None, allocated)


def build_whole(cfg: Config, world: World) -> TrainState:
    """What `build_state` builds, without anything of FSDP."""
    parts = find_parts(cfg.model)
    model = build_llava(parts, cfg.model, DTYPES[cfg.precision.param_dtype])  # the chunked loss allows no autocast
    loader = open_data(cfg, world, model)
    sources = find_weights(model, parts, cfg.model, seed=cfg.seed)
    buffers = computed_buffers(model)
    masters = materialize_whole(model, cfg, world.device)
    load_weights(sources, local_shards(model, masters))
    restore_buffers(model, buffers)
    optimizer, learning_rate = build_optimizer(model, masters, cfg, loader.total_steps)
    return TrainState(model, masters, optimizer, learning_rate, loader, without_meshes(cfg, world), sources, {})


def parallelism_of(variant: str, cfg: Config, world: World) -> Parallelism:
    if variant == "fully_shard":
        mesh = init_device_mesh(world.device.type, (1,), mesh_dim_names=("shard",))
        return replace(without_meshes(cfg, world), meshes=Meshes(mesh))
    return Parallelism.of(cfg, world)


def without_meshes(cfg: Config, world: World) -> Parallelism:
    return Parallelism(world, cfg.parallel, SHARD_PLANS[cfg.sharding.strategy])


def materialize_whole(model: Any, cfg: Config, device: torch.device) -> MasterWeights:
    """The same storage as under FSDP, unsharded: fp32 trainables, frozen weights in the compute dtype."""
    store_weights(model, cfg.precision, sharded=True)
    apply_activation_checkpointing(model.blocks(), cfg.activation_checkpointing, device)
    model.to_empty(device=device)
    return MasterWeights({clean_name(n): p for n, p in model.named_parameters() if p.requires_grad})


def wrap(model: nn.Module, world: World) -> DistributedDataParallel:
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        **{buffers: False},  # they are constants here
        gradient_as_bucket_view=True,  # else DDP keeps a second copy of every gradient
    )


def write_language_model(folder: Path, options: argparse.Namespace) -> None:
    """The embedded language model with another width and depth; its weights are random anyway."""
    shutil.copytree(ASSETS / "tiny-llama", folder)
    config = json.loads((folder / "config.json").read_text())
    heads = options.hidden // 32
    config |= {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "head_dim": 32}
    config |= {"num_hidden_layers": options.layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps(config))
