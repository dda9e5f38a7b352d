"""Convert a model into a folder for other programs: `python -m llava_fsdp.export source=DIR to=DIR format=llava`.

The source is the output folder of a training, one of its checkpoints, a LoRA adapter folder, or a model folder (of
llava_fsdp, transformers or the original LLaVA). The result is a model folder for transformers or for the original
LLaVA, the projector file of the original LLaVA, or GGUF files for llama.cpp.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.checkpoint.retention import best_checkpoint
from llava_fsdp.config import AUTO, ConversionConfig, DType, FolderFormat, KeptDType, Which
from llava_fsdp.data.text.chat_template.jinja_template import is_own
from llava_fsdp.data.text.templates import template
from llava_fsdp.export.card.model_card import REMARKS, FolderKind, write_card_and_notes
from llava_fsdp.export.check_folders import accept
from llava_fsdp.export.gguf.gguf_folder import (
    MODEL,
    TRANSFORMERS,
    check_for_llama_cpp,
    prove_gguf_folder,
    write_gguf_folder,
)
from llava_fsdp.export.peft_folder import prove_adapters, with_rounded_base, write_adapters
from llava_fsdp.export.prove.prove_reading import prove_reading
from llava_fsdp.export.prove.verify_logits import Adapted, Rounded, prove, prove_merge
from llava_fsdp.export.prove.whole_class import prove_class
from llava_fsdp.export.push import check_address, open_hub, push_folder
from llava_fsdp.export.source_model import Opened, open_source
from llava_fsdp.export.write.adapter_folder import whole_rows
from llava_fsdp.export.write.formats import SourceModel, write_folder, write_notes
from llava_fsdp.export.write.weights_writer import Weights, publish_folder
from llava_fsdp.export.write.whole_folder import WholeSource
from llava_fsdp.model.adapters.lora_files import ADAPTER_CONFIG
from llava_fsdp.model.sources.llava_v1_5_config import write_json
from llava_fsdp.model.sources.pretrained import PACKAGE
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, ModelError
from llava_fsdp.runtime.files.durable_files import make_empty
from llava_fsdp.runtime.files.provenance import NOTES, WHICH, read_notes
from llava_fsdp.runtime.files.unfinished import (
    EXPORT,
    earlier_export,
    has_export,
    is_run,
    refuse_staged,
    run_of,
    why_no_export,
)
from llava_fsdp.runtime.text.humanize import readable
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch_loading

NOT_VERIFIED = "not verified"
UNCONVERTED: dict[str, Any] = {
    "format": FolderFormat.hf, "dtype": KeptDType.keep, "template": AUTO, "which": Which.last, "gguf_clip": False,
    "base": None, "language": None, "vision": None, "image_aspect_ratio": None,
}  # fmt: skip
"""Keys that ask for a conversion, and their values with which a folder can be pushed as it is."""


def export(cfg: ConversionConfig) -> Path:
    """Convert the model `cfg.source` into the folder `cfg.to` (see `convert`), push that folder to the Hugging Face hub
    if `cfg.push` names a place there, and return it.

    Nothing is converted if `cfg.accept` names files: new digests of these files in the folder `cfg.source` are
    recorded. Nor if `cfg.to` is None and `cfg.push` is set: `cfg.source`, or a run's export, is pushed as it is.

    Raises:
        ConfigError: a setting is wrong, `cfg.to` exists and may not be replaced, or the hub refuses this user.
        ModelError: the source cannot be read, the format does not support the model, or the logits differ; or the
            folder to push was changed, or holds a secret.
        CheckpointError: a checkpoint cannot be read, or `cfg.to` cannot be written.
        HubError: the hub cannot be reached.
    """
    if cfg.accept:
        if cfg.to is not None or cfg.push is not None:
            raise ConfigError(f"accept only writes digests into source={cfg.source}; leave out accept, or to and push")
        accept(Path(cfg.source), cfg.accept)
        return Path(cfg.source)
    if cfg.push is None:
        if cfg.to is None:
            raise ConfigError("to is not set; give the folder to write on the command line: to=FOLDER")
        return convert(cfg, cfg.to)
    place = check_address(cfg.push)
    made = pushable(cfg) if cfg.to is None else None
    hub = open_hub(place)  # before the conversion, which may take minutes
    folder = convert(cfg, cfg.to) if cfg.to is not None else made
    assert folder is not None
    push_folder(folder, place, hub, cfg.push_private, run_of(Path(cfg.source)))
    return folder


def pushable(cfg: ConversionConfig) -> Path:
    """Return the folder that is pushed if nothing is converted: `cfg.source`, or the `export` in the folder of a run.

    Raises:
        ConfigError: a key asks for a conversion, or llava_fsdp did not write the folder.
        CheckpointError: the run has no export.
        ModelError: the folder is one whose writing did not end.
    """
    source = Path(cfg.source)
    refuse_staged(cfg.source, "source")
    for key, unchanged in UNCONVERTED.items():
        if getattr(cfg, key) != unchanged:
            raise ConfigError(f"{key} asks for a conversion: give the folder to write with to=FOLDER")
    if not is_run(source):
        folder = source
    elif has_export(source):
        folder = source / EXPORT
        if (warning := earlier_export(source)) is not None:
            log().warning("%s", warning)
    else:
        raise CheckpointError(f"source={source} {why_no_export(source)}; to push another form of it give to=FOLDER")
    if not (folder / NOTES).is_file():
        raise ConfigError(
            f"push: {folder} has no {NOTES}, so llava_fsdp did not write it; give to=FOLDER too, to convert the model "
            "first"
        )
    return folder


@torch.no_grad()
def convert(cfg: ConversionConfig, to: str) -> Path:
    """Convert the model `cfg.source` into the folder `to`, and return it. It gets its final name after the logits of
    the written model were compared with the source's (unless `cfg.verify` is false). Raises the errors of `export`."""
    if cfg.template != AUTO and not is_own(cfg.template):
        template(cfg.template)  # raises the error for a template that does not exist
    final = Path(to).resolve()
    staged = final.with_name(final.name + ".tmp")
    check_target(final, staged, cfg)
    opened = open_source(with_best(cfg))
    # adapters that are written beside their base; others are merged into it
    adapters = opened.adapted if cfg.format is FolderFormat.peft else None
    if cfg.format is FolderFormat.peft and adapters is None:
        raise ConfigError(f"format=peft writes LoRA adapters beside their base, and source={cfg.source} has none")
    if adapters is not None and isinstance(opened.source, WholeSource):
        raise ConfigError(
            f"format=peft: peft puts the adapters of source={cfg.source} on their base model as they are; leave it out "
            "to merge them"
        )
    # the weights of the folders that the source names, before adapters are merged, are compared with what transformers
    # reads from these folders
    if opened.sources_without_adapters is not None and cfg.verify and not isinstance(opened.source, WholeSource):
        prove_reading(opened.source.model, opened.sources_without_adapters, opened.source.image_tokens)
    if opened.adapted is not None and adapters is None and cfg.verify:
        prove_merge(opened.adapted)
    sources = opened.sources if adapters is None else adapters.base
    content = Content(opened.source, sources, {name: tensor.dtype for name, tensor in sources.items()}, adapters)
    if cfg.format is FolderFormat.gguf:
        check_for_llama_cpp(opened.source, cfg.gguf_clip)
        checked = write_and_prove_gguf(content, staged, final.name, cfg)
    else:
        checked = write_and_prove(content, staged, cfg)
    publish_folder(staged, final)
    report(opened, final, cfg.format, checked)
    return final


