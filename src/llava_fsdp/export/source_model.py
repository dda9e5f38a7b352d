"""Open the model to export: a training, one of its checkpoints, a LoRA adapter folder, a model folder, or a model on
the Hugging Face hub."""

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf

from llava_fsdp.checkpoint.manifest import STATE_FILE
from llava_fsdp.checkpoint.reader import AVERAGE_PREFIX, WEIGHT_PREFIX, saved_weights
from llava_fsdp.checkpoint.verify import Checkpoint, newest_alone, verify
from llava_fsdp.config import (
    AUTO,
    AspectRatio,
    Config,
    ConversionConfig,
    FolderFormat,
    KeptDType,
    ModelConfig,
    Pixels,
    QuantizeConfig,
    SpecialTokens,
    Which,
    load,
)
from llava_fsdp.config.command_line.renamed import VALUES, present_tree
from llava_fsdp.data.images.image_tokens import MAX_TILES
from llava_fsdp.data.images.preprocess import preprocessor_fields
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.data.text.chat_template.jinja_template import OWN, is_whole, own_name, usable_name
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.export.card.history import history_in
from llava_fsdp.export.check_folders import check_artifacts
from llava_fsdp.export.prove.verify_logits import Adapted
from llava_fsdp.export.write.adapter_folder import check_fingerprint
from llava_fsdp.export.write.formats import SourceModel, source_of_run
from llava_fsdp.export.write.whole_folder import WholeSource
from llava_fsdp.model.adapters import lora_files as adapter
from llava_fsdp.model.adapters.base_config import BASE_OPTION, check_base_config
from llava_fsdp.model.adapters.lora_files import AdapterFolder, is_adapter_folder, open_adapter
from llava_fsdp.model.adapters.lora_names import BASE, is_adapter, module_of, without_base
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.load_weights import (
    NEWLINE,
    PROJECTOR_PREFIX,
    base_fingerprint,
    check_projector_names,
    find_weights,
    fingerprint,
    weight_digests,
)
from llava_fsdp.model.parts import Parts, read_json
from llava_fsdp.model.sources.llava_v1_5_config import is_original
from llava_fsdp.model.sources.pretrained import (
    EXPORT,
    LIMITED,
    NEXT,
    ONEVISION,
    artifacts_of,
    find_parts,
    find_projector,
    resolve,
)
from llava_fsdp.model.sources.pretrained_config import check_named_base, read_base, read_model
from llava_fsdp.model.weights.init_weights import Drawn
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, DamagedModel, ModelError
from llava_fsdp.runtime.files.provenance import NOTES, WHICH, check_folder, read_notes
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.runtime.files.safe_load import SMALL
from llava_fsdp.runtime.files.unfinished import has_export, is_done, refuse_staged, why_no_export
from llava_fsdp.runtime.files.unfinished import is_run as is_run_folder
from llava_fsdp.runtime.text.log import log


@dataclass(frozen=True)
class Opened:
    """A model opened for export. Stored values are by parameter name, and are read only when they are needed.

    Attributes:
        sources: stored values of every parameter; LoRA adapters are merged in them.
        folder: the folder that was opened.
        adapted: the model before its adapters are merged; None if it has no adapters.
        sources_without_adapters: stored values of every parameter without adapters, as the folders of
            `source.model.parts` have them; None for a training, whose trained weights are in a checkpoint.
    """

    source: SourceModel | WholeSource
    sources: dict[str, Stored]
    folder: Path
    adapted: Adapted | None = None
    sources_without_adapters: dict[str, Stored] | None = None


