"""What does each row of the ZeRO table cost on the same work?

    torchrun --standalone --nproc-per-node 4 benchmarks/strategies.py
    python benchmarks/strategies.py --nproc 4          # the same; starts torchrun itself

Step time, memory and bytes moved of `torch.nn.parallel.DistributedDataParallel` and of every row, on the same
samples, weights and optimizer. Losses are compared first: figures of variants that do not compute the same thing are
not printed. How to read the result is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import inspect
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hydra import compose, initialize_config_dir
from provenance import REPOSITORY, commit, machine
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from llava_fsdp.config import Config, DType, ShardingConfig, Strategy, config_dir, load
from llava_fsdp.data.batching.batch import MicroBatch, Step
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.toy_shapes import ensure_shapes
from llava_fsdp.model.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.model.weights.load_weights import find_weights, load_weights
from llava_fsdp.parallel.local_shards import local_shards
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing, clean_name
from llava_fsdp.parallel.precision.precision import DTYPES, MasterWeights, store_weights
from llava_fsdp.parallel.ranks.comm_volume import KINDS, CollectiveBytes
from llava_fsdp.parallel.ranks.mesh import Meshes, World, distributed, join, make_meshes, read_world
from llava_fsdp.parallel.zero import SHARD_PLANS, Mesh, ShardPlan
from llava_fsdp.runtime.process.host import process_memory
from llava_fsdp.train.loop import clip_gradients, summed, train_step
from llava_fsdp.train.optimizer import build_optimizer
from llava_fsdp.train.setup.build_state import build_state, open_data
from llava_fsdp.train.setup.peak_memory import reset_peak_memory
from llava_fsdp.train.state import TrainState

STRATEGIES = {plan.zero: strategy for strategy, plan in SHARD_PLANS.items()}
EQUAL_WITHIN = 1e-5
CHECKED_STEPS = 3
CORPORA = {"pretrain": "captions.json", "finetune": "instructions.json"}


# What is compared


@dataclass(frozen=True)
class Case:
    """The work: a stage, and how its steps are cut. Every accumulation runs the same samples in a step."""

    stage: str
    accumulation: int

    def __str__(self) -> str:
        return f"{self.stage}, accumulation {self.accumulation}"


@dataclass
class Run:
    """A variant built for a case, ready to step, and what was seen of it."""

    variant: str
    cfg: Config
    state: TrainState
    plan: ShardPlan
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
            result = train_step(self.state, step, self.plan, self.cfg, 0.0)
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
                loss = micro.scale * ddp(*micro.inputs)
            (loss * dist.get_world_size()).backward()  # DDP averages over the ranks, and the step's loss is a sum
        loss_sum += loss.detach()
    norm = float(clip_gradients(state.masters, cfg.optim.clip))
    loss_of_step = float(summed(loss_sum))
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    return loss_of_step, norm


def variants(world_size: int) -> list[str]:
    """At one rank every row is the same; the question there is what `fully_shard` and DDP would add."""
    if world_size == 1:
        return ["ddp", "one rank", "fully_shard"]
    two_by_two = world_size > 2 and world_size % 2 == 0
    return ["ddp", *(z for z, s in STRATEGIES.items() if two_by_two or SHARD_PLANS[s].mesh is not Mesh.HYBRID)]


# How it is built: the order of `llava_fsdp.train.setup.build_state.build_state`


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
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(Config, compose("train", overrides))


def specialize(cfg: Config, variant: str, precision: str) -> Config:
    plan = STRATEGIES.get(variant, Strategy.FULL_SHARD)
    shard_size = 2 if SHARD_PLANS[plan].mesh is Mesh.HYBRID else None
    sharding = ShardingConfig(strategy=plan, shard_size=shard_size)
    dtypes = replace(cfg.precision, param_dtype=DType(precision), reduce_dtype=DType.fp32, norm_dtype=DType.fp32)
    return replace(cfg, sharding=sharding, precision=dtypes)


def build(variant: str, cfg: Config, world: World) -> Run:
    allocated = torch.cuda.memory_allocated(world.device) if world.device.type == "cuda" else 0
    plan = SHARD_PLANS[cfg.sharding.strategy]
    with contextlib.redirect_stderr(io.StringIO()):  # without the screen that a run begins with
        if variant == "ddp":
            state = build_whole(cfg, world)
        else:
            state = build_state(cfg, world, plan, mesh_of(variant, plan, cfg, world))
    state.model.train()
    return Run(variant, cfg, state, plan, wrap(state.model, world) if variant == "ddp" else None, allocated)


def build_whole(cfg: Config, world: World) -> TrainState:
    """What `build_state` builds, without anything of FSDP."""
    parts = find_parts(cfg.model)
    model = build_llava(parts, cfg.model, DTYPES[cfg.precision.param_dtype])  # the chunked loss allows no autocast
    loader = open_data(cfg, world, model)
    sources = find_weights(model, parts, cfg.model, None, cfg.seed)
    buffers = computed_buffers(model)
    masters = materialize_whole(model, cfg, world.device)
    load_weights(sources, local_shards(model, masters))
    restore_buffers(model, buffers)
    optimizer, learning_rate = build_optimizer(model, masters, cfg, loader.total_steps)
    return TrainState(model, masters, optimizer, learning_rate, loader, sources, {})


def mesh_of(variant: str, plan: ShardPlan, cfg: Config, world: World) -> Meshes:
    if variant == "fully_shard":
        return Meshes(init_device_mesh(world.device.type, (1,), mesh_dim_names=("shard",)))
    return make_meshes(world, plan, cfg)


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


# What is measured


class WatchedLoader:
    """A loader that looks at the memory between two micro-batches: `train_step` then asks it for the next one."""

    def __init__(self, loader: Loader, look: Any):
        self.loader = loader
        self.device = loader.device
        self.look = look
        self.asked = 0

    def to_device(self, micro: MicroBatch) -> MicroBatch:
        self.asked += 1
        if self.asked == 2:
            self.look()
        return self.loader.to_device(micro)


def local_storages(tensors: Any) -> dict[int, int]:
    """Bytes of every distinct storage of this rank behind the tensors."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.size():
            found[storage.data_ptr()] = storage.size()
    return found


