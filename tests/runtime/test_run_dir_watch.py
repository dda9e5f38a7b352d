"""A run's folder that is deleted, moved, replaced, linked or refuses to be written while the run is under way."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.errors import ConfigError, FolderLost
from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.files import os_errors, run_dir, status_file
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.files.jsonl import RowWriter, replace_lines
from llava_fsdp.runtime.files.os_errors import free_bytes, free_inodes, why
from llava_fsdp.runtime.files.run_dir import claiming_folder, held_by
from llava_fsdp.runtime.files.status_file import Outcome, first_failure, put_status, read_status, write_ending
from llava_fsdp.runtime.process.run_dir_watch import RunDirLock
from llava_fsdp.runtime.process.watchdog import SAME_KEY_PRESS, Watchdog
from llava_fsdp.runtime.text.log import setup_logging
from llava_fsdp.train.events.reporting.live_page import rewrite_page

CODES = ["ESTALE", "EIO", "EACCES", "ENOSPC", "EROFS"]
CALLS = ["stat", "lstat", "open", "fsync", "replace", "link", "unlink"]


def lock_from_elsewhere(folder: Path) -> bool:
    """Whether another process finds the folder locked; this one would let its own lock go by looking."""
    look = "import sys, pathlib, llava_fsdp.runtime.files.run_dir as r\n"
    look += "print(r.held_by(pathlib.Path(sys.argv[1])) is not None)"
    asked = [sys.executable, "-c", look, str(folder)]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout == "True\n"


def test_a_folder_that_is_as_it_was_costs_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claiming_folder(tmp_path, 0) as lock:
        assert lock is not None
        hold = RunDirLock(tmp_path, lock)
        monkeypatch.setattr(os, "open", lambda *_: pytest.fail("nothing is opened"))
        assert hold.check_folder() is None


@pytest.mark.parametrize("how", ["deleted", "linked", "replaced", "emptied"])
def test_a_lock_that_is_gone_is_made_again(how: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    with claiming_folder(folder, 0) as lock:
        assert lock is not None
        hold, path = RunDirLock(folder, lock), folder / ".lock"
        path.unlink()
        if how == "linked":
            path.symlink_to(elsewhere)
        elif how != "deleted":
            path.write_text("" if how == "emptied" else '{"pid": 1, "host": "other", "since": "1970"}')
        assert hold.check_folder() is None and hold.check_folder() is None
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert not path.is_symlink() and elsewhere.read_text() == "precious"
    with claiming_folder(folder, 0) as lock:
        assert lock is not None
        hold = RunDirLock(folder, lock)
        (folder / ".lock").unlink()
        assert not lock_from_elsewhere(folder)
        assert hold.check_folder() is None and lock_from_elsewhere(folder)
        assert (read_status(folder) or {})["status"] == "running"


HOLDER = """
    import sys, time
    from pathlib import Path
    from llava_fsdp.runtime.files.run_dir import claiming_folder
    with claiming_folder(Path(sys.argv[1]), 0):
        print("held", flush=True)
        time.sleep(60)
