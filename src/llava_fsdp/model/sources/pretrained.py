"""Find the folders of a model's parts (language model, vision tower, projector), and read their configurations. The
argument `key` of functions is the setting that names a folder, such as model.vision, for error messages."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    InternVLConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    PretrainedConfig,
)

from llava_fsdp.config import Config, Feature, ModelConfig, PatchMerge, config_dir
from llava_fsdp.model.adapters.lora_files import find_adapter, is_adapter_folder
from llava_fsdp.model.logit_change import VISION_LANGUAGE
from llava_fsdp.model.parts import Parts, read_json
from llava_fsdp.model.sources.class_parts import class_parts
from llava_fsdp.model.sources.gguf_source import folder_of_gguf, is_gguf
from llava_fsdp.model.sources.llava_v1_5_config import TOWER, check_agrees, is_original, language_config, read_feature
from llava_fsdp.model.sources.saved_run import projector_cure, whole_model_cure, whole_model_export
from llava_fsdp.model.vision_tower import image_size, patch_size
from llava_fsdp.model.weights.conversions import has_tied_weights, is_tied, language_model_of, whole_model_of
from llava_fsdp.model.weights.tensor_files import WHOLE_MODEL, open_tensors, require_weights
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.provenance import NOTES, check_folder, listed_digests, read_notes
from llava_fsdp.runtime.files.safe_load import SMALL, is_open_to_others, library_errors
from llava_fsdp.runtime.files.unfinished import EXPORT, has_export, is_run, refuse_staged, run_of, why_no_export
from llava_fsdp.runtime.text.log import log

PACKAGE = "package:"
"""Prefix of the names of models that are shipped with this package."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.model", "*.safetensors", "*.bin", "*.jinja", "*.txt", "README.md"]
"""Patterns for the names of the files that are downloaded from the hub."""
CHECKPOINT_FILE = "manifest.json"
"""Name of a file by which checkpoints of a run are recognized: every checkpoint contains it, and no model folder."""
NEXT = LlavaNextConfig.model_type
"""`model_type` in the config.json of transformers' LLaVA-NeXT, in which an image is divided into several tiles."""
ONEVISION = LlavaOnevisionConfig.model_type
"""`model_type` in the config.json of transformers' LLaVA-OneVision, in which an image that is alone in its sample is
divided into several tiles, and every other image is a single tile."""
LIMITED = re.compile(r"anyres_max_(\d+)")
"""Pattern for the `vision_aspect_ratio` in LLaVA-OneVision's config.json. Its number is the value of
`data.max_tiles`."""
INTERNVL = InternVLConfig.model_type
ROWS = "vocab_size"
"""Key of the number of trained rows of the embeddings in the notes of an export of a `Llava`; those of a `Whole` do not
have it."""
LLAVA = (LlavaConfig, LlavaNextConfig, LlavaOnevisionConfig, InternVLConfig)
"""Configurations of the models that are trained as a `Llava`, if `is_llava`. All others are trained as a `Whole`."""
LARGEST_SIZES = {
    "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1 << 10, "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12, "vocab_size": 1 << 24, "max_position_embeddings": 1 << 26, "image_size": 1 << 13,
    "patch_size": 1 << 10, "num_channels": 1 << 8,
}  # fmt: skip
"""Largest accepted values of sizes in a model's config.json, far above those of any existing model."""


class NoProjector(ConfigError):
    """Error: a training would start from the projector of another training (stage=pretrain) that has not finished."""


class UnfinishedRun(NoProjector):
    """Error: the run whose projector is asked for has no export, as it has not finished or was told to write none."""


