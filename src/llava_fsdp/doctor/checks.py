"""All checks of `doctor`: their order, and the time limit of each."""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llava_fsdp.config.paths import exists, paths_read
from llava_fsdp.doctor import config_checks
from llava_fsdp.doctor.context import DoctorContext
from llava_fsdp.doctor.findings import Finding, Level, fail, finding_of, ok, output_of, warn
from llava_fsdp.doctor.probes import disk, gpus, host, network, software
from llava_fsdp.doctor.probes.collectives import LIMIT_SECONDS, try_ranks
from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.runtime.files.os_errors import free_bytes, nearest_existing
from llava_fsdp.runtime.process.imports import broken_package

VISIBLE = "CUDA_VISIBLE_DEVICES"
USUAL_SECONDS = 30.0
"""Usual time limit of a check in seconds."""
IMPORT_SECONDS = 240.0
"""Time limit in seconds of a check that imports torch and transformers, enough for a busy machine."""


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    """Name of the row in the report if the check raises an error or exceeds its time limit."""
    probe: Callable[[DoctorContext], Iterable[Finding]]
    seconds: float = USUAL_SECONDS


def packages(context: DoctorContext) -> Iterator[Finding]:
    """Check the versions of the packages that the program needs or can use."""
    yield from software.judge_packages(software.requirements(), software.version_of)
    yield from software.judge_optional(software.version_of)


def devices(context: DoctorContext) -> Iterator[Finding]:
    """Check the GPUs on which the training would run, and that there is one for each rank."""
    facts = replace(context.torch, devices=context.torch.devices[: context.cfg.gpus])
    yield from gpus.judge_gpus(context.gpus, facts)
    yield from gpus.judge_count(context.ranks, context.torch, os.environ)


def links(context: DoctorContext) -> Iterator[Finding]:
    """Check how several GPUs are connected."""
    if len(context.torch.devices) > 1:
        yield from gpus.judge_links(output_of(["nvidia-smi", "topo", "-m"], gpus.SECONDS), context.torch)


def memory(context: DoctorContext) -> Iterator[Finding]:
    """Check that the host's free memory suffices for what all ranks keep there: on GPUs what is offloaded, on CPUs the
    training itself; in both cases the steps that data workers prepare."""
    from llava_fsdp.plan.time.hardware import PROCESS_BYTES  # imports torch

    on_gpus, needed = bool(context.torch.devices), 0  # 0: unknown
    if (planned := context.known_needs) is not None:
        rank = planned.plan.host if on_gpus else planned.plan.bytes["total"] + PROCESS_BYTES
        needed = context.ranks * (rank + context.workers * context.cfg.data.prefetch * planned.step)
    ranks = f"{context.ranks} rank{'s' * (context.ranks > 1)}"
    what = "what is offloaded, with prepared steps," if on_gpus else f"the training on {ranks}"
    yield from host.judge_memory(context.host, needed, what)


def shared(context: DoctorContext) -> Iterator[Finding]:
    """Check that /dev/shm has room for the locks of data workers, and for NCCL."""
    from llava_fsdp.data.batching.workers import lock_bytes  # imports torch

    needed = context.ranks * lock_bytes(context.workers)
    total, free = host.read_shared()
    yield from host.judge_shared(total, free, needed, len(context.torch.devices) > 1)


def output(context: DoctorContext) -> Iterator[Finding]:
    """Check that `output_dir` can be written and has room for the checkpoints that exist at once, and the export."""
    folder = nearest_existing(context.output_dir)
    if not_writable := list(disk.check_writable("output_dir", folder)):
        yield from not_writable
        return
    keep, needs, needed = context.cfg.checkpoint.keep, context.known_needs, 0
    count = keep + 1 + (context.cfg.checkpoint.best is not None)
    if needs is not None:
        # the next checkpoint is written before the oldest is deleted
        needed = needs.checkpoint * count + needs.export
    what = f"{count} checkpoints and the export take"
    cure = "make room, or give an output_dir on a larger disk"
    cure += "; or keep fewer checkpoints: checkpoint.keep=2, the fewest" if keep > 2 else ""
    yield from disk.judge_room("room in output_dir", folder, free_bytes(folder), needed, what, cure)


