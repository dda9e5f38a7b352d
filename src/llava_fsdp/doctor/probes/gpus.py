"""Check the GPUs that the driver and torch report, and how they are connected. In all checks, `facts` is what torch
reports, and `visible` the value of CUDA_VISIBLE_DEVICES (None: not set)."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llava_fsdp.doctor.findings import Finding, fail, ok, output_of, warn
from llava_fsdp.runtime.process.visible_devices import visible_gpus
from llava_fsdp.runtime.text.humanize import readable

MIB = 1 << 20
SECONDS = 20
"""Time limit of nvidia-smi in seconds, which is slow when GPUs are asleep."""
TORCH_SECONDS = 90
"""Time limit in seconds for importing torch and using every GPU once."""
FIELDS = (
    "index", "name", "uuid", "memory.total", "memory.used", "driver_version", "compute_cap", "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
QUERY = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
MOST_PAIRS = 4
TAKEN = 0.1
"""Share of a GPU's memory above which the use by other processes is a warning."""
SLOW_LINKS = ("SYS", "NODE", "PHB")
"""Connections through the CPU, as `nvidia-smi topo -m` names them. PIX and PXB are PCIe switches, and NV4 means four
NVLinks."""


@dataclass(frozen=True)
class SmiGpu:
    """A GPU as nvidia-smi reports it. Memory is in bytes."""

    index: int
    name: str
    uuid: str
    memory: int
    used: int
    driver: str
    capability: str
    mig: bool
    ecc_errors: int


@dataclass(frozen=True)
class TorchFacts:
    """What torch reports about itself and the GPUs, collected in a separate process, which a broken driver may
    crash."""

    version: str
    cuda: str | None
    """CUDA version that torch was built for; None: a CPU build."""
    hip: str | None
    nccl: str | None
    available: bool
    devices: list[dict[str, Any]]
    """For each GPU the keys name, capability, memory, bf16, error."""
    no_peers: list[list[int]]
    """Pairs of GPUs that cannot access each other's memory."""
    error: str = ""


