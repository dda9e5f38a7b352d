"""Resume a run from a checkpoint, on any number of ranks and with any sharding strategy."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from llava_fsdp.checkpoint.manifest import ADAPTER_FOLDER, LARGEST, MANIFEST_FILE, STATE_FILE
from llava_fsdp.checkpoint.reader import DTypeAndShape, described_tensors, load
from llava_fsdp.checkpoint.retention import best_checkpoint, set_aside, set_aside_later
from llava_fsdp.checkpoint.safetensors_stream import open_file
from llava_fsdp.checkpoint.state_json import OWN_PARTS, without_enums
from llava_fsdp.checkpoint.verify import Checkpoint, newest_together, verify_together
from llava_fsdp.config import (
    Answers,
    Config,
    DType,
    EmptyThoughts,
    History,
    LabelWeights,
    LoraConfig,
    OptimName,
    Part,
    PrefConfig,
    QuantizeConfig,
    Thoughts,
)
from llava_fsdp.config.command_line.renamed import present_tree
from llava_fsdp.config.command_line.tree import dotted
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.data.text.chat_template.jinja_template import OWN
from llava_fsdp.model.adapters.base_config import check_base_config
from llava_fsdp.model.adapters.lora_files import adapter_folders, is_adapter_folder
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.ranks.consensus import on_all_ranks, on_first_rank
from llava_fsdp.parallel.ranks.mesh import gather_lists
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files.run_dir import (
    FOLDER,
    REPLACED_NAMES,
    WRITTEN_NAMES,
    begun_at,
    list_checkpoints,
    mark_begun,
    step_of,
)
from llava_fsdp.runtime.files.small_json import parse_object
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.checkpoints.checkpoint_contents import facts_of, tensors
from llava_fsdp.train.optimizer import prepare_moments
from llava_fsdp.train.state import TrainState

C = TypeVar("C", bound=Config)
FIXED_KEYS = ("seed", "global_batch_size", "model", "loss", "pref", "optim", "data", "labels", "sampler")
"""Keys, or groups of keys, that must stay the same when a run continues, except `FREE_KEYS`."""
MEMORY_KEYS = (
    "activation_checkpointing", "attention", "compile", "data", "deterministic", "loss", "micro_batch_size", "model",
    "offload", "optim", "pack", "precision", "sampler", "sharding", "tokens_per_micro_batch",
)  # fmt: skip
"""Keys, or groups of keys, on which the memory of a step depends. If one changes, a run with
`activation_checkpointing=dynamic` measures again."""
STORED_AS = ("precision.master_dtype", "precision.moment_dtype")
"""Dtypes of a checkpoint's tensors, which must stay the same when a run continues."""
FREE_KEYS = {
    "data.path", "data.images", "data.root", "data.workers", "data.prefetch", "data.stall", "data.source",
    "data.index", "data.cache", "data.cache_gb", "data.examine", "data.examine_images", "data.allow_links",
    "data.bad_records", "data.max_bad_records",
    "model.name", "model.language", "model.vision", "model.checkpoint", "model.projector", "model.lora.checkpoint",
}  # fmt: skip
"""Keys that may change when a run continues, because they do not change the result of a training: paths, names, and how
records are read from disk."""


