"""The state of a run on disk: tensors in a sharded DCP folder, everything else in one JSON file beside them.

A checkpoint is written beside, completed, then renamed to `step-NNNNNN`; a folder of that name is complete. It holds
the trainable weights and their moments under the parameters' names, so that any number of ranks and any strategy
reads it.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from llava_fsdp.config import CheckpointConfig, Config
from llava_fsdp.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.log import log
from llava_fsdp.optim import prepare_moments
from llava_fsdp.sharding import shards
from llava_fsdp.state import TrainState

R = TypeVar("R")
FORMAT = 4
NAME = re.compile(r"step-(\d{6,})")
STATE_FILE = "state.json"
FOLDER = "checkpoints"


def is_due(step: int, last_step: int, cfg: CheckpointConfig) -> bool:
    """Whether to save after this step: at the end, and every `checkpoint.every`."""
    return step == last_step or (cfg.every is not None and step % cfg.every == 0)


def folder_of(cfg: Config) -> Path:
    return Path(cfg.output_dir) / FOLDER


def save(state: TrainState, cfg: Config) -> Path:
    """Write `step-NNNNNN` and drop the oldest ones beyond `checkpoint.keep`. A collective.

    Raises:
        CheckpointError: the folder could not be written, on every rank.
    """
    parent = folder_of(cfg)
    final = parent / f"step-{state.step:06d}"
    staged = parent / f"{final.name}.tmp"
    on_first_rank(lambda: make_empty(staged), f"cannot make {staged}")
    try:
        with quiet_single_process():
            dcp.save(tensors(state), checkpoint_id=staged, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {staged} could not be written: {error}") from error
    on_first_rank(lambda: publish(staged, final, state, cfg), f"cannot complete {final}")
    return final


def publish(staged: Path, final: Path, state: TrainState, cfg: Config) -> None:
    facts = {
        "format": FORMAT,
        "run": state.run,
        "step": state.step,
        "samples": state.samples,
        "skipped": state.skipped,
        "scaler": state.scaler.state() if state.scaler is not None else None,
        "broken": sorted(state.loader.broken),
        "fingerprints": state.fingerprints,
        "trainable": sorted(state.masters.named),
        "torch": torch.__version__,
        "config": plain(asdict(cfg)),
    }
    write_durably(staged / STATE_FILE, json.dumps(facts, indent=1))
    if final.exists():  # left by a run that was told to start over
        shutil.rmtree(final)
    os.rename(staged, final)
    sync_folder(final.parent)
    for old in list_checkpoints(final.parent)[: -cfg.checkpoint.keep]:
        shutil.rmtree(old)


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Weights and moments by name; DCP writes and fills exactly these tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in state.masters.named.items():
        found[f"model.{name}"] = shards.plain(parameter)
        for moment, value in state.optimizer.state[parameter].items():
            found[f"optim.{name}.{moment}"] = value
    return found


def resume(state: TrainState, cfg: Config) -> bool:
    """Continue from the checkpoint that `checkpoint.resume` names; True if there was one. A collective.

    Raises:
        CheckpointError: it cannot be read, or was written by a run with another model, dataset or recipe.
    """
    found = on_first_rank(lambda: choose(cfg), f"cannot look for checkpoints in {cfg.output_dir}")
    if found is None:
        return False
    folder, facts = found
    refuse_changes(facts, cfg, state, folder)
    prepare_moments(state.optimizer)
    try:
        with quiet_single_process():
            dcp.load(tensors(state), checkpoint_id=folder, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        others = [str(p) for p in list_checkpoints(folder.parent) if p != folder]
        cure = (
            f"continue from another: checkpoint.resume={others[-1]}"
            if others
            else "start over: checkpoint.resume=never"
        )
        why = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"checkpoint {folder} could not be read ({type(error).__name__}: {why}); {cure}"
        ) from error
    state.masters.refresh()
    state.step, state.samples, state.run = facts["step"], facts["samples"], facts["run"]
    state.skipped = facts["skipped"]
    if state.scaler is not None and facts["scaler"] is not None:
        state.scaler.restore(facts["scaler"])
    state.loader.broken = set(facts["broken"])
    on_first_rank(lambda: leave_branch(Path(cfg.output_dir), folder, state.step), "cannot set checkpoints aside")
    return True


def leave_branch(output: Path, folder: Path, step: int) -> None:
    """Going back to an earlier step starts a new branch; later checkpoints are of the old one."""
    later = [p for p in list_checkpoints(output / FOLDER) if step_of(p) > step and p.resolve() != folder.resolve()]
    set_aside(output, later)


@contextlib.contextmanager
def quiet_single_process() -> Iterator[None]:
    """DCP warns that it works in a single process, which is what it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def choose(cfg: Config) -> tuple[Path, dict[str, Any]] | None:
    """On rank 0: the folder to resume from and its facts; None starts at step 0."""
    output = Path(cfg.output_dir)
    if cfg.checkpoint.resume == "never":
        set_aside(output, [output / FOLDER, output / "export", output / "metrics.jsonl", output / "quarantine.jsonl"])
        return None
    if cfg.checkpoint.resume == "auto":
        found = list_checkpoints(output / FOLDER)
        return (found[-1], read_state(found[-1])) if found else None
    folder = Path(cfg.checkpoint.resume)
    if not (folder / STATE_FILE).is_file():
        raise CheckpointError(
            f"checkpoint.resume={folder} is not a checkpoint; give auto, never, or a step-NNNNNN folder of a run"
        )
    return folder, read_state(folder)