def find_parts(cfg: ModelConfig) -> Parts:
    """Find the folders of the language model and the vision tower that the configuration names, and read their
    configurations. Models on the hub are downloaded. `cfg.checkpoint` is a whole model: of the original LLaVA, of
    transformers' LLaVA classes, or of another class of transformers. Without it, the two come from a folder each.

    Raises:
        ConfigError: a name is neither a folder nor a hub name, or the settings contradict the checkpoint.
        ModelError: a folder holds no model, or `model.checkpoint` is no vision-language model that can be trained.
    """
    if cfg.checkpoint is None:
        language, vision = resolve(cfg.language, "model.language"), resolve(cfg.vision, "model.vision")
        if cfg.random_weights:
            refuse_unread_weights({"model.language": language, "model.vision": vision})
        return separate_parts(language, vision)
    folder = resolve_model(cfg.checkpoint, "model.checkpoint")
    check_named_language(cfg, folder)
    raw = read_json(folder / "config.json", f"model.checkpoint={folder}")
    if is_original(raw):
        return original_parts(folder, raw, cfg)
    # a model for transformers
    class_config = read_config(folder, "model.checkpoint")
    if not is_llava(class_config, folder):
        return class_parts(class_config, folder)
    config = read_llava_config(folder, "model.checkpoint")
    with library_errors(f"model.checkpoint={folder}: its config.json is damaged"):
        check_selection(config, cfg, folder)
    language: Any = config.text_config
    language.vocab_size = trained_vocabulary(folder, config)
    language.tie_word_embeddings = has_tied_weights(whole_model_of, config, folder)
    feature = Feature.patch if config.vision_feature_select_strategy == "default" else Feature.full
    grids, most = grids_of(config, folder), max_tiles_of(config, folder)
    # bare_logits: LLaVA's classes take the output layer's output as it is, also where a language model scales it
    return Parts(folder, folder, language, vision_config(config), folder, feature, grids, most, bare_logits=True)


def is_llava(config: PretrainedConfig, folder: Path) -> bool:
    """Return whether a model in a folder is trained as a `Llava`, which makes all images, or tiles of images, squares
    of one size. Others are trained as their class in transformers has them.

    A vision tower that takes the sizes of images as an argument, such as Pixtral's (arXiv 2410.07073), takes images in
    their own sizes, and InternVL joins tiles in its own way. Such a model is trained as a `Llava` only if this package
    has exported a `Llava` into the folder, whose notes then have the size of the vocabulary (key ROWS).
    """
    if not isinstance(config, LLAVA):
        return False
    vision: Any = config.vision_config
    tower: Any = MODEL_MAPPING.get(type(vision), None)
    takes_sizes = tower is not None and "image_sizes" in inspect.signature(tower.forward).parameters
    return ROWS in read_notes(folder) or not (takes_sizes or isinstance(config, InternVLConfig))


def separate_parts(language: Path, vision: Path) -> Parts:
    """Read the configurations of a language model and a vision tower in two folders; each may hold a larger model."""
    tower = vision_config(read_config(vision, "model.vision"))
    return parts_of(read_config(language, "model.language"), tower, language, vision)


def parts_of(
    config: PretrainedConfig,
    vision: PretrainedConfig,
    language_folder: Path | None = None,
    vision_folder: Path | None = None,
) -> Parts:
    """Return the parts of a model whose language model and vision tower come from two folders; without a folder, no
    files are read. `config` is that of the language model, or of a vision-language model that contains it."""
    text = text_config(config)
    text.tie_word_embeddings = has_tied_weights(language_model_of, config, language_folder)
    is_inside = text is not config
    # In most vision-language models the logits are the output of the output layer, without the change (a factor, a cap)
    # that the class of the language model alone may make.
    bare = is_inside and config.model_type not in VISION_LANGUAGE
    return Parts(language_folder or Path(), vision_folder or Path(), text, vision, None, bare_logits=bare)


def check_named_language(cfg: ModelConfig, folder: Path) -> None:
    """Raise ConfigError if the user names a language model (`model.language`, which counts with `model=own`), but
    `model.checkpoint` is a whole LLaVA model made from another one, as the notes in its folder say. The stage
    (`stage=`) may have set the checkpoint, and the user's language model would silently not be used."""
    theirs, is_named = read_notes(folder).get("language"), cfg.name == "own" and cfg.language != cfg.checkpoint
    if is_named and theirs and os.path.realpath(theirs) != os.path.realpath(cfg.language):
        raise ConfigError(
            f"model.checkpoint={cfg.checkpoint} was made of model.language={theirs}, and this configuration names "
            f"model.language={cfg.language}, which would not be read; leave the parts out, as a checkpoint brings its "
            "own, or give a model.checkpoint that was made of these"
        )