def live_storages() -> dict[int, int]:
    """Every storage that a Python object holds: FSDP's gathered weights and unsynchronised gradients too."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.size():
                found[storage.data_ptr()] = storage.size()
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def measure_memory(run: Run, step: Step) -> None:
    """One step, watched: what is held at rest, what is added between micro-batches, and the peak.

    At rest is right after the optimizer's update, before gradients are freed.
    """
    state, loader, device = run.state, run.state.loader, run.state.loader.device
    gc.collect()
    before = live_storages()

    def between() -> None:
        held = [*state.model.parameters(), *state.masters.named.values()]
        weights = sum(v for k, v in local_storages(held).items() if k not in before)
        # Not every gradient has a Python object, and some that FSDP keeps are in no parameter's `.grad`.
        found = live_storages() | local_storages(p.grad for p in held if p.grad is not None)
        new = sum(v for k, v in found.items() if k not in before)
        run.memory["between"] = {"gathered_parameters": weights, "gradients": new - weights}

    def at_rest(*_: Any) -> None:
        weights = [*state.model.parameters(), *state.masters.named.values()]
        gradients = [p.grad for p in state.masters.named.values() if p.grad is not None]
        run.memory["rest"] = {
            "parameters": sum(local_storages(weights).values()),
            "gradients": sum(local_storages(gradients).values()),
            "optimizer": sum(local_storages(optimizer_tensors(state.optimizer)).values()),
        }

    hook = state.optimizer.register_step_post_hook(at_rest)
    state.loader = WatchedLoader(loader, between)  # type: ignore[assignment]
    resident = reset_peak(device)
    try:
        run.step(step)
    finally:
        hook.remove()
        state.loader = loader
    run.memory["peak"] = peak(run, resident)
    run.memory = {name: largest_over_ranks(held) for name, held in run.memory.items()}


def reset_peak(device: torch.device) -> int:
    """Begin to look for the peak; returns the resident bytes of the process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    reset_peak_memory()
    return process_memory("VmRSS")


