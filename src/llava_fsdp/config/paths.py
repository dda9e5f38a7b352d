"""Check the paths in a configuration before anything is read. Imports no torch."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from llava_fsdp.config import Config, Source, fixed_part, is_remote, paths_in
from llava_fsdp.config.tree import leaves_of
from llava_fsdp.runtime.errors import ConfigError

PACKAGED_OR_HUB = re.compile(r"package:.*|[\w-][\w.-]*/[\w.-]+")


def check_places(cfg: Config) -> None:
    """Check all paths of a configuration before anything is read or written.

    Raises:
        ConfigError: several paths do not exist (the message names all), or the run would write into a folder that it
            reads.
    """
    read = places_read(cfg)
    absent = [f"{key}={name}" for key, name in read.items() if not exists(name)]
    if len(absent) > 1:  # for a single missing path, the code that reads it has a better message
        raise ConfigError(
            f"{len(absent)} paths do not exist: {', '.join(absent)}; relative paths begin at {os.getcwd()}"
        )
    out = Path(os.path.realpath(cfg.output_dir))
    for key, name in read.items():
        place = Path(os.path.realpath(name))
        if key == "checkpoint.resume" or not place.is_dir():
            continue
        # images are read by their names, so the run may write into a folder below that of the images, which may be `/`
        within = place in out.parents and not key.endswith(".images")
        inside = (
            key == "model.lora.checkpoint" and out in place.parents
        )  # a new start would move this adapter folder away
        if inside:
            raise ConfigError(f"{key}={name} is within output_dir={cfg.output_dir}; give another output_dir")
        if out == place or within:
            raise ConfigError(
                f"output_dir={cfg.output_dir} is {'' if out == place else 'within '}{key}={name}, which the run reads; "
                "give a folder of its own"
            )


def places_read(cfg: Config) -> dict[str, str]:
    """Return {configuration key: path} of all paths that a training reads. Names on the Hugging Face hub and folders in
    the package (`package:NAME`) are left out."""
    paths: dict[str, str | None] = {}
    is_read = {"data": cfg.data.source is not Source.shapes, "val": cfg.val.every is not None}
    for group in (group for group, read in is_read.items() if read):
        keys = getattr(cfg, group)
        own_keys = {f"{group}.sources.{name}": own for name, own in keys.sources.items()}
        for prefix, own in {group: keys, **own_keys}.items():
            named = paths_in(own.path) if own.path is not None else []
            found = [fixed_part(path) for path in named if not is_remote(path)]
            paths |= {f"{prefix}.path{f'[{n}]' if len(found) > 1 else ''}": path for n, path in enumerate(found)}
            paths[f"{prefix}.images"] = None if own.images is not None and is_remote(own.images) else own.images
    if cfg.model.checkpoint is None:
        paths |= {"model.language": cfg.model.language, "model.vision": cfg.model.vision}
    paths["model.checkpoint"] = cfg.model.checkpoint
    paths["model.lora.checkpoint"] = cfg.model.lora.checkpoint
    if cfg.model.projector not in ("auto", "random"):
        paths["model.projector"] = cfg.model.projector
    if cfg.checkpoint.resume not in ("auto", "never"):
        paths["checkpoint.resume"] = cfg.checkpoint.resume
    return {
        key: name
        for key, name in paths.items()
        if name is not None and not (key.startswith("model.") and not exists(name) and PACKAGED_OR_HUB.fullmatch(name))
    }


def exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # the name is too long, or contains a NUL character
        return False


PLACES = re.compile(
    r"model\.(language|vision|checkpoint|projector|lora\.checkpoint)|offload\.folder|"
    r"(data|val)\.(.+\.)?(path|images|root|index|cache)"
)
"""Pattern of keys whose paths may differ between machines, because each machine has its own copy."""


def check_same_settings(cfg: Config, gather: Callable[[list[dict[str, str]]], list[dict[str, str]]]) -> None:
    """Check that a training was started with the same arguments on all machines, if it is started separately on each.
    All ranks must call this.

    Paths of data and models may differ, because their contents are compared when they are read.

    Args:
        gather: a function that takes this rank's items and returns the items of all ranks in rank order.

    Raises:
        ConfigError: the arguments differ; raised on every rank.
    """
    leaves = leaves_of(OmegaConf.to_container(OmegaConf.structured(cfg)))
    settings = {key: str(value) for key, value in leaves if not PLACES.fullmatch(key)}
    settings["NNODES"] = os.environ.get("NNODES", "")  # the number of machines, set by launch/multinode.sh
    all_settings = gather([settings])
    first = all_settings[0]
    for rank, other in enumerate(all_settings):
        differing = [key for key in sorted({*other, *first}) if other.get(key) != first.get(key)]
        if differing:
            here, there = (", ".join(f"{key}={each.get(key)}" for key in differing[:5]) for each in (other, first))
            raise ConfigError(f"rank {rank} has {here}, rank 0 has {there}: start all machines with the same arguments")