def open_source(cfg: ConversionConfig) -> Opened:
    """Open the model that the command `export` is to convert. `cfg.source` is a run (the folder of a training), one of
    its checkpoints, the folder of a LoRA adapter, or the folder or hub name of a model.

    Raises:
        ConfigError: `cfg.source` is something else, or its model needs a language model or vision tower not in `cfg`.
        ModelError, CheckpointError: the model cannot be read.
    """
    path = Path(cfg.source)
    refuse_staged(cfg.source, "source")  # a folder whose writing did not end
    is_checkpoint = (path / STATE_FILE).is_file()
    # a folder with config.json and without the subfolder of checkpoints (FOLDER) counts as a model
    has_status = is_run_folder(path) and not (path / "config.json").is_file()
    is_run = is_checkpoint or has_status or (path / FOLDER).is_dir()
    if path.name == EXPORT and not path.exists() and is_run_folder(path.parent):
        raise CheckpointError(f"source={path} is missing: {path.parent} {why_no_export(path.parent)}")
    folder = path if is_run or is_adapter_folder(path) else resolve(cfg.source, "source")
    if is_adapter_folder(folder):
        return open_adapted(folder, cfg)
    if cfg.base is not None:
        raise ConfigError(
            f"base={cfg.base} is for the folder of an adapter, such as {adapter.FOLDER} in a run, and source="
            f"{cfg.source} is not one"
        )
    if is_checkpoint:
        return open_checkpoint(verify(path.resolve()), cfg)
    if cfg.which is Which.average and not is_run:
        raise ConfigError(f"which=average is for a run or a checkpoint, and source={cfg.source} is a model folder")
    return open_run(path, cfg) if is_run else open_model(folder, cfg)


def open_run(run: Path, cfg: ConversionConfig) -> Opened:
    """Open the model of a training: its newest valid checkpoint; or the export that the training wrote at its end, if
    that is of the same step, is undamaged and has the dtype that `cfg` asks for. Without a checkpoint: the export, or
    the LoRA adapter folder, that the training wrote at its end."""
    newest = newest_alone(run / FOLDER)
    if newest is None:
        return open_final_folder(run, cfg)
    try:
        notes = read_notes(run / EXPORT)
        is_current = all(newest.facts[key] == notes.get(key) for key in ("run", "step"))
        is_current = is_current and notes.get(WHICH) == (None if cfg.which is Which.last else cfg.which.value)
        is_current = is_current and cfg.format is not FolderFormat.peft  # adapters are merged in an export
        if is_current and cfg.dtype.value in (KeptDType.keep.value, notes.get("dtype")):
            return open_model(run / EXPORT, cfg)
    except DamagedModel as error:
        log().warning("%s\nUsing the checkpoint %s instead", error, newest.folder)
    if not is_done(run) and not has_export(run):
        log().warning("%s %s; here its checkpoint of step %d is used", run, why_no_export(run), newest.facts["step"])
    return open_checkpoint(newest, cfg)


def open_final_folder(run: Path, cfg: ConversionConfig) -> Opened:
    """Open the model that a training without checkpoints wrote at its end: its LoRA adapter folder or its export.
    Raises CheckpointError if it has neither. The export is opened if there is no adapter folder, or if both are of the
    same step, so that the export contains the adapter; but `format=peft` needs the adapter folder."""
    notes, adapter_notes = read_notes(run / EXPORT), read_notes(run / adapter.FOLDER)
    if cfg.which is Which.average and notes.get(WHICH) != cfg.which.value:
        raise CheckpointError(f"{run} has no checkpoint with an average of the weights; set which=last")
    is_merged = bool(notes) and all(adapter_notes.get(key) == notes.get(key) for key in ("run", "step"))
    is_wanted = not is_merged or cfg.format is FolderFormat.peft
    if is_adapter_folder(run / adapter.FOLDER) and is_wanted:
        return open_adapted(run / adapter.FOLDER, cfg)
    if not notes:
        raise CheckpointError(f"source={run} {why_no_export(run)}; it has no checkpoint either")
    return open_model(run / EXPORT, cfg)


