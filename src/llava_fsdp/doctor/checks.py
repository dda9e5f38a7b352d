"""THE table of checks: what is looked at, in which order, and how long each may take."""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llava_fsdp.config.paths import exists, places_read
from llava_fsdp.doctor import config_checks, disk, gpus, host, network, software
from llava_fsdp.doctor.collectives import LIMIT, try_ranks
from llava_fsdp.doctor.context import Subject
from llava_fsdp.doctor.findings import Finding, Level, fail, output_of, said_of, warn
from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.runtime.os_errors import existing

USUAL = 30.0
"""Seconds that a probe may take."""
SLOW = 240.0
"""Of what imports torch and transformers on a busy machine."""


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    """Of the row where the probe itself fails."""
    probe: Callable[[Subject], Iterable[Finding]]
    seconds: float = USUAL


def version(subject: Subject) -> Iterator[Finding]:
    yield from software.judge_python(sys.version_info[:3])


def packages(subject: Subject) -> Iterator[Finding]:
    yield from software.judge_packages(software.requirements(), software.version_of)
    yield from software.judge_optional(software.version_of)


def environment(subject: Subject) -> Iterator[Finding]:
    yield from software.judge_environment(os.environ)


def torch(subject: Subject) -> Iterator[Finding]:
    yield from gpus.judge_torch(subject.torch, subject.smi, os.environ.get("CUDA_VISIBLE_DEVICES"))


def devices(subject: Subject) -> Iterator[Finding]:
    used = replace(subject.torch, devices=subject.torch.devices[: subject.cfg.gpus])
    yield from gpus.judge_gpus(subject.gpus, used)
    yield from gpus.judge_count(subject.ranks, subject.torch, os.environ)


def links(subject: Subject) -> Iterator[Finding]:
    if len(subject.torch.devices) > 1:
        yield from gpus.judge_links(output_of(["nvidia-smi", "topo", "-m"], gpus.SECONDS), subject.torch)


def cores(subject: Subject) -> Iterator[Finding]:
    yield from host.judge_cores(subject.host, subject.ranks, subject.cfg.data.workers)


def memory(subject: Subject) -> Iterator[Finding]:
    from llava_fsdp.plan.hardware import PROCESS  # which loads torch

    on_gpus, needed = bool(subject.torch.devices), 0
    if (known := subject.known_needs) is not None:
        held = known.row.host if on_gpus else known.row.bytes["total"] + PROCESS
        needed = subject.ranks * (held + subject.workers * subject.cfg.data.prefetch * known.step)
    what = "what is offloaded, with steps on their way," if on_gpus else f"the training on {subject.ranks} ranks"
    yield from host.judge_memory(subject.host, needed, what)


def shared(subject: Subject) -> Iterator[Finding]:
    from llava_fsdp.data.batching.workers import lock_bytes  # which loads torch

    needed = subject.ranks * lock_bytes(subject.workers)
    yield from host.judge_shared(*host.read_shared(), needed, len(subject.torch.devices) > 1)


def limits(subject: Subject) -> Iterator[Finding]:
    yield from host.judge_limits(host.read_limits(), bool(network.read_infiniband()))


def output(subject: Subject) -> Iterator[Finding]:
    place = existing(subject.output_dir)
    refused = list(disk.check_writable("output_dir", place))
    if refused:
        yield from refused
        return
    cfg, found = subject.cfg, os.statvfs(place)
    free, needs = found.f_bavail * found.f_frsize, subject.known_needs
    keep, needed = cfg.checkpoint.keep, 0
    if needs is not None:
        needed = needs.checkpoint * (keep + 1) + needs.export  # one more is written before one goes
    what = f"{keep + 1} checkpoints and the export take"
    cure = "make room, or give an output_dir on a larger disk"
    cure += "; or keep fewer checkpoints: checkpoint.keep=2, the fewest" if keep > 2 else ""
    yield from disk.judge_room("room in output_dir", place, free, needed, what, cure)


def output_speed(subject: Subject) -> Iterator[Finding]:
    place = existing(subject.output_dir)
    if place.is_dir() and os.access(place, os.W_OK):
        yield from disk.judge_speed("speed of output_dir", place, subject.checkpoint)


def data(subject: Subject) -> Iterator[Finding]:
    records, pictures = config_checks.data_paths(subject.cfg)
    for key, path in records.items():
        yield from disk.judge_records(key, path)
    for key, path in pictures.items():
        yield from disk.judge_pictures(key, disk.pictures_in(path))


