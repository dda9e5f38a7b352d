"""Train under torchrun, with the exit code and the last line of the run: `llava-fsdp train [FLAGS] key=value...`.

FLAGS are torchrun's, and stand anywhere. Without them every GPU of this machine gets a rank, and a machine without a
GPU one rank. This process checks the command line, starts torchrun's agent (agent.py) in a session of its own, passes
signals on, and says at the end how the run ended. Imports no torch.
"""

import difflib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from llava_fsdp.config import Config, cli, load
from llava_fsdp.runtime.errors import ConfigError, ExitCode, LlavaFsdpError
from llava_fsdp.runtime.log import log, setup_logging
from llava_fsdp.runtime.process_end import without_launcher
from llava_fsdp.runtime.small_json import BadJson, MissingJson
from llava_fsdp.runtime.status_file import STATUS_FILE, is_without_end, own_word, status_of

WITH_VALUE = frozenset({
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
})  # fmt: skip
"""torchrun's flags that take a value (torch/distributed/run.py)."""
WITHOUT_VALUE = frozenset({"standalone", "virtual-local-rank"})
OF_OTHER_PROGRAMS = frozenset({"module", "no-python", "run-path"})
"""torchrun's flags that say what it runs, which here is always the training."""
PRINTS = frozenset({"--help", "-h", "--cfg", "-c", "--info", "-i", "--hydra-help", "--version"})
"""Flags with which a command prints something and trains nothing."""
NUMBERS = {"nnodes": r"[1-9]\d*(:[1-9]\d*)?", "nproc-per-node": r"[1-9]\d*|gpu|cpu|auto|xpu", "max-restarts": r"\d+",
           "node-rank": r"\d+", "master-port": r"\d+", "rdzv-endpoint": r".+?(:\d+)?"}  # fmt: skip
STOP_SECONDS = "600"
"""Seconds that ranks get to save a checkpoint after a signal; torchrun's default is 30."""


