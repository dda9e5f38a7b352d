"""A worker process of `worker_pool.py`: `python -m llava_fsdp.data.index.worker_main`, which that module starts."""

import os
import signal
import sys

from llava_fsdp.data.index.worker_pool import work
from llava_fsdp.runtime.process_end import end_with
from llava_fsdp.runtime.terminal_text import guard_streams

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    end_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand between the answers
    guard_streams()
    work(sys.stdin.buffer, answers)
