"""Will it fit, how fast, and what to choose: `python -m llava_fsdp.plan model=llava_v1_5_13b stage=finetune gpus=8`.

Needs no GPU, no weights, no network and no process group. Takes the keys of `train`: the plan is of the training that
the same keys describe, but for sharding, activation checkpointing and offload, of which it tries all.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llava_fsdp.config import DType, Format, OffloadMode, PlanConfig, SamplerName, Source, cli
from llava_fsdp.distributed.zero import SHARD_PLANS, Mesh
from llava_fsdp.plan.hardware import Machine, machine_named
from llava_fsdp.plan.multinode import scale, write_page
from llava_fsdp.plan.planner import Planner, PlanRow
from llava_fsdp.plan.search import choices, plan_rows, rows_of, ways_to_cut
from llava_fsdp.plan.table import as_object, names, show_plan
from llava_fsdp.runtime.console import TextConsole

OWN_KEYS = {"gpus", "nodes", "gpu", "rows", "page", "format"}
CHOSEN = {"sharding", "activation_checkpointing", "offload", "tokens_per_micro_batch", "dry_run"}
"""What the plan chooses, with the keys below it; and what would not train."""


def main() -> None:
    cli.run("plan", PlanConfig, partial(plan, typed=sys.argv[1:]))


def plan(cfg: PlanConfig, typed: Sequence[str] = ()) -> None:
    """Print what every way to train costs, and a command for the best.

    Args:
        typed: the command line, of which the command keeps what is the training's.
    """
    machine = machine_named(cfg.gpu, cfg.gpus)
    cfg, fp16 = with_fp16(cfg, machine, typed)
    typed = [*typed, *fp16]
    planner = Planner(cfg, machine)
    world_size = cfg.gpus * cfg.nodes
    shard_size = cfg.sharding.shard_size or cfg.gpus
    found = choices(cfg, machine.device, rows_of(world_size, shard_size))
    # micro_batch_size has a value in every recipe: only a number of positions binds the plan
    is_free = not isinstance(cfg.tokens_per_micro_batch, int)
    ways = ways_to_cut(planner, cfg, world_size, is_free)
    rows = plan_rows(planner, found, world_size, shard_size, cfg.gpus, ways)
    best = command(cfg, rows[0], typed) if rows[0].fits else None
    more = {}
    if cfg.nodes > 1:
        points = scale(planner, cfg.gpus, cfg.nodes, is_free)
        more = {"scaling": points, "page": str(write_page(points, planner, Path(cfg.page)))}
    if cfg.format is Format.json:
        print(json.dumps(as_object(planner, rows, best, more)))
        return
    console = TextConsole(width=None if sys.stdout.isatty() else 160)
    show_plan(console, planner, rows, cfg.rows, best)
    if more:
        console.print(f"tokens/s against nodes: {more['page']}")


def with_fp16(cfg: PlanConfig, machine: Machine, typed: Sequence[str]) -> tuple[PlanConfig, list[str]]:
    """V100 and T4 have no bf16: the plan is of fp16 where nobody asked for another, and the command says so."""
    lacks = machine.gpu is not None and machine.gpu.bf16 is None
    own = cfg.precision
    if not lacks or own.param_dtype is not DType.bf16 or any(key_of(word).startswith("precision") for word in typed):
        return cfg, []
    also = {name: DType.fp16 for name in ("reduce_dtype", "norm_dtype") if getattr(own, name) is DType.bf16}
    return replace(cfg, precision=replace(own, param_dtype=DType.fp16, **also)), ["precision=fp16"]


def key_of(word: str) -> str:
    """Of an override, with whatever Hydra lets stand before it."""
    return word.partition("=")[0].lstrip("+~")


def command(cfg: PlanConfig, row: PlanRow, typed: Sequence[str]) -> str:
    """What trains so, ready to be pasted; with names in capitals where the plan was told no data."""
    launch = (
        f"torchrun --standalone --nproc-per-node {cfg.gpus}"
        if cfg.nodes == 1
        else f"torchrun --nnodes {cfg.nodes} --nproc-per-node {cfg.gpus} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    )
    in_order = cfg.sampler.name is SamplerName.llava_v1_5
    chosen = CHOSEN | (set() if cfg.pack else {"micro_batch_size"})
    kept = [word for word in typed if key_of(word) not in OWN_KEYS and key_of(word).partition(".")[0] not in chosen]
    keys = {key_of(word) for word in kept}
    kept = [f"stage={cfg.stage.name}"] * ("stage" not in keys) + [shlex.quote(word) for word in kept]
    said = [names(row)]
    if SHARD_PLANS[row.choice.strategy].mesh is Mesh.HYBRID and cfg.sharding.shard_size is not None:
        said.append(f"sharding.shard_size={cfg.sharding.shard_size}")
    if row.choice.offload is OffloadMode.nvme and cfg.offload.folder is not None:
        said.append(f"offload.folder={shlex.quote(cfg.offload.folder)}")
    if not cfg.pack:
        said.append(f"micro_batch_size={row.micro_batches[0].rows}")
    elif not in_order:
        said.append(f"tokens_per_micro_batch={row.tokens}")
    if cfg.data.source is Source.shapes and cfg.model.name != "tiny":
        said.append("data=llava_json data.path=FILE.json data.images=DIR")
    return " ".join([launch, "-m llava_fsdp.train", *kept, *said])
