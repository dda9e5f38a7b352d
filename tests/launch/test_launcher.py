"""`llava-fsdp train`: the last line and the exit code are the run's, whatever ends it; mistakes cost no second."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiers import slow_after
from torch.distributed.run import get_args_parser

from llava_fsdp import __main__ as command
from llava_fsdp.completion import completions
from llava_fsdp.config import Config, ParallelConfig
from llava_fsdp.config.command_line.help import asked_help, first_sentence, meanings, render_help
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.exit_codes import ENDINGS
from llava_fsdp.runtime.files.status_file import Outcome, previous_status, put_status
from llava_fsdp.runtime.process.watchdog import SAME_KEY_PRESS
from llava_fsdp.train.launch import agent, launcher
from llava_fsdp.train.launch.launcher import (
    TORCHRUN_PROGRAM,
    TORCHRUN_WITH_VALUE,
    TORCHRUN_WITHOUT_VALUE,
    Launch,
    given_ranks,
    split,
    with_rendezvous,
)

QUICK = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_flags_are_torchruns() -> None:
    """All of its flags are known, with or without a value; a new release of torch may have more."""
    known: dict[str, bool] = {}
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            if name.startswith("--") and name != "--help":
                known[name.removeprefix("--").replace("_", "-")] = action.nargs != 0
    assert known.keys() <= TORCHRUN_WITH_VALUE | TORCHRUN_WITHOUT_VALUE | TORCHRUN_PROGRAM
    assert {name for name, takes in known.items() if takes} <= TORCHRUN_WITH_VALUE
    assert {name for name, takes in known.items() if not takes} <= TORCHRUN_WITHOUT_VALUE | TORCHRUN_PROGRAM


def test_flags_and_words_are_told_apart() -> None:
    flags, words = split(
        ["--nproc_per_node", "8", "stage=finetune", "--nnodes=2:3", "--standalone", "--config-dir", "mine", "a=--b",
         "--rdzv-conf", "join_timeout=9"]
    )  # fmt: skip
    assert flags == ["--nproc-per-node=8", "--nnodes=2:3", "--standalone", "--rdzv-conf=join_timeout=9"]
    assert words == ["stage=finetune", "--config-dir", "mine", "a=--b"]
    assert split(["--help", "data"]) == ([], ["--help", "data"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max-restart", "3"], "--max-restarts"),
        (["--nproc-per-node", "many"], "many"),
        (["--nnodes"], "--nnodes"),
        (["--module", "x"], "--module"),
        (["--nowhere"], "torchrun"),
    ],
)
def test_flags_that_torchrun_would_refuse(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        split(words)


def test_ranks_that_flags_give() -> None:
    assert given_ranks(["--nnodes=1", "--nproc-per-node=2", "--nproc-per-node=6"]) == 6
    assert given_ranks(["--nproc-per-node=gpu"]) is None and given_ranks([]) is None
    parallel = ParallelConfig(context=3)
    parallel.check_divides(6)
    with pytest.raises(ConfigError, match=r"parallel\.context=3 .* \[1, 2, 4\]"):
        parallel.check_divides(4)


def answered(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "llava_fsdp", *words],
        check=False, capture_output=True, text=True, timeout=60, env=QUICK,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--help",), 0, "  migrate "),
        ((), 2, "usage"),
        (("exprt",), 2, "did you mean export?"),
        (("train", "--help"), 0, "learning rate"),
        (("train", "--help", "optim"), 0, "optim.lr="),
        (("train", "stage=finetun"), 2, "did you mean finetune?"),
        (("train", "optim.lrr=1"), 2, "did you mean optim.lr?"),
        (("train", "epochs=0"), 2, "epochs=0 must be at least 1"),
        (("train", "-m", "seed=1,2"), 2, "llava-fsdp sweep"),
        (("train", "++model.language=mine", "model.vision=package:tiny-clip", "optim.lr=x"), 2, "optim.lr"),
        (("train", "--nproc-per-node", "4", "parallel.context=3"), 2, "parallel.context=3 does not divide 4"),
        (("status", "--help"), 0, "exit code"),
        (("evaluate", "task=many"), 2, "task=many"),
        pytest.param(("plan", "gpu=h10"), 2, "", marks=pytest.mark.slow),
        pytest.param(("export", "nothing"), 2, "", marks=pytest.mark.slow),
    ],
)
def test_what_is_answered_without_torch(words: tuple[str, ...], code: int, said: str) -> None:
    if words == ("train", "--help"):
        said = "groups of keys"
    done = answered(*words)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == code, done.stderr
    assert said in done.stdout + "\n".join(lines) and "Traceback" not in done.stderr
    if words[:1] not in (("plan",), ("export",)):  # whose errors need more than the configuration
        assert not any(line.endswith(" torch") for line in done.stderr.splitlines())


def test_ranks_that_do_not_divide_are_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    monkeypatch.setattr(launcher.Launch, "run", lambda *_: started.append(True))
    monkeypatch.setattr(launcher.Launch, "end", lambda *_: 0)
    for context, code in ((3, 2), (2, 0)):
        words = ["--nproc-per-node=4", f"parallel.context={context}", "pack=true", f"output_dir={tmp_path}"]
        monkeypatch.setattr(sys, "argv", ["train", *words])
        with pytest.raises(SystemExit) as ended:
            launcher.main()
        assert ended.value.code == code and len(started) == (code == 0)


def test_every_command_is_listed_and_is_there() -> None:
    for name in command.COMMANDS:
        package = Path(command.__file__).with_name(name)
        assert (package / "__main__.py").is_file() or package.with_suffix(".py").is_file()
        assert f"  {name} " in command.usage()


def test_help_has_the_value_and_meaning_of_every_key() -> None:
    assert asked_help(["--help", "data"]) == "data" and asked_help(["-h"]) == "" and asked_help(["seed=1"]) is None
    text = render_help("train", Config, ["stage=pretrain", "optim.lr=0.25"], "optim")
    assert "optim.lr=0.25" in text and meanings(Config.__dataclass_fields__["optim"].type)["clip"][:20] in text
    for group in ("data", "optim", "checkpoint"):
        text = " ".join(render_help("train", Config, [], group).split())
        for key, meaning in meanings(Config.__dataclass_fields__[group].type).items():
            assert not meaning or " ".join(first_sentence(meaning).split()) in text, (group, key)
    with pytest.raises(ConfigError, match="did you mean data"):
        render_help("train", Config, [], "dat")


def test_completions() -> None:
    assert completions("tr", "tr") == ["train"]
    assert completions("train", "stage=pret") == ["stage=pretrain"]
    assert completions("train", "optim.l") == ["optim.lr="]
    assert "sharding=" in completions("plan", "sh") and completions("report", "x") == []


def test_a_refused_start_leaves_a_finished_run_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the last line says so."""
    put_status(tmp_path, "done", Outcome(ENDINGS["done"]))
    launch = Launch(tmp_path)
    launch.agent = SimpleNamespace(returncode=1)  # pyright: ignore[reportAttributeAccessIssue]
    refused = Outcome(ENDINGS["config"], "global_batch_size: 256 -> 32")
    put_status(tmp_path, "failed", refused, before=previous_status(tmp_path))
    with caplog.at_level("INFO", "llava_fsdp"):
        assert launch.end({}) == 2
    assert "the run stays done; this start failed (exit code 2) global_batch_size: 256 -> 32" in caplog.text


