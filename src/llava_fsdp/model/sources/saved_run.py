"""Say with which command a later training can begin with what a run without an export has saved.

Only commands are named that the command `export` does not refuse for the run's model: its own checks are asked.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llava_fsdp.config import Config, ModelConfig, load
from llava_fsdp.config.command_line.renamed import present_tree
from llava_fsdp.model.adapters.lora_files import is_adapter_folder
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.exportable import check_projector, error_of, why_not_hf, why_not_original
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.run_dir import FOLDER, held_by, list_checkpoints
from llava_fsdp.runtime.files.safe_load import refuse_yaml_bombs
from llava_fsdp.runtime.files.unfinished import ADAPTER, is_done

FindParts = Callable[[ModelConfig], Parts]
"""Type of the function that finds the folders of a model, which the functions here are given. It calls them itself if
the folder is a run without an export, so they cannot import it."""


def projector_cure(run: Path, find_parts: FindParts) -> str:
    """Return the end of a message that begins with the text of `why_no_export`: how a training can begin with the
    projector that a run without an export has saved. Empty if the only way is one that the beginning names (run the
    command again). `find_parts` finds the folders of a model."""
    if not has_saved(run):
        return nothing_saved(run)
    try:
        model, _ = model_of_run(run, find_parts)
    except (ConfigError, ModelError) as error:
        return f"; how to go on from what it has saved cannot be told: {error}"
    if model is None:
        return "; it has no projector to write: it trained a whole model of transformers"
    refused = error_of(lambda: check_projector(model))
    if refused is not None:
        return f"; it has no projector to write: {refused}"
    to = f"{run}_projector"
    return (
        f"{connective(run)}write the projector that it has saved into a folder of its own, and begin with that:\n"
        f"  llava-fsdp export source={run} to={to} format=projector\n  model.projector={to}"
    )


def whole_model_cure(run: Path, key: str, find_parts: FindParts) -> str:
    """Return the end of an error message about a run without an export: with which command the whole model that it has
    saved can be exported and then read. The message begins with the text of `why_no_export`, which may tell the user to
    run the training again; the result is empty if there is no other way.

    Args:
        key: the setting that names the run, such as model.checkpoint.
        find_parts: finds the folders of a model.
    """
    if not has_saved(run):
        return nothing_saved(run)
    # the export is made from the run itself, into the folder `{run}_model`
    return f"{connective(run)}{whole_model_export(run, run, f'{run}_model', key, find_parts)}"


def whole_model_export(run: Path, source: Path, to: str, key: str, find_parts: FindParts) -> str:
    """Return the command that exports the whole model of a run to the folder `to`, and the setting that reads it; or
    why there is no such command, and how its adapters can be trained further.

    Args:
        run: the output folder.
        source: the run, or a checkpoint or the adapter in it.
        key: the setting, such as model.checkpoint.
        find_parts: finds the folders of a model.
    """
    try:
        model, cfg = model_of_run(run, find_parts)
    except (ConfigError, ModelError) as error:
        return f"how to go on from what it has saved cannot be told: {error}"
    # None: a whole model of transformers, which can always be exported
    refused = None if model is None else why_not_hf(model, cfg.data.trained_aspect)
    if model is None or refused is None or why_not_original(model) is None:
        form = "" if refused is None else " format=llava"  # the default is a model for transformers
        return (
            "make an export of what it has saved, and give that:\n"
            f"  llava-fsdp export source={source} to={to}{form}\n  {key}={to}"
        )
    adapters = f"model.lora.checkpoint={source}" if cfg.model.lora.enabled else "model.lora.checkpoint"
    return (
        f"its whole model cannot be exported, so no later stage can start from it as a whole ({refused}). Adapters can "
        f"go on with {adapters}"
    )


def nothing_saved(run: Path) -> str:
    return "; it has saved nothing: train it again, with another output_dir" if is_done(run) else ""


def connective(run: Path) -> str:
    return "; " if is_done(run) else "; or "


def has_saved(run: Path) -> bool:
    """Return whether a run that is not under way has saved a checkpoint or an adapter."""
    return held_by(run) is None and bool(list_checkpoints(run / FOLDER) or is_adapter_folder(run / ADAPTER))


def model_of_run(run: Path, find_parts: FindParts) -> tuple[Llava | None, Config]:
    """Return the LLaVA model that a run has trained, on the meta device, without its adapters, and the run's
    configuration. The model is None if the run has trained a whole model of transformers, which is always exportable.
    Raises ConfigError if its config.yaml cannot be read, and ModelError if a part of the model is missing. `find_parts`
    finds the folders of a model."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{path} is missing")
    try:
        # YAML aliases that expand to huge values are refused; old names of keys and values become the present ones
        node = OmegaConf.create(present_tree(yaml.safe_load(refuse_yaml_bombs(path))))
        assert isinstance(node, DictConfig)
        cfg = load(Config, node)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    parts = find_parts(cfg.model)
    return (None if parts.class_config is not None else build_llava(parts, cfg.model.plain, torch.float32)), cfg
