"""A run continued from a checkpoint, on however many ranks, under whatever strategy."""

import os
from pathlib import Path

import torch

from llava_fsdp.checkpoint.agree import on_all_ranks, on_first_rank
from llava_fsdp.checkpoint.facts import refuse_changes, refuse_other_settings
from llava_fsdp.checkpoint.folders import leave_branch, set_aside
from llava_fsdp.checkpoint.layout import Part, held_parts, row_bytes, tensors
from llava_fsdp.checkpoint.manifest import BESIDE, MANIFEST_FILE, STATE_FILE, Manifest, Saved
from llava_fsdp.checkpoint.tensorfile import open_file, read_header, read_rows
from llava_fsdp.checkpoint.verify import Checkpoint, naming, newest_together, verify_together
from llava_fsdp.checkpoint_names import FOLDER, list_checkpoints, step_of
from llava_fsdp.config import Config
from llava_fsdp.errors import CheckpointError
from llava_fsdp.optim import prepare_moments
from llava_fsdp.rundir import begun_at, mark_begun
from llava_fsdp.state import TrainState


def resume(state: TrainState, cfg: Config) -> Path | None:
    """Continue from the checkpoint that `checkpoint.resume` names: its folder, or None at step 0. A collective.

    Raises:
        CheckpointError: none of those there verifies; or it was written by a run with another model, dataset or recipe.
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
    """The checkpoint to continue from, verified; None starts at step 0. A collective: rank 0 looks."""
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
    """`checkpoint.resume`, which is for the start of a run: ranks that are started again continue what they saved."""
    output, wanted = Path(cfg.output_dir), cfg.checkpoint.resume
    begun = begun_at(output, wanted) if wanted != "auto" else None
    if begun is not None and any((step_of(p) or 0) > begun for p in list_checkpoints(output / FOLDER)):
        return "auto"
    return wanted


def start_over(output: Path) -> None:
    left = (
        FOLDER, "export", BESIDE, "metrics.jsonl", "quarantine.jsonl", "validation.jsonl", "starts.jsonl",
        "report.html", "tensorboard",
    )  # fmt: skip
    set_aside(output, [output / name for name in left])
    mark_begun(output, "never", 0)


def continues(cfg: Config) -> bool:
    """Whether there is something that this run would continue."""
    named = cfg.checkpoint.resume not in ("auto", "never")
    return named or (cfg.checkpoint.resume == "auto" and bool(list_checkpoints(Path(cfg.output_dir) / FOLDER)))


def check_settings(cfg: Config) -> None:
    """Whether what the run would continue was written with these settings, as far as they tell without a model.

    Raises:
        ConfigError: naming the keys that differ.
    """
    try:
        wanted = wish_of(cfg)
        newest = list_checkpoints(Path(cfg.output_dir) / FOLDER)[-1:]
    except OSError:  # said by whoever needs it
        return
    for folder in newest if wanted == "auto" else [Path(wanted)] if wanted != "never" else []:
        refuse_other_settings(folder, cfg)


def require_checkpoint(folder: Path) -> None:
    if not any((folder / name).is_file() for name in (MANIFEST_FILE, STATE_FILE)):
        raise CheckpointError(
            f"checkpoint.resume={folder} is not a checkpoint; give auto, never, or a step-NNNNNN folder of a run"
        )


@torch.no_grad()
def load(found: Checkpoint, into: dict[str, torch.Tensor]) -> None:
    """Fill this rank's rows of every tensor.

    Raises:
        CheckpointError: the checkpoint holds other tensors, or a file of it cannot be read.
    """
    with naming(found.folder):
        parts = held_parts(into)
        require_same(found.manifest, parts)
        for file in sorted(found.manifest.files.keys() - {STATE_FILE}):
            fill_from(found, file, parts)


def require_same(manifest: Manifest, parts: dict[str, Part]) -> None:
    """The same names, shapes and dtypes: nothing is cast, cut or left out.

    Raises:
        CheckpointError: naming one that differs, and both.
    """
    differing = sorted(manifest.tensors.keys() ^ parts.keys())
    if differing:
        name = differing[0]
        has, lacks = ("it", "this run") if name in manifest.tensors else ("this run", "it")
        raise CheckpointError(f"{len(differing)} tensors differ: {has} has {name}, and {lacks} has not")
    for name, part in parts.items():
        saved = manifest.tensors[name]
        if saved.shape != part.shape:
            raise CheckpointError(f"{name} has shape {list(saved.shape)} in it, and {list(part.shape)} in this run")
        if saved.dtype != part.dtype:
            raise CheckpointError(f"{name} is {saved.dtype} in it, and {part.dtype} in this run")


def fill_from(found: Checkpoint, file: str, parts: dict[str, Part]) -> None:
    """What a file has of the rows that this rank holds."""
    wanted = []
    for name, part in parts.items():
        for piece in found.manifest.tensors[name].pieces:
            begin, end = max(piece.begin, part.begin), min(piece.end, part.end)
            if piece.file == file and begin < end:
                wanted.append((name, begin, end, begin - piece.begin))
    if not wanted:
        return
    descriptor = open_file(found.folder / file)
    try:
        header = read_header(descriptor, file)
        for name, begin, end, skipped in wanted:
            part = parts[name]
            place = header[name].begin + skipped * row_bytes(part.dtype, part.shape)
            target = part.values[begin - part.begin : end - part.begin] if part.shape else part.values
            read_rows(descriptor, file, place, target)
    finally:
        os.close(descriptor)


def saved_rows(folder: Path, name: str, saved: Saved, begin: int, end: int) -> torch.Tensor:
    """Rows of one tensor, whatever ranks wrote them, on the CPU.

    Raises:
        CheckpointError: they cannot be read.
    """
    with naming(folder):
        values = torch.empty(end - begin, *saved.shape[1:], dtype=saved.dtype)
        part = Part(saved.dtype, saved.shape, begin, end, values)
        found = Checkpoint(folder, Manifest(0, {}, {name: saved}), {})
        for file in sorted({piece.file for piece in saved.pieces}):
            fill_from(found, file, {name: part})
    return values
