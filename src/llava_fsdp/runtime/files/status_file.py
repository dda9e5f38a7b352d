"""Read and write `run_status.json`: the state of a run and, once it has ended, how it ended. If ranks failed, the one
that failed first writes it. Imports no torch."""

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

from llava_fsdp.runtime.exit_codes import ENDINGS, Ending
from llava_fsdp.runtime.files.durable_files import open_new, replace_file
from llava_fsdp.runtime.files.heartbeat import read_beat
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.files.small_json import BadJson, Kinds, MissingJson, read_object, require_kinds
from llava_fsdp.runtime.launch import attempt, env_rank, incarnation, launch_id, start_time
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.redact import redact, secrets_of

STATUS_FILE = "run_status.json"
FIRST_FAILURE = ".run_failed"
"""Name of the failure report: which rank failed first, and why. Only that rank writes it."""
RESERVED_BYTES = 4096
"""Bytes to which `run_status.json` is padded, so that the run's end can be written into it even on a full disk."""
LONGEST_REASON = 1000
"""Maximum number of characters kept of the reason why the previous start ended."""
KILLED = "killed"
"""Status reported for a run that recorded no end and has no process anymore. The run itself never writes it."""
STEPPED_FILE = ".stepped"
"""Name of an empty file that exists once the latest start of the run has finished a step."""
NONE = type(None)
STATUS_KINDS: dict[str, Kinds] = {
    "status": (str,), "class": (str, NONE), "exit_code": (int, NONE), "reason": (str, NONE), "culprit": (dict, NONE),
    "step": (int, NONE), "rank": (int, NONE), "pid": (int, NONE), "host": (str, NONE), "attempt": (int, NONE),
    "launch": (str, NONE), "time": (float, NONE),
}  # fmt: skip
"""Allowed types of the values in `run_status.json`, and in the statuses nested in it (`before`, `refused`)."""
FAILURE_KINDS: dict[str, Kinds] = {
    "incarnation": (str,), "rank": (int,), "class": (str,), "exit_code": (int,), "reason": (str,),
}  # fmt: skip
PATIENCE_SECONDS = 2
"""Seconds that a rank which lost contact waits for another rank's failure report before it ends itself: torchrun
reports the rank that ends first as the cause."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, and why, as it is recorded in `run_status.json`."""

    ending: Ending
    reason: str = ""
    culprit: dict[str, Any] = field(default_factory=dict)
    """Details of the failure, by name: rank, host, record, image, key, file."""
    step: int | None = None
    """Number of finished steps, if known."""


def is_without_end(status: dict[str, Any]) -> bool:
    """Return whether a run's status records no end, because the run is going on or was killed."""
    return status.get("status") in ("running", "stopping")


def previous_status(folder: Path, is_claiming: bool = False) -> dict[str, Any] | None:
    """Return how the previous start of the run in this folder ended, as in `run_status.json`. Starts that finished
    neither a step nor the run are passed over: the status of such a start has the one before it in its entry `before`.
    The result is None if there is no previous start, or if the current start has finished a step. `is_claiming`:
    whether the current start has written nothing yet, so that `run_status.json` is from an earlier start."""
    last_status = read_status(folder)
    if last_status is None:
        return None
    status, before = last_status.get("status"), last_status.get("before")
    if isinstance(before, dict) and status != "done":
        return before
    if is_without_end(last_status):
        is_current = (
            last_status.get("pid") == os.getpid() if launch_id() is None else last_status.get("launch") == launch_id()
        )
        if is_current and not is_claiming:  # the status is that of the current start itself
            return None
        status = KILLED
    entries = {name: value for name, value in last_status.items() if name not in ("before", "refused")}
    return {**entries, "status": status, "reason": str(last_status.get("reason") or "")[:LONGEST_REASON]}


