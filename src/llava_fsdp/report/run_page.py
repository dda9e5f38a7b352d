"""Build the report page of one training run. Imports no torch."""

import time
from html import escape

from llava_fsdp.report.charts.html import heading, whole_page
from llava_fsdp.report.charts.svg import short_text
from llava_fsdp.report.results import TEXTS, loss_name, results_of
from llava_fsdp.report.run_charts import charts_of, figures
from llava_fsdp.report.run_reader import RunRecord
from llava_fsdp.report.run_tables import (
    Thumbnail,
    answers,
    evaluations,
    history_tables,
    settings,
    validation_sources,
)
from llava_fsdp.runtime.text.humanize import duration, format_time, readable

SHOWN = (
    "loss", "lowest loss", "last val loss", "lowest val loss", "best val score", "tokens/s", "MFU", "memory",
    "waits for data",
)  # fmt: skip
"""Names of the results that are shown at the top of the page."""


def report_page(run: RunRecord, thumbnail: Thumbnail) -> str:
    """Return the report page of a run as HTML. `thumbnail`: returns the data: URL for an image's path, or None."""
    charts = figures(charts_of(run)) or "<p>No step has been taken yet.</p>\n"
    validated = [*validation_sources(run), *evaluations(run), *answers(run, thumbnail)]
    parts = [header(run), tiles(run), charts, *validated, *settings(run), *history_tables(run)]
    return whole_page(f"{run.name} · {run.state}", "".join(parts))


def header(run: RunRecord) -> str:
    """Return the top of a run's page as HTML: what was trained, how it ended, and what could not be read."""
    state, about = run.state, run.about
    what = [str(about[key]) for key in ("stage", "model", "strategy") if about.get(key)]
    if ranks := about.get("ranks"):
        nodes = about.get("nodes", 1)
        what.append(f"{ranks} x {about.get('device', '?')}" + (f" on {nodes} nodes" if nodes != 1 else ""))
    lines: list[str | tuple[str, str]] = [" · ".join(what), str(about.get("data") or "")]
    # a training that goes well may still have a reason: why a later start failed
    lines.append(("reason" if run.end is run.status else "note", run.reason))
    lines += [("note", f"{n:,} lines of {name} could not be read and are skipped.") for name, n in run.unread.items()]
    if lost := run.num_lost:
        lines.append(("note", f"{lost:,} of {run.history.last_step:,} steps have no row in metrics.jsonl."))
    lines.append(("note", f"As of {format_time(time.time())}."))
    return heading("run", run.name, *lines, state=state)


def tiles(run: RunRecord) -> str:
    """Return the boxes with the run's most important figures as HTML."""
    history, results, about = run.history, results_of(run), run.about
    total, planned = about.get("total_steps"), about.get("planned_peak")
    lowest = f", to step {history.lowest_loss[1]:,}" if history.lowest_loss else ""
    plan = f", planned {readable(planned)}" if isinstance(planned, int) else ""
    validated = next((row["step"] for row in reversed(run.validations) if row.get("loss") is not None), 0)
    score = next((f", {row['metric']}" for row in reversed(run.validations) if row.get("metric")), "")
    so_far = len(history.recent)
    details = {
        "loss": f", {so_far} so far" if so_far < history.window else "",
        "lowest loss": lowest,
        "last val loss": f", step {validated:,}",
        "best val score": score,
        "tokens/s": ", 2nd half",
        "MFU": ", 2nd half",
        "memory": f", peak of rank 0{plan}",
        "waits for data": ", share of the time",
    }
    values = [(f"{history.last_step:,}", f"of {total:,} steps" if isinstance(total, int) else "steps")]
    values += [
        (text, (loss_name([history.window]) if name == "loss" else name) + details.get(name, ""))
        for name in SHOWN
        if (text := TEXTS[name](results))
    ]
    values.append((short_text(history.sums["tokens"]), f"tokens in {short_text(history.sums['samples'])} samples"))
    values.append((f"{results.skipped_steps:,}", "skipped steps"))
    values.append((duration(results.train_seconds), remaining(run)))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in values)
    return f"<ul class='tiles'>{items}</ul>\n"


def remaining(run: RunRecord) -> str:
    """Return the text below a run's training time: while the run goes on, also an estimate of the time left."""
    total, pace = run.about.get("total_steps"), run.history.mean("seconds")
    if not isinstance(total, int) or pace is None or run.state not in ("running", "stopping"):
        return "training"
    return f"training; {duration((total - run.history.last_step) * pace)} left"
