"""Write a row of `metrics.jsonl` per step."""

import contextlib
import json
import math
import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.plan.time.mfu import Utilization
from llava_fsdp.report.run_reader import METRICS_FILE
from llava_fsdp.runtime.errors import StorageError
from llava_fsdp.runtime.files.jsonl import RowWriter, replace_lines
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.state import PairNumbers, StepResult
from llava_fsdp.train.sums.pair_sums import ALL


class MetricsFile(StepReport):
    """Appends the row of each step to `metrics.jsonl`."""

    def __init__(self, folder: Path, first_step: int):
        """Open `metrics.jsonl` and drop the rows of steps after `first_step`, at which this start of the run begins."""
        self.rows = RowWriter(folder / METRICS_FILE)
        with storage_errors(folder):
            drop_later_rows(self.rows.path, first_step)

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        self.rows.add(row)

    def on_end(self) -> None:
        self.rows.close()


def metrics_row(result: StepResult, utilization: Utilization | None = None) -> dict:
    """Return the row of `metrics.jsonl` for a step. `utilization`: None if it is unknown."""
    facts = result.facts
    experts = {} if result.expert_load is None else asdict(result.expert_load)
    pairs = result.pairs or {}
    used = dict.fromkeys(("flops", "mfu", "hfu")) if utilization is None else utilization.of(facts, result.seconds)
    return {
        "step": facts.step + 1,
        "loss": finite(result.loss),
        "sources": {
            name: {
                "loss": None if loss is None else finite(loss),
                "label_tokens": facts.source_labels[name],
                **pair_columns(pairs.get(name)),
            }
            for name, loss in result.source_losses.items()
        },
        "lr": result.lr,
        "grad_norm": finite(result.grad_norm),
        "skipped": result.skipped,
        "skipped_steps": result.skipped_steps,
        "loss_scale": result.loss_scale,
        "label_tokens": facts.label_tokens,
        "tokens": facts.tokens,
        "samples": facts.samples,
        "images": facts.images,
        "tiles": facts.tiles,
        "truncated": facts.truncated,
        "labels_cut": facts.labels_cut,
        "unlabelled": len(facts.unlabelled),
        "skipped_records": len(facts.skipped),
        "seconds": result.seconds,
        "data_seconds": result.data_seconds,
        "tokens_per_second": facts.tokens / result.seconds,
        **used,
        "recompiles": result.recompiles,
        "peak_memory_bytes": peak_memory(),
        **{key: finite(value) for key, value in experts.items()},
        **pair_columns(pairs.get(ALL)),
    }


def pair_columns(numbers: PairNumbers | None) -> dict[str, Any]:
    """Return the means over preference pairs, except of their loss, as columns of a row; {} if there are no pairs."""
    if numbers is None:
        return {}
    values = asdict(numbers)
    return {"pairs": values.pop("pairs")} | {key: finite(value) for key, value in values.items() if key != "loss"}


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Context manager in which an OSError becomes a StorageError about the file or folder `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({why(error, path)})") from error


def finite(value: float) -> float | None:
    """Return None for a value that is not finite: JSON has only finite numbers."""
    return value if math.isfinite(value) else None


def peak_memory() -> int:
    """Return the peak memory of this rank in bytes: allocated on the GPU or, without a GPU, resident in the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def drop_later_rows(path: Path, step: int) -> None:
    """Remove the rows of steps after `step` from a JSON Lines file, because a resumed run repeats these steps."""
    if path.is_file():
        replace_lines(path, rows_of(path, range(step + 1)))


def rows_of(path: Path, steps: range) -> list[str]:
    """Return the lines of a JSON Lines file whose entry `step` is among `steps`, without incomplete ones."""
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # an incomplete line, cut by a crash
            if json.loads(line)["step"] in steps:
                kept.append(line)
    return kept
