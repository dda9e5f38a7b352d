"""A model as a folder that others load: transformers, the original LLaVA, or the original's second stage."""

import copy
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig, LlavaConfig

from llava_fsdp.config import AspectRatio, Config, Feature, FolderFormat, Part, PatchMerge, Pixels, SpecialTokens
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.distributed.consensus import on_first_rank
from llava_fsdp.export.processor import (
    check_template,
    has_tokenizer,
    preprocessor_fields,
    write_original_tokenizer,
    write_preprocessor,
    write_processor,
    write_tokenizer,
)
from llava_fsdp.export.weights_writer import Vocabulary, Weights, write_projector, write_shards
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.llava_v1_5_config import (
    TOWER,
    dtype_name,
    generation_config,
    is_original,
    known_tower,
    original_config,
    write_json,
)
from llava_fsdp.model.load_weights import PROJECTOR_PREFIX
from llava_fsdp.model.pretrained import PACKAGE, Parts, read_json
from llava_fsdp.model.tensor_files import open_tensors
from llava_fsdp.model.weight_names import COMPUTED, original, theirs
from llava_fsdp.runtime.durable_files import make_empty
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.provenance import seal

KEPT = "original"
"""In transformers' folder of a model that came from the original: its small files, for the way back."""
KEPT_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
BUFFERS = "buffers.safetensors"


@dataclass(frozen=True)
class Subject:
    """A model to write, and what is said of it beside its weights."""

    model: Llava
    """Its parts and shapes; weights may be sharded, or not there."""
    template: str
    aspect: AspectRatio
    grid_pinpoints: list[list[int]]
    """anyres only: sizes in pixels that a picture may be fitted into; empty: LLaVA-NeXT's"""
    pixels: Pixels
    """How questions about it read an image: as its training did, but never fast."""
    special_tokens: SpecialTokens
    max_length: int
    language: str
    vision: str
    """Names of the parts; empty where they are not known."""
    renamed_tower: str | None
    """What the original is to call the tower from now on; None leaves it its name."""
    history: dict[str, Any]
    """Which run, stage and step made it."""

    @property
    def vocabulary(self) -> int:
        return self.model.parts.language.vocab_size


def subject_of(model: nn.Module, cfg: Config, run: str, step: int) -> Subject:
    """The model of a run, after a step."""
    assert isinstance(model, Llava)  # FSDP makes a subclass of it
    return Subject(
        model=model,
        template=cfg.trained_template,
        aspect=cfg.data.trained_aspect,
        grid_pinpoints=cfg.data.grid_pinpoints,
        pixels=Pixels.llava_v1_5 if cfg.data.pixels is Pixels.llava_v1_5 else Pixels.exact,
        special_tokens=cfg.trained_special_tokens,
        max_length=cfg.data.max_length,
        language=cfg.model.language,
        vision=cfg.model.vision,
        renamed_tower=None,
        history=history(run, cfg.stage.name, step, cfg.model.train),
    )


def history(run: str, stage: str, step: int, train: list[Part]) -> dict[str, Any]:
    return {"run": run, "stage": stage, "step": step, "train": [part.value for part in train]}


def write_folder(form: FolderFormat, subject: Subject, weights: Weights, staged: Path, notes: dict[str, Any]) -> None:
    """Write a model in a format. A collective.

    Args:
        notes: what else `llava_fsdp.json` is to say.

    Raises:
        ModelError, ConfigError: the format has no such model; the message says what it lacks.
        CheckpointError: the folder could not be written.
    """
    failing = f"cannot write {staged}"
    rename = partial(original, projector_type=subject.model.cfg.projector_type)
    on_first_rank(lambda: make_empty(staged), failing)
    if form is FolderFormat.hf:
        rows = on_first_rank(lambda: begin_hf(subject, weights.widest, staged), failing)
        write_shards(weights, staged, theirs, Vocabulary(subject.vocabulary, rows), {})
    elif form is FolderFormat.llava:
        on_first_rank(lambda: begin_llava(subject, weights.widest, staged), failing)
        buffers = on_first_rank(lambda: saved_buffers(subject.model.parts), failing)
        write_shards(weights, staged, rename, Vocabulary(subject.vocabulary, subject.vocabulary), buffers)
    else:
        on_first_rank(lambda: begin_projector(subject, weights, staged), failing)
        write_projector(weights, staged, rename)
    on_first_rank(lambda: write_notes(subject, staged, notes), failing)


