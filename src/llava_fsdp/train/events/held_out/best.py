"""Find the best validation of a run, by a number in the rows of `validation.jsonl` (`checkpoint.best`)."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llava_fsdp.config import BestBy

MEASURED = "held_out"
"""Key of a row of `validation.jsonl` with a digest of what was measured: the records, their encoding and the metric."""


@dataclass(frozen=True)
class BestValidation:
    """The best validation of a run so far."""

    step: int | None = None
    """The step after which it ran; None if there is none."""
    value: float = math.nan
    """Its loss, score, accuracy or margin."""
    validations_since: int = 0
    """Number of validations after it."""


def best_validation(rows: Sequence[Mapping[str, Any]], by: BestBy, kept: Collection[int]) -> BestValidation:
    """Return the best validation of `rows`, their results in order. Only those count that have measured the same as the
    last one, and after whose step (one of `kept`) there is a checkpoint. The first of equal ones is the best."""
    best = BestValidation()
    for row in rows:
        value = row.get(by.value)
        counts = row["step"] in kept and row.get(MEASURED) == rows[-1].get(MEASURED)
        if counts and isinstance(value, int | float) and math.isfinite(value):
            is_better = value < best.value if by is BestBy.loss else value > best.value
            if best.step is None or is_better:
                best = BestValidation(step=int(row["step"]), value=float(value))
                continue
        if best.step is not None:
            best = replace(best, validations_since=best.validations_since + 1)
    return best