def artifacts_of(parts: Parts, projector: Path | None, cfg: ModelConfig) -> list[Path]:
    """Return the folders and files from which a run reads weights, tokenizer and image preprocessor. `projector`: a
    projector with a path of its own, or None."""
    paths = [parts.whole, parts.language_folder, parts.vision_folder, projector]
    if cfg.lora.checkpoint is not None:
        paths.append(find_adapter(cfg.lora.checkpoint, "model.lora.checkpoint"))
    return list(dict.fromkeys(path for path in paths if path is not None))


def refuse_unread_weights(folders: dict[str, Path]) -> None:
    """Raise ConfigError if a model folder contains weights, which `model.random_weights=true` would not read. `folders`
    has the setting that names each folder, such as model.language."""
    for key, folder in folders.items():
        if any((folder / name).is_file() for name in WHOLE_MODEL):
            raise ConfigError(
                f"{key}={folder} has weights, which model.random_weights=true would not read; set it to false "
                "to start from them, or give folders that have only a config.json"
            )


def original_parts(folder: Path, raw: dict, cfg: ModelConfig) -> Parts:
    """Return the parts of a LLaVA model in a folder of the original LLaVA, whose config.json has the content `raw`. The
    vision tower's configuration is also in it if llava_fsdp wrote it; otherwise `model.vision` names the tower.

    Raises:
        ConfigError: the configuration has other projector or vision feature settings than the folder.
        ModelError: the model is not supported, or there is no vision tower.
    """
    with library_errors(f"model.checkpoint={folder}: its config.json is damaged"):
        check_agrees(raw, cfg, folder)
        language = language_config(raw)
        check_sizes(language, folder)
    check_original_is_tied(language, folder)
    tower_folder = folder / TOWER
    vision = tower_folder if (tower_folder / "config.json").is_file() else resolve(cfg.vision, "model.vision")
    tower = vision_config(read_config(vision, "model.vision"))
    # the original's class takes the output of the output layer as logits
    return Parts(folder, vision, language, tower, folder, read_feature(raw, folder), bare_logits=True)


def check_original_is_tied(language: PretrainedConfig, folder: Path) -> None:
    """Raise ModelError if the config.json of a model of the original LLaVA has tie_word_embeddings=true, and its files
    have different weights for the output layer and the embeddings. With this setting the original LLaVA uses one
    weight for both layers and ignores the other; transformers 5 loads both."""
    if language.tie_word_embeddings and any((folder / name).is_file() for name in WHOLE_MODEL):
        if not is_tied(language_model_of, language, open_tensors(folder), folder):
            raise ModelError(
                f"{folder / 'config.json'} has tie_word_embeddings=true, and the files have an lm_head.weight with "
                "other values than the embeddings; set it to false to use that lm_head.weight, or remove the tensor"
            )


def read_llava_config(folder: Path, key: str) -> Any:
    """Read the configuration of one of transformers' models LLaVA, LLaVA-NeXT, LLaVA-OneVision or InternVL. The result
    is typed as Any, because the types of the fields in transformers are too narrow. Raises ModelError if the folder has
    another kind of model, or a projector or vision features that are not supported."""
    config = read_config(folder, key)
    if not isinstance(config, LLAVA):
        raise ModelError(
            f"{key}={folder} is a {config.model_type} model, not a LLaVA one; "
            "a language model alone goes into model.language"
        )
    needed = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True}
    for name, value in needed.items():
        if getattr(config, name, value) != value:
            raise ModelError(f"{key}={folder} has {name}={getattr(config, name)}; only {value} is supported")
    if not isinstance(config.vision_feature_layer, int):
        raise ModelError(f"{key}={folder} takes tower layers {config.vision_feature_layer}; only one is supported")
    if isinstance(config, InternVLConfig):
        check_internvl(config, folder, key)
    return config


def check_internvl(config: Any, folder: Path, key: str) -> None:
    """Raise ModelError if the projector of an InternVL model, or the features that it gets, are not supported."""
    if config.downsample_ratio not in (1 / 2, 1 / 4, 1 / 8):
        raise ModelError(f"{key}={folder} has downsample_ratio={config.downsample_ratio}; 0.5, 0.25, 0.125 are known")
    if config.vision_feature_layer == -1 and not config.vision_config.use_mean_pooling:
        raise ModelError(
            f"{key}={folder} takes its vision tower's output after the last norm (vision_feature_layer=-1 without "
            "use_mean_pooling), which is not supported; its folder can be given as model.language and model.vision"
        )