def write_notes(subject: Subject, staged: Path, notes: dict[str, Any]) -> None:
    """`llava_fsdp.json`: what no other program's files say, and the digests of all that is there; written last."""
    said = {
        **subject.history,
        **notes,
        "template": subject.template,
        "image_aspect_ratio": subject.aspect.value,
        "grid_pinpoints": subject.grid_pinpoints,
        "pixels": subject.pixels.value,
        "special_tokens": subject.special_tokens.value,
        "max_length": subject.max_length,
        "vocab_size": subject.vocabulary,
        "image_start_end": subject.model.cfg.image_start_end,
        "language": subject.language,
        "vision": subject.vision,
    }
    seal(staged, said)


def begin_hf(subject: Subject, dtype: torch.dtype, staged: Path) -> int:
    """Everything but the weights; returns the rows of the vocabulary."""
    model, parts = subject.model, subject.model.parts
    if model.cfg.projector_type != "mlp2x_gelu":
        raise ConfigError(f"transformers' LLaVA has no {model.cfg.projector_type} projector; choose format=llava")
    if model.cfg.patch_merge is not PatchMerge.flat or subject.aspect is AspectRatio.anyres:
        raise ConfigError(
            "transformers' LLaVA takes a picture as one tile, this model several (anyres); choose format=llava, "
            "which the original's programs and model.checkpoint= read"
        )
    image_id, pad_id, rows = write_tokenizer(
        parts.language_folder, staged, parts.language, subject.template, model.cfg.image_start_end
    )
    text = type(parts.language).from_dict({**parts.language.to_dict(), "vocab_size": rows, "use_cache": True})
    config = LlavaConfig(
        vision_config=copy.deepcopy(parts.vision),  # LlavaConfig resets what the live tower reads
        text_config=text,
        image_token_index=image_id,
        image_seq_length=model.image_tokens,
        vision_feature_layer=model.cfg.select_layer,
        vision_feature_select_strategy="default" if model.cfg.select_feature is Feature.patch else "full",
        tie_word_embeddings=bool(parts.language.tie_word_embeddings),
        architectures=["LlavaForConditionalGeneration"],
        dtype=dtype_name(dtype),
    )
    config.pad_token_id = pad_id
    config.save_pretrained(staged)
    check_template(parts.language_folder, staged, parts.language, subject.template, model.cfg.image_start_end)
    write_processor(parts.vision_folder, staged, config, subject.aspect)
    GenerationConfig(
        bos_token_id=parts.language.bos_token_id, eos_token_id=parts.language.eos_token_id, pad_token_id=pad_id
    ).save_pretrained(staged)
    came_from = originals_files(parts)
    if came_from is not None:
        (staged / KEPT).mkdir()
        copy_files(came_from, staged / KEPT, (*KEPT_FILES, *TOKENIZER_FILES))
        buffers = saved_buffers(parts)
        if buffers:
            save_file(buffers, staged / KEPT / BUFFERS)
    return rows


def begin_llava(subject: Subject, dtype: torch.dtype, staged: Path) -> None:
    """Everything but the weights, as model/builder.py of the original reads it."""
    write_configs(subject, dtype, staged)
    write_originals_tokenizer(subject, staged)


def write_configs(subject: Subject, dtype: torch.dtype, staged: Path) -> None:
    """The original's `config.json`, and what belongs to it but the tokenizer.

    Raises:
        ModelError, ConfigError: the original has no such model, or nothing says its tower's name.
    """
    parts, came_from = subject.model.parts, originals_files(subject.model.parts)
    write_json(staged / "config.json", config_of_original(subject, dtype))
    language = parts.language
    ends = {f"{k}_token_id": getattr(language, f"{k}_token_id") for k in ("bos", "eos", "pad")}
    given = {"_from_model_config": True, **ends, "transformers_version": "4.37.2"}
    if came_from is not None and (came_from / "generation_config.json").is_file():
        given = read_json(came_from / "generation_config.json", str(came_from))
    write_json(staged / "generation_config.json", generation_config(given))
    (staged / TOWER).mkdir()
    copy.deepcopy(parts.vision).save_pretrained(staged / TOWER)
    if preprocessor_fields(parts.vision_folder):
        write_preprocessor(parts.vision_folder, staged / TOWER, pads=False)


