"""Compare the configuration of a training with its recipe: the defaults that the YAML files have for its stage, model
and kind of data. Imports no torch."""

import functools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llava_fsdp.config.command_line.hydra_guard import FOLDER_FLAGS, flag_values
from llava_fsdp.config.command_line.load import config_dir, without_hydra
from llava_fsdp.config.command_line.tree import dotted, tree_of, written
from llava_fsdp.config.rules import Config
from llava_fsdp.runtime.text.redact import redact_values, secrets_of

Difference = list[str]
"""[key, value in the recipe, value in the run]."""


def differences(cfg: Config, arguments: list[str]) -> list[Difference] | None:
    """Compare the configuration of a training with its recipe, the values that the YAML files have for its stage, model
    and kind of data. Return a row [key, value in the recipe, value in `cfg`] for each key whose values differ, with
    secrets hidden; None if there is no recipe. `arguments`, of the command line, may name a folder of YAML files."""
    recipe = recipe_of(cfg, arguments)
    if recipe is None:
        return None
    values = dotted(tree_of(cfg))
    keys = [*values, *(key for key in recipe if key not in values)]
    # a group that is empty on one side ({}) is not listed, because the keys below it on the other side are
    keys = [key for key in keys if recipe.get(key) != values.get(key) and {} not in (recipe.get(key), values.get(key))]
    theirs, ours = (redact_values({key: side.get(key) for key in keys}, secrets_of()) for side in (recipe, values))
    return [[key, written(theirs[key]), written(ours[key])] for key in keys]


def recipe_of(cfg: Config, arguments: list[str]) -> dict[str, Any] | None:
    """Return the recipe of a training, the values that the YAML files set for its stage, model and kind of data: dotted
    key -> value. None if they have no such stage, model or kind of data. `arguments`: those of the command line, which
    may name a folder of the user's own YAML files."""
    flags = flag_values(arguments)
    folder = next((flags[flag] for flag in FOLDER_FLAGS if flag in flags), None)
    chosen = [f"stage={cfg.stage.name}", f"model={cfg.model.name}", f"data={cfg.data.source.value}"]
    if folder is not None:
        chosen.append(f"hydra.searchpath=[{Path(folder).absolute().as_uri()}]")
    return composed(*chosen)


@functools.cache
def composed(*choices: str) -> dict[str, Any] | None:
    """Return the configuration of a training with only these arguments (such as `stage=pretrain`): dotted key -> value;
    None if a choice does not exist."""
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            node = without_hydra(compose("train", list(choices)))
        merged = OmegaConf.merge(OmegaConf.structured(Config), node)
        tree = OmegaConf.to_container(merged, resolve=True, enum_to_str=True)
    except (HydraException, OmegaConfBaseException):
        return None
    assert isinstance(tree, dict)
    return dotted({str(key): value for key, value in tree.items()})
