"""Evaluate a trained model on pairs of answers (`evaluate task=pairs`): does it find the better one more probable?"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from llava_fsdp.chat.answer_scores import AnswerScore
from llava_fsdp.chat.answerer import Answerer
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.config import EvaluateConfig
from llava_fsdp.data.containers.data_files import RemoteFolder
from llava_fsdp.data.images.check import ImageFile, image_in, inline_images
from llava_fsdp.data.records.record import Record
from llava_fsdp.evaluate.check_images import folder_of
from llava_fsdp.evaluate.read_questions import records_by_turns
from llava_fsdp.evaluate.results import BLANK
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.progress import watch

COLUMNS = {
    "accuracy": "accuracy", "accuracy_per_token": "per token", BLANK: "blank images", "margin": "margin",
    "logp_chosen": "log p(chosen)", "logp_rejected": "log p(rejected)",
}  # fmt: skip
"""Columns of the table, in order: name of the score -> title."""
Pair = tuple[Record, list[ImageFile]]
"""A record with a chosen and a rejected answer, and its images."""


@dataclass(frozen=True)
class PairScore:
    """How probable a model finds the two answers of a pair."""

    chosen: AnswerScore
    rejected: AnswerScore

    @property
    def margin(self) -> float:
        """Log-probability of the chosen answer minus that of the rejected one."""
        return self.chosen.log_probability - self.rejected.log_probability

    @property
    def margin_per_token(self) -> float:
        """The same with each log-probability divided by the tokens of its answer."""
        per_token = (own.log_probability / own.tokens for own in (self.chosen, self.rejected))
        return next(per_token) - next(per_token)


def evaluate_pairs(cfg: EvaluateConfig) -> dict[str, Any]:
    """Return how well a model distinguishes the chosen and the rejected answers of the pairs of `data.path`: the mean
    scores of all pairs and, if there are several data sources, of each. If the configuration says so, also the accuracy
    with blank images, and scores relative to a second model (`cfg.reference`).

    Raises:
        ConfigError: there are several processes.
        DataError: a record is no pair, or an image of it cannot be read.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("task=pairs runs in one process; start it without torchrun")
    cfg = replace(cfg, data=replace(cfg.data, pairs=True))
    folders: dict[str | None, Path | RemoteFolder] = {}
    pairs: list[Pair] = []
    sources: list[str] = []
    for source, record in itertools.islice(records_by_turns(cfg), cfg.limit):
        if source.images not in folders:
            folders[source.images] = folder_of(cfg.data, source.images)
        inline = inline_images(record)
        pairs.append((record, [inline.get(name) or image_in(folders[source.images], name) for name in record.images]))
        sources.append(source.name)
    model = open_assistant(cfg.model.checkpoint)
    found = scores_of(model, pairs, cfg.batch_size, "pairs")
    blank = scores_of(model, pairs, cfg.batch_size, "pairs with blank images", blank=True) if cfg.blank else None
    reference = None
    if cfg.reference is not None:
        del model
        reference = scores_of(open_assistant(cfg.reference), pairs, cfg.batch_size, "pairs, by the reference")
    result: dict[str, Any] = {"checkpoint": cfg.model.checkpoint, "reference": cfg.reference, "task": cfg.task.value}
    result |= summary(found, reference)
    if blank is not None:
        result[BLANK] = summary(blank, None)["accuracy"]
    names = list(dict.fromkeys(sources))
    if len(names) > 1:
        result["groups"] = {"source": {}}
        for name in names:
            own = [n for n, source in enumerate(sources) if source == name]
            others = None if reference is None else [reference[n] for n in own]
            result["groups"]["source"][name] = summary([found[n] for n in own], others)
    return result


def scores_of(model: Answerer, pairs: Sequence[Pair], size: int, what: str, blank: bool = False) -> list[PairScore]:
    """Return a model's scores of pairs, of which `size` are computed at once. `what` is the title of the progress bar;
    with `blank`, images have the mean colour."""
    found: list[PairScore] = []
    with watch(what, len(pairs)) as advance:
        for start in range(0, len(pairs), size):
            batch = pairs[start : start + size]
            scores = model.scores(batch, blank)
            found += [PairScore(better, worse) for better, worse in zip(scores[::2], scores[1::2], strict=True)]
            advance(len(batch))
    return found


def summary(found: Sequence[PairScore], reference: Sequence[PairScore] | None) -> dict[str, Any]:
    """Return the mean scores of pairs. A margin is the log-probability of the chosen answer minus that of the rejected
    one; `accuracy` is the share of pairs whose margin is above 0. With a reference, the margin that it gives is
    subtracted from that of the model, as in the loss of a training."""
    others = [0.0] * len(found) if reference is None else [own.margin for own in reference]
    margins = [own.margin - other for own, other in zip(found, others, strict=True)]
    count = len(found)
    means: dict[str, Any] = {
        "pairs": count,
        "accuracy": sum(margin > 0 for margin in margins) / count,
        "margin": sum(margins) / count,
        "logp_chosen": sum(own.chosen.log_probability for own in found) / count,
        "logp_rejected": sum(own.rejected.log_probability for own in found) / count,
    }
    if reference is None:
        means["accuracy_per_token"] = sum(own.margin_per_token > 0 for own in found) / count
    return means


def table_of_pairs(result: dict[str, Any]) -> Table:
    """Return the scores of pairs as a table: a row for all and one for each data source."""
    table = Table(box=SIMPLE, pad_edge=False, title="pairs of answers", title_justify="left")
    shown = {key: title for key, title in COLUMNS.items() if key in result}
    for title in ("", "pairs", *shown.values()):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, own in {"all": result, **result.get("groups", {}).get("source", {})}.items():
        cells = [f"{own[key]:.2%}" if key.startswith("accuracy") else f"{own[key]:.3f}" for key in shown if key in own]
        table.add_row(name, f"{own['pairs']:,}", *cells)
    return table
