"""Check a training's configuration, its paths and its model, before any record or the values of any weight are read.

`train` raises the errors that these checks find, and `doctor` reports them. `plan`, `prepare` and `train dry_run=` only
log the same errors as warnings, because these commands also work if a training could not start.
"""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from llava_fsdp.config import AUTO, Attention, Config, DType, LinearKind, Parity, Source
from llava_fsdp.config.paths import PACKAGED_OR_HUB, check_paths, exists
from llava_fsdp.data.index.record_store import sources_of
from llava_fsdp.data.loader import open_processor_encoding
from llava_fsdp.data.text.chat_template.jinja_template import OWN, is_whole, own_name, usable_name
from llava_fsdp.export.prove.check_parts import check_parts
from llava_fsdp.export.prove.rehearsal import rehearse
from llava_fsdp.export.write.folded_head import folding_rounds
from llava_fsdp.export.write.formats import source_of_run
from llava_fsdp.export.write.generation_file import warning_of_unnamed_ends
from llava_fsdp.export.write.whole_folder import WholeSource
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.llava.own_parts import NONE, OwnParts
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.pretrained import NoProjector, UnfinishedRun, find_parts, find_projector
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.parallel.precision.fast_dtype import has_bf16, settle_precision
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.plan.search.auto import settle_packing
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError, ModelError
from llava_fsdp.runtime.files.provenance import read_notes
from llava_fsdp.runtime.files.unfinished import earlier_export, refuse_staged, run_of
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.checkpoints.resume import check_settings, continues, without_saved_sources
from llava_fsdp.train.events.reporting.trackers import check_installed
from llava_fsdp.train.optimizer import LearningRate
from llava_fsdp.train.setup.build_model import build_model, shape_of

C = TypeVar("C", bound=Config)
VICUNA, STAGE_1 = "v1", "plain"
"""Conversation templates of Vicuna and of stage 1 (`stage=pretrain`)."""
PROMPTS = {"qwen": "chatml", "mistral": "mistral_instruct", "mpt": "mpt"}
"""Beginning of a `model_type` -> conversation template with which its instruct models were trained."""
FEW_STEPS = 20
"""Number of steps below which a training hardly changes a model."""


def preflight(cfg: Config, device: torch.device) -> list[str]:
    """Make all checks that a training makes before it reads records or weights. Return its warnings. Raises the error
    with which a training would end if a check fails."""
    check_run(cfg)
    cfg, _ = settle_precision(cfg, [has_bf16(device)], device.type)
    cfg, _ = settle_packing(cfg, find_parts_of_run(cfg))
    model, projector = open_model(cfg, device)
    cfg = with_template(cfg, model.parts)
    warnings = check_parts_and_export(cfg, model)
    if model.processor_folder is not None:
        open_processor_encoding(cfg, None, model.processor_folder, shape_of(model))
    find_sources(cfg, model, projector)
    if cfg.data.source is not Source.shapes:
        sources_of(cfg.data, "data")
    return warnings


def warn_if_refused(cfg: Config, is_for_this_machine: bool = True) -> str:
    """Log a warning with the training's error if a training would refuse the configuration. If a part of the model
    would have to be downloaded, only paths are checked.

    Args:
        is_for_this_machine: whether the training would run here; if not, what depends on the device is not checked.

    Returns:
        A remark to log after the command's own results if only the projector is missing, because `stage=pretrain` has
            not trained it yet; else empty. No warning: all stages may be planned before the first is trained.

    Raises:
        ConfigError: a path that the configuration names does not exist.
    """
    check_paths(cfg)
    if not is_for_this_machine:
        precision = replace(cfg.precision, linear=LinearKind.same).settled(DType.bf16)
        cfg = replace(cfg, attention=Attention.auto, compile=AUTO, precision=precision)
    names = [cfg.model.checkpoint] if cfg.model.checkpoint else [cfg.model.language, cfg.model.vision]
    if any(PACKAGED_OR_HUB.fullmatch(name) and not name.startswith("package:") and not exists(name) for name in names):
        return ""
    try:
        for warning in preflight(cfg, torch.device("cpu")):
            log().warning("%s", warning)
    except UnfinishedRun as error:
        log().warning("train would refuse this configuration until that run has an export: %s", error)
    except NoProjector:
        return (
            f"model.projector={cfg.model.projector}: there is no such projector yet, which stage=pretrain trains. Only "
            "train needs it: this command does not"
        )
    except LlavaFsdpError as error:
        log().warning(
            "train would refuse this configuration; this command goes on. %s: %s", type(error).__name__, error
        )
    return ""


