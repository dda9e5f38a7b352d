"""Find the best validation of a run, by a number in the rows of `validation.jsonl` (`checkpoint.best`)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llava_fsdp.config import BestBy


@dataclass(frozen=True)
class BestValidation:
    """The best validation of a run so far."""

    step: int | None = None
    """The step after which it ran; None if no validation has a finite number."""
    value: float = math.nan
    """Its loss, score, accuracy or margin."""
    since: int = 0
    """Number of validations after it."""


def best_validation(rows: Iterable[Mapping[str, Any]], by: BestBy) -> BestValidation:
    """Return the best of some validations, of which `rows` has the results in their order. Of equal ones, the first is
    the best."""
    best = BestValidation()
    for row in rows:
        value = row.get(by.value)
        if isinstance(value, int | float) and math.isfinite(value):
            is_better = value < best.value if by is BestBy.loss else value > best.value
            if best.step is None or is_better:
                best = BestValidation(int(row["step"]), float(value))
                continue
        best = BestValidation(best.step, best.value, best.since + 1)
    return best
