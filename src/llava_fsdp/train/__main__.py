"""Entry point of `torchrun -m llava_fsdp.train`. The training itself is in main.py, which is imported only after the
command line has been checked, because importing torch takes seconds."""

from llava_fsdp.runtime.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_fsdp.config import Config, cli
from llava_fsdp.report.run_reader import REPORT_FILE
from llava_fsdp.runtime.imports import importing
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.status_file import Outcome, log_write_errors, write_ending

if TYPE_CHECKING:
    from llava_fsdp.train.main import RunParts


def main() -> None:
    parts: RunParts | None = None

    def task(cfg: Config) -> None:
        with importing():
            from llava_fsdp.train.main import RunParts, train

        nonlocal parts
        parts = RunParts()
        train(cfg, parts)

    def on_exit(folder: Path, outcome: Outcome) -> dict[str, Any] | None:
        first = write_ending(folder, outcome)
        with log_write_errors(folder / REPORT_FILE):
            if parts is not None and parts.reporter is not None:
                parts.reporter.end()
            elif env_rank() == 0:
                from llava_fsdp.train.live_page import rewrite_page

                rewrite_page(folder)
        return first

    cli.run("train", Config, task, on_exit)


if __name__ == "__main__":
    cli.start_process("train", Config)
    main()
