"""Run a job, which is one training of a sweep, and record its result."""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from llava_fsdp.config import Devices, SweepConfig, SweepMetric, at_least, load
from llava_fsdp.config.command_line.cli import quoted
from llava_fsdp.report.charts.downsample import WINDOW
from llava_fsdp.report.results import Results, metric_name, read_results
from llava_fsdp.report.run_reader import JOB, JOB_FILE, job_files
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.run_dir import make_run_folder
from llava_fsdp.runtime.files.small_json import BadJson, kinds_of, read_object, require_kinds
from llava_fsdp.runtime.files.status_file import STATUS_FILE
from llava_fsdp.runtime.text.log import log, setup_logging
from llava_fsdp.sweep.gpu_locks import check_devices, devices_here, locking_devices
from llava_fsdp.sweep.stop import StopRequest, ignore_signals
from llava_fsdp.sweep.torchrun import LOG_FILE, JobFailed, run_torchrun

RUNNING = "running"


@dataclass(kw_only=True)
class Job:
    """A job, and how it ended. It is written to `job.json`, because a Hydra launcher may run it in another process or
    on another machine."""

    number: int
    overrides: list[str]
    folder: str
    command: str = ""
    devices: list[str] = field(default_factory=list)
    """The job's GPUs, as in CUDA_VISIBLE_DEVICES; empty without GPUs, or if the job may use all of them."""
    status: str = RUNNING
    exit_code: int = ExitCode.BUG
    reason: str = ""
    metric: str = SweepMetric.loss.value
    value: float | None = None
    """What Hydra's sweeper minimises (see `value_of`); None until the job is done."""
    last_steps: int = WINDOW
    """Number of steps, at the end of the training, over which the loss is averaged."""
    numbers: Results = field(default_factory=Results)
    seconds: float = 0.0
    """From the start of the job's processes to their end, in the latest start of the sweep."""
    has_own_run: bool = True
    """False if the job ended before its first step: its folder may then hold an earlier run with other overrides."""
    private: bool = True
    """Whether files about this job can be read only by their owner, like those of the training."""

    @property
    def is_done(self) -> bool:
        return self.exit_code == ExitCode.DONE

    @property
    def file_mode(self) -> int:
        return 0o600 if self.private else 0o666

    def write(self) -> None:
        """Write `job.json` atomically, because other processes read it."""
        content = json.dumps(asdict(self), indent=2) + "\n"
        replace_file(Path(self.folder) / JOB_FILE, content.encode(), self.file_mode)


def read_jobs(folder: Path) -> list[Job]:
    """Read the jobs in a sweep's folder, by number. One still recorded as `running` was killed: it becomes `lost`."""
    jobs = []
    for path in job_files(folder):
        try:
            # files of earlier versions lack these two entries
            fields = {"has_own_run": True, "last_steps": WINDOW, **read_object(path, JOB)}
            fields["numbers"] = Results(**require_kinds(fields.get("numbers"), kinds_of(Results)))
            job = Job(**require_kinds(fields, kinds_of(Job)))
        except (BadJson, TypeError) as error:  # TypeError: the file has keys of another version
            log().warning("%s is skipped in the results: %s", path, error)
            continue
        if job.status == RUNNING:
            job.status, job.reason = "lost", "the process that ran it was killed before the job ended"
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.number)


def run_job(node: DictConfig, stop: StopRequest) -> Job:
    """Run a job (one training of a sweep) to its end, and return how it ended. A failure is logged and recorded, not
    raised. `node`: its configuration, composed by Hydra. `stop`: tells whether the user has stopped the sweep."""
    if not log().handlers:  # this is a new process that Hydra's launcher started for the job
        setup_logging()
    settings = HydraConfig.get()
    is_sweep = settings.mode == RunMode.MULTIRUN
    folder = Path(settings.runtime.output_dir if is_sweep else str(node.output_dir))
    private = node.get("private") is not False  # `load` below refuses values that are no booleans
    make_job_folder(folder, private, is_sweep)
    job = Job(
        number=settings.job.num if is_sweep else 0,
        overrides=list(settings.overrides.task),
        folder=os.path.relpath(folder),
        private=private,
    )
    job.write()
    if not stop.is_main():  # only the process that runs Hydra takes signals, and asks the jobs to stop by a file
        ignore_signals()
    began_at = time.monotonic()
    try:
        config = load(SweepConfig, node)  # only now, so that a wrong configuration is recorded as the job's failure
        job.metric, job.last_steps = config.sweep.metric.value, config.sweep.last_steps
        check_job(config, job.overrides, is_sweep)
        train(config, job, stop.level)
        job.numbers = read_results(folder, job.last_steps)
        job.value = value_of(job.numbers, config.sweep.metric)
        if job.value is None:
            raise JobFailed(
                f"the run finished, but {folder} has no {job.metric}, which sweep.metric={job.metric} needs; "
                "val_loss and val_score need val.every and records to validate on",
                took_steps=True,
            )
        job.status, job.exit_code = "done", ExitCode.DONE
    except LlavaFsdpError as error:
        record_failure(job, error, stop.level() > 0)
    job.seconds = round(time.monotonic() - began_at, 1)
    job.write()
    report_end(job)
    return job


def value_of(results: Results, metric: SweepMetric) -> float | None:
    """Return the result that Hydra's sweeper minimises: `metric`, negated for val_score; None if it is missing."""
    value = getattr(results, metric.value)
    return -value if metric is SweepMetric.val_score and value is not None else value


