"""The `model` part of a configuration, for a model folder as it is."""

from dataclasses import asdict
from pathlib import Path

from llava_fsdp.config import Feature, ModelConfig, Part, PatchMerge
from llava_fsdp.errors import ConfigError, ModelError
from llava_fsdp.model.files import PROJECTOR, WHOLE_MODEL
from llava_fsdp.model.original import TOWER, Selection, is_original, read_selection
from llava_fsdp.model.parts import HUB_NAME, NOTES, PACKAGE, read_json, read_llava_config
from llava_fsdp.untrusted import foreign


def read_model(folder: Path, language: str | None, vision: str | None) -> ModelConfig:
    """The `model` part of a configuration, for a folder of ours, transformers' or the original's as it is.

    Args:
        language: the language model, for a folder that holds a projector alone.
        vision: the tower, for an original's folder whose own name for it means nothing here.

    Raises:
        ConfigError: the folder needs a language model or a tower that was not given.
        ModelError: it is no LLaVA model, or one that we do not have.
    """
    raw = read_json(folder / "config.json", f"source={folder}")
    if is_original(raw):
        with foreign(f"source={folder}: its config.json is damaged"):
            said = read_selection(raw, folder)
        whole = any((folder / name).is_file() for name in WHOLE_MODEL)
        if not whole and not any((folder / name).is_file() for name in PROJECTOR):
            raise ModelError(f"source={folder} has no weights: none of {', '.join(WHOLE_MODEL + PROJECTOR)}")
        if not whole and language is None:
            raise ConfigError(f"source={folder} holds a projector alone; give the language model with language=PATH")
        base = language or ""
        tower = vision or find_tower(raw, folder)
    else:
        config = read_llava_config(folder, "source")
        notes = read_json(folder / NOTES, str(folder)) if (folder / NOTES).is_file() else {}
        start_end = bool(notes.get("image_start_end", False))
        feature = Feature.patch if config.vision_feature_select_strategy == "default" else Feature.full
        said = Selection("mlp2x_gelu", config.vision_feature_layer, feature, PatchMerge.flat, start_end)
        whole, base, tower = True, "", vision or ""
    return ModelConfig(
        name=folder.name,
        language=base,
        vision=tower,
        checkpoint=str(folder) if whole else None,
        projector="auto" if whole else str(folder),
        **asdict(said),
        random_weights=False,
        train=[Part.projector],
    )


def find_tower(raw: dict, folder: Path) -> str:
    """The tower that an original's folder names: a folder, also one beside it, or a hub name."""
    name = str(raw.get("mm_vision_tower") or raw.get("vision_tower") or "")
    if (folder / TOWER / "config.json").is_file() or (name and Path(name).is_dir()):
        return name
    if name and (folder.parent / name).is_dir():
        return str(folder.parent / name)
    if not HUB_NAME.fullmatch(name) and not name.startswith(PACKAGE):
        raise ConfigError(
            f"{folder / 'config.json'} has mm_vision_tower={name or 'null'}, which is no folder here; give the tower "
            "with vision=PATH"
        )
    return name
