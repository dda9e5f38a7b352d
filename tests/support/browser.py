"""A real browser without a window, for tests of pages; nothing is downloaded for it."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The browser that PATH has."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Playwright's browser; the test is skipped where there is no such program."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = find_chromium()
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    with playwright.sync_playwright() as started:
        # as root, or in a container, Chromium has no sandbox of its own to give; the pages are the tests' own
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()
            end_driver()


def end_driver() -> None:
    """End Playwright's driver. It would end when its input does, but processes that other tests have forked may have
    that pipe open, too, and Playwright would then wait for it forever."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"playwright" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGTERM)


@contextlib.contextmanager
def page(width: int = 1200, height: int = 900) -> Iterator[Any]:
    """An empty page of a browser of its own."""
    with launched() as browser:
        yield browser.new_page(viewport={"width": width, "height": height})
