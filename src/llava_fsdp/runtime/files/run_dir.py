"""The output folder of a run: its lock, the names of its checkpoints, and a record of the step at which the run began.
Imports no torch."""

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.errors import ConfigError, FolderInUse
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.heartbeat import read_beat
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.files.safe_load import is_open_to_others
from llava_fsdp.runtime.files.scores_file import SCORES_FILE
from llava_fsdp.runtime.files.small_json import BadJson, Kinds, MissingJson, object_or_none, parse_object, read_object
from llava_fsdp.runtime.files.status_file import (
    FIRST_FAILURE,
    NONE,
    STATUS_FILE,
    STEPPED_FILE,
    drop_stale_failure,
    is_of_this_launch,
    is_without_end,
    previous_status,
    put_status,
    status_of,
)
from llava_fsdp.runtime.launch import launch_id
from llava_fsdp.runtime.text.log import log

LOCK_FILE = ".lock"
BEGUN_FILE = ".begun"
"""Name of the file that records at which step a run has begun."""
PAIR_REFERENCE = "pair_reference.safetensors"
"""Name of the file with the log-probabilities of answers by the model at the start (pref.reference=stored)."""
HELD_OUT_PAIR_REFERENCE = "held_out_pair_reference.safetensors"
"""Name of the file with those of the held-out records."""
PLAN_FILE = "plan.json"
"""Name of the file with the measured seconds of a run's steps."""
WRITTEN_NAMES = frozenset({
    LOCK_FILE, STATUS_FILE, FIRST_FAILURE, STEPPED_FILE, BEGUN_FILE, "config.yaml", "metrics.jsonl",
    "validation.jsonl", "skipped_records.jsonl", "starts.jsonl", "report.html", ".heartbeats", "stacks", "checkpoints",
    "export", "adapter", "tensorboard", "profile", "expert_load.json", SCORES_FILE, PAIR_REFERENCE,
    HELD_OUT_PAIR_REFERENCE, PLAN_FILE,
})  # fmt: skip
"""Names of the files and folders that a run writes into `output_dir`: a run does not start where one of them is a link
or of another kind."""
REPLACED_NAMES = frozenset({
    LOCK_FILE, STATUS_FILE, FIRST_FAILURE, STEPPED_FILE, BEGUN_FILE, "config.yaml", ".heartbeats", "stacks",
})  # fmt: skip
"""Those of `WRITTEN_NAMES` that each start replaces. A run that starts over moves all others away."""
FOLDER_NAMES = frozenset({".heartbeats", "stacks", "checkpoints", "export", "adapter", "tensorboard", "profile"})
"""Those of `WRITTEN_NAMES` that are folders."""
LOCK_KINDS: dict[str, Kinds] = {"pid": (int,), "host": (str,), "since": (str,), "launch": (str, NONE)}
BEGUN_KINDS: dict[str, Kinds] = {"wish": (str,), "step": (int,), "launch": (str,), "time": (float,)}
HANDOVER_SECONDS = 30
"""Seconds that rank 0, restarted by torchrun, waits for its previous process to release the lock."""
CLAIMING_SECONDS = 15
"""Seconds that the other ranks wait until rank 0 has locked the run's folder."""

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{6,})")


@contextlib.contextmanager
def claiming_folder(folder: Path, rank: int, private: bool = True) -> Iterator[int | None]:
    """Context manager that creates and locks the run's folder on rank 0, and writes the status "running" into it.

    The other ranks wait for rank 0: if another run uses the folder, no rank may write into it.

    The lock is a POSIX record lock. It is released when the process dies and is not inherited by child processes: data
    workers that live a moment longer than their rank do not block a restart. A killed run leaves the status "running"
    or "stopping", which the next start reports.

    Args:
        private: whether a new folder and the run's status can be read only by their owner.

    Yields:
        On rank 0 the descriptor of the lock file, which is closed at the end; None on other ranks.

    Raises:
        ConfigError: the folder cannot be written, or contains symbolic links where a run writes.
        FolderInUse: another run uses the folder.
    """
    if rank != 0:
        await_claim(folder)
        with contextlib.suppress(OSError):  # rank 0 reports this error
            make_run_folder(folder, private)
        yield None
        return
    if is_open_to_others(folder):
        log().warning(
            "output_dir=%s can be written by every user of this machine, and a run continues from what it finds there; "
            "chmod o-w %s", folder, folder,
        )  # fmt: skip
    with contextlib.ExitStack() as at_end:
        try:
            make_run_folder(folder, private)
            refuse_links(folder)
            refuse_other_kinds(folder)
            handle = open_lock(folder)
            at_end.callback(os.close, handle)
            lock_folder(handle, folder)
            warn_of_killed(folder)
            drop_stale_failure(folder)
            before = previous_status(folder, is_claiming=True)
            put_status(folder, "running", mode=0o600 if private else 0o666, before=before)
            # the file says that the latest start has finished a step, which this one has not
            (folder / STEPPED_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir={folder} cannot be written ({why(error, folder)}); give another folder"
            ) from error
        yield handle


