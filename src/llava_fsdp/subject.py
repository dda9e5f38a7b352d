"""What an export starts from: a run, one of its checkpoints, or a model folder, opened alike."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llava_fsdp.checkpoint import FOLDER, STATE_FILE, Checkpoint, newest_alone, verify
from llava_fsdp.config import AspectRatio, Config, ConversionConfig, KeptDType, load
from llava_fsdp.data.images import preprocessor_fields
from llava_fsdp.errors import CheckpointError, ConfigError, ModelError
from llava_fsdp.formats import Subject
from llava_fsdp.model.asis import read_model
from llava_fsdp.model.llava import build_llava
from llava_fsdp.model.original import is_original
from llava_fsdp.model.parts import EXPORT, NOTES, find_parts, find_projector, read_json, resolve
from llava_fsdp.model.weights import PROJECTOR_PREFIX, Stored, find_weights, fingerprint
from llava_fsdp.saved import saved_weights


@dataclass(frozen=True)
class Opened:
    """A model that can be written."""

    subject: Subject
    sources: dict[str, Stored]
    """Where every parameter's values are."""
    folder: Path
    """The checkpoint or model folder that they come from."""


def open_source(cfg: ConversionConfig) -> Opened:
    """The model that `source` means.

    Raises:
        ConfigError: `source` is none, or needs a language model or a tower that was not given.
        ModelError, CheckpointError: it cannot be read.
    """
    given = Path(cfg.source)
    if (given / STATE_FILE).is_file():
        return open_checkpoint(verify(given.resolve()), cfg)
    if (given / FOLDER).is_dir() or ((given / "config.yaml").is_file() and not (given / "config.json").is_file()):
        return open_run(given, cfg)
    return open_model(resolve(cfg.source, "source"), cfg)


def open_run(run: Path, cfg: ConversionConfig) -> Opened:
    """The newest checkpoint of a run that verifies, or its export where that is as new and has the wanted dtype."""
    newest = newest_alone(run / FOLDER)
    notes = read_notes(run / EXPORT)
    if newest is None and not notes:
        raise CheckpointError(f"source={run} is a run without a finished checkpoint or export; let it train on")
    current = newest is None or all(newest.facts[key] == notes.get(key) for key in ("run", "step"))
    if notes and current and (newest is None or cfg.dtype.value in (KeptDType.keep.value, notes.get("dtype"))):
        return open_model(run / EXPORT, cfg)
    assert newest is not None
    return open_checkpoint(newest, cfg)


def open_checkpoint(found: Checkpoint, cfg: ConversionConfig) -> Opened:
    """Trained weights from the checkpoint, frozen ones from where the run had them.

    Raises:
        CheckpointError: the frozen weights are not those of the run.
    """
    facts, folder = found.facts, found.folder
    run = run_config(facts, folder)
    parts = find_parts(run.model)
    model = build_llava(parts, run.model, torch.float32)
    trained = saved_weights(found)
    learned = all(n in trained for n, _ in model.named_parameters() if n.startswith(PROJECTOR_PREFIX))
    projector = None if learned else find_projector(run)
    sources = find_weights(model, parts, run.model, projector, run.seed)
    if fingerprint(model, sources) != facts["fingerprints"]["model"] or set(facts["trainable"]) - trained.keys():
        raise CheckpointError(
            f"{folder} was written by a run with other frozen weights than those of model.language="
            f"{run.model.language}, model.vision={run.model.vision}, model.checkpoint={run.model.checkpoint}"
        )
    sources |= trained
    subject = Subject(
        model=model,
        template=run.data.template,
        aspect=cfg.image_aspect_ratio or run.data.trained_aspect,
        grid_pinpoints=run.data.grid_pinpoints,
        max_length=run.data.max_length,
        language=run.model.language,
        vision=cfg.vision or run.model.vision,
        renamed_tower=cfg.vision,
        history=history(facts["run"], run.stage.name, facts["step"], run.model.train),
    )
    return Opened(subject, sources, folder)


def run_config(facts: dict[str, Any], folder: Path) -> Config:
    try:
        node = OmegaConf.create(facts["config"])
        assert isinstance(node, DictConfig)
        return load(Config, node)
    except ConfigError as error:
        raise CheckpointError(f"{folder} was written with a configuration of another version: {error}") from error


def history(run: str, stage: str, step: int, train: list) -> dict[str, Any]:
    return {"run": run, "stage": stage, "step": step, "train": [part.value for part in train]}


def open_model(folder: Path, cfg: ConversionConfig) -> Opened:
    """A model folder of ours, transformers' or the original's; or a projector with the parts it was made for."""
    model_config = read_model(folder, cfg.language, cfg.vision)
    parts = find_parts(model_config)
    model = build_llava(parts, model_config, torch.float32)
    projector = None if model_config.checkpoint else folder
    sources = find_weights(model, parts, model_config, projector, 0)
    raw, notes = read_json(folder / "config.json", f"source={folder}"), read_notes(folder)
    subject = Subject(
        model=model,
        template=notes.get("template", cfg.template),
        aspect=cfg.image_aspect_ratio or aspect_of(folder, raw, notes),
        grid_pinpoints=notes.get("grid_pinpoints") or raw.get("image_grid_pinpoints") or [],
        max_length=notes.get("max_length") or raw.get("tokenizer_model_max_length") or 2048,
        language=notes.get("language") or model_config.language,
        vision=cfg.vision or notes.get("vision") or model_config.vision,
        renamed_tower=cfg.vision,
        history={key: notes[key] for key in ("run", "stage", "step", "train") if key in notes},
    )
    return Opened(subject, sources, folder)


def aspect_of(folder: Path, raw: dict[str, Any], notes: dict[str, Any]) -> AspectRatio:
    """Whether pictures are padded to a square: our word, the original's, or that of transformers' processor."""
    said = notes.get("image_aspect_ratio")
    if said is None and is_original(raw):
        said = raw.get("image_aspect_ratio", "square")
    if said is None:
        said = "pad" if preprocessor_fields(folder).get("do_pad") else "square"
    if said not in [choice.value for choice in AspectRatio]:
        raise ModelError(
            f"{folder / 'config.json'} has image_aspect_ratio={said}; give image_aspect_ratio=square or pad"
        )
    return AspectRatio(said)


def read_notes(folder: Path) -> dict[str, Any]:
    return read_json(folder / NOTES, str(folder)) if (folder / NOTES).is_file() else {}


def rows_of(sources: dict[str, Stored]) -> Callable[[str], torch.Tensor]:
    """Reads a whole parameter by its name."""
    return lambda name: sources[name].rows(0, sources[name].shape[0])