def mark_stepped(folder: Path) -> None:
    """Record that the latest start of the run has finished a step, so that `run_status.json` need no longer tell how
    the start before ended. This is a file of its own, because another rank may be writing `run_status.json`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    os.close(os.open(folder / STEPPED_FILE, flags, 0o600))


def put_status(
    folder: Path,
    status: str,
    outcome: Outcome | None = None,
    mode: int | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """Write a run's status, with details of this process, into `run_status.json`. If the run had finished and this
    start of it has failed, the finished run's status stays, and the new one becomes its entry `refused`.

    Args:
        status: running, stopping, done, stopped, interrupted or failed.
        outcome: None while the run goes on.
        mode: permissions before the umask; None: those of the existing file.
        before: how the previous start ended (see `previous_status`), as long as the current one has finished no step.
    """
    content = {
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
        content = {**before, "before": None, "refused": content}
    else:
        content["before"] = before
    text, path = (json.dumps(content) + "\n").encode(), folder / STATUS_FILE
    try:
        replace_file(path, text.ljust(RESERVED_BYTES), mode_of(path) if mode is None else mode)
    except OSError:
        size = path.lstat().st_size
        if size < max(RESERVED_BYTES, len(text)):
            raise
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "wb") as file:  # overwriting needs no free space on the disk
            file.write(text.ljust(size))


def status_of_latest_start(status: dict[str, Any]) -> dict[str, Any]:
    """Return what the latest start of a run wrote into `run_status.json`: all of the status, or its entry `refused` if
    the run was already finished and the latest start failed. The finished run's status is then the entry `before`."""
    refused = status.get("refused")
    if not isinstance(refused, dict):
        return status
    return {**refused, "before": {name: value for name, value in status.items() if name != "refused"}}


def mode_of(path: Path) -> int:
    """Return the permissions of a file, so that the file that replaces it has the same. If they cannot be read, such as
    of a file that does not exist, return those that let only its owner read and write it."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0o600


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return the content of `run_status.json`; None if the file is missing or cannot be read."""
    try:
        return status_of(folder)
    except BadJson:
        return None


def status_of(folder: Path) -> dict[str, Any]:
    """Return the content of `run_status.json`. Its entry `before` (how the previous start ended) is None once the
    latest start has finished a step, which a file of its own says. Its entry `refused` is the status of a later start
    that failed after the run was done. Raises MissingJson, or BadJson if the file cannot be read."""
    path = folder / STATUS_FILE
    status = read_object(path, STATUS_KINDS)
    for part in (status, status.get("before"), status.get("refused")):
        if part is not None:
            check_status(part, path)
    if status.get("before") and os.path.exists(folder / STEPPED_FILE):
        return {**status, "before": None}
    return status


def check_status(status: Any, path: Path) -> None:
    """Raise BadJson if a run's status, read from `path`, has a value of a wrong type or an impossible exit code."""
    try:
        require_kinds(status, STATUS_KINDS)
    except BadJson as error:
        raise BadJson(f"{path} cannot be read: {error}") from error
    if not 0 <= (status.get("exit_code") or 0) <= 255:
        raise BadJson(f"{path} cannot be read: its 'exit_code' is not a number from 0 to 255")


def start_of(folder: Path) -> str:
    """Return a text that identifies the current start of the ranks: the same on all ranks, different after each
    restart. With torchrun, or with a single rank, it comes from the environment (`incarnation`). Without torchrun, it
    is the host and process of rank 0, which other ranks read in the heartbeat of rank 0."""
    if launch_id() is not None or os.environ.get("WORLD_SIZE", "1") == "1":
        return incarnation()
    if env_rank() == 0:
        return f"rank 0 on {socket.gethostname()}, process {os.getpid()}"
    first = read_beat(folder, 0)
    return f"rank 0 on {first.host}, process {first.pid}" if first is not None else incarnation()


def drop_stale_failure(folder: Path) -> None:
    """Remove a run's failure report if an earlier start of the run wrote it or, with a warning, if it is unreadable."""
    unreadable_error = None
    try:
        if read_first_failure(folder)["incarnation"] == start_of(folder):
            return
    except MissingJson:
        return
    except BadJson as error:
        unreadable_error = error
    (folder / FIRST_FAILURE).unlink(missing_ok=True)
    if unreadable_error is not None:
        log().warning("%s; it has been removed", unreadable_error)


def read_first_failure(folder: Path) -> dict[str, Any]:
    """Read a run's failure report: which rank failed first, and why. Raises BadJson if it is missing or unreadable."""
    path = folder / FIRST_FAILURE
    failure = read_object(path, FAILURE_KINDS)
    if not 0 < failure["exit_code"] <= 255:
        raise BadJson(f"{path} cannot be read: its 'exit_code' is not a number from 1 to 255")
    return failure


