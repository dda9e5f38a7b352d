"""Entry point of `python -m llava_fsdp.doctor`, which checks this machine before a training; see doctor/main.py."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from llava_fsdp.config import DoctorConfig
from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.process.imports import importing
from llava_fsdp.runtime.text.log import leave_noise_out


def main() -> None:
    leave_noise_out()
    cli.run("doctor", DoctorConfig, task)


def task(cfg: DoctorConfig) -> None:
    with importing():  # after the command line is checked, as torch takes seconds
        from llava_fsdp.doctor.main import doctor

    doctor(cfg)


if __name__ == "__main__":
    main()
