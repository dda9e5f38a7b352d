"""The folder of a run: who runs in it, and how the run ended. Imports no torch.

`run_status.json` says what torchrun's exit code does not. The first rank that fails writes it, the others fail because
it did; so their words are not heard.
"""

import contextlib
import fcntl
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

from llava_fsdp.errors import ENDINGS, ConfigError, Ending, FolderInUse
from llava_fsdp.heartbeats import read_beat
from llava_fsdp.log import log
from llava_fsdp.redact import redact, secrets_of
from llava_fsdp.refusals import why
from llava_fsdp.rows import write_new
from llava_fsdp.small_json import BadJson, Kinds, MissingJson, object_or_none, parse_object, read_object, require_kinds
from llava_fsdp.untrusted import is_open_to_others

STATUS_FILE = "run_status.json"
FIRST_FAILURE = ".run_failed"
LOCK_FILE = ".lock"
RESERVED = 4096
"""Bytes of `run_status.json`, so that the last word fits onto a disk that has become full."""
LONGEST_BEFORE = 1000
"""Characters of it are how the start before ended."""
KILLED = "killed"
"""Is said of a run without an end that nobody holds; no file has it as its own status."""
STEPPED_FILE = ".stepped"
"""Is there once the last start in the folder has taken a step."""
BEGUN_FILE = ".begun"
WRITTEN = frozenset({
    LOCK_FILE, STATUS_FILE, FIRST_FAILURE, STEPPED_FILE, BEGUN_FILE, "config.yaml", "metrics.jsonl",
    "validation.jsonl", "quarantine.jsonl", "starts.jsonl", "report.html", ".heartbeats", "stacks", "checkpoints",
    "export", "adapter", "tensorboard", "profile", "profile.html",
})  # fmt: skip
"""Files and folders of `output_dir` that a training writes."""
NONE = type(None)
LOCK: dict[str, Kinds] = {"pid": (int,), "host": (str,), "since": (str,), "launch": (str, NONE)}
WORD: dict[str, Kinds] = {
    "status": (str,), "class": (str, NONE), "exit_code": (int, NONE), "reason": (str, NONE), "culprit": (dict, NONE),
    "step": (int, NONE), "rank": (int, NONE), "pid": (int, NONE), "host": (str, NONE), "attempt": (int, NONE),
    "launch": (str, NONE), "time": (float, NONE),
}  # fmt: skip
"""The types of the values in `run_status.json`, and in each status within it."""
FAILURE: dict[str, Kinds] = {
    "incarnation": (str,), "rank": (int,), "class": (str,), "exit_code": (int,), "reason": (str,),
}  # fmt: skip
BEGUN: dict[str, Kinds] = {"wish": (str,), "step": (int,), "launch": (str,), "time": (float,)}
PATIENCE = 2
"""Seconds that a rank waits which has nothing of its own to say: torchrun ends all ranks as soon as one has failed, and
takes the first one's word for the cause."""
HANDOVER = 30
"""Seconds that a restarted rank 0 waits for the one before it to be gone."""
CLAIMING = 15
"""Seconds that the other ranks wait for rank 0 to have the folder."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    ending: Ending
    reason: str = ""
    culprit: dict[str, Any] = field(default_factory=dict)
    """What it is about, by name: rank, host, record, picture, key, file."""
    step: int | None = None
    """Steps finished, where it is known."""


def env_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launch_id() -> str | None:
    """Names what torchrun was started for, through its restarts; None without torchrun.

    Without a name of the user's it is "none" for every launch, which its process then tells apart.
    """
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"none-{socket.gethostname()}-{os.getppid()}" if given == "none" and is_one_node() else given


def is_one_node() -> bool:
    return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"


def attempt() -> int:
    """Restarts of this node's workers before this one."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def incarnation() -> str:
    """Names this start of the ranks, the same on all of them: attempts are counted by node, so that on several nodes
    it is the port of the store, which each start has anew (launch/multinode.sh)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"process {os.getpid()}"
    meeting = attempt() if is_one_node() else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"{launch_id()} {meeting}"


def started(pid: int) -> float:
    """When a process began, in seconds since 1970; 0 where the system does not tell."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return time.time() - since_boot


