"""Check, before a model is loaded, that all ranks run the same versions of the software that can change results."""

import importlib.metadata
import os
import platform
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import PIL
import tokenizers
import torch
import transformers
from xxhash import xxh3_128

from llava_fsdp.config import Attention, Config, Quantizer, config_dir
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.setup.run_info import device_name
from llava_fsdp.version import __version__

PACKAGE = Path(__file__).resolve().parents[2]
FILES = "llava_fsdp's files"
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "ATEN_CPU_CAPABILITY",
)
"""Variables that can change the results of the same kernels."""
SHOWN = 3
"""Maximum number of hosts that a message names."""
Gather = Callable[[list[Any]], list[Any]]
"""Takes this rank's items and returns those of all ranks in rank order."""


def check_same_software(cfg: Config, device: torch.device, gather: Gather) -> None:
    """Raise ConfigError on every rank if software differs between ranks; log a warning if hardware or kernels differ.
    The messages contain each version, its ranks and their hosts. Collective. `gather` takes this rank's list, and
    returns the lists of all ranks, concatenated in rank order."""
    must_be_equal = {name: read() for name, read in readers_of_software(cfg).items()}
    may_be_other = {name: read() for name, read in readers_of_hardware(device).items()}
    found = gather([(socket.gethostname(), must_be_equal, may_be_other)])
    hosts = [host for host, _, _ in found]
    different = differences(hosts, [facts for _, facts, _ in found])
    if different:
        raise ConfigError(
            f"the ranks run different software and would compute different results. {'; '.join(different)}. Install "
            "the same versions on every machine, from one checkout"
        )
    other_hardware = differences(hosts, [facts for _, _, facts in found])
    if other_hardware and env_rank() == 0:
        log().warning("the machines of this run differ, which changes rounding or speed. %s", "; ".join(other_hardware))


def readers_of_software(cfg: Config) -> dict[str, Callable[[], str]]:
    """Return functions that read versions of software, which must be equal on all ranks as they can change results."""
    used = {
        "peft": cfg.model.lora.enabled,
        "bitsandbytes": cfg.model.quantize.mode is not Quantizer.none,
        "torchao": cfg.precision.linear.in_8_bits,
        "flash-attn": cfg.packs and cfg.attention in (Attention.auto, Attention.flash),
    }
    return {
        "llava_fsdp": lambda: __version__,
        FILES: package_digest,
        "Python": lambda: ".".join(platform.python_version_tuple()[:2]),
        "torch": torch_build,
        "transformers": partial(loaded_version, transformers),
        "tokenizers": partial(loaded_version, tokenizers),
        "pillow": partial(loaded_version, PIL),
        **{name: partial(installed_version, name) for name, is_used in used.items() if is_used},
    }


def readers_of_hardware(device: torch.device) -> dict[str, Callable[[], str]]:
    """Return functions that describe hardware and software that may differ between ranks, with only a warning."""
    return {
        "device": lambda: device_name(device),
        "CPU": lambda: f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "Python's patch": platform.python_version,
        "cuDNN": lambda: str(torch.backends.cudnn.version()) if device.type == "cuda" else "unused",
        **{name: partial(installed_version, name) for name in ("numpy", "safetensors")},
        "environment": lambda: ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ),
    }


def torch_build() -> str:
    return f"{torch.__version__} (git {str(torch.version.git_version)[:12]}, CUDA {torch.version.cuda})"


def loaded_version(module: ModuleType) -> str:
    """Return the version of an imported module. The installed package may have been updated since."""
    return str(module.__version__)


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def package_digest(files: dict[str, str] | None = None) -> str:
    """Return a digest of the names and contents of llava_fsdp's files: the same for a checkout and for a wheel built
    from it. `files`: the digest of each file, by its path; None: those of the running package."""
    digest = xxh3_128()
    for name, content in sorted((package_files() if files is None else files).items()):
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def package_files(package: Path = PACKAGE, conf: Path | None = None) -> dict[str, str]:
    """Return the digest of each file of llava_fsdp, by its path within the package. Files of the folder `conf` (None:
    that of the running package) get the prefix `conf/`."""
    # a wheel has conf/ inside the package: its files then get the same names twice, and count once
    roots = {"": package, "conf/": conf or config_dir().resolve()}
    return {prefix + name: digest for prefix, root in roots.items() for name, digest in digests(str(root))}


def digests(folder: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path within a folder, after `prefix`, and the digest of each file that is part of llava_fsdp: no
    compiled or hidden file, no backup copy of an editor."""
    for entry in os.scandir(folder):
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from digests(entry.path, f"{prefix}{entry.name}/")
        elif not entry.name.endswith((".pyc", "~", ".orig", ".rej")):
            with open(entry.path, "rb") as file:
                yield prefix + entry.name, xxh3_128(file.read()).hexdigest()


def differences(hosts: list[str], facts: list[dict[str, str]]) -> list[str]:
    """Return a text for each version that differs between ranks: its name and its values, each with the ranks and hosts
    that have it. `facts`: for each rank, name -> version; another version of the package may have other names."""
    found = []
    for name in dict.fromkeys(name for facts_of_rank in facts for name in facts_of_rank):
        ranks_of: dict[str | None, list[int]] = {}
        for rank, facts_of_rank in enumerate(facts):
            ranks_of.setdefault(facts_of_rank.get(name), []).append(rank)
        if len(ranks_of) > 1:
            values = [f"{value or 'unknown'} on {describe_ranks(ranks, hosts)}" for value, ranks in ranks_of.items()]
            found.append(f"{name}: {', '.join(values)}")
    return found


def describe_ranks(ranks: list[int], hosts: list[str]) -> str:
    """Describe ranks, in ascending order, and their hosts, such as `ranks 8-15 (node1)`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    numbers = ", ".join("-".join(map(str, span)) for span in spans)
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers} ({', '.join(names[:SHOWN])}{more})"
