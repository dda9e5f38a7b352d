"""Several runs from one command line: `python -m llava_fsdp.sweep -m stage=finetune optim.lr=1e-5,2e-5`.

Hydra makes the jobs and its launcher places them; a job is one torchrun in a process of its own. Several jobs in
one process group do not work: the second meets the addresses that the first left in torchrun's store, and hangs.
Imports neither torch nor transformers.
"""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from llava_fsdp.cli import quoted, shorten
from llava_fsdp.config import SweepConfig, at_least, config_dir, load
from llava_fsdp.errors import ConfigError, ExitCode, LlavaFsdpError
from llava_fsdp.guard import check_command_line
from llava_fsdp.log import log, setup_logging

JOB_FILE = "job.json"
LOG_FILE = "train.log"
PROGRESS_SECONDS = 10
STEP_LINE = re.compile(r"step \d+/\d+ .*")
# What one torchrun tells its workers; a torchrun inside another's worker must not see it.
LAUNCHER_VARIABLES = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|(MASTER|GROUP|ROLE|TORCHELASTIC)_.*)")


class JobFailed(LlavaFsdpError):
    """One job of a sweep did not finish."""


@dataclass(kw_only=True)
class Job:
    """How one job went; written to `job.json`, because a launcher may run it in another process or machine."""

    number: int
    overrides: list[str]
    folder: str
    command: str = ""
    status: str = ExitCode.DONE.name.lower()
    exit_code: int = ExitCode.DONE
    reason: str = ""
    loss: float | None = None
    seconds: float = 0.0


def main() -> None:
    """Run every job, print how each went, and end with the exit code of the first that failed."""
    setup_logging()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        check_command_line(sys.argv[1:], "sweep")
        sweep = sweep_folder()
    except ConfigError as error:
        stop(error.exit_code, f"ConfigError: {error}")
    jobs: list[Job] = []
    said = io.StringIO()

    def task(node: DictConfig) -> float:
        job = run_job(node)
        jobs.append(job)
        if job.loss is None:
            raise JobFailed(f"{job.reason}\ncommand: {job.command}")
        return job.loss

    program = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="sweep")(task)
    try:
        succeeded = run_hydra(program, said)
    except KeyboardInterrupt:
        succeeded = False
        said.write("interrupted")
    if sweep is not None:
        jobs = read_jobs(sweep)
        show(jobs)
    for job in jobs:
        if job.exit_code != ExitCode.DONE:
            stop(job.exit_code)
    if not succeeded:  # before the first job, between two, or in the launcher
        text = said.getvalue()
        mistake = not jobs and "Traceback" not in text and text != "interrupted"
        stop(*(ExitCode.USER, f"ConfigError: {shorten(text, SweepConfig)}") if mistake else (ExitCode.BUG, text))


def run_hydra(program: Callable[[], object], said: io.StringIO) -> bool:
    """Whether Hydra and all jobs ended well; what Hydra wrote about an error goes to `said`.

    Hydra runs every job of a batch before it raises the first one's error, which the job has then told already.
    """
    full = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        with contextlib.nullcontext() if full else contextlib.redirect_stderr(said):
            program()
    except SystemExit as end:
        return end.code in (0, None)
    except JobFailed:  # under HYDRA_FULL_ERROR=1
        return False
    return True


