"""A stand-in for torchrun whose ranks start in a moment: they are forked from a process that has imported everything.

This process takes one order a line on its standard input, forks an agent for each, and answers with the agent's pid.
An agent does what torchrun's does: it gives ranks their environment, ends the others when one fails, starts all anew
while restarts are left, hands on SIGTERM and SIGINT, and returns 1 if anything failed. What is tested with torchrun
itself and what with this stand-in is the test's choice (`runs.py`); the ranks run the same code.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

PR_SET_NAME = 15
HANDED_ON = (signal.SIGTERM, signal.SIGINT)


def serve() -> None:
    """Answers orders until its standard input ends."""
    warm_up()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(obey(json.loads(line)))
        print(pid, flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # an agent says in a file how it ended


def warm_up() -> None:
    import torch
    import transformers.models.clip.modeling_clip
    import transformers.models.llama.modeling_llama
    import transformers.models.llava.modeling_llava  # noqa: F401

    from llava_fsdp.train import main as train  # noqa: F401

    torch.set_num_threads(1)  # a forked process must not inherit a pool of threads


def obey(order: dict) -> int:
    """Run the ranks of an order to their end; what is returned is also in `agent.json`."""
    os.setsid()
    os.chdir(order["folder"])
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["env"])
    code, attempts = 1, []
    try:
        code = supervise(order, attempts)
    except BaseException:
        traceback.print_exc()
    Path("agent.json.tmp").write_text(json.dumps({"code": code, "attempts": attempts}))
    os.replace("agent.json.tmp", "agent.json")
    return code


def supervise(order: dict, attempts: list[dict]) -> int:
    deadline = time.monotonic() + order["timeout"]
    for attempt in range(order["restarts"] + 1):
        ranks = start(order, attempt)
        codes: dict[int, int] = {}  # by rank
        attempts.append(codes)
        asked = watch(ranks, codes, deadline)
        end(ranks, codes, asked or signal.SIGTERM, order["grace"])
        if asked is None and not any(codes.values()):
            return 0
        if asked is not None or time.monotonic() > deadline:
            return 1
    return 1


def start(order: dict, attempt: int) -> dict[int, int]:
    """Fork every rank; pids by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = order["ranks"]
    ranks = {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ.update({
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(order["restarts"]),
                "TORCHELASTIC_RUN_ID": "stand-in",
            })  # fmt: skip
            be_rank(rank, order["words"])
        ranks[rank] = pid
    return ranks


def be_rank(rank: int, words: list[str]) -> None:
    """As a process of torchrun's: a session of its own, and default signals."""
    os.setsid()
    for number in (*HANDED_ON, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{rank}".encode())
    sys.argv = ["train.py", *words]
    code = 1
    try:
        import rank as entry

        entry.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watch(ranks: dict[int, int], codes: dict[int, int], deadline: float) -> signal.Signals | None:
    """Until all ranks have ended, one has failed, or a signal has come, which is returned."""
    asked: list[signal.Signals] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number))

    for number in HANDED_ON:
        signal.signal(number, note)
    while not asked and len(codes) < len(ranks) and not any(codes.values()) and time.monotonic() < deadline:
        reap(ranks, codes)
        time.sleep(0.02)
    return asked[0] if asked else None


def end(ranks: dict[int, int], codes: dict[int, int], number: signal.Signals, grace: float) -> None:
    """Ask the ranks that are left to end, wait, then kill."""
    last = time.monotonic() + grace
    for sent in (number, signal.SIGKILL):
        for rank, pid in ranks.items():
            if rank not in codes:
                os.kill(pid, sent)
        while len(codes) < len(ranks) and (sent == signal.SIGKILL or time.monotonic() < last):
            reap(ranks, codes)
            time.sleep(0.02)


def reap(ranks: dict[int, int], codes: dict[int, int]) -> None:
    """Note the exit codes of ranks that have ended; a signal's is negative."""
    for rank, pid in ranks.items():
        if rank not in codes:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == pid:
                codes[rank] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve()
