"""Recognize the output folder of a run that has not written its model yet, and say why. Imports no torch."""

from pathlib import Path

from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.provenance import WHICH, read_notes
from llava_fsdp.runtime.files.run_dir import FOLDER, held_by, list_checkpoints, step_of
from llava_fsdp.runtime.files.status_file import STATUS_FILE, is_without_end, read_status, status_of_latest_start

STAGED = frozenset({"export.tmp", "adapter.tmp"})
"""Folders in which a run writes its export and its adapter, until they are complete and compared."""
EXPORT = "export"
ADAPTER = "adapter"


def refuse_staged(name: str, key: str) -> None:
    """Raise ModelError if the path `name`, the value of the configuration key `key`, is in one of the `STAGED` folders.
    In them a run writes its export and its adapter, and leaves them behind if it does not complete them."""
    path = Path(name)
    if inside := STAGED.intersection(path.parts):
        raise ModelError(
            f"{key}={name}: {min(inside)} holds what a run wrote before its export failed or was stopped; run the "
            "command of that run again, and give its folder"
        )


def is_run(folder: Path) -> bool:
    """Return whether a folder is the output folder of a run."""
    return any((folder / name).exists() for name in (STATUS_FILE, "config.yaml", FOLDER))


def run_of(path: Path) -> Path | None:
    """Return the output folder of the run that a path names: the path itself, as it was given, or else the absolute
    path of the folder above an export, the folder of checkpoints or one checkpoint. None if there is no run."""
    folder = path.absolute()
    if folder.parent.name == FOLDER and step_of(folder) is not None:
        folder = folder.parents[1]
    elif folder.name in (EXPORT, FOLDER):
        folder = folder.parent
    return next((path if run == path.absolute() else run for run in (path.absolute(), folder) if is_run(run)), None)


def has_export(run: Path) -> bool:
    """Return whether a run has an export. An empty folder does not count: a run gives it its name when it is
    complete."""
    return (run / EXPORT).is_dir() and any((run / EXPORT).iterdir())


def earlier_export(run: Path) -> str | None:
    """Return a warning if the export of a run, from which another training begins, is of an earlier step than the run's
    newest checkpoint, as after a run that was continued and stopped. None if it is not, or has no step."""
    saved = max((step_of(path) or 0 for path in list_checkpoints(run / FOLDER)), default=0)
    notes = read_notes(run / EXPORT)
    exported = notes.get("step")
    # WHICH: the export is that of the step with the best validation, so an earlier step is intended
    if exported is None or exported >= saved or notes.get(WHICH) == "best":
        return None
    return (
        f"the export in {run} is of step {exported}, and the run has gone on to step {saved}; this training begins "
        "with the export. Run the command of that run again to get an export of its last step"
    )


def is_done(folder: Path) -> bool:
    """Return whether the run has finished its last step, and no start of it goes on."""
    status = read_status(folder)
    return status is not None and status_of_latest_start(status).get("status") == "done" and held_by(folder) is None


def why_no_export(folder: Path) -> str:
    """Return why a run has no export, and what to do, as a text that follows the run's path in a message."""
    saved = max((step_of(path) or 0 for path in list_checkpoints(folder / FOLDER)), default=0)
    recorded = read_status(folder)
    status = status_of_latest_start(recorded) if recorded is not None else {}
    step = status.get("step")
    step = saved if step is None else step
    again = "run its command again, which continues it and writes its export at the end"
    if held_by(folder) is not None:  # a process has locked the folder
        return "is a run that is under way; wait until it has finished"
    if is_without_end(status):
        return f"is a run that was killed after step {saved}: {again}"
    if status.get("status") in ("stopped", "interrupted"):
        return f"is a run that was {status['status']} at step {step}: {again}"
    if status.get("status") == "failed":
        reason = str(status.get("reason") or "").partition("\n")[0]
        return f"is a run that failed at step {step} ({reason}): remove the cause, and {again}"
    if status.get("status") == "done" and (folder / ADAPTER).is_dir():
        return "is a run that has finished with an adapter, and without an export of the whole model"
    if status.get("status") == "done":
        return "is a run that has finished without an export (export.enabled=false)"
    return "is a run without an export"
