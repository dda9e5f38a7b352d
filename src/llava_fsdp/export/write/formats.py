"""Write a model folder in one of three formats: a model for transformers, a model for the original LLaVA, or a
projector alone, with which the original LLaVA's second training stage begins.

Arguments of many functions here:
    source: description of the model to export, without its weights.
    weights: its weights, which are gathered from all ranks.
    dtype: dtype of the exported weights.
    export_folder: folder to write into, which gets its final name later.
    rows: number of rows of the exported embeddings (the size of the exported vocabulary).
"""

import copy
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    InternVLConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
)

from llava_fsdp.config import AspectRatio, Config, FolderFormat, ModelConfig, Part, Pixels, SpecialTokens
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.data.text.chat_template.jinja_template import is_own, open_template
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.data.text.tokens.detokenize import eos_ids
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer, read_optional
from llava_fsdp.export.card.history import history
from llava_fsdp.export.card.model_card import REMARKS, FolderKind, license_notes, write_card_and_notes
from llava_fsdp.export.write.folded_head import fields_of_folded_head, with_folded_head
from llava_fsdp.export.write.generation_file import find_ends, generation_fields, write_generation
from llava_fsdp.export.write.older_transformers import with_older_fields
from llava_fsdp.export.write.processor import (
    TokenIds,
    check_template,
    convert_tokenizer_to_original,
    has_tokenizer,
    preprocessor_fields,
    write_preprocessor,
    write_processor,
    write_template,
    write_tokenizer,
)
from llava_fsdp.export.write.remarks import log_remarks, remarks_on
from llava_fsdp.export.write.weights_writer import Weights, plan_renamed, with_buffers, write_projector, write_shards
from llava_fsdp.export.write.whole_folder import WholeSource, whole_source_of_run, write_whole_folder
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.load_weights import PROJECTOR_PREFIX
from llava_fsdp.model.parts import Parts, read_json
from llava_fsdp.model.sources.exportable import (
    KEPT,
    check_hf,
    check_original,
    check_projector,
    original_folder,
    why_not_original,
)
from llava_fsdp.model.sources.llava_v1_5_config import (
    TOWER,
    dtype_name,
    generation_config,
    known_tower,
    original_config,
    write_json,
)
from llava_fsdp.model.sources.pretrained import PACKAGE
from llava_fsdp.model.weights.conversions import plan_save
from llava_fsdp.model.weights.weight_names import original_name
from llava_fsdp.model.whole.whole import Whole
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.durable_files import make_empty
from llava_fsdp.runtime.files.provenance import read_notes
from llava_fsdp.runtime.text.log import log

KINDS = {
    FolderFormat.hf: FolderKind.llava_of_transformers,
    FolderFormat.llava: FolderKind.original,
    FolderFormat.projector: FolderKind.projector,
}
"""Kinds of the folders that `write_folder` writes for a LLaVA."""
KEPT_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


@dataclass(frozen=True)
class SourceModel:
    """Description of a model to export: its architecture, and settings such as conversation template and preprocessing.

    Attributes:
        model: model with this architecture. Its weights are not used, and may be sharded or on the meta device.
        template: name of the conversation template.
        aspect: how an image is fitted into the square input of the vision tower; with anyres and anyres_max it is cut
            into several square tiles.
        grid_pinpoints: sizes in pixels that an image may be fitted into before it is cut into tiles; empty: those of
            LLaVA-NeXT or LLaVA-OneVision.
        max_tiles: with anyres_max, an image with more vision features than this number of tiles has is shrunk to that
            number of features.
        pixels: how to decode and resize the images of questions: as in training, but `exact` after training with
            `fast`.
        special_tokens: how special tokens such as `</s>` in a text are tokenized.
        max_length: maximum number of tokens of a sample.
        language, vision: folders or hub names of the language model and of the vision tower; empty if not known.
        renamed_tower: name of the vision tower to write into the original LLaVA's config.json; None: the original's
            name.
        history: id of the training, stage and step that produced the model, and the parts that were trained.
        video_sampling: how frames of a video are selected, if the model takes videos.
        teaching: what was learnt of thoughts, which decides how the model is asked; None if it is not known.
    """

    model: Llava
    template: str
    aspect: AspectRatio
    grid_pinpoints: list[list[int]]
    max_tiles: int
    pixels: Pixels
    special_tokens: SpecialTokens
    max_length: int
    language: str
    vision: str
    renamed_tower: str | None
    history: dict[str, Any]
    video_sampling: VideoSampling = field(default_factory=VideoSampling)
    teaching: Teaching | None = None

    @property
    def sampling(self) -> VideoSampling | None:
        """How the frames of a video are selected for the model to export; None if it takes no videos."""
        return self.video_sampling if self.aspect is AspectRatio.anyres_max else None

    @property
    def image_tokens(self) -> ImageTokens:
        """Object that computes into how many square tiles an image is cut, and which tokens it gets."""
        tile = self.model.parts.image_size
        sizes = tuple(grid_sizes(self.grid_pinpoints, tile, self.aspect))
        merge = self.model.cfg.patch_merge
        return ImageTokens(self.aspect, tile, self.model.image_tokens, sizes, merge, self.max_tiles)

    @property
    def prompting(self) -> dict[str, str]:
        """The settings of training with which questions are asked."""
        return {"template": self.template, "image_aspect_ratio": self.aspect.value}

    @property
    def vocabulary(self) -> int:
        return self.model.parts.language.vocab_size


