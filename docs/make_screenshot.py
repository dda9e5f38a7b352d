"""Makes docs/pictures/report.png, the top of a training's report page: `python docs/make_screenshot.py`.

Trains the embedded default for some minutes on a CPU, and takes the picture with Playwright and Chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "pictures" / "report.png"
WIDTH, HEIGHT = 1280, 900
TRAINING = ["stage=finetune", "max_steps=120", "val.every=20", "val.limit=64", "export.enabled=false"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outputs" / "finetune"
        train = [sys.executable, "-m", "llava_fsdp", "train", "--nproc-per-node", "2"]
        for words in (["stage=pretrain", "max_steps=60"], TRAINING):
            subprocess.run([*train, *words], check=True, cwd=folder)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("google-chrome")
            )
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto((output / "report.html").as_uri())
            page.screenshot(path=PICTURE)
            browser.close()


if __name__ == "__main__":
    main()
