"""Convert a model into a folder for other programs: `python -m llava_fsdp.export source=DIR to=DIR format=llava`.

The source is the output folder of a training, one of its checkpoints, a LoRA adapter folder, or a model folder (of
llava_fsdp, transformers or the original LLaVA). The result is a model folder for transformers or for the original
LLaVA, or the projector file of the original LLaVA.
"""

import shutil
from pathlib import Path

import torch

from llava_fsdp.config import AUTO, ConversionConfig, DType, FolderFormat, KeptDType
from llava_fsdp.data.text.jinja_template import is_own
from llava_fsdp.data.text.templates import template
from llava_fsdp.distributed.precision import DTYPES
from llava_fsdp.export.adapter_folder import whole_rows
from llava_fsdp.export.check_folders import accept
from llava_fsdp.export.formats import write_folder
from llava_fsdp.export.source_model import Opened, open_source
from llava_fsdp.export.verify_logits import prove, prove_merge
from llava_fsdp.export.weights_writer import Weights, publish_folder
from llava_fsdp.model.lora_files import ADAPTER_CONFIG
from llava_fsdp.model.pretrained import PACKAGE
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.humanize import readable
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.progress import watch_loading
from llava_fsdp.runtime.provenance import NOTES


@torch.no_grad()
def export(cfg: ConversionConfig) -> Path:
    """Convert the model `cfg.source` into the folder `cfg.to`, and return that folder. The folder gets its final name
    after the logits of the written model were compared with those of the source (unless `cfg.verify` is false).

    If `cfg.accept` names files, nothing is converted: new digests (sizes and hashes) of these files in the folder
    `cfg.source` are recorded, and that folder is returned.

    Raises:
        ConfigError: a setting is wrong, or `cfg.to` exists and may not be replaced.
        ModelError: the source cannot be read, the format does not support the model, or the logits differ.
        CheckpointError: a checkpoint cannot be read, or `cfg.to` cannot be written.
    """
    if cfg.accept:
        if cfg.to is not None:
            raise ConfigError(f"accept only writes digests into source={cfg.source}; leave out accept or to={cfg.to}")
        accept(Path(cfg.source), cfg.accept)
        return Path(cfg.source)
    if cfg.to is None:
        raise ConfigError("to is not set; give the folder to write on the command line: to=FOLDER")
    if cfg.template != AUTO and not is_own(cfg.template):
        template(cfg.template)
    final = Path(cfg.to).resolve()
    staged = final.with_name(final.name + ".tmp")
    check_target(final, staged, cfg)
    opened = open_source(cfg)
    if opened.adapted is not None and cfg.verify:
        prove_merge(opened.adapted)
    dtypes = {name: tensor.dtype for name, tensor in opened.sources.items()}
    if cfg.dtype is not KeptDType.keep:
        dtypes = dict.fromkeys(dtypes, DTYPES[DType(cfg.dtype.value)])
    weights = Weights(
        shapes={name: tuple(tensor.shape) for name, tensor in opened.sources.items()},
        dtypes=dtypes,
        read=lambda name: whole_rows(opened.sources[name]),
        watch=watch_loading(is_first_rank=True),
    )
    try:
        write_folder(cfg.format, opened.source, weights, staged, {"dtype": cfg.dtype.value})
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    if cfg.verify:
        try:
            source = opened.source
            prove(cfg.format, source.model, opened.sources, dtypes, staged, source.image_tokens)
        except ModelError as error:
            raise ModelError(f"{error}\n{final} was not made; {staged} has what was written") from error
    publish_folder(staged, final)
    report(opened, final, cfg)
    return final


def check_target(final: Path, staged: Path, cfg: ConversionConfig) -> None:
    """Raise ConfigError unless the target folder of an export is free, or is a model folder that may be replaced
    (`overwrite=true`) and contains none of the inputs.

    Args:
        final: the target folder `cfg.to`.
        staged: folder that is written first and then renamed to `final`.
        cfg: settings of the command `export`.
    """
    inputs = {"source": cfg.source, "base": cfg.base, "language": cfg.language, "vision": cfg.vision}
    for key, name in inputs.items():
        read = Path(name).resolve() if name and not name.startswith(PACKAGE) else None
        for folder in (final, staged):
            if read is not None and read.is_relative_to(folder):
                raise ConfigError(f"to={cfg.to} would replace {folder}, which holds {key}={name}; give another folder")
    if staged.exists() and not (staged / NOTES).is_file():
        raise ConfigError(
            f"to={cfg.to} is written as {staged} first, which exists and is not from an export; move it away"
        )
    if final.exists() and not final.is_dir():
        raise ConfigError(f"to={final} is a file; give a folder")
    if not final.is_dir() or not any(final.iterdir()):
        return
    if not cfg.overwrite:
        raise ConfigError(f"to={final} is not empty; give another folder, or replace it with overwrite=true")
    if not any((final / name).is_file() for name in ("config.json", ADAPTER_CONFIG, "mm_projector.safetensors")):
        raise ConfigError(f"to={final} is not a model folder, so overwrite=true keeps it; give another folder")


def report(opened: Opened, final: Path, cfg: ConversionConfig) -> None:
    checked = "its logits are the source's" if cfg.verify else "not verified"
    kinds = {FolderFormat.hf: "transformers", FolderFormat.llava: "the original LLaVA"}
    kind = kinds.get(cfg.format, "stage 2 of LLaVA")
    size = readable(sum(path.stat().st_size for path in final.rglob("*")))
    log().info("%s (%s), for %s, from %s; %s", final, size, kind, opened.folder, checked)