def open_checkpoint(checkpoint: Checkpoint, cfg: ConversionConfig) -> Opened:
    """Open a checkpoint (its files were checked before). Trained weights are read from it, and frozen weights from the
    models that the training loaded. LoRA adapters are merged in. `cfg` may change how images are fitted, and the
    tower's name.

    Raises:
        CheckpointError: the frozen weights differ from those with which the model was trained.
        ModelError: the checkpoint has adapters, and the configuration of their base model has changed.
    """
    facts, folder = checkpoint.facts, checkpoint.folder
    run = run_config(facts, folder)
    parts = find_parts(run.model)
    # without quantization: the files have the weights as they were before it, and an export has them too
    model = build_architecture(parts, replace(run.model, quantize=QuantizeConfig()), torch.float32)
    # the training froze parameters on which no loss depends
    model.unused |= {name for name, parameter in model.named_parameters() if parameter.requires_grad} - set(
        facts["trainable"]
    )
    model.freeze()
    where, key = run.model.checkpoint or run.model.language, "model.checkpoint or model.language"
    check_base_config(folder / adapter.FOLDER, parts, where, key)
    trained = saved_weights(checkpoint, AVERAGE_PREFIX if cfg.which is Which.average else WEIGHT_PREFIX)
    if cfg.which is Which.average and not trained:
        raise CheckpointError(f"{folder} has no average of the weights: its run had optim.ema=null; set which=last")
    # a projector that was not trained is read from where the training read it
    has_projector = all(n in trained for n, _ in model.named_parameters() if n.startswith(PROJECTOR_PREFIX))
    projector = None if has_projector else find_projector(run)
    check_artifacts(artifacts_of(parts, projector, run.model))
    sources = find_weights(model, parts, run.model, projector, run.seed)
    digests = weight_digests(model, sources)
    if fingerprint(model, digests) != facts["fingerprints"]["model"] or set(facts["trainable"]) - trained.keys():
        model_cfg = run.model
        of_whole = f"model.checkpoint={model_cfg.checkpoint}"
        of_parts = f"model.language={model_cfg.language}, model.vision={model_cfg.vision}, {of_whole}"
        read = of_parts if parts.class_config is None else of_whole
        raise CheckpointError(f"{folder} was written by a run with other frozen weights than those of {read}")
    source = source_of_run(model, run, facts["run"], facts["step"])
    if not isinstance(source, WholeSource):
        aspect, vision = cfg.image_aspect_ratio or source.aspect, cfg.vision or source.vision
        source = replace(source, aspect=aspect, vision=vision, renamed_tower=cfg.vision)
    if not run.model.lora.enabled:
        return Opened(source, sources | trained, folder)
    modules = sorted({module_of(name) for name in trained if is_adapter(name)})
    adapted = Adapted(run.model.lora, modules, sources | trained)
    adapter.check_changed(trained, f"the adapter of {folder}", "export a later checkpoint")
    plain: Any = build_architecture(parts, run.model.plain, torch.float32)
    source = replace(source, model=plain)
    return Opened(source, adapted.merged, folder, adapted)


def run_config(facts: dict[str, Any], folder: Path) -> Config:
    """Return the configuration of the run that wrote a checkpoint, from the checkpoint's `facts`. Keys and values that
    were renamed since get their present names. Raise CheckpointError if this version cannot read it."""
    try:
        node = OmegaConf.create(present_tree(facts["config"]))
        assert isinstance(node, DictConfig)
        return load(Config, node)
    except ConfigError as error:
        raise CheckpointError(f"{folder} was written with a configuration of another version: {error}") from error


def open_adapted(folder: Path, cfg: ConversionConfig) -> Opened:
    """Open a LoRA adapter folder (of llava_fsdp, peft or the original LLaVA), merged into its base model. Raises
    ModelError if the adapter does not fit the base model, was trained on another one, or was not changed by training.
    """
    opened = open_adapter(folder)
    notes = read_notes(folder)
    model_config = read_base(opened, cfg.base or cfg.language, cfg.vision)
    parts = find_parts(model_config)
    # opened again, now that it is known whether the tensors have the names of a class of transformers; adapters of the
    # vision tower that the original LLaVA adds and never trains are left out
    opened = adapter.without_idle_tower(open_adapter(folder, parts.class_config is not None))
    check_artifacts([folder, *artifacts_of(parts, None, model_config)])
    model = build_architecture(parts, model_config, torch.float32)
    model.requires_grad_(False)  # so that weight_digests covers all weights of the base model
    where = model_config.checkpoint or model_config.language
    check_named_base(opened, parts, where, BASE_OPTION)
    check_projector_names([without_base(name) for name in opened.tensors], model, f"source={folder}")
    base_sources = find_weights(model, parts, model_config, seed=notes.get("seed", 0))
    adapter.check_fits(opened, {name: tuple(p.shape) for name, p in model.named_parameters()}, f"base={where}")
    check_projector(opened, base_sources, where)
    check_fingerprint(opened, base_fingerprint(weight_digests(model, base_sources), opened.tensors), where, BASE_OPTION)
    adapter.check_changed(opened.tensors, f"the adapter of {folder}", "train it for more steps")
    adapted = Adapted(opened.lora, opened.modules, with_adapters(base_sources, opened))
    has_facts = (folder / "config.json").is_file() or notes
    source = describe_model(folder if has_facts else Path(where), model, model_config, cfg)
    return Opened(source, adapted.merged, folder, adapted, base_sources)


