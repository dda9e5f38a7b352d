"""Start ranks on this machine that run collectives (all-reduce, ...), and report in which collective they hang."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llava_fsdp.doctor.findings import Finding, fail, ok
from llava_fsdp.runtime.process.process_end import without_launcher
from llava_fsdp.runtime.text.humanize import readable

LIMIT_SECONDS = 60.0
"""Time limit in seconds of this check, for all ranks together."""
PROGRAM = ("-m", "llava_fsdp.doctor.probes.collectives_worker")
MORE = "NCCL_DEBUG=INFO prints more; NCCL_P2P_DISABLE=1 avoids access to each other's memory"
LOOPBACK = "GLOO_SOCKET_IFNAME=lo lets them use loopback"
HANGS = {
    "": ("has not started", f"run it by hand: torchrun --standalone --nproc-per-node 2 {' '.join(PROGRAM)} /tmp", ""),
    "started": ("has not met the others", "localhost and this machine's name must lead here (/etc/hosts)", ""),
    "joined": (
        "waits in its first all_reduce",
        "try NCCL_P2P_DISABLE=1 (then switch ACS off in the BIOS), NCCL_SHM_DISABLE=1 (then enlarge /dev/shm)",
        LOOPBACK,
    ),
    "summed": ("waits in all_gather", MORE, LOOPBACK),
    "gathered": ("waits in reduce_scatter", MORE, LOOPBACK),
    "scattered": ("waits in all_to_all", MORE, LOOPBACK),
    "exchanged": ("waits for a message of another rank", MORE, LOOPBACK),
    "passed": ("waits in a large all_reduce", MORE, LOOPBACK),
    "measured": ("does not end", MORE, LOOPBACK),
}
"""Last stage that a rank has reached -> (what it does when it hangs there, advice for GPUs, advice for the CPU; empty:
the advice for GPUs)."""

ERROR_LINE = re.compile(r"(?i)^(?!frame #).*\b\w*(error|exception)\b.*:")
"""A line that names an error, but no frame of a C++ stack."""


def try_ranks(
    count: int, on_gpus: bool, limit: float = LIMIT_SECONDS, program: Sequence[str] = PROGRAM
) -> Iterator[Finding]:
    """Start `count` ranks with torchrun, as a training does, and let them run collectives. Yield the speed, an error,
    or where the ranks hang.

    Args:
        on_gpus: with NCCL; False: on the CPU with gloo.
        limit: time limit in seconds.
        program: arguments of `python` in each rank. A folder is appended, in which the rank records its progress.
    """
    name = f"{count} ranks, {'NCCL' if on_gpus else 'gloo'}"
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, open(Path(folder) / "output", "w+") as output:
        launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        environment = without_launcher(os.environ)
        if not on_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # two ranks on a single GPU are an error
        start = time.monotonic()
        process = subprocess.Popen(
            [*launcher, *program, folder], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            yield hang_finding(name, stages_of(Path(folder), count), limit, on_gpus)
            return
        finally:
            end_torchrun_process(process)
        seconds = time.monotonic() - start
        stages = stages_of(Path(folder), count)
        if process.returncode != 0:
            output.seek(0)
            cure = "NCCL_DEBUG=INFO prints more" if on_gpus else "see the reason; GLOO_SOCKET_IFNAME=lo"
            yield fail(name, f"failed: {reason(output.read())}", cure)
            return
        rates = [float(stage.split()[1]) for stage in stages if stage.startswith("measured ")]
        yield ok(name, f"right sums after {seconds:.0f} s; all_reduce at {readable(min(rates, default=0.0))}/s")


def stages_of(folder: Path, count: int) -> list[str]:
    """Return the last stage (started, joined, ...) that each of `count` ranks has recorded in a folder; empty for a
    rank that has not started."""
    stages = []
    for rank in range(count):
        lines = []
        with contextlib.suppress(OSError):
            lines = (folder / f"rank-{rank}").read_text().splitlines()
        stages.append(lines[-1].strip() if lines else "")
    return stages


def hang_finding(name: str, stages: Sequence[str], limit: float, on_gpus: bool) -> Finding:
    """Return a finding of the check `name` that tells which ranks are furthest behind, and where they hang. HANGS has,
    for each stage in order, what a rank waits for after it, the advice for GPUs, and that for the CPU if it is another
    one.

    Args:
        stages: last stage that each rank has recorded; empty: it has not started.
        limit: the exceeded time limit in seconds.
        on_gpus: whether the ranks run on GPUs.
    """
    order = list(HANGS)
    stage_numbers = [order.index(stage.split()[0] if stage else "") for stage in stages]
    slowest_stage = min(stage_numbers)
    late_ranks = [str(rank) for rank, stage in enumerate(stage_numbers) if stage == slowest_stage]
    what, on_gpu, on_cpu = HANGS[order[slowest_stage]]
    who = "every rank" if len(late_ranks) == len(stage_numbers) else f"rank {', '.join(late_ranks)}"
    return fail(name, f"not done after {limit:.0f} s: {who} {what}", on_gpu if on_gpus else on_cpu or on_gpu)


def reason(output: str) -> str:
    """Return the last error in the output of the ranks, or of torchrun if no rank printed one."""
    # The text before this sign is the ranks' own, and what follows is torchrun's. Once a rank has failed, torchrun ends
    # the others, and may print errors of its own about that. So an error of the ranks is preferred.
    texts = [text.splitlines() for text in output.partition(" failed (exitcode: ")[::2]]
    lines = [[line.strip() for line in text if line.strip()] for text in texts]
    errors = [line for text in reversed(lines) for line in text if ERROR_LINE.search(line)]
    return (errors or [line for text in lines for line in text] or ["no output"])[-1][:300]


def end_torchrun_process(process: subprocess.Popen) -> None:
    """End a torchrun process, and its ranks with it, by SIGTERM, or SIGKILL if that does not help."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