def resume(state: TrainState, cfg: Config, weights_are_missing: bool = False) -> Path | None:
    """Load the checkpoint that `checkpoint.resume` selects into the state, and return its folder; None if training
    starts at step 0. Checkpoints of later steps are moved into a folder `old-N`. Collective. `weights_are_missing`:
    weights that the checkpoint has were not read before (`without_saved_sources`), so that training cannot start at
    step 0.

    Raises:
        CheckpointError: all checkpoints are damaged, or the selected one is of another model, dataset or recipe.
        ModelError: the checkpoint has adapters whose base model had another configuration.
    """
    checkpoint = choose_checkpoint(cfg)
    if checkpoint is None and weights_are_missing:
        raise CheckpointError(f"the checkpoints in {cfg.output_dir} disappeared while the run started; run it again")
    if checkpoint is None:
        return None
    refuse_changes(checkpoint.facts, cfg, state, checkpoint.folder)
    refuse_other_base(state, cfg, checkpoint.folder)
    # optimizers create their moments in the first step; they must exist to be loaded
    prepare_moments(state.optimizer)
    into = tensors(state)
    # what the checkpoint has for stages of a pipeline on other ranks
    elsewhere = tensors_elsewhere(into) if state.pipeline is not None else {}

    def load_tensors() -> None:
        load(checkpoint, into, elsewhere)
        check_finite(into, checkpoint.folder)

    on_all_ranks(load_tensors, f"checkpoint {checkpoint.folder} could not be read")
    state.masters.refresh()
    facts = checkpoint.facts
    state.step, state.samples, state.run = facts["step"], facts["samples"], facts["run"]
    state.skipped = facts["skipped"]
    state.consecutive = facts["consecutive"]
    if state.scaler is not None and facts["scaler"] is not None:
        state.scaler.restore(facts["scaler"])
    if state.dynamic is not None and facts["dynamic"] is not None and has_same_memory(facts, facts_of(state, cfg)):
        state.dynamic.restore(facts["dynamic"])
    state.loader.broken = set(facts["broken"])
    output = Path(cfg.output_dir)

    def set_aside_later_ones() -> None:
        set_aside_later(output, checkpoint.folder, state.step)
        if cfg.checkpoint.resume != "auto":
            # if torchrun restarts the ranks, they then continue from later checkpoints instead of from this one again
            mark_begun(output, cfg.checkpoint.resume, state.step)

    on_first_rank(set_aside_later_ones, "cannot set checkpoints aside")
    return checkpoint.folder


def find_best(cfg: Config) -> Path:
    """Return the folder of a run's best checkpoint (`checkpoint.best`), or raise CheckpointError. Collective."""
    output = Path(cfg.output_dir)
    return on_first_rank(lambda: best_checkpoint(output), f"cannot look for checkpoints in {output}")


def load_weights_of(state: TrainState, folder: Path) -> None:
    """Load a checkpoint of a finished training into its state, whose counters stay as they are. The state can then be
    exported, but not trained further. Raise CheckpointError if the checkpoint is damaged. Collective."""
    checkpoint = verify_together(folder.resolve())
    into = tensors(state)
    elsewhere = tensors_elsewhere(into) if state.pipeline is not None else {}
    on_all_ranks(lambda: load(checkpoint, into, elsewhere), f"checkpoint {folder} could not be read")
    state.masters.refresh()
    log().info("the weights of step %d are exported, whose validation is the best", checkpoint.facts["step"])