def first_failure(folder: Path) -> dict[str, Any] | None:
    """Return the report of the rank that failed first in the current start of the run; None if no rank has failed."""
    try:
        failure = read_first_failure(folder)
    except BadJson:
        return None
    return failure if failure["incarnation"] == start_of(folder) else None


def await_first_failure(folder: Path, seconds: float) -> dict[str, Any] | None:
    """Wait up to `seconds` for the report of the rank that failed first in the current start of the run. Return the
    report, or None if there is none."""
    until = time.monotonic() + seconds
    while (failure := first_failure(folder)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return failure


@contextlib.contextmanager
def log_write_errors(path: Path) -> Iterator[None]:
    """Context manager for writing how the run ended: an error is logged and not raised."""
    try:
        yield
    except Exception as error:
        reason = why(error, path) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        log().warning("how the run ended cannot be written to %s: %s", path, reason)


def write_ending(folder: Path, outcome: Outcome) -> dict[str, Any] | None:
    """Record in `run_status.json` how the run ended. Only one rank does this: rank 0 of a run that is done, or else the
    rank that failed first, whose report a rank that lost contact awaits. Errors of writing are only logged.

    Returns:
        The failure report, if another rank failed first; else None.
    """
    rank, ending = env_rank(), outcome.ending
    is_done = ending.name == "done"
    if is_absent(folder) or (is_done and rank != 0):
        return None
    if ending.name == "communication" and (first_report := await_first_failure(folder, PATIENCE_SECONDS)) is not None:
        return first_report
    culprit = {"rank": rank, "host": socket.gethostname()} if not is_done else {}
    # the message of a configuration error often begins with KEY=VALUE
    if ending.name == "config" and (key := re.match(r"([a-z_0-9]+(?:\.[a-z_0-9]+)*)=", outcome.reason)):
        culprit["key"] = key[1]
    outcome = replace(outcome, culprit={**culprit, **outcome.culprit})
    status = ending.name if ending.name in ("done", "stopped", "interrupted") else "failed"
    with log_write_errors(folder / FIRST_FAILURE):
        if not is_done and not write_first_failure(folder, outcome):
            first_report = first_failure(folder)
            return first_report if first_report and first_report["rank"] != rank else None
    with log_write_errors(folder / STATUS_FILE):
        put_status(folder, status, outcome, before=previous_status(folder))
    return None


def is_absent(folder: Path) -> bool:
    """Return whether it is certain that there is no folder at this path."""
    try:
        return not stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False


def write_first_failure(folder: Path, outcome: Outcome) -> bool:
    """Write the failure report of a run (which rank failed first, and why) and return True. Return False if there is
    one already: only one rank can create the file."""
    drop_stale_failure(folder)
    failure = {
        "incarnation": start_of(folder),
        "rank": env_rank(),
        "class": outcome.ending.name,
        "exit_code": int(outcome.ending.exit_code),
        "reason": redact(outcome.reason, secrets_of()),
    }
    text, mode, path = json.dumps(failure).encode(), mode_of(folder / STATUS_FILE), folder / FIRST_FAILURE
    staged = path.with_name(f"{FIRST_FAILURE}.{os.getpid()}")
    replace_file(staged, text, mode)
    try:
        os.link(staged, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        with contextlib.suppress(FileExistsError), open_new(path, mode) as file:
            file.write(text)
            return True
        return False
    finally:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)


def is_of_this_launch(record: dict[str, Any]) -> bool:
    """Return whether a record with the entries `launch` and `time` (such as `run_status.json`) was written in the
    current launch of torchrun, before or after a restart of the ranks."""
    if launch_id() is None or record.get("launch") != launch_id():
        return False
    # The parent process is torchrun. A record from before its start is from an earlier job of the same name.
    return (record.get("time") or 0.0) >= start_time(os.getppid())


def final_status(folder: Path) -> dict[str, Any] | None:
    """Return how the ranks ended before torchrun restarted them, as in `run_status.json`, if a restart cannot help or
    is not wanted; else None."""
    status = read_status(folder)
    status = status_of_latest_start(status) if status is not None else None
    if status is None or not is_of_this_launch(status):
        return None
    ending = ENDINGS.get(status.get("class") or "")
    if ending is None or not ending.is_permanent:
        return None
    # torchrun also sends SIGTERM in order to start again with more nodes, and does not count that as a restart
    return status if ending.name != "stopped" or attempt() > (status.get("attempt") or 0) else None
