"""Run a command that gets SIGTERM when its parent process ends: `python -m llava_fsdp.sweep.exec_child PARENT
COMMAND...`, where PARENT is the parent's process id. Sweeps start their trainings with it.

The default handling of SIGINT and SIGTERM is restored first: a worker of a Hydra launcher ignores both signals, and a
command that it starts would inherit this.
"""

import os
import signal
import sys

from llava_fsdp.runtime.process.process_end import end_with


def main() -> None:
    """Replace this process by a command, which gets SIGTERM when the starting process ends. The first argument is the
    id of the starting process; the others are the command."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with(int(sys.argv[1]), signal.SIGTERM)  # on SIGTERM, torchrun lets its ranks save a checkpoint
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
