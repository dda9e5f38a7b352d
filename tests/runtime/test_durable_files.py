"""Files that are replaced as a whole, and what is forced to the disk."""

import errno
import os
import stat
from pathlib import Path

import pytest

from llava_fsdp.runtime.files.durable_files import make_empty, new_file, replace_file, replacing, sync_tree


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its writer or the last step fails; the error names the file, or another one that it is about."""
    path = tmp_path / "file"
    replace_file(path, b"before")

    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(source), None, str(target))

    for name, named in ((None, str(path)), ("/elsewhere", "/elsewhere")):
        with pytest.raises(OSError) as caught, replacing(path) as file:
            file.write(b"after")
            raise OSError(errno.ENOSPC, "No space left on device", name)
        assert caught.value.filename == named
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(OSError) as caught:
        patched.setattr(os, "replace", refused)
        replace_file(path, b"after")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_an_error_of_a_new_file_names_it(tmp_path: Path) -> None:
    """It is closed all the same, and nothing is written over one that is there."""
    path = tmp_path / "file"
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught, new_file(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(path)
    with pytest.raises(FileExistsError), new_file(path):
        pass
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_every_file_below_a_folder_is_forced_to_the_disk_before_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (folder / name).write_text("x")
    (folder / "link").symlink_to("/etc/hostname")
    forced: list[tuple[bool, str]] = []

    def fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        forced.append((is_folder, Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    monkeypatch.setattr(os, "fsync", fsync)
    sync_tree(folder)
    assert forced == [(False, "a"), (False, "b"), (True, "inner"), (True, "folder")]


def test_a_folder_is_made_empty_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "around" / "folder"
    for _ in range(2):
        make_empty(folder)
        assert not os.listdir(folder) and stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").write_text("of a run before")