def check_projector(adapter_folder: AdapterFolder, base: dict[str, Stored], where: str) -> None:
    """Raise ModelError if neither a LoRA adapter folder nor the adapter's base model has a projector or, where the
    model has one, the vector that separates rows of image features (NEWLINE): the export would have random ones. A
    value in `base` of type Drawn is random. `where` is the base model's folder or hub name, for the message."""
    names = {without_base(name) for name in adapter_folder.tensors}
    random_names = [
        name
        for name, source in base.items()
        if name.startswith((PROJECTOR_PREFIX, NEWLINE)) and name not in names and isinstance(source, Drawn)
    ]
    if random_names:
        raise ModelError(
            f"{adapter_folder.folder} has no {random_names[0]}, and neither has {where}: "
            "non_lora_trainables.safetensors (or .bin) is missing; copy it there, or give a whole LLaVA model with "
            "base=PATH"
        )


def with_adapters(base: dict[str, Stored], adapter_folder: AdapterFolder) -> dict[str, Stored]:
    """Return the stored values of all parameters of a model with LoRA adapters, by name in it: those of the base model
    (`base`) and of the adapters. Other tensors in the adapter folder (a projector's, ...) replace the base's."""
    adapted_modules = set(adapter_folder.modules)
    trained_beside = {
        without_base(name): tensor for name, tensor in adapter_folder.tensors.items() if not is_adapter(name)
    }
    sources: dict[str, Stored] = {}
    for name, source in base.items():
        module, _, kind = name.rpartition(".")
        # the weight X.weight of a module with adapters is named X.base_layer.weight
        sources[f"{module}{BASE}{kind}" if module in adapted_modules else name] = trained_beside.get(name, source)
    return sources | {name: tensor for name, tensor in adapter_folder.tensors.items() if is_adapter(name)}


def open_model(folder: Path, cfg: ConversionConfig) -> Opened:
    """Open a model folder of llava_fsdp, transformers or the original LLaVA; or a folder with a projector alone,
    together with the language model and the vision tower to which it belongs."""
    check_folder(folder, SMALL)
    model_config = read_model(folder, cfg.language, cfg.vision)
    parts = find_parts(model_config)
    projector = None if model_config.checkpoint else folder
    check_artifacts(artifacts_of(parts, projector, model_config))
    model = build_architecture(parts, model_config, torch.float32)
    sources = find_weights(model, parts, model_config, projector)
    return Opened(describe_model(folder, model, model_config, cfg), sources, folder, sources_without_adapters=sources)


def describe_model(
    folder: Path, model: Architecture, model_config: ModelConfig, cfg: ConversionConfig
) -> SourceModel | WholeSource:
    """Return what an export needs to know of the model in a folder besides its weights: a SourceModel for a LLaVA, a
    WholeSource for a whole model of transformers. The weights of `model` are not used. What the model's training
    recorded is read from the folder's notes (`llava_fsdp.json`), if it has them."""
    if isinstance(model, Llava):
        return source_of_folder(folder, model, model_config, cfg)
    notes = read_notes(folder)
    assert model.parts.whole is not None
    return WholeSource(
        model=model,
        folder=model.parts.whole,
        max_length=notes.get("max_length"),
        special_tokens=choice_of(SpecialTokens, notes, "special_tokens", SpecialTokens.text, folder),
        history=history_in(notes),
        video_fps=notes.get("video_fps"),
        video_frames=notes.get("video_frames"),
        teaching=Teaching.of_text(notes.get("teaching")),
    )


