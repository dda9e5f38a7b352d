"""Manage the folders of a run's checkpoints: record the newest, delete old ones, and move the output of earlier runs
into a folder `old-N`."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files.durable_files import replace_file, sync_folder
from llava_fsdp.runtime.files.run_dir import FOLDER, folder_name, list_checkpoints, step_of
from llava_fsdp.runtime.text.log import log

POINTER = "latest"
"""Name of a file with the name of the newest checkpoint, for people and scripts. llava_fsdp does not read it."""
BEST = "best"
"""Name of a file with the name of the checkpoint that has the best validation (`checkpoint.best`)."""
STAGED = ".tmp"
"""Ending of the name of a checkpoint's folder that is not complete yet, or that is being deleted."""
REPLACED = ".replaced.tmp"
"""Ending of the name of a checkpoint's folder while a new checkpoint of the same step replaces it."""


def write_latest(folder: Path) -> None:
    """Write the name of the newest checkpoint into the file `latest` beside it."""
    replace_file(folder.parent / POINTER, folder.name.encode() + b"\n", 0o600, durable=True)


def write_best(parent: Path, step: int | None) -> None:
    """Write the name of the checkpoint of step `step`, which exists, into the file `best` among the checkpoints; None:
    remove it. A failure is only logged."""
    try:
        if step is None:
            (parent / BEST).unlink(missing_ok=True)
        else:
            replace_file(parent / BEST, folder_name(step).encode() + b"\n", 0o600, durable=True)
    except OSError as error:
        log().warning("%s cannot be written: which=best will export an earlier step (%s)", parent / BEST, error)


def best_checkpoint(run: Path) -> Path:
    """Return the folder of the checkpoint with the best validation of a run. Raise CheckpointError if it keeps
    no best checkpoint, or that one is missing."""
    pointer = run / FOLDER / BEST
    if not pointer.is_file():
        raise CheckpointError(
            f"{run} keeps no best checkpoint ({pointer} does not exist); train with checkpoint.best=loss, or another "
            "number of its validations"
        )
    folder = pointer.with_name(pointer.read_text(errors="replace").strip())
    if step_of(folder) is None or not folder.is_dir():
        raise CheckpointError(
            f"{pointer} names {folder.name}, which is no checkpoint of {run}; export one of those that are there with "
            "source=FOLDER"
        )
    return folder


def delete(folder: Path) -> None:
    """Rename a checkpoint's folder, then delete it: no half-deleted one is ever read. A failure is only logged."""
    doomed = folder.with_name(folder.name + ".deleted" + STAGED)
    try:
        if os.path.lexists(doomed):
            shutil.rmtree(doomed)
        os.rename(folder, doomed)
        sync_folder(folder.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        log().warning("%s could not be deleted: %s", folder, error)


def restore_replaced(parent: Path) -> None:
    """Give checkpoints their names back that a crashed save has renamed. A save that replaces a checkpoint first
    renames the old one. If it crashed before the new one had its final name, the old one gets that name again."""
    for path in parent.glob("step-*" + REPLACED) if parent.is_dir() else ():
        if not os.path.lexists(named := path.with_name(path.name.removesuffix(REPLACED))):
            os.rename(path, named)


def delete_temporary(parent: Path) -> None:
    """Delete the temporary folders that interrupted saves and deletions of checkpoints have left."""
    for path in parent.glob("step-*" + STAGED) if parent.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def delete_old(
    parent: Path,
    keep: int,
    keep_every: int | None,
    is_undamaged: Callable[[Path], bool],
    reached_point: Callable[[str], None],
    best: int | None = None,
) -> None:
    """Delete old checkpoints. These are kept: the newest `keep` undamaged checkpoints, all damaged checkpoints that are
    newer than the oldest of them, that of step `best`, and those at multiples of `keep_every` steps, if it is set.
    After each deletion `reached_point` is called with "one deleted", for tests, which end the process there."""
    undamaged = 0
    for folder in reversed(list_checkpoints(parent)):
        step = step_of(folder)
        assert step is not None
        if undamaged >= keep:
            if step != best and (keep_every is None or step % keep_every):
                delete(folder)
                reached_point("one deleted")
        elif is_undamaged(folder):
            undamaged += 1


def set_aside(output: Path, paths: Iterable[Path]) -> None:
    """Move those of these files and folders of an earlier run that exist into a new folder `old-N` in `output`, so that
    they are neither lost nor mixed with the output of the current run."""
    present = [path for path in paths if os.path.lexists(path)]
    if not present:
        return
    number = 1
    while (folder := output / f"old-{number}").exists():
        number += 1
    folder.mkdir(mode=0o700)  # `parents=True` below would give it other permissions
    for path in present:
        target = folder / path.relative_to(output)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.rename(path, target)
    log().info("what this run does not continue from is now in %s: %s", folder, ", ".join(p.name for p in present))


def set_aside_later(output: Path, folder: Path, step: int) -> None:
    """Move all checkpoints of later steps than `step`, that of the checkpoint `folder` from which the run continues,
    into a new folder `old-N` in `output`. If some were moved, the file `latest` then names `folder`, if that is in
    `output`."""
    parent = output / FOLDER
    later = [p for p in list_checkpoints(parent) if (step_of(p) or 0) > step and p.resolve() != folder.resolve()]
    set_aside(output, later)
    if later and folder.parent.resolve() == parent.resolve():
        with contextlib.suppress(OSError):  # the file `latest` is only for people and scripts
            write_latest(folder)


def require_plain_folder(folder: Path) -> None:
    """Raise CheckpointError if the path of a checkpoint is a symbolic link or not a folder."""
    if folder.is_symlink():
        raise CheckpointError("it is a link; give the folder that it leads to: checkpoint.resume=DIR")
    if not folder.is_dir():
        raise CheckpointError("it is not a folder")
