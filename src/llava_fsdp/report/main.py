"""Write an HTML page about one training, or one that compares several: `llava-fsdp report outputs/finetune`.

Reads the files in a training's output folder, whether it is running, has ended or was killed. Imports no torch.
"""

import sys
from pathlib import Path

from llava_fsdp.data.images.thumbnails import thumbnail
from llava_fsdp.report.compare_page import comparison_page
from llava_fsdp.report.run_page import report_page
from llava_fsdp.report.run_reader import REPORT_FILE, RunRecord, name_of, put_page, runs_in
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError, StorageError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.text.log import log, setup_logging

USAGE = """\
usage: llava-fsdp report RUN [RUN...] [out=FILE]

RUN       the output_dir of a training, also as output_dir=RUN; or the folder of a sweep, which stands for all of
          its jobs
out=FILE  where the page goes; otherwise RUN/report.html of a single run, and comparison.html of several
"""
COMPARISON = "comparison.html"


def main() -> None:
    """Write a report of the folders that the command line names, and print its path."""
    setup_logging()
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(USAGE, end="")
        sys.exit(ExitCode.DONE if words else ExitCode.USER)
    try:
        print(write(words))
    except LlavaFsdpError as error:
        log().error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)


def write(arguments: list[str]) -> Path:
    """Write the page that the arguments ask for, about one run or a comparison of several, and return its path. Raises
    LlavaFsdpError if a folder cannot be read, or the page cannot be written."""
    folders, out = parse(arguments)
    runs = [run for folder in folders for run in runs_in(folder)]
    is_one = len(runs) == 1 and runs[0].folder == folders[0]
    path = out or (runs[0].folder / REPORT_FILE if is_one else Path(COMPARISON))
    page = report_page(runs[0], thumbnail) if is_one else comparison_page(uniquely_named(runs))
    try:
        put_page(path, page, *(run.folder for run in runs))
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); give another file: out=FILE") from error
    return path


def parse(arguments: list[str]) -> tuple[list[Path], Path | None]:
    """Return the folders that a command line names, and the path of the page (`out=FILE`) or None. Raises ConfigError
    if an argument is wrong or no folder is named."""
    for word in arguments:
        if word.startswith("-"):
            raise ConfigError(f"{word} is not an option; options are written key=value, and -h lists them")
    out = [word.removeprefix("out=") for word in arguments if word.startswith("out=")]
    folders = [Path(word.removeprefix("output_dir=")) for word in arguments if not word.startswith("out=")]
    if out and not out[-1]:
        raise ConfigError("out= names no file; write out=FILE")
    if not folders:
        raise ConfigError("no RUN is named; give the output_dir of a training")
    return folders, Path(out[-1]) if out else None


def uniquely_named(runs: list[RunRecord]) -> list[RunRecord]:
    """If two runs have the same name, add the path of each run's folder to its name; a name that is only the end of
    this path is replaced by it. Return `runs`, which are changed in place."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.name} ({run.folder.resolve()})" if run.name != name_of(run.folder) else str(run.folder)
    return runs
