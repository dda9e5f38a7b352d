"""Becomes a command that ends with its parent: `python -m llava_fsdp.sweep.exec_child PARENT COMMAND...`.

The process receives SIGTERM when PARENT ends, and signals again: a launcher's workers ignore them (stop.py), which what
they start would inherit.
"""

import os
import signal
import sys

from llava_fsdp.runtime.process_end import end_with


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with(int(sys.argv[1]), signal.SIGTERM)  # on which torchrun lets its ranks save a checkpoint
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