def write_originals_tokenizer(subject: Subject, staged: Path) -> None:
    """The one that the model came with, or as the original loads it."""
    parts, came_from = subject.model.parts, originals_files(subject.model.parts)
    if came_from is not None and has_tokenizer(came_from):
        copy_files(came_from, staged, TOKENIZER_FILES)
    else:
        write_original_tokenizer(parts.language_folder, staged, subject.vocabulary, subject.max_length)


def begin_projector(subject: Subject, weights: Weights, staged: Path) -> None:
    if not subject.model.multi_modal_projector.depth:
        raise ConfigError("an identity projector has no weights, so there is no mm_projector.bin; choose format=llava")
    stage_1 = {"architectures": ["LlamaForCausalLM"], "tune_mm_mlp_adapter": True}
    dtypes = {n: d for n, d in weights.dtypes.items() if n.startswith(PROJECTOR_PREFIX)}
    config = config_of_original(subject, reduce(torch.promote_types, dtypes.values()))
    write_json(staged / "config.json", config | stage_1)


def config_of_original(subject: Subject, dtype: torch.dtype) -> dict[str, Any]:
    """The original's config.json: the one that the model came with, where it did, with what has changed."""
    model, parts = subject.model, subject.model.parts
    came_from = originals_files(parts)
    if came_from is not None:
        config = read_json(came_from / "config.json", str(came_from))
    else:
        tower = tower_name(subject)
        config = original_config(parts.language, parts.vision.hidden_size, model.cfg, tower, subject.max_length)
        config["tune_mm_mlp_adapter"] = False
    ours = {
        "mm_patch_merge_type": (model.cfg.patch_merge.value, "flat"),
        "mm_use_im_start_end": (model.cfg.image_start_end, False),
        "tokenizer_model_max_length": (subject.max_length, None),
        "mm_vision_tower": (subject.renamed_tower or config.get("mm_vision_tower"), None),
    }
    for key, (value, unsaid) in ours.items():
        if config.get(key, unsaid) != value:
            config[key] = value
    if Part.vision.value in subject.history.get("train", []):
        config["unfreeze_mm_vision_tower"] = True  # else the original loads the tower's first weights over ours
    if subject.aspect is AspectRatio.anyres:
        sizes = grid_sizes(subject.grid_pinpoints, parts.vision.image_size)
        config["image_grid_pinpoints"] = [list(size) for size in sizes]
    return {**config, "image_aspect_ratio": subject.aspect.value, "torch_dtype": dtype_name(dtype)}


def tower_name(subject: Subject) -> str:
    """What the original is to load as its tower.

    Raises:
        ConfigError: nothing says.
    """
    name = subject.vision or known_tower(subject.model.parts.vision)
    if not name:
        raise ConfigError("the original's folders name their vision tower, and the source does not: give vision=NAME")
    if name.startswith(PACKAGE):
        log().warning("the tower is %s, which the original cannot load; we can", name)
    return name


def originals_files(parts: Parts) -> Path | None:
    """The small files of the original that this model came from, however many folders ago."""
    if parts.whole is None:
        return None
    if (parts.whole / KEPT / "config.json").is_file():
        return parts.whole / KEPT
    return parts.whole if is_original(read_json(parts.whole / "config.json", str(parts.whole))) else None


def saved_buffers(parts: Parts) -> dict[str, torch.Tensor]:
    """Buffers that the original's folder had among its weights, under their names there."""
    came_from = originals_files(parts)
    if came_from is None or (came_from != parts.whole and not (came_from / BUFFERS).is_file()):
        return {}
    tensors = open_tensors(came_from if came_from == parts.whole else came_from / BUFFERS)
    return {n: t.rows(0, t.shape[0]).clone() for n, t in tensors.items() if COMPUTED.search(n)}


def copy_files(folder: Path, to: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
