"""Held-out records: which of them a validation reads, in which order, and what is asked about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llava_fsdp.config import Config
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.record_store import sources_of
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.validation_prompts import HeldOutQuestion, ask
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.log import log

Choose = Callable[[Records], "HeldOutOrder"]


@dataclass(frozen=True)
class HeldOutOrder:
    """Every source's records by number, one source after the other; a step has samples of one source alone."""

    steps: tuple[tuple[int, list[int]], ...]
    """(source, numbers of records)"""

    @property
    def per_epoch(self) -> int:
        return len(self.steps)

    @property
    def shape(self) -> str:
        return ""

    def samples(self, step: int) -> list[int]:
        return self.steps[step][1]

    def source(self, step: int) -> int:
        """Of all samples of a step."""
        return self.steps[step][0]

    def draw(self, steps: int) -> None:
        """Nothing is drawn."""

    def cuts(self, step: int) -> None:
        return None


@dataclass(frozen=True)
class HeldOut:
    """What a run is measured on."""

    loader: Loader
    order: HeldOutOrder
    names: list[str]
    """Of the sources."""
    questions: list[HeldOutQuestion]


def order_of(counts: Sequence[int], limit: int | None, samples: int) -> HeldOutOrder:
    """
    Args:
        counts: records of each source, whose numbers follow one another.
        limit: most records of each, spread evenly over it.
        samples: of a step.
    """
    steps, first = [], 0
    for source, count in enumerate(counts):
        numbers = [first + n for n in spread(count, limit)]
        steps += [(source, numbers[begin : begin + samples]) for begin in range(0, len(numbers), samples)]
        first += count
    return HeldOutOrder(tuple(steps))


def spread(count: int, most: int | None) -> list[int]:
    """At most so many of the numbers below `count`, evenly apart: a file's records may be sorted by what they are."""
    if most is None or most >= count:
        return list(range(count))
    return [number * count // most for number in range(most)]


def open_held_out(cfg: Config, open_loader: Callable[[Config, Choose], Loader], positions: int) -> HeldOut:
    """The records that `val` names, examined as the run's own are, and the questions about them.

    Args:
        cfg: the run's own.
        open_loader: opens the records of a configuration, in the order that is chosen.
        positions: that the language model was made for.

    Raises:
        ConfigError: a file or folder does not exist, or a question is too long.
        DataError: by `data.bad_records`, `data.max_bad_records` and `data.too_long`, records of it are wrong.
    """
    own = cfg.held_out
    sources_of(own.data, "val")  # whose message names the keys of val
    orders: list[HeldOutOrder] = []

    def choose(records: Records) -> HeldOutOrder:
        orders.append(order_of(records.source_counts, cfg.val.limit, cfg.global_batch_size))
        return orders[-1]

    loader = open_loader(own, choose)
    return HeldOut(loader, orders[-1], own.data.source_names, choose_questions(loader, orders[-1], own, positions))


def warn_of_trained(cfg: Config) -> None:
    """One may want it, to see a model overfit; whoever does not will believe the numbers."""
    trained = {os.path.realpath(source.path) for source in sources_of(cfg.data)}
    for source in sources_of(cfg.held_out.data, "val"):
        if os.path.realpath(source.path) in trained:
            log().warning(
                "val measures %s, which is trained on: its loss and score say nothing of new data", source.path
            )


def choose_questions(loader: Loader, order: HeldOutOrder, cfg: Config, positions: int) -> list[HeldOutQuestion]:
    """The questions of a validation, encoded; their pictures are read when they are asked.

    Raises:
        DataError: a record is none that can be asked.
        ConfigError: a question with its answer is longer than the language model's positions.
    """
    numbers = [number for step in range(order.per_epoch) for number in order.samples(step)]
    found = []
    for place in spread(len(numbers), cfg.val.answers) if cfg.val.answers else ():
        steps = loader.steps
        asked = ask(steps.records[numbers[place]], steps.encoder.tokenizer, steps.pictures, cfg)
        room = positions - cfg.val.max_new_tokens
        if len(asked.sample.input_ids) > room:
            raise ConfigError(
                f"val.max_new_tokens={cfg.val.max_new_tokens}: the question of {asked.record} is "
                f"{len(asked.sample.input_ids)} positions long, and the language model has {positions}: set it "
                "to less, or take the record out"
            )
        found.append(asked)
    return found
