"""How many pictures a second does a core prepare, and how many does a loader deliver?

    python benchmarks/data.py                          # into benchmarks/results; about five minutes
    python benchmarks/data.py FOLDER --sizes 640x480 --pictures 4 --repeats 3 --steps 4

From a file to the tower's bytes: `data.pixels=exact`, `data.pixels=fast`, and transformers' CLIPImageProcessor on the
padded picture, which is what the original runs. How to read the result is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from hydra import compose, initialize_config_dir
from PIL import Image, features
from provenance import REPOSITORY, commit, machine
from rich.console import Console
from rich.table import Table
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from llava_fsdp.config import AspectRatio, Config, Pixels, config_dir, load
from llava_fsdp.data.images.preprocess import Preprocessor, load_image, pad_to_square, read_preprocessor
from llava_fsdp.data.loader import Loader, ModelShape, build_loader, normalize

GOALS = {"exact": 120, "fast": 240}
"""Pictures a second a core, JPEG of quality 90 and 640 x 480, padded to 336."""
GOAL_CASE = ("JPEG", "640x480", "pad")
SIZES = ("336x336", "640x480", "480x640", "1024x768", "2048x1536")
FORMATS: dict[str, dict[str, Any]] = {"JPEG": {"quality": 90}, "PNG": {}, "WEBP": {"quality": 90}}
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": 336,
    "crop_size": 336,
    "do_center_crop": True,
    "do_resize": True,
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
WORDS = "the a man dog bus street red white on of with and sits near large small two table window".split()
Prepare = Callable[[Path], object]


def photo(seed: int, width: int, height: int) -> Image.Image:
    """A picture that costs a decoder what a photo does: smooth areas, edges, texture here and there, little grain.

    Power falls with frequency as in natural images; a tenth of the area has texture, and ellipses have edges. At
    640 x 480 a JPEG of quality 90 has about 56 KB, as one of COCO's.
    """
    dice = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1
    y, x = np.mgrid[0:height, 0:width]

    def cloud(power: float) -> np.ndarray:
        noise = np.fft.rfft2(dice.standard_normal((height, width)))
        made = np.fft.irfft2(noise / frequency**power, s=(height, width))
        return (made - made.mean()) / made.std()

    brightness = 45 * cloud(1.9)
    for _ in range(12):
        centre, radii = dice.random(2) * (width, height), (0.03 + 0.15 * dice.random(2)) * (width, height)
        inside = ((x - centre[0]) / radii[0]) ** 2 + ((y - centre[1]) / radii[1]) ** 2 < 1
        brightness[inside] += dice.normal(0, 35)
    brightness += 9 * cloud(0.6) * (cloud(2.2) > 1.2) + dice.normal(0, 1.8, (height, width))
    channels = [brightness + 18 * cloud(2.2) + level for level in (125, 117, 104)]
    return Image.fromarray(np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8))


# What a core does


def measure(options: argparse.Namespace, work: Path, preprocessor: Preprocessor, console: Console) -> list[dict]:
    rows = []
    for size in options.sizes:
        width, height = (int(n) for n in size.split("x"))
        pictures = [photo(options.seed + n, width, height) for n in range(options.pictures)]
        for kind, how in FORMATS.items():
            files = [work / f"{size}-{n}.{kind.lower()}" for n in range(len(pictures))]
            for picture, file in zip(pictures, files, strict=True):
                picture.save(file, kind, **how)
            for aspect in (AspectRatio.pad, AspectRatio.square):
                ways = variants(preprocessor, aspect, work)
                row = {"format": kind, "size": size, "aspect": aspect.value}
                row["bytes"] = round(statistics.mean(f.stat().st_size for f in files))
                row |= {"differences": compare(files, preprocessor, ways)}
                row["seconds"] = timed(files, ways, options.repeats)
                rows.append(row)
                rates = ", ".join(f"{way} {per_second(row, way):.0f}" for way in ways)
                console.print(f"{kind} {size} {aspect.value} ({row['bytes'] / 1000:.0f} kB): {rates} pictures/s")
    return rows


def variants(preprocessor: Preprocessor, aspect: AspectRatio, folder: Path) -> dict[str, Prepare]:
    theirs = CLIPImageProcessorPil.from_pretrained(folder)

    def processor(file: Path) -> np.ndarray:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
        shown = pad_to_square(picture, preprocessor.mean_colour) if aspect is AspectRatio.pad else picture
        return np.asarray(theirs(shown, return_tensors="np")["pixel_values"][0])

    return {
        "exact": lambda file: load_image(file, preprocessor, aspect, "", Pixels.exact),
        "fast": lambda file: load_image(file, preprocessor, aspect, "", Pixels.fast),
        "processor": processor,
    }


def compare(files: list[Path], preprocessor: Preprocessor, ways: dict[str, Prepare]) -> dict[str, float]:
    """Equal first: the exact path must be the processor's, to the bit; of the fast one the mean difference in bytes."""
    table, far = torch.from_numpy(preprocessor.pixel_table()), []
    for file in files:
        exact, fast = np.asarray(ways["exact"](file)), np.asarray(ways["fast"](file))
        values = normalize(torch.from_numpy(exact)[None], table)[0].numpy()
        if not np.array_equal(values, ways["processor"](file)):
            raise SystemExit(f"{file.name}: data.pixels=exact is not what CLIPImageProcessor makes; nothing was timed")
        far.append(np.abs(exact.astype(int) - fast).mean())
    return {"lean_mean": float(np.mean(far)), "lean_worst_picture": float(np.max(far))}