def open_lock(folder: Path) -> int:
    """Open the lock file of a run's folder, or create it; return its descriptor."""
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def refuse_links(folder: Path) -> None:
    """Raise ConfigError if a symbolic link has the name of a file or folder that a run writes."""
    links = sorted(entry.name for entry in os.scandir(folder) if entry.name in WRITTEN_NAMES and entry.is_symlink())
    if links:
        raise ConfigError(
            f"output_dir={folder} has links where a run writes: {', '.join(links)}. A run renames and replaces what is "
            "in its folder, which takes one file system and must change nothing outside it. Remove the links; to keep "
            "a run on another disk, give a folder there as output_dir, or make output_dir itself the link"
        ).about(file=str(folder / links[0]))


def refuse_other_kinds(folder: Path) -> None:
    """Raise ConfigError if an entry of the folder has the name of a file that a run writes but is not a regular file,
    or has the name of a folder but is not a folder. Opening a pipe would wait for its other end."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in WRITTEN_NAMES and not (entry.is_dir() if entry.name in FOLDER_NAMES else entry.is_file()):
            kind = "folder" if entry.name in FOLDER_NAMES else "regular file"
            raise ConfigError(
                f"output_dir={folder}: {entry.name} is not a {kind}, and a run writes one there; remove it, or give "
                "another folder"
            ).about(file=entry.path)


@contextlib.contextmanager
def restoring_umask() -> Iterator[None]:
    """Context manager that restores the process's umask at its end."""
    before = os.umask(0o077)  # the umask can only be read by a call that sets it
    os.umask(before)
    try:
        yield
    finally:
        os.umask(before)


def make_run_folder(folder: Path, private: bool) -> None:
    """Create the run's folder; if `private`, only its owner can read it. An existing folder is not changed."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)


def await_claim(folder: Path) -> None:
    """Wait up to `CLAIMING_SECONDS` seconds until rank 0 of this launch of torchrun has locked the run's folder."""
    until = time.monotonic() + CLAIMING_SECONDS
    while launch_id() is not None and time.monotonic() < until:
        if (object_or_none(folder / LOCK_FILE, LOCK_KINDS) or {}).get("launch") == launch_id():
            return
        time.sleep(0.05)


def lock_folder(handle: int, folder: Path) -> None:
    """Lock the run's folder by its open lock file, and write into that file who holds the lock. If an earlier start of
    the same launch holds it, wait up to HANDOVER_SECONDS seconds. Raises FolderInUse if it stays locked."""
    until = time.monotonic() + HANDOVER_SECONDS
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            holder = holder_of(handle)
            if holder.get("launch") is None or holder.get("launch") != launch_id() or time.monotonic() > until:
                raise folder_in_use(folder, holder) from None
            time.sleep(0.1)
        except OSError as error:  # the file system does not support locks
            log().warning("output_dir=%s cannot be locked (%s): make sure that no second run uses it", folder, error)
            break
    sign_lock(handle)


def folder_in_use(folder: Path, holder: dict[str, Any]) -> FolderInUse:
    """Return the error for a run's folder that is locked; `holder` is the lock file's content, which may be empty."""
    return FolderInUse(
        f"output_dir={folder} belongs to a run that is under way: process {holder.get('pid', '?')} on "
        f"{holder.get('host', '?')}, since {holder.get('since', '?')}; wait for it, stop it, or give another folder"
    )


def refuse_in_use(folder: Path) -> None:
    """Raise FolderInUse if another process has locked the run's folder. Does not lock it."""
    if (holder := held_by(folder)) is not None:
        raise folder_in_use(folder, holder)