def make_job_folder(folder: Path, private: bool, is_sweep: bool) -> None:
    """Create a job's output folder. One that already has a training is not changed. In a sweep, Hydra has created it
    with default permissions, which are corrected."""
    has_run = any((folder / name).exists() for name in (LOG_FILE, STATUS_FILE))
    make_run_folder(folder, private)
    if is_sweep and private and not has_run:
        folder.chmod(0o700)


def record_failure(job: Job, error: LlavaFsdpError, is_stopping: bool) -> None:
    """Record in `job` why it did not finish. If it took a step in the current start of the sweep, or continues with the
    next one (`has_own_run`), also record its results so far; otherwise its folder may have those of an earlier run.

    While the sweep stops (`is_stopping`), two kinds of jobs are recorded as stopped, so that they continue when the
    sweep is started again: those not begun, and those that ended with exit code 1, as if killed before they record one.
    """
    code, job.reason = error.exit_code, str(error)
    if isinstance(error, JobFailed) and not job.command and is_stopping:
        code, job.reason = ExitCode.STOPPED, "stopped before it began"
    elif isinstance(error, JobFailed):
        code = ExitCode.STOPPED if is_stopping and error.code == ExitCode.BUG else error.code
    job.status, job.exit_code = code.name.lower(), code
    job.has_own_run = code == ExitCode.STOPPED or (isinstance(error, JobFailed) and error.took_steps)
    if job.has_own_run:
        job.numbers = read_results(Path(job.folder), job.last_steps)


def train(config: SweepConfig, job: Job, stop_level: Callable[[], int]) -> None:
    """Wait for free GPUs, and run a job on them with torchrun. With `launch.devices=own`, each job gets GPUs that no
    other job uses; otherwise all jobs may use all GPUs, and nothing is locked. `stop_level` returns 0 while the sweep
    goes on, 1 (save a checkpoint and end) or 2 (end at once) once the user has stopped it. Raises JobFailed if the
    training fails, or if the sweep was stopped before it began."""
    folder, count, name = Path(job.folder), config.launch.nproc_per_node, f"job {job.number}"
    devices = devices_here() if config.launch.devices is Devices.own else []
    check_devices(devices, count)
    with locking_devices(devices, count, name, stop_level) as (devices_of_job, locks):
        if stop_level():
            raise JobFailed("stopped before it began")
        # folders given with --config-dir
        folders = [s.path for s in HydraConfig.get().runtime.config_sources if s.provider == "command-line"]
        command = train_command(config, job.overrides, folder, folders)
        job.command, job.devices = shlex.join(command), [device.name for device in devices_of_job]
        job.write()
        on = f" on GPUs {','.join(job.devices)}" if devices_of_job else ""
        log().info("%s: %s -> %s%s", name, " ".join(job.overrides), job.folder, on)
        (folder / LOG_FILE).touch(job.file_mode)
        run_torchrun(command, folder, name, stop_level, ",".join(job.devices) if devices_of_job else None, locks)


def report_end(job: Job) -> None:
    """Log how a job ended."""
    if job.is_done:
        text = f"{metric_name(job.metric, [job.last_steps])} {getattr(job.numbers, job.metric):.4f}"
        log().info("job %d: done in %.0f s, %s", job.number, job.seconds, text)
        return
    hint = f"\n  command: {job.command}\n  log: {job.folder}/{LOG_FILE}" if job.command else ""
    end = "stopped" if job.exit_code == ExitCode.STOPPED else "failed"
    log().error("job %d: %s after %.0f s (%s): %s%s", job.number, end, job.seconds, job.status, job.reason, hint)


def check_job(config: SweepConfig, overrides: list[str], is_sweep: bool) -> None:
    """Raise ConfigError if a job cannot have this configuration, for example because it names several machines. A
    single training (`is_sweep` is false) may set output_dir."""
    at_least("launch.nproc_per_node", config.launch.nproc_per_node, 1)
    if config.launch.nnodes != 1:
        raise ConfigError(
            f"launch.nnodes={config.launch.nnodes}: a job of a sweep runs on one machine; "
            "set it to 1, or start each run on several machines with launch/multinode.sh"
        )
    if is_sweep and any(re.match(r"\+*output_dir=", override) for override in overrides):
        raise ConfigError("output_dir is set for each job of a sweep; give hydra.sweep.dir=FOLDER instead")
    metric = config.sweep.metric
    if metric is not SweepMetric.loss and config.val.every is None:
        raise ConfigError(
            f"sweep.metric={metric.value} needs validations, and val.every=null has none: set val.every=STEPS"
        )
    if metric is SweepMetric.val_score and not config.val.answers:
        raise ConfigError(
            "sweep.metric=val_score needs answers, and val.answers=0 asks for none: set val.answers=RECORDS"
        )


def train_command(config: SweepConfig, overrides: list[str], folder: Path, config_folders: list[str]) -> list[str]:
    """Return the torchrun command of a job. Overrides of the sweep itself (launch.*, sweep.*) are left out.
    `config_folders`: folders that the user gave with `--config-dir`."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.launch.nproc_per_node), "-m", "llava_fsdp.train"]
    for path in config_folders:
        command += ["--config-dir", path]
    command += [o for o in overrides if not re.match(r"[+~]*(launch|sweep)[.=]", o)]
    pretrain = Path(config.output_dir).parent / "pretrain"
    if config.model.projector == "auto" and config.model.checkpoint is None and pretrain.is_dir():
        # `auto` searches beside output_dir, but a job's output_dir is inside the sweep's folder
        command.append(f"model.projector={quoted(str(pretrain.absolute()))}")
    return [*command, f"output_dir={quoted(str(folder.absolute()))}"]
