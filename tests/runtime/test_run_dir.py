"""Who runs in a folder, and what its status says."""

import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from llava_fsdp import status
from llava_fsdp.runtime import errors, launch
from llava_fsdp.runtime.errors import FolderInUse
from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.files import run_dir, status_file
from llava_fsdp.runtime.files.heartbeat import FOLDER as HEARTBEATS
from llava_fsdp.runtime.files.heartbeat import Beat, Phase, put_beat
from llava_fsdp.runtime.files.jsonl import append, read_rows
from llava_fsdp.runtime.files.run_dir import (
    begun_at,
    claiming_folder,
    is_known_free,
    is_locked_by_other_launch,
    list_checkpoints,
    mark_begun,
    refuse_in_use,
)
from llava_fsdp.runtime.files.status_file import (
    Outcome,
    final_status,
    first_failure,
    put_status,
    read_status,
    write_ending,
)
from llava_fsdp.runtime.process import run_dir_watch
from llava_fsdp.runtime.process.run_dir_watch import RunDirLock
from llava_fsdp.runtime.process.watchdog import Watchdog, open_new

HOLDER = """
    import os, sys, time
    from pathlib import Path
    from llava_fsdp.runtime.files.run_dir import claiming_folder
    with claiming_folder(Path(sys.argv[1]), 0):
        child = os.fork()  # as a data worker: it outlives us for a while
        if child:
            print(child, flush=True)
        time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """Killed with a child that lives on, it leaves the folder free at once."""
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    before = read_status(tmp_path)
    began = time.monotonic()
    with pytest.raises(FolderInUse, match=rf"under way: process {holder.pid} on .*, since \d{{4}}-"):
        with claiming_folder(tmp_path, 0):
            pass
    assert time.monotonic() - began < run_dir.HANDOVER_SECONDS / 2, (
        "only a launch's own restart waits for the one before it"
    )
    assert is_locked_by_other_launch(tmp_path) and not is_known_free(tmp_path)
    with pytest.raises(FolderInUse, match=f"process {holder.pid} on "):
        refuse_in_use(tmp_path)
    assert before is not None and before["status"] == "running" and read_status(tmp_path) == before
    holder.kill()
    holder.wait()
    try:
        os.kill(child, 0)
        assert not is_locked_by_other_launch(tmp_path) and is_known_free(tmp_path)
        refuse_in_use(tmp_path)
        with claiming_folder(tmp_path, 0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """This process as a worker of torchrun's."""
    monkeypatch.setattr(status_file, "PATIENCE_SECONDS", 0.1)

    def be(rank: int, attempt: int = 0, launch: str = "run7", **more: str) -> None:
        values = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_RUN_ID": launch, **more}
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return be