def timed(files: list[Path], ways: dict[str, Prepare], repeats: int) -> dict[str, list[float]]:
    """CPU seconds a picture, each the mean over all files; the ways take turns."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats):
        for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            began = time.process_time()
            for file in files:
                ways[way](file)
            seconds[way].append((time.process_time() - began) / len(files))
    return seconds


def per_second(row: dict, way: str, statistic: Callable = min) -> float:
    return 1 / statistic(row["seconds"][way])


def together(files: list[Path], preprocessor: Preprocessor, repeats: int, processes: int) -> dict[str, list[float]]:
    """The same with several processes at once: CPU seconds a picture, by way, of each process its least."""
    context, found = multiprocessing.get_context("fork"), {}
    for way in ("exact", "fast"):
        with context.Pool(processes) as pool:
            jobs = [pool.apply_async(alone, (files, preprocessor, Pixels(way), repeats)) for _ in range(processes)]
            found[way] = [min(job.get()) for job in jobs]
    return found


def alone(files: list[Path], preprocessor: Preprocessor, pixels: Pixels, repeats: int) -> list[float]:
    way = {"way": lambda file: load_image(file, preprocessor, AspectRatio.pad, "", pixels)}
    return timed(files, way, repeats)["way"]


# What a loader delivers


def deliver(options: argparse.Namespace, work: Path) -> list[dict]:
    """Whole steps through the loader: texts tokenized, pictures read, micro-batches laid out, no model."""
    count = options.steps * options.batch
    write_records(work, count, options.seed)
    rows: list[dict] = []
    cases = [(workers, pixels) for workers in options.workers for pixels in ("exact", "fast")]
    for _ in range(options.repeats_of_loader):
        for workers, pixels in cases:
            loader = open_loader(work, options, workers, pixels)
            before, began = cpu_seconds(), time.perf_counter()
            images = sum(step.facts.images for step in map(loader.agree, loader.prepared(0)))
            assert images == count
            wall, cpu = time.perf_counter() - began, cpu_seconds() - before
            rows.append({"workers": workers, "pixels": pixels, "images": images, "wall": wall, "cpu": cpu})
    return rows


def cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def write_records(work: Path, count: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    files = [f"loader-{n}.jpeg" for n in range(min(count, 64))]
    for n, name in enumerate(files):
        photo(seed + 1000 + n, 640, 480).save(work / name, "JPEG", quality=90)
    records = [
        {
            "id": f"{n}",
            "image": files[n % len(files)],
            "conversations": [
                {"from": "human", "value": "<image>\n" + " ".join(dice.choice(WORDS, 12))},
                {"from": "gpt", "value": " ".join(dice.choice(WORDS, 60))},
            ],
        }
        for n in range(count)
    ]
    (work / "records.json").write_text(json.dumps(records))


def open_loader(work: Path, options: argparse.Namespace, workers: int, pixels: str) -> Loader:
    values = [
        "data=llava_json", f"data.path={work / 'records.json'}", f"data.images={work}", f"data.workers={workers}",
        f"data.pixels={pixels}", f"global_batch_size={options.batch}", f"micro_batch_size={min(8, options.batch)}",
        f"max_steps={options.steps}", "data.max_length=2048",
    ]  # fmt: skip
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = load(Config, compose("train", values))
    shape = ModelShape(image_tokens=576, image_size=336, max_length=2048, vocab_size=100_000)
    language = REPOSITORY / "src" / "llava_fsdp" / "assets" / "tiny-llama"
    return build_loader(cfg, language, work, shape, 0, 1, torch.device("cpu"))


# What is written


def main() -> None:
    options = parse()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "question": "pictures a second that a core prepares, and that a loader delivers",
        "machine": machine(),
        "shared": "the machine has other work; CPU seconds are compared, wall seconds say little",
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/data.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": sys.version.split()[0],
            "pillow": PIL.__version__,
            "libjpeg_turbo": features.version("libjpeg_turbo"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "goals": {"case": GOAL_CASE, "pictures_per_second_per_core": GOALS},
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "preprocessor_config.json").write_text(json.dumps(CLIP))
        preprocessor = read_preprocessor(work)
        report["rows"] = measure(options, work, preprocessor, console)
        goal = next((r for r in report["rows"] if (r["format"], r["size"], r["aspect"]) == GOAL_CASE), None)
        if goal is not None:
            report["goals"]["reached"] = {way: per_second(goal, way) for way in GOALS}
            files = sorted(work.glob(f"{GOAL_CASE[1]}-*.jpeg"))
            report["two_processes"] = together(files, preprocessor, options.repeats, 2)
        report["loader"] = deliver(options, work)
    write(report, options.out, console)


def write(report: dict, folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"data-{report['date']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("format", "size", "aspect", "kB", "exact /s", "fast /s", "processor /s", "fast differs by")
    for row in report["rows"]:
        rates = [f"{per_second(row, w):.0f} ({per_second(row, w, statistics.median):.0f})" for w in row["seconds"]]
        far = f"{row['differences']['lean_mean']:.2f} of 255"
        table.add_row(row["format"], row["size"], row["aspect"], f"{row['bytes'] / 1000:.0f}", *rates, far)
    table.caption = "pictures a CPU second: best (median) of the repeats"
    console.print(table)
    for way, seconds in report.get("two_processes", {}).items():
        console.print(
            f"two processes at once, {way}: {', '.join(f'{1 / s:.0f}' for s in seconds)} pictures a CPU second"
        )
    for row in best_of(report["loader"]):
        rates = f"{row['images'] / row['wall']:.0f} a second, {row['images'] / row['cpu']:.0f} a CPU second"
        console.print(f"loader, {row['workers']} workers, {row['pixels']}: {rates}")
    console.print(f"{path}{' and .png' if draw(report, path.with_suffix('.png')) else ', no picture: no matplotlib'}")


def best_of(rows: list[dict]) -> list[dict]:
    """Of each case the run with the least CPU seconds."""
    cases = dict.fromkeys((r["workers"], r["pixels"]) for r in rows)
    return [min((r for r in rows if (r["workers"], r["pixels"]) == case), key=lambda r: r["cpu"]) for case in cases]


def draw(report: dict, path: Path) -> bool:
    """Pictures a CPU second by format and size, the goals as lines; and what the loader delivers."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in report["rows"] if r["aspect"] == "pad"]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 9), layout="constrained")
    for offset, way in enumerate(("exact", "fast", "processor")):
        places = [n + 0.27 * (offset - 1) for n in range(len(rows))]
        above.bar(places, [per_second(r, way) for r in rows], 0.25, color=f"C{offset}", label=way)
    for offset, (way, goal) in enumerate(GOALS.items()):
        above.axhline(goal, color=f"C{offset}", linestyle=":", label=f"goal of {way} for JPEG 640x480")
    names = [f"{r['format']}\n{r['size']}\n{r['bytes'] / 1000:.0f} kB" for r in rows]
    above.set(xticks=range(len(rows)), xticklabels=names, ylabel="pictures a CPU second", title="one core, pad to 336")
    above.tick_params(axis="x", labelsize=7)
    above.legend()
    found = best_of(report["loader"])
    for offset, (clock, label) in enumerate((("wall", "a second"), ("cpu", "a CPU second, workers and main process"))):
        places = [n + 0.4 * offset - 0.2 for n in range(len(found))]
        below.bar(places, [r["images"] / r[clock] for r in found], 0.38, color=f"C{offset + 3}", label=label)
    names = [f"{r['workers']} workers\n{r['pixels']}" for r in found]
    below.set(xticks=range(len(found)), xticklabels=names, ylabel="pictures", title="the loader, JPEG 640x480")
    below.legend()
    figure.suptitle(f"{report['machine']['device']}, {report['machine']['cpus']} cores, shared; {report['date']}")
    figure.savefig(path, dpi=110)
    return True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="WIDTHxHEIGHT")
    parser.add_argument("--pictures", type=int, default=6, help="different pictures of each size and format")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=32, help="samples a step of the loader")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats-of-loader", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
