"""Show the progress of a training: a progress bar on a terminal, else a log line every `log_every` steps."""

from collections import deque
from typing import Any

from rich.progress import Progress, TaskID, TextColumn

from llava_fsdp.config import Config
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.humanize import duration
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.state import StepResult

RECENT = 20
"""Number of steps from whose time the remaining time is estimated."""


class Console(StepReport):
    """Shows the progress of a training."""

    def __init__(self, cfg: Config, first_step: int, total_steps: int, is_terminal: bool = False):
        """Start the progress bar, if standard error is a terminal (`is_terminal`). `first_step`: number of steps that
        were finished when this start of the run began."""
        self.cfg = cfg
        self.total_steps = total_steps
        self.recent_seconds: deque[float] = deque(maxlen=RECENT)
        """Seconds of the last steps."""
        self.progress_bar: Progress | None = None
        self.task = TaskID(0)
        if is_terminal:
            columns = *Progress.get_default_columns(), TextColumn("{task.fields[shown]}")
            self.progress_bar = Progress(*columns, console=TextConsole(on_stderr=True))
            self.task = self.progress_bar.add_task(cfg.stage.name, total=total_steps, completed=first_step, shown="")
            self.progress_bar.start()

    def step(self, row: dict[str, Any], result: StepResult) -> None:
        """Show a step, given as its row of `metrics.jsonl`: in the progress bar or, without one, in the log every
        `log_every` steps. `result` is unused; other reports need it."""
        self.recent_seconds.append(row["seconds"])
        shown = f"loss {number(row['loss'], '.4f')}  {row['tokens_per_second']:,.0f} tokens/s"
        utilizations = [f"{name.upper()} {row[name]:.1%}" for name in ("mfu", "hfu") if row[name] is not None]
        shown += f"  {', '.join(utilizations)}" if utilizations else ""
        shown += f"  {row['skipped_steps']} skipped" if row["skipped_steps"] else ""
        if self.progress_bar is not None:
            place = f"step {row['step']:,}/{self.total_steps:,}  "
            self.progress_bar.update(self.task, completed=row["step"], shown=place + shown)
        elif row["step"] % self.cfg.log_every == 0 or row["step"] == self.total_steps:
            seconds_left = (self.total_steps - row["step"]) * sum(self.recent_seconds) / len(self.recent_seconds)
            log().info(
                "step %d/%d  %s  lr %.3g  grad norm %s  %s left",
                row["step"], self.total_steps, shown, row["lr"], number(row["grad_norm"], ".3g"),
                duration(seconds_left),
            )  # fmt: skip

    def progress(self, text: str) -> None:
        """Show how far a validation is, in the progress bar."""
        if self.progress_bar is not None:
            self.progress_bar.update(self.task, shown=text)

    def close(self) -> None:
        if self.progress_bar is not None:
            self.progress_bar.stop()


def number(value: float | None, form: str) -> str:
    """Format a number; None stands for one that is not finite."""
    return "overflowed" if value is None else format(value, form)
