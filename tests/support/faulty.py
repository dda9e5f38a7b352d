"""`llava_fsdp.train` with a fault on one rank: FAULT=kind:rank:step, with `!` behind it in every attempt."""

import os

from llava_fsdp.config import Config
from llava_fsdp.config.command_line import cli

if __name__ == "__main__":
    cli.start_process("train", Config)

import signal
import time

from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.train import loop
from llava_fsdp.train import run as entry

FOREVER = 10_000


def bug() -> None:
    raise ZeroDivisionError("a bug of ours")


def data() -> None:
    raise DataError("data.json, record 7: nothing in it").about(record="data.json, record 7")


KINDS = {
    "bug": bug,
    "data": data,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(0),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(FOREVER),
    "slow": lambda: time.sleep(0.05),
}


def main() -> None:
    kind, rank, step = os.environ.get("FAULT", "slow:-1:0").rstrip("!").split(":")
    always = os.environ.get("FAULT", "").endswith("!")
    here = os.environ.get("RANK", "0") == rank and (always or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0")
    pace = float(os.environ.get("PACE", "0"))
    do_step, prepare = loop.train_step, Steps.prepare

    def train_step(state, *rest, **named):
        time.sleep(pace)
        if here and kind in KINDS and (state.step == int(step) or kind == "slow"):
            KINDS[kind]()
        return do_step(state, *rest, **named)

    def prepare_slowly(steps, number):
        if here and kind == "stall" and number == int(step):
            steps.image_reader.status.at("data.json, record 7")
            time.sleep(FOREVER)
        return prepare(steps, number)

    loop.train_step, Steps.prepare = train_step, prepare_slowly
    entry.run()


if __name__ == "__main__":
    main()