def sign_lock(handle: int) -> None:
    """Write into the lock file, whose descriptor is `handle`, that this process holds the lock."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "launch": launch_id()}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)


def holder_of(handle: int) -> dict[str, Any]:
    """Return which process has locked a run's folder (`pid`, `host`, `launch`, `since`), from the open lock file. Empty
    if the file's content is not valid."""
    try:
        return parse_object(os.pread(handle, 4096, 0), LOCK_KINDS)
    except BadJson:
        return {}


def held_by(folder: Path) -> dict[str, Any] | None:
    """Return which process has locked the run's folder (`pid`, `host`, `launch` of torchrun, `since`); None if it is
    not locked or if that is unknown. Must not be called in the process that holds the lock: closing the lock file
    releases it."""
    is_held, holder = look_at_lock(folder)
    return holder if is_held else None


def is_known_free(folder: Path) -> bool:
    """Return whether it is certain that no run has locked the folder. Must not be called in the process that holds the
    lock: closing the lock file releases it."""
    return look_at_lock(folder)[0] is False


def look_at_lock(folder: Path) -> tuple[bool | None, dict[str, Any]]:
    """Return whether the run's folder is locked (None: unknown), and the lock file's content ({} if not locked)."""
    try:
        # opened read-only, because the folder may be mounted read-only
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False, {}
    except OSError:
        return None, {}
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False, {}
    except (BlockingIOError, PermissionError):
        return True, holder_of(handle)
    except OSError:
        return None, {}
    finally:
        os.close(handle)


def is_locked_by_other_launch(folder: Path) -> bool:
    """Return whether a run of another launch of torchrun has locked the run's folder."""
    holder = held_by(folder)
    return holder is not None and (holder.get("launch") is None or holder["launch"] != launch_id())


def warn_of_killed(folder: Path) -> None:
    """Log a warning if the previous run in this folder was killed. The caller has locked the folder."""
    try:
        status = status_of(folder)
    except MissingJson:
        return
    except BadJson as error:
        log().warning("%s; how the previous run ended is not known", error)
        return
    if not is_without_end(status):
        return
    beat = read_beat(folder, 0)
    after = f" after step {beat.step}" if beat is not None and beat.pid == status.get("pid") else ""
    reason = f", asked to by {status.get('reason')}" if status["status"] == "stopping" else ""
    log().warning("the previous run in %s was killed while it was %s%s%s", folder, status["status"], after, reason)


def mark_begun(folder: Path, resume: str, step: int) -> None:
    """Record at which step the run has begun: step 0, or that of a checkpoint, as `checkpoint.resume` (`resume`) says.
    Ranks that torchrun restarts read this record and do not write it again. Does nothing without torchrun. `step`:
    number of finished steps when the run began."""
    if launch_id() is None or begun_at(folder, resume) is not None:
        return
    begun = {"wish": resume, "step": step, "launch": launch_id(), "time": time.time()}
    replace_file(folder / BEGUN_FILE, (json.dumps(begun) + "\n").encode())


def begun_at(folder: Path, resume: str) -> int | None:
    """Return the step that `mark_begun` recorded before torchrun restarted the ranks; None without such a record. A job
    that a scheduler starts again under the same name (RDZV_ID) counts as a restart. `resume`: the value of
    `checkpoint.resume`. A record of a run with another value is ignored."""
    try:
        begun = read_object(folder / BEGUN_FILE, BEGUN_KINDS)
    except MissingJson:
        return None
    except BadJson as error:
        log().warning("%s; whether the run had begun before this restart is not known", error)
        return None
    if begun["wish"] != resume or launch_id() is None or begun["launch"] != launch_id():
        return None
    # other launches may also have torchrun's default name "none"
    if os.environ["TORCHELASTIC_RUN_ID"] == "none" and not is_of_this_launch(begun):
        return None
    return begun["step"]


def folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint that was saved after `step` steps."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None if the name is not that of a checkpoint."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match and folder.name == folder_name(int(match[1])) else None


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the folders of the checkpoints in `parent`, oldest first. Only names are checked."""
    if not os.path.isdir(parent):  # False, not an error, for a path that is too long
        return []
    steps = {path: step for path in parent.iterdir() if (step := step_of(path)) is not None}
    return sorted(steps, key=lambda path: steps[path])
