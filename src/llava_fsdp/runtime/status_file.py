"""`run_status.json`: the state of a run and how it ended, written by the rank that failed first. Imports no torch."""

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.durable_files import create, replace_file
from llava_fsdp.runtime.errors import ENDINGS, Ending
from llava_fsdp.runtime.launch import attempt, env_rank, incarnation, launch_id, started
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.os_errors import why
from llava_fsdp.runtime.redact import redact, secrets_of
from llava_fsdp.runtime.small_json import BadJson, Kinds, MissingJson, read_object, require_kinds

STATUS_FILE = "run_status.json"
FIRST_FAILURE = ".run_failed"
RESERVED = 4096
"""Size of `run_status.json`, padded so that the end of the run can be written onto a full disk."""
LONGEST_BEFORE = 1000
"""Characters kept of the reason for which the previous start ended."""
KILLED = "killed"
"""Status that is reported for a run without an end that no process holds; not written by the run itself."""
STEPPED_FILE = ".stepped"
"""Exists once the last start in the folder has taken a step."""
NONE = type(None)
WORD: dict[str, Kinds] = {
    "status": (str,), "class": (str, NONE), "exit_code": (int, NONE), "reason": (str, NONE), "culprit": (dict, NONE),
    "step": (int, NONE), "rank": (int, NONE), "pid": (int, NONE), "host": (str, NONE), "attempt": (int, NONE),
    "launch": (str, NONE), "time": (float, NONE),
}  # fmt: skip
"""The types of the values in `run_status.json`, and in each status within it."""
FAILURE: dict[str, Kinds] = {
    "incarnation": (str,), "rank": (int,), "class": (str,), "exit_code": (int,), "reason": (str,),
}  # fmt: skip
PATIENCE = 2
"""Seconds for which a rank that has nothing to report waits for another's report: torchrun ends all ranks as soon as
one has failed, and takes that one for the cause."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    ending: Ending
    reason: str = ""
    culprit: dict[str, Any] = field(default_factory=dict)
    """What the ending is about, by name: rank, host, record, image, key, file."""
    step: int | None = None
    """Steps finished, if known."""


def is_without_end(said: dict[str, Any]) -> bool:
    """Whether a status is that of a run which is under way or was killed."""
    return said.get("status") in ("running", "stopping")


def came_before(folder: Path, is_claiming: bool = False) -> dict[str, Any] | None:
    """The status of the last start that took steps or finished; None if this one took steps, or is the first.

    So a command that is refused does not change the status of a finished run.

    Args:
        is_claiming: this start has written nothing yet, so that the file is of another start.
    """
    said = read_status(folder)
    if said is None:
        return None
    status, before = said.get("status"), said.get("before")
    if isinstance(before, dict) and status != "done":
        return before
    if is_without_end(said):
        own = said.get("pid") == os.getpid() if launch_id() is None else said.get("launch") == launch_id()
        if own and not is_claiming:
            return None
        status = KILLED
    kept = {name: value for name, value in said.items() if name not in ("before", "refused")}
    return {**kept, "status": status, "reason": str(said.get("reason") or "")[:LONGEST_BEFORE]}


def note_steps(folder: Path) -> None:
    """Note that a step was taken, so that the end of this start counts as the end of the run.

    In a separate file, because another rank may be writing its end into `run_status.json`.
    """
    os.close(os.open(folder / STEPPED_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def put_status(
    folder: Path,
    status: str,
    outcome: Outcome | None = None,
    mode: int | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """Write `run_status.json`.

    Args:
        mode: permissions before the umask; None: those of the existing file.
        before: for a start that has taken no step, `came_before`.
    """
    said = {
        "status": status,
        "class": outcome.ending.name if outcome else None,
        "exit_code": int(outcome.ending.exit_code) if outcome else None,
        "reason": redact(outcome.reason, secrets_of()) if outcome else "",
        "culprit": outcome.culprit if outcome else {},
        "step": outcome.step if outcome else None,
        "rank": env_rank(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "attempt": attempt(),
        "launch": launch_id(),
        "time": time.time(),
    }
    if outcome is not None and status != "done" and before is not None and before.get("status") == "done":
        said = {**before, "before": None, "refused": said}  # the run stays finished
    else:
        said["before"] = before
    text, path = (json.dumps(said) + "\n").encode(), folder / STATUS_FILE
    try:
        replace_file(path, text.ljust(RESERVED), mode_of(path) if mode is None else mode)
    except OSError:
        size = path.lstat().st_size
        if size < max(RESERVED, len(text)):
            raise
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(handle, "wb") as file:  # overwriting takes no room on a full disk
            file.write(text.ljust(size))


def own_word(said: dict[str, Any]) -> dict[str, Any]:
    """The last start's own part of a status. A start that was refused in the folder of a finished run writes its part
    beside that run's status."""
    refused = said.get("refused")
    if not isinstance(refused, dict):
        return said
    return {**refused, "before": {name: value for name, value in said.items() if name != "refused"}}


