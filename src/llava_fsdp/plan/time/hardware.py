"""Table of GPUs with their memory, FLOPs and bandwidths, and the amounts of these that training can use."""

import math
import time
from dataclasses import dataclass, replace
from enum import Enum

import torch

from llava_fsdp.config import DType, LinearKind, PrecisionConfig
from llava_fsdp.parallel.compile import compiler_missing
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.process.host import cpu_has_bf16, gpu_has_bf16, read_host

MIB = 1 << 20


class Basis(Enum):
    """Where a GPU's `efficiency` comes from."""

    measured = "measured here"
    carried = "measured here on a GPU with the same chip"
    published = "published"
    estimate = "estimated"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Bandwidths are in one direction; FLOPs are without sparsity."""

    name: str
    memory: int
    """Bytes, as nvidia-smi reports them."""
    fp32: float
    """FLOPs per second of torch's fp32 matrix products, which do not use TF32 by default."""
    fp16: float
    bf16: float | None
    """FLOPs per second; None if the device has no bf16."""
    fp8: float | None
    """FLOPs per second; None if the device has no fp8. Predicted times assume bf16's FLOPs instead."""
    bandwidth: float
    """Bytes per second between the GPU and its own memory."""
    link: float
    """Bytes per second between two GPUs of a node, over NVLink if there is one, else PCIe."""
    pcie: float
    """Bytes per second between GPU and host memory."""
    network: float
    """Bytes per second between nodes: one GPU's share of the network of a machine that is usual for this GPU."""
    efficiency: float
    """Share of the peak FLOPs that training reaches in the model's blocks, counting recomputed FLOPs too."""
    basis: Basis
    source: str
    """Where all other numbers come from."""

    def peak(self, dtype: DType) -> float:
        """Return the peak FLOPs per second in a dtype. Raise ConfigError if the GPU does not compute in it."""
        peak = {DType.fp32: self.fp32, DType.fp16: self.fp16, DType.bf16: self.bf16}[dtype]
        if peak is None:
            raise ConfigError(f"{self.name} has no bf16; choose precision=fp16")
        return peak


A100 = "NVIDIA A100 datasheet, June 2021; DGX A100: one 200 Gb/s port a GPU"
HOPPER = "NVIDIA H100 and H200 datasheets (SXM); DGX H100: one 400 Gb/s port a GPU"
MEASURED, CARRIED, PUBLISHED, ESTIMATE = Basis
# Efficiency. A100: llm-foundry trains 7B and 13B with FSDP at 58 to 62 % of the peak (scripts/train/benchmarking).
# H200: compiled blocks of a 7B (eight rows of benchmarks/results/*cuda*, each within 3 %). H100: the same chip with
# slower memory; other programs reach 45 % (llm-foundry), or 30 to 35 % (torchtitan, fms-fsdp). The estimates are from
# these: memory bandwidth keeps small GPUs busy more easily than B200.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # name, MiB, fp32, fp16, bf16, fp8, bandwidth, link, pcie, network, efficiency, basis
        Gpu("a100-40gb", 40960 * MIB, 19.5e12, 312e12, 312e12, None, 1555e9, 300e9, 32e9, 25e9, 0.60, PUBLISHED, A100),
        Gpu("a100-80gb", 81920 * MIB, 19.5e12, 312e12, 312e12, None, 2039e9, 300e9, 32e9, 25e9, 0.60, PUBLISHED, A100),
        Gpu("h100", 81559 * MIB, 67e12, 989e12, 989e12, 1979e12, 3350e9, 450e9, 64e9, 50e9, 0.575, CARRIED, HOPPER),
        Gpu("h200", 143771 * MIB, 67e12, 989e12, 989e12, 1979e12, 4800e9, 450e9, 64e9, 50e9, 0.575, MEASURED, HOPPER),
        Gpu(
            "b200", 183359 * MIB, 75e12, 2250e12, 2250e12, 4500e12, 7700e9, 900e9, 64e9, 50e9, 0.40, ESTIMATE,
            "NVIDIA DGX B200 datasheet: 72 PFLOPs fp8 with sparsity for 8 GPUs; NVLink 5",
        ),
        Gpu(
            "l40s", 46068 * MIB, 91.6e12, 362e12, 362e12, 733e12, 864e9, 32e9, 32e9, 6.25e9, 0.50, ESTIMATE,
            "NVIDIA L40S datasheet; PCIe 4 x16, no NVLink; AWS g6e.48xlarge: 400 Gb/s for 8 GPUs",
        ),
        Gpu(
            "a10g", 23028 * MIB, 35e12, 70e12, 70e12, None, 600e9, 32e9, 32e9, 1.56e9, 0.55, ESTIMATE,
            "NVIDIA A10G datasheet; AWS g5.48xlarge: PCIe, 100 Gb/s for 8 GPUs",
        ),
        Gpu(
            "4090", 24564 * MIB, 82.6e12, 165.2e12, 165.2e12, 330.3e12, 1008e9, 32e9, 32e9, 0.3125e9, 0.55, ESTIMATE,
            "NVIDIA Ada GPU architecture white paper, with fp32 accumulation; PCIe 4 x16; 10 Gb/s Ethernet for 4 GPUs",
        ),
        Gpu(
            "v100", 32768 * MIB, 15.7e12, 125e12, None, None, 900e9, 150e9, 16e9, 6.25e9, 0.45, ESTIMATE,
            "NVIDIA V100 datasheet (SXM2, 32 GB); DGX-1: four 100 Gb/s ports for 8 GPUs",
        ),
        Gpu(
            "t4", 15360 * MIB, 8.1e12, 65e12, None, None, 320e9, 16e9, 16e9, 1.56e9, 0.35, ESTIMATE,
            "NVIDIA T4 datasheet; PCIe 3 x16; AWS g4dn.metal: 100 Gb/s for 8 GPUs",
        ),
    )
}  # fmt: skip