def source_of_folder(folder: Path, model: Llava, model_config: ModelConfig, cfg: ConversionConfig) -> SourceModel:
    """Return a description of the LLaVA model in a folder. Settings such as the conversation template come from the
    folder's `llava_fsdp.json` or `config.json`, and from `cfg` if neither has them; `image_aspect_ratio` and `vision`
    of `cfg` replace those of the folder. The weights of `model` are not used."""
    has_config = (folder / "config.json").is_file()
    raw = read_json(folder / "config.json", f"source={folder}") if has_config else {}
    notes = read_notes(folder)
    return SourceModel(
        model=model,
        template=notes.get("template") or default_template(cfg, model.parts),
        aspect=cfg.image_aspect_ratio or aspect_of(folder, raw, notes),
        grid_pinpoints=notes.get("grid_pinpoints")
        or model.parts.grid_pinpoints
        or raw.get("image_grid_pinpoints")
        or [],
        max_tiles=notes.get("max_tiles") or model.parts.max_tiles or max_tiles_of(raw),
        pixels=choice_of(Pixels, notes, "pixels", Pixels.exact, folder),
        special_tokens=choice_of(SpecialTokens, notes, "special_tokens", SpecialTokens.text, folder),
        max_length=notes.get("max_length") or raw.get("tokenizer_model_max_length") or 2048,
        language=notes.get("language") or model_config.language,
        vision=cfg.vision or notes.get("vision") or model_config.vision,
        renamed_tower=cfg.vision,
        history=history_in(notes),
        video_sampling=VideoSampling.of_limits(notes.get("video_fps"), notes.get("video_frames")),
        teaching=Teaching.of_text(notes.get("teaching")),
    )


def default_template(cfg: ConversionConfig, parts: Parts) -> str:
    """Return the name of the conversation template of a model whose folder does not name one: that in `cfg`. With
    `auto` it is the language model's own chat template, if the model is in transformers' form or has image grids and
    this template can be trained with; else v1."""
    if cfg.template == OWN:  # the language model's own chat template, whose full name has a digest of its text
        return own_name(parts.language_folder) or OWN
    if cfg.template != AUTO:
        return cfg.template
    has_own = parts.grid_pinpoints is not None or is_whole(parts.language_folder)
    return (usable_name(parts.language_folder) if has_own else None) or "v1"


C = TypeVar("C", bound=Enum)


def choice_of(kind: type[C], notes: dict[str, Any], key: str, default: C, folder: Path) -> C:
    """Return a setting in `notes`, the contents of a model folder's `llava_fsdp.json`, as a member of an enumeration;
    `default` if the file lacks the setting. Raises ModelError if its value is not a member."""
    value = notes.get(key, default.value)
    value = VALUES.get((f"data.{key}", str(value)), value)  # today's name of a value that was renamed
    if value not in [choice.value for choice in kind]:
        raise ModelError(f"{folder / NOTES} has {key}={value}; it must be {' or '.join(str(c.value) for c in kind)}")
    return kind(value)


def max_tiles_of(raw: dict[str, Any]) -> int:
    """Return the limit on the number of vision features of an image that is cut into tiles, as a number of tiles: N if
    the original LLaVA's config.json has `image_aspect_ratio=anyres_max_N`, else the default of `data.max_tiles`."""
    match = LIMITED.fullmatch(str(raw.get("image_aspect_ratio")))
    return int(match[1]) if match else MAX_TILES


def aspect_of(folder: Path, raw: dict[str, Any], notes: dict[str, Any]) -> AspectRatio:
    """Return how a model fits images into the square input of its vision tower, from the first of these files that says
    it: `llava_fsdp.json` (`notes`), the original LLaVA's config.json (`raw`), transformers'
    preprocessor_config.json."""
    value = notes.get("image_aspect_ratio")
    if value is None and is_original(raw):
        value = raw.get("image_aspect_ratio", "square")
        value = "anyres_max" if LIMITED.fullmatch(str(value)) else value
    if value is None:
        value = {NEXT: "anyres", ONEVISION: "anyres_max"}.get(raw.get("model_type", ""))
    if value is None:
        value = "pad" if preprocessor_fields(folder).get("do_pad") else "square"
    if value not in [choice.value for choice in AspectRatio]:
        raise ModelError(
            f"{folder / 'config.json'} has image_aspect_ratio={value}; give image_aspect_ratio=square or pad"
        )
    return AspectRatio(value)
