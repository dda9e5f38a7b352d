"""Record the scores of an evaluation in the folder of the model's run, for its report page and model card."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_fsdp.config import EvaluateConfig, Task
from llava_fsdp.export.card.history import names_of_data, public_data
from llava_fsdp.model.sources.pretrained import public_name
from llava_fsdp.runtime.errors import StorageError
from llava_fsdp.runtime.files.scores_file import SCORES_FILE, add_scores
from llava_fsdp.runtime.files.unfinished import run_of
from llava_fsdp.runtime.text.humanize import format_time
from llava_fsdp.runtime.text.log import log


def record_scores(
    cfg: EvaluateConfig, task: str, data: str, result: dict[str, Any], history: Mapping[str, Any]
) -> None:
    """Add scores to `results.json` in the folder of the run that made the model; do nothing for another model. If the
    file cannot be written, a warning is logged.

    Args:
        task: what was asked; `data` names the questions.
        result: scores of all questions or pairs by name. Only its values of type float are recorded.
        history: which run and step made the model.
    """
    folder = run_of(Path(cfg.model.checkpoint))
    scores = {key: value for key, value in result.items() if isinstance(value, float)}
    if folder is None or not scores:
        return
    entry = {
        **{key: history[key] for key in ("run", "step") if key in history},
        "task": task,
        "data": data,
        "questions": result.get("questions", result.get("pairs")),
        **({} if cfg.limit is None else {"limit": cfg.limit}),
        "scores": scores,
        "time": format_time(time.time()),
    }
    try:
        add_scores(folder, entry)
    except StorageError as error:
        return log().warning("the scores are not recorded: %s", error)
    log().info("scores recorded in %s", folder / SCORES_FILE)


def public_names(cfg: EvaluateConfig) -> str:
    """Return the names of the data without folders, and of the model to compare with, if there is one."""
    is_of_files = cfg.task in (Task.conversations, Task.pairs)
    beside = [] if cfg.reference is None else [f"beside {public_name(cfg.reference)}"]
    return ", ".join([*(names_of_data(cfg.data) if is_of_files else [public_data(cfg.questions or "")]), *beside])