"""


def test_a_folder_that_another_run_has_taken_is_left_to_it(tmp_path: Path) -> None:
    with claiming_folder(tmp_path, 0) as lock:
        assert lock is not None
        hold = RunDirLock(tmp_path, lock)
        (tmp_path / ".lock").unlink()
        begun = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
        other = subprocess.Popen(begun, stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            for _ in range(2):
                loss = hold.check_folder()
                assert loss is not None and not loss.can_be_remade and "another run" in loss.what
            assert (held_by(tmp_path) or {})["pid"] == other.pid
        finally:
            other.kill()
            other.wait()


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced", "replaced by a run's", "put back", "parent", "a file"])
def test_what_became_of_a_folder(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "out"
    with claiming_folder(folder, 0) as lock:
        assert lock is not None
        hold = RunDirLock(folder, lock)
        if how == "deleted":
            shutil.rmtree(folder)
        elif how == "parent":
            shutil.rmtree(folder.parent)
        else:
            os.rename(folder, tmp_path / "moved")
        if how.startswith("replaced"):
            folder.mkdir()
        if how == "replaced by a run's":
            for name in (".lock", "run_status.json"):
                (folder / name).write_text('{"status": "done"}')
        elif how == "put back":
            os.rename(tmp_path / "moved", folder)
        elif how == "a file":
            folder.write_text("")
        loss = hold.check_folder()
        if how == "put back":
            assert loss is None
        else:
            assert loss is not None and loss.can_be_remade == (how in ("deleted", "moved"))
        if how == "replaced by a run's":
            assert (folder / ".lock").read_text() == '{"status": "done"}', "nothing of it is touched"
        if loss is not None and loss.can_be_remade:
            hold.remake()
            assert hold.check_folder() is None and lock_from_elsewhere(folder)
            assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_system_that_numbers_anew_is_no_loss(tmp_path: Path) -> None:
    """As FUSE may: other numbers of the same folder and file."""
    with claiming_folder(tmp_path, 0) as lock:
        assert lock is not None
        hold = RunDirLock(tmp_path, lock)
        hold.folder_identity = hold.lock_identity = (0, 0)
        assert hold.check_folder() is None and hold.folder_identity != (0, 0)
        assert lock_from_elsewhere(tmp_path)


def refusing(call: str, code: int, folder: Path) -> Callable:
    """A call of the system that refuses what is below a folder, and the folder itself."""
    real = getattr(os, call)

    def refuse(place: object, *rest: object, **named: object) -> object:
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)  # type: ignore
        if str(path).startswith(str(folder)):
            raise OSError(code, os.strerror(code), str(path))
        return real(place, *rest, **named)

    return refuse


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("call", CALLS)
def test_no_refusal_of_the_disk_hides_how_a_run_ended(
    call: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is said, the exit code is its own, and no traceback stands in for either."""
    setup_logging()
    folder = tmp_path / "out"
    with claiming_folder(folder, 0):
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        with Watchdog(folder, 0):
            monkeypatch.setattr(os, call, refusing(call, getattr(errno, name), folder))
        write_ending(folder, Outcome(ENDINGS["checkpoint"], "no room"))
        rewrite_page(folder)
        ended: list[int] = []
        monkeypatch.setattr(os, "_exit", ended.append)
        monkeypatch.setattr(status_file, "PATIENCE_SECONDS", 0)
        monkeypatch.setattr(cli, "compose", lambda *_: {"output_dir": str(folder)})

        def task(_: object) -> None:
            raise FolderLost("the disk went away", may_be_recorded=True)

        monkeypatch.setattr(cli, "load", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["train", f"output_dir={folder}"])
        cli.run("train", object, task, write_ending)
        monkeypatch.undo()
    said = capsys.readouterr().err
    assert ended == [ExitCode.CHECKPOINT] and "the disk went away" in said and "Traceback" not in said


