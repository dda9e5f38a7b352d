"""Between a sweep and what it starts: `python -m llava_fsdp.sweep.exec_child PARENT COMMAND...` becomes the command.

As a process that is asked to end when the one that started it does, and that hears signals again: a launcher's workers
leave them alone (stop.py), which what they start would inherit.
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
