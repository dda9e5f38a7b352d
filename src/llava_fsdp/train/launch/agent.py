"""Run torchrun's agent without its log messages.

Usage: `python -m llava_fsdp.train.launch.agent PARENT REPORT FLAGS... -- WORDS...`.

launcher.py starts this program. PARENT is its process id: when it ends, this process gets SIGTERM and stops its ranks.
REPORT is a file descriptor to which a failure is written as a line with a JSON object; a rank may have written one
before (`process_end.end_agent`). FLAGS are torchrun's flags, and WORDS are the arguments of the training program.
"""

import contextlib
import json
import logging
import os
import signal
import sys
from argparse import Namespace

from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.process.process_end import AGENT, end_with, how_ended

PROGRAM = ("-m", "llava_fsdp.train")
NOT_MET = (
    "the machines did not meet: are --rdzv-id, --rdzv-endpoint and --nnodes the same on all of them, is every machine "
    "started, and does the endpoint's name resolve and its port answer?"
)


def main() -> None:
    """Run torchrun's agent: `python -m llava_fsdp.train.launch.agent PARENT REPORT FLAGS... -- WORDS...`, with the
    process id of the launcher, the file descriptor of the pipe to it, torchrun's flags, and the arguments of the
    training. The reason of a failure is written into the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these end the process at once while there are no ranks yet
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # ranks inherit this, and ignore SIGUSR1 until they can save
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the launcher, from which the mask is inherited, blocks signals
    parent, report, *rest = sys.argv[1:]
    end_with(int(parent), signal.SIGTERM)
    flags, words = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    os.environ[AGENT] = f"{os.getpid()}:{report}"
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # restarted ranks must not read old addresses
    failure = run(flags, words)
    if failure is not None:
        with contextlib.suppress(BrokenPipeError):  # the launcher was killed
            os.write(int(report), json.dumps(failure).encode() + b"\n")
        sys.exit(1)


def run(flags: list[str], words: list[str]) -> dict[str, object] | None:
    """Run the ranks on this machine to their end, with torchrun's `flags` and the training's arguments `words`. Return
    None if all succeeded, else the `reason` of the failure and, if known, the exit `code`."""
    from torch.distributed import DistError  # this import takes seconds, in which a signal ends the process
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # ranks report their errors themselves
    parser = torchrun.get_args_parser()
    parser.exit_on_error = False
    try:
        args = parser.parse_args([*flags, *PROGRAM, *words])  # PROGRAM: -m and the module of the training
        choose_ranks(args, is_given(flags, "nproc-per-node"))
        torchrun.config_from_args(args)
    except (Exception, SystemExit) as error:
        return {"reason": f"torchrun does not take {' '.join(flags)}: {error}", "code": ExitCode.USER}
    try:
        torchrun.run(args)
    except SignalException as error:
        return {"reason": f"torchrun's agent got {signal.Signals(error.sigval).name}"}
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # negative after a signal: then the code is not known (0)
        return {"reason": f"rank {rank} {how_ended(failure.exitcode)}", "code": max(0, failure.exitcode)}
    except (RendezvousError, DistError) as error:
        return {"reason": f"{NOT_MET} ({type(error).__name__}: {str(error)[:1000]})", "code": ExitCode.COMMUNICATION}
    except Exception as error:
        return {"reason": f"torchrun's agent failed: {type(error).__name__}: {str(error)[:1000]}"}
    return None


def is_given(flags: list[str], name: str) -> bool:
    """Return whether torchrun's flag `name` is set, by `flags` (as `--name=value`) or by an environment variable
    (`PET_NNODES` sets `nnodes`)."""
    return any(flag.startswith(f"--{name}=") for flag in flags) or f"PET_{name.upper().replace('-', '_')}" in os.environ


def choose_ranks(args: Namespace, is_chosen: bool) -> None:
    """Set the number of ranks on this machine in torchrun's arguments, unless the user has, to the number of GPUs, or 1
    without GPUs. Divide the CPU cores among the ranks (OMP_NUM_THREADS)."""
    import torch
    from torch.distributed.run import determine_local_world_size

    if not is_chosen:
        args.nproc_per_node = str(torch.cuda.device_count() or 1)
    count = determine_local_world_size(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, read_host().usable_cores // count)))


if __name__ == "__main__":
    main()
