"""The planner says what it is doing: in one line of a terminal, or in a log line for each stage."""

import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from small import command_config

from llava_fsdp.config import PlanConfig
from llava_fsdp.plan.main import plan
from llava_fsdp.runtime.text.progress import StageLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And behind the work none; a message has a line of its own above it."""
    caplog.set_level(logging.INFO, "llava_fsdp")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger("llava_fsdp"), "handlers", [handler])
    with StageLine("plan") as line:
        line.stage("one")
        assert line.progress is not None
        line.progress.refresh()
        with line.watch("two", 1200) as advance:
            advance(3)
            advance(1000)
            line.progress.refresh()
        assert terminal.getvalue().count("\n") == 0
        logging.getLogger("llava_fsdp").info("a message")
        line.close()
        line.close()
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "plan: one" in said and re.search(r"plan: two 1,003 of 1,200 0:00:0\d", said)
    assert "\r" in said and caplog.messages == ["a message"] and handler.stream is terminal
    assert [text for text in re.split(r"[\r\n]", said) if "message" in text] == ["a message"]


def test_without_a_terminal_each_stage_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llava_fsdp")
    with StageLine("plan") as line:
        for _ in range(3):
            with line.watch("ways", 9) as advance:
                advance(4)
        line.stage("more")
    assert caplog.messages == ["plan: ways", "plan: more"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stages"),
    [
        (["gpus=2"], ["ways to train"]),
        (["gpus=2", "parallel=auto"], ["layouts of ranks", "memory of the fastest ways"]),
        (["gpus=1", "nodes=2"], ["ways to train", "numbers of nodes"]),
        (["gpus=2", "longest=true"], ["longest samples"]),
    ],
)
def test_every_stage_is_said_once_and_the_object_stays_alone(
    words: list[str], stages: list[str], wide_parts: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "llava_fsdp")
    model = [f"model.language={wide_parts / 'language'}", f"model.vision={wide_parts / 'vision'}"]
    plan(
        command_config(
            PlanConfig, "plan", *model, "gpu=a100-40gb", "format=json", f"page={tmp_path / 'p.html'}", *words
        )
    )
    assert json.loads(capsys.readouterr().out)
    said = [message.removeprefix("plan: ") for message in caplog.messages if message.startswith("plan: ")]
    assert said == ["the shapes of the model", *stages]
