"""Derive the section `model` of the configuration from a model folder."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from llava_fsdp.config import Feature, ModelConfig, Part, PatchMerge, load
from llava_fsdp.model.adapters.base_config import check_base_config
from llava_fsdp.model.adapters.lora_files import ADAPTER_CONFIG, AdapterFolder
from llava_fsdp.model.parts import Parts, read_json
from llava_fsdp.model.sources.llava_v1_5_config import TOWER, Selection, is_original, read_selection
from llava_fsdp.model.sources.pretrained import (
    HUB_NAME,
    INTERNVL,
    NEXT,
    ONEVISION,
    PACKAGE,
    is_llava,
    merge_of,
    projector_type_of,
    read_config,
    read_llava_config,
    resolve_model,
)
from llava_fsdp.model.weights.conversions import is_vision_language_model
from llava_fsdp.model.weights.tensor_files import PROJECTOR, WHOLE_MODEL
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.provenance import NOTES, read_notes
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log


def read_model(folder: Path, language: str | None = None, vision: str | None = None) -> ModelConfig:
    """Derive the section `model` of the configuration from a model folder of llava_fsdp, transformers or the original
    LLaVA. A folder of the original LLaVA may contain only a projector.

    Args:
        language: the language model's folder or hub name; needed for a folder that contains only a projector.
        vision: the vision tower's folder or hub name; needed for a folder of the original LLaVA if the vision tower
            that it names is not on this machine.

    Raises:
        ConfigError: an argument that is needed is None.
        ModelError: the folder holds no vision-language model, or one of an unsupported form.
    """
    raw = read_json(folder / "config.json", f"source={folder}")
    if is_original(raw):
        with library_errors(f"source={folder}: its config.json is damaged"):
            selection = read_selection(raw, folder)
        has_whole = any((folder / name).is_file() for name in WHOLE_MODEL)
        if not has_whole and not any((folder / name).is_file() for name in PROJECTOR):
            raise ModelError(f"source={folder} has no weights: none of {', '.join(WHOLE_MODEL + PROJECTOR)}")
        if not has_whole and language is None:
            raise ConfigError(f"source={folder} holds a projector alone; give the language model with language=PATH")
        base = language or ""
        tower = vision or find_tower(raw, folder)
    elif is_of_class(folder):
        # A model that is trained as its class in transformers has it: the class contains tower and projector, and these
        # settings are not used.
        selection = Selection("identity", -1, Feature.full, PatchMerge.flat, False)
        has_whole, base, tower = True, "", ""
    else:
        config = read_llava_config(folder, "source")
        start_end = bool(read_notes(folder).get("image_start_end", False))
        feature = Feature.patch if config.vision_feature_select_strategy == "default" else Feature.full
        selection = Selection(
            projector_type_of(config), config.vision_feature_layer, feature, merge_of(config), start_end
        )
        has_whole, base, tower = True, "", vision or ""
    return ModelConfig(
        name=folder.name,
        language=base,
        vision=tower,
        checkpoint=str(folder) if has_whole else None,
        projector="auto" if has_whole else str(folder),
        **asdict(selection),
        random_weights=False,
        train=[Part.projector.value],
    )


def read_base(adapter: AdapterFolder, base: str | None, vision: str | None) -> ModelConfig:
    """Derive the section `model` of the configuration for the base model of a LoRA adapter.

    Args:
        base: folder or hub name of a language model or a whole LLaVA model; None: the one in the adapter's files.
        vision: folder or hub name of the vision tower; needed if the one that the files name is not on this machine.

    Raises:
        ConfigError: neither `base` nor the files name a base model, or the named one is not on this machine.
        ModelError: an adapter cannot be applied to the named base model.
    """
    notes = read_notes(adapter.folder)
    if "model" in notes:  # llava_fsdp has written the adapter
        with library_errors(f"{adapter.folder / NOTES} is not what was written"):
            cfg = load(ModelConfig, OmegaConf.create(dict(notes["model"]))).plain
        cfg = cfg if vision is None else replace(cfg, vision=vision)
        return cfg if base is None else on_base(cfg, resolve_model(base, "base"))
    folder = resolve_model(base, "base") if base else named_base(adapter)
    if not (adapter.folder / "config.json").is_file():  # adapters of the original LLaVA have one
        if not is_whole(folder) and not is_of_class(folder):
            raise ConfigError(
                f"source={adapter.folder} has no config.json, and its base {folder} is a language model alone: nothing "
                "says which tower and projector go with them; give a whole LLaVA model with base=PATH"
            )
        return read_model(folder, vision=vision)
    raw = read_json(adapter.folder / "config.json", f"source={adapter.folder}")
    with library_errors(f"source={adapter.folder}: its config.json is damaged"):
        selection = read_selection(raw, adapter.folder)
    cfg = ModelConfig(
        name=adapter.folder.name,
        language="",
        vision=vision or find_tower(raw, adapter.folder),
        checkpoint=None,
        projector="auto",
        **asdict(selection),
        random_weights=False,
        train=[Part.projector.value],
    )
    return on_base(cfg, folder)


def on_base(cfg: ModelConfig, folder: Path) -> ModelConfig:
    """Return a copy of `cfg` in which the base model is the one in `folder`: a whole model or a language model. A
    vision-language model of another class than LLaVA's is a whole model only if `cfg` has one (`checkpoint`); else its
    language model is used."""
    has_whole = is_whole(folder) or (cfg.checkpoint is not None and is_of_class(folder))
    checkpoint, language = (str(folder), cfg.language) if has_whole else (None, str(folder))
    return replace(cfg, checkpoint=checkpoint, language=language, random_weights=False)


def named_base(adapter: AdapterFolder) -> Path:
    """Return the folder of the base model that peft's `adapter_config.json` names. Raises ConfigError if it names none,
    or one that is not on this machine."""
    name: Any = adapter.settings.get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"source={adapter.folder} does not say what it is for; give its base with base=PATH")
    if not Path(str(name)).is_dir() and not HUB_NAME.fullmatch(str(name)):
        raise ConfigError(
            f"{adapter.folder / ADAPTER_CONFIG} has base_model_name_or_path={name}, which is no folder here; give the "
            "base with base=PATH"
        )
    return resolve_model(str(name), "base")


def check_named_base(adapter: AdapterFolder, parts: Parts, base: str, key: str) -> None:
    """Raise ModelError if a LoRA adapter was made for another base model than the one that is used.

    If llava_fsdp wrote the adapter's folder, the recorded configuration is compared (`check_base_config`). Else only
    the types of model that the folder names can be compared, and if it names another base, a warning is logged.

    Args:
        parts: folders and configurations of the base model that is used.
        base: folder or hub name of this base model.
        key: configuration key that names the base model, for messages.

    Raises:
        ModelError: the folder says that its base is of another type or has another configuration.
    """
    check_base_config(adapter.folder, parts, base, key)
    if read_notes(adapter.folder).get("base") is not None:
        return
    used = {type_of_language(parts.language.to_dict())}
    if parts.whole is not None:
        used |= {read_json(parts.whole / "config.json", f"{key}={base}")["model_type"], "llava"}
    for where, kind in base_types_by_place(adapter).items():
        if kind not in {name.replace("-", "_") for name in used}:
            raise ModelError(
                f"{adapter.folder} is for another base: {where} says that it is a {kind}, and {base} is a "
                f"{parts.language.model_type}; give its own base: {key}"
            )
    named = str(adapter.settings.get("base_model_name_or_path") or "")
    if named and named != base and Path(named).name != Path(base).name:
        log().warning(
            "%s names %s as its base, and is used with %s: whether that is the same model cannot be told",
            adapter.folder, named, base,
        )  # fmt: skip


def base_types_by_place(adapter: AdapterFolder) -> dict[str, str]:
    """Return the types of language model, such as qwen2, that a LoRA adapter's folder names for its base, by the place
    that names it."""
    said = {}
    mapping = adapter.settings.get("auto_mapping")
    library = str(mapping.get("parent_library") or "").split(".") if isinstance(mapping, dict) else []
    if library[:2] == ["transformers", "models"] and len(library) > 2:
        said[f"{ADAPTER_CONFIG}'s auto_mapping"] = library[2]
    named = str(adapter.settings.get("base_model_name_or_path") or "")
    files = {"its config.json": adapter.folder / "config.json"}
    if named:
        files[f"{ADAPTER_CONFIG}'s base_model_name_or_path={named}"] = Path(named) / "config.json"
    for where, file in files.items():
        kind = type_of_language(read_json(file, str(adapter.folder))) if file.is_file() else ""
        if kind:
            said[where] = kind
    return {where: kind.replace("-", "_") for where, kind in said.items()}


def type_of_language(raw: dict[str, Any]) -> str:
    """Return the type of the language model in a config.json, also of a whole model or the original LLaVA; else ""."""
    text = raw.get("text_config")
    kind = (text if isinstance(text, dict) else raw).get("model_type") or ""
    return str(kind).removeprefix("llava_") if is_original(raw) else str(kind)


def is_whole(folder: Path) -> bool:
    """Return whether a folder holds a whole LLaVA model, not only a language model."""
    raw = read_json(folder / "config.json", f"base={folder}")
    return is_original(raw) or raw.get("model_type") in ("llava", NEXT, ONEVISION, INTERNVL)


def is_of_class(folder: Path) -> bool:
    """Return whether a folder holds a vision-language model that is trained as its class in transformers has it."""
    config = read_config(folder, "base")
    return not is_llava(config, folder) and is_vision_language_model(config)


def find_tower(raw: dict, folder: Path) -> str:
    """Return the folder or hub name of the vision tower that a config.json of the original LLaVA (content `raw`) names.
    A relative name is also looked up next to the model's folder. If the tower's configuration is in the subfolder
    TOWER, the name need not exist. Raises ConfigError if the tower is not on this machine and its name no hub name."""
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