def source_of_run(model: nn.Module, cfg: Config, run: str, step: int) -> SourceModel | WholeSource:
    """Return a description of a trained model, which may be sharded, after `step` steps. `run`: id of the training."""
    if isinstance(model, Whole):  # also with FSDP, which gives the model a subclass of its class
        return whole_source_of_run(model, cfg, history(cfg, model.parts, run, step))
    assert isinstance(model, Llava)
    language, vision = names_of_parts(model.parts, cfg.model)
    return SourceModel(
        model=model,
        template=cfg.trained_template,
        aspect=cfg.data.trained_aspect,
        grid_pinpoints=cfg.data.grid_pinpoints,
        max_tiles=cfg.data.max_tiles,
        pixels=Pixels.llava_v1_5 if cfg.data.pixels is Pixels.llava_v1_5 else Pixels.exact,
        special_tokens=cfg.trained_special_tokens,
        teaching=Teaching.of_config(cfg.data),
        max_length=cfg.data.max_length,
        language=language,
        vision=vision,
        renamed_tower=None,
        history=history(cfg, model.parts, run, step),
        video_sampling=VideoSampling.of_limits(cfg.data.video_fps, cfg.data.video_frames),
    )


def names_of_parts(parts: Parts, cfg: ModelConfig) -> tuple[str, str]:
    """Return the folders or hub names of the language model and the vision tower of a training; empty for a part of a
    whole model (`model.checkpoint`) whose notes (`llava_fsdp.json`) do not name it."""
    if parts.whole is None:
        return cfg.language, cfg.vision
    notes, brings_tower = read_notes(parts.whole), parts.vision_folder.is_relative_to(parts.whole)
    return notes.get("language", ""), notes.get("vision", "") if brings_tower else cfg.vision


def write_folder(
    folder_format: FolderFormat,
    source: SourceModel | WholeSource,
    weights: Weights,
    export_folder: Path,
    notes: dict[str, Any],
) -> None:
    """Write a model, with its weights, configuration and tokenizer, into a folder. Collective; the first rank writes.
    `notes` are additional contents of the folder's `llava_fsdp.json`. `source`: a LLaVA, or (WholeSource) a model of
    another class of transformers.

    Raises:
        ModelError, ConfigError: the format does not support this model; the message says why.
        CheckpointError: the folder could not be written.
    """
    if isinstance(source, WholeSource):
        return write_whole_folder(folder_format, source, weights, export_folder, notes)
    failing = f"cannot write {export_folder}"
    rename = partial(original_name, projector_type=source.model.cfg.projector_type)
    remarks: list[str] = []
    on_first_rank(lambda: make_empty(export_folder), failing)
    if folder_format is FolderFormat.hf:
        written = on_first_rank(lambda: write_hf_except_weights(source, weights.common_dtype, export_folder), failing)
        remarks = written.remarks
        write_hf_weights(source, weights, export_folder, written.rows)
    elif folder_format is FolderFormat.llava:
        check_original(source.model)
        on_first_rank(lambda: write_configs(source, weights.common_dtype, export_folder), failing)
        on_first_rank(lambda: write_generation_of_original(source, export_folder), failing)
        on_first_rank(lambda: copy_or_convert_tokenizer(source, export_folder), failing)
        plan, tokens = partial(plan_renamed, weights.shapes, rename), source.vocabulary
        # the original's embeddings have no rows of padding behind those of the trained tokens
        write_shards(weights, export_folder, plan, source.model.with_vocabulary(), trained=tokens, rows=tokens)
    else:  # the projector alone
        on_first_rank(lambda: begin_projector(source, weights, export_folder), failing)
        write_projector(weights, export_folder, rename)
    told = {REMARKS: remarks} if remarks else {}
    on_first_rank(lambda: write_notes(source, export_folder, KINDS[folder_format], {**notes, **told}), failing)


