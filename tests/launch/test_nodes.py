"""Nodes that come and go: two agents of torchrun's on this machine, of which one is lost."""

import os
import signal
import socket
from collections.abc import Callable

import pytest
from lives import Run, gone

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_the_run_goes_on_with_the_nodes_that_are_left(start: Callable[..., Run]) -> None:
    """The other agent hosts the meeting. Samples a step are the same, and losses up to the order of sums."""
    whole = start("output_dir=whole", ranks=0)
    meeting = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-id=elastic", "--rdzv-backend=c10d"]
    meeting.append(f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    conf = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,is_host="
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes = [start(launch=[*meeting, f"{conf}{is_host}"], ranks=1, pace=0.5, env=env) for is_host in ("true", "false")]
    stays, leaves = nodes
    stays.until_step(3)
    assert len(list((stays.output / ".heartbeats").glob("rank-?.json"))) == 2
    os.kill(leaves.process.pid, signal.SIGKILL)
    assert stays.wait(240) == 0, stays.said
    assert gone([leaves.process.pid, *stays.pids()], 2)
    assert whole.wait(60) == 0, whole.said
    expected = [row for row in rows(whole)]
    assert [row["step"] for row in stays.rows] == [row["step"] for row in expected] == [1, 2, 3, 4, 5, 6]
    for row, alone in zip(stays.rows, expected, strict=True):
        assert (row["samples"], row["label_tokens"], row["tokens"]) == (
            alone["samples"], alone["label_tokens"], alone["tokens"],
        )  # fmt: skip
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert "was killed by signal 9" in stays.said + leaves.said and "continuing after step" in stays.said


def rows(run: Run) -> list[dict]:
    import json

    path = run.output.parent / "whole" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
