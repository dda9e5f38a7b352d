"""What tests make ranks do: see `runs.py`, `trap=`. Called in a rank before its training begins."""

import json
import os
from pathlib import Path
from typing import Any


def note_samples(notes: str) -> None:
    """Write every record that this rank reads for a step, by step: what was learned from, not what was planned."""
    from llava_fsdp.data.batching.step_dataset import Steps

    rank, attempt = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = Path(notes) / f"samples-{rank}-{attempt}-{os.getpid()}.jsonl"
    prepare, load = Steps.prepare, Steps.load
    read: list[int] = []

    def noted_load(self: Steps, number: int) -> Any:
        read.append(number)
        return load(self, number)

    def noted_prepare(self: Steps, step: int) -> Any:
        read.clear()
        prepared = prepare(self, step)
        with path.open("a") as file:
            file.write(json.dumps({"rank": int(rank), "step": step + 1, "records": sorted(read)}) + "\n")
        return prepared

    Steps.prepare, Steps.load = noted_prepare, noted_load


def no_network() -> None:
    """Only this machine may be spoken to; the word `network` on the screen is the proof of an attempt."""
    import socket
    import sys

    def refuse(host: object) -> None:
        if host not in ("127.0.0.1", "localhost", "::1", "", None, socket.gethostname()):
            print(f"network: {host}", file=sys.stderr, flush=True)
            raise OSError(f"this test has no network: {host}")

    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def local_connect(self: Any, address: Any) -> Any:
        if isinstance(address, tuple):
            refuse(address[0])
        return connect(self, address)

    def local_look_up(host: Any, *rest: Any, **more: Any) -> Any:
        refuse(host)
        return look_up(host, *rest, **more)

    socket.socket.connect, socket.getaddrinfo = local_connect, local_look_up


def full_log(first: int, last: int) -> None:
    """No row can be written from step `first` to step `last`: the disk is full."""
    import errno

    from llava_fsdp.runtime.files.jsonl import RowWriter

    write = RowWriter.write
    tried = [0]

    def failing(self: RowWriter) -> OSError | None:
        if self.path.name != "metrics.jsonl":
            return write(self)
        tried[0] += 1
        full = first <= tried[0] <= last
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else write(self)

    RowWriter.write = failing


def note_resources(notes: str) -> None:
    """Write what this process holds behind every step: bytes of memory, open files and threads."""
    import gc

    from llava_fsdp.train.events.reporting.reports import Reports

    told = Reports.after_step
    gc.freeze()  # what was imported stays, and need not be walked through every time

    def noted(self: Reports, result: Any) -> None:
        told(self, result)
        gc.collect()
        held = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        row = {
            "memory": int(held["Anonymous"].split()[0]) * 1024,  # exact; statm's counters lag behind
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        with open(notes, "a") as file:
            file.write(json.dumps(row) + "\n")

    Reports.after_step = noted
