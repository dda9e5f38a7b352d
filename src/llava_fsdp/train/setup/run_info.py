"""Describe a start of a run as a JSON object: hardware, versions, trainable parts, changed settings. A run that resumes
has several starts.

Rank 0 appends this description to `starts.jsonl`, and the report and the trackers show it. It contains no host names.
"""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from llava_fsdp.config import Config
from llava_fsdp.config.command_line.recipes import differences
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.compile import choose_compiling
from llava_fsdp.parallel.memory.memory import Weight, bytes_per_rank, divided_weights
from llava_fsdp.parallel.pipeline.stages import plan_of_stages
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.tensor.tensor_plan import tensor_plan
from llava_fsdp.plan.memory.stage_memory import weights_of_groups
from llava_fsdp.plan.search.auto import expected_peak
from llava_fsdp.plan.workload import samples_in
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.redact import redact, secrets_of
from llava_fsdp.train.setup.build_model import mean_counts
from llava_fsdp.train.setup.summary import describe_data, trained_counts, unlike_original
from llava_fsdp.version import __version__


def about_run(
    cfg: Config, world: World, model: Architecture, records: Records, weights: dict[str, Weight]
) -> dict[str, Any]:
    """Return a description of the current start of a run, for `starts.jsonl` and the report: time, machine, versions,
    settings and planned memory. `weights`: the properties of all parameters, by name."""
    compiles = choose_compiling(cfg, world.device, model.kernel and model.kernel.attention).on
    tensor, layout, weights_of_rank = cfg.parallel.tensor, RankLayout(cfg.parallel, world.size), weights
    if tensor > 1:
        weights_of_rank = divided_weights(weights, tensor_plan(model, tensor), tensor, 0)
    groups = [list(weights_of_rank.values())]
    if cfg.parallel.pipeline > 1:
        groups = weights_of_groups(
            model, weights_of_rank, plan_of_stages(cfg, model, mean_counts(records)), cfg.parallel
        )
    shard_size = layout.shard_size(cfg.sharding.shard_size, world.local_size)
    sharding = partial(
        bytes_per_rank,
        strategy=cfg.sharding.strategy,
        precision=cfg.precision,
        world_size=layout.num_copies,
        shard_size=shard_size,
        offload=cfg.offload.mode,
        divided=tensor > 1 or cfg.parallel.pipeline > 1,
    )
    groups_bytes = [sharding(each) for each in groups]
    at_rest = max(groups_bytes, key=lambda nbytes: nbytes.parameters + nbytes.gradients + nbytes.optimizer)
    return {
        "time": time.time(),
        "ranks": world.size,
        "nodes": max(1, world.size // max(1, world.local_size)),
        "device": device_name(world.device),
        "versions": versions(world.device),
        "commit": commit(),
        "command": command_line(),
        "stage": cfg.stage.name,
        "model": cfg.model.name,
        "data": describe_data(cfg, records),
        "strategy": cfg.sharding.strategy.value,
        "trains": [[name, *counts] for name, counts in trained_counts(weights, model.named_parts).items()],
        "unlike": unlike_original(cfg, compiles) if model.processor_folder is None else None,
        "recipe": differences(cfg, sys.argv[1:]),
        "at_rest": {
            "parameters": at_rest.parameters,
            "gradients": at_rest.gradients,
            "optimizer": at_rest.optimizer,
        },
        "planned_peak": planned_peak(cfg, world, model, records),
    }


def planned_peak(cfg: Config, world: World, model: Architecture, records: Records) -> int | None:
    """Return the planned peak memory of a GPU in bytes; None on a CPU, where a process holds much more memory than its
    tensors, and if the plan fails."""
    if world.device.type != "cuda":
        return None
    try:
        has_tiles = model.processor_folder is None
        rule = ImageTokens.of_config(cfg, model.image_size, model.image_tokens) if has_tiles else None
        return expected_peak(cfg, world, model.parts, samples_in(records, rule))
    except Exception as error:  # only a line of the report is lost, which must not end the training
        log().warning("the plan of this run's memory could not be made: %s: %s", type(error).__name__, error)
        return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of software that affect numerical results; those of CUDA and NCCL only on a GPU."""
    found = {
        "llava_fsdp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
    }
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        if dist.is_initialized() and dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, nccl.version()))
    return found


def commit() -> str | None:
    """Return the git commit of this package's checkout, with `-dirty` if files have changed; None without one."""
    root = Path(__file__).resolve().parents[4]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def command_line() -> str:
    """Return the command line of this rank, with torchrun and its number of ranks. Secrets are hidden."""
    words = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes, ranks = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
        words = ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc-per-node", ranks]
    return redact(shlex.join([*words, "-m", "llava_fsdp.train", *sys.argv[1:]]), secrets_of())