@dataclass(frozen=True)
class Content:
    """What an export writes.

    Attributes:
        sources: stored values of the parameters to write, by name; `dtypes` are the dtypes to write them in.
        adapters_beside_base: adapters to write into a subfolder; None without adapters, or if they are merged in
            `sources`.
    """

    source: SourceModel | WholeSource
    sources: dict[str, Stored]
    dtypes: dict[str, torch.dtype]
    adapters_beside_base: Adapted | None


def write_and_prove(content: Content, staged: Path, cfg: ConversionConfig) -> str:
    """Write an export into the folder `staged`, in the dtype that `cfg` asks for, and compare it with its source,
    unless `cfg.verify` is false. Return in words what was compared."""
    if cfg.dtype is not KeptDType.keep:
        content = replace(content, dtypes=dict.fromkeys(content.dtypes, DTYPES[DType(cfg.dtype.value)]))
    write(content, staged, cfg.format, cfg.dtype, cfg.which)
    if not cfg.verify:
        return NOT_VERIFIED
    with naming_unfinished_folder(staged):
        prove_written(content, staged, cfg.format)
    return "its logits are the source's"


def write_and_prove_gguf(content: Content, staged: Path, name: str, cfg: ConversionConfig) -> str:
    """Write GGUF files into the folder `staged`: first a folder for transformers in it, with weights of the source's
    dtypes, and then the files of that. Compare each with what it was made of, unless `cfg.verify` is false. Return in
    words what was compared. If the files cannot be written, nothing is left. `name`: the model's, which llama.cpp
    shows."""
    folder = staged / TRANSFORMERS
    on_first_rank(lambda: make_empty(staged), f"cannot write {staged}")
    try:
        write_json(staged / NOTES, {})  # by which the next export sees that it may replace the folder
        write(content, folder, FolderFormat.hf, KeptDType.keep)
        if cfg.verify:
            prove_written(content, folder, FolderFormat.hf)
        notes = on_first_rank(lambda: write_gguf_folder(folder, staged, cfg.dtype, name), f"cannot write {staged}")
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    checked = NOT_VERIFIED
    if cfg.verify:
        with naming_unfinished_folder(staged):
            checked = prove_gguf_folder(folder, staged)
    shutil.rmtree(folder)
    write_card_and_notes(staged, FolderKind.gguf, notes)
    return checked


