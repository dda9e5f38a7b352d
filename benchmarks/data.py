"""How many images a second does a core prepare? About three minutes on an idle core.

    python benchmarks/data.py                          # --sizes, --images, --repeats

From a file to the vision tower's bytes: `data.pixels=exact`, `data.pixels=fast`, and transformers' CLIPImageProcessor
on the padded image, which is what the original runs. benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from bench import Report, clock, command_line, facts, in_turns, show, spread, write
from PIL import Image, features
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from llava_fsdp.config import AspectRatio, Pixels
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.images.preprocess import Preprocessor, load_image, pad_to_square, read_preprocessor

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
Prepare = Callable[[Path], object]


def photo(seed: int, width: int, height: int) -> Image.Image:
    """An image that costs a decoder what a photo does: smooth areas, edges, texture here and there, little grain.

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


def measure(options: argparse.Namespace, work: Path, preprocessor: Preprocessor) -> list[Report]:
    rows = []
    for size in options.sizes:
        width, height = (int(n) for n in size.split("x"))
        images = [photo(seed, width, height) for seed in range(options.images)]
        for kind, how in FORMATS.items():
            files = [work / f"{size}-{n}.{kind.lower()}" for n in range(len(images))]
            for image, file in zip(images, files, strict=True):
                image.save(file, kind, **how)
            ways = ways_of(preprocessor, work)
            row: Report = {"format": kind, "size": size, "aspect": AspectRatio.pad.value}
            row["bytes"] = round(statistics.mean(f.stat().st_size for f in files))
            row |= {"differences": compare(files, preprocessor, ways)}
            seconds = timed(files, ways, options.repeats)
            row["cpu_seconds"] = {way: spread(taken) for way, taken in seconds.items()}
            rows.append(row)
            print(f"{kind} {size}: {', '.join(f'{way} {per_second(row, way)}' for way in ways)} images/s", flush=True)
    return rows


def ways_of(preprocessor: Preprocessor, folder: Path) -> dict[str, Prepare]:
    theirs = CLIPImageProcessorPil.from_pretrained(folder)

    def processor(file: Path) -> np.ndarray:
        with Image.open(file) as opened:
            image = pad_to_square(opened.convert("RGB"), preprocessor.mean_colour)
        return np.asarray(theirs(image, return_tensors="np")["pixel_values"][0])

    return {
        "exact": lambda file: load_image(file, preprocessor, AspectRatio.pad, "", Pixels.exact),
        "fast": lambda file: load_image(file, preprocessor, AspectRatio.pad, "", Pixels.fast),
        "processor": processor,
    }


def compare(files: list[Path], preprocessor: Preprocessor, ways: dict[str, Prepare]) -> dict[str, float]:
    """How far `fast` is from `exact`, in levels of 255: the mean over all images, and of the worst one.

    Raises:
        SystemExit: `exact` is not the processor to the bit.
    """
    table, far = torch.from_numpy(preprocessor.pixel_table()), []
    for file in files:
        exact, fast = np.asarray(ways["exact"](file)), np.asarray(ways["fast"](file))
        values = normalize(torch.from_numpy(exact)[None], table)[0].numpy()
        if not np.array_equal(values, ways["processor"](file)):
            raise SystemExit(f"{file.name}: data.pixels=exact is not what CLIPImageProcessor makes; nothing was timed")
        far.append(np.abs(exact.astype(int) - fast).mean())
    return {"fast_mean": float(np.mean(far)), "fast_worst_image": float(np.max(far))}


def timed(files: list[Path], ways: dict[str, Prepare], repeats: int) -> dict[str, list[float]]:
    """CPU seconds an image, each the mean over all files; the ways take turns."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu = torch.device("cpu")
    for way in in_turns(list(ways), repeats):
        began = clock(cpu)
        for file in files:
            ways[way](file)
        seconds[way].append((clock(cpu) - began) / len(files))
    return seconds


def per_second(row: Report, way: str) -> str:
    return f"{1 / row['cpu_seconds'][way]['min']:.0f} ({1 / row['cpu_seconds'][way]['median']:.0f})"


def show_rows(rows: list[Report]) -> None:
    heads = ("format, size", "kB", "exact /s", "fast /s", "processor /s", "fast differs by")
    lines = [
        (f"{row['format']} {row['size']}", f"{row['bytes'] / 1000:.0f}",
         *(per_second(row, way) for way in row["cpu_seconds"]), f"{row['differences']['fast_mean']:.2f} of 255")
        for row in rows
    ]  # fmt: skip
    show("images a CPU second: best (median) of the repeats", heads, lines)


def draw(pyplot: Any, report: Report) -> None:
    """Images a CPU second by format and size."""
    rows = report["rows"]
    _, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    for number, way in enumerate(rows[0]["cpu_seconds"]):
        rates = [1 / row["cpu_seconds"][way]["min"] for row in rows]
        axes.bar([place + 0.27 * (number - 1) for place in range(len(rows))], rates, 0.25, label=way)
    names = [f"{row['format']}\n{row['size']}\n{row['bytes'] / 1000:.0f} kB" for row in rows]
    axes.set(xticks=range(len(rows)), xticklabels=names, ylabel="images a CPU second, one core")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="WIDTHxHEIGHT")
    parser.add_argument("--images", type=int, default=6, help="different images of each size and format")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = facts("how many images a second does a core prepare?", options)
    report["versions"] = {"pillow": PIL.__version__, "libjpeg_turbo": features.version("libjpeg_turbo")}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "preprocessor_config.json").write_text(json.dumps(CLIP))
        report["rows"] = measure(options, work, read_preprocessor(work))
    show_rows(report["rows"])
    write(report, "data", options.folder, draw)


if __name__ == "__main__":
    main()