def peak(run: Run, resident: int) -> dict[str, int]:
    """On CUDA all that this variant held at once: others are idle, and what they hold is taken off.

    On the CPU by how much the process grew in the step; memory that it had freed and kept hides a part of that.
    """
    device = run.state.loader.device
    if device.type == "cuda":
        return {"max_memory_allocated": torch.cuda.max_memory_allocated(device) - run.allocated_before}
    return {"rss_rise": max(0, process_memory("VmHWM") - resident), "process_rss": process_memory("VmHWM")}


def largest_over_ranks(values: dict[str, int]) -> dict[str, int]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return {key: max(other[key] for other in gathered) for key in values}


def measure_moved(run: Run, step: Step) -> None:
    with CollectiveBytes() as counter:
        run.step(step)
    run.moved = counter.moved


def measure_time(runs: list[Run], steps: list[Step], repetitions: int) -> None:
    """Interleaved: every variant runs once before any runs again, in an order that turns round each time."""
    for repetition in range(repetitions):
        gc.collect()
        for run in runs if repetition % 2 == 0 else runs[::-1]:
            time_step(run, steps[repetition % len(steps)])


def time_step(run: Run, step: Step) -> None:
    device = run.state.loader.device
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device.type == "cuda" else (None, None)
    gc.disable()  # its pauses would fall on whoever is running
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    if start is not None:
        start.record()
    run.step(step)
    if end is not None:
        end.record()
        torch.cuda.synchronize(device)
    mine = [time.perf_counter() - wall, time.process_time() - cpu, start.elapsed_time(end) / 1000 if start else 0.0]
    gc.enable()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    run.wall.append(max(g[0] for g in gathered))
    run.cpu.append(sum(g[1] for g in gathered))
    if start is not None:
        run.events.append(max(g[2] for g in gathered))


# One case


def prepare(case: Case, precision: str, options: argparse.Namespace, work: Path, world: World) -> list[Run]:
    """Build every variant and run the first steps of each: their losses, memory and bytes moved."""
    runs = []
    cfg = configure(case, options, work, world.size)
    for variant in variants(world.size):
        run = build(variant, specialize(cfg, variant, precision), world)
        steps = first_steps(run.state.loader)
        run.step(steps[0])
        measure_memory(run, steps[1])
        measure_moved(run, steps[2])
        runs.append(run)
    return runs


def first_steps(loader: Loader) -> list[Step]:
    """Prepared before anything is timed: the same samples for every variant."""
    source = map(loader.agree, loader.prepared(0))
    return [next(source) for _ in range(CHECKED_STEPS)]


def largest_difference(runs: list[Run]) -> float:
    """Of all losses, relative to DDP's."""
    reference = runs[0].losses
    return max(abs(a - b) / abs(b) for run in runs for a, b in zip(run.losses, reference, strict=True))


def run_case(case: Case, options: argparse.Namespace, work: Path, world: World) -> tuple[list[dict], float]:
    """The rows of one case.

    Raises:
        SystemExit: variants do not compute the same thing in fp32, so that their cost cannot be compared.
    """
    runs = prepare(case, "fp32", options, work, world)
    difference = largest_difference(runs)
    if not difference <= EQUAL_WITHIN:
        losses = {run.variant: run.losses for run in runs}
        raise SystemExit(f"{case}: losses differ by {difference:.2g} (bound {EQUAL_WITHIN:g}): {losses}")
    if options.precision != "fp32":
        runs.clear()
        gc.collect()
        runs = prepare(case, options.precision, options, work, world)
    steps = first_steps(runs[0].state.loader)
    measure_time(runs, steps, options.repetitions)
    tokens = statistics.mean(s.facts.tokens for s in steps)
    base = statistics.median(runs[0].cpu), statistics.median(runs[0].events or runs[0].wall)
    return [row_of(case, run, tokens, base) for run in runs], difference


