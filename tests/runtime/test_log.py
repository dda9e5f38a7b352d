"""What reaches the terminal."""

import logging
from collections.abc import Iterator

import pytest

from llava_fsdp.runtime.text import progress
from llava_fsdp.runtime.text.humanize import duration, readable
from llava_fsdp.runtime.text.log import NOISE, leave_noise_out, log, setup_logging


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


@pytest.mark.parametrize(
    ("rank", "size", "expected"),
    [(0, 1, "told\nwrong\n"), (0, 3, "told\nwrong\n"), (2, 3, "[rank 2] wrong\n"), (1, 1, "wrong\n")],
)
def test_other_ranks_only_warn_and_say_who_they_are(
    rank: int, size: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    for _ in range(2):
        setup_logging()
    log().info("told")
    log().warning("wrong")
    assert capsys.readouterr().err == expected
    log().warning("0123456789")
    assert "0123456789" not in capsys.readouterr().err


def test_long_work_is_told_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log().propagate = True
    caplog.set_level("INFO", "llava_fsdp")
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    advance = progress.log_lines("reading", 9)
    for second in (4, 9, 10, 15, 19, 21):
        now[0] = 100.0 + second
        advance(1)
    assert list(dict.fromkeys(caplog.messages)) == ["reading: 3 of 9", "reading: 6 of 9"]


def test_sizes_and_durations_in_words() -> None:
    assert [duration(n) for n in (0, 59.4, 59.6, 61, 3599, 3600, 90061)] == [
        "0m00s", "0m59s", "1m00s", "1m01s", "59m59s", "1h00m", "25h01m",
    ]  # fmt: skip
    assert [readable(n) for n in (-2048, 1024, 1 << 20, 1 << 30)] == ["-2 KiB", "1 KiB", "1 MiB", "1 GiB"]
