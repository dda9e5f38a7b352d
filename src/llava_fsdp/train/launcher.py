"""Train under torchrun, with the exit code and the last line of the run: `llava-fsdp train [FLAGS] key=value...`.

FLAGS are torchrun's, and stand anywhere. Without them every GPU of this machine gets a rank, and a machine without a
GPU one rank. This process checks the command line, starts torchrun's agent (agent.py) in a session of its own, passes
signals on, and says at the end how the run ended. Imports no torch.
"""

import contextlib
import difflib
import json
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config, cli, load
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.log import log, setup_logging
from llava_fsdp.runtime.process_end import STOP_SECONDS, how_ended, without_launcher
from llava_fsdp.runtime.run_dir import refuse_in_use
from llava_fsdp.runtime.status_file import STATUS_FILE, read_status, status_of_latest_start
from llava_fsdp.train.agent import is_given

TORCHRUN_WITH_VALUE = frozenset({
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
})  # fmt: skip
"""torchrun's flags that take a value (torch/distributed/run.py)."""
TORCHRUN_WITHOUT_VALUE = frozenset({"standalone", "virtual-local-rank"})
TORCHRUN_PROGRAM = frozenset({"module", "no-python", "run-path"})
"""torchrun's flags that say what it runs, which here is always the training."""
HYDRA_WITHOUT_VALUE = frozenset({"--help", "-h", "--hydra-help", "--version", "--resolve", "--multirun", "-m"})
PRINTS = frozenset({"--help", "-h", "--cfg", "-c", "--info", "-i", "--hydra-help", "--version"})
"""Flags with which the training prints something and ends."""
NUMBERS = {"nnodes": r"[1-9]\d*(:[1-9]\d*)?", "nproc-per-node": r"[1-9]\d*|gpu|cpu|auto|xpu", "max-restarts": r"\d+",
           "node-rank": r"\d+", "master-port": r"\d+", "rdzv-endpoint": r".+?(:\d+)?"}  # fmt: skip
AGENT = (sys.executable, "-m", "llava_fsdp.train.agent")
MEETING = 10
"""Seconds that a machine with a mistake waits for others."""
STOPS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.STOPPED, signal.SIGHUP: ExitCode.STOPPED}
"""Signals that stop a training, and the exit code if it has not written how it ended."""
SIGNALS = {*STOPS, signal.SIGUSR1, signal.SIGCHLD}
AGENT_ENDS = 1.0
"""Seconds that the agent has to end by itself after its ranks."""
SAME_KEY_PRESS = 0.5
"""Seconds within which a second SIGINT counts as the first."""


def main() -> None:
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[name]  # a rank of another training may have started this one
    setup_logging()
    flags: list[str] = []
    try:
        flags, words = split(sys.argv[1:])
        folder = output_dir(words)
        if folder is not None and is_one_machine(flags):
            refuse_in_use(folder)
    except LlavaFsdpError as error:
        log().error("%s: %s", type(error).__name__, error)
        if flags and not is_one_machine(flags):
            end_others(flags)
        sys.exit(error.exit_code)
    if folder is None:  # nothing is trained: this process does it
        sys.argv[1:] = words
        runpy.run_module("llava_fsdp.train", run_name="__main__")
        return
    launch = Launch(folder)
    sys.exit(launch.end(launch.run(with_rendezvous(flags), words)))


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
        if not name.startswith("-") or name in HYDRA_WITHOUT_VALUE or name in cli.WITH_VALUES:
            rest.append(word)
            if word in cli.WITH_VALUES:
                rest += [value for value in [next(given, "")] if value]
        elif plain in TORCHRUN_WITHOUT_VALUE:
            flags.append(word)
        elif plain in TORCHRUN_WITH_VALUE:
            value = value if equals else next(given, "")
            if not re.fullmatch(NUMBERS.get(plain, r".+"), value):
                raise ConfigError(f"--{plain} {value}: give a value as torchrun takes it (torchrun --help)")
            flags.append(f"--{plain}={value}")
        elif plain in TORCHRUN_PROGRAM:
            raise ConfigError(f"{word}: llava-fsdp train runs the training and nothing else; take the flag out")
        else:
            near = difflib.get_close_matches(plain, [*TORCHRUN_WITH_VALUE, *TORCHRUN_WITHOUT_VALUE], n=1)
            hint = f"did you mean --{near[0]}?" if near else "the flags are torchrun's (torchrun --help)"
            raise ConfigError(f"{word} is not a flag; {hint}")
    return flags, rest


def output_dir(words: list[str]) -> Path | None:
    """Read the configuration as a rank will; its `output_dir`, or None if the command only prints something.

    Raises:
        ConfigError: it is refused.
    """
    if {word.partition("=")[0] for word in words} & PRINTS:
        return None
    sys.argv[1:] = list(words)
    node = cli.compose("train", Config)
    if node is None:
        return None
    config = load(Config, node)
    return Path(config.output_dir) if config.dry_run is None else None


def with_rendezvous(flags: list[str]) -> list[str]:
    """torchrun's flags, with those that make all ranks meet on this machine if none says where they meet."""
    added = [] if is_given(flags, "max-restarts") else ["--max-restarts=3"]
    if is_one_machine(flags):
        added.append("--standalone")
    elif is_given(flags, "rdzv-endpoint") and not is_given(flags, "rdzv-backend"):
        added.append("--rdzv-backend=c10d")
    return [*added, *flags]