def main() -> None:
    since = time.time()
    setup_logging()
    try:
        flags, words = split(sys.argv[1:])
        folder = check(words)
    except LlavaFsdpError as error:
        log().error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    if folder is None:  # this process answers itself
        sys.argv[1:] = words
        runpy.run_module("llava_fsdp.train", run_name="__main__")
        return
    with agent(flags, words) as run:
        code, said = run.wait()
    sys.exit(end_of(folder, since, code, said, run.asked))


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The torchrun flags of a command line, as `--name=value`, and its other words.

    Raises:
        ConfigError: a flag that torchrun does not have, or a value that it would not take.
    """
    flags: list[str] = []
    rest: list[str] = []
    given = iter(words)
    for word in given:
        word = {"-t": "--tee", "-r": "--redirects"}.get(word, word)
        name, equals, value = word.partition("=")
        plain = name.removeprefix("--").replace("_", "-")
        if not name.startswith("-") or name in PRINTS or name in cli.WITH_VALUES or name == "--multirun":
            rest.append(word)
            if word in cli.WITH_VALUES:
                rest += [value for value in [next(given, "")] if value]
        elif plain in WITHOUT_VALUE:
            flags.append(word)
        elif plain in WITH_VALUE:
            value = value if equals else next(given, "")
            if not re.fullmatch(NUMBERS.get(plain, r".+"), value):
                raise ConfigError(f"--{plain} {value}: give a value as torchrun takes it (torchrun --help)")
            flags.append(f"--{plain}={value}")
        elif plain in OF_OTHER_PROGRAMS:
            raise ConfigError(f"{word}: llava-fsdp train runs the training and nothing else; take the flag out")
        else:
            near = difflib.get_close_matches(plain, [*WITH_VALUE, *WITHOUT_VALUE], n=1)
            hint = f"did you mean --{near[0]}?" if near else "the flags are torchrun's (torchrun --help)"
            raise ConfigError(f"{word} is not a flag; {hint}")
    return flags, rest


def check(words: list[str]) -> Path | None:
    """Read the configuration as a rank will; its `output_dir`, or None if the command prints something and ends.

    Raises:
        ConfigError: it is refused.
    """
    if {word.partition("=")[0] for word in words} & {*PRINTS, "dry_run"}:
        return None
    sys.argv[1:] = list(words)
    node = cli.compose("train", Config)
    return None if node is None else Path(load(Config, node).output_dir)


class Agent:
    """A running torchrun agent, and the signals that this process has had."""

    def __init__(self, process: subprocess.Popen[bytes], report: int):
        self.process = process
        self.report = report
        self.asked = 0
        """Exit code of a run that was stopped before it could write a status; 0: no signal came."""

    def wait(self) -> tuple[int, dict[str, Any]]:
        """The agent's exit code, and what it knows of the rank that failed first."""
        code = self.process.wait()
        with open(self.report, "rb") as file:
            text = file.read()
        return code, json.loads(text) if text else {}

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: the first SIGINT or SIGTERM to the agent, which passes it to its ranks and waits for their
        checkpoint; a second SIGINT to the ranks, which end at once; a third kills them."""
        if number == signal.SIGUSR1:
            self.to_ranks(signal.SIGUSR1)
        elif not self.asked:
            self.asked = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.STOPPED
            self.process.send_signal(number)
            self.since = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since > 0.5:  # not the same key press
            if self.asked == -1:
                self.process.kill()  # the ranks end with it
            self.to_ranks(signal.SIGINT)
            self.asked = -1

    def to_ranks(self, number: int) -> None:
        """Send a signal to the ranks; one that has ended is left out."""
        pid = self.process.pid
        try:
            ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return
        for rank in map(int, ranks):
            try:
                os.kill(rank, number)
            except ProcessLookupError:
                continue


@contextmanager
def agent(flags: list[str], words: list[str]) -> Iterator[Agent]:
    """Start torchrun's agent; inside, this process passes its signals on."""
    environment = without_launcher(os.environ)
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", STOP_SECONDS)
    report, theirs = os.pipe()
    command = [sys.executable, "-m", "llava_fsdp.train.agent", str(os.getpid()), str(theirs), *flags, "--", *words]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs]
    )
    os.close(theirs)
    run = Agent(process, report)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, run.on_signal)
    try:
        yield run
    finally:
        if process.poll() is None:
            process.kill()


def end_of(folder: Path, since: float, code: int, said: dict[str, Any], asked: int) -> int:
    """Print how the run ended as the last line; returns its exit code.

    Args:
        since: when this launch began, in seconds since 1970: an older status is of another.
        code: the agent's exit code.
        said: what the agent knows of the rank that failed first.
        asked: the exit code of a run that was told to stop and has written no status.
    """
    if code == ExitCode.DONE:
        return ExitCode.DONE
    path = folder / STATUS_FILE
    try:
        status = own_word(status_of(folder))
    except (BadJson, MissingJson):
        status = {}
    is_own = bool(status) and (status.get("time") or 0.0) >= since and not is_without_end(status)
    if is_own and status.get("exit_code") is not None:
        log().log(
            20 if status["exit_code"] == ExitCode.STOPPED else 40, "%s: %s (exit code %d) %s",
            path, status["status"], status["exit_code"], status.get("reason") or "",
        )  # fmt: skip
        return int(status["exit_code"])
    if asked:
        log().info("stopped without an end in %s; the same command continues", path)
        return ExitCode.INTERRUPTED if asked == -1 else asked
    if said.get("kind") == "meeting":
        log().error("the machines did not meet: %s", said["reason"])
        return ExitCode.COMMUNICATION
    how = f"rank {said['rank']} {said['reason']}" if "rank" in said else "torchrun's agent ended"
    log().error("%s, and no end is recorded in %s", how, path)
    return int(said.get("code") or ExitCode.BUG)


if __name__ == "__main__":
    main()
