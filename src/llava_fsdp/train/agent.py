"""torchrun's agent without its own messages: `python -m llava_fsdp.train.agent PARENT REPORT FLAGS... -- WORDS...`.

Started by launcher.py. PARENT is its process id: when it ends, this process gets SIGTERM, and stops its ranks. REPORT
is a file descriptor that gets a JSON object about the rank that failed first. FLAGS are torchrun's, WORDS the
training's.
"""

import json
import logging
import os
import signal
import sys

from llava_fsdp.runtime.host import read_host
from llava_fsdp.runtime.process_end import AGENT, end_with


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # no ranks yet: end at once
        signal.signal(number, signal.SIG_DFL)
    parent, report, *rest = sys.argv[1:]
    end_with(int(parent), signal.SIGTERM)
    flags, words = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # restarted ranks must not read old addresses
    said = run(flags, words)
    if said is not None:
        os.write(int(report), json.dumps(said).encode())
        sys.exit(1)


def run(flags: list[str], words: list[str]) -> dict[str, object] | None:
    """Run all ranks to their end; None if all succeeded, else what is known of the one that failed first."""
    from torch.distributed import run as torchrun  # takes seconds, in which a signal ends this process
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # ranks report their errors themselves
    args = torchrun.get_args_parser().parse_args([*with_defaults(flags), "-m", "llava_fsdp.train", *words])
    try:
        torchrun.run(args)
    except SignalException as error:
        return {"reason": f"got {signal.Signals(error.sigval).name}"}
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return {"rank": rank, "reason": how, "code": max(0, code)}
    except Exception as error:  # a rendezvous that fails has many classes
        return {"kind": "meeting", "reason": f"{type(error).__name__}: {error}"}
    return None


def with_defaults(flags: list[str]) -> list[str]:
    """torchrun's flags with those that were not given: a rank for each GPU, one machine, three restarts."""
    import torch

    given = {flag.removeprefix("--").partition("=")[0] for flag in flags}
    ranks = [flag.partition("=")[2] for flag in flags if flag.startswith("--nproc-per-node=")]
    count = int(ranks[-1]) if ranks and ranks[-1].isdecimal() else torch.cuda.device_count() or 1
    added = [] if ranks else [f"--nproc-per-node={count}"]
    if "rdzv-endpoint" in given and "rdzv-backend" not in given:
        added.append("--rdzv-backend=c10d")
    if not given & {"standalone", "nnodes", "rdzv-endpoint", "rdzv-backend", "master-addr", "node-rank"}:
        added.append("--standalone")
    if "max-restarts" not in given:
        added.append("--max-restarts=3")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, read_host().usable_cores // count)))
    return [*added, *flags]


if __name__ == "__main__":
    main()
