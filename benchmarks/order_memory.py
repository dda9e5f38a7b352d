"""What memory a process takes to know its samples and their order: `python benchmarks/order_memory.py`.

Writes the columns of an index directly, without records. Then processes open them one after the other, and each takes
1000 steps: it chooses their samples, counts them, and assigns them to 8 ranks. Nothing is read or encoded. Writes JSON.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from provenance import commit, machine

MIB = 1 << 20
BLOCK = 1 << 20
STEPS, GLOBAL_BATCH_SIZE, RANKS = 1000, 256, 8
SAMPLERS = "shuffle", "computed_shuffle"
LOOKS_EVERY = 0.005
"""Seconds between two looks at the memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent / "results")
    parser.add_argument("--records", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--scratch", type=Path, default=None, help="a folder with room for the columns: 80 B a record")
    parser.add_argument("--child", nargs=3, metavar=("FOLDER", "RECORDS", "SAMPLER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, count, sampler = args.child
        return take_steps(Path(folder), int(count), sampler)
    result: dict[str, Any] = {
        "question": "what memory does a process take to know its samples and their order?",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/order_memory.py", *sys.argv[1:]]),
        "machine": machine(),
        "steps": STEPS,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "memory": "MiB above the process before it opened the index; private: anonymous; mapped: pages of files",
        "rows": [],
    }
    for count in args.records:
        for left_out in (0, 1):
            with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
                write_index(Path(scratch), count, left_out)
                for sampler in SAMPLERS:
                    for process in ("first", "second"):
                        row = {"records": count, "left_out": left_out, "sampler": sampler, "process": process}
                        row |= measure(Path(scratch), count, sampler)
                        print(json.dumps(row), flush=True)
                        result["rows"].append(row)
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.out / f"order-memory-{result['date']}.json"
    name.write_text(json.dumps(result, indent=1) + "\n")


def write_index(folder: Path, count: int, left_out: int) -> None:
    """Write the folders of an index of `count` records with an image each; the middle one of them has no labels if
    `left_out` is 1."""
    from llava_fsdp.data.index.integrity import write_done
    from llava_fsdp.data.index.record_store import DataSource, Part, SourceFile
    from llava_fsdp.data.index.worker_pool import write_column
    from llava_fsdp.data.records.problems import BITS, Kind

    def numbers(low: int, high: int) -> Iterator[np.ndarray]:
        dice = np.random.default_rng(0)
        for begin in range(0, count, BLOCK):
            yield dice.integers(low, high, min(BLOCK, count - begin), dtype=np.int32)

    def flags() -> Iterator[np.ndarray]:
        for begin in range(0, count, BLOCK):
            block = np.zeros(min(BLOCK, count - begin), dtype=np.uint32)
            if left_out and begin <= count // 2 < begin + BLOCK:
                block[count // 2 - begin] = BITS[Kind.no_labels]
            yield block

    def offsets() -> Iterator[np.ndarray]:
        for begin in range(0, count, BLOCK):
            yield np.arange(begin, min(begin + BLOCK, count), dtype=np.int64) * 160

    empty = {"records": ["first_picture"], "pictures-0.0": ["width", "height", "stored_height"]}  # opened, not used
    ranges = {
        "texts": {"size": (100, 160), "line": (1, 2)},
        "records": {"pictures": (1, 2), "words": (10, 100)},
        "pictures-0.0": {},
        "encoded-0": {
            "length": (600, 1000), "labels": (10, 300), "images": (1, 2), "tiles": (1, 2), "image_tokens": (576, 577),
            "positions_cut": (0, 1), "labels_cut": (0, 1),
        },
    }  # fmt: skip
    file = SourceFile("data", str(folder / "data.jsonl"), None)
    facts = {
        "sources": [asdict(DataSource("data", file.path, (file,)))], "fingerprint": "0", "max_record_bytes": 4 << 20,
        "parts": [asdict(Part(0, file, file.path, "0", 0, count))],
    }  # fmt: skip
    for name, columns in ranges.items():
        part = folder / "state" / name
        part.mkdir(parents=True)
        for column, (low, high) in columns.items():
            write_column(part / f"{column}.npy", numbers(low, high), np.dtype(np.int32))
        if name == "texts":
            write_column(part / "offset.npy", offsets(), np.dtype(np.int64))
        else:
            write_column(part / "flags.npy", flags(), np.dtype(np.uint32))
        for column in empty.get(name, []):
            np.save(part / f"{column}.npy", np.zeros(1, dtype=np.int64))
        write_done(part, facts)


def measure(folder: Path, count: int, sampler: str) -> dict[str, Any]:
    """Run a process that takes the steps, and return what it prints with its greatest private memory."""
    command = [sys.executable, __file__, "--child", str(folder), str(count), sampler]
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is None
        while process.poll() is None:
            peak = max(peak, memory(process.pid).get("RssAnon", 0.0))
            time.sleep(LOOKS_EVERY)
        row = json.loads(process.stdout.read())
    return {**row, "peak_private_mib": round(peak - row.pop("before_mib"), 1)}


def memory(pid: int | str) -> dict[str, float]:
    """Return the resident memory of a process in MiB; empty if it has ended."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile") if name in fields}


def take_steps(folder: Path, count: int, name: str) -> None:
    import torch
    from hydra import compose, initialize_config_dir

    from llava_fsdp.config import Config, Parity, TooLong, config_dir, load
    from llava_fsdp.data.batching.cost_model import CostModel
    from llava_fsdp.data.batching.sampler import open_sampler
    from llava_fsdp.data.batching.step_dataset import Steps
    from llava_fsdp.data.index.build import Index
    from llava_fsdp.data.index.dataset import Records
    from llava_fsdp.data.index.record_store import RecordStore

    words = f"sampler={name}", f"global_batch_size={GLOBAL_BATCH_SIZE}", "tokens_per_micro_batch=16384"
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = load(Config, compose("train", [*words, "data=llava_json", "data.path=data.jsonl"]))
    torch.randperm(1000)
    state = folder / "state"
    parts = state / "records", state / "pictures-0.0", state / "encoded-0"
    before = memory("self")
    begin = time.monotonic()
    index = Index(folder, RecordStore(state / "texts"), *parts, [], np.zeros((1, 0, 0), dtype=np.int64))
    records = Records(index, Parity.exact, TooLong.truncate)
    fingerprint = records.fingerprint
    sampler = open_sampler(records, cfg, RANKS)
    nothing = cast(Any, None)
    steps = Steps(records, sampler, nothing, nothing, cfg, 0, RANKS, CostModel())
    steps.facts(0, sampler.samples(0))
    opened = time.monotonic()
    for step in range(STEPS):
        numbers = sampler.samples(step)
        steps.facts(step, numbers)
        steps.assignment(step, numbers)
    after = memory("self")
    row = {
        "private_mib": round(after["RssAnon"] - before["RssAnon"], 1),
        "mapped_mib": round(after["RssFile"] - before["RssFile"], 1),
        "before_mib": before["RssAnon"],
        "opened_seconds": round(opened - begin, 2),
        "step_ms": round((time.monotonic() - opened) / STEPS * 1000, 2),
        "fingerprint": fingerprint[:8],
    }
    print(json.dumps(row))
    assert len(records) in (count, count - 1)


if __name__ == "__main__":
    main()
