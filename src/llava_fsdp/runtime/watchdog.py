"""The life of a rank's process: signals, its heartbeat, and the other ranks' ends and delays. Imports no torch.

One thread attends to all of it, because the main thread may be inside a collective or a read that never returns: a
signal's Python handler would wait there too, so that the thread reads signals from the pipe that Python's C handler
writes to. The main thread asks at the end of every step what is wanted, together with all other ranks (`Votes`
in consensus.py).
"""

import contextlib
import faulthandler
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TextIO

from llava_fsdp.runtime.errors import ENDINGS, CommunicationError, StorageError
from llava_fsdp.runtime.heartbeat import FOLDER, Beat, Late, Phase, Watcher, beat_age, make_beat, put_beat
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.os_errors import why
from llava_fsdp.runtime.process_end import end_torchrun, ending_of
from llava_fsdp.runtime.status_file import (
    PATIENCE,
    Outcome,
    first_failure,
    last_word,
    note_steps,
    put_status,
    write_ending,
)

BEAT = 1.0
"""Seconds between two heartbeats."""
FROZEN = 5.0
"""Seconds without one after which a process counts as stopped."""
HEARING = 3.0
"""Seconds that a signal may take to be heard where the machine is busy."""
ONE_WISH = 0.5
"""Seconds within which a second Ctrl-C counts as the first: a key pressed twice, or a launcher that passes on what the
terminal has sent to all."""
SETTLE = 0.3
"""Seconds until a SIGTERM is taken for a wish: torchrun sends it as well where another rank has failed."""
STACKS = "stacks"
TOGETHER = (Phase.AGREEING, Phase.COMPUTE, Phase.OPTIMIZER)
"""Where ranks wait for each other alone: all of them in the same place for long is a fault of the network."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Life:
    """What is asked of this process, what it says it is at, and what becomes of it when others end or stall.

    Does nothing before it is entered: what trains without an entry has a life without events.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, limit: int = 0, warn_after: int | None = None):
        self.folder = folder or Path()
        self.rank = rank
        self.limit = limit
        """Seconds that a collective may wait."""
        self.warn_after = warn_after
        """Seconds after which ranks that wait say for whom; None: ranks do not look at each other."""
        self.stop = ""
        """The signal that asked this rank to stop; empty: none did."""
        self.interrupted_at: float | None = None
        """When the first SIGINT was heard, on the monotonic clock."""
        self.told = False
        """SIGTERM or SIGINT has come here, whatever became of it."""
        self.saves = 0
        """How often SIGUSR1 has asked for a checkpoint; counted by our thread alone."""
        self.saves_said = 0
        """So many of them the main thread has been told of."""
        self.step = 0
        self.phase = Phase.LOADING
        self.detail: Callable[[], str] = str
        """Says what data this rank waits for."""
        self.work: Callable[[], int] = int
        """Counts the collectives that this rank has begun."""
        self.last_words: Callable[[], None] = lambda: None
        """Shows and tells how the run ended, where the process ends from here; it must take no more than seconds."""
        self.size = 1
        self.stepping = False
        self.has_stepped = False
        """A step of this start is over."""
        self.look: Callable[[], object] = lambda: None
        """Looks after the folder of the run, every second."""
        self.is_attending = False
        """A step of this start is over, and the last one is not."""
        self.count = 0
        self.place: tuple[int, int, int] = (0, 0, 0)
        self.since = time.monotonic()
        self.warned = 0.0
        self.dumped = False
        self.failed = False
        self.peers: dict[int, tuple[int, int]] = {}
        """pidfd -> rank and process, of the other ranks on this machine."""

    def at(self, phase: Phase, step: int | None = None) -> None:
        """The main thread begins something."""
        self.phase = phase
        self.step = self.step if step is None else step

    def wants_stop(self) -> bool:
        return bool(self.stop)

    def wants_save(self) -> bool:
        """Said once; a signal that comes later is for the next time."""
        said, self.saves_said = self.saves_said, self.saves
        return self.saves_said > said

    def was_asked(self) -> bool:
        """Whether a stop was asked for, by now or in a moment.

        A signal to the whole process group ends children, a compiler among them, before our thread has told of it.
        """
        until = time.monotonic() + HEARING
        while not self.stop and time.monotonic() < until:
            time.sleep(0.05)
        return self.wants_stop()

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """While steps are taken; once `step_done` was called a signal waits for the end of one.

        Before that there is nothing to wait for: no step is lost, and the first one may compile for longer than
        torchrun waits until it kills.
        """
        try:
            yield
        finally:
            self.stepping = False

    def step_done(self) -> None:
        if not self.stepping and self.is_attending and self.rank == 0:
            with contextlib.suppress(OSError):
                note_steps(self.folder)
        self.stepping = self.has_stepped = True

    def __enter__(self) -> "Life":
        self.ending = threading.Event()
        self.lost_peer = False
        self.pipe = os.pipe()
        for end in self.pipe:
            os.set_blocking(end, False)
        try:
            for name in (FOLDER, STACKS):  # stacks and records are nobody else's business
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.stacks = fresh(self.folder / STACKS / f"rank-{self.rank}.txt")
        except OSError as error:
            raise StorageError(f"output_dir={self.folder} cannot be written ({why(error, self.folder)})") from error
        self.watcher = Watcher(self.folder, FROZEN)
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():
            self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
            for number in SIGNALS:
                self.handlers[number] = signal.signal(number, lambda *_: None)  # the byte in the pipe is what counts
            faulthandler.register(signal.SIGUSR2, self.stacks, all_threads=True)
        self.thread = threading.Thread(target=self.attend, name="life", daemon=True)
        self.thread.start()
        self.is_attending = True
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.lost_peer = isinstance(error, CommunicationError)
        self.ending.set()
        os.write(self.pipe[1], b"\0")
        self.thread.join()  # before the handlers go: torchrun's SIGTERM must not cut its last word short
        if self.handlers:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup)
            faulthandler.unregister(signal.SIGUSR2)
        self.tell()
        for handle in (*self.pipe, *self.peers):
            os.close(handle)
        self.peers = {}
        with last_word(Path(self.stacks.name)):
            is_empty = not os.fstat(self.stacks.fileno()).st_size
            self.stacks.close()
            if is_empty:
                Path(self.stacks.name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def among(self, ranks: list[tuple[int, str, int]]) -> Iterator[None]:
        """The other ranks are there, until the last barrier.

        Args:
            ranks: rank, host and process of every one.
        """
        self.size = len(ranks)
        own = socket.gethostname()
        for rank, host, pid in ranks:
            if rank != self.rank and host == own and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # another container on this machine, or an old kernel
                    self.peers[os.pidfd_open(pid)] = rank, pid
        yield
        self.size, self.work = 1, int  # others may end before us from here on; after an error nothing is left but that

    def attend(self) -> None:
        next_beat = 0.0
        while not self.ending.is_set():
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT
                try:
                    self.beat()
                except Exception:  # signals must be heard all the same
                    if not self.failed:
                        log().warning("the other ranks are not watched: %s", traceback.format_exc())
                    self.failed = True
            self.listen(max(0.0, next_beat - time.monotonic()))
        if self.lost_peer:  # the main thread has seen it first, and knows less: which rank, and how it ended
            self.listen(SETTLE)

    def listen(self, seconds: float) -> None:
        """Wait for a signal or the end of another rank, at most so long."""
        poll = select.poll()
        poll.register(self.pipe[0], select.POLLIN)
        if self.size > 1:
            for handle in self.peers:
                poll.register(handle, select.POLLIN)
        events = [handle for handle, _ in poll.poll(1000 * seconds)]
        if self.ending.is_set() and not self.lost_peer:
            return
        for handle in events:
            if handle in self.peers and self.size > 1:
                self.lost(handle, *self.peers[handle])
        if self.pipe[0] in events:
            for number in os.read(self.pipe[0], 256):
                self.heard(number)

    def heard(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.saves += 1
        if number not in (signal.SIGTERM, signal.SIGINT) or self.ending.is_set():
            return
        self.told = True
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.is_second_wish():
            self.end(Outcome(ENDINGS["interrupted"], f"interrupted at step {self.step + 1}, without a checkpoint"))
        until = time.monotonic() + SETTLE
        while self.size > 1 and time.monotonic() < until:
            if first_failure(self.folder) is not None:
                return  # torchrun ends us because another rank has failed; `beat` does the rest
            self.listen(0.05)
        if self.stop:
            return  # what was asked for is being done, and asking again changes nothing
        if not self.stepping:
            ending = ENDINGS["stopped" if number == signal.SIGTERM else "interrupted"]
            where = "before the first step was over"
            if self.phase in (Phase.LOADING, Phase.EXPORT):
                where = "outside of the steps"
            elif self.has_stepped:
                where = "after the last step"
            self.end(Outcome(ending, f"{name} {where}, {self.phase.value}: nothing was lost"))
        if not self.stop:
            self.stop = name
            log().info("%s: this run stops with a checkpoint after step %d or the next", name, self.step)
            if self.rank == 0:
                with contextlib.suppress(OSError):
                    put_status(self.folder, "stopping", Outcome(ENDINGS["stopped"], name, step=self.step))

    def is_second_wish(self) -> bool:
        """Whether a Ctrl-C came before, long enough ago to have been another."""
        first, now = self.interrupted_at, time.monotonic()
        self.interrupted_at = now if first is None else first
        return first is not None and now - first > ONE_WISH

    def lost(self, pidfd: int, rank: int, pid: int) -> None:
        """Another rank on this machine has ended. Its own word is there already, if it left one."""
        how = ending_of(pidfd, pid)
        if first_failure(self.folder) is None:
            reason = f"rank {rank} (process {pid} on {socket.gethostname()}) {how}"
            self.end(Outcome(ENDINGS["communication"], reason, {"rank": rank, "host": socket.gethostname()}))
        self.follow()

    def tell(self) -> Beat:
        self.count += 1
        detail = self.detail() if self.phase is Phase.DATA else ""
        beat = make_beat(self.rank, self.step, self.phase, self.work(), detail, self.count)
        with contextlib.suppress(OSError):  # a full disk must not end a training
            put_beat(self.folder, beat)
        return beat

    def beat(self) -> None:
        self.look()
        beat = self.tell()
        if self.warn_after is None:
            return
        if has_others() and first_failure(self.folder) is not None:  # also of one that has not met us yet
            self.follow()
        if self.size == 1:
            return
        if beat.place != self.place:
            self.place, self.since, self.warned, self.dumped = beat.place, time.monotonic(), 0.0, False
        waiting = time.monotonic() - self.since
        # rank 0 looks at all, the others at rank 0: in a run of thousands not all read all files
        late = self.watcher.late(beat, list(range(self.size)) if self.rank == 0 else [0])
        if waiting >= self.warn_after:
            self.warn(waiting, late)
        limit = self.limit - min(10, 0.1 * self.limit) + (self.rank != 0)
        ahead = any(other.place > beat.place for other in self.watcher.last.values())
        if waiting >= limit and not ahead and (late or self.phase in TOGETHER):
            self.give_up(beat, waiting, late)

    def warn(self, waiting: float, late: list[Late]) -> None:
        if not self.dumped:
            self.dumped = True
            faulthandler.dump_traceback(self.stacks, all_threads=True)
        # all wait for rank 0, and one says so: rank 1, unless its machine may be gone too
        speaks = self.rank <= 1 or any(each.is_frozen for each in late)
        if late and speaks and time.monotonic() - self.warned >= max(60, waiting / 2):
            self.warned = time.monotonic()
            for each in late:
                log().warning("waiting for %.0f seconds: %s", waiting, each)

    def give_up(self, beat: Beat, waiting: float, late: list[Late]) -> None:
        """End the run before the group's own timeout does, whose message names whoever waited."""
        faulthandler.dump_traceback(self.stacks, all_threads=True)
        if not late:
            late = self.watcher.late(beat, list(range(self.size)))
        culprit = {"rank": late[0].beat.rank, "host": late[0].beat.host, "phase": late[0].beat.phase} if late else {}
        if late and late[0].beat.detail:
            culprit["record"] = late[0].beat.detail
        said = "; ".join(map(str, late)) if late else f"no rank goes on; this one is {beat.doing}"
        stacks = self.folder / STACKS
        self.end(
            Outcome(
                ENDINGS["communication"],
                f"the ranks have waited for {waiting:.0f} seconds: {said}. What every rank was at is in {stacks}; "
                "comm.timeout allows more time",
                culprit,
            )
        )

    def follow(self) -> None:
        """Another rank's word is the cause: end without one of our own, once torchrun has seen the first one's end."""
        time.sleep(PATIENCE)
        first = first_failure(self.folder)
        self.kill_frozen()
        code = int(first["exit_code"]) if first else int(ENDINGS["communication"].exit_code)
        if code == ENDINGS["stopped"].exit_code and not self.told:
            end_torchrun()
        self.leave(code)

    def end(self, outcome: Outcome) -> None:
        """End this process from here, whatever the main thread is at."""
        first = write_ending(self.folder, replace(outcome, step=self.step))
        if first is None:
            (log().info if outcome.ending.name == "stopped" else log().error)(
                "%s: %s", outcome.ending.name, outcome.reason
            )
        self.kill_frozen()
        self.leave(int(outcome.ending.exit_code if first is None else first["exit_code"]))

    def kill_frozen(self) -> None:
        """A process that is stopped does not hear torchrun's SIGTERM, and torchrun waits half a minute for it."""
        for handle, (rank, _) in self.peers.items():
            with contextlib.suppress(OSError):
                if beat_age(self.folder, rank) > FROZEN:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)

    def leave(self, code: int) -> None:
        with contextlib.suppress(Exception):
            self.last_words()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def has_others() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def fresh(path: Path) -> TextIO:
    """A new file of the owner's; what a start before left under its name is kept as `NAME.N.txt`."""
    if os.path.lexists(path) and path.lstat().st_size:
        number = next(n for n in itertools.count(1) if not path.with_suffix(f".{n}.txt").exists())
        os.replace(path, path.with_suffix(f".{number}.txt"))
    return open(path, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))