def check_run(cfg: Config) -> None:
    """Check that the paths that a training reads exist, that the packages of its trackers are installed, that its
    settings agree with the run that `output_dir` may already contain, and that its projector is there.

    Raises:
        ConfigError, ModelError: one of these checks failed.
    """
    cfg = without_saved_sources(cfg)
    check_paths(cfg)
    check_installed(cfg.track)
    check_settings(cfg)
    projector = find_projector(cfg)  # before an index of the data is made, which may take hours
    for path in (projector, cfg.model.checkpoint):
        run = run_of(Path(path)) if path is not None else None
        # warn if the run has a newer checkpoint than the export that this training would begin with
        if run is not None and (earlier_step_message := earlier_export(run)) is not None:
            log().warning("%s", earlier_step_message)
    for key in ("language", "vision", "checkpoint"):  # refuse the folder of an unfinished export
        refuse_staged(getattr(cfg.model, key) or "", f"model.{key}")
    refuse_staged(cfg.model.lora.checkpoint or "", "model.lora.checkpoint")


def find_parts_of_run(cfg: Config) -> Parts:
    """Find the folders of the language model and the vision encoder, and read their configurations.

    Raises:
        ConfigError, ModelError: a part is missing. If the run continues from a checkpoint, the message says why that is
            not enough.
    """
    try:
        return find_parts(cfg.model)
    except (ConfigError, ModelError) as error:
        configured = {key: getattr(cfg.model, key) for key in ("checkpoint", "language", "vision")}
        missing = [
            f"model.{key}={name}"
            for key, name in configured.items()
            if name is not None and f"{key}={name}" in str(error)
        ]
        if not continues(cfg) or not missing or any(exists(text.partition("=")[2]) for text in missing):
            raise
        raise type(error)(
            f"{missing[0]} is missing, and this run began with it: the checkpoint in {cfg.output_dir} has the weights "
            "that train, while frozen weights, configuration and tokenizer are read from there. Put it back, or name "
            f"its new place with {missing[0].partition('=')[0]}=PATH, which continues the run"
        ) from error


def open_model(cfg: Config, device: torch.device, own_parts: OwnParts = NONE) -> tuple[Architecture, Path | None]:
    """Build the model of a training on the meta device. Return it with the path from which its projector is read (None
    if there is no such path). `own_parts`: parts of the model that the program gives.

    Raises:
        ConfigError, ModelError: a part is missing, or the model or the device does not support the configuration.
    """
    parts = find_parts_of_run(cfg)
    # without files that a resumed run reads from its checkpoint instead, and that may be gone
    projector = find_projector(without_saved_sources(cfg))
    return build_model(cfg, parts, device, own_parts), projector


def find_sources(cfg: Config, model: Architecture, projector: Path | None) -> dict[str, Stored]:
    """Return the source of the initial values of every parameter of a model, which is on the meta device: tensors in
    files, or a random distribution. `projector`: its file or folder; None: it has no path of its own. Raise ModelError
    if no file contains a parameter, or one contains it with another shape; if the projector was trained with another
    language model or vision tower, the message names these."""
    try:
        return find_weights(model, model.parts, cfg.model, projector, cfg.seed)
    except ModelError as error:
        notes = read_notes(projector.parent if projector.is_file() else projector) if projector is not None else {}
        trained_with = [f"model.{part}={notes[part]}" for part in ("language", "vision") if notes.get(part)]
        configured = [f"model.language={cfg.model.language}", f"model.vision={cfg.model.vision}"]
        if len(trained_with) < len(configured) or trained_with == configured or str(projector) not in str(error):
            raise
        raise type(error)(
            f"{error}; model.projector={cfg.model.projector} was trained with {' '.join(trained_with)}: give these "
            "keys here too"
        ) from error


def check_parts_and_export(cfg: Config, model: Architecture) -> list[str]:
    """Compare the model's parts with transformers' own classes (`check_parts`) and, if it will be exported, try the
    export of a small copy. Return warnings, such as one about a conversation template for another language model.

    Raises:
        ModelError: a small copy computes something else than transformers' class, a token depends on later ones, or the
            model cannot be exported.
        ConfigError: the model cannot be exported.
    """
    language, warnings = model.language_config, []
    source = source_of_run(model, cfg, "", 0)
    check_parts(source)
    if cfg.exports_model:
        dtype = DTYPES[cfg.export.stored]
        rehearse(source, dtype)
        if (
            isinstance(source, WholeSource)
            and (unnamed := warning_of_unnamed_ends(source.folder, language)) is not None
        ):
            warnings.append(unnamed)
        if folding_rounds(model.parts, dtype):
            warnings.append(
                f"export.dtype={cfg.export.dtype.value} rounds the output layer once more in the export, as its weight "
                f"is multiplied by {model.parts.logit_change.factor:g} ({language.model_type}); export.dtype=fp32 does "
                "not"
            )
    return warnings + foreign_prompts(cfg, str(language.model_type), language.vocab_size)


