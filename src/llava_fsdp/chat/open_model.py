"""Open the model that `chat` and `evaluate` use, from a model folder, a training run's folder or a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.config import AspectRatio, ConversionConfig, FolderFormat, KeptDType
from llava_fsdp.data.images.preprocess import preprocessor_fields
from llava_fsdp.export.prove.verify_logits import compute_dtype
from llava_fsdp.export.source_model import Opened, open_source
from llava_fsdp.export.write.formats import SourceModel
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.parts import read_json
from llava_fsdp.model.sources.llava_v1_5_config import is_original
from llava_fsdp.model.sources.pretrained import NEXT, ONEVISION
from llava_fsdp.runtime.errors import ConfigError, DamagedModel, ModelError
from llava_fsdp.runtime.files.provenance import NOTES, WHICH, read_notes
from llava_fsdp.runtime.files.run_dir import FOLDER, list_checkpoints, step_of
from llava_fsdp.runtime.files.unfinished import EXPORT
from llava_fsdp.runtime.text.log import log


def open_model(checkpoint: str, default_template: str, default_aspect: AspectRatio = AspectRatio.pad) -> Opened:
    """Find a trained model for chat or evaluation. Its weights are not loaded yet.

    Args:
        checkpoint: folder of a training run, of a checkpoint or of a model, or a model's name on the hub. If it is a
            run with an exported model, the export is opened.
        default_template: conversation template to use if the model's folder does not name one.
        default_aspect: how to fit images into the vision tower's square input if the model's folder does not say.

    Raises:
        ConfigError, ModelError, CheckpointError: the model cannot be found or read.
    """
    exported = Path(checkpoint) / EXPORT
    source = str(exported) if (exported / "config.json").is_file() else checkpoint
    if source != checkpoint:
        warn_of_later_checkpoint(Path(checkpoint))
    # a model is opened as `llava-fsdp export` opens its source
    cfg = ConversionConfig(
        source=source, to=None, accept=[], format=FolderFormat.hf, dtype=KeptDType.keep, base=None,
        language=None, vision=None, template=default_template, image_aspect_ratio=None, overwrite=False, verify=False,
    )  # fmt: skip
    try:
        opened = open_source(cfg)
    except DamagedModel:  # its message already says what to do
        raise
    except (ConfigError, ModelError) as error:
        message = str(error).replace("source=", "model.checkpoint=")
        # the message asks for a setting that only the export has
        if any(f"{key}=" in message for key in ("base", "vision", "language", "image_aspect_ratio")):
            message += f"; run llava-fsdp export source={checkpoint} to=FOLDER with it, and chat with FOLDER"
        raise type(error)(message) from error
    if isinstance(opened.source, SourceModel) and lacks_padding(opened.folder):
        return replace(opened, source=replace(opened.source, aspect=default_aspect))
    return opened


def warn_of_later_checkpoint(run: Path) -> None:
    """Log a warning if a run has a checkpoint newer than its exported model, as happens when the run was continued; not
    if the export is of the best step on purpose."""
    checkpoints = list_checkpoints(run / FOLDER)
    notes = read_notes(run / EXPORT)
    exported = notes.get("step")
    if (
        checkpoints
        and exported is not None
        and notes.get(WHICH) != "best"
        and (step_of(checkpoints[-1]) or 0) > exported
    ):
        log().warning("using the export of step %d; model.checkpoint=%s is later", exported, checkpoints[-1])


def lacks_padding(folder: Path) -> bool:
    """Return whether a model folder leaves open whether images are padded to squares, as many of LLaVA-1.5 in
    transformers' format do: `do_pad` is missing or false."""
    raw = config_of(folder, "config.json")
    # The original LLaVA's config.json says it, as does the file NOTES, which an export of this project has. LLaVA-NeXT
    # and LLaVA-OneVision cut images into tiles
    if not raw or is_original(raw) or raw.get("model_type") in (NEXT, ONEVISION) or (folder / NOTES).is_file():
        return False
    return not preprocessor_fields(folder).get("do_pad")


def config_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of the JSON file `name` in a model folder; empty if there is no such file."""
    return read_json(folder / name, str(folder)) if (folder / name).is_file() else {}


def choose_dtype(model: Architecture, device: torch.device) -> torch.dtype:
    """Choose the dtype in which a model computes its answers: on a GPU bf16, or fp16 if the GPU has no bf16; on a CPU
    fp32 if there is enough memory for it, else bf16."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return compute_dtype(model)