def write_notes(
    source: SourceModel | WholeSource, export_folder: Path, kind: FolderKind, notes: dict[str, Any]
) -> None:
    """Write the model card of an exported folder of this kind, and `llava_fsdp.json`: settings that its other files
    lack, further settings (`notes`), and digests (sizes and hashes) of all other files, which must be complete."""
    if isinstance(source, WholeSource):  # its own files say how images and texts are prepared
        return write_card_and_notes(export_folder, kind, {**source.settings, **notes})
    notes = {
        **source.history,
        **notes,
        "template": source.template,
        "image_aspect_ratio": source.aspect.value,
        "grid_pinpoints": source.grid_pinpoints,
        "max_tiles": source.max_tiles,
        "pixels": source.pixels.value,
        "special_tokens": source.special_tokens.value,
        **({} if source.teaching is None else {"teaching": str(source.teaching)}),
        **license_notes(source.model.parts.language_folder),
        "max_length": source.max_length,
        "vocab_size": source.vocabulary,
        "image_start_end": source.model.cfg.image_start_end,
        "language": source.language,
        "vision": source.vision,
        **(
            {} if source.sampling is None else {f"video_{key}": value for key, value in asdict(source.sampling).items()}
        ),
    }
    write_card_and_notes(export_folder, kind, notes)


class WrittenExceptWeights(NamedTuple):
    """What the rest of an export for transformers must know of the files that `write_hf_except_weights` has written."""

    rows: int
    """Number of rows that the exported embeddings must have: the trained ones, and further ones if the export adds
    tokens to the tokenizer."""
    remarks: list[str]
    """What other programs do differently with the model."""


def write_hf_except_weights(source: SourceModel, dtype: torch.dtype, export_folder: Path) -> WrittenExceptWeights:
    """Write the files of a model folder for transformers into `export_folder`, except the weights and those that follow
    them: the model card and `llava_fsdp.json`."""
    model, parts = source.model, source.model.parts
    check_hf(model, source.aspect)
    has_video = source.aspect is AspectRatio.anyres_max  # the export is a LLaVA-OneVision, which takes videos
    ids, rows = write_tokenizer(
        parts.language_folder, export_folder, parts.language, source.template, model.cfg.image_start_end, has_video
    )
    config = write_hf_config(source, dtype, export_folder, ids, rows)
    write_processor(parts.vision_folder, export_folder, config, source.aspect is AspectRatio.pad, model.image_tokens)
    start_end, tokens = model.cfg.image_start_end, source.image_tokens
    check_template(parts.language_folder, export_folder, parts.language, source.template, start_end, tokens)
    ends, stop = find_ends(parts, source.template)
    write_generation(parts, export_folder, ends, ids.pad, rows)
    remarks = log_remarks(remarks_on(tokens, stop))
    llava_folder = original_folder(parts)
    if llava_folder is not None:  # the original LLaVA's files, for a later export in its format
        (export_folder / KEPT).mkdir()
        copy_files(llava_folder, export_folder / KEPT, (*KEPT_FILES, *TOKENIZER_FILES))
    return WrittenExceptWeights(rows, remarks)


def write_hf_config(
    source: SourceModel, dtype: torch.dtype, export_folder: Path, ids: TokenIds, rows: int
) -> LlavaConfig | LlavaNextConfig | LlavaOnevisionConfig | InternVLConfig:
    """Write `config.json` of a model for transformers, and return the configuration. `ids`: token ids of the special
    tokens that the export adds. `rows`: number of rows of the embeddings."""
    config = hf_config(source, dtype, rows)
    config.image_token_id, config.pad_token_id = ids.image, ids.pad
    if ids.video is not None:
        config.video_token_id = ids.video
    config.save_pretrained(export_folder)
    path = export_folder / "config.json"
    fields = with_older_fields(read_json(path, str(path)), config)  # also those that transformers 4 reads
    write_json(path, fields | {"image_aspect_ratio": aspect_of_original(source)})  # SGLang reads it from this file
    return config


