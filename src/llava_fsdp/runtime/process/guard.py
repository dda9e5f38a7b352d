"""A process beside each rank that kills the rank if the rank can no longer end itself. Imports no torch.

A call that waits for the GPU while it holds Python's lock, such as the launch of a compiled kernel into a full queue,
stops all threads of the rank, also the watchdog (watchdog.py): the rank writes no heartbeat, receives no signal, and
does not notice that another rank has ended.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from llava_fsdp.runtime.exit_codes import ENDINGS
from llava_fsdp.runtime.files.status_file import Outcome, first_failure, write_ending
from llava_fsdp.runtime.launch import launch_id
from llava_fsdp.runtime.process.process_end import ending_of

SILENT = 5.0
"""Seconds without a sign of life after which the rank's watchdog counts as stopped."""
STOPPED = 5.0
"""Seconds between two turns of the guard's loop (which takes one) after which the guard itself counts as stopped."""
GRACE = 15.0
"""Seconds that a rank has to end itself, with its last report, after another rank has ended."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class RankGuard:
    """Starts the guard of this rank, and sends it signs of life."""

    def __init__(self, folder: Path, rank: int, peers: dict[int, int], seconds: float):
        """Start the guard, a process that kills this rank if the rank hangs and can no longer end itself.

        Args:
            folder: the run's folder, in which the guard records why it kills the rank.
            peers: process ids of the other ranks on this machine, by rank.
            seconds: time within which this rank must send its next sign of life (`beat`).
        """
        environment = dict(os.environ)
        if (launch := launch_id()) is not None:  # the guard cannot find it out: its parent process is not torchrun
            environment["TORCHELASTIC_RUN_ID"] = launch
        arguments = {"folder": str(folder.absolute()), "rank": rank, "pid": os.getpid(), "peers": list(peers.items())}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llava_fsdp.runtime.process.guard", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )
        assert self.process.stdin is not None
        self.pipe = self.process.stdin.fileno()
        os.set_blocking(self.pipe, False)
        self.beat(seconds)

    def beat(self, seconds: float) -> None:
        """Send the guard process a sign of life: it kills this rank unless the next one comes within `seconds`."""
        with contextlib.suppress(OSError):  # a guard that has ended guards nothing; the training goes on without it
            os.write(self.pipe, f"{seconds}\n".encode())

    def close(self) -> None:
        """End the guard process by closing its standard input, and wait for its end."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()


def guard(folder: Path, rank: int, pid: int, peers: list[tuple[int, int]]) -> None:
    """Run the guard's process: read a rank's signs of life from stdin until the rank ends or closes it, and kill the
    rank if it hangs. Each sign is the number of seconds within which the next one must come. From `GRACE` seconds after
    the end of another rank of this machine, more than `SILENT` seconds without a sign are too long.

    Args:
        folder: the run's folder, in which the reason is recorded.
        rank: the guarded rank.
        pid: its process id.
        peers: (rank, process id) of the other ranks on this machine.
    """
    try:
        rank_handle = os.pidfd_open(pid)
    except OSError:
        return  # it has already ended
    peer_of: dict[int, tuple[int, int]] = {}
    for other in peers:
        with contextlib.suppress(OSError):
            peer_of[os.pidfd_open(other[1])] = other
    heard_at = last_turn = time.monotonic()
    allowed = float("inf")  # seconds of silence
    lost_peer, lost_at = "", float("inf")  # how another rank has ended, and when this was noticed
    while True:
        poll = select.poll()
        for handle in (0, rank_handle, *(() if lost_peer else peer_of)):
            poll.register(handle, select.POLLIN)
        events = [handle for handle, _ in poll.poll(1000)]
        now = time.monotonic()
        if now - last_turn > STOPPED:  # the whole job was stopped and goes on, as after `scontrol suspend`
            heard_at += now - last_turn
        last_turn = now
        if rank_handle in events:
            return
        if 0 in events:
            if not (text := os.read(0, 1 << 16)):
                return  # the rank has closed its guard
            # each sign of life is the number of seconds until the next one must come
            heard_at, allowed = now, float(text.split()[-1])
        for handle in events:
            if handle in peer_of:
                other, process = peer_of[handle]
                lost_peer = f"rank {other} (process {process} on {socket.gethostname()}) {ending_of(handle, process)}"
                lost_at = now
        silent_seconds = now - heard_at
        # either the rank hangs, or another rank has ended and this one does not end itself
        if silent_seconds > allowed or (silent_seconds > SILENT and now - lost_at > GRACE):
            return kill_rank(folder, rank, rank_handle, lost_peer, silent_seconds)


def kill_rank(folder: Path, rank: int, pidfd: int, lost_peer: str, silent_seconds: float) -> None:
    """Record in the run's folder why a rank is killed, unless a rank has already failed, and kill it.

    Args:
        pidfd: file descriptor of its process.
        lost_peer: how another rank on this machine has ended; empty if all others go on.
        silent_seconds: seconds since the rank's last sign of life.
    """
    reason = (
        f"rank {rank} on {socket.gethostname()} has not answered for {silent_seconds:.0f} seconds: a call, such as the "
    )
    reason += "launch of a kernel on the GPU, does not return"
    try:
        if first_failure(folder) is None:
            # the last argument of Outcome is the culprit: this rank, unless another one has ended before
            write_ending(
                folder, Outcome(ENDINGS["communication"], lost_peer or reason, {} if lost_peer else {"rank": rank})
            )
        print(f"error: {lost_peer + '; ' if lost_peer else ''}{reason}; it is killed", file=sys.stderr, flush=True)
    finally:  # also if the folder or the terminal is gone
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


if __name__ == "__main__":
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.argv[1])
    guard(Path(given["folder"]), given["rank"], given["pid"], [tuple(peer) for peer in given["peers"]])
