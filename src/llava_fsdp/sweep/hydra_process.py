"""Run a sweep's trainings with Hydra, its launcher and its sweeper, in a child process of the process that the user
started."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

from llava_fsdp.config import SweepConfig, config_dir
from llava_fsdp.config.command_line.cli import shorten
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.text.log import log, setup_logging
from llava_fsdp.sweep.job import Job, read_jobs, run_job
from llava_fsdp.sweep.results import print_results, write_results
from llava_fsdp.sweep.stop import StopRequest
from llava_fsdp.sweep.torchrun import JobFailed


def main() -> None:
    """Run all trainings, write and print their results, and exit. `sys.argv` has the path of the stop file, in which a
    request to stop the sweep is written, the sweep's folder (empty for a single training), and Hydra's arguments."""
    setup_logging()
    stop, folder = StopRequest(Path(sys.argv[1])), sys.argv[2]
    del sys.argv[1:3]
    stop.take_signals()
    jobs, succeeded, errors = run_jobs(stop)
    if folder:
        # Hydra's launcher may have run jobs in other processes, which are not in `jobs`
        jobs = read_jobs(Path(folder))
        write_results(Path(folder), jobs)
        print_results(jobs)
    exit_as_jobs_ended(jobs, succeeded, stop.level() > 0, errors)


def run_jobs(stop: StopRequest) -> tuple[list[Job], bool, str]:
    """Run all jobs of a sweep with Hydra. Return the jobs that ran in this process (Hydra's launcher may run others
    elsewhere), whether all jobs succeeded, and Hydra's error messages."""
    jobs: list[Job] = []
    errors = io.StringIO()

    def task(node: DictConfig) -> float:
        """Run one job, and return the value that Hydra's sweeper minimizes."""
        job = run_job(node, stop)
        jobs.append(job)
        if not job.is_done or job.value is None:
            raise JobFailed(f"{job.reason}\ncommand: {job.command}")
        return job.value

    program = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="sweep")(task)
    return jobs, run_hydra(program, errors), errors.getvalue()


def run_hydra(program: Callable[[], object], errors: io.StringIO) -> bool:
    """Run Hydra's main function, and return whether all jobs succeeded. If a job fails, Hydra still runs the others of
    its batch before it raises the error. Its messages are collected in `errors`, not printed; with HYDRA_FULL_ERROR=1
    they are printed, and Hydra raises the job's own exception instead of SystemExit."""
    prints_errors = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        with contextlib.nullcontext() if prints_errors else contextlib.redirect_stderr(errors):
            program()
    except SystemExit as exited:
        return exited.code in (0, None)
    except JobFailed:  # under HYDRA_FULL_ERROR=1
        return False
    return True


def exit_as_jobs_ended(jobs: list[Job], succeeded: bool, was_stopped: bool, errors: str) -> None:
    """Exit with the exit code of the first job that failed; else with 75 if the sweep was stopped (the same command
    continues it); else with another code if Hydra itself failed. Return if nothing failed.

    Args:
        jobs: the jobs that have run.
        succeeded: whether Hydra raised no error.
        was_stopped: whether the user has stopped the sweep.
        errors: Hydra's messages. Without a traceback, and before the first job, they are about a mistake of the user.
    """
    failed = [job.exit_code for job in jobs if job.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)]
    if failed:
        sys.exit(failed[0])
    if was_stopped or any(job.exit_code == ExitCode.STOPPED for job in jobs):
        log().error("stopped; the same command with the same hydra.sweep.dir continues")
        sys.exit(ExitCode.STOPPED)
    if not succeeded:  # Hydra failed before the first job, between two jobs, or in the launcher
        is_mistake = not jobs and "Traceback" not in errors
        log().error("%s", f"ConfigError: {shorten(errors, SweepConfig)}" if is_mistake else errors)
        sys.exit(ExitCode.USER if is_mistake else ExitCode.BUG)


if __name__ == "__main__":
    main()
