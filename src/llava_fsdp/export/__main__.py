"""Entry point of `python -m llava_fsdp.export`, which converts a model into a folder for other programs (see
main.py)."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from llava_fsdp.config import ConversionConfig
from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.process.imports import importing
from llava_fsdp.runtime.text.log import leave_noise_out


def main() -> None:
    leave_noise_out()
    cli.run("export", ConversionConfig, task)


def task(cfg: ConversionConfig) -> None:
    with importing():  # after the command line is checked, as torch takes seconds
        from llava_fsdp.export.main import export

    export(cfg)


if __name__ == "__main__":
    main()
