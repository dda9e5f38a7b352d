"""What the notes of an exported folder (`llava_fsdp.json`) say about the training that produced the model: its run,
stage and step, the parts that were trained, and a recipe for the reader of a model card."""

import re
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config, DataConfig, ModelConfig, Part, Quantizer, Source, is_remote, paths_in
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.pretrained import public_name
from llava_fsdp.runtime.files.provenance import read_notes

HISTORY = ("run", "stage", "step", "train", "recipe")
"""Keys of the notes that `history` writes."""
BASE, DATA = "base models", "data"
"""Keys of the recipe: names of the models that the training began with, and of its data."""
HUB_DATASET = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)")


def history(cfg: Config, parts: Parts, run: str, step: int) -> dict[str, Any]:
    """Return what the notes of a folder say about the training that produced the model. `run`: id of the training.
    `parts`: files of the model that the training began with."""
    recipe = {BASE: base_models(cfg.model, parts), DATA: names_of_data(cfg.data), **settings(cfg)}
    return {"run": run, "stage": cfg.stage.name, "step": step, "train": list(cfg.model.train), "recipe": recipe}


def history_in(notes: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a folder's notes that `history` wrote."""
    return {key: notes[key] for key in HISTORY if key in notes}


def base_models(cfg: ModelConfig, parts: Parts) -> list[str]:
    """Return the public names of the models that a training began with: a whole model (`parts.whole`: its folder), or a
    language model and a vision tower. If an earlier training made the whole model, return the models which that one
    began with, as far as the notes in the folder (`llava_fsdp.json`) name them."""
    if parts.whole is None:
        names = [cfg.language, cfg.vision]
    else:
        notes = read_notes(parts.whole)
        names = notes.get("recipe", {}).get(BASE) or [notes.get("language"), notes.get("vision")]
        names = [name for name in names if name] or [cfg.checkpoint or parts.whole.name]
    return [public_name(str(name)) for name in names]


def names_of_data(cfg: DataConfig) -> list[str]:
    """Return the public names of a training's data: of a dataset on the hub its name, of another path the last part."""
    if cfg.source is Source.shapes:
        return ["shapes that llava_fsdp draws"]
    given = [source.path for source in cfg.sources.values()] or [cfg.path or ""]
    return [public_data(path) for text in given for path in paths_in(text)]


def public_data(path: str) -> str:
    """Return the public name of a file or folder of data, which may be remote (see `names_of_data`)."""
    on_hub = HUB_DATASET.match(path)
    if on_hub:
        return on_hub["name"]
    return path.rstrip("/").rpartition("/")[2] if is_remote(path) else Path(path).name


def settings(cfg: Config) -> dict[str, Any]:
    """Return the settings of a training that its model card lists, by their labels in the card."""
    optim, lora = cfg.optim, cfg.model.lora
    rates = {
        f"of the {part.value}": rate
        for part, rate in ((Part.projector, optim.projector_lr), (Part.vision, optim.vision_lr))
        if rate
    }
    found: dict[str, Any] = {
        "learning rate": ", ".join([f"{optim.lr:g}", *(f"{rate:g} {of}" for of, rate in rates.items())]),
        "optimizer": "Muon for matrices, AdamW for the rest" if optim.is_muon else None,
        "average of the weights": None if optim.ema is None else f"kept, decay rate {optim.ema:g}",
        "schedule": optim.described_schedule,
        "global batch size": cfg.global_batch_size,
        "epochs": cfg.epochs if cfg.max_steps is None else None,
        "maximum length": f"{cfg.data.max_length} tokens",
        "seed": cfg.seed,
    }
    if cfg.data.pairs:
        found["preference loss"] = f"{cfg.pref.form.value}, beta {cfg.pref.beta:g}"
    if lora.enabled:
        found["LoRA"] = f"rank {lora.r}, alpha {lora.alpha:g}"
    if cfg.model.quantize.mode is not Quantizer.none:
        found["quantization of frozen weights"] = cfg.model.quantize.mode.value
    return {key: value for key, value in found.items() if value is not None}