def test_what_is_written_last_goes_on_behind_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark of the first failure cannot be made, and the status is written all the same."""
    put_status(tmp_path, "running")

    def refuse(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(status_file, "write_first_failure", refuse)
    assert write_ending(tmp_path, Outcome(ENDINGS["data"], "record 7")) is None
    said = read_status(tmp_path) or {}
    assert (said["class"], said["exit_code"]) == ("data", 2) and first_failure(tmp_path) is None


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watchdog, list[Outcome]]]:
    """A watchdog between two steps, and how it would have ended by a signal."""
    with claiming_folder(tmp_path, 0), Watchdog(tmp_path, 0) as watchdog:
        ended: list[Outcome] = []
        monkeypatch.setattr(watchdog, "end", ended.append)
        watchdog.at(Phase.COMPUTE, 11)
        watchdog.step_done()
        yield watchdog, ended


def test_a_stop_that_is_asked_for_often_is_one(asked: tuple[Watchdog, list[Outcome]]) -> None:
    """Also when the steps are over because of the first."""
    watchdog, ended = asked
    for number in range(60):
        watchdog.is_in_steps = number < 30
        watchdog.handle_signal(signal.SIGTERM)
    assert not ended and watchdog.wants_stop() and watchdog.stop == "SIGTERM"


def test_a_signal_behind_the_last_step_says_so(asked: tuple[Watchdog, list[Outcome]]) -> None:
    watchdog, ended = asked
    watchdog.is_in_steps = False
    watchdog.handle_signal(signal.SIGTERM)
    assert [own.ending.name for own in ended] == ["stopped"] and "after the last step" in ended[0].reason


def test_two_interrupts_at_once_are_one_wish(asked: tuple[Watchdog, list[Outcome]]) -> None:
    """A later one ends the run at once."""
    watchdog, ended = asked
    for _ in range(3):
        watchdog.handle_signal(signal.SIGINT)
    assert not ended and watchdog.stop == "SIGINT"
    assert watchdog.interrupted_at is not None
    watchdog.interrupted_at -= 2 * SAME_KEY_PRESS
    watchdog.handle_signal(signal.SIGINT)
    assert [own.ending.exit_code for own in ended] == [ExitCode.INTERRUPTED]


LINKS = sorted(run_dir.WRITTEN_NAMES)


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    folder, target = tmp_path / "out", tmp_path / "target"
    folder.mkdir()
    target.write_text("precious")
    (folder / name).symlink_to(target)
    with pytest.raises(ConfigError, match="links where a run writes") as caught, claiming_folder(folder, 0):
        pass
    assert name in str(caught.value) and caught.value.exit_code == ExitCode.USER
    assert target.read_text() == "precious" and sorted(os.listdir(folder)) == [name]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with claiming_folder(tmp_path / "out", 0) as lock:
        assert lock is not None
        assert RunDirLock(tmp_path / "out", lock).check_folder() is None
    assert (tmp_path / "disk" / "run_status.json").is_file()


def test_a_link_that_comes_later_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(target)
    rows = RowWriter(tmp_path / "metrics.jsonl")
    rows.add({"step": 1})
    assert rows.waiting_rows and target.read_text() == "precious"
    (tmp_path / "starts.tmp").symlink_to(target)
    replace_lines(tmp_path / "starts.jsonl", ["{}"])
    (tmp_path / ".stepped").symlink_to(tmp_path / "new")
    with pytest.raises(OSError):
        status_file.mark_stepped(tmp_path)
    (tmp_path / "run_status.json").symlink_to(target)
    put_status(tmp_path, "running")
    assert target.read_text() == "precious" and not (tmp_path / "new").exists()
    assert not (tmp_path / "run_status.json").is_symlink()


def test_a_disk_without_inodes_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    without = os.statvfs_result((*real[:6], 0, 0, *real[8:]))
    monkeypatch.setattr(os, "statvfs", lambda _: without)
    said = why(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert "no inodes left" in said and "full" not in said
    unnumbered = os.statvfs_result((*real[:5], 0, 0, 0, *real[8:]))
    monkeypatch.setattr(os, "statvfs", lambda _: unnumbered)
    assert "is full" in why(OSError(errno.ENOSPC, "No space left on device"), tmp_path)


def test_errors_of_the_disk_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the path of the error; the one that is given stands in where it has none."""

    def said(code: int, *own: str) -> str:
        return why(OSError(code, "reason", *own), tmp_path)

    assert said(errno.EROFS) == f"reason: {tmp_path} is mounted read-only"
    assert said(errno.EROFS, "/a") == "reason: /a is mounted read-only"
    for code in (errno.EACCES, errno.EPERM):
        assert said(code, "/a") == f"reason: /a is not accessible to this user (uid {os.getuid()})"
    for code in (errno.ENOSPC, errno.EDQUOT):
        assert said(code).startswith(f"reason: the disk of {tmp_path} ")
    assert said(errno.EFBIG, "/a").endswith("/a is larger than this process may write (ulimit -f)")
    assert said(errno.ELOOP, "/a").endswith("/a is a symbolic link, and nothing is written through links")
    assert said(errno.ENODEV) == f"reason: {tmp_path}"
    status = os.statvfs_result((512, 4096, 9, 8, 7, 6, 5, 4, 0, 255))
    asked: list[Path] = []
    monkeypatch.setattr(os_errors.os, "statvfs", lambda path: asked.append(path) or status)
    assert free_bytes(tmp_path / "a" / "b") == 7 * 4096 and free_inodes(tmp_path / "a") == 4
    assert asked == [tmp_path] * 2, "the nearest folder that exists"


@pytest.mark.parametrize("private", [True, False])
def test_a_folder_that_is_made_again_is_as_private_as_before(private: bool, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with claiming_folder(tmp_path / "out", 0, private) as lock:
            assert lock is not None
            hold = RunDirLock(tmp_path / "out", lock, private)
            shutil.rmtree(tmp_path / "out")
            hold.remake()
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "out", tmp_path / "out" / "run_status.json")]
    assert modes == ([0o700, 0o600] if private else [0o755, 0o644])