def check_finite(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raise CheckpointError if a checkpoint's tensor of floats above 8 bits has NaN or infinity on this rank."""
    for name, tensor in tensors.items():
        part = local(tensor)
        is_checked = part.is_floating_point() and part.element_size() > 1 and part.numel()
        if is_checked and not all(math.isfinite(end) for end in part.aminmax()):
            raise CheckpointError(
                f"checkpoint {folder}: {name} has values that are NaN or infinite; continue from an earlier checkpoint "
                "(checkpoint.resume=FOLDER), or start over with checkpoint.resume=never"
            )


def has_same_memory(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a run needs as much memory as the one that wrote a checkpoint, as far as settings, number of ranks
    and versions of software tell. `then` and `now` are contents of `state.json`."""
    same_settings = all(then["config"].get(key) == now["config"][key] for key in MEMORY_KEYS)
    return same_settings and all(then[key] == now[key] for key in ("written_by", "versions"))


def tensors_elsewhere(own: dict[str, torch.Tensor]) -> dict[str, DTypeAndShape]:
    """Return dtype and shape of the tensors of a checkpoint that ranks with other stages hold. Collective."""
    all_tensors = {name: value for each in gather_lists([described_tensors(own)]) for name, value in each.items()}
    return {name: value for name, value in all_tensors.items() if name not in own}


def choose_checkpoint(cfg: Config) -> Checkpoint | None:
    """Return the verified checkpoint from which to resume, as `checkpoint.resume` says; None if training starts at step
    0. Rank 0 looks for it. With `never`, the output of an earlier run is moved away. With `auto`, a damaged newest
    checkpoint is an error if `checkpoint.strict` is set; otherwise the one before it is used. Collective."""
    output = Path(cfg.output_dir)
    requested = on_first_rank(lambda: requested_resume(cfg), f"cannot look for checkpoints in {output}")
    if requested == "never":
        return on_first_rank(lambda: start_over(output), "cannot move the output of an earlier run away")
    if requested == "auto":
        return newest_together(output / FOLDER, cfg.checkpoint.strict)
    folder = Path(requested)
    on_first_rank(lambda: require_checkpoint(folder), f"cannot look at {folder}")
    try:
        return verify_together(folder.resolve())
    except CheckpointError as error:
        raise CheckpointError(f"{error}; continue from another step-NNNNNN folder, or start over with never") from error


def requested_resume(cfg: Config) -> str:
    """Return `auto` (the newest checkpoint), `never` or the folder of a checkpoint, as `checkpoint.resume` says. A name
    such as `step-000200` is that of a checkpoint of `output_dir`, if the current folder has none of this name. If
    torchrun or a scheduler has restarted a run that began with this value of `checkpoint.resume`, and it has saved a
    checkpoint since, return `auto`, so that it continues instead of beginning again."""
    output, requested = Path(cfg.output_dir), cfg.checkpoint.resume
    first_step = begun_at(output, requested) if requested != "auto" else None
    if first_step is not None and any((step_of(p) or 0) > first_step for p in list_checkpoints(output / FOLDER)):
        return "auto"
    inside = output / FOLDER / requested
    if step_of(Path(requested)) is not None and not Path(requested).exists() and inside.is_dir():
        return str(inside)
    return requested


def start_over(output: Path) -> None:
    """Move the output of an earlier run in `output` into a folder `old-N`, and record that a run starts there at step
    0. Files that each start of a run replaces anyway, such as `config.yaml`, stay."""
    set_aside(output, [output / name for name in sorted(WRITTEN_NAMES - REPLACED_NAMES)])
    mark_begun(output, "never", 0)


def continues(cfg: Config) -> bool:
    """Return whether the training would resume from a checkpoint instead of starting at step 0."""
    requested = requested_resume(cfg)
    names_checkpoint = requested not in ("auto", "never")
    return names_checkpoint or (requested == "auto" and bool(list_checkpoints(Path(cfg.output_dir) / FOLDER)))


def without_saved_sources(cfg: C) -> C:
    """Return the configuration without the sources of weights that the run reads from its checkpoint instead: the
    projector if it trains, and the adapter from which the run began if its folder is gone. So the run continues if what
    it began with has been deleted or moved.

    A lost adapter may have had weights that are frozen in this run. The fingerprint of the frozen weights then differs
    from that in the checkpoint, which is refused.
    """
    if not continues(cfg):
        return cfg
    model = cfg.model
    adapter = model.lora.checkpoint
    if adapter is not None and not any(is_adapter_folder(folder) for folder in adapter_folders(adapter)):
        log().info("model.lora.checkpoint=%s is gone; this run continues with the adapter in its checkpoint", adapter)
        model = replace(model, lora=replace(model.lora, checkpoint=None))
    if Part.projector in model.trained and model.checkpoint is None and model.lora.checkpoint is None:
        model = replace(model, projector="random")
    return replace(cfg, model=model)


def check_settings(cfg: Config) -> None:
    """Check, before a model is built, that the settings agree with those of the checkpoint from which the run would
    resume. Raises ConfigError, which lists the changed ones and a remedy, if settings have changed that must stay the
    same. A checkpoint that cannot be read is ignored here, because it is verified and reported later."""
    try:
        folder_and_settings = settings_to_continue(cfg)
        if folder_and_settings is None:
            return
        folder, then = folder_and_settings
        changed = changed_settings(then, flat(without_enums(asdict(cfg))))
        if changed:
            keys = [line.partition(":")[0] for line in changed]
            raise ConfigError(other_settings(folder, changed)).about(key=keys[0], keys=keys)
    except (CheckpointError, OSError, ValueError, TypeError):
        return


def settings_to_continue(cfg: Config) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of the checkpoint from which the run would resume, which is not verified, and the settings of
    the run that wrote it: dotted key -> value; None if training starts at step 0.

    Raises:
        CheckpointError, OSError, ValueError, TypeError: the checkpoint cannot be read.
    """
    requested = requested_resume(cfg)
    newest = list_checkpoints(Path(cfg.output_dir) / FOLDER)[-1:]
    if requested == "never":
        return None
    for folder in newest if requested == "auto" else [Path(requested)]:
        with os.fdopen(open_file(folder / STATE_FILE), "rb") as file:
            return folder, settings_then(parse_object(file.read(LARGEST), {"config": (dict,)})["config"])
    return None


def recorded_dtype(cfg: Config) -> DType | None:
    """Return the compute dtype of the run from whose checkpoint the training would resume; None if it starts at step 0,
    or if the checkpoint cannot be read, which is reported later."""
    try:
        found = settings_to_continue(cfg)
        return None if found is None else DType(found[1]["precision.param_dtype"])
    except (CheckpointError, OSError, ValueError, TypeError, KeyError):
        return None


def require_checkpoint(folder: Path) -> None:
    """Raise CheckpointError if the folder given as `checkpoint.resume` is not a checkpoint."""
    if not any((folder / name).is_file() for name in (MANIFEST_FILE, STATE_FILE)):
        raise CheckpointError(
            f"checkpoint.resume={folder} is not a checkpoint; give auto, never, or a step-NNNNNN folder of a run"
        )


def is_fixed(key: str) -> bool:
    """Return whether a key such as `optim.lr` must stay the same when a run continues."""
    may_change = key in FREE_KEYS or re.fullmatch(r"data\.sources\.[^.]+\.(path|images)", key) is not None
    return key in STORED_AS or (key.partition(".")[0] in FIXED_KEYS and not may_change)


def refuse_changes(facts: dict[str, Any], cfg: Config, state: TrainState, folder: Path) -> None:
    """Raise CheckpointError if the data, the model, or settings that must stay the same have changed since a checkpoint
    was written (`facts`: content of its `state.json`). The message lists every difference and says what the user can
    do."""
    then, now = settings_then(facts["config"]), flat(without_enums(asdict(cfg)))
    changed = changed_settings(then, now)
    paths = then.get("data.path"), now.get("data.path")
    note_of_path = f"; it was {paths[0]}, and is {paths[1]}" if paths[0] != paths[1] else ""
    meanings = {
        "dataset": "data.path: a file of records was added, removed or changed, or other records are wrong now"
        + note_of_path,
        "encoding": "model.language, model.vision: the tokenizer or the preprocessor is another one",
        "order": "sampler: it gives another order, because micro_batch_size, the number of ranks (llava_v1_5) or the "
        "version of this program (computed_shuffle) changed",
        "model": "model: the model is another one: other shapes, or other frozen weights",
    }
    if now["model.random_weights"] and then.get("seed") != now["seed"]:
        del meanings["model"]  # random weights depend on the seed, whose change is already listed
    changed += [text for what, text in meanings.items() if facts["fingerprints"][what] != state.fingerprints[what]]
    # the loss or the projector that a program gives in place of this package's; its fingerprint is its name
    for part in OWN_PARTS:
        before, here = (fingerprints.get(part, "none") for fingerprints in (facts["fingerprints"], state.fingerprints))
        if before != here:
            changed.append(f"the program's {part}: {before} -> {here}")
    trainable = set(state.trained) ^ set(facts["trainable"])
    if trainable:
        changed.append(f"model.train: {len(trainable)} parameters were added or removed, such as {min(trainable)}")
    if changed:
        raise CheckpointError(other_settings(folder, changed))
    for key in ("max_steps", "epochs"):
        if then.get(key) != now.get(key):
            log().info("%s: %s -> %s; the learning rate schedule is recomputed", key, then.get(key), now.get(key))
    key = "precision.param_dtype"
    if then.get(key) != now[key]:
        log().info("%s: %s -> %s; the steps from here compute in another dtype", key, then.get(key), now[key])


def refuse_other_base(state: TrainState, cfg: Config, folder: Path) -> None:
    """Raise ModelError if a checkpoint has adapters, and the configuration of their base model has changed since it was
    written. Collective."""
    if isinstance(state.model, Architecture):
        where, parts = cfg.model.checkpoint or cfg.model.language, state.model.parts
        key = "model.checkpoint or model.language"
        on_first_rank(
            lambda: check_base_config(folder / ADAPTER_FOLDER, parts, where, key), f"{folder} cannot be continued"
        )


def other_settings(folder: Path, differing: list[str]) -> str:
    """Return the error message for a checkpoint with other settings. `differing`: texts such as `key: old -> new`."""
    return (
        f"{folder} was written by a run with other settings:\n  "
        + "\n  ".join(differing)
        + "\nSet them back, give another output_dir, or start over with checkpoint.resume=never"
    )


def settings_then(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with which a checkpoint was written, as dotted key -> value. `config`: entry `config` of its
    `state.json`, which may have older names of keys, and lack keys that were added later."""
    # older checkpoints lack these keys: their runs had neither adapters, quantization, thoughts nor pairs, trained on
    # the empty thought of a chat template, and their learning rates ended at 0
    added = {
        "optim": {"name": OptimName.adamw, "momentum": 0.95, "ema": None, "decay_ratio": None, "min_lr_ratio": 0.0},
        "model": {"lora": asdict(LoraConfig()), "quantize": asdict(QuantizeConfig())},
        "data": {
            "thoughts": Thoughts.refuse,
            "empty_thoughts": EmptyThoughts.train,
            "history": History.template,
            "answers": Answers.all,
            "weights": LabelWeights.use,
            "pairs": False,
            "prompt_once": False,
        },
        "pref": asdict(PrefConfig()),
    }
    return flat(without_enums(added)) | flat(present_tree(config))


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return `key: old -> new` for each key that has changed although it must stay the same when a run continues
    (`is_fixed`). `then` and `now`: settings of the checkpoint and of this start, as dotted key -> value."""
    # `auto`, and `OWN` (the model's own chat template), may stand for the same value as another; the fingerprint
    # "encoding" shows if the template or the number of image tokens has changed
    equivalents = {"model.select_feature": {"auto"}, "data.template": {"auto", OWN}}
    equal_keys = {key for key, values in equivalents.items() if values & {then.get(key), now.get(key)}}
    # null stands for these values in a LLaVA-OneVision; for other models, the fingerprint "encoding" shows a change
    nulls = {"data.video_fps": VideoSampling.fps, "data.video_frames": VideoSampling.frames}
    then, now = (
        {key: nulls.get(key) if value is None else value for key, value in settings.items()} for settings in (then, now)
    )
    return [
        f"{key}: {then.get(key)} -> {now.get(key)}"
        for key in sorted(then.keys() | now.keys())
        if is_fixed(key) and key not in equal_keys and then.get(key) != now.get(key)
    ]


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested dictionaries, without empty ones, to {dotted key: value}."""
    return {key: value for key, value in dotted(tree).items() if value != {}}