def projector_type_of(config: Any) -> str:
    """Return the value of `model.projector_type` for the configuration of transformers' LLaVA or InternVL models."""
    if not isinstance(config, InternVLConfig):
        return "mlp2x_gelu"
    return f"pixel_shuffle{round(1 / config.downsample_ratio)}x_mlp2x_gelu"


def merge_of(config: Any) -> PatchMerge:
    """Return the value of `model.patch_merge`, how tiles of an image are joined, for the configuration of one of
    transformers' LLaVA or InternVL models (LLaVA has only one tile)."""
    return PatchMerge.spatial_unpad if isinstance(config, LlavaNextConfig | LlavaOnevisionConfig) else PatchMerge.flat


def grids_of(config: Any, folder: Path) -> list[list[int]] | None:
    """Return the sizes [width, height] in pixels into which a LLaVA-NeXT or LLaVA-OneVision model fits images (`config`
    has them as [height, width]); None for other models. Raises ModelError if they are damaged."""
    if not isinstance(config, LlavaNextConfig | LlavaOnevisionConfig):
        return None
    grids: Any = config.image_grid_pinpoints
    pairs = [grid for grid in grids if isinstance(grid, list | tuple) and len(grid) == 2]
    if not pairs or len(pairs) < len(grids) or not all(type(n) is int and n > 0 for pair in pairs for n in pair):
        raise ModelError(f"{folder / 'config.json'} has image_grid_pinpoints={grids}, which are no [height, width]")
    return [[width, height] for height, width in grids]


def max_tiles_of(config: Any, folder: Path) -> int | None:
    """Return the `data.max_tiles` with which a LLaVA-OneVision model was trained; None for other models. Raises
    ModelError if the configuration has the number in an unknown form."""
    if not isinstance(config, LlavaOnevisionConfig):
        return None
    match = LIMITED.fullmatch(str(config.vision_aspect_ratio))
    if match is None:
        raise ModelError(
            f"{folder / 'config.json'} has vision_aspect_ratio={config.vision_aspect_ratio}; only anyres_max_N is "
            "supported, as anyres_max_9"
        )
    return int(match[1])


