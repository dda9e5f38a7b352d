"""launch/multinode.sh on two machines: network namespaces with an address and a name of their own, or two loopbacks."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lives import Run, gone
from machine import checkout
from test_nodes import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
A, B = "10.213.87.1", "10.213.87.2"


def run(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def machines() -> Iterator[list[tuple[str, list[str]]]]:
    """Address, and what stands before a command, of two machines. Neither knows the other's name."""
    names = [f"llava{os.getpid()}{letter}" for letter in "ab"]
    ends = [f"lv{os.getpid() % 100000}{letter}" for letter in "ab"]
    cable = ["link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]]
    made = [*(["netns", "add", name] for name in names), cable]
    for name, end, at in zip(names, ends, (A, B), strict=True):
        made += [["-n", name, "addr", "add", f"{at}/24", "dev", end]]
        made += [["-n", name, "link", "set", link, "up"] for link in (end, "lo")]
    try:
        if all(run("ip", *each) for each in made):
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
            before = [["ip", "netns", "exec", name, *named, name] for name in names]
        else:  # not root, or no namespaces in this container
            before = [[], []]
        at = [A, B] if before[0] else ["127.0.0.1", "127.0.0.2"]
        yield list(zip(at, before, strict=True))
    finally:
        for name in names:
            run("ip", "netns", "del", name)


class Nodes:
    """Both machines' launch/multinode.sh for one run."""

    def __init__(self, start: Callable[..., Run], machines: list, folder: Path):
        self.start, self.machines, self.folder = start, machines, folder
        self.port, self.env = free_port(), checkout(folder / "checkout")

    def both(
        self, *words: str, own: tuple[dict, dict] = ({}, {}), more: tuple = ((), ()), **settings: object
    ) -> list[Run]:
        return [self.one(n, *words, *more[n], own=own[n], **settings) for n in (0, 1)]

    def one(self, number: int, *words: str, own: dict | None = None, **settings: object) -> Run:
        _, before = self.machines[number]
        told = {
            "NNODES": "2", "NODE_RANK": str(number), "RDZV_ENDPOINT": f"{self.machines[0][0]}:{self.port}",
            "RDZV_ID": "run7", "NPROC_PER_NODE": "1", "LOG_DIR": str(self.folder / "logs"), "JOIN_TIMEOUT": "400",
        }  # fmt: skip
        script = [*before, str(self.folder / "checkout" / "launch" / "multinode.sh")]
        return self.start(*words, script=script, env={**self.env, **told, **(own or {})}, **settings)


@pytest.fixture
def nodes(start: Callable[..., Run], machines: list, tmp_path: Path) -> Nodes:
    return Nodes(start, machines, tmp_path)


def lose(machine: Run) -> None:
    """Kill all processes of a machine, torchrun's agent in its own session before the launcher that it ends with."""
    agent = descendants(machine.process.pid)
    for pid in (*agent, machine.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert gone([machine.process.pid, *agent], 5)


def descendants(pid: int) -> list[int]:
    """Process ids of the children, before those of their children."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(found for child in children for found in descendants(child))]


def same_steps(run: Run, alone: Run, samples: bool = True) -> None:
    """Every step once, of the same samples, with the losses of one process up to the order of sums."""
    expected = [json.loads(line) for line in (alone.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in run.rows] == [row["step"] for row in expected]
    for row, other in zip(run.rows, expected, strict=True):
        for key in ("samples", "label_tokens", "tokens", "images"):
            assert row[key] == other[key]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_two_machines_train_stop_and_go_on(nodes: Nodes, start: Callable[..., Run], tmp_path: Path) -> None:
    """Stopped at one of them, killed at the other, and continued by the same command; hybrid shards within each."""
    alone = start(ranks=0, folder=tmp_path / "alone")
    first, second = nodes.both("sharding=hybrid", pace=1.0)
    first.until_step(2)
    hosts = {json.loads(p.read_text())["host"] for p in (first.output / ".heartbeats").glob("rank-?.json")}
    assert len(hosts) == (2 if nodes.machines[0][1] else 1)
    second.process.send_signal(signal.SIGTERM)
    assert (first.wait(120), second.wait(60)) == (75, 75), first.said + second.said
    stopped = first.status["step"]
    assert first.checkpoints[-1] == f"step-{stopped:06d}" and stopped < 6
    again = nodes.both("sharding=hybrid")
    assert [each.wait(240) for each in again] == [0, 0], again[0].said + again[1].said
    assert f"continuing after step {stopped} of 6" in again[0].said + again[1].said
    assert alone.wait(120) == 0, alone.said
    same_steps(first, alone)


def test_a_machine_that_is_lost_comes_back(nodes: Nodes, start: Callable[..., Run], tmp_path: Path) -> None:
    """The other one waits for it with its ranks ended, and both go on from the last checkpoint."""
    alone = start(ranks=0, folder=tmp_path / "alone")
    first, second = nodes.both("checkpoint.every=1", pace=1.0)
    first.until_step(2)
    lose(second)
    back = nodes.one(1, "checkpoint.every=1", pace=1.0)
    assert (first.wait(240), back.wait(60)) == (0, 0), first.said + back.said
    assert "continuing after step" in first.said + back.said and first.status["status"] == "done"
    assert alone.wait(120) == 0, alone.said
    same_steps(first, alone)


def test_different_arguments_are_refused_by_name(nodes: Nodes) -> None:
    began = time.monotonic()
    first, second = nodes.both(more=((), ("optim.lr=0.5",)))
    assert [first.wait(120), second.wait(60)] == [2, 2], first.said + second.said
    assert "optim.lr=0.5" in first.status["reason"] and "the same arguments" in first.status["reason"]
    assert not first.checkpoints and time.monotonic() - began < 120


def test_a_mistake_on_one_machine_ends_both(nodes: Nodes) -> None:
    """A key that does not exist there: the other one does not wait for an hour."""
    first, second = nodes.both(more=((), ("optim.lrr=0.5",)))
    assert second.wait(120) == 2, second.said
    assert "optim.lrr is not a key" in second.said
    assert first.wait(150) in (2, 5), first.said


def test_different_numbers_of_machines_are_refused(nodes: Nodes) -> None:
    first, second = nodes.both(own=({"NNODES": "2"}, {"NNODES": "1:2"}))
    codes = [first.wait(150), second.wait(150)]
    assert codes == [2, 2] and "NNODES" in first.status["reason"], first.said + second.said


def test_an_elastic_run_goes_on_alone(nodes: Nodes, start: Callable[..., Run], tmp_path: Path) -> None:
    alone = start(ranks=0, folder=tmp_path / "alone")
    first, second = nodes.both(own=({"NNODES": "1:2"}, {"NNODES": "1:2"}), pace=1.0)
    first.until_step(2)
    lose(second)
    assert first.wait(240) == 0, first.said
    assert alone.wait(120) == 0, alone.said
    same_steps(first, alone)