def end_others(flags: list[str]) -> None:
    """Meet machines that wait for this one, whose command line is refused, and end: they then end, too. Those that are
    not there within `MEETING` seconds wait for their own `join_timeout`."""
    log().info("looking for machines that wait for this one, to end them")
    conf = [flag.partition("=")[2] for flag in flags if flag.startswith("--rdzv-conf=")][-1:]
    meeting = f"--rdzv-conf={','.join([*conf, f'join_timeout={MEETING}'])}"
    Launch(Path(os.devnull)).run([*with_rendezvous(flags), meeting], sys.argv[1:])


def is_one_machine(flags: list[str]) -> bool:
    return not any(is_given(flags, name) for name in ("nnodes", "rdzv-endpoint", "rdzv-backend", "master-addr"))


class Launch:
    """One run of torchrun's agent, which starts the ranks, and the signals that this process got meanwhile."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.before = read_status(folder)
        """The status of an earlier run in the folder."""
        self.stopped_by: signal.Signals | None = None
        """The first signal that asked for an end."""
        self.stopped_in: dict[str, Any] | None = None
        """The status at that time."""
        self.is_at_once = False
        """Whether a Ctrl-C came after that: the ranks end without a checkpoint."""
        self.last_stop = 0.0
        self.stopping: set[int] = set()
        """Process ids of the ranks that were told to stop."""

    def run(self, flags: list[str], words: list[str]) -> dict[str, Any]:
        """Run a training to its end; returns what the agent knows of the rank that failed first, or of its own failure:
        `reason` and `code`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # from here on `wait` takes them
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": STOP_SECONDS, **os.environ}
        report, theirs = os.pipe()
        command = [*AGENT, str(os.getpid()), str(theirs), *flags, "--", *words]
        self.agent = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs]
        )
        os.close(theirs)
        self.wait()
        with open(report, "rb") as file:
            text = file.read()
        return json.loads(text) if text else {}

    def wait(self) -> None:
        """Wait until the agent has ended, and pass signals on to the ranks.

        The agent is told to stop only when the ranks have ended, so that it does not start them again. A scheduler may
        send a signal to all processes, and an agent that gets a second one kills the ranks while they save.
        """
        ranks_ended: float | None = None
        is_agent_told = False
        while self.agent.poll() is None:
            got = signal.sigtimedwait(SIGNALS, 0.5)
            if got is not None and got.si_signo == signal.SIGUSR1:
                self.signal_ranks(signal.SIGUSR1)
            elif got is not None and got.si_signo in STOPS:
                self.stop(signal.Signals(got.si_signo))
            if self.stopped_by is None or self.stopping & set(self.ranks()):
                continue
            now = time.monotonic()
            ranks_ended = ranks_ended or now
            if not is_agent_told and (not self.stopping or now - ranks_ended >= AGENT_ENDS):
                self.agent.terminate()
                is_agent_told = True
            elif not self.ranks() and now - ranks_ended >= 10 * AGENT_ENDS:  # it waits for other machines
                self.agent.kill()

    def stop(self, number: signal.Signals) -> None:
        """Have the ranks save a checkpoint and end; after a further SIGINT they end at once, after a third they are
        killed."""
        now = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by, self.stopped_in = number, read_status(self.folder)
            self.stopping = self.signal_ranks(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif number != signal.SIGINT or now - self.last_stop < SAME_KEY_PRESS:
            return
        elif self.is_at_once:
            self.agent.kill()  # the ranks end with it
        else:
            self.is_at_once = True
            self.signal_ranks(signal.SIGINT)
        self.last_stop = now

    def ranks(self) -> list[int]:
        """Process ids of the ranks on this machine."""
        pid = self.agent.pid
        try:
            return [int(rank) for rank in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def signal_ranks(self, number: int) -> set[int]:
        """Send a signal to the ranks; returns their process ids."""
        ranks = self.ranks()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)
        return set(ranks)

    def end(self, said: dict[str, Any]) -> int:
        """Print how the run ended as the last line; returns its exit code. `said` comes from `run`."""
        if self.agent.returncode == ExitCode.DONE:
            return ExitCode.DONE
        path, status = self.folder / STATUS_FILE, read_status(self.folder)
        told = status_of_latest_start(status) if status is not None and status != self.before else {}
        ending = ENDINGS.get(told.get("class") or "")
        if self.stopped_by is not None and status == self.stopped_in and not (ending and ending.is_permanent):
            told = {}  # a failure before the stop, after which the agent started the ranks again
        if told.get("exit_code") is not None:
            code = int(told["exit_code"])
            level = logging.INFO if code == ExitCode.STOPPED else logging.ERROR
            reason = str(told.get("reason") or "").partition("\n")[0]  # a rank has printed all of it
            log().log(level, "%s: %s (exit code %d) %s", path, told["status"], code, reason)
            return code
        if self.stopped_by is not None:
            log().info("stopped; %s has no record of how this run ended. The same command continues", path)
            return ExitCode.INTERRUPTED if self.is_at_once else STOPS[self.stopped_by]
        log().error("%s", said.get("reason") or f"torchrun's agent {how_ended(self.agent.returncode)}")
        return int(said.get("code") or ExitCode.BUG)


if __name__ == "__main__":
    main()