def output_speed(context: DoctorContext) -> Iterator[Finding]:
    """Measure the speed of the disk of `output_dir`; no result if it cannot be written, which `output` reports."""
    folder = nearest_existing(context.output_dir)
    if folder.is_dir() and os.access(folder, os.W_OK):
        yield from disk.judge_speed("speed of output_dir", folder, context.checkpoint_bytes)


def data(context: DoctorContext) -> Iterator[Finding]:
    """Measure how fast the files of records and the images are read."""
    records, images = config_checks.data_paths(context.cfg)
    for key, path in records.items():
        # the validation set (`val`) has an index of its own
        cfg = context.cfg if key.startswith("data.") else context.cfg.held_out
        yield from disk.judge_records(key, path, cfg.data.index_folder)
    for key, path in images.items():
        yield from disk.judge_images(key, disk.images_in(path))


def nvme(context: DoctorContext) -> Iterator[Finding]:
    """Check room and speed of the disk to which states are offloaded; no result if nothing is offloaded to disk, or it
    is not known how much."""
    folder = context.cfg.offload.folder
    needed = 0 if context.known_needs is None else context.known_needs.plan.disk * context.ranks
    if not needed:
        return
    path = nearest_existing(context.output_dir if folder is None else Path(folder))
    # states: the parameters, gradients and optimizer state that all ranks of this machine offload to files
    cure = "make room, or give an offload.folder on a larger disk"
    yield from disk.judge_room("room in offload.folder", path, free_bytes(path), needed, "states take", cure)
    yield from disk.judge_speed("speed of offload.folder", path, 0)  # 0: no time of saving a checkpoint is told


def interfaces(context: DoctorContext) -> Iterator[Finding]:
    """Check the network interfaces and this machine's name, by which ranks find each other."""
    ports = network.read_infiniband()
    yield from network.judge_interfaces(network.read_interfaces(), ports, os.environ, context.cfg.nodes)
    name = socket.gethostname()
    yield from network.judge_name(name, network.lookup(name), context.cfg.nodes)


def places(context: DoctorContext) -> Iterator[Finding]:
    """Check that the paths and the model's parts exist. Set `is_missing` and `unreadable_key` for later checks."""
    for finding in config_checks.judge_paths(context.cfg):
        context.is_missing |= finding.level is Level.FAIL
        yield finding
    read = paths_read(context.cfg)
    for finding in config_checks.judge_model(context.cfg, os.environ, config_checks.hub_cache(os.environ)):
        # memory can be planned even if the model is missing, from the model shapes that the package knows
        # a result is named by the key of a part; "\0" stands for a key without a path, because no file has this name
        if finding.level is Level.FAIL and exists(read.get(finding.name, "\0")):
            context.unreadable_key = finding.name
        yield finding


def needs(context: DoctorContext) -> Iterator[Finding]:
    """Check that the GPUs or CPUs support the precision, and that the software has what the configuration needs."""
    yield from config_checks.judge_precision(context.cfg, context.torch.devices, context.has_bf16)
    checks = software.needs_of(context.with_chosen_dtype)
    if context.unreadable_key is not None:
        checks.pop("attention", None)  # the kernel depends on the model's shapes
    yield from software.judge_needs(checks)


def plan(context: DoctorContext) -> Iterator[Finding]:
    """Check that the predicted memory of a rank fits into its GPU (or its share of the host), and into what other
    processes leave free on each GPU."""
    if context.unreadable_key is not None:
        yield warn(
            "memory by the plan", "not planned, because the model cannot be read", f"fix {context.unreadable_key} first"
        )
        return
    yield from config_checks.judge_plan(context.needs, bool(context.torch.devices))
    yield from config_checks.judge_taken(context.needs, {gpu.index: gpu.memory - gpu.used for gpu in context.gpus})


