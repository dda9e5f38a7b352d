"""Python commands that start in a moment: forked from a process that has imported torch, transformers and the project.

`install` puts `Popen` into the place of `subprocess.Popen`. A command `python [-u] [-P] -m MODULE WORDS...` or `python
SCRIPT WORDS...` of this interpreter is then forked from the nursery, a process that was itself forked before the first
test; any other command, such as `python -c`, starts as ever. Pipes, folder, environment, session, signals and exit code
are those of a process that was started. torchrun has a nursery of its own, from which its ranks are forked. Processes
of ranks and commands that have no nursery are forked from these themselves, if they use no torch (`NO_TORCH`).
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import itertools
import json
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any

MODULES = (
    "numpy", "PIL.Image", "torch.distributed.run", "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama", "transformers.models.llava.modeling_llava", "llava_fsdp.train.main",
)  # fmt: skip
STARTS_OTHERS = ("torch.distributed.run", "llava_fsdp.sweep")
MODULES_OF_NURSERY = ("llava_fsdp.", "torch.distributed.run")
NO_TORCH = ("llava_fsdp.runtime.process.", "llava_fsdp.train.events.reporting.live_page")
FLAGS = ("-u", "-P")
READ_AT_IMPORT = ("PYTHONPATH", "PYTHONSAFEPATH", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables that a process which has imported everything cannot take up any more."""
PR_SET_CHILD_SUBREAPER, PR_SET_NAME = 36, 15
LARGEST = 1 << 20
EXECUTABLE = sys.executable
LIBC = ctypes.CDLL(None)
OriginalPopen = subprocess.Popen


class Popen(OriginalPopen):
    """`subprocess.Popen`, with commands of this interpreter forked from the nursery."""

    nursery: "Nursery | None" = None
    """Of this process."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, *rest: Any):
        cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, session, group = rest
        environment = dict(os.environ if env is None else env)
        has_nursery = self.nursery is not None and self.nursery.owner == os.getpid()
        plain = not (executable or preexec_fn or pass_fds or shell)
        if not plain or not is_warm(args, environment, has_nursery):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)
        order = {"words": list(map(str, args[1:])), "cwd": str(cwd or os.getcwd()), "env": environment}
        order |= {"session": session, "group": group}
        files = [n if f == -1 else f for n, f in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = self.nursery.start(order, files) if has_nursery else fork(order, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def is_warm(args: Any, environment: dict[str, str], has_nursery: bool) -> bool:
    """Whether a command can be forked, from this process's nursery or else from this process."""
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2 or args[0] != EXECUTABLE:
        return False
    first, *more = (*itertools.dropwhile(FLAGS.__contains__, map(str, args[1:])), "")
    known = first == "-m" and more and more[0].startswith(MODULES_OF_NURSERY if has_nursery else NO_TORCH)
    same = all(environment.get(name) == os.environ.get(name) for name in READ_AT_IMPORT)
    return bool((known or (has_nursery and first.endswith(".py"))) and same and "COLD" not in environment)


def fork(order: dict[str, Any], files: list[int]) -> int:
    """The pid of a new child of this process, a copy of it that runs the order with `files` as its 0, 1 and 2."""
    child = os.fork()
    if child == 0:
        gc.freeze()  # to collect a process group would wait for threads, which a fork does not copy
        kept = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]  # noqa: F841 - they would write what they buffer
        for logger in [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]:
            getattr(logger, "handlers", []).clear()
        forget_state()
        become(order, files, [])
    return child