def check_selection(config: Any, cfg: ModelConfig, folder: Path) -> None:
    """Check that the model in `folder`, whose own configuration is `config`, was trained with the `select_layer`,
    `select_feature`, `projector_type` and `patch_merge` of the run's configuration `cfg`. `select_feature=auto` agrees
    with every model. A LLaVA-1.5 model may be trained with any `patch_merge`, with a random end-of-line vector.

    Raises:
        ConfigError: a setting differs.
        ModelError: the model's configuration contradicts itself.
    """
    strategies = {Feature.patch: "default", Feature.full: "full"}
    strategy = strategies.get(cfg.select_feature, config.vision_feature_select_strategy)
    theirs = {
        "model.select_layer": config.vision_feature_layer,
        "select strategy": config.vision_feature_select_strategy,
    }
    ours = {"model.select_layer": cfg.select_layer, "select strategy": strategy}
    if projector_type_of(config) != cfg.projector_type:
        raise ConfigError(
            f"model.projector_type={cfg.projector_type}, and model.checkpoint={folder} is a {config.model_type} model; "
            f"set model.projector_type={projector_type_of(config)}"
        )
    if theirs != ours:
        raise ConfigError(f"model.checkpoint={folder} was trained with {theirs}, this configuration says {ours}")
    if merge_of(config) is PatchMerge.spatial_unpad and cfg.patch_merge is not PatchMerge.spatial_unpad:
        raise ConfigError(
            f"model.checkpoint={folder} is a {config.model_type} model, which joins tiles as spatial_unpad, and this "
            f"configuration says model.patch_merge={cfg.patch_merge.value}; set model.patch_merge=spatial_unpad and "
            f"data.image_aspect_ratio={'anyres_max' if isinstance(config, LlavaOnevisionConfig) else 'anyres'}"
        )
    patch = patch_size(config.vision_config) * cfg.shuffle_factor
    grid = (image_size(config.vision_config) // patch) ** 2
    registers = getattr(config.vision_config, "num_register_tokens", None) or 0
    # The strategy "default" leaves out the CLS token. Registers are tokens that belong to no patch.
    expected = grid + registers if strategy == "default" else None
    if expected is not None and getattr(config, "image_seq_length", expected) != expected:
        raise ModelError(
            f"model.checkpoint={folder}: image_seq_length={config.image_seq_length}, but its tower gives {expected} "
            "positions for an image; fix config.json"
        )


def trained_vocabulary(folder: Path, config: Any) -> int:
    """Return the number of trained rows of the embeddings of a LLaVA or InternVL model in `folder`. Exports add
    untrained rows: for the image token, for a padding token, and up to a multiple of 64. These rows are dropped when a
    model is loaded, because each of them would take part in every softmax. Raises ModelError if the number that
    llava_fsdp wrote into the folder (its notes) is damaged."""
    notes = read_notes(folder)
    if notes:
        rows = notes.get(ROWS)
        if type(rows) is not int or not 1 <= rows <= config.text_config.vocab_size:
            raise ModelError(f"{folder / NOTES} has {ROWS}={rows!r}, and the model has {config.text_config.vocab_size}")
        return rows
    rows = config.text_config.vocab_size
    # a model by others: the image token is the first untrained row if it is one of the last 64 rows
    return config.image_token_index if 0 < rows - config.image_token_index <= 64 else rows


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    return getattr(config, "text_config", None) or config


def vision_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the field `vision_config` of a configuration, as of a whole CLIP or SigLIP model, or else the
    configuration itself."""
    return getattr(config, "vision_config", None) or config


def resolve(name: str, key: str) -> Path:
    """Return the model folder that a setting names with `name`: one that is shipped with the package, one on this
    machine, or one that is downloaded from the hub. If llava_fsdp wrote the folder, the digests of its small files and
    the sizes of all its files are checked. (`check_artifacts` checks the weights' digests later.)

    Raises:
        ConfigError: there is no such folder.
        ModelError: the hub could not be read.
        DamagedModel: a file differs from what was written.
    """
    folder = find_folder(name, key)
    check_folder(folder, SMALL)
    return folder


def find_folder(name: str, key: str) -> Path:
    """Return the folder of the model `name`, the value of the setting `key`: in this package, local, made of a GGUF
    file, or downloaded from the hub. Raises ConfigError if it does not exist, ModelError if it cannot be read."""
    if name.startswith(PACKAGE):
        folder = Path(__file__).parents[2] / "assets" / name.removeprefix(PACKAGE)
        if not folder.is_dir():
            raise ConfigError(f"{key}={name}: the package ships no such model")
        return folder
    if Path(name).is_dir():
        if is_open_to_others(Path(name)):
            log().warning(
                "%s=%s can be written by every user of this machine: who trusts it trusts them all", key, name
            )
        return Path(name)
    if is_gguf(name):
        return folder_of_gguf(Path(name), key)
    if not HUB_NAME.fullmatch(name):
        what = "a file, not a folder" if Path(name).is_file() else "not a folder"
        raise ConfigError(f"{key}={name} is {what}; give a model folder or a hub name like lmsys/vicuna-7b-v1.5")
    return download(name, key)


def public_name(name: str) -> str:
    """Return the name of a model for a file that others read: a hub or package name as it is, and of a folder the last
    name of its path, which says nothing about this machine."""
    is_public = name.startswith(PACKAGE) or (HUB_NAME.fullmatch(name) and not Path(name).exists())
    return name if is_public else Path(name).name


def download(name: str, key: str) -> Path:
    """Download the model `name` from the hub, and return its folder in the cache. Raises ModelError, whose message
    names the setting `key` and says what to do instead."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:  # the hub's client locks each file, so ranks of one machine wait for one download
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
        # a model that llava_fsdp has pushed may have further files, and its notes list them with digests
        others = [file for file in listed_digests(folder) if not (folder / file).exists()]
        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES, *others])) if others else folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{key}={name} is not a folder here, and the hub did not give it ({type(error).__name__}); if it is a run "
            "of yours, train it first; if it is a model, download it elsewhere and give its folder"
        ) from error