def training(context: DoctorContext) -> Iterator[Finding]:
    """Make the checks that a training makes before it reads its dataset or its weights, by the training's own
    functions. There is no result if a path is missing, which an earlier check reports."""
    if context.is_missing:
        return
    import torch

    from llava_fsdp.train.setup.preflight import few_steps, preflight

    # `with_chosen_dtype`: the configuration with precision.param_dtype=auto replaced as a training here does
    warnings = preflight(context.with_chosen_dtype, torch.device("cuda" if context.torch.devices else "cpu"))
    if (steps := config_checks.count_steps(context.cfg)) is not None:
        warnings += few_steps(context.cfg, steps)
    for warning in warnings:
        yield finding_of(Level.WARN, "train", warning)
    yield ok("train", "takes this configuration")


def all_gpus(context: DoctorContext) -> Iterator[Finding]:
    """Start a rank on each GPU and test collectives; two GPUs are tested by the check before this one."""
    count = len(context.torch.devices)
    if count > 2:
        yield from try_ranks(count, on_gpus=True)


CHECKS = (
    Check("software", "Python", lambda _: software.judge_python(sys.version_info[:3])),
    Check("software", "packages", packages),
    Check("software", "torch", lambda c: gpus.judge_torch(c.torch, c.smi, os.environ.get(VISIBLE)), IMPORT_SECONDS),
    Check("software", "environment", lambda _: software.judge_environment(os.environ)),
    Check("GPUs", "GPUs", devices, IMPORT_SECONDS),
    Check("GPUs", "links", links),
    Check("configuration", "places", places, IMPORT_SECONDS),
    Check("configuration", "needs", needs, IMPORT_SECONDS),
    Check("configuration", "train", training, IMPORT_SECONDS),
    Check("configuration", "memory by the plan", plan, IMPORT_SECONDS),
    Check("machine", "cores", lambda c: host.judge_cores(c.host, c.ranks, c.cfg.data.workers)),
    Check("machine", "memory", memory),
    Check("machine", "shared memory", shared, IMPORT_SECONDS),
    Check("machine", "limits", lambda _: host.judge_limits(host.read_limits(), bool(network.read_infiniband()))),
    Check("disks", "output_dir", output),
    Check("disks", "speed of output_dir", output_speed),
    Check("disks", "dataset", data),
    Check("disks", "offload.folder", nvme),
    Check("network", "interfaces", interfaces),
    Check(
        "network", "2 ranks", lambda c: try_ranks(2, on_gpus=len(c.torch.devices) > 1), LIMIT_SECONDS + USUAL_SECONDS
    ),
    Check("network", "all GPUs", all_gpus, LIMIT_SECONDS + USUAL_SECONDS),
)


def run_check(check: Check, context: DoctorContext) -> list[Finding]:
    """Run a check and return its results. An error or an exceeded time limit becomes a result too. The check runs in a
    thread, which is abandoned if it hangs on a disk or a driver that does not answer."""
    findings: list[Finding] = []
    errors: list[Finding] = []

    def probe() -> None:
        """Run the check; any error becomes a finding."""
        try:
            findings.extend(check.probe(context))
        except LlavaFsdpError as error:
            errors.append(finding_of(Level.FAIL, check.name, error))
        except BaseException as error:
            if isinstance(error, ImportError) and (explanation := broken_package(error)) is not None:
                errors.append(finding_of(Level.FAIL, check.name, explanation))
                return
            where = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{os.path.basename(where.filename)}:{where.lineno}"
            result = f"the check failed: {type(error).__name__}: {error} ({line})"
            errors.append(warn(check.name, " ".join(result.split()), "check this by hand, and please report the error"))

    thread = threading.Thread(target=probe, name=check.name, daemon=True)
    thread.start()
    thread.join(check.seconds)
    if thread.is_alive():
        cure = "a disk, the driver or the network does not answer"
        return [*findings, fail(check.name, f"no answer within {check.seconds:.0f} s", cure)]
    return findings + errors
