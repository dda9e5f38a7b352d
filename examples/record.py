"""Writes what an example left as its result, with an image of its page: `python examples/record.py NAME FOLDER [PAGE]`.

Reads the commands that `run` of common.sh kept in FOLDER/commands, and every run below FOLDER. Writes NAME.json and
NAME.png into examples/results, or into the folder that EXAMPLE_RESULTS names; docs/make_examples.py writes both into
docs/examples.md. Without Playwright or a browser there is no image, and the result says so.
"""

import io
import json
import os
import re
import shutil
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))  # the script that says machine and commit of every result

from provenance import machine  # noqa: E402

from llava_fsdp.report.results import read_results  # noqa: E402

STEPS = 20
"""Last steps whose mean loss is a run's result, as on its own page."""
LINES = 40
"""Last lines of a command's output that are kept."""
WIDTH, HEIGHT = 1000, 840
"""Of the image, in pixels."""
COLOURS = 64
"""Of the image: a page has few, and each has a share of the file's size."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> None:
    name, folder, *page = sys.argv[1:]
    to = Path(os.environ.get("EXAMPLE_RESULTS", HERE / "results"))
    to.mkdir(parents=True, exist_ok=True)
    image = to / f"{name}.png"
    missing = take_image(Path(page[0]), image) if page else "the example has no page"
    if missing:
        image.unlink(missing_ok=True)
        print(f"no image: {missing}", file=sys.stderr)
    found = runs(Path(folder))
    result = {
        "name": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": ", ".join(sorted({row.pop("commit") for row in found.values()})),
        "machine": machine(),
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "image": image.name if not missing else None,
        "commands": commands(Path(folder)),
        "runs": found,
        "files": {str(file.relative_to(folder)): file.stat().st_size for file in weights(Path(folder))},
    }
    (to / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(to / f"{name}.json")


def commands(folder: Path) -> list[dict[str, Any]]:
    """The commands in their order; those that an interrupted example did not end are left out."""
    found = []
    for ended in sorted((folder / "commands").glob("*.ended")):
        code, seconds = ended.read_text().split()
        words = ended.with_suffix(".words").read_text().split("\0")[:-1]
        text = as_shown(ended.with_suffix(".txt").read_text(errors="replace"))
        found.append(
            {"words": words, "exit_code": int(code), "seconds": int(seconds), "output": text.splitlines()[-LINES:]}
        )
    return found


def as_shown(text: str) -> str:
    """An output as a terminal shows it at the end, with paths relative to the environment or the current folder."""
    for folder in (sys.prefix, Path.cwd()):
        text = text.replace(f"{folder}/", "")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")).strip("\n")


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """For each run, by its folder and in the order of their starts: its losses, its starts and how it ended."""
    found = {}
    for first in sorted(folder.rglob("starts.jsonl"), key=lambda path: lines_of(path)[0]["time"]):
        run = first.parent
        rows = {row["step"]: row for row in lines_of(run / "metrics.jsonl")}
        starts = lines_of(first)
        found[str(run.relative_to(folder))] = {
            "status": json.loads((run / "run_status.json").read_text())["status"],
            "starts": [{"step": start["step"], "ranks": start["ranks"]} for start in starts],
            "commit": starts[-1]["commit"],
            "trains": starts[-1]["trains"],
            "loss": read_results(run, STEPS).loss,
            "losses": [rows[step]["loss"] for step in sorted(rows)],
            "lr": max(row["lr"] for row in rows.values()),
            "seconds": round(sum(row["seconds"] for row in rows.values()), 1),
        }
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def weights(folder: Path) -> list[Path]:
    """Files of weights that a run or an export leaves; those of checkpoints are for continuing only."""
    return [file for file in sorted(folder.rglob("*.safetensors")) if "checkpoints" not in file.parts]


def take_image(page: Path, to: Path) -> str:
    """The top of a page as an image; why there is none, or an empty text."""
    try:
        from PIL import Image
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        return f"{error.name} is not installed"
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        return f"none of {', '.join(BROWSERS)} is on PATH"
    with sync_playwright() as playwright:
        # as root, or in a container, Chromium has no sandbox of its own; the page is the example's
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        shown.goto(page.resolve().as_uri())
        taken = shown.screenshot()
        browser.close()
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLOURS).save(to, optimize=True)
    return ""


if __name__ == "__main__":
    main()
