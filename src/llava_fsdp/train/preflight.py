"""Check a training's configuration, its paths, and its model before records and values of weights are read.

`train` and `doctor` raise or report every error. `plan`, `prepare` and `train dry_run=` also work where a training
could not start: they only warn, in the same words.
"""

from pathlib import Path

import torch

from llava_fsdp.config import Config, Source
from llava_fsdp.config.paths import PACKAGED_OR_HUB, check_places, exists
from llava_fsdp.data.index.record_store import sources_of
from llava_fsdp.export.formats import check_hf
from llava_fsdp.export.processor import rehearse_tokenizer
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.pretrained import Parts, find_parts, find_projector
from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.runtime.log import log
from llava_fsdp.train.build_model import build_model
from llava_fsdp.train.resume import check_settings
from llava_fsdp.train.trackers import check_installed

VICUNA = "v1"
PROMPTS = {"qwen": "chatml", "mistral": "mistral_instruct", "mpt": "mpt"}
"""Beginning of a language model's type -> the conversation template that instruct models of this type were trained
with."""


def preflight(cfg: Config, device: torch.device) -> None:
    """Check everything that a training on `device` checks before it reads records or values of weights.

    Raises:
        ConfigError, ModelError, DataError: the training would refuse the configuration with the same error.
    """
    check_run(cfg)
    model, projector = open_model(cfg, device)
    check_prompts(cfg, model.parts)
    find_weights(model, model.parts, cfg.model, projector, cfg.seed)
    if cfg.data.source is not Source.shapes:
        sources_of(cfg.data, "data")


def warn_if_refused(cfg: Config) -> None:
    """Log a warning with the error with which a training would refuse the configuration.

    Only paths are checked if a part of the model would first have to be downloaded.

    Raises:
        ConfigError: a path that the configuration names does not exist.
    """
    check_places(cfg)
    names = [cfg.model.checkpoint] if cfg.model.checkpoint else [cfg.model.language, cfg.model.vision]
    if any(PACKAGED_OR_HUB.fullmatch(name) and not name.startswith("package:") and not exists(name) for name in names):
        return
    try:
        preflight(cfg, torch.device("cpu"))
    except LlavaFsdpError as error:
        log().warning("train refuses this configuration: %s: %s", type(error).__name__, error)


def check_run(cfg: Config) -> None:
    """Check the paths that a training reads, its trackers, and the run that `output_dir` has already.

    Raises:
        ConfigError
    """
    check_places(cfg)
    check_installed(cfg.track)
    check_settings(cfg)


def open_model(cfg: Config, device: torch.device) -> tuple[Llava, Path | None]:
    """Find the parts of the model and build it on the meta device; return the model, and the folder of its projector or
    None.

    Raises:
        ConfigError, ModelError
    """
    parts = find_parts(cfg.model)
    projector = find_projector(cfg)
    model = build_model(cfg, parts, device)
    if cfg.exports_model:
        check_hf(model, cfg.data.trained_aspect)
    return model, projector


def check_prompts(cfg: Config, parts: Parts) -> None:
    """Log a warning if the conversation template is that of another language model, and check that an export could be
    given its tokenizer. Raises ModelError or ConfigError if it could not."""
    warn_of_template(cfg, str(parts.language.model_type), parts.language.vocab_size)
    if cfg.exports_model:
        rehearse_tokenizer(parts.language_folder, parts.language, cfg.trained_template, cfg.model.image_start_end)


def warn_of_template(cfg: Config, kind: str, vocabulary: int) -> None:
    """Log a warning if Vicuna's template is used with a language model of another type than Vicuna's."""
    is_llama_3 = kind == "llama" and vocabulary > 100_000
    if cfg.data.template != VICUNA or (kind == "llama" and not is_llama_3):
        return
    better = next((name for start, name in PROMPTS.items() if kind.startswith(start)), None)
    log().warning(
        "data.template=v1 has Vicuna's prompts, and the language model is %s: %s",
        "a Llama 3" if is_llama_3 else kind,
        f"data.template={better} has those of its instruct models" if better else
        "its instruct models know others; a base model learns any. data.template chooses",
    )  # fmt: skip
