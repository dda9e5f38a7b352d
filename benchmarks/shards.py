"""How fast are images read from each kind of file, and what is read and written for its index?

    python benchmarks/shards.py                          # into benchmarks/results; about five minutes
    python benchmarks/shards.py --images 200 --rounds 3

The same records are written into files of each kind (those of tests/support/containers.py; of S3, on a server of this
machine). Their indexes are made by the command `prepare`, and the bytes that it and its worker processes read and write
are counted by the system (`/proc/self/io`). Then each kind in turn prepares the images of the same records, in random
order, as a training's data worker does. How to read the result is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from data import WORDS, photo
from hydra import compose, initialize_config_dir
from provenance import REPOSITORY, commit, machine

sys.path.insert(0, str(REPOSITORY / "tests" / "support"))
from containers import CONTAINERS, HOLD_IMAGES, write_container
from s3 import s3_server

from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.loader import build_loader
from llava_fsdp.model.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.train.setup.build_model import shape_of

PLAIN = "lines"
"""The kind of which each image is a file of its own; rates are compared with it."""
KINDS = (PLAIN, "parquet with images", "tar", "parquet with compressed images")
REMOTE = ("parquet with images", "tar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", default="640x480")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "question": "how fast are images read from each kind of file, and what does its index cost?",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/shards.py", *sys.argv[1:]]),
        "options": {key: value for key, value in vars(args).items() if key != "out"},
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory() as made, s3_server() as proxy:
        folder = Path(made)
        rows = write_images(folder / "images", args.images, args.size)
        paths = {kind: write_files(kind, folder, rows) for kind in KINDS}
        paths |= {f"{kind} on S3": upload(proxy.upstream, kind, folder) for kind in REMOTE}
        result["index"] = {kind: prepare(path, folder) for kind, path in paths.items()}
        steps = {kind: open_steps(path, folder) for kind, path in paths.items()}
        result["seconds"] = timed(steps, args.rounds)
    plain = statistics.median(result["seconds"][PLAIN]["cpu"])
    result["of_plain_files"] = {
        kind: round(plain / statistics.median(own["cpu"]), 3) for kind, own in result["seconds"].items()
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"shards-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("of_plain_files", "index")}, indent=1))


def write_images(folder: Path, count: int, size: str) -> list[dict[str, Any]]:
    """Write `count` JPEG files, 64 of which differ, and return a record for each."""
    width, height = (int(n) for n in size.split("x"))
    folder.mkdir()
    dice, rows = random.Random(0), []
    files = []
    for number in range(min(64, count)):
        photo(number, width, height).save(folder / "one.jpg", "JPEG", quality=90)
        files.append((folder / "one.jpg").read_bytes())
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(files[number % len(files)])
        turns = [{"from": "human", "value": "<image>\n" + " ".join(dice.choices(WORDS, k=12))}]
        turns.append({"from": "gpt", "value": " ".join(dice.choices(WORDS, k=30))})
        rows.append({"id": str(number), "image": f"{number}.jpg", "conversations": turns})
    return rows


def write_files(kind: str, folder: Path, rows: list[dict[str, Any]]) -> str:
    own = folder / kind.replace(" ", "-")
    write_container(kind, own, rows, folder / "images", 4)
    return f"{own}/*{CONTAINERS[kind][0]}"


def upload(port: int, kind: str, folder: Path) -> str:
    import boto3

    bucket = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{port}").Bucket("bench")
    bucket.create()
    name = kind.replace(" ", "-")
    for file in sorted((folder / name).iterdir()):
        if file.is_file():
            bucket.upload_file(str(file), f"{name}/{file.name}")
    return f"s3://bench/{name}"


def overrides(path: str, folder: Path) -> list[str]:
    name = path.removeprefix(f"{folder}/").replace("/", "-").replace("*", "").replace(":", "")
    images = "null" if any(kind.replace(" ", "-") in path for kind in HOLD_IMAGES) else folder / "images"
    return [
        "data=llava_json", f"data.path='{path}'", f"data.images={images}", f"data.index={folder / f'{name}.index'}",
        f"data.cache={folder / f'{name}.cache'}",
    ]  # fmt: skip


COUNTED = """
import subprocess, sys
from pathlib import Path
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(Path("/proc/self/io").read_text())
sys.exit(code)
"""
"""A process that runs a command, and prints the bytes that the command and its own processes have read and written. The
server of S3 runs in the benchmark's process, and is not counted."""


def prepare(path: str, folder: Path) -> dict[str, float]:
    """Make the index by the command, then run the command again; return seconds, and MB as the system counted them.

    The second run writes what is not the index: its report, its output, and the small model that each run of `prepare`
    exports into a temporary folder.
    """
    start = time.monotonic()
    first = count_bytes(path, folder)
    seconds = time.monotonic() - start
    again = count_bytes(path, folder)
    index, cache = (Path(value.partition("=")[2]) for value in overrides(path, folder)[3:])
    reports = sum(file.stat().st_size for file in index.glob("report.*"))
    made = {
        "read_mb": first["rchar"] / 1e6,
        "written_mb": first["wchar"] / 1e6,
        "written_again_mb": again["wchar"] / 1e6,
        "written_for_the_index_mb": (first["wchar"] - again["wchar"]) / 1e6,
        "index_mb": (size_of(index) - reports) / 1e6,
        "cache_mb": size_of(cache) / 1e6,
        "reports_mb": reports / 1e6,
        "to_disk_mb": first["write_bytes"] / 1e6,
        "seconds": seconds,
    }
    return {name: round(value, 3) for name, value in made.items()}


def count_bytes(path: str, folder: Path) -> dict[str, int]:
    """Run `prepare`, and return what the system counted for it, by the names of /proc/self/io."""
    command = [sys.executable, "-m", "llava_fsdp.prepare", *overrides(path, folder), "format=json"]
    done = subprocess.run([sys.executable, "-c", COUNTED, *command], check=True, stdout=subprocess.PIPE, text=True)
    return {name: int(value) for name, value in (line.split(": ") for line in done.stdout.split("\n") if line)}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def open_steps(path: str, folder: Path) -> Steps:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = load(Config, compose("train", [*overrides(path, folder), "data.image_aspect_ratio=pad"]))
    parts = find_parts(cfg.model)
    shape = shape_of(build_llava(parts, cfg.model, torch.float32))
    return build_loader(cfg, parts.language_folder, parts.vision_folder, shape, 0, 1, torch.device("cpu")).steps


def timed(steps: dict[str, Steps], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return CPU and wall seconds for all images of each kind, of several rounds; the kinds take turns."""
    seconds: dict[str, dict[str, list[float]]] = {kind: {"cpu": [], "wall": []} for kind in steps}
    order = list(range(len(steps[PLAIN].records)))
    for turn in range(rounds):
        random.Random(turn).shuffle(order)
        for kind, own in steps.items():
            cpu, wall = time.process_time(), time.monotonic()
            for begin in range(0, len(order), 32):
                own.records.fetch_ahead(order[begin : begin + 32])
                for number in order[begin : begin + 32]:
                    own.read(number)
            seconds[kind]["cpu"].append(round(time.process_time() - cpu, 4))
            seconds[kind]["wall"].append(round(time.monotonic() - wall, 4))
    return seconds


if __name__ == "__main__":
    main()