def nvme(subject: Subject) -> Iterator[Finding]:
    folder = subject.cfg.offload.folder
    needed = 0 if subject.known_needs is None else subject.known_needs.row.disk * subject.ranks
    if not needed:
        return
    place = existing(subject.output_dir if folder is None else Path(folder))
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    cure = "make room, or give an offload.folder on a larger disk"
    yield from disk.judge_room("room in offload.folder", place, free, needed, "states take", cure)
    yield from disk.judge_speed("speed of offload.folder", place, 0)


def interfaces(subject: Subject) -> Iterator[Finding]:
    found, ports = network.read_interfaces(), network.read_infiniband()
    yield from network.judge_interfaces(found, ports, os.environ, subject.cfg.nodes)
    name = socket.gethostname()
    yield from network.judge_name(name, network.own_address(name), subject.cfg.nodes)


def places(subject: Subject) -> Iterator[Finding]:
    yield from config_checks.judge_places(subject.cfg)
    read = places_read(subject.cfg)
    for finding in config_checks.judge_model(subject.cfg, os.environ, config_checks.hub_cache(os.environ)):
        # a model that is not there is planned all the same, by the shapes that the package knows
        if finding.level is Level.FAIL and exists(read.get(finding.name, "\0")):
            subject.unread = finding.name
        yield finding


def needs(subject: Subject) -> Iterator[Finding]:
    yield from config_checks.judge_bf16(subject.cfg, subject.torch.devices)
    found = software.needs_of(subject.cfg)
    if subject.unread is not None:
        found.pop("attention", None)  # which is chosen by the model's shapes
    yield from software.judge_needs(found)


def plan(subject: Subject) -> Iterator[Finding]:
    if subject.unread is not None:
        yield warn("memory by the plan", "not looked at: the model cannot be read", f"mend {subject.unread} first")
        return
    found = subject.needs
    yield from config_checks.judge_plan(found, bool(subject.torch.devices))
    yield from config_checks.judge_taken(found, {gpu.index: gpu.memory - gpu.used for gpu in subject.gpus})


def two_ranks(subject: Subject) -> Iterator[Finding]:
    yield from try_ranks(2, on_gpus=len(subject.torch.devices) > 1)


def all_gpus(subject: Subject) -> Iterator[Finding]:
    count = len(subject.torch.devices)
    if count > 2:
        yield from try_ranks(count, on_gpus=True)


CHECKS = (
    Check("software", "Python", version),
    Check("software", "packages", packages),
    Check("software", "torch", torch, SLOW),
    Check("software", "environment", environment),
    Check("GPUs", "GPUs", devices, SLOW),
    Check("GPUs", "links", links),
    Check("configuration", "places", places, SLOW),
    Check("configuration", "needs", needs, SLOW),
    Check("configuration", "memory by the plan", plan, SLOW),
    Check("machine", "cores", cores),
    Check("machine", "memory", memory),
    Check("machine", "shared memory", shared, SLOW),
    Check("machine", "limits", limits),
    Check("disks", "output_dir", output),
    Check("disks", "speed of output_dir", output_speed),
    Check("disks", "dataset", data),
    Check("disks", "offload.folder", nvme),
    Check("network", "interfaces", interfaces),
    Check("network", "2 ranks", two_ranks, LIMIT + USUAL),
    Check("network", "all GPUs", all_gpus, LIMIT + USUAL),
)


def run_check(check: Check, subject: Subject) -> list[Finding]:
    """What a probe found; one that fails or does not end is a finding too.

    It runs in a thread, which is left behind where it hangs: a disk or a driver that does not answer.
    """
    found: list[Finding] = []
    failed: list[Finding] = []

    def probe() -> None:
        try:
            found.extend(check.probe(subject))
        except LlavaFsdpError as error:
            failed.append(fail(check.name, *said_of(error)))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = (
                f"the probe failed: {type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
            )
            failed.append(warn(check.name, " ".join(said.split()), "look at it by hand; please report this"))

    thread = threading.Thread(target=probe, name=check.name, daemon=True)
    thread.start()
    thread.join(check.seconds)
    if thread.is_alive():
        cure = "something below does not answer: a disk, the driver or the network"
        return [*found, fail(check.name, f"no answer within {check.seconds:.0f} s", cure)]
    return found + failed