def foreign_prompts(cfg: Config, kind: str, vocabulary: int) -> list[str]:
    """Return a warning, in a list, if the conversation template is Vicuna's (v1) although the language model's
    `model_type`, `kind`, is another."""
    # Llama 3 has the `model_type` of Llama 2 and a larger vocabulary
    is_llama_3 = kind == "llama" and vocabulary > 100_000
    if cfg.trained_template != VICUNA or (kind == "llama" and not is_llama_3):
        return []
    better_template = prompts_of(kind)
    cure = f"data.template={better_template} has those of its instruct models"
    if better_template is None:
        cure = "data.template chooses others, which its instruct models may know (a base model learns any)"
    model_name = "a Llama 3" if is_llama_3 else kind
    return [f"data.template=v1 has Vicuna's prompts, and the language model is {model_name}; {cure}"]


def prompts_of(kind: str) -> str | None:
    """Return the conversation template with which instruct models of a `model_type` were trained; None if unknown."""
    return next((name for start, name in PROMPTS.items() if kind.startswith(start)), None)


def with_template(cfg: C, parts: Parts) -> C:
    """Return the configuration with `data.template=auto` replaced by the first of these templates that exists:

    1. the template with which `model.checkpoint` was trained, if the notes in its folder (`llava_fsdp.json`) name one,
    and not that of `stage=pretrain`;
    2. the chat template in the language model's folder, or in the folder of a whole model whose notes name no template,
    if the model is in transformers' form or a LLaVA-NeXT, its template can be trained with, and `labels=exact`;
    3. the template with which instruct models of the language model's type were trained;
    4. v1.

    `data.template=chat_template` is replaced by a name that identifies the chat template.

    Raises:
        ConfigError: `data.template=chat_template`, and the language model's folder has none.
    """
    if parts.class_config is not None:
        return with_template_of_class(cfg, parts)
    if cfg.data.template not in (AUTO, OWN):
        return cfg
    trained_template = None if parts.whole is None else read_notes(parts.whole).get("template")
    name = own_name(parts.language_folder)
    if name is not None and cfg.data.template == AUTO and parts.whole is not None:
        has_own = parts.grid_pinpoints is not None or is_whole(parts.whole)
        name = usable_name(parts.language_folder) if has_own and trained_template is None else None
    if cfg.data.template == OWN:
        if name is None:
            raise ConfigError(
                f"data.template={OWN}, and {parts.language_folder} has no chat template; set chatml or v1"
            )
    elif trained_template not in (None, STAGE_1):
        name = trained_template
    elif name is None or cfg.labels is not Parity.exact:
        name = prompts_of(str(parts.language.model_type)) or VICUNA
    return replace(cfg, data=replace(cfg.data, template=name))


def with_template_of_class(cfg: C, parts: Parts) -> C:
    """Return the configuration with `data.template=auto` and `chat_template` replaced by the name of the chat template
    in the folder of a model that is trained as its class in transformers. Raise ConfigError if it has none. Other names
    are kept: a resumed run has recorded the template's own name, and `check_abilities` refuses all others later."""
    if cfg.data.template not in (AUTO, OWN):
        return cfg
    name = own_name(parts.language_folder)
    if name is None:
        raise ConfigError(
            f"{parts.language_folder} has no chat template (chat_template.jinja); copy it from the model's makers"
        )
    return replace(cfg, data=replace(cfg.data, template=name))


def few_steps(cfg: Config, steps: int) -> list[str]:
    """Return a warning, in a list, if a training of `steps` steps will hardly change the model: the dataset has few
    records or, if the user has set `max_steps`, the learning rate of all steps is 0. Another one if the average of the
    weights will mostly be those at the beginning."""
    rate, is_set_by_user = LearningRate(cfg.optim, steps), cfg.max_steps is not None
    ema, warnings = cfg.optim.ema, []
    if ema is not None and steps * (1 - ema) < 1:
        left = f"{ema**steps:.0%} of the average are the weights with which training begins"
        warnings.append(f"optim.ema={ema}: after {steps} steps, {left}; lower it")
    # a user who has set max_steps wants few steps: only a learning rate that stays 0 is a mistake
    if any(map(rate.factor, range(steps))) if is_set_by_user else steps >= FEW_STEPS:
        return warnings
    cure = "raise max_steps" if is_set_by_user else "for small data lower global_batch_size, or raise epochs"
    return [
        *warnings,
        f"{steps} step{'s' * (steps > 1)} of {cfg.global_batch_size} samples will hardly change the model: the "
        f"learning rate is warmed up from 0 for {min(rate.warmup_steps, steps)} of them; {cure}",
    ]