def row_of(case: Case, run: Run, tokens: float, base: tuple[float, float]) -> dict:
    seconds = {"cpu": run.cpu, "wall": run.wall} | ({"cuda_events": run.events} if run.events else {})
    clock = statistics.median(run.events or run.wall)
    return {
        "stage": case.stage,
        "accumulation": case.accumulation,
        "variant": run.variant,
        "strategy": None if run.variant in ("ddp", "one rank") else run.cfg.sharding.strategy.value,
        "step_seconds": {k: {"min": min(v), "median": statistics.median(v), "all": v} for k, v in seconds.items()},
        "cpu_ratio_to_ddp": statistics.median(run.cpu) / base[0],
        "time_ratio_to_ddp": clock / base[1],
        "tokens_per_second": tokens / clock,
        "memory": run.memory,
        "moved_per_step": run.moved,
        "losses_of_first_steps": run.losses[:CHECKED_STEPS],
    }


# The whole


def main() -> None:
    options = parse()
    if "RANK" not in os.environ and options.nproc > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        sys.exit(subprocess.call([*command, str(options.nproc), __file__, *without(sys.argv[1:], "--nproc")]))
    options.commit = commit()
    torch.set_num_threads(options.threads)
    world = read_world()
    options.precision = options.precision or ("bf16" if world.device.type == "cuda" else "fp32")
    started = time.perf_counter()
    with process_group(world), working_folder(world) as work:
        if world.is_first:
            write_language_model(work / "language", options)
            ensure_shapes(work / "shapes", train_pictures=CHECKED_STEPS * options.rows * world.size)
        dist.barrier()
        report = facts(options, world)
        for case in [Case(s, a) for s in options.stages for a in options.accumulations]:
            failure = measured_case(case, options, work, world, report)
            gc.collect()
            if world.is_first:
                save(report, options, world)
                state = f"failed, {failure}" if failure is not None else "done"
                print(f"{case}: {state} after {time.perf_counter() - started:.0f} s", file=sys.stderr)
            if failure is not None and world.size > 1:
                raise failure  # the other ranks wait in a collective, or have failed as well
        if world.is_first:
            finish(report, options, world)
    if any("failed" in row for row in report["rows"]):
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What each row of the ZeRO table costs on the same work.")
    parser.add_argument("--nproc", type=int, default=1, help="ranks to start, where torchrun has not: 1, 2 or 4")
    parser.add_argument("--hidden", type=int, default=128, help="width of the random language model")
    parser.add_argument("--layers", type=int, default=3, help="its layers")
    parser.add_argument("--rows", type=int, default=8, help="samples of a step on each rank, at any accumulation")
    parser.add_argument("--stages", nargs="+", default=["pretrain", "finetune"], choices=["pretrain", "finetune"])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--repetitions", type=int, default=6, help="timed steps of each variant")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="of the timed steps; bf16 on CUDA, else fp32")
    parser.add_argument("--activation_checkpointing", choices=["none", "full"], default="full")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--out", type=Path, help="JSON file; the picture goes beside it")
    options = parser.parse_args()
    if options.out is not None and options.out.is_dir():
        parser.error(f"--out {options.out} is a folder; give a JSON file in it")
    if any(options.rows % a for a in options.accumulations):
        parser.error(f"--rows {options.rows} must be a multiple of every --accumulations {options.accumulations}")
    if options.hidden % 32:
        parser.error(f"--hidden {options.hidden} must be a multiple of 32, the width of a head")
    return options


def without(arguments: list[str], option: str) -> list[str]:
    """Command line arguments less one option and its value."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != option and not argument.startswith(option + "="):
            kept.append(argument)
        skip = argument == option
    return kept


@contextlib.contextmanager
def process_group(world: World) -> Iterator[None]:
    """The project's own group; DDP and `fully_shard` need one at one rank, too."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = load(Config, compose("train", ["deterministic=false"]))
    with distributed(cfg):
        if world.size == 1:
            join(world, timeout_seconds=600)
        yield  # `distributed` ends whatever group there is


@contextlib.contextmanager
def working_folder(world: World) -> Iterator[Path]:
    """A temporary folder that all ranks share."""
    made: list[Any] = [tempfile.mkdtemp(prefix="strategies-") if world.is_first else None]
    dist.broadcast_object_list(made, src=0)
    try:
        yield Path(made[0])
    finally:
        if world.is_first:
            shutil.rmtree(made[0])