@contextlib.contextmanager
def claimed(folder: Path, rank: int, private: bool = True) -> Iterator[int | None]:
    """Hold the folder against other runs, make it, and say in it that a run is under way: rank 0, for all.

    The others wait until it has: where it is refused, none of them may leave a word in what is another run's.

    The lock is one that a process loses by dying and that its children do not inherit (POSIX record locks): data
    workers which outlive a rank for a moment keep nobody out. What is killed leaves "running" or "stopping" behind,
    which the next start says.

    Args:
        private: a folder that is made is its owner's alone, and so is what says how the run ended.

    Yields:
        On rank 0 the descriptor of the locked file, which is closed at the end.

    Raises:
        ConfigError: the folder cannot be written, has links where a run writes, or another run has it (FolderInUse).
    """
    if rank != 0:
        await_claim(folder)
        with contextlib.suppress(OSError):  # rank 0 says what is wrong with it
            make_run_folder(folder, private)
        yield None
        return
    if is_open_to_others(folder):
        log().warning(
            "output_dir=%s can be written by every user of this machine, and a run continues from what it finds there; "
            "chmod o-w %s", folder, folder,
        )  # fmt: skip
    try:
        make_run_folder(folder, private)
        refuse_links(folder)
        handle = open_lock(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        try:
            lock(handle, folder)
            warn_of_killed(folder)
            drop_stale_failure(folder)
            before = came_before(folder, is_claiming=True)
            put_status(folder, "running", mode=0o600 if private else 0o666, before=before)
            (folder / STEPPED_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        yield handle
    finally:
        os.close(handle)


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"output_dir={folder} cannot be written ({why(error, folder)}); give another folder")


def open_lock(folder: Path) -> int:
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def refuse_links(folder: Path) -> None:
    """
    Raises:
        ConfigError: something that a run writes into the folder is a symbolic link.
        OSError: the folder cannot be read.
    """
    links = sorted(entry.name for entry in os.scandir(folder) if entry.name in WRITTEN and entry.is_symlink())
    if links:
        raise ConfigError(
            f"output_dir={folder} has links where a run writes: {', '.join(links)}. A run renames and replaces what is "
            "in its folder, which takes one file system and must change nothing outside it. Remove the links; to keep "
            "a run on another disk, give a folder there as output_dir, or make output_dir itself the link"
        ).about(file=str(folder / links[0]))


@contextlib.contextmanager
def restored_umask() -> Iterator[None]:
    """Whatever is made of the umask within, the process has its own again afterwards."""
    before = os.umask(0o077)
    os.umask(before)
    try:
        yield
    finally:
        os.umask(before)


def make_run_folder(folder: Path, private: bool) -> None:
    """A new one is the user's alone with `private`; one that exists stays as it is."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)


def await_claim(folder: Path) -> None:
    """Until rank 0 of this launch has the folder, but not for long: a folder on a network may show it late."""
    until = time.monotonic() + CLAIMING
    while launch_id() is not None and time.monotonic() < until:
        if (object_or_none(folder / LOCK_FILE, LOCK) or {}).get("launch") == launch_id():
            return
        time.sleep(0.05)


def lock(handle: int, folder: Path) -> None:
    until = time.monotonic() + HANDOVER
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            holder = holder_of(handle)
            if holder.get("launch") is None or holder.get("launch") != launch_id() or time.monotonic() > until:
                raise FolderInUse(
                    f"output_dir={folder} belongs to a run that is under way: process {holder.get('pid', '?')} on "
                    f"{holder.get('host', '?')}, since {holder.get('since', '?')}; wait for it, stop it, or give "
                    "another folder"
                ) from None
            time.sleep(0.1)
        except OSError as error:  # a file system without locks
            log().warning("output_dir=%s cannot be locked (%s): see to it that no second run uses it", folder, error)
            break
    sign_lock(handle)


def sign_lock(handle: int) -> None:
    """Say in the locked file who holds it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "launch": launch_id()}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)


def holder_of(handle: int) -> dict[str, Any]:
    try:
        return parse_object(os.pread(handle, 4096, 0), LOCK)
    except BadJson:
        return {}


