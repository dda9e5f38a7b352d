"""Whether a run's folder is still the one that it began in, and still locked for it alone. Imports no torch."""

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from llava_fsdp.log import log
from llava_fsdp.rundir import LOCK_FILE, make_run_folder, open_lock, put_status, sign_lock

AGAIN = 0.2
"""Seconds until a folder that was not there is looked for once more: a network's file system may be a moment behind."""


@dataclass(frozen=True)
class Loss:
    """What has become of a run's folder."""

    what: str
    """In words, which go on from `output_dir=...`."""
    can_be_remade: bool = False
    """Nothing is in its place, and the file system that it was on is still there."""


class Hold:
    """Rank 0's hold on the folder. Looked at by two threads."""

    def __init__(self, folder: Path, handle: int, private: bool = True):
        """
        Args:
            handle: of the locked file, as `claimed` gives it; a lock that is taken again is held by the same number.
            private: as of `claimed`.
        """
        self.folder, self.handle, self.private = folder, handle, private
        self.content = os.pread(handle, 4096, 0)
        self.place, self.lock_place = identity(os.stat(folder)), identity(os.fstat(handle))
        self.one_at_a_time = threading.Lock()
        self.is_warned = False

    def look(self) -> Loss | None:
        """None: all is well, or was made well again, or cannot be told. Two calls of stat where nothing has happened.

        A file system that gives out numbers of its own (FUSE, overlays) may give another one to the same folder, so
        that the content of the locked file decides.
        """
        with self.one_at_a_time:
            try:
                found = self.found()
                with contextlib.suppress(OSError):
                    if (found, identity(os.lstat(self.folder / LOCK_FILE))) == (self.place, self.lock_place):
                        return None
                return self.look_closer(found)
            except (FileNotFoundError, NotADirectoryError):
                with contextlib.suppress(OSError):
                    is_same = os.stat(self.folder.absolute().parent).st_dev == self.place[0]
                    return Loss("was deleted or moved away", can_be_remade=is_same)
                return Loss("is gone, with the folder around it")
            except OSError:  # whoever writes there next says what is wrong
                return None

    def found(self) -> tuple[int, int]:
        try:
            return identity(os.stat(self.folder))
        except FileNotFoundError:
            time.sleep(AGAIN)
            return identity(os.stat(self.folder))

    def look_closer(self, found: tuple[int, int]) -> Loss | None:
        """The folder, or the locked file in it, is not the one that it was."""
        if found != self.place and not self.says_ours():
            return Loss("is another folder now than the one that this run began in")
        if os.path.islink(self.folder / LOCK_FILE):
            os.unlink(self.folder / LOCK_FILE)
        try:
            return self.lock_again()
        except FileNotFoundError:
            raise
        except OSError as error:
            self.warn(f"{LOCK_FILE} cannot be made again ({error}): see to it that no second run uses the folder")
            return None

    def says_ours(self) -> bool:
        """Whether the file that stands there now has what this run has written into its own."""
        with contextlib.suppress(OSError):
            handle = os.open(self.folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return os.pread(handle, 4096, 0) == self.content
            finally:
                os.close(handle)
        return False

    def lock_again(self) -> Loss | None:
        """Lock the file that stands there now, under the number of the one before; to close another descriptor of it
        would let it go."""
        handle = open_lock(self.folder)
        os.dup2(handle, self.handle, inheritable=False)
        os.close(handle)
        try:
            fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return Loss(f"has another run in it, which began when {LOCK_FILE} had been deleted or replaced")
        except OSError:  # a file system without locks, of which the start has warned
            pass
        if os.pread(self.handle, 4096, 0) != self.content:
            self.warn(f"{LOCK_FILE} was deleted or replaced while the run is under way; it has been made again")
            sign_lock(self.handle)
            put_status(self.folder, "running")  # a start that was quick may have said something else
        self.remember()
        return None

    def remake(self) -> None:
        """The folder anew, empty, and held.

        Raises:
            OSError
        """
        with self.one_at_a_time:
            make_run_folder(self.folder, self.private)
            handle = open_lock(self.folder)
            os.dup2(handle, self.handle, inheritable=False)
            os.close(handle)
            with contextlib.suppress(OSError):
                fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sign_lock(self.handle)
            put_status(self.folder, "running", mode=0o600 if self.private else 0o666)
            self.remember()

    def remember(self) -> None:
        self.content = os.pread(self.handle, 4096, 0)
        self.place, self.lock_place = identity(os.stat(self.folder)), identity(os.fstat(self.handle))

    def warn(self, said: str) -> None:
        """Once: whatever does this may do it again and again."""
        if not self.is_warned:
            log().warning("output_dir=%s: %s", self.folder, said)
        self.is_warned = True


def identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
