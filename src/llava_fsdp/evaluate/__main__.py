"""Entry point of `python -m llava_fsdp.evaluate`; see evaluate/main.py."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from llava_fsdp.config import EvaluateConfig
from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.process.imports import importing
from llava_fsdp.runtime.text.log import leave_noise_out, log


def main() -> None:
    leave_noise_out()
    cli.run("evaluate", EvaluateConfig, task)


def task(cfg: EvaluateConfig) -> None:
    log().info("opening model.checkpoint=%s; to load a large model takes minutes", cfg.model.checkpoint)
    with importing():  # after the command line is checked, as torch takes seconds
        from llava_fsdp.evaluate.main import evaluate

    evaluate(cfg)


if __name__ == "__main__":
    main()
