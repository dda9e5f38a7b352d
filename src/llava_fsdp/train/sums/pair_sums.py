"""Sums over a step of what is reported of pairs, by data source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

import torch

from llava_fsdp.train.state import PairNumbers

if TYPE_CHECKING:
    from llava_fsdp.data.batching.batch import MicroBatch
    from llava_fsdp.train.sums.preference import Answers


COLUMNS = len(fields(PairNumbers))
"""Number of sums of a source: one for each field of PairNumbers, in their order."""
ALL = ""
"""Stands for all data sources; no source has this name."""


class PairSums:
    """Sums by data source, which stay on the device until the host reads the loss."""

    def __init__(self, sources: int, device: torch.device):
        """Begin with zeros. `sources`: number of data sources."""
        self.values = torch.zeros((sources, COLUMNS), device=device)

    def add(self, micro: MicroBatch, answers: Answers, losses: torch.Tensor, rewards: torch.Tensor) -> None:
        """Add the pairs of a micro-batch to the sums of their data sources, `self.values`. `micro` has the data source
        of each pair, `answers` the log-probability of each answer. `losses`: float32 [pairs]. `rewards`: of the chosen
        and the rejected answer, float32 [pairs, 2]."""
        logps, chosen, rejected = answers.sums.detach().view(-1, 2), rewards[:, 0], rewards[:, 1]
        rows = [  # in the order of the fields of `PairNumbers`
            torch.ones_like(chosen), losses.detach(), (chosen > rejected).to(chosen.dtype), chosen - rejected, chosen,
            rejected, logps[:, 0], logps[:, 1],
        ]  # fmt: skip
        is_own = micro.pair_sources == torch.arange(len(self.values), device=chosen.device)[:, None]
        self.values += is_own.to(chosen.dtype) @ torch.stack(rows, dim=1)


def pair_numbers(sums: list[float]) -> PairNumbers | None:
    """Return means over pairs from `sums`, a row of `PairSums.values`, of which the first is the count; None without
    pairs."""
    count = sums[0]
    if not count:
        return None
    _, *names = (field.name for field in fields(PairNumbers))
    means = {name: total / count for name, total in zip(names, sums[1:], strict=True)}
    return PairNumbers(round(count), **means)


def numbers_by_source(values: list[float], names: list[str]) -> dict[str, PairNumbers | None]:
    """Return the means of each data source by its name, and under the name ALL those of all pairs, from the numbers of
    `PairSums.values` after a sum over ranks, row after row."""
    rows = [values[begin : begin + COLUMNS] for begin in range(0, len(values), COLUMNS)]
    found = {name: pair_numbers(row) for name, row in zip(names, rows, strict=True)}
    return found | {ALL: pair_numbers([sum(column) for column in zip(*rows, strict=True)])}


def means_of_all_sources(numbers: Iterable[PairNumbers | None]) -> PairNumbers | None:
    """Return the means over the pairs (of a chosen and a rejected answer) of all data sources, from the `numbers` of
    each source, which are None for a source without pairs. None if no source has pairs."""
    rows = [asdict(of_source) for of_source in numbers if of_source is not None]
    keys = list(rows[0]) if rows else []
    # the field `pairs` is a number of pairs; all other fields are means, which become sums again
    sums = [float(sum(row["pairs"] * (1 if key == "pairs" else row[key]) for row in rows)) for key in keys]
    return pair_numbers(sums) if sums else None


def losses_by_source(numbers: dict[str, PairNumbers | None]) -> dict[str, float | None]:
    """Return the mean loss of the pairs of each data source; None for one without pairs."""
    return {name: None if own is None else own.loss for name, own in numbers.items() if name != ALL}
