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
from llava_fsdp.evaluate.check_images import check_images, folder_of
from llava_fsdp.evaluate.question import BenchmarkQuestion, check_unread
from llava_fsdp.evaluate.read_questions import records_by_turns
from llava_fsdp.evaluate.results import BLANK
from llava_fsdp.export.source_model import Opened
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
        """Mean log-probability of a token of the chosen answer minus that of the rejected one."""
        chosen, rejected = self.chosen, self.rejected
        return chosen.log_probability / chosen.tokens - rejected.log_probability / rejected.tokens


def evaluate_pairs(cfg: EvaluateConfig, opened: Opened | None = None) -> dict[str, Any]:
    """Return how well a model distinguishes the chosen and the rejected answers of the pairs of `data.path`: the mean
    scores of all pairs and, if there are several data sources, of each; with `cfg.blank` the accuracy with blank
    images, with `cfg.reference` scores relative to that model. `opened`: the model; None: it is opened here.

    Raises:
        ConfigError: there are several processes.
        DataError: a record is no pair, or an image of it is missing or cannot be read.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("task=pairs runs in one process; start it without torchrun")
    cfg = replace(cfg, data=replace(cfg.data, pairs=True))
    read = list(itertools.islice(records_by_turns(cfg), cfg.limit))
    check_images([question_of(record, source.images) for source, record in read], cfg.data)
    folders = {images: folder_of(cfg.data, images) for images in {source.images for source, _ in read}}
    pairs = [(record, files_of(record, folders[source.images])) for source, record in read]
    sources = [source.name for source, _ in read]

    def score(checkpoint: str, by: str, opened: Opened | None = None) -> tuple[list[PairScore], list[PairScore] | None]:
        """Return a model's scores of all pairs, and those with blank images if the configuration asks for them."""
        model = open_assistant(checkpoint, opened)
        found = scores_of(model, pairs, cfg.batch_size, f"pairs{by}")
        return found, scores_of(model, pairs, cfg.batch_size, f"blank pairs{by}", True) if cfg.blank else None

    found, blank = score(cfg.model.checkpoint, "", opened)
    reference, blank_reference = (None, None) if cfg.reference is None else score(cfg.reference, ", by the reference")
    result: dict[str, Any] = {"checkpoint": cfg.model.checkpoint, "reference": cfg.reference, "task": cfg.task.value}
    result |= summary(found, reference)
    if blank is not None:
        result[BLANK] = summary(blank, blank_reference)["accuracy"]
    names = list(dict.fromkeys(sources))
    if len(names) > 1:
        result["groups"] = {"source": {}}
        for name in names:
            numbers = [n for n, source in enumerate(sources) if source == name]
            others = None if reference is None else [reference[n] for n in numbers]
            result["groups"]["source"][name] = summary([found[n] for n in numbers], others)
    return result


def question_of(record: Record, images: str | None) -> BenchmarkQuestion:
    """Return the images of a pair as those of a question, which `check_images` reads. `images`: their folder. Raise
    DataError if the record has media that are not read."""
    check_unread(record.where, record.unread)
    text = "".join(turn.text for turn in record.turns)
    inline = inline_images(record)
    return BenchmarkQuestion(0, record.id, text, text, record.images, record.where, inline=inline, images_folder=images)


def files_of(record: Record, folder: Path | RemoteFolder) -> list[ImageFile]:
    """Return the images of a record: those in the record itself, others in `folder`."""
    inline = inline_images(record)
    return [inline.get(name) or image_in(folder, name) for name in record.images]


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
    others = [0.0] * len(found) if reference is None else [pair.margin for pair in reference]
    margins = [pair.margin - other for pair, other in zip(found, others, strict=True)]
    count = len(found)
    means: dict[str, Any] = {
        "pairs": count,
        "accuracy": sum(margin > 0 for margin in margins) / count,
        "margin": sum(margins) / count,
        "logp_chosen": sum(pair.chosen.log_probability for pair in found) / count,
        "logp_rejected": sum(pair.rejected.log_probability for pair in found) / count,
    }
    if reference is None:
        means["accuracy_per_token"] = sum(pair.margin_per_token > 0 for pair in found) / count
    return means


def table_of_pairs(result: dict[str, Any]) -> Table:
    """Return the scores of pairs as a table: a row for all and one for each data source."""
    table = Table(box=SIMPLE, pad_edge=False, title="pairs of answers", title_justify="left")
    shown = {key: title for key, title in COLUMNS.items() if key in result}
    for title in ("", "pairs", *shown.values()):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, group in {"all": result, **result.get("groups", {}).get("source", {})}.items():
        formats = (".2%" if key.startswith("accuracy") else ".3f" for key in shown)
        cells = [format(group[key], form) if key in group else "" for key, form in zip(shown, formats, strict=True)]
        table.add_row(name, f"{group['pairs']:,}", *cells)
    return table
