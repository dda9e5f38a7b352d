"""Check during a run that its folder was not deleted, moved or replaced, and that the folder's lock is still held.
Imports no torch."""

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from llava_fsdp.runtime.files.run_dir import LOCK_FILE, make_run_folder, open_lock, sign_lock
from llava_fsdp.runtime.files.status_file import put_status
from llava_fsdp.runtime.text.log import log

AGAIN_SECONDS = 0.2
"""Seconds until a missing folder is looked for again, because a network file system may show a folder late."""


@dataclass(frozen=True)
class FolderChange:
    """What happened to a run's folder."""

    what: str
    """Text that follows `output_dir=...` in the error message."""
    can_be_remade: bool = False
    """Whether the folder can be created again: its path is free, and its file system is still mounted."""


class RunDirLock:
    """Rank 0's lock on the run's folder. Two threads may call `check_folder`."""

    def __init__(self, folder: Path, handle: int, private: bool = True):
        """Record the identity (device and inode) of the locked folder of a run, and the content of its lock file.

        Args:
            handle: descriptor of the locked lock file; it stays the same if the file is replaced and opened again.
            private: whether only the owner can read the folder if it has to be created again.
        """
        self.folder, self.handle, self.private = folder, handle, private
        self.remember()
        self.one_at_a_time = threading.Lock()
        self.is_warned = False

    def check_folder(self) -> FolderChange | None:
        """Return what happened to the run's folder; None if it is intact or cannot be checked. A replaced lock file is
        locked again. Where a file system (FUSE, overlays) has changed the folder's inode number, the content of the
        lock file decides."""
        with self.one_at_a_time:
            try:
                folder_now = self.find_folder()
                with contextlib.suppress(OSError):
                    lock_now = identity(os.lstat(self.folder / LOCK_FILE))
                    if (folder_now, lock_now) == (self.folder_identity, self.lock_identity):
                        return None
                return self.check_content(folder_now)
            except (FileNotFoundError, NotADirectoryError):
                # on another device than before, the folder's file system is no longer mounted
                with contextlib.suppress(OSError):
                    is_same = os.stat(self.folder.absolute().parent).st_dev == self.folder_identity[0]
                    return FolderChange("was deleted or moved away", can_be_remade=is_same)
                return FolderChange("is gone, with the folder around it")
            except OSError:  # the next write into the folder reports what is wrong
                return None

    def find_folder(self) -> tuple[int, int]:
        """Return the identity (device and inode) of the folder that is now at the run's path. Look again a moment later
        if it is missing. Raises OSError if no folder is there."""
        try:
            return identity(os.stat(self.folder))
        except FileNotFoundError:
            time.sleep(AGAIN_SECONDS)
            return identity(os.stat(self.folder))

    def check_content(self, folder_now: tuple[int, int]) -> FolderChange | None:
        """Find out by the content of the lock file whether the folder at the run's path is still this run's. If so,
        lock the file again and return None; else return what happened. `folder_now`: its device and inode."""
        if folder_now != self.folder_identity and not self.has_own_content():
            return FolderChange("is another folder now than the one that this run began in")
        if os.path.islink(self.folder / LOCK_FILE):  # `lock_again` would refuse to open it
            os.unlink(self.folder / LOCK_FILE)
        try:
            return self.lock_again()
        except FileNotFoundError:  # `check_folder` reports that the folder is gone
            raise
        except OSError as error:
            self.warn(f"{LOCK_FILE} cannot be locked again ({error}): make sure that no second run uses the folder")
            return None

    def has_own_content(self) -> bool:
        """Return whether the lock file has the content that this run wrote."""
        with contextlib.suppress(OSError):
            handle = os.open(self.folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return os.pread(handle, 4096, 0) == self.content
            finally:
                os.close(handle)
        return False

    def open_lock(self) -> None:
        """Open the lock file that is now in the run's folder, under the descriptor number of the earlier one. The
        descriptor of `os.open` is closed before the file is locked: closing any descriptor of a file releases its POSIX
        locks."""
        handle = open_lock(self.folder)
        os.dup2(handle, self.handle, inheritable=False)
        os.close(handle)

    def lock_again(self) -> FolderChange | None:
        """Lock the lock file that is now in the run's folder. If this run did not write it, write it and the run's
        status again, with a warning. Return what happened if another run has locked the file; else None."""
        self.open_lock()
        try:
            fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return FolderChange(f"has another run in it, which began when {LOCK_FILE} had been deleted or replaced")
        except OSError:  # a file system without locks; a warning was logged at the start
            pass
        if os.pread(self.handle, 4096, 0) != self.content:
            self.warn(f"{LOCK_FILE} was deleted or replaced during the run; it has been made again")
            sign_lock(self.handle)
            put_status(self.folder, "running")  # another start may have changed the status in the meantime
        self.remember()
        return None

    def remake(self) -> None:
        """Create the run's deleted folder again, with only its lock file and status. Raises OSError if that fails."""
        with self.one_at_a_time:
            make_run_folder(self.folder, self.private)
            self.open_lock()
            with contextlib.suppress(OSError):
                fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sign_lock(self.handle)
            put_status(self.folder, "running", mode=0o600 if self.private else 0o666)
            self.remember()

    def remember(self) -> None:
        """Record the content of the lock file, and which folder and which lock file are now this run's."""
        self.content = os.pread(self.handle, 4096, 0)
        self.folder_identity, self.lock_identity = identity(os.stat(self.folder)), identity(os.fstat(self.handle))

    def warn(self, text: str) -> None:
        """Log a warning, but only the first: every check may find its cause again."""
        if not self.is_warned:
            log().warning("output_dir=%s: %s", self.folder, text)
        self.is_warned = True


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return (device, inode) of a file or folder, by its status."""
    return status.st_dev, status.st_ino
