"""A model to be asked, whatever folder it is in."""

from pathlib import Path

import torch

from llava_fsdp.config import ConversionConfig, FolderFormat, KeptDType
from llava_fsdp.data.images.preprocess import preprocessor_fields
from llava_fsdp.export.source_model import Opened, open_source
from llava_fsdp.export.verify_logits import bytes_in_fp32, fits_in_fp32
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.llava_v1_5_config import is_original
from llava_fsdp.model.pretrained import EXPORT, read_json
from llava_fsdp.runtime.errors import ConfigError, DamagedModel, ModelError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.provenance import NOTES, read_notes
from llava_fsdp.runtime.run_dir import FOLDER, list_checkpoints, step_of


def open_asked(checkpoint: str, form: str) -> Opened:
    """What `export` would open, of a run its export first: that is read without looking through checkpoints.

    Raises:
        ConfigError, ModelError, CheckpointError: as `open_source`, in terms of `model.checkpoint`.
    """
    exported = Path(checkpoint) / EXPORT
    source = str(exported) if (exported / "config.json").is_file() else checkpoint
    if source != checkpoint:
        warn_of_later(Path(checkpoint))
    cfg = ConversionConfig(
        source=source, to=None, accept=[], format=FolderFormat.hf, dtype=KeptDType.keep, merge=True, base=None,
        language=None, vision=None, template=form, image_aspect_ratio=None, overwrite=False, verify=False,
    )  # fmt: skip
    try:
        return open_source(cfg)
    except DamagedModel:  # it says what to do, in words of `export`
        raise
    except (ConfigError, ModelError) as error:
        said = str(error).replace("source=", "model.checkpoint=")
        cures = ("base=", "vision=", "language=", "image_aspect_ratio=")
        if any(f"{word} {cure}" in said for cure in cures for word in ("give", "with")):
            said += f"; that is for python -m llava_fsdp.export source={checkpoint} to=FOLDER: then ask FOLDER"
        raise type(error)(said) from error


def warn_of_later(run: Path) -> None:
    """A run that goes on has checkpoints that are newer than its export."""
    kept = list_checkpoints(run / FOLDER)
    exported = read_notes(run / EXPORT).get("step")
    newest = step_of(kept[-1]) if kept else None
    if exported is not None and newest is not None and newest > exported:
        log().warning(
            "asking the export of %s, of step %d; a later one is of step %d: model.checkpoint=%s asks that",
            run, exported, newest, kept[-1],
        )  # fmt: skip


def says_no_aspect(folder: Path) -> bool:
    """Whether a folder leaves open if pictures are padded: transformers' own often do, whatever was trained."""
    raw = read_json(folder / "config.json", str(folder)) if (folder / "config.json").is_file() else {}
    return (
        bool(raw)
        and not is_original(raw)
        and not (folder / NOTES).is_file()
        and not (preprocessor_fields(folder).get("do_pad"))
    )


def wanted_dtype(model: Llava, device: torch.device) -> torch.dtype:
    """bf16 on a GPU, or fp16 where that has none; fp32 on a CPU, few of which are faster with less, where it fits."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if fits_in_fp32(model):
        return torch.float32
    log().info("computing in bf16: fp32 would take %.0f GiB", bytes_in_fp32(model) / 2**30)
    return torch.bfloat16
