"""The watchdog: a background thread in each rank that handles signals, writes heartbeats, and ends the process when
other ranks end or stall. Imports no torch.

The main thread cannot do this, because it may be blocked in a collective or a read that never returns. Python's signal
handlers run in the main thread, so they would be blocked too. The watchdog therefore reads signals from the pipe to
which Python's handler in C writes their numbers. At the end of every step, the main threads of all ranks agree on which
requests (to stop or to save) have come (`Votes` in consensus.py).
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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from llava_fsdp.runtime.errors import CommunicationError, StorageError
from llava_fsdp.runtime.exit_codes import ENDINGS
from llava_fsdp.runtime.files.heartbeat import (
    FOLDER,
    Beat,
    Late,
    Phase,
    Watcher,
    beat_age,
    put_beat,
    read_beat,
    seconds_before_limit,
)
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.files.status_file import (
    PATIENCE_SECONDS,
    Outcome,
    first_failure,
    log_write_errors,
    mark_stepped,
    put_status,
    write_ending,
)
from llava_fsdp.runtime.process.guard import RankGuard
from llava_fsdp.runtime.process.process_end import end_agent, end_torchrun, ending_of, siblings
from llava_fsdp.runtime.text.log import log

BEAT = 1.0
"""Seconds between two heartbeats of a rank."""
FROZEN = 5.0
"""Seconds without a heartbeat after which a process counts as frozen."""
SIGNAL_DELAY = 3.0
"""Seconds that may pass on a busy machine until the watchdog has handled a signal."""
SAME_KEY_PRESS = 0.5
"""Seconds within which two SIGINT signals count as one press of Ctrl-C: a launcher may forward the terminal's
signal."""
SETTLE = 0.3
"""Seconds that a SIGTERM waits before it counts as a request to stop. torchrun also sends it when another rank has
failed; that rank's report then appears within this time."""
STACKS = "stacks"
"""Folder in the run's folder with the stack traces of ranks that wait for long."""
TOGETHER = (Phase.AGREEING, Phase.COMPUTE, Phase.OPTIMIZER)
"""Phases in which a rank waits only for other ranks. If all ranks stay in them for long, the network is the cause."""
SHORTEST_SILENCE, SILENT_STEPS = 120.0, 20
"""Seconds, and multiple of the longest step so far, that the watchdog's thread may stand still, whichever is more,
before the rank counts as stuck in a call that never returns."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class WatchedRun:
    """What the watchdog calls of a training run, in its own thread. This base class is for processes without a run."""

    ends_process = True
    """Whether a signal outside of the steps ends the process. If not, the process belongs to a program that goes on
    after the training, and such signals do what they did before it: Ctrl-C raises KeyboardInterrupt."""

    def check_folder(self) -> None:
        """Check that the run's folder still exists and is locked. Called every second."""

    def collectives(self) -> int:
        """Return the number of collectives that this rank has started."""
        return 0

    def data_position(self) -> str:
        """Describe the record or image that this rank is waiting for; empty if it waits for none."""
        return ""

    def report_end(self) -> None:
        """Write the final report of the run, in at most a few seconds: the watchdog then ends the process."""


