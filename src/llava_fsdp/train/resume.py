"""Resume a run from a checkpoint, on any number of ranks and under any sharding strategy."""

from pathlib import Path

from llava_fsdp.checkpoint.manifest import ADAPTER_FOLDER, MANIFEST_FILE, STATE_FILE
from llava_fsdp.checkpoint.reader import load
from llava_fsdp.checkpoint.retention import leave_branch, set_aside
from llava_fsdp.checkpoint.verify import Checkpoint, newest_together, verify_together
from llava_fsdp.config import Config
from llava_fsdp.distributed.consensus import on_all_ranks, on_first_rank
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.run_dir import FOLDER, begun_at, list_checkpoints, mark_begun, step_of
from llava_fsdp.train.checkpoint_contents import refuse_changes, refuse_other_settings, tensors
from llava_fsdp.train.optimizer import prepare_moments
from llava_fsdp.train.state import TrainState


def resume(state: TrainState, cfg: Config) -> Path | None:
    """Load the checkpoint that `checkpoint.resume` names, and return its folder; None starts at step 0. A collective.

    Raises:
        CheckpointError: no checkpoint is undamaged, or it was written with another model, dataset or recipe.
    """
    found = choose(cfg)
    if found is None:
        return None
    refuse_changes(found.facts, cfg, state, found.folder)
    prepare_moments(state.optimizer)
    on_all_ranks(lambda: load(found, tensors(state)), f"checkpoint {found.folder} could not be read")
    state.masters.refresh()
    facts = found.facts
    state.step, state.samples, state.run = facts["step"], facts["samples"], facts["run"]
    state.skipped = facts["skipped"]
    if state.scaler is not None and facts["scaler"] is not None:
        state.scaler.restore(facts["scaler"])
    state.loader.broken = set(facts["broken"])
    output = Path(cfg.output_dir)

    def begin() -> None:
        leave_branch(output, found.folder, state.step)
        if cfg.checkpoint.resume != "auto":
            mark_begun(output, cfg.checkpoint.resume, state.step)

    on_first_rank(begin, "cannot set checkpoints aside")
    return found.folder


def choose(cfg: Config) -> Checkpoint | None:
    """Choose and verify the checkpoint to resume from; None starts at step 0. A collective; rank 0 chooses."""
    output = Path(cfg.output_dir)
    wanted = on_first_rank(lambda: wish_of(cfg), f"cannot look for checkpoints in {output}")
    if wanted == "never":
        return on_first_rank(lambda: start_over(output), "cannot set aside what an earlier run left")
    if wanted == "auto":
        return newest_together(output / FOLDER, cfg.checkpoint.strict)
    folder = Path(wanted)
    on_first_rank(lambda: require_checkpoint(folder), f"cannot look at {folder}")
    try:
        return verify_together(folder.resolve())
    except CheckpointError as error:
        others = [p for p in list_checkpoints(folder.resolve().parent) if p != folder.resolve()]
        cure = (
            f"continue from another: checkpoint.resume={others[-1]}"
            if others
            else "start over: checkpoint.resume=never"
        )
        raise CheckpointError(f"{error}; {cure}") from error


def wish_of(cfg: Config) -> str:
    """The value of `checkpoint.resume` for this start. Only a first start uses it: restarts resume what they saved."""
    output, wanted = Path(cfg.output_dir), cfg.checkpoint.resume
    begun = begun_at(output, wanted) if wanted != "auto" else None
    if begun is not None and any((step_of(p) or 0) > begun for p in list_checkpoints(output / FOLDER)):
        return "auto"
    return wanted


def start_over(output: Path) -> None:
    left = (
        FOLDER, "export", ADAPTER_FOLDER, "metrics.jsonl", "skipped_records.jsonl", "validation.jsonl", "starts.jsonl",
        "report.html", "tensorboard",
    )  # fmt: skip
    set_aside(output, [output / name for name in left])
    mark_begun(output, "never", 0)


def continues(cfg: Config) -> bool:
    """Whether this start would resume from a checkpoint."""
    named = cfg.checkpoint.resume not in ("auto", "never")
    return named or (cfg.checkpoint.resume == "auto" and bool(list_checkpoints(Path(cfg.output_dir) / FOLDER)))


def check_settings(cfg: Config) -> None:
    """Compare settings with those of the checkpoint that the run would resume, before a model is built.

    Raises:
        ConfigError: naming the keys that differ.
    """
    try:
        wanted = wish_of(cfg)
        newest = list_checkpoints(Path(cfg.output_dir) / FOLDER)[-1:]
    except OSError:  # reported where the folder is used
        return
    for folder in newest if wanted == "auto" else [Path(wanted)] if wanted != "never" else []:
        refuse_other_settings(folder, cfg)


def require_checkpoint(folder: Path) -> None:
    if not any((folder / name).is_file() for name in (MANIFEST_FILE, STATE_FILE)):
        raise CheckpointError(
            f"checkpoint.resume={folder} is not a checkpoint; give auto, never, or a step-NNNNNN folder of a run"
        )