def write_language_model(folder: Path, options: argparse.Namespace) -> None:
    """The embedded language model with another width and depth; its weights are random anyway."""
    source = REPOSITORY / "src" / "llava_fsdp" / "assets" / "tiny-llama"
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    heads = options.hidden // 32
    config |= {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "head_dim": 32}
    config |= {"num_hidden_layers": options.layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps(config))


def measured_case(
    case: Case, options: argparse.Namespace, work: Path, world: World, report: dict
) -> Exception | SystemExit | None:
    """Add the rows of a case to the result, or one row with the reason for which it failed, which is returned."""
    try:
        rows, difference = run_case(case, options, work, world)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        report["rows"].append({"stage": case.stage, "accumulation": case.accumulation, "failed": failed})
        return error.with_traceback(None)  # its frames hold the models
    report["rows"] += rows
    equality = report["equality"]
    equality["fp32_largest_relative_difference"] = max(equality["fp32_largest_relative_difference"], difference)
    return None


def save(report: dict, options: argparse.Namespace, world: World) -> Path:
    """Write the result with the cases that were run so far."""
    path = options.out or default_path(world)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def finish(report: dict, options: argparse.Namespace, world: World) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows, difference = [r for r in report["rows"] if "failed" not in r], report["equality"]
    console.print(
        "losses of all variants in fp32 are equal: they differ by at most "
        f"{difference['fp32_largest_relative_difference']:.2g} (bound {difference['bound']:g})"
    )
    for case in dict.fromkeys((r["stage"], r["accumulation"]) for r in rows):
        console.print(table_of(case, [r for r in rows if (r["stage"], r["accumulation"]) == case]))
    for line in not_run(world):
        console.print(f"not run: {line}")
    path = save(report, options, world)
    drawn = bool(rows) and draw(report | {"rows": rows}, path.with_suffix(".png"))
    console.print(f"wrote {path}" + (f" and {path.with_suffix('.png')}" if drawn else "; no picture: no matplotlib"))


def default_path(world: World) -> Path:
    today = datetime.date.today().isoformat()
    return REPOSITORY / "benchmarks" / "results" / f"strategies-{world.device.type}-{today}.json"


def not_run(world: World) -> list[str]:
    left = []
    if world.size == 1:
        left.append("the rows over several ranks: this was one rank, where all rows are the same")
    elif world.size < 4:
        left.append("hybrid and hybrid2: a 2 x 2 mesh needs 4 ranks")
    if world.device.type != "cuda":
        left.append("CUDA: torch sees no GPU; gloo's bytes are exact, its times say nothing of NCCL's")
    return left


def facts(options: argparse.Namespace, world: World) -> dict:
    """What a reader needs to run it again."""
    shown = {k: v for k, v in vars(options).items() if k not in ("out", "nproc", "commit")}
    start = ["torchrun", "--standalone", "--nproc-per-node", str(world.size), "benchmarks/strategies.py"]
    return {
        "question": "what does each row of the ZeRO table cost on the same work?",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": options.commit,
        "command": " ".join([*start, *without(sys.argv[1:], "--out")]),
        "options": shown,
        "ranks": world.size,
        "machine": machine(torch.cuda.get_device_name() if world.device.type == "cuda" else None),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "equality": {"fp32_largest_relative_difference": 0.0, "bound": EQUAL_WITHIN, "steps": CHECKED_STEPS},
        "not_run": not_run(world),
        "rows": [],
    }


def table_of(case: tuple[str, int], rows: list[dict]) -> Table:
    clock = "cuda_events" if "cuda_events" in rows[0]["step_seconds"] else "wall"
    table = Table(title=f"{case[0]}, accumulation {case[1]}", title_justify="left")
    heads = ["variant", "CPU s min", "median", "/ ddp", f"{clock} s min", "median", "/ ddp"]
    peak_kind = next(iter(rows[0]["memory"]["peak"]))
    heads += ["at rest", "between +", peak_kind, "all-gather", "reduce-scatter", "all-reduce"]
    for head in heads:
        table.add_column(head, justify="left" if head == "variant" else "right")
    for row in rows:
        cpu, wall, memory = row["step_seconds"]["cpu"], row["step_seconds"][clock], row["memory"]
        between = mib(sum(memory["between"].values())) if "between" in memory else "-"
        moved = [f"{mib(row['moved_per_step'][k]['bytes'])} / {row['moved_per_step'][k]['calls']}" for k in KINDS]
        times = [f"{cpu['min']:.3f}", f"{cpu['median']:.3f}", f"{row['cpu_ratio_to_ddp']:.2f}"]
        times += [f"{wall['min']:.3f}", f"{wall['median']:.3f}", f"{row['time_ratio_to_ddp']:.2f}"]
        held = [mib(sum(memory["rest"].values())), between, mib(next(iter(memory["peak"].values())))]
        table.add_row(row["variant"], *times, *held, *moved)
    table.caption = "memory and bytes in MiB, of the rank with most; collectives as bytes / calls in a step"
    return table


