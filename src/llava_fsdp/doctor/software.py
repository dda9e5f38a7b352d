"""Python and packages: what the project needs, what the configuration needs on top, and what is there."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping

from llava_fsdp.config import Config
from llava_fsdp.doctor.findings import Finding, fail, ok, output_of, said_of, warn
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError

OLDEST, NEWEST = (3, 11), (3, 12)
OPTIONAL = (
    "flash-attn", "torchao", "peft", "bitsandbytes", "triton", "pyarrow", "tensorboard", "wandb", "gradio",
)  # fmt: skip
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked against the other ranks'",
    "NCCL_P2P_DISABLE": "GPUs talk through the host's memory",
    "NCCL_SHM_DISABLE": "processes talk through the network",
    "NCCL_IB_DISABLE": "InfiniBand is left alone",
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
}
"""Variables of the environment that cost speed, and how."""
OFF = ("", "0", "off", "false", "info")


def version_of(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_python(version: tuple[int, int, int]) -> Iterator[Finding]:
    said = ".".join(map(str, version))
    if OLDEST <= version[:2] <= NEWEST:
        yield ok("Python", f"{said}, {sys.executable}")
    else:
        cure = f"use Python {OLDEST[0]}.{OLDEST[1]} or {NEWEST[0]}.{NEWEST[1]}: launch/quickstart.sh makes .venv of it"
        yield fail("Python", said, cure)


def requirements() -> list[str]:
    """What the installed package declares; empty where it runs from a checkout that is not installed."""
    try:
        return importlib.metadata.requires("llava-fsdp") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def judge_packages(declared: list[str], found: Callable[[str], str | None]) -> Iterator[Finding]:
    """The packages that every training needs, each with its version in the declared range.

    Args:
        declared: requirements as a package's metadata has them; those of extras are passed over.
        found: a package's version.
    """
    from packaging.requirements import Requirement  # transformers brings it, and may be missing too

    needed = [own for own in map(Requirement, declared) if own.marker is None or own.marker.evaluate({"extra": ""})]
    wrong = []
    for own in needed:
        version = found(own.name)
        if version is None or not own.specifier.contains(version, prereleases=True):
            wrong.append((own, version))
    for own, version in wrong:
        yield fail(own.name, f"{version or 'not installed'}, needed: {own.specifier}", f"pip install '{own}'")
    if not wrong:
        names = ("transformers", "hydra-core", "safetensors", "numpy")
        shown = ", ".join(f"{name} {found(name)}" for name in names)
        yield ok("packages", f"{len(needed)} in the versions that are needed ({shown})")


def judge_optional(found: Callable[[str], str | None]) -> Iterator[Finding]:
    """What is there beyond; whether the configuration needs it is `judge_needs`."""
    there = [f"{name} {version}" for name in OPTIONAL if (version := found(name)) is not None]
    missing = [name for name in OPTIONAL if found(name) is None]
    yield ok("extras", ", ".join(there) + (f"; not there: {', '.join(missing)}" if missing else ""))


def needs_of(cfg: Config) -> dict[str, Callable[[], str]]:
    """What the configuration asks of torch, packages and device, by key; each raises what a training would."""
    import torch

    from llava_fsdp.config import Attention, LinearKind, Quantizer
    from llava_fsdp.distributed.compile import choose_compiling
    from llava_fsdp.distributed.fp8 import check_fp8
    from llava_fsdp.distributed.precision import DTYPES
    from llava_fsdp.model.attention import choose_kernel
    from llava_fsdp.model.lora import import_peft
    from llava_fsdp.model.quantization import check_quantizer
    from llava_fsdp.plan.model_shapes import shapes_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def attention() -> str:
        language = shapes_of(cfg.model).language
        kernel = choose_kernel(cfg.attention, language, device, DTYPES[cfg.precision.param_dtype])
        if kernel.attention is Attention.flash and output_of([sys.executable, "-c", "import flash_attn"], 60) is None:
            raise ConfigError(
                "flash-attn is installed and cannot be imported: it was built for another torch; "
                "pip install --no-build-isolation --force-reinstall flash-attn, or set attention=auto"
            )
        return f"{kernel.attention.value}: {kernel.reason}"

    def compiling() -> str:
        found = choose_compiling(cfg, device, None)
        return f"{'yes' if found.on else 'no'}: {found.reason}"

    def peft() -> str:
        return f"peft {import_peft().__version__}"

    def quantizer() -> str:
        check_quantizer(cfg.model.quantize, device)
        return f"{cfg.model.quantize.mode.value} with bitsandbytes {version_of('bitsandbytes')}"

    def fp8() -> str:
        check_fp8(device)
        return f"torchao {version_of('torchao')}"

    found: dict[str, Callable[[], str]] = {"compile": compiling}
    if cfg.pack:
        found["attention"] = attention
    if cfg.model.lora.enabled:
        found["adapters"] = peft
    if cfg.model.quantize.mode is not Quantizer.none:
        found["quantized base"] = quantizer
    if cfg.precision.linear is LinearKind.fp8:
        found["fp8"] = fp8
    return found


def judge_needs(needs: Mapping[str, Callable[[], str]]) -> Iterator[Finding]:
    """Each in its turn, so that one that is missing does not hide another."""
    for name, need in needs.items():
        try:
            yield ok(name, need())
        except LlavaFsdpError as error:
            yield fail(name, *said_of(error))


def judge_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that cost speed, or keep a training from the network."""
    slow = {name: why for name, why in SLOW.items() if environment.get(name, "").lower() not in OFF}
    for name, why in slow.items():
        yield warn(name, f"{environment[name]}: {why}", f"unset {name}")
    if not slow:
        yield ok("environment", "no variable that costs speed")