class Watchdog:
    """Thread that writes heartbeats, receives signals, and ends the process when other ranks end or stall. It runs
    while the object is entered as a context manager."""

    def __init__(
        self,
        folder: Path | None = None,
        rank: int = 0,
        limit: int = 0,
        warn_after: int | None = None,
        run: WatchedRun | None = None,
    ):
        """Set up the watchdog, which handles signals and watches the other ranks, without starting its thread.

        Args:
            folder: the run's folder; None: the working directory.
            limit: seconds that a collective may wait for other ranks. The attribute may be changed later.
            warn_after: seconds of waiting after which the awaited ranks are reported. None: no rank is watched.
            run: object whose methods the watchdog calls; None for a process without a run.
        """
        self.folder = folder or Path()
        self.rank = rank
        self.size = 1
        """Number of ranks that are watched, with this one; 1 before the ranks have met and after the last barrier."""
        self.has_met = False
        """Whether the ranks have formed the process group."""
        self.limit = limit
        self.warn_after = warn_after
        self.run = run or WatchedRun()
        self.stop = ""
        """Name of the signal that requested a stop; empty if there was none."""
        self.is_asked = False
        """Whether `on_signal` has received a signal to stop in the steps. Used only if `run.ends_process` is False."""
        self.was_signalled = False
        """Whether this process has received SIGTERM or SIGINT, even if the signal had no effect."""
        self.interrupted_at: float | None = None
        """Time of the first SIGINT, by the monotonic clock."""
        self.saves = 0
        """Number of SIGUSR1 signals received, each of which requests a checkpoint."""
        self.saves_taken = 0
        """How many of them `wants_save` has already returned."""
        self.step = 0
        """Number of finished steps."""
        self.phase = Phase.LOADING
        self.is_in_steps = False
        """Whether a step has been finished and more will come. A signal to stop then takes effect at the end of a
        step."""
        self.has_stepped = False
        """Whether a step has been finished."""
        self.is_entered = False
        """Whether the watchdog has been entered as a context manager."""
        self.count = 0
        """Number of heartbeats written."""
        self.place: tuple[int, int, int] = (0, 0, 0)
        """Progress at the last heartbeat: (finished steps, number of the phase, started collectives)."""
        self.progress_at = time.monotonic()
        """Time of the last progress, by the monotonic clock."""
        self.warned_at = 0.0
        """Time of the last warning about late ranks, by the monotonic clock."""
        self.has_dumped_stacks = False
        """Whether the stack traces have been written since the last progress."""
        self.watching_failed = False
        """Whether watching the other ranks has failed, which is reported only once."""
        self.peers: dict[int, tuple[int, int]] = {}
        """The other ranks on this machine: pidfd -> (rank, process id)."""
        self.guard: RankGuard | None = None
        self.stepped_at = 0.0
        """Time of the end of the last step, by the monotonic clock."""
        self.longest_step = 0.0
        """Seconds of the longest step but the first, with all that was done since the step before."""

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Record, for this rank's next heartbeats, that it begins a phase, such as waiting for data or validating.
        `step`: number of finished steps; None: unchanged."""
        self.phase = phase
        self.step = self.step if step is None else step

    def wants_stop(self) -> bool:
        """Return whether a signal has requested a stop."""
        return bool(self.stop)

    def wants_save(self) -> bool:
        """Return whether SIGUSR1, the request to save a checkpoint, has come since the last call."""
        taken_before, self.saves_taken = self.saves_taken, self.saves
        return self.saves_taken > taken_before

    def wants_stop_soon(self) -> bool:
        """Return whether a stop is requested now or within `SIGNAL_DELAY` seconds. To be called when a child process,
        such as a compiler, has ended: the cause may be a signal to the process group that the watchdog has not handled
        yet."""
        until = time.monotonic() + SIGNAL_DELAY
        while not self.stop and time.monotonic() < until:
            time.sleep(0.05)
        return self.wants_stop()

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Context manager around the training steps, in which a signal to stop takes effect at the end of a step. In
        the first step such a signal ends the process at once: no work is lost, and the step may compile for longer than
        torchrun waits before it kills the ranks."""
        try:
            yield
        finally:
            self.is_in_steps = False  # `step_done` has set it at the end of the first step

    def step_done(self) -> None:
        """Record that a training step has ended, and how long it took. From the first one on, a signal to stop takes
        effect at the end of a step. Rank 0 also records the first one in the run's folder."""
        if not self.is_in_steps and self.is_entered and self.rank == 0:  # the first step, with a watchdog that runs
            with contextlib.suppress(OSError):
                mark_stepped(self.folder)
        now = time.monotonic()
        if self.is_in_steps:
            self.longest_step = max(self.longest_step, now - self.stepped_at)
        self.is_in_steps, self.has_stepped, self.stepped_at = True, True, now

    def __enter__(self) -> Self:
        """Start the watchdog's thread, open its file for stack traces, and take over the handling of signals. Raises
        StorageError if the output folder cannot be written."""
        self.is_ending = threading.Event()
        self.ended_by_lost_rank = False
        self.pipe = os.pipe()
        for end in self.pipe:
            os.set_blocking(end, False)
        try:
            # the folders of heartbeats and of stack traces
            for name in (FOLDER, STACKS):  # readable only by the owner, because of stack traces and names of records
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.stacks = open_new(self.folder / STACKS / f"rank-{self.rank}.txt")
        except OSError as error:
            raise StorageError(f"output_dir={self.folder} cannot be written ({why(error, self.folder)})") from error
        self.watcher = Watcher(self.folder, FROZEN)  # reads the heartbeats of the other ranks
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():
            self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
            for number in SIGNALS:
                self.handlers[number] = signal.signal(number, self.on_signal)
            faulthandler.register(signal.SIGUSR2, self.stacks, all_threads=True)
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        self.thread.start()
        self.is_entered = True
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the watchdog's thread, restore the signal handlers and write a last heartbeat. If a communication error
        has ended the run before the ranks had met, kill the ranks of this machine that write no heartbeats."""
        self.ended_by_lost_rank = isinstance(error, CommunicationError)
        self.is_ending.set()
        os.write(self.pipe[1], b"\0")
        # joined before the signal handlers are restored: torchrun's SIGTERM must not interrupt the last report
        self.thread.join()
        if self.handlers:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup)
            faulthandler.unregister(signal.SIGUSR2)
        self.write_beat()
        if self.guard is not None:
            self.guard.close()
        for handle in (*self.pipe, *self.peers):
            os.close(handle)
        self.peers = {}
        with log_write_errors(Path(self.stacks.name)):
            is_empty = not os.fstat(self.stacks.fileno()).st_size
            self.stacks.close()
            if is_empty:
                Path(self.stacks.name).unlink(missing_ok=True)
        if self.ended_by_lost_rank and not self.has_met and siblings():
            # torchrun sends SIGTERM when the ranks below are killed; this rank still has to report its error
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.kill_silent_siblings()

    @contextlib.contextmanager
    def watching_peers(self, ranks: list[tuple[int, str, int]], is_guarded: bool = False) -> Iterator[None]:
        """Context manager in which this rank ends when others end or stall. Its body contains the run's last barrier.

        Args:
            ranks: (rank, host name, process id) of every rank.
            is_guarded: whether another process (guard.py) kills this rank if a call that waits for a GPU blocks the
                watchdog's thread.
        """
        self.size, self.has_met = len(ranks), True
        here = socket.gethostname()
        for rank, host, pid in ranks:
            if rank != self.rank and host == here and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # another container on this machine, or an old kernel
                    self.peers[os.pidfd_open(pid)] = rank, pid
        if is_guarded:
            self.guard = RankGuard(self.folder, self.rank, {n: pid for n, pid in self.peers.values()}, self.silence)
        yield
        self.size = 1  # after the last barrier other ranks may end first; not reached if the body raised an error

    @property
    def silence(self) -> float:
        """Seconds that the watchdog's thread may stand still from now on, before this rank counts as stuck: `limit`, or
        in the steps a multiple of the longest one so far, if that is less. The latter only holds in phases in which a
        rank waits for nothing but other ranks (`TOGETHER`); reading data, for example, may take longer."""
        if self.longest_step and self.is_in_steps and self.phase in TOGETHER:
            return min(self.limit, max(SHORTEST_SILENCE, SILENT_STEPS * self.longest_step))
        return self.limit

    def watch(self) -> None:
        """Run the watchdog's thread: handle signals, and call `beat` every `BEAT` seconds, until `is_ending` is set."""
        next_beat = 0.0
        while not self.is_ending.is_set():
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT
                try:
                    self.beat()
                except Exception:  # the thread goes on, because signals must still be handled
                    if not self.watching_failed:
                        log().warning("the other ranks are not watched: %s", traceback.format_exc())
                    self.watching_failed = True
            self.wait(max(0.0, next_beat - time.monotonic()))
        if self.ended_by_lost_rank:
            # the main thread got an error first, but only this thread finds out which rank ended and how
            self.wait(SETTLE)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for a signal, whose number comes through `pipe`, or the end of another rank on this
        machine (`peers`), and handle it."""
        poll = select.poll()
        poll.register(self.pipe[0], select.POLLIN)
        if self.size > 1:
            for handle in self.peers:
                poll.register(handle, select.POLLIN)
        events = [handle for handle, _ in poll.poll(1000 * seconds)]
        if (
            self.is_ending.is_set() and not self.ended_by_lost_rank
        ):  # the run has ended, and not because a rank was lost
            return
        for handle in events:
            if handle in self.peers and self.size > 1:
                rank, pid = self.peers[handle]
                self.end_with_peer(handle, rank, pid)
        if self.pipe[0] in events:
            for number in os.read(self.pipe[0], 256):
                self.handle_signal(number)

    @property
    def leaves_signals(self) -> bool:
        """Whether the watchdog's thread ignores a signal to stop, because `on_signal` handles it."""
        return not self.run.ends_process and (bool(self.stop) or not self.is_in_steps)

    def on_signal(self, number: int, frame: object) -> None:
        """Handle a signal in the main thread, where Python calls this.

        If a signal may end the process (`ends_process`), there is nothing to do: the watchdog's thread gets the signal
        through its pipe. Otherwise the process belongs to a program that goes on after the training. A signal to stop
        then has the effect that it had before the watchdog was entered; in training steps, from the second one on.
        """
        if number == signal.SIGUSR1 or self.run.ends_process:
            return
        if self.is_in_steps and not self.is_asked:  # not `stop`, which the watchdog's thread may have set already
            self.is_asked = True
            return
        before = self.handlers[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def handle_signal(self, number: int) -> None:
        """Record a request to save a checkpoint (SIGUSR1) or to stop (SIGTERM, SIGINT). Outside the training steps, and
        at the second Ctrl-C, end the process at once. A signal to stop is ignored if `on_signal` handles it in the main
        thread (`leaves_signals`)."""
        if number == signal.SIGUSR1:
            self.saves += 1
        if number not in (signal.SIGTERM, signal.SIGINT) or self.is_ending.is_set() or self.leaves_signals:
            return
        self.was_signalled = True
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.is_second_interrupt():
            self.end(Outcome(ENDINGS["interrupted"], f"interrupted at step {self.step + 1}, without a checkpoint"))
        until = time.monotonic() + SETTLE  # time in which another rank's failure is recorded, if that is the cause
        while self.size > 1 and time.monotonic() < until:
            if first_failure(self.folder) is not None:
                return  # torchrun ends this rank because another one has failed; `beat` will end this process
            self.wait(0.05)
        if self.stop:
            return  # the run is already stopping
        if not self.is_in_steps:
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

    def is_second_interrupt(self) -> bool:
        """Return whether a SIGINT that has come now is from a second press of Ctrl-C: whether the first one came more
        than `SAME_KEY_PRESS` seconds ago. Record the time of the first."""
        first, now = self.interrupted_at, time.monotonic()
        self.interrupted_at = now if first is None else first
        return first is not None and now - first > SAME_KEY_PRESS

    def end_with_peer(self, pidfd: int, rank: int, pid: int) -> None:
        """End this process because another rank on this machine has ended. Record how, unless a rank has already
        reported that it failed."""
        how = ending_of(pidfd, pid)
        if first_failure(self.folder) is None:
            reason = f"rank {rank} (process {pid} on {socket.gethostname()}) {how}"
            self.end(Outcome(ENDINGS["communication"], reason, {"rank": rank, "host": socket.gethostname()}))
        self.end_after_failure()  # reached only if a rank has reported, because `end` ends the process

    def write_beat(self) -> Beat:
        """Write a heartbeat, which tells what this rank is doing and how far it is, to the rank's file. Return it.
        `work` is the number of collectives that the rank has started; `detail` names the record that it waits for."""
        self.count += 1
        beat = Beat(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self.step,
            phase=self.phase.value,
            work=self.run.collectives() if self.size > 1 else 0,
            detail=self.run.data_position() if self.phase is Phase.DATA else "",
            count=self.count,
        )
        with contextlib.suppress(OSError):  # a full disk must not end a training
            put_beat(self.folder, beat)
        return beat

    def beat(self) -> None:
        """Write this rank's heartbeat and, unless `warn_after` is None, read the others'. End the process if another
        rank has failed, if the ranks have not met in time, or if ranks have waited too long for others."""
        self.run.check_folder()
        beat = self.write_beat()
        if self.guard is not None:
            self.guard.beat(self.silence)
        if self.warn_after is None:
            return
        has_others = os.environ.get("WORLD_SIZE", "1") != "1"
        if has_others and first_failure(self.folder) is not None:  # even if the failed rank had not joined the group
            self.end_after_failure()
        if has_others and not self.has_met and time.monotonic() - self.progress_at >= self.limit:
            self.end_unmet()
        if self.size == 1:
            return
        if beat.place != self.place:  # this rank has made progress
            self.place, self.progress_at = beat.place, time.monotonic()
            self.warned_at, self.has_dumped_stacks = 0.0, False
        waiting = time.monotonic() - self.progress_at
        # rank 0 compares all ranks, the other ranks compare only rank 0, so that thousands of ranks do not each read
        # all files
        late = self.watcher.late_ranks(beat, list(range(self.size)) if self.rank == 0 else [0])
        if waiting >= self.warn_after:
            self.warn(waiting, late)
        # rank 0 knows all ranks, and is a second earlier
        limit = self.limit - seconds_before_limit(self.limit) + (self.rank != 0)
        # a rank that others are ahead of is itself the late one: it leaves the report to them
        is_ahead = any(other.place > beat.place for other in self.watcher.last.values())
        # in a phase of `TOGETHER` all ranks may be blocked by the network, with no rank late
        if waiting >= limit and not is_ahead and (late or self.phase in TOGETHER):
            self.give_up(beat, waiting, late)

    def end_unmet(self) -> None:
        """End this process because the ranks have not met (formed the process group) in time. Usually the main thread
        finds this out earlier and names the missing rank; it cannot if it is blocked in a call that does not return."""
        faulthandler.dump_traceback(self.stacks, all_threads=True)
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = (
            f"the ranks have not met at {place} within comm.init_timeout={self.limit} seconds, and rank {self.rank} is "
            f"blocked in a call that does not return: does rank 0's store answer there? See {self.folder / STACKS}"
        )
        self.kill_silent_siblings()  # kills this machine's ranks without heartbeats: they may not react to SIGTERM
        self.end(Outcome(ENDINGS["communication"], reason))

    def kill_silent_siblings(self) -> None:
        """Kill the ranks of this machine that write no heartbeats. They may be blocked before they could handle
        SIGTERM; torchrun would wait for them: half a minute, or `STOP_SECONDS` if `llava-fsdp` started it."""
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
        here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        beats = [beat for rank in here if (beat := read_beat(self.folder, rank)) is not None]
        for pid in siblings() - {beat.pid for beat in beats if beat_age(self.folder, beat.rank) <= FROZEN}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def warn(self, waiting: float, late: list[Late]) -> None:
        """Write this rank's stack traces, and log late ranks, ever less often. `waiting`: seconds without progress."""
        if not self.has_dumped_stacks:
            self.has_dumped_stacks = True
            faulthandler.dump_traceback(self.stacks, all_threads=True)
        # Only ranks 0 and 1 report late ranks. If a late rank is frozen, all ranks do, because its machine may be gone,
        # and rank 1 may have been on the same machine.
        is_reporter = self.rank <= 1 or any(each.is_frozen for each in late)
        if late and is_reporter and time.monotonic() - self.warned_at >= max(60, waiting / 2):
            self.warned_at = time.monotonic()
            for each in late:
                log().warning("waiting for %.0f seconds: %s", waiting, each)

    def give_up(self, beat: Beat, waiting: float, late: list[Late]) -> None:
        """Record which ranks are late, and end this process. This is done shortly before the timeout of the process
        group, whose error would name the waiting rank instead of the late one.

        Args:
            beat: this rank's heartbeat.
            waiting: seconds since this rank last made progress.
            late: the ranks that this rank is waiting for; if empty, they are looked for again.
        """
        faulthandler.dump_traceback(self.stacks, all_threads=True)
        if not late:
            late = self.watcher.late_ranks(beat, list(range(self.size)))
        culprit = {"rank": late[0].beat.rank, "host": late[0].beat.host, "phase": late[0].beat.phase} if late else {}
        if late and late[0].beat.detail:
            culprit["record"] = late[0].beat.detail
        cause = "; ".join(map(str, late)) if late else f"no rank goes on; this one is {beat.doing}"
        self.end(
            Outcome(
                ENDINGS["communication"],
                f"the ranks have waited for {waiting:.0f} seconds: {cause}. Stack traces of all ranks are in "
                f"{self.folder / STACKS}; comm.timeout allows more time",
                culprit,
            )
        )

    def end_after_failure(self) -> None:
        """End this process because another rank has reported that it failed. Wait `PATIENCE_SECONDS` seconds, so that
        torchrun notices the end of that rank first.

        Two failures also end what would restart the ranks in vain. After a stop that was requested on another machine,
        this is torchrun. After a failure that a restart would repeat, it is the agent of `llava-fsdp train`.
        """
        time.sleep(PATIENCE_SECONDS)
        first = first_failure(self.folder)
        self.kill_silent_peers()  # ranks without heartbeat, on whose end torchrun would wait half a minute
        code = int(first["exit_code"]) if first else int(ENDINGS["communication"].exit_code)
        if code == ENDINGS["stopped"].exit_code and not self.was_signalled:
            end_torchrun()
        ending = ENDINGS.get(first["class"]) if first else None
        if ending is not None and ending.is_permanent and not ending.is_stop:
            end_agent()
        self.exit(code)

    def end(self, outcome: Outcome) -> None:
        """Record how the run ended, and end this process, even if the main thread is blocked. If another rank has
        failed first, its report stays, and this process takes its exit code."""
        first = write_ending(self.folder, replace(outcome, step=self.step))
        if first is None:
            (log().info if outcome.ending.name == "stopped" else log().error)(
                "%s: %s", outcome.ending.name, outcome.reason
            )
        self.kill_silent_peers()  # ranks of this machine without heartbeats, for whose end torchrun would wait
        self.exit(int(outcome.ending.exit_code if first is None else first["exit_code"]))

    def kill_silent_peers(self) -> None:
        """Kill the other ranks on this machine that have written no heartbeat for `FROZEN` seconds: torchrun would wait
        half a minute for their end."""
        for handle, (rank, _) in self.peers.items():
            with contextlib.suppress(OSError):
                if beat_age(self.folder, rank) > FROZEN:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)

    def exit(self, code: int) -> None:
        """Write the run's final report and end the process, even if the main thread is blocked."""
        with contextlib.suppress(Exception):
            self.run.report_end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def open_new(path: Path) -> TextIO:
    """Open a new text file that only its owner can read. One that exists and is not empty becomes `NAME.N.txt`."""
    if os.path.lexists(path) and (path.lstat().st_size or not path.is_file()):
        number = next(n for n in itertools.count(1) if not path.with_suffix(f".{n}.txt").exists())
        os.replace(path, path.with_suffix(f".{number}.txt"))
    return open(path, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))
