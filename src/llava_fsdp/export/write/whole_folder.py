"""Write the folder of a model that is one of transformers' own classes: its weights as `save_pretrained` writes them,
and the other files of the folder from which it was read, bit for bit.

Nothing is converted. Two files are written anew if they would be wrong: `config.json`, if it says another dtype than
that of the weights, or one weight for embeddings and output layer where there are two; `generation_config.json`, if it
does not name every token that ends an answer.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from llava_fsdp.config import Config, FolderFormat, SpecialTokens
from llava_fsdp.data.text.chat_template.jinja_template import OWN
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.export.card.model_card import FolderKind, license_notes, write_card_and_notes
from llava_fsdp.export.write.generation_file import write_generation_of_class
from llava_fsdp.export.write.weights_writer import ReadPart, Weights, with_values, write_shards
from llava_fsdp.model.adapters.lora_names import is_adapter, without_base
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.parts import read_json
from llava_fsdp.model.sources.llava_v1_5_config import dtype_name, write_json
from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.model.weights.conversions import (
    LoadPlan,
    names_saved,
    plan_load,
    plan_save_again,
    tied_weights,
    whole_model_of,
)
from llava_fsdp.model.weights.lazy_tensor import LazyTensor
from llava_fsdp.model.weights.tensor_files import open_tensors
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.durable_files import make_empty
from llava_fsdp.runtime.files.provenance import NOTES, README

WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data",
)  # fmt: skip
"""Endings of the names of files with weights, or with the places of weights."""
DTYPE_KEYS = ("dtype", "torch_dtype")
TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class WholeSource:
    """Description of a model to export that is one of transformers' own classes.

    Attributes:
        model: model with this architecture. Its weights are not used, and may be sharded or on the meta device.
        folder: folder from which the model was read before its training.
        max_length: maximum number of tokens of a sample in training; None if it is not known.
        special_tokens: how special tokens in a text are tokenized.
        history: id of the training, stage and step that produced the model, and the parts that were trained.
        video_fps: value of `data.video_fps` in training; `video_frames` likewise.
        teaching: what was learnt of thoughts, which decides how the model is asked; None if it is not known.
    """

    model: Architecture
    folder: Path
    max_length: int | None
    special_tokens: SpecialTokens
    history: dict[str, Any]
    video_fps: float | None = None
    video_frames: int | None = None
    teaching: Teaching | None = None

    template = OWN
    """The conversation template is always the one in the folder."""

    @property
    def prompting(self) -> dict[str, str]:
        """The settings of training with which questions are asked."""
        return {"template": self.template}

    @property
    def config(self) -> PretrainedConfig:
        """The folder's configuration, but embeddings and output layer are not tied if they have different weights."""
        config = read_config(self.folder, "model.checkpoint")
        if self.is_untied:
            for part in {id(part): part for part in (config, config.get_text_config())}.values():
                part.tie_word_embeddings = False
        return config

    @property
    def is_untied(self) -> bool:
        """Whether embeddings and output layer have different weights, although the folder's config.json ties them."""
        if self.model.language_config.tie_word_embeddings:
            return False
        return tied_weights(whole_model_of(read_config(self.folder, "model.checkpoint"))) is not None

    @property
    def settings(self) -> dict[str, Any]:
        """The contents of the export's `llava_fsdp.json` that describe the model and its training."""
        values = {
            "max_length": self.max_length,
            "video_fps": self.video_fps,
            "video_frames": self.video_frames,
            "teaching": None if self.teaching is None else str(self.teaching),
        }
        given = {key: value for key, value in values.items() if value is not None}
        return {**self.history, "special_tokens": self.special_tokens.value, **given, **license_notes(self.folder)}


def whole_source_of_run(model: Architecture, cfg: Config, history: dict[str, Any]) -> WholeSource:
    """Return the description of a trained model, which may be sharded. `history`: id of the training, stage, step."""
    assert model.parts.whole is not None
    data = cfg.data
    return WholeSource(
        model=model,
        folder=model.parts.whole,
        max_length=data.max_length,
        special_tokens=cfg.trained_special_tokens,
        history=history,
        video_fps=data.video_fps,
        video_frames=data.video_frames,
        teaching=Teaching.of_config(data),
    )


def write_whole_folder(
    form: FolderFormat, source: WholeSource, weights: Weights, export_folder: Path, notes: Mapping[str, Any]
) -> None:
    """Write a model that is one of transformers' own classes into a folder for transformers: its weights, and the other
    files of the folder that it was read from. Collective; the first rank writes.

    Raises:
        ConfigError: the format is not that of transformers.
        ModelError: the weights are not those of the class of transformers.
        CheckpointError: the folder could not be written.
    """
    if form is not FolderFormat.hf:
        kind = source.config.model_type
        raise ConfigError(f"format={form.value}: a {kind} is written for transformers alone; set format=hf")
    failing = f"cannot write {export_folder}"
    dtypes = set(weights.dtypes.values())

    def begin() -> None:
        make_empty(export_folder)
        copy_others(source.folder, export_folder)
        write_config(source, dtypes.pop() if len(dtypes) == 1 else None, export_folder)
        write_generation_of_class(source.folder, source.model.language_config, export_folder)

    on_first_rank(begin, failing)
    # how the class maps its folder's files to its weights; `weights` and what only that folder has, such as buffers
    loaded, complete = load_plan_and_weights_to_write(source, weights)
    write_shards(complete, export_folder, partial(tensors_to_write, loaded, complete), vocabulary=(), trained=0, rows=0)
    entries = {**source.settings, **notes}
    on_first_rank(lambda: write_card_and_notes(export_folder, FolderKind.class_of_transformers, entries), failing)