def held_by(folder: Path) -> dict[str, Any] | None:
    """Who runs in the folder now; None: nobody, as far as can be told.

    Not for the process that holds it: looking would let it go.
    """
    is_held, holder = look_at_lock(folder)
    return holder if is_held else None


def is_known_free(folder: Path) -> bool:
    """Whether nobody runs in the folder; not so where that cannot be told. As `held_by`, not for who holds it."""
    return look_at_lock(folder)[0] is False


def look_at_lock(folder: Path) -> tuple[bool | None, dict[str, Any]]:
    """Whether the folder is held, and by whom; None: the lock is another user's, or the file system has none."""
    try:
        handle = os.open(
            folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        )  # also below a mount that cannot be written
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


def is_others(folder: Path) -> bool:
    """Whether a run of another launch holds the folder."""
    holder = held_by(folder)
    return holder is not None and (holder.get("launch") is None or holder["launch"] != launch_id())


def is_without_end(said: dict[str, Any]) -> bool:
    """Whether a status is of a run that goes on, or that was killed."""
    return said.get("status") in ("running", "stopping")


def warn_of_killed(folder: Path) -> None:
    """Say of the run before that it was killed, and at what; for the process that holds the folder."""
    try:
        said = status_of(folder)
    except MissingJson:
        return
    except BadJson as error:
        log().warning("%s; how the run before ended is not known", error)
        return
    if not is_without_end(said):
        return
    beat = read_beat(folder, 0)
    after = f" after step {beat.step}" if beat is not None and beat.pid == said.get("pid") else ""
    asked = f", asked to by {said.get('reason')}" if said["status"] == "stopping" else ""
    log().warning("the run before in %s was killed while it was %s%s%s", folder, said["status"], after, asked)


def came_before(folder: Path, is_claiming: bool = False) -> dict[str, Any] | None:
    """How the last start ended in which steps were taken, or that finished; None: there was none before this one, or
    this one has taken steps. A command that is refused leaves a finished run as good as it was.

    Args:
        is_claiming: this start has said nothing yet, so that whatever the file says is of another.
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
    """A step was taken: how this start ends is how the run does, whatever came before. In a file of its own, because
    another rank may write its last word into `run_status.json` in this very moment."""
    os.close(os.open(folder / STEPPED_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def put_status(
    folder: Path,
    status: str,
    outcome: Outcome | None = None,
    mode: int | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """
    Args:
        mode: who may read it, before the umask; None: whoever may read the one that is there.
        before: of a start that has taken no step, `came_before`.
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
        said = {**before, "before": None, "refused": said}  # a finished run stays finished
    else:
        said["before"] = before
    text = (json.dumps(said) + "\n").encode()
    staged, path = folder / f"{STATUS_FILE}.{os.getpid()}.tmp", folder / STATUS_FILE
    try:
        write_new(staged, text.ljust(RESERVED), mode_of(path) if mode is None else mode)
        os.replace(staged, path)
    except OSError:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        size = path.lstat().st_size
        if size < max(RESERVED, len(text)):
            raise
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(handle, "wb") as file:  # a full disk has room for what is there already
            file.write(text.ljust(size))


def own_word(said: dict[str, Any]) -> dict[str, Any]:
    """What the last start said of itself, by a status that was read: one that was refused in the folder of a finished
    run leaves that run's status as it is, and its own words beside it."""
    refused = said.get("refused")
    if not isinstance(refused, dict):
        return said
    return {**refused, "before": {name: value for name, value in said.items() if name != "refused"}}


def mode_of(path: Path) -> int:
    """Who may read a file; its owner alone where there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0o600


def read_status(folder: Path) -> dict[str, Any] | None:
    """`status_of`, or None where there is no status that can be read."""
    try:
        return status_of(folder)
    except BadJson:
        return None


def status_of(folder: Path) -> dict[str, Any]:
    """What the last run in a folder said; `before` only where it has taken no step.

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
    """Raises BadJson where a part of a status is none."""
    try:
        require_kinds(said, WORD)
    except BadJson as error:
        raise BadJson(f"{path} cannot be read: {error}") from error
    if not 0 <= (said.get("exit_code") or 0) <= 255:
        raise BadJson(f"{path} cannot be read: its 'exit_code' is no number from 0 to 255")