def write_hf_weights(source: SourceModel, weights: Weights, export_folder: Path, rows: int) -> None:
    """Write the weights of a model folder for transformers, with buffers, and with a factor of the logits multiplied
    into the output layer. Collective; the first rank writes. `export_folder`: the folder. `rows`: number of rows of the
    embeddings to write, which may be more than those that are trained."""
    plan = partial(plan_save, hf_config(source, weights.common_dtype, rows))
    weights = with_buffers(with_folded_head(weights, source.model), source.model)
    write_shards(weights, export_folder, plan, source.model.with_vocabulary(), source.vocabulary, rows)


def hf_config(
    source: SourceModel, dtype: torch.dtype, rows: int
) -> LlavaConfig | LlavaNextConfig | LlavaOnevisionConfig | InternVLConfig:
    """Return transformers' configuration of a model to export, whose embeddings have `rows` rows, without the ids of
    its image and padding tokens."""
    model, parts = source.model, source.model.parts
    text = {**parts.language.to_dict(), **fields_of_folded_head(parts), "vocab_size": rows, "use_cache": True}
    fields: dict[str, Any] = {
        "vision_config": copy.deepcopy(parts.vision),  # a copy, as LlavaConfig changes it
        "text_config": type(parts.language).from_dict(text),
        "vision_feature_layer": model.cfg.select_layer,
        "vision_feature_select_strategy": "default" if model.probe.drops_cls else "full",
        "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
        "dtype": dtype_name(dtype),
    }
    grids = [[height, width] for width, height in source.image_tokens.sizes]
    if source.aspect is AspectRatio.anyres_max:
        name = "LlavaOnevisionForConditionalGeneration"
        limit = f"anyres_max_{source.max_tiles}"
        return LlavaOnevisionConfig(
            **fields, image_grid_pinpoints=grids, vision_aspect_ratio=limit, architectures=[name]
        )
    fields["image_seq_length"] = model.image_tokens
    if model.cfg.shuffle_factor > 1:  # the projector joins squares of patches, as InternVL's does
        if model.cfg.select_layer == -1 and not parts.vision.use_mean_pooling:
            fields["vision_feature_layer"] = model.probe.layers  # InternVL applies the tower's last norm to -1
        return InternVLConfig(
            **fields,
            downsample_ratio=1 / model.cfg.shuffle_factor,
            architectures=["InternVLForConditionalGeneration"],
        )
    if source.aspect is AspectRatio.anyres:
        return LlavaNextConfig(
            **fields, image_grid_pinpoints=grids, architectures=["LlavaNextForConditionalGeneration"]
        )
    return LlavaConfig(**fields, architectures=["LlavaForConditionalGeneration"])


def write_configs(source: SourceModel, dtype: torch.dtype, export_folder: Path) -> None:
    """Write `config.json` for the original LLaVA, and a subfolder with the vision tower's configuration files.

    Raises:
        ModelError, ConfigError: the original LLaVA does not support this model, or the vision tower has no known name.
    """
    parts = source.model.parts
    write_json(export_folder / "config.json", config_of_original(source, dtype))
    (export_folder / TOWER).mkdir()
    copy.deepcopy(parts.vision).save_pretrained(export_folder / TOWER)
    if preprocessor_fields(parts.vision_folder):
        write_preprocessor(parts.vision_folder, export_folder / TOWER, pads=False)


def write_generation_of_original(source: SourceModel, export_folder: Path) -> None:
    """Write `generation_config.json` for the original LLaVA into the export `export_folder`, with the tokens that end
    an answer. If the model came from a folder of the original LLaVA whose file has these tokens, that content is
    kept."""
    parts, llava_folder = source.model.parts, original_folder(source.model.parts)
    ends, _ = find_ends(parts, source.template, [] if llava_folder is None else [llava_folder])
    folder = parts.language_folder
    if llava_folder is not None and (llava_folder / "generation_config.json").is_file():
        folder = llava_folder
    given = read_optional(folder / "generation_config.json")
    if folder != llava_folder or sorted(eos_ids(given, folder / "generation_config.json")) != ends:
        fields = generation_fields(folder, ends, parts.language.bos_token_id, parts.language.pad_token_id)
        given = {**fields, "transformers_version": "4.37.2"}
    write_json(export_folder / "generation_config.json", generation_config(given))