def list_checkpoints(parent: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [p for p in parent.glob("step-*") if NAME.fullmatch(p.name) and (p / STATE_FILE).is_file()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    match = NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def set_aside(output: Path, paths: list[Path]) -> None:
    """Move what an earlier attempt left into `old-N`, so that nothing of it is lost or taken for this one's."""
    present = [path for path in paths if path.exists()]
    if not present:
        return
    number = 1
    while (kept := output / f"old-{number}").exists():
        number += 1
    for path in present:
        target = kept / path.relative_to(output)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, target)
    log().info("what this run does not continue from is now in %s: %s", kept, ", ".join(p.name for p in present))


def read_state(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} cannot be read: {error}") from error
    if facts.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {facts.get('format')}; this version reads format {FORMAT}")
    return facts


FIXED_KEYS = ("seed", "global_batch_size", "model", "loss", "optim", "data", "labels", "order")
STORED_AS = ("precision.master_dtype", "precision.moment_dtype")  # what a checkpoint's tensors are
FREE_KEYS = {  # paths, how records are read from disk, and names that are no part of the result
    "data.path", "data.images", "data.root", "data.workers", "data.prefetch", "data.stall", "data.source",
    "data.index", "data.examine", "data.allow_links", "data.bad", "data.bad_budget",
    "model.name", "model.language", "model.vision", "model.checkpoint", "model.projector",
}  # fmt: skip


def is_fixed(key: str) -> bool:
    """Whether a run that continues must have the value that it began with."""
    free = key in FREE_KEYS or re.fullmatch(r"data\.sources\.[^.]+\.(path|images)", key) is not None
    return key in STORED_AS or (key.partition(".")[0] in FIXED_KEYS and not free)


def refuse_changes(facts: dict[str, Any], cfg: Config, state: TrainState, folder: Path) -> None:
    """A run continues only as itself.

    Raises:
        CheckpointError: listing every key that differs, and what to do.
    """
    then, now = flat(facts["config"]), flat(plain(asdict(cfg)))
    differing = [
        f"{key}: {then.get(key)} -> {now.get(key)}"
        for key in sorted(then.keys() | now.keys())
        if is_fixed(key) and then.get(key) != now.get(key)
    ]
    moved = f"{then.get('data.path')} -> {now.get('data.path')}"
    meanings = {
        "dataset": f"data.path: the dataset is another one, has changed, or has other wrong records now ({moved})",
        "encoding": "model.language, model.vision: the tokenizer or the preprocessor is another one",
        "order": "order: the original's order depends on micro_batch_size and on the number of ranks; one is another",
        "model": "model: the model is another one: other shapes, or other frozen weights",
    }
    for what, meaning in meanings.items():
        drawn_anew = what == "model" and now["model.random_weights"] and then["seed"] != now["seed"]  # said by the seed
        if facts["fingerprints"][what] != state.fingerprints[what] and not drawn_anew:
            differing.append(meaning)
    trainable = set(state.masters.named) ^ set(facts["trainable"])
    if trainable:
        differing.append(f"model.train: {len(trainable)} parameters differ, {min(trainable)} for one")
    if differing:
        raise CheckpointError(
            f"{folder} was written by a run with other settings:\n  "
            + "\n  ".join(differing)
            + "\nSet them back, give another output_dir, or start over with checkpoint.resume=never"
        )
    say_recomputed_schedule(then, now)


def say_recomputed_schedule(then: dict[str, Any], now: dict[str, Any]) -> None:
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


def plain(value: Any) -> Any:
    """Enums by value, so that JSON holds what YAML did."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value.value if isinstance(value, Enum) else value


def on_first_rank(action: Callable[[], R], failing: str) -> R:
    """Run something on rank 0 and give its result to every rank; where it fails, fail on every rank alike.

    Raises:
        LlavaFsdpError: as rank 0 raised it; any other error of rank 0's becomes a CheckpointError with `failing`.
    """
    outcome: list[Any] = [None, None]
    cause: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except LlavaFsdpError as error:
            outcome[1], cause = (type(error), str(error)), error
        except Exception as error:  # peers wait for this broadcast, whatever went wrong
            outcome[1], cause = (CheckpointError, f"{failing}: {type(error).__name__}: {error}"), error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise kind(message) from cause
    return outcome[0]


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