def drop_stale_failure(folder: Path) -> None:
    """Remove what a rank of another start has said, or what cannot be read."""
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
    """Raises BadJson where there is no failure that can be read."""
    path = folder / FIRST_FAILURE
    said = read_object(path, FAILURE)
    if not 0 < said["exit_code"] <= 255:
        raise BadJson(f"{path} cannot be read: its 'exit_code' is no number from 1 to 255")
    return said


def first_failure(folder: Path) -> dict[str, Any] | None:
    """What the rank said that failed first, in this start of the ranks."""
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
    """Within it a file is written that says how the run ended, or shows it. Whatever stands in the way is said, and
    changes neither the exit code nor what else is written."""
    try:
        yield
    except Exception as error:
        said = why(error, path) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        log().warning("how the run ended cannot be written to %s: %s", path, said)


def write_ending(folder: Path, outcome: Outcome) -> dict[str, Any] | None:
    """Say in `run_status.json` how the run ended, unless another rank has said so.

    A rank that lost another waits for that one's word. What cannot be written is warned of, and raises nothing.

    Returns:
        The first failure, where another rank was it.
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
    """Whether there is no such folder; where that cannot be told, there may be one."""
    try:
        return not stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False


def fail_first(folder: Path, outcome: Outcome) -> bool:
    """Whether this rank is the first of all to fail: one of them creates the file, with its word in it."""
    drop_stale_failure(folder)
    staged = folder / f"{FIRST_FAILURE}.{os.getpid()}"
    said = {
        "incarnation": incarnation(),
        "rank": env_rank(),
        "class": outcome.ending.name,
        "exit_code": int(outcome.ending.exit_code),
        "reason": redact(outcome.reason, secrets_of()),
    }
    text, mode = json.dumps(said).encode(), mode_of(folder / STATUS_FILE)
    write_new(staged, text, mode)
    try:
        os.link(staged, folder / FIRST_FAILURE)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        with contextlib.suppress(FileExistsError):
            created = os.open(
                folder / FIRST_FAILURE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode
            )
            with open(created, "wb") as file:
                file.write(text)
            return True
        return False
    finally:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
    return True


def is_of_this_launch(said: dict[str, Any]) -> bool:
    """Whether an earlier attempt of this very launch has written that."""
    if launch_id() is None or said.get("launch") != launch_id():
        return False
    return (said.get("time") or 0.0) >= started(os.getppid())  # else by a job of that name that was requeued


def mark_begun(folder: Path, wish: str, step: int) -> None:
    """Note for restarts that what was wished for, to start over or from a folder, has been done, and at which step."""
    if launch_id() is None or begun_at(folder, wish) is not None:
        return
    staged = folder / f"{BEGUN_FILE}.tmp"
    said = {"wish": wish, "step": step, "launch": launch_id(), "time": time.time()}
    write_new(staged, (json.dumps(said) + "\n").encode(), 0o666)
    os.replace(staged, folder / BEGUN_FILE)


def begun_at(folder: Path, wish: str) -> int | None:
    """The step at which an earlier attempt of this launch began as was wished; None: none has yet.

    A scheduler that starts a job again gives it the same name (RDZV_ID), and so does what was begun count there. Where
    the name is torchrun's own, another launch may come to the same one.
    """
    try:
        said = read_object(folder / BEGUN_FILE, BEGUN)
    except MissingJson:
        return None
    except BadJson as error:
        log().warning("%s; whether an earlier attempt has begun as asked is not known", error)
        return None
    if said["wish"] != wish or launch_id() is None or said["launch"] != launch_id():
        return None
    if os.environ["TORCHELASTIC_RUN_ID"] == "none" and not is_of_this_launch(said):
        return None
    return said["step"]


def settled(folder: Path) -> dict[str, Any] | None:
    """How an earlier attempt of this very launch ended, where starting again cannot help or is not wanted."""
    said = read_status(folder)
    said = own_word(said) if said is not None else None
    if said is None or not is_of_this_launch(said):
        return None
    ending = ENDINGS.get(said.get("class") or "")
    if ending is None or not ending.is_permanent:
        return None
    # torchrun sends SIGTERM as well to start again with more nodes, which is no restart that it counts
    return said if ending.name != "stopped" or attempt() > (said.get("attempt") or 0) else None