def resolve_model(name: str, key: str) -> Path:
    """Return the folder of the whole LLaVA model that a setting names.

    Args:
        name: the folder itself, the output folder of a run, of which the exported model is returned, or a hub name.
        key: the setting, such as model.checkpoint, for messages.

    Raises:
        ModelError: it is an adapter, a checkpoint or a run without an export, or no model; the message says what to do.
        ConfigError: there is no such folder.
    """
    folder = Path(name)
    if (folder / EXPORT / "config.json").is_file() or read_notes(folder / EXPORT):
        return resolve(str(folder / EXPORT), key)
    if is_adapter_folder(folder):
        merge = f"merge it into its base: llava-fsdp export source={name} to=FOLDER"
        if (folder.parent / "config.yaml").is_file():
            merge = whole_model_export(folder.parent, folder, f"{folder.parent}_model", key, find_parts)
        raise ModelError(
            f"{key}={name} is an adapter, not a whole model; to go on training it: model.lora.checkpoint={name}; to "
            f"start from the whole model: {merge}"
        )
    if not (folder / "config.json").is_file():
        # the run to which the folder belongs; a checkpoint of a run has a message of its own
        run = None if (folder / CHECKPOINT_FILE).is_file() else run_of(folder)
        if run is not None and (not has_export(run) or run.absolute() == folder.absolute()):
            inside = f": {run}" if folder.exists() and folder.absolute() != run.absolute() else ""
            raise ModelError(f"{key}={name}{inside} {why_no_export(run)}{whole_model_cure(run, key, find_parts)}")
        if (folder / CHECKPOINT_FILE).is_file():
            of_run = folder.absolute().parents[1]
            cure = f"export it: llava-fsdp export source={name} to=FOLDER"
            if (of_run / "config.yaml").is_file():
                cure = whole_model_export(of_run, folder, f"{of_run}_{folder.name}", key, find_parts)
            raise ModelError(f"{key}={name} is a checkpoint of a run, which holds what trained alone; {cure}")
        if folder.is_dir():
            raise ModelError(f"{key}={name} has no config.json; give a model folder, or the folder of a run")
        if not folder.exists() and name == f"outputs/{folder.name}" and folder.name in stages():
            raise ConfigError(
                f"{key}={name} is the run of another stage, which has not been trained here. Train it first:\n"
                f"  llava-fsdp train stage={folder.name} output_dir={name}\n"
                f"with the model and the data of that stage, or give a run or a model with {key}=PATH"
            )
    return resolve(name, key)


def stages() -> list[str]:
    """Return the training stages that have a configuration, such as pretrain: the values of `stage=` on the command
    line."""
    return [file.stem for file in (config_dir() / "stage").glob("*.yaml")]