def test_the_last_line_repeats_whole_sentences_of_a_refusal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And announces no commands that are not repeated with it."""
    for reason, said in (
        ("a.json: 2 of 9 records are wrong\n  url: 2", "a.json: 2 of 9 records are wrong"),
        (
            "there is no outputs/pretrain, see 1.5. Make one:\n  llava-fsdp train",
            "there is no outputs/pretrain, see 1.5",
        ),
        ("a/b is without an export; write one, and begin with that:\n  llava-fsdp export", "for the reason above"),
        ("a.json: gone", "a.json: gone"),
    ):
        launch = Launch(tmp_path)
        launch.agent = SimpleNamespace(returncode=1)  # pyright: ignore[reportAttributeAccessIssue]
        put_status(tmp_path, "failed", Outcome(ENDINGS["config"], reason))
        assert launch.end({}) == 2
        assert caplog.messages[-1].endswith(f": failed (exit code 2) {said}")


@pytest.mark.parametrize("before", ["done", "stopped", "numeric"])
def test_the_end_of_an_earlier_run_is_not_this_ones(before: str, tmp_path: Path) -> None:
    """Ranks that die, or are stopped, before they write a status."""
    put_status(tmp_path, "failed", Outcome(ENDINGS[before]))
    launch = Launch(tmp_path)
    launch.agent = SimpleNamespace(returncode=1)  # pyright: ignore[reportAttributeAccessIssue]
    assert launch.end({"reason": "killed by signal 9", "code": 5}) == 5
    assert launch.end({}) == 1
    launch.stopped_by, launch.status_at_stop = signal.SIGTERM, launch.status_before
    assert launch.end({"code": 5}) == 75
    launch.skips_checkpoint = True
    assert launch.end({"code": 5}) == 130
    put_status(tmp_path, "failed", Outcome(ENDINGS["config"]))
    assert launch.end({"code": 5}) == 2, "its own"


@pytest.mark.parametrize(
    ("flags", "environment", "added"),
    [
        ([], {}, ["--max-restarts=3", "--standalone"]),
        (["--max-restarts=0"], {}, ["--standalone"]),
        ([], {"PET_MAX_RESTARTS": "1"}, ["--standalone"]),
        (["--nnodes=2"], {}, ["--max-restarts=3"]),
        ([], {"PET_NNODES": "2"}, ["--max-restarts=3"]),
        (["--master-addr=a"], {}, ["--max-restarts=3"]),
        (["--rdzv-endpoint=a:1"], {}, ["--max-restarts=3", "--rdzv-backend=c10d"]),
        (["--rdzv-endpoint=a:1", "--rdzv-backend=static"], {}, ["--max-restarts=3"]),
        (["--nproc-per-node=2"], {}, ["--max-restarts=3", "--standalone"]),
    ],
)
def test_what_is_not_given_to_torchrun_has_a_default(
    flags: list[str], environment: dict[str, str], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert with_rendezvous(flags) == added + flags


class FakeAgent:
    """torchrun's agent, which ends when it is told to."""

    pid, returncode = 1, 1

    def __init__(self) -> None:
        self.told: list[str] = []

    def poll(self) -> int | None:
        return 1 if "kill" in self.told or "terminate" in self.told else None

    def kill(self) -> None:
        self.told.append("kill")

    def terminate(self) -> None:
        self.told.append("terminate")


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Launch, list, list[float]]:
    """A launch with two ranks, what these and the agent are told, and the clock."""
    clock, own, agent = [100.0], Launch(tmp_path), FakeAgent()
    monkeypatch.setattr(launcher.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(own, "ranks", lambda: {7, 8})
    monkeypatch.setattr(launcher.os, "kill", lambda rank, number: agent.told.append((rank, number)))
    monkeypatch.setattr(own, "agent", agent, raising=False)
    return own, agent.told, clock


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_ranks_are_told_to_stop_once(number: signal.Signals, watched: tuple[Launch, list, list[float]]) -> None:
    """SIGHUP as SIGTERM, which ranks know; only Ctrl-C, pressed again, ends them at once, and a third time hard."""
    own, told, clock = watched
    first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    own.stop(number)
    assert sorted(told) == [(7, first), (8, first)] and own.ranks_told_to_stop == {7, 8} and own.stopped_by == number
    clock[0] += SAME_KEY_PRESS - 0.01
    own.stop(signal.SIGINT)
    clock[0] += 60
    own.stop(signal.SIGTERM)
    assert len(told) == 2 and not own.skips_checkpoint
    own.stop(signal.SIGINT)
    assert told[2:] == [(7, signal.SIGINT), (8, signal.SIGINT)] and own.skips_checkpoint
    clock[0] += SAME_KEY_PRESS - 0.01
    own.stop(signal.SIGINT)
    assert len(told) == 4
    clock[0] += SAME_KEY_PRESS
    own.stop(signal.SIGINT)
    assert told[4:] == ["kill"] and own.stopped_by == number


def signals(clock: list[float], *numbers: signal.Signals) -> Callable[..., object]:
    """Return a function in place of `signal.sigtimedwait`: the signals come every half second, then none."""
    came = iter(numbers)

    def wait(*_: object) -> object:
        clock[0] += 0.5
        assert clock[0] < 200, "it waits for ever"
        number = next(came, None)
        return None if number is None else SimpleNamespace(si_signo=number)

    return wait


def test_the_agent_is_ended_only_when_its_ranks_have(
    watched: tuple[Launch, list, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a second to end by itself; ranks that it has started again do not count."""
    own, told, clock = watched
    ranks = {100: {7, 8}, 110: {7}, 120: {9, 10}}
    monkeypatch.setattr(
        own, "ranks", lambda: next(found for time, found in sorted(ranks.items())[::-1] if time <= clock[0])
    )
    monkeypatch.setattr(launcher.signal, "sigtimedwait", signals(clock, signal.SIGUSR1, signal.SIGTERM))
    own.wait()
    assert told[:4] == [(7, signal.SIGUSR1), (8, signal.SIGUSR1), (7, signal.SIGTERM), (8, signal.SIGTERM)]
    assert told[4:] == ["terminate"] and clock[0] == 121.0


def test_an_agent_that_does_not_end_without_ranks_is_killed(
    watched: tuple[Launch, list, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for other machines; and one whose ranks have not begun is ended at once."""
    own, told, clock = watched
    monkeypatch.setattr(own, "ranks", set)
    monkeypatch.setattr(own.agent, "poll", lambda: 1 if "kill" in told else None)
    monkeypatch.setattr(launcher.signal, "sigtimedwait", signals(clock, signal.SIGTERM))
    own.wait()
    assert told == ["terminate", "kill"] and clock[0] == 100.5 + 10


def test_an_agent_whose_launcher_was_killed_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "argv", ["agent", str(os.getppid()), str(write), "--", "seed=1"])
    monkeypatch.setattr(agent, "run", lambda flags, words: {"reason": "the ranks were stopped"})
    monkeypatch.setattr(agent, "end_with", lambda *_: None)
    for name in (agent.AGENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(SystemExit):
            agent.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write)


class Launched:
    """A training of the embedded default that `llava-fsdp train` runs."""

    def __init__(self, folder: Path, *words: str):
        self.output = folder / "out"
        self.log = folder / "log.txt"
        fixed = [f"output_dir={self.output}", "export.enabled=false", "log_every=1", "max_steps=200"]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llava_fsdp", "train", *fixed, *words],
                stdout=file, stderr=subprocess.STDOUT, env=QUICK, start_new_session=True, cwd=folder,
            )  # fmt: skip

    def until_step(self, step: int) -> None:
        path, end = self.output / "metrics.jsonl", time.monotonic() + 200
        while not path.is_file() or path.read_text().count("\n") < step:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        def children(pid: int | str) -> list[str]:
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

        end = time.monotonic() + 100
        while time.monotonic() < end and self.process.poll() is None:
            found = [int(rank) for agent in children(self.process.pid) for rank in children(agent)]
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(self.log.read_text())

    def end(self) -> tuple[int, str]:
        code = self.process.wait(200)
        text = self.log.read_text()
        assert "Traceback" not in text and "ChildFailedError" not in text and "elastic" not in text, text
        return code, text.splitlines()[-1]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[list[Launched]]:
    started: list[Launched] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_saves_and_ends_with_our_code(launch: list[Launched], tmp_path: Path) -> None:
    run = Launched(tmp_path, "--nproc-per-node", "2")
    launch.append(run)
    run.until_step(3)
    os.killpg(run.process.pid, signal.SIGINT)
    code, last = run.end()
    status = json.loads((run.output / "run_status.json").read_text())
    assert (code, status["status"]) == (75, "stopped") and "stopped (exit code 75)" in last
    assert list((run.output / "checkpoints").glob("step-*"))


@pytest.mark.e2e
@pytest.mark.slow
def test_a_missing_file_is_told_once_and_not_tried_again(launch: list[Launched], tmp_path: Path) -> None:
    run = Launched(tmp_path, "data=llava_json", "data.path=gone.json", "data.images=.")
    launch.append(run)
    code, last = run.end()
    assert code == 2 and "gone.json" in last and run.log.read_text().count("ConfigError") == 1


MISTAKES = [
    ["data=llava_json", "data.path=gone.json", "data.images=gone"],  # the paths are checked first of all
    ["model.language=gone", "model.vision=gone"],
    ["output_dir=file/out"],  # nothing can be recorded there
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_with_a_new_folder_is_told_once_and_not_tried_again(
    words: list[str], launch: list[Launched], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    run = Launched(tmp_path, "--nproc-per-node=2", *words)
    launch.append(run)
    code, last = run.end()
    text = run.log.read_text()
    assert code == 2 and text.count("ConfigError") == 1 + last.startswith("ConfigError"), text
    assert words[-1].partition("=")[0] in last or (words[-1] == "track=wandb" and "wandb" in last)
    if "output_dir=file/out" not in words:
        assert json.loads((run.output / "run_status.json").read_text())["class"] == "config"


@pytest.mark.e2e
def test_a_folder_in_use_is_refused_before_ranks_start(launch: list[Launched], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        run = Launched(tmp_path)
        launch.append(run)
        code, last = run.end()
    assert code == 2 and "belongs to a run that is under way" in last and "step" not in run.log.read_text()


@pytest.mark.e2e
@pytest.mark.parametrize("flag", slow_after(1, [["--nproc-per-node=gpu"], ["--nnodes=2:1"], ["--rdzv-conf=timeout"]]))
def test_what_torchrun_refuses_is_a_mistake(flag: list[str], launch: list[Launched], tmp_path: Path) -> None:
    run = Launched(tmp_path, *flag)
    launch.append(run)
    code, last = run.end()
    assert code == 2 and flag[0] in last


@pytest.mark.e2e
@pytest.mark.slow
def test_machines_that_do_not_meet(launch: list[Launched], tmp_path: Path) -> None:
    run = Launched(tmp_path, "--nnodes=2", "--rdzv-endpoint=localhost:0", "--rdzv-id=x", "--rdzv-conf=join_timeout=2")
    launch.append(run)
    code, last = run.end()
    assert code == 5 and "--rdzv-id" in last and "Timeout" in last


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("seconds", [0.1, 0.3, 1.0, 2.5])
def test_a_stop_before_the_ranks_start(
    number: int, code: int, seconds: float, launch: list[Launched], tmp_path: Path
) -> None:
    run = Launched(tmp_path)
    launch.append(run)
    time.sleep(seconds)
    run.process.send_signal(number)
    assert run.process.wait(30) in (code, -number), "a process that has not run its first line ends by the signal"
    assert "Traceback" not in run.log.read_text()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_scheduler_that_signals_all_processes(launch: list[Launched], tmp_path: Path) -> None:
    """torchrun's agent gets the signal, too: a second one from the launcher would kill the ranks while they save."""
    run = Launched(tmp_path, "--nproc-per-node=2", "checkpoint.every=150")
    launch.append(run)
    run.until_step(2)
    ranks = run.ranks()
    agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (run.process.pid, agent, *ranks, run.process.pid):
        os.kill(pid, signal.SIGTERM)
    code, last = run.end()
    assert code == 75 and "stopped (exit code 75)" in last
    assert list((run.output / "checkpoints").glob("step-*"))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False], ids=["in a step", "before its first word"])
def test_a_killed_rank(late: bool, launch: list[Launched], tmp_path: Path) -> None:
    run = Launched(tmp_path, "--nproc-per-node=2", "--max-restarts=0")
    launch.append(run)
    if late:
        run.until_step(2)
    os.kill(run.ranks()[-1], signal.SIGKILL)
    code, last = run.end()
    assert code == (5 if late else 1) and "killed by signal 9" in last


@pytest.mark.e2e
@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_a_lost_launcher_saves(launch: list[Launched], tmp_path: Path) -> None:
    run = Launched(tmp_path, "--nproc-per-node=2", "checkpoint.every=150")
    launch.append(run)
    run.until_step(2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.8)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] in (75, 130), "the save may be done before"
    again = Launched(tmp_path, "--nproc-per-node=2")
    launch.append(again)
    again.until_step(5)
    ranks = again.ranks()
    again.process.kill()
    again.process.wait()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert json.loads((again.output / "run_status.json").read_text())["status"] == "stopped"
