"""Check the Python version, the packages that every training needs, and those that this configuration needs.
`version_of` returns the installed version of a package, or None."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping

from llava_fsdp.config import Config
from llava_fsdp.doctor.findings import Finding, Level, fail, finding_of, ok, output_of, warn
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError

OLDEST, NEWEST = (3, 11), (3, 12)
OPTIONAL = (
    "flash-attn", "torchao", "peft", "bitsandbytes", "triton", "pyarrow", "tensorboard", "wandb", "gradio",
)  # fmt: skip
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is compared with the other ranks'",
    "NCCL_P2P_DISABLE": "GPUs communicate through host memory",
    "NCCL_SHM_DISABLE": "processes communicate through the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
}
"""Environment variables that make training slower, and why."""
OFF = ("", "0", "off", "false", "info")
"""Values of these variables that do not slow training down."""


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_python(version: tuple[int, int, int]) -> Iterator[Finding]:
    """Check that the Python version is one that this package supports."""
    result = ".".join(map(str, version))
    if OLDEST <= version[:2] <= NEWEST:
        yield ok("Python", f"{result}, {sys.executable}")
    else:
        cure = f"use Python {OLDEST[0]}.{OLDEST[1]} or {NEWEST[0]}.{NEWEST[1]}: launch/quickstart.sh makes .venv of it"
        yield fail("Python", result, cure)


def requirements() -> list[str]:
    """Return the requirements that the installed package declares; empty in a git checkout."""
    try:
        return importlib.metadata.requires("llava-fsdp") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def judge_packages(declared: list[str], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Check that the packages in `declared` (such as `numpy>=1.26`; those of extras are ignored) are installed."""
    from packaging.requirements import Requirement  # installed with transformers, and may be missing too

    needed = [r for r in map(Requirement, declared) if r.marker is None or r.marker.evaluate({"extra": ""})]
    are_right = True
    for requirement in needed:
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            are_right = False
            result = f"{version or 'not installed'}, needed: {requirement.specifier}"
            yield fail(requirement.name, result, f"pip install '{requirement}'")
    if are_right:
        names = ("transformers", "hydra-core", "safetensors", "numpy")
        versions = ", ".join(f"{name} {version_of(name)}" for name in names)
        yield ok("packages", f"{len(needed)} in the needed versions ({versions})")


def judge_optional(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """List which packages of the extras are installed, and which are not."""
    versions = {name: version_of(name) for name in OPTIONAL}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    missing = ", ".join(name for name, version in versions.items() if version is None)
    yield ok("extras", "; ".join([installed or "none", *([f"not installed: {missing}"] if missing else [])]))


def needs_of(cfg: Config) -> dict[str, Callable[[], str]]:
    """Return functions that check what the configuration needs (attention kernel, peft, bitsandbytes, ...), by name.
    Each returns a description, or raises the training's error. The configuration's dtype must not be `auto`."""
    import torch

    from llava_fsdp.config import Attention, LinearKind, Quantizer
    from llava_fsdp.model.adapters.lora import import_peft
    from llava_fsdp.model.packed_attention.attention import choose_kernel
    from llava_fsdp.model.weights.quantization import check_quantizer
    from llava_fsdp.parallel.compile import choose_compiling
    from llava_fsdp.parallel.precision.fp8 import check_fp8
    from llava_fsdp.parallel.precision.int8_mixed import check_int8_mixed
    from llava_fsdp.parallel.precision.precision import DTYPES
    from llava_fsdp.plan.model_shapes import shapes_of
    from llava_fsdp.plan.search.auto import settle_packing

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def attention() -> str:
        """Return which attention the training would use, and why; raise ConfigError if its package is broken."""
        parts = shapes_of(cfg.model)
        _, padded = settle_packing(cfg, parts)
        if padded is not None:  # why rows are padded: no kernel for packed rows is needed then
            return padded
        kernel = choose_kernel(cfg.attention, parts.language, device, DTYPES[cfg.precision.param_dtype])
        if kernel.attention is Attention.flash and output_of([sys.executable, "-c", "import flash_attn"], 60) is None:
            raise ConfigError(
                "flash-attn is installed but cannot be imported, as it was built for another torch; "
                "pip install --no-build-isolation --force-reinstall flash-attn, or set attention=auto"
            )
        return f"{kernel.attention.value}: {kernel.reason}"

    def compiling() -> str:
        choice = choose_compiling(cfg, device, None)
        return f"{'yes' if choice.on else 'no'}: {choice.reason}"

    def peft() -> str:
        return f"peft {import_peft().__version__}"

    def quantizer() -> str:
        check_quantizer(cfg.model.quantize, device)
        return f"{cfg.model.quantize.mode.value} with bitsandbytes {version_of('bitsandbytes')}"

    def linear() -> str:
        check = {LinearKind.fp8: check_fp8, LinearKind.int8_mixed: check_int8_mixed}[cfg.precision.linear]
        check(device)
        return f"torchao {version_of('torchao')}"

    needs: dict[str, Callable[[], str]] = {"compile": compiling}
    if cfg.packs:
        needs["attention"] = attention
    if cfg.model.lora.enabled:
        needs["adapters"] = peft
    if cfg.model.quantize.mode is not Quantizer.none:
        needs["quantized base"] = quantizer
    if cfg.precision.linear.in_8_bits:
        needs[cfg.precision.linear.value] = linear
    return needs


def judge_needs(needs: Mapping[str, Callable[[], str]]) -> Iterator[Finding]:
    """Check what the configuration needs by calling functions (`needs_of`), each of which returns a description of what
    is there, or raises an error. After an error the other functions are still called."""
    for name, need in needs.items():
        try:
            yield ok(name, need())
        except LlavaFsdpError as error:
            yield finding_of(Level.FAIL, name, error)


def judge_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Warn of variables that make training slower."""
    slow = {name: why for name, why in SLOW.items() if environment.get(name, "").lower() not in OFF}
    for name, why in slow.items():
        yield warn(name, f"{environment[name]}: {why}", f"unset {name}")
    if not slow:
        yield ok("environment", "no variable that costs speed")
