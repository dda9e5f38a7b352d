"""Entry point of `python -m llava_fsdp.prepare`, which examines and indexes a dataset before training; see
prepare/main.py."""

from llava_fsdp.config import PrepareConfig, cli
from llava_fsdp.runtime.log import leave_noise_out


def main() -> None:
    leave_noise_out()
    cli.run("prepare", PrepareConfig, task)


def task(cfg: PrepareConfig) -> None:
    from llava_fsdp.prepare.main import prepare  # once the command line is checked: torch takes seconds

    prepare(cfg)


if __name__ == "__main__":
    main()
