"""Run a function on data of unknown origin in a process of its own, with limits on processor time and memory.

A single call of C code (`9**(9**9)`, a decoder of images) cannot be interrupted from Python, neither by a signal
handler nor by another thread. Only the end of its process stops it. The process is started once and answers one request
after another; after a request that breaks a limit, the next one starts a new process.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

MiB = 1 << 20
START_SECONDS = 300
"""Maximum number of seconds that a process may take to start on a busy machine."""
PATIENCE = 10
"""Seconds to wait for an answer, for each second of processor time that the request may take."""
LARGEST_ANSWER = 256 * MiB
HEAD = struct.Struct("<QQ")
"""Numbers of bytes of a message's JSON object and of the bytes after it."""
MEMORY_BROKEN = 86
"""Exit status of a process whose request needed more memory than it may take."""
Answer = tuple[dict[str, Any], bytes]
Work = Callable[[dict[str, Any]], Answer]


class LimitBroken(Exception):
    """A request took more time or memory than allowed, or crashed its process; the message says which."""


@dataclass
class LimitedProcess:
    """A function that runs in another process, within limits.

    Args:
        make: module-level function of this package without arguments. Called once in the process, without limits, it
            returns the function that answers requests: JSON object -> (JSON object, bytes).
        seconds: processor time that a request may take; up to one second more is possible.
        memory: MiB of address space that the process may take in addition to what it has after its start.
    """

    make: Callable[[], Work]
    seconds: int
    memory: int
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    _owner: int = 0
    """Process id of the Python process that started `_process`: a forked copy of this object starts its own."""
    _stopped: bool = False

    def __call__(self, request: dict[str, Any]) -> Answer:
        """Send a request, a JSON object, to the process with limits, and return its answer. If a process that has
        answered earlier requests breaks the memory limit, a new process gets the request again. The process is ended
        after any error. Raises LimitBroken if the request takes too much time or memory, or crashes the process."""
        with self._lock:
            is_used = self._owner == os.getpid() and self._process is not None
            try:
                try:
                    return self._ask(request)
                except MemoryBroken:
                    if not is_used:
                        raise
                    self._end()  # what earlier requests left behind may have taken the memory
                    return self._ask(request)
            except BaseException:
                self._end()
                raise

    def start(self) -> None:
        """Start the process now, not with the first request."""
        with self._lock:
            self._running()

    def stop(self) -> None:
        """End the process at once; requests raise LimitBroken from then on. May be called in a signal handler and in
        any thread."""
        self._stopped = True
        process = self._process
        if process is not None and self._owner == os.getpid():  # a forked copy must not end the process of the original
            process.kill()

    def _ask(self, request: dict[str, Any]) -> Answer:
        """Send a request to the process, and return its answer. Raise LimitBroken, or its subclass MemoryBroken, if the
        process breaks a limit or crashes. The messages lack a subject, which the caller adds: what the request reads.
        `self.seconds` limits the processor time; `PATIENCE` times as much may pass until the answer comes."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its exit status is looked at below
            send(process.stdin, request, b"")
        try:
            return receive(process.stdout, time.monotonic() + self.seconds * PATIENCE)
        except TimeoutError:
            raise LimitBroken(f"takes over {self.seconds * PATIENCE} s") from None
        except EOFError:
            status = process.wait()
        if status == MEMORY_BROKEN:
            raise MemoryBroken(f"needs over {self.memory} MiB of memory")
        if status == -signal.SIGXCPU:
            raise LimitBroken(f"takes over {self.seconds} s of processor time")
        raise LimitBroken(f"ends the process that reads it (exit status {status})")

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process that answers requests; start one if there is none, or if it belongs to the process from
        which this one was forked. Raises LimitBroken after `stop`; the caller adds what is read to its message."""
        if self._stopped:
            raise LimitBroken("is not read, because the program ends")
        if self._process is not None and self._owner == os.getpid():
            return self._process
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        name = f"{self.make.__module__}:{self.make.__name__}"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, name, str(self.seconds), str(self.memory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | one_thread,
            process_group=0,  # Ctrl-C ends it with its parent, by the end of its input, and not before
        )  # fmt: skip
        assert process.stdout is not None
        self._process, self._owner = process, os.getpid()
        weakref.finalize(self, end_process, process, self._owner)
        try:
            # the first message says that the process has started
            receive(process.stdout, time.monotonic() + START_SECONDS)
        except (EOFError, TimeoutError) as error:
            self._end()
            if self._stopped:
                raise LimitBroken("is not read, because the program ends") from error
            raise RuntimeError(f"the process for {name} did not start (exit status {process.returncode})") from error
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process, self._owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return LimitedProcess, (self.make, self.seconds, self.memory)


