"""What reaches the terminal."""

import logging
from collections.abc import Iterator

import pytest

from llava_fsdp.runtime.log import NOISE, leave_noise_out


@pytest.fixture
def loggers() -> Iterator[None]:
    """As they were, afterwards."""
    before = {name: list(logging.getLogger(name).filters) for name in NOISE}
    yield
    for name, filters in before.items():
        logging.getLogger(name).filters[:] = filters


@pytest.mark.usefixtures("loggers")
def test_other_libraries_noise_is_left_out_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    leave_noise_out()
    said = {"torchao": "Failed to load x.so: no such file", "torch.utils._pytree": "<enum 'A'> is an Enum subclass"}
    for name, text in said.items():
        logging.getLogger(name).warning(text)
        logging.getLogger(name).warning("a shape is wrong")
    logging.getLogger("llava_fsdp.test").warning("Failed to load an image")
    assert caplog.messages == ["a shape is wrong", "a shape is wrong", "Failed to load an image"]
