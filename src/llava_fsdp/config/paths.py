"""Whether the places that a configuration names are there and apart from each other. Reads nothing,
imports no torch."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from llava_fsdp.config import Config, Source
from llava_fsdp.config.tree import leaves_of
from llava_fsdp.runtime.errors import ConfigError

PACKAGED_OR_HUB = re.compile(r"package:.*|[\w-][\w.-]*/[\w.-]+")


def check_places(cfg: Config) -> None:
    """Look at every path before anything is read or made.

    Raises:
        ConfigError: several do not exist, all of which are named; or the run would write into what it reads.
    """
    read = places_read(cfg)
    absent = [f"{key}={name}" for key, name in read.items() if not exists(name)]
    if len(absent) > 1:  # of one, whoever needs it says what it should be
        raise ConfigError(
            f"{len(absent)} paths do not exist: {', '.join(absent)}; relative paths begin at {os.getcwd()}"
        )
    out = Path(os.path.realpath(cfg.output_dir))
    for key, name in read.items():
        place = Path(os.path.realpath(name))
        if key == "checkpoint.resume" or not place.is_dir():
            continue
        # pictures are read by name: what else lies below their folder, which may be `/`, is no matter
        within = place in out.parents and not key.endswith(".images")
        inside = key == "model.lora.checkpoint" and out in place.parents  # a new start would move it away
        if inside:
            raise ConfigError(f"{key}={name} is within output_dir={cfg.output_dir}; give another output_dir")
        if out == place or within:
            raise ConfigError(
                f"output_dir={cfg.output_dir} is {'' if out == place else 'within '}{key}={name}, which the run reads; "
                "give a folder of its own"
            )


def places_read(cfg: Config) -> dict[str, str]:
    """What is read, by key; names of the hub and of the package are no places."""
    found: dict[str, str | None] = {}
    if cfg.data.source is not Source.shapes:  # which is drawn
        found |= {"data.path": cfg.data.path, "data.images": cfg.data.images}
        for name, own in cfg.data.sources.items():
            found |= {f"data.sources.{name}.path": own.path, f"data.sources.{name}.images": own.images}
    if cfg.val.every is not None:
        found |= {"val.path": cfg.val.path, "val.images": cfg.val.images}
        for name, own in cfg.val.sources.items():
            found |= {f"val.sources.{name}.path": own.path, f"val.sources.{name}.images": own.images}
    if cfg.model.checkpoint is None:
        found |= {"model.language": cfg.model.language, "model.vision": cfg.model.vision}
    found["model.checkpoint"] = cfg.model.checkpoint
    found["model.lora.checkpoint"] = cfg.model.lora.checkpoint
    if cfg.model.projector not in ("auto", "random"):
        found["model.projector"] = cfg.model.projector
    if cfg.checkpoint.resume not in ("auto", "never"):
        found["checkpoint.resume"] = cfg.checkpoint.resume
    return {
        key: name
        for key, name in found.items()
        if name is not None and not (key.startswith("model.") and not exists(name) and PACKAGED_OR_HUB.fullmatch(name))
    }


def exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long, or with a NUL in it
        return False


PLACES = re.compile(
    r"model\.(language|vision|checkpoint|projector|lora\.checkpoint)|offload\.folder|"
    r"(data|val)\.(.+\.)?(path|images|root|index)"
)
"""Keys of what each machine may have a copy of, under a path of its own."""


def check_same_settings(cfg: Config, gather: Callable[[list[dict[str, str]]], list[dict[str, str]]]) -> None:
    """Machines are started one by one, and one of them may have been given other arguments. A collective.

    Data and models may lie elsewhere on each: that they are the same is compared when they are read.

    Args:
        gather: every rank's items, in the order of ranks.

    Raises:
        ConfigError: on every rank alike.
    """
    settings = leaves_of(OmegaConf.to_container(OmegaConf.structured(cfg)))
    own = {key: str(value) for key, value in settings if not PLACES.fullmatch(key)}
    found = gather([{**own, "NNODES": os.environ.get("NNODES", "")}])  # launch/multinode.sh: how many of them meet
    for rank, other in enumerate(found):
        differing = [key for key in sorted({*other, *found[0]}) if other.get(key) != found[0].get(key)]
        if differing:
            has, first = (", ".join(f"{key}={each.get(key)}" for key in differing[:5]) for each in (other, found[0]))
            raise ConfigError(f"rank {rank} has {has}, rank 0 has {first}: start all machines with the same arguments")