class Nursery:
    """A forked process that starts commands as children of the process which it was forked from."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                forget_parent(theirs)
                serve(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def start(self, order: dict[str, Any], files: list[int]) -> int:
        """The pid of a new child of this process, which runs the order with `files` as its 0, 1 and 2."""
        with self.lock:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)  # it becomes our child when the process between ends
            socket.send_fds(self.socket, [json.dumps(order).encode()], files)
            answer = self.socket.recv(16)
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0)
        return int(answer)

    def close(self) -> None:
        self.socket.close()
        os.waitpid(self.pid, 0)


def forget_parent(kept: socket.socket) -> None:
    """Leave behind what a process that was started would not have: files, signals' handlers, records of children."""
    faulthandler.disable()
    open_streams(unbuffered=False)  # pytest's have files of their own
    for logger in [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", [])[:]:
            if type(handler).__module__ == "_pytest.logging":
                logger.removeHandler(handler)
    close_files([own for own in open_files() if own is not kept])
    os.closerange(3, kept.fileno())
    os.closerange(kept.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    forget_state()


def forget_state() -> None:
    """Set what Python keeps of signals, children and the end of the process to what a process begins with."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    atexit._clear()
    multiprocessing_util._finalizer_registry.clear()
    atexit.register(multiprocessing_util._exit_function)
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)


def open_files() -> list[io.FileIO | socket.socket]:
    """Python's files and sockets, but for standard input, output and error."""
    gc.unfreeze()  # what is frozen is not listed
    found = [own for own in gc.get_objects() if issubclass(type(own), (io.FileIO, socket.socket))]
    gc.freeze()
    return [own for own in found if not getattr(own, "closed", False) and own.fileno() > 2]


def close_files(files: list[io.FileIO | socket.socket]) -> None:
    """Close files as Python's objects, so that none of them writes to, or closes, what gets its number later.

    A message in the log of a rank would otherwise go into a connection between ranks, which then wait forever.
    """
    for own in files:
        with contextlib.suppress(OSError):
            own.close()


def serve(orders: socket.socket) -> None:
    """Start what is ordered, until the process that orders has ended."""
    Popen.nursery = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    opened: list[io.FileIO | socket.socket] | None = None
    while True:
        message, files, _, _ = socket.recv_fds(orders, LARGEST, 3)
        if not message:
            return
        if opened is None:
            opened = import_all()
        answer, told = os.pipe()
        between = os.fork()
        if between == 0:
            between, child = os.getpid(), os.fork()
            if child == 0:
                while os.getppid() == between:
                    time.sleep(0.0005)
                become(json.loads(message), files, opened)
            os.write(told, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        orders.send(os.read(answer, 16))
        for file in (answer, told, *files):
            os.close(file)


def import_all() -> list[io.FileIO | socket.socket]:
    """Import what commands need, and read the recipes that most trainings compare theirs with; the files that are open
    then."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    recipes = importlib.import_module("llava_fsdp.config.command_line.recipes")
    for stage in ("pretrain", "finetune"):
        recipes.composed(f"stage={stage}", "model=tiny", "data=llava_json")  # cached: a quarter of a second of a start
    importlib.import_module("torch").set_num_threads(1)  # a forked process must not inherit a pool of threads
    gc.collect()
    return open_files()


def become(order: dict[str, Any], files: list[int], opened: list[io.FileIO | socket.socket]) -> None:
    """Run a command to its end, as its own process, without the files that this one has opened."""
    code = 1
    try:
        close_files(opened)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        if order["session"]:
            os.setsid()
        if order["group"] != -1:
            os.setpgid(0, order["group"])
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        random.seed()
        if (rank := order["env"].get("RANK")) is not None:
            LIBC.prctl(PR_SET_NAME, f"rank-{rank}".encode())
        flags = list(itertools.takewhile(FLAGS.__contains__, order["words"]))
        open_streams("-u" in flags)
        code = run(order["words"][len(flags) :], "-P" in flags)
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def open_streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        stream = open(number, "w", encoding="utf-8", errors=errors, closefd=False)
        stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for handler in [reference() for reference in logging._handlerList]:  # of libraries, which have the old stream
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr


def run(words: list[str], safe_path: bool) -> int:
    """The exit code of `python WORDS...`, or of `python -P WORDS...`."""
    module = words[1] if words[0] == "-m" else ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    if not safe_path:
        sys.path.insert(0, os.getcwd() if module else str(Path(words[0]).resolve().parent))
    if module in STARTS_OTHERS:
        install()
    try:
        if module:
            sys.argv = words[1:]
            runpy._run_module_as_main(module)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    return 0


def install() -> None:
    """Have `subprocess` start commands from a nursery of this process."""
    Popen.nursery = Nursery()
    subprocess.Popen = Popen
    handler = sys.modules.get("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    if handler is not None:
        handler.Popen = Popen
