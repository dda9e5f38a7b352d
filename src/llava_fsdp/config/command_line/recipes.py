"""Compare the configuration of a training with its recipe: the default values that the YAML files have for the chosen
training stage and model. Imports no torch."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llava_fsdp.config import Config, config_dir, without_hydra
from llava_fsdp.config.command_line.hydra_guard import FOLDER_FLAGS, flag_values
from llava_fsdp.config.command_line.tree import dotted, written
from llava_fsdp.runtime.text.redact import redact_values, secrets_of

Difference = list[str]
"""Type of one difference from the recipe: [key, value in the recipe, value in the run]."""


def differences(cfg: Config, arguments: list[str]) -> list[Difference] | None:
    """Compare the configuration of a training with its recipe: the default values that the YAML files have for the
    chosen training stage, model and kind of data.

    Args:
        cfg: configuration of the training.
        arguments: command-line arguments of the training, which may name a folder of the user's own YAML files.

    Returns:
        [key, value in the recipe, value in the training] for each key whose values differ, with secrets hidden; None if
        the YAML files have no such stage, model or kind of data.
    """
    recipe = recipe_of(cfg, arguments)
    if recipe is None:
        return None
    values = values_of(cfg)
    keys = [*values, *(key for key in recipe if key not in values)]
    keys = [key for key in keys if recipe.get(key) != values.get(key) and {} not in (recipe.get(key), values.get(key))]
    theirs, ours = (redact_values({key: side.get(key) for key in keys}, secrets_of()) for side in (recipe, values))
    return [[key, written(theirs[key]), written(ours[key])] for key in keys]


def recipe_of(cfg: Config, arguments: list[str]) -> dict[str, Any] | None:
    """Return the default configuration for the stage, model and kind of data of a training, without its other settings,
    as {dotted key: value}. Return None if the YAML files have no such stage, model or kind of data.

    Args:
        cfg: configuration of the training.
        arguments: command-line arguments of the training, which may name a folder of the user's own YAML files.
    """
    flags = flag_values(arguments)
    folder = next((flags[flag] for flag in FOLDER_FLAGS if flag in flags), None)
    chosen = [f"stage={cfg.stage.name}", f"model={cfg.model.name}", f"data={cfg.data.source.value}"]
    if folder is not None:
        chosen.append(f"hydra.searchpath=[{Path(folder).absolute().as_uri()}]")
    return composed(*chosen)


@functools.cache
def composed(*choices: str) -> dict[str, Any] | None:
    """Return the configuration that a training would have with only these command-line arguments, as {dotted key:
    value}. Return None if a choice does not exist.

    Args:
        choices: arguments `group=choice` that choose YAML files, such as `stage=pretrain`.
    """
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            node = without_hydra(compose("train", list(choices)))
        merged = OmegaConf.merge(OmegaConf.structured(Config), node)
        tree = OmegaConf.to_container(merged, resolve=True, enum_to_str=True)
    except (HydraException, OmegaConfBaseException):
        return None
    assert isinstance(tree, dict)
    return dotted({str(key): value for key, value in tree.items()})


def values_of(cfg: Config) -> dict[str, Any]:
    """Convert the configuration of a training to a flat {dotted key: value}."""
    tree = OmegaConf.to_container(OmegaConf.create(asdict(cfg), flags={"allow_objects": True}), enum_to_str=True)
    assert isinstance(tree, dict)
    return dotted({str(key): value for key, value in tree.items()})