def parse_smi(text: str) -> list[SmiGpu]:
    """Parse the output of nvidia-smi for the query `QUERY`: a line of comma-separated fields for each GPU. Lines of any
    other form are skipped; an unknown number becomes 0."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(FIELDS) or not fields[0].isdecimal():
            continue
        index, name, uuid, memory, used, driver, capability, mig, errors = fields
        memory, used, errors = (int(text) if text.isdecimal() else 0 for text in (memory, used, errors))
        gpu = SmiGpu(int(index), name, uuid, memory * MIB, used * MIB, driver, capability, mig == "Enabled", errors)
        gpus.append(gpu)
    return gpus


def seen_gpus(gpus: Sequence[SmiGpu], visible: str | None, count: int | None) -> list[SmiGpu]:
    """Return the GPUs that a training's ranks run on, in the order of the ranks.

    Args:
        gpus: all GPUs of this machine.
        visible: value of CUDA_VISIBLE_DEVICES, which selects GPUs; None: not set. If it names MIG instances, all GPUs
            in MIG mode are returned too, because the driver's list does not say to which GPU an instance belongs.
        count: number of ranks, and so the maximum number of GPUs; None: one rank on each GPU.
    """
    if visible is None:
        return list(gpus[:count])
    by_key = {gpu.uuid: gpu for gpu in gpus}
    keys = [key for _, key in visible_gpus(list(by_key), visible)]
    in_mig_mode = [gpu.uuid for gpu in gpus if gpu.mig] if any(key.startswith("MIG-") for key in keys) else []
    return [by_key[key] for key in dict.fromkeys([*keys, *in_mig_mode]) if key in by_key][:count]


def read_torch() -> TorchFacts:
    """Return what torch reports about itself and the GPUs. Another process asks torch, which may hang or crash with a
    broken driver; `error` then says so."""
    text = output_of([sys.executable, "-P", "-m", "llava_fsdp.doctor.probes.torch_probe"], TORCH_SECONDS)
    try:
        return TorchFacts(**json.loads((text or "").strip().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        error = "torch cannot be imported, or hangs with the driver"
        return TorchFacts("", None, None, None, False, [], [], error)


def judge_torch(facts: TorchFacts, gpus: Sequence[SmiGpu], visible: str | None) -> Iterator[Finding]:
    """Check that the torch build (CUDA, NCCL) can use the GPUs that the driver reports (`gpus`). `facts`: what torch
    reports; `visible`: value of CUDA_VISIBLE_DEVICES; None: not set."""
    if facts.error:
        yield fail("torch", facts.error, f"run: {sys.executable} -c 'import torch; torch.cuda.init()'")
        return
    built = f"ROCm {facts.hip}" if facts.hip else f"CUDA {facts.cuda}" if facts.cuda else "no CUDA"
    nccl = f", NCCL {facts.nccl}" if facts.nccl else ""
    result = f"{facts.version}, {built}{nccl}"
    if gpus and not facts.cuda and not facts.hip:
        cure = "install a torch that was built for CUDA: pip install torch, without an index of CPU builds"
        yield fail("torch", f"{result}; this machine has {len(gpus)} GPUs, which it cannot use", cure)
    elif gpus and not facts.available and visible in ("", "-1"):
        yield warn("torch", f"{result}; CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    elif gpus and not facts.available:
        cure = f"update the driver ({gpus[0].driver}) to one for CUDA {facts.cuda}, or install an older torch"
        yield fail("torch", f"{result}; it finds no GPU, but the driver {len(gpus)}", cure)
    else:
        yield ok("torch", result)


def judge_gpus(gpus: Sequence[SmiGpu], facts: TorchFacts) -> Iterator[Finding]:
    """Check each GPU: its memory, memory used by other processes, memory errors, MIG mode."""
    if not gpus and not facts.devices:
        yield ok("GPUs", "none: ranks run on the CPU, over gloo")
        return
    for gpu in gpus:
        name = f"GPU {gpu.index}"
        result = f"{gpu.name}, {readable(gpu.memory)}, compute capability {gpu.capability}, driver {gpu.driver}"
        if gpu.mig:
            cure = f"sudo nvidia-smi -i {gpu.index} -mig 0, or one rank on one instance: CUDA_VISIBLE_DEVICES=MIG-..."
            yield warn(name, f"{result}; split into MIG instances, between which NCCL does not work", cure)
        elif gpu.ecc_errors:
            cure = f"nvidia-smi -i {gpu.index} -r, or have it replaced; CUDA_VISIBLE_DEVICES can leave it out"
            yield fail(name, f"{result}; {gpu.ecc_errors} uncorrected memory errors", cure)
        elif gpu.used > TAKEN * gpu.memory:
            cure = "nvidia-smi lists the processes that use it: end them"
            yield warn(name, f"{result}; other processes use {readable(gpu.used)}", cure)
        else:
            yield ok(name, result)
    for index, device in enumerate(facts.devices):
        if device.get("error"):
            cure = "nvidia-smi -q, dmesg | grep -i xid; then reset the GPU or restart the machine"
            yield fail(f"GPU {index} in use", f"{device['name']}: {device['error']}", cure)
    kinds = sorted({str(device["name"]) for device in facts.devices})
    if len(kinds) > 1:
        cure = "select those of one kind with CUDA_VISIBLE_DEVICES=...: every step waits for the slowest"
        yield warn("kinds of GPU", ", ".join(kinds), cure)


def judge_links(matrix: str | None, facts: TorchFacts) -> Iterator[Finding]:
    """Check how the GPUs are connected, and whether they can access each other's memory. `matrix`: output of
    `nvidia-smi topo -m`; None: it could not be run."""
    links = parse_links(matrix or "")
    if links:
        kinds = sorted(set(links.values()))
        slow = sorted(pair for pair, kind in links.items() if kind in SLOW_LINKS)
        if slow and any(kind.startswith("NV") for kind in kinds):
            cure = "select those with NVLink with CUDA_VISIBLE_DEVICES=..., or gather among them: sharding=hybrid"
            yield warn("links", f"{', '.join(kinds)}: GPUs {list_pairs(slow)} have no NVLink between them", cure)
        elif slow:
            cure = "sharding=zero2, or zero0 with adapters, sends less than zero3: llava-fsdp plan compares them"
            yield warn("links", f"{', '.join(kinds)}: all data passes through the CPU", cure)
        else:
            yield ok("links", ", ".join(kinds))
    if facts.no_peers:
        cure = "in a virtual machine, let the host enable it; otherwise switch ACS off in the BIOS (IOMMU)"
        yield warn("P2P", f"GPUs {list_pairs(facts.no_peers)} cannot reach each other's memory", cure)
    else:
        yield ok("P2P", f"all {len(facts.devices)} GPUs reach each other's memory")


def parse_links(matrix: str) -> dict[tuple[int, int], str]:
    """Parse the output of `nvidia-smi topo -m`: (GPU index, GPU index) -> connection, such as `NV4`, `PIX`, `SYS`."""
    links = {}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)  # the heading is underlined
    for line in plain.splitlines():
        if row := re.match(r"GPU(\d+)\s+(.*)", line):
            cells = row[2].split()
            for column, kind in enumerate(cells):
                if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", kind) and column > int(row[1]):
                    links[int(row[1]), column] = kind
    gpus = len(re.findall(r"(?m)^GPU\d+", plain))
    return {pair: kind for pair, kind in links.items() if pair[1] < gpus}  # further columns are network cards


def list_pairs(pairs: Sequence[Sequence[int]]) -> str:
    """Return pairs of GPU indices as text, such as "0-1, 0-2"; of many pairs, only the first few."""
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:MOST_PAIRS])
    return shown + (f" and {len(pairs) - MOST_PAIRS} more pairs" if len(pairs) > MOST_PAIRS else "")


def judge_count(ranks: int, facts: TorchFacts, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that torch sees enough GPUs for this machine's ranks. If it sees no GPU, that is right too: the ranks then
    run on the CPU."""
    count = len(facts.devices)
    if count and ranks > count:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        why = f"; CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
        yield fail("ranks", f"{ranks} on this machine, but {count} GPUs{why}", f"gpus={count}, or another machine")
    else:
        yield ok("ranks", f"{ranks} on this machine, on {'GPUs' if count else 'the CPU'}")
