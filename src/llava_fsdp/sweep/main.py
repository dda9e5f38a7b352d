"""Run several trainings with different settings: `python -m llava_fsdp.sweep -m stage=finetune optim.lr=1e-5,2e-5`.

Hydra composes the configuration of each training (job) and its launcher starts the jobs, each with a torchrun of its
own. Several jobs in one torchrun do not work: the second job finds the first one's addresses in torchrun's store, and
hangs. Imports neither torch nor transformers.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

from llava_fsdp.config.command_line.hydra_guard import check_command_line
from llava_fsdp.report.run_reader import job_files
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.text.log import log, setup_logging
from llava_fsdp.sweep.job import read_jobs
from llava_fsdp.sweep.results import print_results, write_results
from llava_fsdp.sweep.stop import STOP_FILE, StopRequest, supervise


def main() -> None:
    """Run a sweep: Hydra runs in a child process, and this one handles stops and reports if the child is killed."""
    setup_logging()
    try:
        check_command_line(sys.argv[1:])
        refuse_maximizing(sys.argv[1:])
        sweep = sweep_folder()
    except ConfigError as error:
        log().error("ConfigError: %s", error)
        sys.exit(error.exit_code)
    with tempfile.TemporaryDirectory() as single:
        stop = StopRequest((sweep or Path(single)).absolute() / STOP_FILE)
        stop.clear()
        words = ["llava_fsdp.sweep.hydra_process", str(stop.path), str(sweep or ""), *sys.argv[1:]]
        code = supervise(words, stop)
        stop.clear()
    if code < 0 and sweep is not None:  # the child process was killed before it could report anything
        log().error("the process that ran Hydra was ended by signal %d", -code)
        jobs = read_jobs(sweep)
        write_results(sweep, jobs)
        print_results(jobs)
    sys.exit(ExitCode.BUG if code < 0 else code)


def sweep_folder() -> Path | None:
    """Return the sweep's output folder, in which results of an earlier sweep are deleted; None without `-m` (a single
    training). If the user gave no folder, one is chosen, and added to `sys.argv` for every launcher of Hydra."""
    if not {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(sys.argv[1:]):
        return None
    given = [a.partition("=")[2].strip("'\"") for a in sys.argv[1:] if a.startswith("hydra.sweep.dir=")]
    if not given:
        given = [time.strftime("outputs/sweeps/%Y-%m-%d_%H-%M-%S")]
        sys.argv.append(f"hydra.sweep.dir={given[0]}")
    if "${" in given[-1]:
        raise ConfigError(f"hydra.sweep.dir={given[-1]} must be a plain folder; hydra.sweep.subdir names the jobs'")
    folder = Path(given[-1])
    for old in job_files(folder):
        old.unlink()
    return folder


def refuse_maximizing(words: list[str]) -> None:
    """Raise ConfigError if Hydra's sweeper is told to maximise the values of the jobs, which must be minimised."""
    for word in words:
        key, _, value = word.partition("=")
        if re.fullmatch(r"[+~]*hydra\.sweeper\.direction", key) and "maximize" in value.lower():
            raise ConfigError(
                f"{word}: the sweeper must minimize; with sweep.metric=val_score it gets the negative of the score"
            )