def sweep_folder() -> Path | None:
    """The folder of the sweep, None without `-m`.

    It is fixed before Hydra starts, so that the jobs' results are found there whatever launcher places the jobs.
    """
    if not {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(sys.argv[1:]):
        return None
    given = [a.partition("=")[2].strip("'\"") for a in sys.argv[1:] if a.startswith("hydra.sweep.dir=")]
    if not given:
        given = [time.strftime("outputs/sweeps/%Y-%m-%d_%H-%M-%S")]
        sys.argv.append(f"hydra.sweep.dir={given[0]}")
    if "${" in given[-1]:
        raise ConfigError(f"hydra.sweep.dir={given[-1]} must be a plain folder; hydra.sweep.subdir names the jobs'")
    folder = Path(given[-1])
    for old in folder.glob(f"**/{JOB_FILE}"):  # of an earlier sweep that this one continues
        old.unlink()
    return folder


def run_job(node: DictConfig) -> Job:
    """One job, from its composed configuration to its result; a failure is told, recorded and returned."""
    if not log().handlers:  # a launcher has started a process for the job
        setup_logging()
    settings = HydraConfig.get()
    is_sweep = settings.mode == RunMode.MULTIRUN
    number = settings.job.num if is_sweep else 0
    folder = Path(settings.runtime.output_dir if is_sweep else str(node.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(number=number, overrides=list(settings.overrides.task), folder=os.path.relpath(folder))
    log().info("job %d: %s -> %s", number, " ".join(job.overrides), job.folder)
    started = time.monotonic()
    try:
        config = load(SweepConfig, node)
        check_job(config, job.overrides, is_sweep)
        command = train_command(config, job.overrides, folder, config_folders())
        job.command = shlex.join(command)
        run_torchrun(command, folder, f"job {number}")
        job.loss = last_loss(folder)
    except LlavaFsdpError as error:
        job.reason = str(error)
        code = failure_code(folder) if isinstance(error, JobFailed) else error.exit_code
        job.status, job.exit_code = code.name.lower(), code
    job.seconds = round(time.monotonic() - started, 1)
    (folder / JOB_FILE).write_text(json.dumps(asdict(job), indent=2) + "\n")
    if job.loss is not None:
        log().info("job %d: done in %.0f s, last loss %.4f", number, job.seconds, job.loss)
    else:
        hint = f"\n  command: {job.command}\n  log: {job.folder}/{LOG_FILE}" if job.command else ""
        log().error("job %d: failed after %.0f s (%s): %s%s", number, job.seconds, job.status, job.reason, hint)
    return job


def check_job(config: SweepConfig, overrides: list[str], is_sweep: bool) -> None:
    at_least("launch.nproc_per_node", config.launch.nproc_per_node, 1)
    if config.launch.nnodes != 1:
        raise ConfigError(
            f"launch.nnodes={config.launch.nnodes}: a job of a sweep runs on one machine; "
            "set it to 1, or start each run on several machines with launch/multinode.sh"
        )
    if is_sweep and any(re.match(r"\+*output_dir=", override) for override in overrides):
        raise ConfigError("output_dir is set for each job of a sweep; give hydra.sweep.dir=FOLDER instead")


def config_folders() -> list[str]:
    """Folders that the user gave with `--config-dir`."""
    return [s.path for s in HydraConfig.get().runtime.config_sources if s.provider == "command-line"]


def train_command(config: SweepConfig, overrides: list[str], folder: Path, config_folders: list[str]) -> list[str]:
    """The torchrun of one job: its overrides without `launch.*`, and its own output folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.launch.nproc_per_node), "-m", "llava_fsdp.train"]
    for path in config_folders:
        command += ["--config-dir", path]
    command += [o for o in overrides if not re.match(r"[+~]*launch[.=]", o)]
    pretrain = Path(config.output_dir).parent / "pretrain"
    if config.model.projector == "auto" and config.model.checkpoint is None and pretrain.is_dir():
        # `auto` looks beside output_dir, and that is now inside the sweep's folder
        command.append(f"model.projector={quoted(str(pretrain.absolute()))}")
    return [*command, f"output_dir={quoted(str(folder.absolute()))}"]


def run_torchrun(command: list[str], folder: Path, name: str) -> None:
    """Run to the end, with everything it says in `train.log` and a step's line now and then on the terminal.

    The workers write to the file itself: with a pipe, a worker that outlives its torchrun would keep us waiting.

    Raises:
        JobFailed: it returned an error; the message has the reason that a worker gave.
    """
    (folder / "run_status.json").unlink(missing_ok=True)  # else a start that fails shows an earlier run's reason
    environment = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(k)}
    path = folder / LOG_FILE
    with path.open("a") as file, path.open(errors="replace") as reader:
        reader.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            follow(child, reader, name)
        except BaseException:
            child.terminate()  # torchrun ends its workers
            child.wait()
            raise
    if child.returncode != 0:
        status = read_status(folder)
        raise JobFailed(status["reason"] if status else f"torchrun returned {child.returncode}: {tail(path)}")


def follow(child: subprocess.Popen, reader: io.TextIOBase, name: str) -> None:
    """Wait for the child, and say how far it is every `PROGRESS_SECONDS`."""
    next_line = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
        steps = STEP_LINE.findall(reader.read())
        if steps and time.monotonic() >= next_line:
            log().info("%s: %s", name, steps[-1])
            next_line = time.monotonic() + PROGRESS_SECONDS
        if child.returncode is not None:
            return


def read_status(folder: Path) -> dict | None:
    try:
        return json.loads((folder / "run_status.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def failure_code(folder: Path) -> ExitCode:
    """What the worker that failed first returned; BUG where none lived to say."""
    status = read_status(folder)
    return ExitCode(status["exit_code"]) if status and status["exit_code"] else ExitCode.BUG


def tail(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-5:])


def last_loss(folder: Path) -> float:
    """The loss of the last step that rank 0 recorded: what a sweeper minimises."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    if not lines:
        raise JobFailed(f"the run ended well, but {path} has no step in it")
    return float(json.loads(lines[-1])["loss"])


def read_jobs(folder: Path) -> list[Job]:
    jobs = [Job(**json.loads(path.read_text())) for path in folder.glob(f"**/{JOB_FILE}")]
    return sorted(jobs, key=lambda job: job.number)


def show(jobs: list[Job]) -> None:
    """The table at the end, on standard output."""
    if not jobs:
        return
    table = Table("job", "overrides", "status", "last loss", "time", "folder", title="sweep", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # a folder must stay whole to be copied
    for job in jobs:
        status = "done" if job.exit_code == ExitCode.DONE else f"failed ({job.status})"
        loss = "-" if job.loss is None else f"{job.loss:.4f}"
        table.add_row(str(job.number), " ".join(job.overrides), status, loss, f"{job.seconds:.0f} s", job.folder)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False).print(table)


def interrupt(number: int, frame: object) -> None:
    """A scheduler's SIGTERM ends the running job as Ctrl-C does, instead of leaving it behind."""
    raise KeyboardInterrupt


def stop(code: int, message: str = "") -> NoReturn:
    if message:
        log().error("%s", message)
    sys.exit(code)


if __name__ == "__main__":
    main()
