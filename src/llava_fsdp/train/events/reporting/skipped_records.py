"""List the records of a dataset that a training leaves out, in `skipped_records.jsonl`."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.files.jsonl import RowWriter, replace_lines
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.reporting.lost_rows import SKIPPED_FILE
from llava_fsdp.train.events.reporting.metrics import rows_of, storage_errors
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.state import StepResult


class SkippedRecords(StepReport):
    """Adds the records that a step lacks, and those without label, to `skipped_records.jsonl`, and logs a warning of
    each that is skipped."""

    def __init__(self, folder: Path, first_step: int, left_out: Iterable[dict[str, Any]] = ()):
        """Begin `skipped_records.jsonl` anew: with the records `left_out`, which were skipped before training, and the
        present rows of steps up to `first_step`. Later steps are repeated."""
        self.rows = RowWriter(folder / SKIPPED_FILE)
        with storage_errors(folder):
            begin_skipped_records(self.rows.path, first_step, left_out)

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        """Write a line for each record that the step skipped, with a warning in the log, and for each that has no
        label. `row`: the step's row of `metrics.jsonl`."""
        for sample in result.facts.skipped:
            skipped = {"step": row["step"], "record": sample.record, "kind": sample.kind, "reason": sample.reason}
            self.rows.add(skipped)
            log().warning("step %d is trained without %s", row["step"], sample.reason)
        for where in result.facts.unlabelled:
            self.rows.add({"step": row["step"], "record": where, "kind": "no_labels", "reason": "no label"})

    def on_end(self) -> None:
        self.rows.close()


def begin_skipped_records(path: Path, step: int, left_out: Iterable[dict[str, Any]]) -> None:
    """Write the file of skipped records, `path`, anew: first `left_out`, the records that were skipped before training,
    with step 0 (keys record, kind and reason); then its present rows up to `step`. Rows of later steps are dropped,
    because a resumed run repeats these steps. Without rows, the file is deleted."""
    before = (json.dumps({"step": 0, **row}) for row in left_out)
    later = rows_of(path, range(1, step + 1)) if path.is_file() else []
    replace_lines(path, itertools.chain(before, later))
    if not path.stat().st_size:
        path.unlink()