DEVICES = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "NVIDIA GeForce RTX 4090": "4090",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-SXM2-32GB": "v100",
    "Tesla T4": "t4",
}
"""CUDA's names of GPUs -> names in the table. Similar GPUs (H100 PCIe and NVL, GH200, parts of a GPU) are left out,
because they have other peaks."""

CUDA_CONTEXT_BYTES = 700 * MIB
"""Bytes of GPU memory for CUDA's context, torch's kernels and cuBLAS's workspaces; 0.5 to 1 GB on Ampere and Hopper."""
NCCL, NCCL_MORE = 500 * MIB, 200 * MIB
"""Bytes of GPU memory for NCCL's buffers: for the group of all ranks, and for each further group of the rank. An
estimate: 0.3 to 1 GB were reported for one to four groups."""
FRAGMENTATION = 0.04
"""Share of GPU memory lost in torch's allocator, because every micro-batch allocates tensors of other sizes."""
PROCESS_BYTES = 450 * MIB
"""Bytes of host memory of a Python process with torch and transformers on a CPU machine."""
CORE_FLOPS = 30e9
"""FLOPs per second of one CPU core in fp32. Only the order of magnitude is right, which is enough to compare: `auto`
must decide alike on all ranks, and in a run that continues."""
STEP_SHARE = 0.7
"""Share of the speed of large matrix products that a training step on a CPU has (measured: 0.65 to 0.75)."""
BF16_SPEED, EMULATED_SPEED = 1.4, 0.05
"""Speed of a CPU's steps, as a multiple of fp32's: in bf16 with instructions for it (measured: 1.5 to 2.1 with
AVX512-BF16; 1.4 to 1.5 with AMX, whose matrix products alone are 7 times as fast), and in 16 bits without (0.03 to 0.05
with AVX2; AVX-512 emulates bf16 at 0.4)."""


@dataclass(frozen=True)
class Machine:
    """The device that each rank trains on: a GPU of the table, or a share of the machine's CPU cores."""

    gpu: Gpu | None
    """None if training runs on CPU cores."""
    name: str
    memory: int
    """Bytes for each rank."""
    flops: float
    """FLOPs per second of a rank's CPU cores in fp32; 0 with a GPU, whose FLOPs for each dtype are in `gpu`."""
    has_compiler: bool = True
    """Whether torch.compile works there, as far as that is known."""
    cores_have_bf16: bool = True
    """Whether the CPU cores have instructions for bf16."""
    core_efficiency: float = 1.0
    """Share of `flops` that a step reaches."""
    cores: float = 1.0
    """CPU cores for each rank, below 1 if ranks share a core."""

    @property
    def efficiency(self) -> float:
        """Share of the peak FLOPs that a step's matrix products reach."""
        return self.core_efficiency if self.gpu is None else self.gpu.efficiency

    @property
    def device(self) -> str:
        return "cpu" if self.gpu is None else "cuda"

    def usable(self, groups: int) -> int:
        """Return the bytes of a rank's memory that tensors can use; 0 if the process itself needs all of it. NCCL takes
        memory for each of the `groups` process groups of several ranks that the rank belongs to."""
        if self.gpu is None:
            return max(0, self.memory - PROCESS_BYTES)
        nccl = NCCL + NCCL_MORE * (groups - 1) if groups else 0
        return max(0, int(self.memory * (1 - FRAGMENTATION)) - CUDA_CONTEXT_BYTES - nccl)

    def with_idle(self, factor: float) -> float:
        """Return by what factor a step's computation takes longer if a rank computes or waits for other stages of a
        pipeline `factor` times as long as it computes. While a rank waits, others that share its cores use them."""
        return factor if self.gpu is not None else max(1.0, factor * min(1.0, self.cores))

    @property
    def has_bf16(self) -> bool:
        return self.cores_have_bf16 if self.gpu is None else self.gpu.bf16 is not None

    def peak(self, dtype: DType) -> float:
        """Return a rank's peak FLOPs per second in a dtype. Raise ConfigError if the GPU does not compute in it."""
        if self.gpu is not None:
            return self.gpu.peak(dtype)
        in_bf16 = BF16_SPEED if self.cores_have_bf16 else EMULATED_SPEED
        return self.flops * {DType.fp32: 1.0, DType.bf16: in_bf16, DType.fp16: EMULATED_SPEED}[dtype]

    def check(self, precision: PrecisionConfig) -> None:
        """Raise ConfigError if the device cannot compute with this precision."""
        self.peak(precision.param_dtype)  # raises ConfigError
        if precision.linear is LinearKind.fp8 and (self.gpu is None or self.gpu.fp8 is None):
            raise ConfigError(f"{self.name} has no fp8; choose precision=bf16")


