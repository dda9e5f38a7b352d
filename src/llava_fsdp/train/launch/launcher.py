"""Start a training under torchrun, and end with the training's exit code: `llava-fsdp train [FLAGS] key=value...`.

FLAGS are torchrun's flags, and may be anywhere on the command line. By default there is one rank for each GPU of this
machine, or a single rank without GPUs. This process checks the command line, starts torchrun's agent (agent.py) in a
separate Unix session, passes signals on to the ranks, and prints as its last line how the run ended. It does not import
torch.
"""

import contextlib
import difflib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llava_fsdp.commands import start
from llava_fsdp.config import Config, load, schema_keys
from llava_fsdp.config.command_line import cli
from llava_fsdp.config.command_line.foreign_names import called_here
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.files.run_dir import refuse_in_use
from llava_fsdp.runtime.files.status_file import STATUS_FILE, read_status, status_of_latest_start
from llava_fsdp.runtime.process.process_end import STOP_SECONDS, children, how_ended, without_launcher
from llava_fsdp.runtime.process.watchdog import SAME_KEY_PRESS
from llava_fsdp.runtime.text.log import log, setup_logging
from llava_fsdp.train.launch.agent import is_given

TORCHRUN_WITH_VALUE = frozenset({
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
})  # fmt: skip
"""torchrun's flags that take a value (torch/distributed/run.py)."""
TORCHRUN_WITHOUT_VALUE = frozenset({"standalone", "virtual-local-rank"})
TORCHRUN_PROGRAM = frozenset({"module", "no-python", "run-path"})
"""torchrun's flags that choose the program. They are refused: it is always the training."""
HYDRA_WITHOUT_VALUE = frozenset({"--help", "-h", "--hydra-help", "--version", "--resolve", "--multirun", "-m"})
PRINTS = frozenset({"--help", "-h", "--cfg", "-c", "--info", "-i", "--hydra-help", "--version"})
"""Flags with which the training only prints something, such as its help."""
NUMBERS = {"nnodes": r"[1-9]\d*(:[1-9]\d*)?", "nproc-per-node": r"[1-9]\d*|gpu|cpu|auto|xpu", "max-restarts": r"\d+",
           "node-rank": r"\d+", "master-port": r"\d+", "rdzv-endpoint": r".+?(:\d+)?"}  # fmt: skip
"""Patterns for the values of torchrun's flags that are checked."""
AGENT = (sys.executable, "-P", "-m", "llava_fsdp.train.launch.agent")
MEETING = 10
"""Seconds that a machine with an invalid command line waits for the run's other machines, to end them too."""
STOPS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.STOPPED, signal.SIGHUP: ExitCode.STOPPED}
"""Signal that stops a training -> exit code if the training has not recorded how it ended."""
SIGNALS = {*STOPS, signal.SIGUSR1, signal.SIGCHLD}
"""Signals that this process handles while the ranks run."""
AGENT_ENDS = 1.0
"""Seconds within which torchrun's agent should end after its ranks; then it is terminated."""


