"""Check the paths in the configuration of a training before anything is read. Imports no torch."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from llava_fsdp.config.command_line.tree import leaves_of, tree_of
from llava_fsdp.config.keys.data import fixed_part, is_remote, paths_in
from llava_fsdp.config.keys.enums import Source
from llava_fsdp.config.rules import Config
from llava_fsdp.runtime.errors import ConfigError

PACKAGED_OR_HUB = re.compile(r"package:.*|[\w-][\w.-]*/[\w.-]+")
"""Names of models in this package (`package:NAME`) or on the Hugging Face hub (`ORG/NAME`)."""


def check_paths(cfg: Config) -> None:
    """Check all paths of a training before anything is read or written. Raise ConfigError if several paths do not exist
    (the message names all), or the training would write into a folder that it reads."""
    read = paths_read(cfg)
    absent = [f"{key}={name}" for key, name in read.items() if not exists(name)]
    if len(absent) > 1:  # for a single missing path, the code that reads it has a better message
        raise ConfigError(
            f"{len(absent)} paths do not exist: {', '.join(absent)}; relative paths begin at {os.getcwd()}"
        )
    out = Path(os.path.realpath(cfg.output_dir))
    for key, name in read.items():
        path = Path(os.path.realpath(name))
        if key == "checkpoint.resume" or not path.is_dir():
            continue
        # images are read by their names, so the run may write into a folder below that of the images, which may be `/`
        within = path in out.parents and not key.endswith(".images")
        # a new start of the run moves the contents of output_dir away
        if key == "model.lora.checkpoint" and out in path.parents:
            raise ConfigError(f"{key}={name} is within output_dir={cfg.output_dir}; give another output_dir")
        if out == path or within:
            raise ConfigError(
                f"output_dir={cfg.output_dir} is {'' if out == path else 'within '}{key}={name}, which the run reads; "
                "give a folder of its own"
            )


def paths_read(cfg: Config) -> dict[str, str]:
    """Return the local paths that a training reads, by key, without URLs and models of the hub or of this package."""
    paths: dict[str, str | None] = {}
    is_read = {"data": cfg.data.source is not Source.shapes, "val": cfg.val.every is not None}
    for group in (group for group, read in is_read.items() if read):
        keys = getattr(cfg, group)
        sources = {f"{group}.sources.{name}": source for name, source in keys.sources.items()}
        for prefix, source in {group: keys, **sources}.items():
            named = paths_in(source.path) if source.path is not None else []
            found = {n: fixed_part(path) for n, path in enumerate(named) if not is_remote(path)}
            paths |= {f"{prefix}.path{f'[{n}]' if len(found) > 1 else ''}": path for n, path in found.items()}
            is_local = source.images is not None and not is_remote(source.images)
            paths[f"{prefix}.images"] = source.images if is_local else None
    if cfg.model.checkpoint is None:
        paths |= {"model.language": cfg.model.language, "model.vision": cfg.model.vision}
    paths["model.checkpoint"] = cfg.model.checkpoint
    paths["model.lora.checkpoint"] = cfg.model.lora.checkpoint
    if cfg.model.projector not in ("auto", "random"):
        paths["model.projector"] = cfg.model.projector
    is_own = exists(f"{cfg.output_dir}/checkpoints/{cfg.checkpoint.resume}")  # a name such as step-000200
    if cfg.checkpoint.resume not in ("auto", "never") and (exists(cfg.checkpoint.resume) or not is_own):
        paths["checkpoint.resume"] = cfg.checkpoint.resume
    return {
        key: name
        for key, name in paths.items()
        if name is not None and not (key.startswith("model.") and not exists(name) and PACKAGED_OR_HUB.fullmatch(name))
    }


def exists(name: str) -> bool:
    """Return whether a path exists; False if it cannot be a path."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # the name is too long, or contains a NUL character
        return False


MACHINE_PATHS = re.compile(
    r"model\.(language|vision|checkpoint|projector|lora\.checkpoint)|offload\.folder|"
    r"(data|val)\.(.+\.)?(path|images|root|index|cache)"
)
"""Keys whose paths may differ between machines, because each machine has its own copy."""


def check_same_settings(cfg: Config, gather: Callable[[list[dict[str, str]]], list[dict[str, str]]]) -> None:
    """Check that a training has the same configuration on all machines, on each of which the user starts it. Paths of
    data and models may differ: their contents are compared when they are read. Collective.

    Args:
        gather: takes a list of this rank, and returns the lists of all ranks joined in rank order.

    Raises:
        ConfigError: the configurations differ; raised on every rank.
    """
    settings = {key: str(value) for key, value in leaves_of(tree_of(cfg)) if not MACHINE_PATHS.fullmatch(key)}
    settings["NNODES"] = os.environ.get("NNODES", "")  # the number of machines, set by launch/multinode.sh
    all_settings = gather([settings])
    first = all_settings[0]
    for rank, other in enumerate(all_settings):
        differing = [key for key in sorted({*other, *first}) if other.get(key) != first.get(key)]
        if differing:
            here, there = (", ".join(f"{key}={each.get(key)}" for key in differing[:5]) for each in (other, first))
            raise ConfigError(f"rank {rank} has {here}, rank 0 has {there}: start all machines with the same arguments")