def test_ranks_wait_for_the_first_to_have_the_folder(tmp_path: Path, launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the user's alone, whoever makes it."""
    folder = tmp_path / "out"
    launched(rank=1)
    entered = threading.Event()

    def second() -> None:
        with claiming_folder(folder, 1):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not entered.wait(0.3) and not folder.exists()
    with claiming_folder(folder, 0):
        assert entered.wait(5)
    thread.join()
    monkeypatch.setattr(run_dir, "CLAIMING_SECONDS", 0.1)
    with claiming_folder(tmp_path / "late", 1):
        assert stat.S_IMODE((tmp_path / "late").stat().st_mode) == 0o700


def ending(name: str, reason: str = "") -> Outcome:
    return Outcome(ENDINGS[name], reason)


def test_the_first_failure_is_the_one_that_counts(tmp_path: Path, launched) -> None:
    launched(rank=1)
    assert write_ending(tmp_path, ending("data", "record 7")) is None
    launched(rank=0)
    first = write_ending(tmp_path, ending("communication", "lost rank 1"))
    assert first is not None and (first["rank"], first["exit_code"], first["reason"]) == (1, 2, "record 7")
    said = read_status(tmp_path)
    assert said is not None and (said["class"], said["exit_code"], said["rank"]) == ("data", 2, 1)
    launched(rank=0, attempt=1)
    assert first_failure(tmp_path) is None, "of the attempt before"
    with claiming_folder(tmp_path, 0):
        assert not (tmp_path / status_file.FIRST_FAILURE).exists()
    launched(rank=1, attempt=1)
    assert write_ending(tmp_path, ending("communication", "lost rank 0")) is None, "nobody else said anything"


def test_ranks_that_are_started_without_torchrun_know_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a process of its own; the one that lost contact does not overwrite what the first one wrote."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(status_file, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    pids = {0: 4000, 1: 4001}

    def be(rank: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(os, "getpid", lambda: pids[rank])

    (tmp_path / HEARTBEATS).mkdir()
    put_beat(tmp_path, Beat(0, socket.gethostname(), 4000, 3, Phase.COMPUTE.value, 1, "", 1))
    be(1)
    assert write_ending(tmp_path, ending("interrupted", "Ctrl-C")) is None
    be(0)
    first = write_ending(tmp_path, ending("communication", "lost rank 1"))
    assert first is not None and (first["rank"], first["class"]) == (1, "interrupted")
    assert (read_status(tmp_path) or {})["class"] == "interrupted"
    pids[0] = 5000
    be(0)
    assert first_failure(tmp_path) is None, "of the start before"


@pytest.mark.parametrize("name", sorted(run_dir.WRITTEN_NAMES))
def test_what_is_no_file_where_a_run_writes_one_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """To open a pipe would wait for its other end."""
    for make in (os.mkfifo, os.mkdir if name not in run_dir.FOLDER_NAMES else Path.touch):
        make(tmp_path / name)
        refuse_in_use(tmp_path)
        with pytest.raises(errors.ConfigError, match=re.escape(name)), claiming_folder(tmp_path, 0):
            pytest.fail("the folder was taken")
        (tmp_path / name).rmdir() if (tmp_path / name).is_dir() else (tmp_path / name).unlink()


def test_a_pipe_in_place_of_stacks_and_rows_does_not_block(tmp_path: Path) -> None:
    for name in ("rank-0.txt", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    open_new(tmp_path / "rank-0.txt").close()
    assert (tmp_path / "rank-0.txt").is_file() and read_rows(tmp_path / "metrics.jsonl") == []
    with pytest.raises(OSError, match="No such device"):
        append(tmp_path / "metrics.jsonl", b"row")


def test_several_nodes_know_an_attempt_by_its_store(tmp_path: Path, launched) -> None:
    """Each node counts its own restarts."""
    nodes = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "host0"}
    launched(rank=1, attempt=3, MASTER_PORT="4000", **nodes)
    write_ending(tmp_path, ending("bug", "a bug"))
    launched(rank=0, attempt=1, MASTER_PORT="4000", **nodes)
    assert first_failure(tmp_path) is not None
    launched(rank=0, attempt=3, MASTER_PORT="4001", **nodes)
    assert first_failure(tmp_path) is None


def test_every_ending_has_its_exit_code() -> None:
    """Schedulers are told these numbers (docs/running.md)."""
    codes = {
        "done": 0, "bug": 1, "config": 2, "model": 2, "data": 2, "memory": 2, "checkpoint": 3, "numeric": 4,
        "corruption": 4, "communication": 5, "stopped": 75, "interrupted": 130,
    }  # fmt: skip
    assert {name: int(own.exit_code) for name, own in ENDINGS.items()} == codes


EVERY, ALONE = True, False
ERRORS = {
    "LlavaFsdpError": ("bug", EVERY), "CommunicationError": ("communication", ALONE), "Stopped": ("stopped", EVERY),
    "ConfigError": ("config", EVERY), "ModelError": ("model", EVERY), "DamagedModel": ("model", EVERY),
    "DataError": ("data", EVERY), "ImageError": ("data", ALONE), "WorkerError": ("data", ALONE),
    "WorkerLost": ("communication", ALONE), "SourceError": ("data", ALONE), "RemoteGone": ("data", ALONE),
    "RemoteChanged": ("data", ALONE), "RemoteForbidden": ("data", ALONE), "RemoteAway": ("communication", ALONE),
    "DamagedError": ("data", ALONE), "FolderInUse": ("config", ALONE), "BuildError": ("config", ALONE),
    "StorageError": ("config", ALONE), "CheckpointError": ("checkpoint", EVERY), "FolderLost": ("checkpoint", EVERY),
    "OffloadError": ("config", ALONE), "OutOfMemory": ("memory", ALONE), "NumericError": ("numeric", EVERY),
    "ReplicaError": ("corruption", EVERY),
}  # fmt: skip


def test_every_error_has_its_ending() -> None:
    """And who raises it; an error's details are its own. Only a folder that is not this run's is not written into."""
    found = {name: own for name, own in vars(errors).items() if isinstance(own, type) and name in ERRORS}
    assert {name: (own.ending, own.on_every_rank) for name, own in found.items()} == ERRORS
    assert {name for name, own in found.items() if not own.may_be_recorded} == {"FolderInUse"}
    one, other = errors.ConfigError("a").about(key="k", keys=["k"]).about(key="l"), errors.ConfigError("b")
    assert one.culprit == {"key": "l", "keys": ["k"]} and not other.culprit and one.exit_code == ExitCode.USER


@pytest.mark.parametrize("name", ENDINGS)
def test_only_what_a_restart_may_repair_is_started_again(name: str, tmp_path: Path, launched) -> None:
    launched(rank=0)
    write_ending(tmp_path, ending(name))
    launched(rank=1, attempt=1)
    worth_it = name in ("communication", "bug", "corruption")
    assert (final_status(tmp_path) is None) == worth_it
    launched(rank=1, attempt=0)
    assert (final_status(tmp_path) is None) == (worth_it or name == "stopped"), "more nodes have come"
    launched(rank=1, attempt=1, launch="run8")
    assert final_status(tmp_path) is None, "another launch"
    launched(rank=1, attempt=1)
    path = tmp_path / status_file.STATUS_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": launch.start_time(os.getppid()) - 5}))
    assert final_status(tmp_path) is None, "a job of the same name, requeued"


def test_ranks_that_are_started_again_are_of_the_launch_before(
    tmp_path: Path, launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age is that of torchrun, which has started before the record was written, and not that of this process."""
    launched(rank=0)
    write_ending(tmp_path, ending("config"))
    written = (read_status(tmp_path) or {})["time"]
    launched(rank=0, attempt=1)
    for began, is_of_it in ((written - 1, True), (written, True), (written + 1, False)):
        times = {os.getppid(): began, os.getpid(): written + 2}
        monkeypatch.setattr(status_file, "start_time", times.__getitem__)
        assert (final_status(tmp_path) is not None) is is_of_it


def test_the_culprit_has_the_key_of_a_wrong_setting(tmp_path: Path, launched) -> None:
    launched(rank=0)
    write_ending(tmp_path, ending("config", "data.max_length=1 must be at least 2"))
    said = read_status(tmp_path)
    assert said is not None and said["culprit"]["key"] == "data.max_length" and said["exit_code"] == ExitCode.USER


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"status": "done", "exit_code": 0, "reason": ""}, 0),
        ({"status": "stopping", "exit_code": 75, "reason": "SIGTERM"}, 75),
        ({"status": "failed", "exit_code": 4, "reason": "nan"}, 4),
        ({"status": "running", "exit_code": None, "reason": ""}, 1),
        (None, 1),
    ],
)
def test_launchers_read_the_exit_code(
    said: dict | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if said is not None:
        (tmp_path / "run_status.json").write_text(json.dumps({"time": time.time() + 60, **said}))
    monkeypatch.setattr(sys, "argv", ["status", f"output_dir={tmp_path}", "stage=pretrain"])
    with pytest.raises(SystemExit) as ended:
        status.main()
    assert ended.value.code == code and str(tmp_path) in capsys.readouterr().err


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_last_word_fits_onto_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_status(tmp_path, "running")
    monkeypatch.setattr(status_file, "replace_file", full)
    write_ending(tmp_path, Outcome(ENDINGS["checkpoint"], "no room"))
    said = read_status(tmp_path)
    assert said is not None and (said["class"], said["exit_code"], said["reason"]) == ("checkpoint", 3, "no room")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run_status.json"]


@pytest.mark.parametrize("private", [True, False])
def test_a_private_run_is_read_by_its_user_alone(private: bool, tmp_path: Path) -> None:
    """In a folder that others may read, too."""
    before = os.umask(0o022)
    try:
        (tmp_path / status_file.STATUS_FILE).write_text("{}")
        with claiming_folder(tmp_path, 0, private):
            put_status(tmp_path, "stopping", ending("stopped"))
            write_ending(tmp_path, ending("bug"))
    finally:
        os.umask(before)
    for name in (status_file.STATUS_FILE, status_file.FIRST_FAILURE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == (0o600 if private else 0o644), name


def test_on_a_full_disk_a_status_replaces_a_longer_one_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_status(tmp_path, "stopping", ending("stopped", "long " * 200))
    monkeypatch.setattr(status_file, "replace_file", full)
    put_status(tmp_path, "stopping", ending("stopped", "short"))
    left = (tmp_path / status_file.STATUS_FILE).read_text()
    assert "long" not in left and json.loads(left)["reason"] == "short"


def test_a_run_that_was_killed_is_told_from_one_under_way(tmp_path: Path) -> None:
    """By the reader while it runs and afterwards, and by the next start."""
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    reader = [sys.executable, "-m", "llava_fsdp.status", f"output_dir={tmp_path}"]
    try:
        put_status(tmp_path, "stopping", ending("stopped", "SIGTERM"))
        said = [subprocess.run(reader, check=False, capture_output=True, text=True)]
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.wait()
    said.append(subprocess.run(reader, check=False, capture_output=True, text=True))
    assert [done.returncode for done in said] == [75, 75]
    assert f"process {holder.pid} on {os.uname().nodename} still runs" in said[0].stderr
    assert "asked to stop (SIGTERM), and was killed before it had stopped" in said[1].stderr
    start = "import sys, pathlib, llava_fsdp.runtime.text.log as l, llava_fsdp.runtime.files.run_dir as r\n"
    start += "l.setup_logging()\n"
    start += "with r.claiming_folder(pathlib.Path(sys.argv[1]), 0): pass"
    for expected in ("was killed while it was stopping, asked to by SIGTERM", "was killed while it was running"):
        done = subprocess.run([sys.executable, "-c", start, str(tmp_path)], check=True, capture_output=True, text=True)
        assert expected in done.stderr


def test_a_start_without_a_step_keeps_what_the_run_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(how: str, steps: int, reason: str = "") -> None:
        with claiming_folder(tmp_path, 0), Watchdog(tmp_path, 0) as watchdog:
            assert (read_status(tmp_path) or {})["status"] == "running"
            for _ in range(steps):
                watchdog.step_done()
        ended(how, reason)

    def ended(how: str, reason: str = "") -> None:
        write_ending(tmp_path, ending(how, reason))
        (tmp_path / status_file.FIRST_FAILURE).unlink(missing_ok=True)  # of this process, which stands for several

    def found() -> tuple[object, object]:
        said = read_status(tmp_path) or {}
        assert "before" in said
        return said["status"], said["before"] and (said["before"]["status"], said["before"]["reason"])

    start("config", 0, "no such file")
    assert found() == ("failed", None), "the first start has nothing before it"
    start("numeric", 2, "nan")
    assert found() == ("failed", None)
    start("config", 0, "no such key")
    ended("config", "a key that does not compose")
    assert found() == ("failed", ("failed", "nan")), "what the run was is kept through every refusal"
    start("done", 0)
    assert found() == ("done", ("failed", "nan"))
    start("checkpoint", 0, "written with other settings")
    said = read_status(tmp_path) or {}
    assert (said["status"], said["exit_code"], said["before"]) == ("done", 0, None), "a finished run stays finished"
    assert (said["refused"]["status"], said["refused"]["exit_code"]) == ("failed", 3)
    own = status_file.status_of_latest_start(said)
    assert (own["status"], own["reason"], own["before"]["status"]) == ("failed", "written with other settings", "done")
    start("config", 0, "no such key")
    said = read_status(tmp_path) or {}
    assert (said["status"], said["refused"]["class"], said["refused"].get("refused")) == ("done", "config", None)
    put_status(tmp_path, "running")
    monkeypatch.setattr(run_dir.os, "getpid", lambda: 1)
    assert (status_file.previous_status(tmp_path) or {})["status"] == status_file.KILLED


def test_stacks_of_the_start_before_stay(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.txt"
    for number in range(3):
        with open_new(path) as file:
            file.write(f"start {number}")
    assert [p.read_text() for p in sorted(tmp_path.iterdir())] == ["start 0", "start 1", "start 2"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("folders", "said"), [((), "0\n"), (("step-000004", "step-000012", "step-000099.tmp"), "12\n")]
)
def test_a_script_is_told_what_is_saved(
    folders: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in folders:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["status", "--saved", f"output_dir={tmp_path}"])
    status.main()
    assert capsys.readouterr().out == said


def test_what_has_begun_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts of a launch read where it began; another wish or launch has not begun."""
    mark_begun(tmp_path, "a", 3)
    assert begun_at(tmp_path, "a") is None, "without torchrun there are no restarts"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    mark_begun(tmp_path, "a", 3)
    mark_begun(tmp_path, "a", 5)
    assert (begun_at(tmp_path, "a"), begun_at(tmp_path, "b")) == (3, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert begun_at(tmp_path, "a") is None
    mark_begun(tmp_path, "a", 5)
    mark_begun(tmp_path, "b", 7)
    assert (begun_at(tmp_path, "a"), begun_at(tmp_path, "b")) == (None, 7)


def test_a_name_that_all_launches_have_is_told_apart_by_its_time(
    tmp_path: Path, launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun on several machines is called "none" where the user gave it no name."""
    for name, step in (("none", None), ("job7", 3)):
        launched(rank=0, launch=name, GROUP_WORLD_SIZE="2")
        (tmp_path / name).mkdir()
        mark_begun(tmp_path / name, "never", 3)
        assert begun_at(tmp_path / name, "never") == 3
        with monkeypatch.context() as patched:
            patched.setattr(status_file, "start_time", lambda _: time.time() + 5)
            assert begun_at(tmp_path / name, "never") == step, "a scheduler's name is one job's"


def test_a_start_of_the_same_launch_waits_for_the_lock(
    tmp_path: Path, launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, or one without a launch, is refused at once; and a file system may have no locks."""
    held, waited = [0], []

    def lockf(*_: object) -> None:
        if held[0]:
            held[0] -= 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(run_dir.fcntl, "lockf", lockf)
    monkeypatch.setattr(run_dir.time, "sleep", waited.append)
    launched(rank=0)
    with claiming_folder(tmp_path, 0):
        signed = json.loads((tmp_path / ".lock").read_text())
    assert (signed["launch"], signed["pid"]) == ("run7", os.getpid())
    held[0] = 3
    launched(rank=0, attempt=1)
    with claiming_folder(tmp_path, 0):
        assert len(waited) == 3 and not held[0]
    held[0] = 3
    monkeypatch.setattr(run_dir, "HANDOVER_SECONDS", -1)
    with pytest.raises(FolderInUse), claiming_folder(tmp_path, 0):
        pass
    monkeypatch.setattr(run_dir, "HANDOVER_SECONDS", 30)
    launched(rank=0, launch="run8")
    with pytest.raises(FolderInUse), claiming_folder(tmp_path, 0):
        pass
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    (tmp_path / ".lock").write_text(json.dumps({**signed, "launch": None}))
    held[0] = 1
    with pytest.raises(FolderInUse), claiming_folder(tmp_path, 0):
        pass
    assert len(waited) == 3

    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_dir.fcntl, "lockf", without)
    with claiming_folder(tmp_path, 0):
        assert (read_status(tmp_path) or {})["status"] == "running"


@pytest.mark.parametrize(("pid", "said"), [(0, "while it was running after step 7"), (1, "while it was running\n")])
def test_a_killed_run_is_told_with_its_last_step(
    pid: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A heartbeat of another process is that of an earlier start."""
    run_dir.log().propagate = True
    put_status(tmp_path, "running")
    (tmp_path / HEARTBEATS).mkdir()
    put_beat(tmp_path, Beat(0, "host", os.getpid() + pid, 7, Phase.DATA.value, 0, "", 1))
    run_dir.warn_of_killed(tmp_path)
    assert said in caplog.messages[-1] + "\n"


def test_where_everybody_may_write_a_run_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir.log().propagate = True
    for mode, is_warned in ((0o755, False), (0o777, True)):
        (tmp_path / str(mode)).mkdir()
        (tmp_path / str(mode)).chmod(mode)
        with claiming_folder(tmp_path / str(mode), 0):
            pass
        assert any("chmod o-w" in text for text in caplog.messages) is is_warned


def test_a_restart_knows_that_the_attempt_before_was_killed(tmp_path: Path, launched) -> None:
    launched(rank=0)
    put_status(tmp_path, "running")
    assert status_file.previous_status(tmp_path) is None, "it is this start's own"
    assert (status_file.previous_status(tmp_path, is_claiming=True) or {}).get("status") == status_file.KILLED
    launched(rank=0, launch="run8")
    assert (status_file.previous_status(tmp_path) or {})["status"] == status_file.KILLED


def test_only_the_first_rank_records_that_a_run_is_done(tmp_path: Path, launched) -> None:
    for rank in (2, 1, 0):
        assert not (tmp_path / status_file.STATUS_FILE).exists()
        launched(rank=rank)
        assert write_ending(tmp_path, ending("done")) is None
    said = read_status(tmp_path) or {}
    assert (said["status"], said["exit_code"], said["rank"], said["culprit"]) == ("done", 0, 0, {})
    assert not (tmp_path / status_file.FIRST_FAILURE).exists()
    assert write_ending(tmp_path / "absent", ending("bug")) is None and not (tmp_path / "absent").exists()


def test_the_culprit_is_what_the_error_names(tmp_path: Path, launched) -> None:
    """And the rank that wrote it otherwise."""
    launched(rank=2, attempt=1)
    outcome = Outcome(ENDINGS["communication"], "lost", {"rank": 1, "file": "a"}, step=6)
    assert write_ending(tmp_path, outcome) is None
    said = read_status(tmp_path) or {}
    assert said["culprit"] == {"rank": 1, "host": os.uname().nodename, "file": "a"}
    assert (said["rank"], said["attempt"], said["step"], said["launch"]) == (2, 1, 6, "run7")


@pytest.mark.parametrize("code", [0, 256, -1])
def test_a_report_whose_exit_code_is_none_is_not_read(code: int, tmp_path: Path, launched) -> None:
    launched(rank=1)
    write_ending(tmp_path, ending("bug"))
    path = tmp_path / status_file.FIRST_FAILURE
    for number in (255, code):
        path.write_text(json.dumps({**json.loads(path.read_text()), "exit_code": number}))
        assert (first_failure(tmp_path) is None) is (number == code)
    path = tmp_path / status_file.STATUS_FILE
    for number in (255, 256, -1):
        path.write_text(json.dumps({**json.loads(path.read_text()), "exit_code": number}))
        assert (read_status(tmp_path) is None) is (number != 255)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """Also where a step has more digits than another; other names are no checkpoints."""
    for name in ("step-1000000", "step-000002", "step-999999", "step-0000003", "step-4", "step-000005.tmp"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002", "step-999999", "step-1000000"]
    assert list_checkpoints(tmp_path / "absent") == []


def test_no_secret_is_in_what_is_recorded_of_an_end(tmp_path: Path, launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the other ranks nor for the user."""
    launched(rank=1)
    monkeypatch.setenv("HF_TOKEN", "a-value-that-nobody-may-read")
    write_ending(tmp_path, ending("config", "data.path=a-value-that-nobody-may-read is not a file"))
    for name in (status_file.STATUS_FILE, status_file.FIRST_FAILURE):
        reason = json.loads((tmp_path / name).read_text())["reason"]
        assert reason == "data.path=*** is not a file"


@pytest.mark.parametrize("has_links", [True, False])
def test_one_rank_is_the_first_that_failed(
    has_links: bool, tmp_path: Path, launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system without hard links; nothing else is left in the folder."""

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    launched(rank=1)
    assert status_file.write_first_failure(tmp_path, ending("data", "record 7"))
    launched(rank=2)
    assert not status_file.write_first_failure(tmp_path, ending("bug", "of its own"))
    found = first_failure(tmp_path) or {}
    assert (found["rank"], found["class"], found["reason"]) == (1, "data", "record 7")
    assert os.listdir(tmp_path) == [status_file.FIRST_FAILURE]


@pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, "held"), PermissionError(errno.EACCES, "held")])
def test_a_lock_of_another_process_has_two_errors(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As POSIX allows: neither of them means that a file system has no locks."""
    with claiming_folder(tmp_path, 0) as handle:
        assert handle is not None
        hold = RunDirLock(tmp_path, handle)

        def refused(*_: object) -> None:
            raise error

        monkeypatch.setattr(run_dir.fcntl, "lockf", refused)
        assert run_dir.look_at_lock(tmp_path)[0] is True and not is_known_free(tmp_path)
        with pytest.raises(FolderInUse):
            run_dir.lock_folder(handle, tmp_path)
        assert hold.lock_again() is not None
        monkeypatch.undo()
    assert is_known_free(tmp_path)


def test_a_folder_that_is_shown_late_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a network file system; one that stays away is."""
    folder, away = tmp_path / "out", [0]
    stat_of = os.stat

    def late(path: object, **more: object) -> os.stat_result:
        if path == folder and away[0]:
            away[0] -= 1
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        return stat_of(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(run_dir_watch, "AGAIN_SECONDS", 0)
    with claiming_folder(folder, 0) as handle:
        assert handle is not None
        hold = RunDirLock(folder, handle)
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", late)
            for times, is_lost in ((1, False), (2, True)):
                away[0] = times
                change = hold.check_folder()
                assert (change is not None) is is_lost and (change is None or change.can_be_remade)
