"""Read the command line of the command `plan`, and show what it waits for; main.py has what it does."""

import sys

from llava_fsdp.config import PlanConfig
from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.process.imports import importing
from llava_fsdp.runtime.text.log import leave_noise_out, log
from llava_fsdp.runtime.text.progress import StageLine


def main() -> None:
    """Run `llava-fsdp plan`. torch is imported after the command line is checked, because that takes seconds."""
    # `from=` is the key `runs`: a field of a configuration class cannot have the name of a Python keyword
    words = sys.argv[1:] = [f"runs={w.removeprefix('from=')}" if w.startswith("from=") else w for w in sys.argv[1:]]

    def task(cfg: PlanConfig) -> None:
        """Check the configuration, and print the plan."""
        with StageLine("plan") as line:
            line.stage("loading torch")
            with importing():  # after the command line is checked, as torch takes seconds
                from llava_fsdp.plan.main import plan
                from llava_fsdp.train.setup.preflight import warn_if_refused

            line.stage("checks of the configuration")
            # a training would refuse some configurations that can be planned; the user is only warned
            remark = warn_if_refused(cfg, is_for_this_machine=cfg.gpu == "auto")
            plan(cfg, words, line)
            if remark:
                log().info("%s", remark)

    leave_noise_out()
    cli.run("plan", PlanConfig, task)
