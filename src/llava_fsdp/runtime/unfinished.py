"""Recognize the output folder of a run that has not written its model yet, and say in words why. Imports no torch."""

from pathlib import Path

from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.run_dir import FOLDER, held_by, list_checkpoints, step_of
from llava_fsdp.runtime.status_file import STATUS_FILE, is_without_end, read_status, status_of_latest_start

STAGED = frozenset({"export.tmp", "adapter.tmp"})
"""Names of the folders in which a run writes its export and its adapter, until they are complete and compared."""
ADAPTER = "adapter"
"""Name of the folder with the LoRA adapter in a run's output folder."""


def refuse_staged(name: str, key: str) -> None:
    """Raise ModelError if a path is in the folder of an export or adapter that a run could not complete.

    Args:
        name: the path.
        key: configuration key whose value it is, for the message.
    """
    path = Path(name)
    if inside := STAGED.intersection(path.parts):
        raise ModelError(
            f"{key}={name}: {min(inside)} holds what a run wrote before its export failed or was stopped; run the "
            "command of that run again, and give its folder"
        )


def is_run(folder: Path) -> bool:
    """Return whether a folder is the output folder of a run."""
    return any((folder / name).exists() for name in (STATUS_FILE, "config.yaml", FOLDER))


def is_done(folder: Path) -> bool:
    """Return whether the run in an output folder has finished its last step, and no start of it goes on."""
    found = read_status(folder)
    return found is not None and status_of_latest_start(found).get("status") == "done" and held_by(folder) is None


def lacking_export(folder: Path) -> str:
    """Say why the output folder of a run has no export, and what to do, as a text that follows its path.

    Args:
        folder: the run's folder.
    """
    saved = max((step_of(path) or 0 for path in list_checkpoints(folder / FOLDER)), default=0)
    found = read_status(folder)
    status = status_of_latest_start(found) if found is not None else {}
    step = status.get("step")
    step = saved if step is None else step
    again = "run its command again, which continues it and writes its export at the end"
    if held_by(folder) is not None:
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