def machine_named(name: str, ranks: int) -> Machine:
    """Return the device of each of `ranks` ranks: the GPU `name` of the table or, for `auto`, that of this machine.
    Raise ConfigError if no GPU in the table has this name."""
    if name == "auto":
        return this_machine(ranks)
    if name not in GPUS:
        raise ConfigError(f"gpu={name} is not in the table; choose auto or one of {', '.join(GPUS)}")
    gpu = GPUS[name]
    return Machine(gpu, gpu.name, gpu.memory, flops=0.0)  # `flops` is only for CPU cores


def machine_for(device: str, ranks: int) -> Machine:
    """Return the device of this machine as `ranks` ranks use it; an 80 GB A100 for cuda on a machine without a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        return machine_named("a100-80gb", ranks)
    return this_machine(ranks, device)


def with_measured_speed(machine: Machine) -> Machine:
    """Return the CPU cores of this machine with the speed that they have now. A GPU stays as it is.

    One core repeats a matrix product for a fifth of a second. The fastest counts: no other process interrupted it.
    """
    if machine.gpu is not None:
        return machine
    size, seconds, threads = 512, math.inf, torch.get_num_threads()
    left, right, product = (torch.ones(size, size) for _ in range(3))
    torch.set_num_threads(1)
    try:
        until = time.perf_counter() + 0.2
        while (began := time.perf_counter()) < until:
            torch.mm(left, right, out=product)
            seconds = min(seconds, time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    # `machine.flops` assumes CORE_FLOPS for each core; a product of two matrices of n x n takes 2 n^3 FLOPs
    of_core = 2 * size**3 / seconds
    name = f"{machine.name} of {of_core / 1e9:.0f} GFLOP/s"
    return replace(machine, name=name, flops=machine.flops / CORE_FLOPS * of_core, core_efficiency=STEP_SHARE)


def this_machine(ranks: int, device: str = "cuda") -> Machine:
    """Return this machine: its first GPU if it has one and `device` is cuda, else the share of its CPU cores and memory
    that each of `ranks` ranks gets.

    A GPU that is not in the table is assumed to be as fast as the one there whose memory size is nearest; both must
    have bf16, or both lack it.
    """
    if device == "cpu" or not torch.cuda.is_available():
        host = read_host()
        cores = host.usable_cores
        flops = CORE_FLOPS * cores / ranks
        name = f"{cores} CPU cores"
        memory, bf16 = host.usable_memory // ranks, cpu_has_bf16()
        return Machine(None, name, memory, flops, cores_have_bf16=bf16, cores=cores / ranks)
    gpu_here = torch.cuda.get_device_properties(0)
    plain_name = gpu_here.name.lower().replace(" ", "")
    # name in the table -> how CUDA's names of this GPU contain it, if that is not the same
    names = {"a100-40gb": "a100", "a100-80gb": "a100", "4090": "rtx4090", "v100": "v100", "t4": "teslat4"}
    fitting = [gpu for gpu in GPUS.values() if names.get(gpu.name, gpu.name) in plain_name]
    relation = "as" if fitting else "which the table of GPUs lacks, timed as"
    has_bf16 = gpu_has_bf16(gpu_here.major, torch.version.hip is not None)
    alike = fitting or [gpu for gpu in GPUS.values() if (gpu.bf16 is not None) == has_bf16]
    nearest = min(alike, key=lambda gpu: abs(gpu.memory - gpu_here.total_memory))
    compiles = compiler_missing(torch.device("cuda", 0)) is None
    return Machine(nearest, f"{gpu_here.name}, {relation} {nearest.name}", gpu_here.total_memory, 0.0, compiles)
