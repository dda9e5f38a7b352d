"""Run a command that ends when the calling process ends: `python -m llava_fsdp.sweep.exec_child PARENT COMMAND...`.

This process receives SIGTERM when process PARENT ends. It also restores the default handling of SIGINT and SIGTERM:
workers of a Hydra launcher ignore these signals, which a command that they start would inherit.
"""

import os
import signal
import sys

from llava_fsdp.runtime.process_end import end_with


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with(int(sys.argv[1]), signal.SIGTERM)  # on SIGTERM, torchrun lets its ranks save a checkpoint
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