def main() -> None:
    """Run `llava-fsdp train`: check the configuration before torch is imported, and start the ranks with torchrun."""
    # WORLD_SIZE is a mistake if the user or a scheduler has set it, and not torchrun for a rank that runs this command
    ranks_given = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" not in os.environ else "1"
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[name]  # set if a rank of another training has started this process
    setup_logging()
    if ranks_given != "1":
        log().warning(
            "WORLD_SIZE=%s and RANK are not read: this command starts all ranks of this machine by itself, and "
            "--nnodes, --nproc-per-node and --rdzv-endpoint say how many there are. A scheduler that starts each rank "
            "runs python -m llava_fsdp.train", ranks_given,
        )  # fmt: skip
    flags: list[str] = []
    try:
        flags, words = split(sys.argv[1:])
        cfg = read_training(words)
        if cfg is not None and is_one_machine(flags):
            refuse_in_use(Path(cfg.output_dir))
            if (ranks := given_ranks(flags)) is not None:
                cfg.parallel.check_divides(ranks)
    except LlavaFsdpError as error:
        log().error("%s: %s", type(error).__name__, error)
        if flags and not is_one_machine(flags):
            end_others(flags)  # the other machines, which wait for this one
        sys.exit(error.exit_code)
    if cfg is None:  # nothing is trained, so that this process can run the command itself
        sys.argv[1:] = words
        start("train", is_module=True)
        return
    launch = Launch(Path(cfg.output_dir))
    sys.exit(launch.end(launch.run(with_rendezvous(flags), words)))


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into (torchrun's flags, as `--name=value`; all others). Raise ConfigError for an unknown flag, or
    a value that torchrun would not accept."""
    flags: list[str] = []
    rest: list[str] = []
    given = iter(words)
    for word in given:
        word = {"-t": "--tee", "-r": "--redirects"}.get(word, word)
        name, equals, value = word.partition("=")
        flag_name = name.removeprefix("--").replace("_", "-")
        if not name.startswith("-") or name in HYDRA_WITHOUT_VALUE or name in cli.WITH_VALUES:
            rest.append(word)
            if word in cli.WITH_VALUES:
                rest += [value for value in [next(given, "")] if value]
        elif flag_name in TORCHRUN_WITHOUT_VALUE:
            flags.append(word)
        elif flag_name in TORCHRUN_WITH_VALUE:
            value = value if equals else next(given, "")
            if not re.fullmatch(NUMBERS.get(flag_name, r".+"), value):
                raise ConfigError(f"--{flag_name} {value}: give a value as torchrun takes it (torchrun --help)")
            flags.append(f"--{flag_name}={value}")
        elif flag_name in TORCHRUN_PROGRAM:
            raise ConfigError(f"{word}: llava-fsdp train runs the training and nothing else; take the flag out")
        else:
            if here := called_here(flag_name, schema_keys(Config)):
                raise ConfigError(f"{name} is not a flag; {here}, and keys are written key=value")
            similar = difflib.get_close_matches(flag_name, [*TORCHRUN_WITH_VALUE, *TORCHRUN_WITHOUT_VALUE], n=1)
            hint = f"did you mean --{similar[0]}?" if similar else "the flags are torchrun's (torchrun --help)"
            raise ConfigError(f"{word} is not a flag; {hint}")
    return flags, rest


def read_training(words: list[str]) -> Config | None:
    """Read the configuration from the arguments (without torchrun's flags), as the ranks will do. None if the command
    does not train, but only prints something or measures memory (`dry_run`). Raises ConfigError if it is invalid."""
    if {word.partition("=")[0] for word in words} & PRINTS:
        return None
    sys.argv[1:] = list(words)
    node = cli.compose("train", Config)
    if node is None:
        return None
    config = load(Config, node)
    return config if config.dry_run is None else None


def given_ranks(flags: list[str]) -> int | None:
    """Return the number of ranks on this machine that the flags give; None if they leave it to the GPUs."""
    values = [flag.partition("=")[2] for flag in flags if flag.startswith("--nproc-per-node=")]
    return int(values[-1]) if values and values[-1].isdigit() else None


def with_rendezvous(flags: list[str]) -> list[str]:
    """Return torchrun's flags with defaults for those that are missing: `--max-restarts=3`; `--standalone` if no flag
    is about several machines; `--rdzv-backend=c10d` if there is an `--rdzv-endpoint`."""
    added = [] if is_given(flags, "max-restarts") else ["--max-restarts=3"]
    if is_one_machine(flags):
        added.append("--standalone")
    elif is_given(flags, "rdzv-endpoint") and not is_given(flags, "rdzv-backend"):
        added.append("--rdzv-backend=c10d")
    return [*added, *flags]


def end_others(flags: list[str]) -> None:
    """End the run on the other machines, because the command line of this one is invalid. They wait for this machine at
    a rendezvous. So join it, and start this machine's ranks, which fail with the same error and end the run everywhere.
    Machines that do not join within `MEETING` seconds wait until their own `join_timeout`."""
    log().info("looking for machines that wait for this one, to end them")
    conf = [flag.partition("=")[2] for flag in flags if flag.startswith("--rdzv-conf=")][-1:]
    meeting = f"--rdzv-conf={','.join([*conf, f'join_timeout={MEETING}'])}"
    Launch(Path(os.devnull)).run([*with_rendezvous(flags), meeting], sys.argv[1:])


def is_one_machine(flags: list[str]) -> bool:
    """Return whether none of torchrun's flags is about several machines."""
    return not any(is_given(flags, name) for name in ("nnodes", "rdzv-endpoint", "rdzv-backend", "master-addr"))


class Launch:
    """Runs torchrun's agent once, which starts the ranks, and handles signals to this process until the agent ends."""

    def __init__(self, folder: Path):
        """Prepare the launch of a training. `folder` is the run's output folder."""
        self.folder = folder
        self.status_before = read_status(folder)
        """The run's status before this launch, left by an earlier run."""
        self.stopped_by: signal.Signals | None = None
        """The first signal that requested a stop."""
        self.status_at_stop: dict[str, Any] | None = None
        """The run's status when that signal came."""
        self.skips_checkpoint = False
        """Whether Ctrl-C was pressed after the first signal to stop, so that the ranks end without a checkpoint."""
        self.last_stop = 0.0
        """Time of the last signal to stop that was handled, by the monotonic clock."""
        self.ranks_told_to_stop: set[int] = set()
        """Process ids of the ranks that were told to stop."""

    def run(self, flags: list[str], words: list[str]) -> dict[str, Any]:
        """Run a training to its end, with torchrun's `flags` and the training's arguments `words`. Return the report of
        the rank that failed first, or of the agent itself: {`reason`, `code` if known}; empty without a failure."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # from here on `wait` receives the signals
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": STOP_SECONDS, **os.environ}
        report, agent_end = os.pipe()
        command = [*AGENT, str(os.getpid()), str(agent_end), *flags, "--", *words]
        self.agent = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[agent_end]
        )
        os.close(agent_end)
        self.wait()
        with open(report, "rb") as file:
            lines = file.read().splitlines()
        return json.loads(lines[0]) if lines else {}

    def wait(self) -> None:
        """Wait until torchrun's agent has ended, and pass signals on to the ranks until then.

        When the training is to stop, the agent, which would start the ranks again, should end within `AGENT_ENDS`
        seconds after them; otherwise it is terminated then. It gets no signal earlier, because a scheduler may also
        send a signal to all processes, and an agent that gets a second signal kills the ranks while they save. An agent
        that still waits for other machines long after the end of the ranks is killed.
        """
        ranks_ended: float | None = None
        is_agent_told = False
        while self.agent.poll() is None:
            received = signal.sigtimedwait(SIGNALS, 0.5)
            if received is not None and received.si_signo == signal.SIGUSR1:
                self.signal_ranks(signal.SIGUSR1)
            elif received is not None and received.si_signo in STOPS:
                self.stop(signal.Signals(received.si_signo))
            if self.stopped_by is None or self.ranks_told_to_stop & self.ranks():
                continue
            now = time.monotonic()
            ranks_ended = ranks_ended or now
            if not is_agent_told and (not self.ranks_told_to_stop or now - ranks_ended >= AGENT_ENDS):
                self.agent.terminate()
                is_agent_told = True
            elif not self.ranks() and now - ranks_ended >= 10 * AGENT_ENDS:  # the agent waits for other machines
                self.agent.kill()

    def stop(self, number: signal.Signals) -> None:
        """Handle a signal that asks for the end of the training.

        After the first one the ranks save a checkpoint and end. From then on only SIGINT (Ctrl-C) counts: after the
        next one the ranks end at once, and after a third they are killed. A SIGINT that comes within `SAME_KEY_PRESS`
        seconds of the one before is the same key press: the terminal and a parent process may both send it.
        """
        now = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by, self.status_at_stop = number, read_status(self.folder)
            self.ranks_told_to_stop = self.signal_ranks(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif number != signal.SIGINT or now - self.last_stop < SAME_KEY_PRESS:
            return
        elif self.skips_checkpoint:
            self.agent.kill()  # the ranks end with it
        else:
            self.skips_checkpoint = True
            self.signal_ranks(signal.SIGINT)
        self.last_stop = now

    def ranks(self) -> set[int]:
        """Return the process ids of the ranks on this machine."""
        return children(self.agent.pid)

    def signal_ranks(self, number: int) -> set[int]:
        """Send a signal to the ranks on this machine; return their process ids."""
        ranks = self.ranks()
        for rank in sorted(ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)
        return ranks

    def end(self, report: dict[str, Any]) -> int:
        """Print, as the last line, how the training ended, and return its exit code. `report`: what `run` returned."""
        if self.agent.returncode == ExitCode.DONE:
            return ExitCode.DONE
        path, status = self.folder / STATUS_FILE, read_status(self.folder)
        last = status_of_latest_start(status) if status is not None and status != self.status_before else {}
        ending = ENDINGS.get(last.get("class") or "")
        if self.stopped_by is not None and status == self.status_at_stop and not (ending and ending.is_permanent):
            last = {}  # the status is that of a failure before the stop, after which the agent restarted the ranks
        if last.get("exit_code") is not None:
            code = int(last["exit_code"])
            level = logging.INFO if code == ExitCode.STOPPED else logging.ERROR
            reason = beginning_of(str(last.get("reason") or ""))  # a rank has already printed the whole reason
            ended = last["status"]
            if status is not None and status.get("refused"):
                ended = f"the run stays {status['status']}; this start {ended}"
            log().log(level, "%s: %s (exit code %d) %s", path, ended, code, reason)
            return code
        if self.stopped_by is not None:
            log().info("stopped; %s has no record of how this run ended. The same command continues", path)
            return ExitCode.INTERRUPTED if self.skips_checkpoint else STOPS[self.stopped_by]
        log().error("%s", report.get("reason") or f"torchrun's agent {how_ended(self.agent.returncode)}")
        return int(report.get("code") or ExitCode.BUG)


def beginning_of(reason: str) -> str:
    """Return the first line of an error that has been printed before. If it announces the next lines with a colon,
    return only its sentences before that, or a reference to the text."""
    line = reason.partition("\n")[0].rstrip()
    if not line.endswith(":"):
        return line
    return line.rpartition(". ")[0] or "for the reason above"