def read_config(folder: Path, key: str) -> PretrainedConfig:
    """Read the `config.json` of a model folder with transformers. Raises ModelError if the file is missing or
    unreadable, or its weights are quantized."""
    if not (folder / "config.json").is_file() and is_run(folder):
        raise ModelError(
            f"{key}={folder} is the output folder of a run, which has a whole model and not a part of one; start from "
            f"it with model.checkpoint={folder}"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{key}={folder} has no config.json; is it a model folder?")
    read_json(folder / "config.json", f"{key}={folder}")
    with library_errors(f"{key}={folder}: transformers does not know this model, or its config.json is damaged"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        check_sizes(config, folder)
    for part in with_parts(config):
        if getattr(part, "quantization_config", None):
            raise ModelError(
                f"{key}={folder} has quantized weights (quantization_config in its config.json), which cannot be read; "
                "get the model in bf16, fp16 or fp32 (model.quantize quantizes it while it is loaded)"
            )
    return config


def with_parts(config: Any) -> list[Any]:
    """Return a model's configuration, followed by those of its language model and vision tower if it contains them."""
    inside = (getattr(config, "text_config", None), getattr(config, "vision_config", None))
    return [config, *(part for part in inside if part is not None)]


def check_sizes(config: Any, folder: Path) -> None:
    """Raise ModelError if a configuration contains a size that no model can have. Building such a model would fail with
    another error, or never end. An encoder with a decoder is never built."""
    for part in with_parts(config) if not getattr(config, "is_encoder_decoder", False) else []:
        for name, most in LARGEST_SIZES.items():
            value = getattr(part, name, None)
            if isinstance(value, list | tuple) and len(set(value)) == 1:  # width and height
                value = value[0]
            if isinstance(value, list | tuple) and len(value) > 1:
                raise ModelError(
                    f"{folder / 'config.json'} has {name}={value}: a model of type {part.model_type} is not supported: "
                    "its stages have several sizes, and a plain transformer is needed"
                )
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise ModelError(
                    f"{folder / 'config.json'} has {name}={value!r}, which is no whole number of 1 to {most:,}"
                )


def find_projector(cfg: Config) -> Path | None:
    """Return the path of the projector with which a run starts; None if it is initialized randomly, has no weights
    (`identity`), or is part of `model.checkpoint` or of the LoRA adapter's folder. `model.projector=auto` looks for the
    export of a run in the folder "pretrain" next to the run's own output folder.

    Raises:
        NoProjector: there is no projector yet, or `model.projector` does not exist.
        UnfinishedRun: the run that should have the projector has no export.
        ConfigError: `model.checkpoint` has a projector already, or the found projector belongs to another model.
        ModelError: `model.projector` has no weights.
    """
    given = cfg.model.projector
    if cfg.model.checkpoint is not None and given not in ("auto", "random"):
        raise ConfigError(
            f"model.projector={given} and model.checkpoint={cfg.model.checkpoint}: a checkpoint brings its projector; "
            "give one of the two"
        )
    if cfg.model.checkpoint is not None or given == "random" or cfg.model.projector_type == "identity":
        return None
    if given == "auto" and cfg.model.lora.checkpoint is not None:
        return None  # the projector is in the adapter folder
    if given != "auto":
        path = Path(given)
        refuse_staged(given, "model.projector")
        run = run_of(path)
        if run is not None and not has_export(run):
            inside = f": {run}" if path.exists() and path.absolute() != run.absolute() else ""
            raise UnfinishedRun(f"model.projector={given}{inside} {without_export(run)}")
        if not path.exists():
            raise NoProjector(f"model.projector={given} does not exist; give a run, a folder or a file that holds one")
        return require_weights(path / EXPORT if (path / EXPORT).is_dir() else path)
    run = Path(cfg.output_dir).parent / "pretrain"
    if (run / EXPORT / NOTES).is_file():
        check_same_model(run / EXPORT, cfg)
        return run / EXPORT
    # a model with random weights can start with a random projector, too
    if cfg.model.random_weights and not run.exists():
        return None
    looks_for = "model.projector=auto looks for the projector of a stage=pretrain run, and"
    if is_run(run):
        raise UnfinishedRun(f"{looks_for} {run} {without_export(run)}")
    named = f"model.language={cfg.model.language} model.vision={cfg.model.vision}"
    if cfg.model.name != "own":
        named = f"model={cfg.model.name} {named}"
    state = f"{run} is not a run" if run.exists() else f"there is no {run}"
    raise NoProjector(
        f"{looks_for} {state}. Make one:\n"
        f"  llava-fsdp train stage=pretrain {named} output_dir={run} "
        "data=llava_json data.path=CAPTIONS.json data.images=DIR\n"
        "or give one with model.projector=PATH, or start from a random one with model.projector=random"
    )


def without_export(run: Path) -> str:
    """Return why a run has no export, and how a training can begin with its projector, as a text that follows its
    path."""
    return f"{why_no_export(run)}{projector_cure(run, find_parts)}"


def check_same_model(folder: Path, cfg: Config) -> None:
    """Raise ConfigError if the projector in `folder`, which `model.projector=auto` has found, was trained for another
    language model or vision tower, as the notes in the folder say."""
    notes = read_notes(folder)
    for key, ours in (("language", cfg.model.language), ("vision", cfg.model.vision)):
        if notes.get(key) != ours:
            raise ConfigError(
                f"model.projector=auto found {folder}, which was trained for model.{key}={notes.get(key)}, not {ours}; "
                "give the right one with model.projector=PATH"
            )
