"""Devices of the tests in this folder, which are for a CUDA GPU.

A test that asks for `device` needs no kernel, stream or memory of CUDA: without a GPU its first case runs on the CPU,
in the full tier, so that a mistake in it is found before a GPU is hired. A test that asks for `cuda` needs the GPU.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llava_fsdp.parallel.precision.fp8 import check_fp8
from llava_fsdp.parallel.precision.int8_mixed import check_int8_mixed
from llava_fsdp.runtime.errors import ConfigError

HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def cuda() -> torch.device:
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    return gpu


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.getfixturevalue("cuda") if HAS_GPU else torch.device("cpu")


def or_skip(device: torch.device, check: Callable[[torch.device], None]) -> torch.device:
    """Return the device; skip the test if `check` raises ConfigError: the machine lacks what the test needs."""
    try:
        check(device)
    except ConfigError as error:
        pytest.skip(str(error))
    return device


@pytest.fixture
def fp8_device(cuda: torch.device) -> torch.device:
    return or_skip(cuda, check_fp8)


@pytest.fixture
def int8_device(cuda: torch.device) -> torch.device:
    return or_skip(cuda, check_int8_mixed)


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        name = item.nodeid.partition("[")[0]
        if not HAS_GPU and "device" in getattr(item, "fixturenames", ()) and name not in seen:
            seen.add(name)
            item.add_marker(pytest.mark.slow)
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU, and torch sees none"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the result of a test to the file that GPU_TESTS_ROWS names, as soon as the test has ended: pytest prints
    why tests failed only at its end, which a call with a time limit may not reach."""
    rows = os.environ.get("GPU_TESTS_ROWS")
    if rows is None or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
    row |= {"properties": dict(report.user_properties), "reason": None if report.passed else report.longreprtext}
    with Path(rows).open("a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Append a file that could not be imported, likewise."""
    rows = os.environ.get("GPU_TESTS_ROWS")
    if rows is not None and "PYTEST_XDIST_WORKER" not in os.environ and report.failed:
        with Path(rows).open("a") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": "failed", "reason": report.longreprtext}) + "\n")
