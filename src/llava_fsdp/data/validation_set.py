"""Open the validation set, and choose the questions that the model answers at each validation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llava_fsdp.config import Config
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.record_store import files_of, sources_of
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.validation_prompts import HeldOutQuestion, ask
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.log import log

Choose = Callable[[Records], "HeldOutSampler"]
"""Function that makes the sampler from the records of the validation set."""


@dataclass(frozen=True)
class HeldOutSampler:
    """Goes through the data sources one after the other, so that all records of a step are from the same source."""

    steps: tuple[tuple[int, list[int]], ...]
    """For each step: (index of its data source, numbers of its records)."""

    @property
    def per_epoch(self) -> int:
        return len(self.steps)

    shape = ""

    def samples(self, step: int) -> list[int]:
        return self.steps[step][1]

    def source(self, step: int) -> int:
        """Return the index of a step's data source."""
        return self.steps[step][0]

    def draw(self, steps: int) -> None:
        """Do nothing: all steps are known from the start."""

    def assignment(self, step: int) -> None:
        return None


@dataclass(frozen=True)
class HeldOut:
    """The opened validation set, and the questions that the model answers at each validation."""

    loader: Loader
    sampler: HeldOutSampler
    names: list[str]
    """Names of the data sources."""
    questions: list[HeldOutQuestion]


def held_out_sampler(counts: Sequence[int], limit: int | None, samples_per_step: int) -> HeldOutSampler:
    """Make a sampler for sources of `counts` records. Each step has records of one source only, for a loss of its own.

    Args:
        limit: greatest number of records of a source that are used, evenly spread over it; None: all are.
        samples_per_step: number of records in a step, of all ranks together. The last step of a source may have fewer.
    """
    steps, first = [], 0
    for source, count in enumerate(counts):
        numbers = [first + n for n in spread(count, limit)]
        steps += [
            (source, numbers[begin : begin + samples_per_step]) for begin in range(0, len(numbers), samples_per_step)
        ]
        first += count
    return HeldOutSampler(tuple(steps))


def spread(count: int, most: int | None) -> list[int]:
    """Return at most `most` (None: all) numbers below `count`, evenly spaced: a file's records may be sorted."""
    if most is None or most >= count:
        return list(range(count))
    return [number * count // most for number in range(most)]


def spread_over_sources(counts: Sequence[int], most: int) -> list[int]:
    """Return how many of at most `most` questions each data source gets: as many as fall on it if they are spread
    evenly over all records, but at least one, where there are enough questions and the source has a record."""
    source_of = [source for source, count in enumerate(counts) for _ in range(count)]
    share = Counter(source_of[place] for place in spread(len(source_of), most))
    for source in sorted({*source_of} - share.keys()):
        richest = max(share, key=lambda other: (share[other], -other), default=source)
        if share[richest] > 1:
            share[richest] -= 1
            share[source] = 1
    return [share[source] for source in range(len(counts))]


def open_held_out(cfg: Config, open_loader: Callable[[Config, Choose], Loader], max_tokens: int) -> HeldOut:
    """Open the validation set that the configuration describes (`val`); its records are examined like training records.

    Args:
        open_loader: opens a dataset: (configuration, function that makes the sampler from the records) -> Loader.
        max_tokens: greatest number of tokens in a sequence of the language model.

    Raises:
        ConfigError: a file or folder does not exist, or a question is too long.
        DataError: there are more bad or long records than `data.bad_records`, `data.max_bad_records` and
            `data.too_long` allow, or a record to answer does not begin with a question and its answer.
    """
    held_out = cfg.held_out
    sources_of(held_out.data, "val")  # checked here, so that the message names the keys of val

    def choose(records: Records) -> HeldOutSampler:
        return held_out_sampler(records.source_counts, cfg.val.limit, cfg.global_batch_size)

    loader = open_loader(held_out, choose)
    sampler = loader.steps.sampler
    assert isinstance(sampler, HeldOutSampler)
    questions = choose_questions(loader, sampler, held_out, max_tokens)
    return HeldOut(loader, sampler, held_out.data.source_names, questions)


def warn_of_trained(cfg: Config) -> None:
    """Log a warning if a file of the validation set is also used for training."""
    trained = {os.path.realpath(file.path) for file in files_of(sources_of(cfg.data))}
    for file in files_of(sources_of(cfg.held_out.data, "val")):
        if os.path.realpath(file.path) in trained:
            log().warning("val reads %s, which is trained on: its loss and score do not hold for new data", file.path)


def choose_questions(loader: Loader, sampler: HeldOutSampler, cfg: Config, max_tokens: int) -> list[HeldOutQuestion]:
    """Choose the questions that the model answers at each validation, and make prompts from them. Their images are not
    read yet.

    Args:
        max_tokens: greatest number of tokens in a sequence of the language model.

    Raises:
        DataError: a chosen record does not begin with a question and its answer.
        ConfigError: a question with its answer is too long for the language model, or for one rank where several ranks
            share the rows of training.
    """
    numbers: dict[int, list[int]] = {}
    for source, samples in sampler.steps:
        # a record may give several samples, which begin with the same question
        first = [number for number in samples if loader.steps.records.is_first(number)]
        numbers.setdefault(source, []).extend(first)
    shares = spread_over_sources([len(records) for records in numbers.values()], cfg.val.answers)
    places = [
        (source, records[place])
        for (source, records), share in zip(numbers.items(), shares, strict=True)
        for place in spread(len(records), share)
    ]
    questions = []
    steps = loader.steps
    for source, number in places:
        question = ask(steps.records[number], steps.encoder, steps.image_reader, cfg, source)
        length = len(question.sample.input_ids)
        if length + cfg.val.max_new_tokens > max_tokens:
            raise ConfigError(
                f"val.max_new_tokens={cfg.val.max_new_tokens}: the question of {question.record} has {length} tokens, "
                f"and the language model takes {max_tokens}: set it to less, or take the record out"
            )
        if cfg.parallel.num_context > 1 and length + cfg.val.max_new_tokens > cfg.rank_tokens:
            raise ConfigError(
                f"val.answers={cfg.val.answers}: each question is answered by one rank, also with "
                f"parallel.context={cfg.parallel.context}. The question of {question.record} has {length} tokens and "
                f"val.max_new_tokens={cfg.val.max_new_tokens}, more than the {cfg.rank_tokens} tokens of a rank; set "
                f"val.answers=0 (the loss is measured all the same), or tokens_per_micro_batch="
                f"{length + cfg.val.max_new_tokens} or more"
            )
        questions.append(question)
    return questions
