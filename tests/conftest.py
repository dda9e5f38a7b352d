"""Fixtures that every test may ask for."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import warm
from harness import RankPool

from llava_fsdp.runtime.text.log import log

if TYPE_CHECKING:
    from lives import Run
    from small import Configure

# One thread: ranks share the cores, and a forked child must not inherit a running thread pool.
torch.set_num_threads(1)
# Files of tests are compiled for pytest, which takes ten seconds, and kept in __pycache__, also where
# PYTHONDONTWRITEBYTECODE is set. Commands and what they import keep to it: see pytest_runtestloop.
KEEPS_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole commands first: files of tests run side by side, and the longest must not be the last to begin."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before the first test, so that commands begin as if there had been none."""
    sys.dont_write_bytecode = KEEPS_NO_BYTECODE
    if session.items and not session.config.option.collectonly:
        gc.collect()
        gc.freeze()  # what was imported stays: a training collects garbage several times
        gc.set_threshold(20_000, 20, 20)  # with Python's own limits a run spends a fifteenth of its time on it
        if not torch.cuda.is_available():
            warm.install()


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_walk_through() -> None:
    """What earlier files of tests have imported and cached is not walked through again whenever garbage is collected.

    Each training and each export does it several times, and it would take 0.15 s each time at the end of a session.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_logger() -> None:
    """The project's logger as it is before a command sets it up, which other tests of this process have done."""
    logger = log()
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """Ranks by their number, started when first used and kept to the end of the session."""
    made = {size: RankPool(size) for size in (2, 3, 4, 8)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `language` and `vision` of a model with odd sizes, so that no cut into shards is even."""
    from small import write_parts

    return write_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mixed.json`, `text.json`, `captions.json` and pictures in `images`."""
    from small import write_dataset

    return write_dataset(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def configure(parts: Path, dataset: Path, tmp_path: Path) -> Configure:
    """Makes configurations of a training of `parts` on `dataset` into `tmp_path / to`, from Hydra overrides."""
    from small import make_config

    return lambda *overrides, to="", stage="finetune": make_config(
        parts, dataset, tmp_path / to, *overrides, stage=stage
    )


@pytest.fixture
def start(tmp_path: Path, parts: Path, dataset: Path) -> Iterator[Callable[..., Run]]:
    """Starts trainings in one folder, one after the other or beside each other; those still alive are ended."""
    from lives import Run

    started: list[Run] = []

    def begin(*overrides: str, folder: Path = tmp_path, **settings: object) -> Run:
        started.append(Run(folder, parts, dataset, *overrides, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for run in started:
        run.end()


@pytest.fixture(scope="session")
def noise(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, exported in fp32: its answers are noise, and no two questions have the same."""
    from reference import EXPORTED
    from small import make_config

    from llava_fsdp.train import main as train

    folder = tmp_path_factory.mktemp("noise")
    train.train(make_config(parts, dataset, folder, "max_steps=1", "checkpoint.every=1", *EXPORTED))
    return folder