def copy_or_convert_tokenizer(source: SourceModel, export_folder: Path) -> None:
    """Write a tokenizer for the original LLaVA: a copy of the one in the original LLaVA's folder from which the model
    (`source`) was loaded, or else the language model's, converted. The language model's own chat template is written
    too, if the model was trained with it. `export_folder`: the folder of the export while it is written."""
    parts, llava_folder = source.model.parts, original_folder(source.model.parts)
    if llava_folder is not None and has_tokenizer(llava_folder):
        copy_files(llava_folder, export_folder, TOKENIZER_FILES)
    else:
        convert_tokenizer_to_original(parts.language_folder, export_folder, source.vocabulary, source.max_length)
    if is_own(source.template):  # llava_fsdp's own programs read the template from this file
        tokenizer = open_tokenizer(parts.language_folder, source.vocabulary)
        template = open_template(source.template, parts.language_folder, tokenizer)
        write_template(export_folder, template, source.model.cfg.image_start_end)


def begin_projector(source: SourceModel, weights: Weights, export_folder: Path) -> None:
    """Write `config.json` into the folder of a projector alone, if the original LLaVA supports the model; llava_fsdp
    itself needs no such file. Raises ConfigError if the projector has no weights, or the tower's name is unknown."""
    check_projector(source.model)
    if why_not_original(source.model) is not None:
        return
    stage_1 = {"architectures": ["LlamaForCausalLM"], "tune_mm_mlp_adapter": True}
    dtypes = {n: d for n, d in weights.dtypes.items() if n.startswith(PROJECTOR_PREFIX)}
    config = config_of_original(source, reduce(torch.promote_types, dtypes.values()))
    write_json(export_folder / "config.json", config | stage_1)


def config_of_original(source: SourceModel, dtype: torch.dtype) -> dict[str, Any]:
    """Return the contents of config.json for the original LLaVA. If the model was loaded from a folder with such a
    file, its values are kept, except for settings in which the model now differs from it."""
    model, parts = source.model, source.model.parts
    llava_folder = original_folder(parts)
    if llava_folder is not None:
        config = read_json(llava_folder / "config.json", str(llava_folder))
    else:
        tower = tower_name(source)
        config = original_config(
            parts.language, parts.vision.hidden_size, model.cfg, tower, source.max_length, model.probe.drops_cls
        )
        config["tune_mm_mlp_adapter"] = False
    # key -> (this model's value, what the original LLaVA takes if the file lacks the key)
    ours = {
        "mm_patch_merge_type": (model.cfg.patch_merge.value, "flat"),
        "mm_use_im_start_end": (model.cfg.image_start_end, False),
        "tokenizer_model_max_length": (source.max_length, None),
        "mm_vision_tower": (source.renamed_tower or config.get("mm_vision_tower"), None),
    }
    for key, (value, default) in ours.items():
        if config.get(key, default) != value:
            config[key] = value
    # an item of `train` is a part of the model, such as `vision`, or some of its blocks (`vision:20`)
    if Part.vision.value in (text.partition(":")[0] for text in source.history.get("train", [])):
        # without this the original LLaVA replaces the trained vision tower by the pretrained one
        config["unfreeze_mm_vision_tower"] = True
    if source.image_tokens.needs_size(1):  # images are cut into tiles
        config["image_grid_pinpoints"] = [list(size) for size in source.image_tokens.sizes]
    return {**config, "image_aspect_ratio": aspect_of_original(source), "torch_dtype": dtype_name(dtype)}


def aspect_of_original(source: SourceModel) -> str:
    """Return how images are fitted into the vision tower's square input, as the original LLaVA's config.json says it;
    with anyres_max as LLaVA-NeXT's repository says it for LLaVA-OneVision."""
    is_limited = source.aspect is AspectRatio.anyres_max
    return f"anyres_max_{source.max_tiles}" if is_limited else source.aspect.value


def tower_name(source: SourceModel) -> str:
    """Return the vision tower's hub name or folder for the original LLaVA; raise ConfigError if it is unknown."""
    name = source.vision or known_tower(source.model.parts.vision)
    if not name:
        raise ConfigError("the original's folders name their vision tower, and the source does not: give vision=NAME")
    if name.startswith(PACKAGE):
        log().warning("the vision tower is %s, which this package can load, but not the original", name)
    return name


def copy_files(folder: Path, to: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