def check_plan(source: WholeSource) -> None:
    """Check, before training, that a model can be exported by transformers' class. Only shapes are compared. Values are
    read of those tensors alone that the model's folder has and the model has not, such as buffers. Raises ModelError if
    the class does not save a parameter of the model, or has one that neither the model nor its folder has."""
    names = {without_base(name): p for name, p in source.model.named_parameters() if not is_adapter(name)}
    shapes = {name: tuple(parameter.shape) for name, parameter in names.items()}
    # the functions that would read the values are never called
    loaded, complete = load_plan_and_weights_to_write(
        source, Weights(shapes, dict.fromkeys(shapes, torch.float32), lambda _: torch.empty(0))
    )
    tensors_to_write(loaded, complete, lambda *_: torch.empty(0))


def load_plan_and_weights_to_write(source: WholeSource, weights: Weights) -> tuple[LoadPlan, Weights]:
    """Return how transformers' class loads its weights from the files of the folder that the model was read from, and
    the `weights` to write together with those tensors that only these files have, such as buffers."""
    config, folder = source.config, source.folder
    loaded = plan_load(lambda: whole_model_of(config), open_tensors(folder), folder)
    return loaded, with_folders_own(weights, loaded, folder)


def with_folders_own(weights: Weights, loaded: LoadPlan, folder: Path) -> Weights:
    """Return weights together with all else that transformers' class saves, such as buffers, which training does not
    hold. They are read from the folder, with their dtypes there. A buffer that the folder lacks is left out, because
    the class computes it. Raises ModelError if neither has one of the class's parameters."""
    model = whole_model_of(loaded.model.config)
    wanted = sorted(names_saved(model) - weights.shapes.keys())
    lacking = [name for name in wanted if name not in loaded.sources]
    if unknown := {*lacking} & {name for name, _ in model.named_parameters()}:
        raise ModelError(f"neither the trainer nor {folder} has {min(unknown)}, which transformers' class needs")
    folder_values = {name: all_values(loaded.sources[name]) for name in wanted if name in loaded.sources}
    return with_values(weights, folder_values)


def tensors_to_write(loaded: LoadPlan, weights: Weights, read: ReadPart) -> dict[str, LazyTensor]:
    """Return the tensors that transformers' class saves, by their names in the files; their values are read later with
    `read`. Raises ModelError if one of the `weights` is in no tensor. `loaded` says where the model was loaded from."""
    planned = plan_save_again(loaded, read)
    # `weights` lacks the buffers that the class computes itself
    planned = {name: tensor for name, tensor in planned.items() if weights.shapes.keys() >= {*tensor.sources}}
    lost = weights.shapes.keys() - {name for tensor in planned.values() for name in tensor.sources}
    if lost:
        raise ModelError(
            f"transformers' {type(loaded.model).__name__} does not save {min(lost)}, which was trained or kept"
        )
    return planned


def all_values(source: Any) -> torch.Tensor:
    """Read all values of a parameter or a buffer, which may be a scalar or of integers."""
    return source.rows(0, source.shape[0]) if source.shape else source.part(())


def copy_others(folder: Path, export_folder: Path) -> None:
    """Copy all files of a model folder but its weights, config.json and model card, bit for bit. Hidden files and this
    package's notes are left out, and so are subfolders with weights: the same model in another form."""
    for place, names in files_to_copy(folder):
        to = export_folder / place.relative_to(folder)
        to.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(place / name, to / name)


def files_to_copy(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield (folder, sorted names of its files to copy) for a model folder and its subfolders. Hidden files, weights,
    the model's own config.json, model card and llava_fsdp.json, and subfolders with weights are left out."""
    for place, inside, names in os.walk(folder):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        if Path(place) != folder and any(name.endswith(WEIGHTS) for name in names):
            inside.clear()
            continue
        others = [name for name in names if not name.endswith(WEIGHTS) and not name.startswith(".")]
        at_top = Path(place) == folder
        yield Path(place), sorted(name for name in others if not (at_top and name in ("config.json", README, NOTES)))


def write_config(source: WholeSource, dtype: torch.dtype | None, export_folder: Path) -> None:
    """Write `config.json`: that of the model's folder, bit for bit, unless it names another dtype than that of the
    weights, or ties embeddings and output layer although they have different weights. `dtype`: that of all weights;
    None: they have several, as they had before training."""
    file = source.folder / "config.json"
    raw = read_json(file, str(file))
    fields = raw if dtype is None else with_dtype(raw, dtype_name(dtype))
    if source.is_untied:
        text = {"text_config": fields["text_config"] | {TIED: False}} if "text_config" in fields else {}
        fields = {**fields, **text, TIED: False}
    if fields == raw:
        shutil.copyfile(file, export_folder / file.name)
    else:
        write_json(export_folder / file.name, fields)


def with_dtype(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the contents of a config.json with another dtype wherever it names one, also for the model's parts.
    Without a name of a dtype, transformers takes that of the weights."""
    changed = dict(fields)
    for key, value in fields.items():
        if key in DTYPE_KEYS and value is not None:
            changed[key] = name
        elif key.endswith("_config") and isinstance(value, dict):
            changed[key] = with_dtype(value, name)
    return changed