class MemoryBroken(LimitBroken):
    """A request needed more memory than its process may take."""


def end_process(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Kill a child process, unless the caller is a forked copy of the process that started it (`owner`, its id)."""
    if os.getpid() == owner:
        process.kill()
        for pipe in filter(None, (process.stdin, process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()
        process.wait()


def send(pipe: IO[bytes], head: dict[str, Any], content: bytes) -> None:
    """Write a message: a JSON object, and bytes. `receive` reads it on the other side."""
    text = json.dumps(head).encode()
    pipe.write(HEAD.pack(len(text), len(content)) + text)
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes], until: float | None = None) -> Answer:
    """Read a message, and return its JSON object and the bytes after it. The pipe holds no more than this message,
    because the other side sends the next one only after an answer.

    Args:
        until: value of `time.monotonic()` at which to give up; None: never, and the message may have any size.

    Raises:
        TimeoutError: the message did not come in time.
        EOFError: the pipe ended, or the message is larger than `LARGEST_ANSWER`.
    """
    message, size = bytearray(), HEAD.size
    poll = select.poll()  # `select.select` takes no file descriptor above 1023
    poll.register(pipe, select.POLLIN)
    while len(message) < size:
        if until is not None and not poll.poll(1000 * max(0.0, until - time.monotonic())):
            raise TimeoutError
        piece = os.read(pipe.fileno(), MiB)
        if not piece:
            raise EOFError
        message += piece
        if size == HEAD.size and len(message) >= size:
            size += sum(HEAD.unpack_from(message))  # numbers of bytes of the JSON object and of what follows
            if until is not None and size > LARGEST_ANSWER:
                raise EOFError
    text, _ = HEAD.unpack_from(message)
    content = HEAD.size + text
    return json.loads(message[HEAD.size : content]), bytes(message[content:])


def serve(name: str, seconds: int, memory: int) -> None:
    """Answer the requests of the parent process until it ends or closes the pipe.

    Args:
        name: `module:function` of a function that returns the function which answers requests.
        seconds: processor time that a request may take.
        memory: MiB of address space that the process may take in addition to what it has now.
    """
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    null_device = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # answers go through a copy; what a library prints must not mix with them
        os.dup2(null_device, number)
    module, _, function = name.partition(":")
    work: Work = getattr(importlib.import_module(module), function)()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        present_bytes = int(file.read().split()[0]) * resource.getpagesize()
    set_limit(resource.RLIMIT_AS, present_bytes + memory * MiB)
    os.dup2(null_device, 2)  # errors from here on are those of requests, and are not shown
    send(answers, {}, b"")  # ready for requests
    while True:
        try:
            request, _ = receive(requests)
            used_seconds = int(time.process_time())
            set_limit(resource.RLIMIT_CPU, used_seconds + 1 + seconds)
            head, content = work(request)
            send(answers, head, content)
        except EOFError:
            os._exit(0)
        except MemoryError:
            os._exit(MEMORY_BROKEN)


def set_limit(kind: int, value: int) -> None:
    """Set a limit of the module `resource`, or the largest one that the user may set (`ulimit -H`)."""
    _, hard_limit = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit), hard_limit))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
