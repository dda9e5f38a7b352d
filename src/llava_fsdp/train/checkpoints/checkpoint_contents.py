"""The contents of a checkpoint: tensors by name, and one JSON object with all other values."""

from dataclasses import asdict
from typing import Any

import torch

from llava_fsdp.checkpoint.manifest import FORMAT
from llava_fsdp.checkpoint.reader import AVERAGE_PREFIX
from llava_fsdp.checkpoint.state_json import without_enums
from llava_fsdp.config import Config
from llava_fsdp.parallel.local_shards import plain
from llava_fsdp.parallel.ranks.consensus import rank_and_size
from llava_fsdp.train.state import TrainState
from llava_fsdp.version import __version__


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by their names in it: master weights as `model.NAME`, and optimizer states as
    `optim.NAME.STATE`, where NAME is the parameter's. A moving average of the weights is `ema.NAME`."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in state.masters.named.items():
        found[f"model.{name}"] = plain(parameter)
        for moment, value in state.optimizer.state[parameter].items():
            found[f"optim.{name}.{moment}"] = value
    for name, average in state.average.named.items() if state.average is not None else ():
        found[f"{AVERAGE_PREFIX}{name}"] = average
    return found


def facts_of(state: TrainState, cfg: Config) -> dict[str, Any]:
    """Return the content of a checkpoint's `state.json`: all values other than tensors. The entries `versions` and
    `written_by` are for human readers and for `has_same_memory` (train/checkpoints/resume.py)."""
    return {
        "format": FORMAT,
        "run": state.run,
        "step": state.step,
        "samples": state.samples,
        "skipped": state.skipped,  # number of steps without an update, because loss or gradients were not finite
        "consecutive": state.consecutive,  # those since the last update; 0 with a dynamic loss scale
        "seed": cfg.seed,
        # the dynamic loss scale of fp16
        "scaler": state.scaler.state() if state.scaler is not None else None,
        # which blocks are recomputed, with activation_checkpointing=dynamic
        "dynamic": state.dynamic.state() if state.dynamic is not None else None,
        "broken": sorted(state.loader.broken),  # records that could not be read
        # digests of the dataset, the encoding and order of samples, and the model's frozen weights
        "fingerprints": dict(state.fingerprints),
        "trainable": state.trained,  # names of the parameters
        "versions": {"llava_fsdp": __version__, "torch": torch.__version__},
        "written_by": {
            "ranks": rank_and_size()[1],
            "strategy": cfg.sharding.strategy.value,
            "offload": cfg.offload.mode.value,
        },
        "config": without_enums(asdict(cfg)),
    }