@contextmanager
def naming_unfinished_folder(staged: Path) -> Iterator[None]:
    """Context manager that adds to an export check's ModelError which folder was not made, and where its files are."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{error}\n{staged.with_suffix('')} was not made; {staged} has what was written") from error


def with_best(cfg: ConversionConfig) -> ConversionConfig:
    """Return the configuration with the best checkpoint of the run as its source, if `which=best`. Raise
    CheckpointError if the run keeps none."""
    return replace(cfg, source=str(best_checkpoint(Path(cfg.source)))) if cfg.which is Which.best else cfg


def prove_written(content: Content, staged: Path, form: FolderFormat) -> None:
    """Load the folder `staged` that `write` has written, and compare its logits with those of its source (for a whole
    model of transformers, its weights). LoRA adapters (`content.adapters_beside_base`) are in a subfolder of a base in
    the format `hf`, and are proved as well. Raise ModelError if something differs."""
    source, adapters = content.source, content.adapters_beside_base
    if isinstance(source, WholeSource):
        rounded = {name: Rounded(stored, content.dtypes[name]) for name, stored in content.sources.items()}
        return prove_class(staged, rounded)
    form = form if adapters is None else FolderFormat.hf
    prove(form, source.model, content.sources, content.dtypes, staged, source.image_tokens)
    if adapters is not None:
        prove_adapters(staged, source.model, with_rounded_base(adapters, content.dtypes), source.image_tokens)


def write(content: Content, staged: Path, form: FolderFormat, dtype: KeptDType, which: Which = Which.last) -> None:
    """Write all files of an export into the folder `staged`: a whole model or, if `content.adapters_beside_base` has
    LoRA adapters, these in a subfolder and their base model, always for transformers. If this fails, nothing is left.
    `dtype`: what the user asked for, which the folder's notes record."""
    weights = Weights(
        shapes={name: tuple(tensor.shape) for name, tensor in content.sources.items()},
        dtypes=content.dtypes,
        read=lambda name: whole_rows(content.sources[name]),
        watch=watch_loading(is_first_rank=True),
    )
    adapters, notes = content.adapters_beside_base, {"dtype": dtype.value}
    if which is not Which.last:
        notes[WHICH] = which.value
    try:
        write_folder(form if adapters is None else FolderFormat.hf, content.source, weights, staged, notes)
        if adapters is not None:
            write_adapters(staged, adapters)
            remarks = {key: value for key, value in read_notes(staged).items() if key == REMARKS}
            # again, with digests of the adapters, and with the remarks that write_folder has noted
            write_notes(content.source, staged, FolderKind.with_adapters, {**notes, **remarks})
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def check_target(final: Path, staged: Path, cfg: ConversionConfig) -> None:
    """Raise ConfigError unless the target folder of an export is free, or is a model folder that may be replaced
    (`overwrite=true`) and contains none of the inputs."""
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
    known = ("config.json", ADAPTER_CONFIG, "mm_projector.safetensors")
    is_gguf = (final / MODEL).is_file() and (final / NOTES).is_file()
    if not is_gguf and not any((final / name).is_file() for name in known):
        raise ConfigError(f"to={final} is not a model folder, so overwrite=true keeps it; give another folder")


def report(opened: Opened, final: Path, form: FolderFormat, checked: str) -> None:
    """Log which folder was written, its size, who reads it, and what was compared (`checked`)."""
    kinds = {
        FolderFormat.hf: "transformers",
        FolderFormat.llava: "the original LLaVA",
        FolderFormat.peft: "transformers with peft, and vLLM",
        FolderFormat.projector: "stage 2 of LLaVA",
        FolderFormat.gguf: "llama.cpp and Ollama",
    }
    size = readable(sum(path.stat().st_size for path in final.rglob("*")))
    log().info("%s (%s), for %s, from %s; %s", final, size, kinds[form], opened.folder, checked)
