"""Entry point of `python -m llava_fsdp.prepare`; see prepare/main.py."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from llava_fsdp.config import PrepareConfig
from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.process.imports import importing
from llava_fsdp.runtime.text.log import leave_noise_out


def main() -> None:
    leave_noise_out()
    cli.run("prepare", PrepareConfig, task)


def task(cfg: PrepareConfig) -> None:
    with importing():  # after the command line is checked, as torch takes seconds
        from llava_fsdp.prepare.main import prepare

    prepare(cfg)


if __name__ == "__main__":
    main()