def mib(size: float) -> str:
    return f"{size / 2**20:.2f}" if size < 100 * 2**20 else f"{size / 2**20:,.0f}"


def draw(report: dict, path: Path) -> bool:
    """Time, memory and bytes moved of every variant, a column for each case. False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys((r["stage"], r["accumulation"]) for r in report["rows"]))
    figure, axes = pyplot.subplots(3, len(cases), figsize=(4 * len(cases) + 2, 9), squeeze=False, layout="constrained")
    for column, case in enumerate(cases):
        rows = [r for r in report["rows"] if (r["stage"], r["accumulation"]) == case]
        axes[0][column].set_title(f"{case[0]}, accumulation {case[1]}")
        draw_case([axes[n][column] for n in range(3)], rows)
    for row, label in enumerate(["seconds a step", "MiB on a rank", "MiB in collectives a step"]):
        axes[row][0].set_ylabel(label)
    for row in range(3):
        axes[row][-1].legend(fontsize="small", bbox_to_anchor=(1.02, 1), loc="upper left")
    machine = f"{report['ranks']} x {report['machine']['device']}"
    figure.suptitle(f"{machine}, torch {report['torch']}, {report['options']['precision']}, {report['date'][:10]}")
    figure.savefig(path, dpi=90)
    return True


def draw_case(axes: list[Any], rows: list[dict]) -> None:
    names = [r["variant"] for r in rows]
    places = range(len(rows))
    for offset, (clock, label) in enumerate(clocks(rows[0])):
        for statistic, alpha in (("median", 0.4), ("min", 1.0)):
            heights = [r["step_seconds"][clock][statistic] for r in rows]
            shifted = [p + 0.4 * offset - 0.2 for p in places]
            axes[0].bar(shifted, heights, 0.38, color=f"C{offset}", alpha=alpha, label=f"{label}, {statistic}")
    memory = [("rest", "parameters"), ("rest", "gradients"), ("rest", "optimizer")]
    stack(axes[1], -0.2, [(f"at rest: {k}", [r["memory"][w][k] for r in rows]) for w, k in memory], 0)
    if "between" in rows[0]["memory"]:
        names_between = {"gathered_parameters": "between: gathered weights", "gradients": "between: gradients"}
        parts = [(label, [r["memory"]["between"][k] for r in rows]) for k, label in names_between.items()]
        stack(axes[1], 0.2, parts, 3)
    stack(axes[2], 0.0, [(k, [r["moved_per_step"][k]["bytes"] for r in rows]) for k in KINDS], 0)
    for axis in axes:
        axis.set_xticks(list(places), names, rotation=35, ha="right", fontsize="small")


def clocks(row: dict) -> list[tuple[str, str]]:
    found = [("cpu", "CPU of all ranks"), ("wall", "wall"), ("cuda_events", "CUDA events")]
    present = [f for f in found if f[0] in row["step_seconds"]]
    return [present[0], present[-1]]


def stack(axis: Any, offset: float, parts: list[tuple[str, list[int]]], first_colour: int) -> None:
    bottoms = [0.0] * len(parts[0][1])
    for number, (label, sizes) in enumerate(parts):
        heights = [size / 2**20 for size in sizes]
        places = [p + offset for p in range(len(sizes))]
        axis.bar(places, heights, 0.38, bottom=bottoms, color=f"C{first_colour + number}", label=label)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]


if __name__ == "__main__":
    main()