def mode_of(path: Path) -> int:
    """Permissions of a file; those of a private one if it does not exist."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0o600


def read_status(folder: Path) -> dict[str, Any] | None:
    """Like `status_of`, but None if the status is missing or cannot be read."""
    try:
        return status_of(folder)
    except BadJson:
        return None


def status_of(folder: Path) -> dict[str, Any]:
    """The status of the last run in a folder, with `before` only if it has taken no step.

    Raises:
        BadJson: its status cannot be read; MissingJson: the file is missing.
    """
    path = folder / STATUS_FILE
    said = read_object(path, WORD)
    for own in (said, said.get("before"), said.get("refused")):
        if own is not None:
            check_word(own, path)
    if said.get("before") and os.path.exists(folder / STEPPED_FILE):
        return {**said, "before": None}
    return said


def check_word(said: Any, path: Path) -> None:
    """Raise BadJson if a part of a status has wrong types."""
    try:
        require_kinds(said, WORD)
    except BadJson as error:
        raise BadJson(f"{path} cannot be read: {error}") from error
    if not 0 <= (said.get("exit_code") or 0) <= 255:
        raise BadJson(f"{path} cannot be read: its 'exit_code' is not a number from 0 to 255")


def drop_stale_failure(folder: Path) -> None:
    """Remove the failure of a rank of another start, or one that cannot be read."""
    unreadable = None
    try:
        if failure_of(folder)["incarnation"] == incarnation():
            return
    except MissingJson:
        return
    except BadJson as error:
        unreadable = error
    (folder / FIRST_FAILURE).unlink(missing_ok=True)
    if unreadable is not None:
        log().warning("%s; it has been removed", unreadable)


def failure_of(folder: Path) -> dict[str, Any]:
    """Read the first failure. Raises BadJson if it is missing or cannot be read."""
    path = folder / FIRST_FAILURE
    said = read_object(path, FAILURE)
    if not 0 < said["exit_code"] <= 255:
        raise BadJson(f"{path} cannot be read: its 'exit_code' is not a number from 1 to 255")
    return said


def first_failure(folder: Path) -> dict[str, Any] | None:
    """The report of the rank that failed first in this start; None if there is none."""
    try:
        said = failure_of(folder)
    except BadJson:
        return None
    return said if said["incarnation"] == incarnation() else None


def await_first_failure(folder: Path, seconds: float) -> dict[str, Any] | None:
    until = time.monotonic() + seconds
    while (found := first_failure(folder)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def last_word(path: Path) -> Iterator[None]:
    """Within it a file about the end of the run is written. An error is only logged: it changes neither the exit code
    nor other files."""
    try:
        yield
    except Exception as error:
        said = why(error, path) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        log().warning("how the run ended cannot be written to %s: %s", path, said)


def write_ending(folder: Path, outcome: Outcome) -> dict[str, Any] | None:
    """Write into `run_status.json` how the run ended, unless another rank has done so.

    A rank that lost another waits for that one's report. Errors of writing are only logged.

    Returns:
        The first failure, if it is another rank's.
    """
    rank, ending = env_rank(), outcome.ending
    is_done = ending.name == "done"
    if is_absent(folder) or (is_done and rank != 0):
        return None
    if ending.name == "communication" and (first := await_first_failure(folder, PATIENCE)) is not None:
        return first
    culprit = {"rank": rank, "host": socket.gethostname()} if not is_done else {}
    if ending.name == "config" and (key := re.match(r"([a-z_0-9]+(?:\.[a-z_0-9]+)*)=", outcome.reason)):
        culprit["key"] = key[1]
    outcome = replace(outcome, culprit={**culprit, **outcome.culprit})
    status = ending.name if ending.name in ("done", "stopped", "interrupted") else "failed"
    with last_word(folder / FIRST_FAILURE):
        if not is_done and not fail_first(folder, outcome):
            first = first_failure(folder)
            return first if first and first["rank"] != rank else None
    with last_word(folder / STATUS_FILE):
        put_status(folder, status, outcome, before=came_before(folder))
    return None


def is_absent(folder: Path) -> bool:
    """Whether certainly no folder of this path exists."""
    try:
        return not stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False


def fail_first(folder: Path, outcome: Outcome) -> bool:
    """Write this rank's failure, and return whether it is the first: only one rank can create the file."""
    drop_stale_failure(folder)
    said = {
        "incarnation": incarnation(),
        "rank": env_rank(),
        "class": outcome.ending.name,
        "exit_code": int(outcome.ending.exit_code),
        "reason": redact(outcome.reason, secrets_of()),
    }
    text, mode, path = json.dumps(said).encode(), mode_of(folder / STATUS_FILE), folder / FIRST_FAILURE
    staged = path.with_name(f"{FIRST_FAILURE}.{os.getpid()}")
    replace_file(staged, text, mode)
    try:
        os.link(staged, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        with contextlib.suppress(FileExistsError), create(path, mode) as file:
            file.write(text)
            return True
        return False
    finally:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)


def is_of_this_launch(said: dict[str, Any]) -> bool:
    """Whether an earlier attempt of this launch has written that."""
    if launch_id() is None or said.get("launch") != launch_id():
        return False
    return (said.get("time") or 0.0) >= started(os.getppid())  # otherwise by a requeued job of the same name


def settled(folder: Path) -> dict[str, Any] | None:
    """The status of an earlier attempt of this launch, if starting again cannot help or is not wanted."""
    said = read_status(folder)
    said = own_word(said) if said is not None else None
    if said is None or not is_of_this_launch(said):
        return None
    ending = ENDINGS.get(said.get("class") or "")
    if ending is None or not ending.is_permanent:
        return None
    # torchrun also sends SIGTERM to start again with more nodes, and does not count that as a restart
    return said if ending.name != "stopped" or attempt() > (said.get("attempt") or 0) else None
