"""What gets a row of metrics after every step."""

from __future__ import annotations

from typing import Any

from llava_fsdp.train.state import StepResult


class StepReport:
    """One place to which rank 0 reports a training, such as a file or the terminal. Subclasses override what they
    need. A file that exists when a run continues has rows of steps that are done again; its report drops them when it
    is made, as `MetricsFile` does."""

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        """Report a step by its row of `metrics.jsonl`, and the result of which the row was made."""

    def validation(self, row: dict[str, Any]) -> None:
        """Report the results of a validation, a row of `validation.jsonl`."""

    def progress(self, text: str) -> None:
        """Show how much of a validation is done."""

    def on_end(self) -> None:
        """Write what is left, after the last step."""

    def close(self) -> None:
        """Free what is held, after the last step or an error. Nothing may be written into the run's folder, which may
        be lost."""

    def end(self, exit_code: int, patience: float) -> None:
        """Report how the run has ended, within `patience` seconds, when `run_status.json` is written."""
