"""Contents of a run's checkpoint, and which settings must be the same when the run resumes."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_fsdp import __version__
from llava_fsdp.checkpoint.manifest import FORMAT, LARGEST, STATE_FILE
from llava_fsdp.checkpoint.safetensors_stream import open_file
from llava_fsdp.checkpoint.state_json import jsonable
from llava_fsdp.config import Config, LoraConfig, QuantizeConfig
from llava_fsdp.config.renamed import present_tree
from llava_fsdp.distributed.local_shards import plain
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.small_json import parse_object
from llava_fsdp.train.state import TrainState

FIXED_KEYS = ("seed", "global_batch_size", "model", "loss", "optim", "data", "labels", "sampler")
STORED_AS = ("precision.master_dtype", "precision.moment_dtype")  # the dtypes of a checkpoint's tensors
FREE_KEYS = {  # paths, how records are read from disk, and names; none of them changes the result
    "data.path", "data.images", "data.root", "data.workers", "data.prefetch", "data.stall", "data.source",
    "data.index", "data.examine", "data.allow_links", "data.bad_records", "data.max_bad_records",
    "model.name", "model.language", "model.vision", "model.checkpoint", "model.projector", "model.lora.checkpoint",
}  # fmt: skip


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Weights and moments by name, as they are saved and loaded."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in state.masters.named.items():
        found[f"model.{name}"] = plain(parameter)
        for moment, value in state.optimizer.state[parameter].items():
            found[f"optim.{name}.{moment}"] = value
    return found


def facts_of(state: TrainState, cfg: Config) -> dict[str, Any]:
    """All values of a checkpoint other than tensors. `versions` and `written_by` are only read by people."""
    return {
        "format": FORMAT,
        "run": state.run,
        "step": state.step,
        "samples": state.samples,
        "skipped": state.skipped,
        "seed": cfg.seed,
        "scaler": state.scaler.state() if state.scaler is not None else None,
        "broken": sorted(state.loader.broken),
        "fingerprints": dict(state.fingerprints),
        "trainable": sorted(state.masters.named),
        "versions": {"llava_fsdp": __version__, "torch": torch.__version__},
        "written_by": {
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "strategy": cfg.sharding.strategy.value,
            "offload": cfg.offload.mode.value,
        },
        "config": jsonable(asdict(cfg)),
    }


def is_fixed(key: str) -> bool:
    """Whether the value of this key must stay the same when a run continues."""
    free = key in FREE_KEYS or re.fullmatch(r"data\.sources\.[^.]+\.(path|images)", key) is not None
    return key in STORED_AS or (key.partition(".")[0] in FIXED_KEYS and not free)


def refuse_changes(facts: dict[str, Any], cfg: Config, state: TrainState, folder: Path) -> None:
    """Refuse to continue a run whose fixed settings, data or model have changed.

    Raises:
        CheckpointError: listing every key that differs, and what to do.
    """
    then, now = settings_then(facts["config"]), flat(jsonable(asdict(cfg)))
    differing = changed_settings(then, now)
    moved = f"{then.get('data.path')} -> {now.get('data.path')}"
    meanings = {
        "dataset": f"data.path: the dataset is another one, has changed, or has other wrong records now ({moved})",
        "encoding": "model.language, model.vision: the tokenizer or the preprocessor is another one",
        "order": "sampler: the original's order depends on micro_batch_size and on the number of ranks; one changed",
        "model": "model: the model is another one: other shapes, or other frozen weights",
    }
    for what, meaning in meanings.items():
        drawn_anew = (
            what == "model" and now["model.random_weights"] and then.get("seed") != now["seed"]
        )  # the seed is listed already
        if facts["fingerprints"][what] != state.fingerprints[what] and not drawn_anew:
            differing.append(meaning)
    trainable = set(state.masters.named) ^ set(facts["trainable"])
    if trainable:
        differing.append(f"model.train: {len(trainable)} parameters were added or removed, such as {min(trainable)}")
    if differing:
        raise CheckpointError(other_settings(folder, differing))
    report_changed_schedule(then, now)


def other_settings(folder: Path, differing: list[str]) -> str:
    return (
        f"{folder} was written by a run with other settings:\n  "
        + "\n  ".join(differing)
        + "\nSet them back, give another output_dir, or start over with checkpoint.resume=never"
    )


def settings_then(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration that a checkpoint records, by dotted key."""
    added = {"model": {"lora": asdict(LoraConfig()), "quantize": asdict(QuantizeConfig())}}
    return flat(jsonable(added)) | flat(
        present_tree(config)
    )  # older checkpoints lack these keys; their runs used neither


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: old -> new` for each key that must stay the same when a run continues, and has another value now."""
    return [
        f"{key}: {then.get(key)} -> {now.get(key)}"
        for key in sorted(then.keys() | now.keys())
        if is_fixed(key) and then.get(key) != now.get(key)
    ]


def refuse_other_settings(folder: Path, cfg: Config) -> None:
    """Compare the configuration with that of a checkpoint before anything is loaded. A `state.json` that cannot be read
    is passed over here: verifying the checkpoint reports it.

    Raises:
        ConfigError: listing every key that differs, and what to do.
    """
    try:
        with os.fdopen(open_file(folder / STATE_FILE), "rb") as file:
            config = parse_object(file.read(LARGEST), {"config": (dict,)})["config"]
        differing = changed_settings(settings_then(config), flat(jsonable(asdict(cfg))))
    except (CheckpointError, OSError, ValueError, TypeError):
        return
    if differing:
        keys = [line.partition(":")[0] for line in differing]
        raise ConfigError(other_settings(folder, differing)).about(key=keys[0], keys=keys)


def report_changed_schedule(then: dict[str, Any], now: dict[str, Any]) -> None:
    for key in ("max_steps", "epochs"):
        if then.get(key) != now.get(key):
            log().info("%s: %s -> %s; the learning rate schedule is recomputed", key, then.get(key), now.get(key))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
