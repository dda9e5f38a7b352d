"""What memory an index takes to make, and to train from: `python benchmarks/index_memory.py`.

Makes datasets of ever more records, a tenth of them with a picture, prepares each with the embedded model, and watches
all processes together. Then opens the million with a DataLoader of 4 workers. Writes JSON and a picture.
"""

import argparse
import contextlib
import datetime
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from capped import without
from matplotlib import pyplot
from PIL import Image
from provenance import commit, machine

WORDS = "red green blue circle square triangle left right of the a is what colour how many small large".split()
PICTURES = 64
EVERY = 0.2
"""Seconds between two looks at the memory."""
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--train", type=int, default=1_000_000, help="records that the DataLoader is opened with")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--files", type=int, default=1, help="number of files of each dataset")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder with room for the datasets")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result = {
        "question": "what memory does an index take to make, and to train from?",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/index_memory.py", *without(sys.argv[1:], "--scratch", "--out")]),
        "options": {k: v for k, v in vars(args).items() if k not in ("scratch", "out")},
        "machine": machine(),
        "prepare_workers": args.workers,
        "memory": "pss: shared pages divided among those who share them, mapped files too; anonymous: without files",
        "prepare": [],
        "train": [],
    }
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        for count in sorted(args.records):
            path = write_dataset(Path(scratch), count, args.files)
            row = prepare(path, args.workers)
            print(json.dumps(row), flush=True)
            result["prepare"].append(row)
            if count in (args.records[0], args.train):
                row = train(path, count)
                print(json.dumps(row), flush=True)
                result["train"].append(row)
            shutil.rmtree(path.parent)
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.out / f"index-memory-{result['date']}"
    name.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, name.with_suffix(".png"))


def write_dataset(scratch: Path, count: int, files: int) -> Path:
    """A folder of JSON Lines files with `count` records of about 45 tokens together."""
    dice = random.Random(count)
    folder = scratch / str(count)
    (folder / "images").mkdir(parents=True)
    for number in range(PICTURES):
        Image.effect_noise((64, 64), 80).convert("RGB").save(folder / "images" / f"{number}.jpg")
    (folder / "data").mkdir()
    for part in range(files):
        with (folder / "data" / f"{part:05d}.jsonl").open("w") as file:
            for number in range(part * count // files, (part + 1) * count // files):
                question, answer = (" ".join(dice.choices(WORDS, k=dice.randrange(3, 9))) for _ in range(2))
                record: dict = {"id": f"record-{number:09d}"}
                if number % 10 == 0:
                    record["image"] = f"{dice.randrange(PICTURES)}.jpg"
                    question = f"<image>\n{question}"
                record["conversations"] = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
                file.write(json.dumps(record) + "\n")
    return folder / "data"


def overrides(path: Path) -> list[str]:
    return ["data=llava_json", f"data.path={path}", f"data.images={path.parent / 'images'}"]


def prepare(path: Path, workers: int) -> dict:
    command = [
        sys.executable,
        "-m",
        "llava_fsdp.prepare",
        *overrides(path),
        f"prepare.workers={workers}",
        "format=json",
    ]
    start, cpu = time.monotonic(), cpu_seconds()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peaks = watch(process)
    assert process.returncode == 0, process.returncode
    index = path.with_name(f"{path.name}.index")
    return {
        "records": int(path.parent.name),
        "files": len(list(path.iterdir())),
        "file_mib": size_of(path),
        "index_mib": size_of(index),
        "seconds": time.monotonic() - start,
        "cpu_seconds": cpu_seconds() - cpu,
        **peaks,
    }


def size_of(folder: Path) -> float:
    """In MiB, with all folders below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MIB


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watch(process: subprocess.Popen) -> dict[str, float]:
    """Most memory of the process and all that it has started, together, in MiB."""
    peaks = {"peak_pss_mib": 0.0, "peak_anonymous_mib": 0.0}
    while process.poll() is None:
        for name, value in memory(process.pid).items():
            peaks[f"peak_{name}"] = max(peaks[f"peak_{name}"], value)
        time.sleep(EVERY)
    return peaks


def memory(pid: int) -> dict[str, float]:
    total = {"pss_mib": 0.0, "anonymous_mib": 0.0}
    for each in family(pid):
        with contextlib.suppress(OSError):  # it has ended
            fields = dict(line.split(":") for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:])
            total["pss_mib"] += int(fields["Pss"].split()[0]) / 1024
            total["anonymous_mib"] += int(fields["Pss_Anon"].split()[0]) / 1024
    return total


def family(pid: int) -> Iterator[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        yield pid
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))


LOAD = """
import sys, time, torch
from hydra import compose, initialize_config_dir
from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.data.loader import build_loader
from llava_fsdp.model.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.train.setup.build_model import shape_of
with initialize_config_dir(str(config_dir()), version_base="1.3"):
    cfg = load(Config, compose("train", [*sys.argv[1:], "data.workers=4"]))
parts = find_parts(cfg.model)
model = build_llava(parts, cfg.model, torch.float32)
folders = parts.language_folder, parts.vision_folder
loader = build_loader(cfg, *folders, shape_of(model), 0, 1, torch.device("cpu"))
steps = map(loader.agree, loader.prepared(0))
next(steps)
print("first", flush=True)
for _ in range(49):
    next(steps)
print("ready", flush=True)
time.sleep(3600)
"""


def train(path: Path, count: int) -> dict:
    """Memory of a process and its 4 DataLoader workers, 50 steps into an epoch."""
    start = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", LOAD, *overrides(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "first\n"
        first = time.monotonic() - start
        assert process.stdout.readline() == "ready\n"
        found = memory(process.pid)
        processes = len(list(family(process.pid)))
        for pid in [*family(process.pid)][1:]:
            psutil.Process(pid).kill()
        process.kill()
    return {"records": count, "seconds_to_first_step": first, "processes": processes, **found}


def draw(result: dict, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    rows = result["prepare"]
    counts = [row["records"] for row in rows]
    for key, label in (("peak_pss_mib", "with mapped files"), ("peak_anonymous_mib", "without")):
        axes.plot(counts, [row[key] for row in rows], marker="o", label=f"prepare, all processes, {label}")
    axes.plot(counts, [row["file_mib"] for row in rows], linestyle=":", color="grey", label="the file of records")
    for row in result["train"][-1:]:
        axes.plot([row["records"]], [row["pss_mib"]], "s", label="training's loader with 4 workers, at rest")
    axes.set(xscale="log", xlabel="records", ylabel="MiB", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"memory against records, {result['prepare_workers']} worker processes")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
