"""One training as one page of HTML that needs nothing else and loads nothing. Imports no torch.

What comes from data, models and users is escaped.
"""

import time
from html import escape

from llava_fsdp.report.html import shortened
from llava_fsdp.report.run_charts import charts
from llava_fsdp.report.run_reader import Run
from llava_fsdp.report.run_tables import Thumbnail, answers, past, settings
from llava_fsdp.report.svg import ASSETS, shown
from llava_fsdp.runtime.humanize import duration, moment, readable

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def whole_page(title: str, body: str) -> str:
    style, script = ((ASSETS / name).read_text() for name in ("page.css", "charts.js"))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body>\n{body}"
        f"<script>\n{script}</script></body></html>\n"
    )


def report_page(run: Run, thumbnail: Thumbnail) -> str:
    """The page of one run."""
    parts = [header(run), tiles(run), charts(run), *answers(run, thumbnail), *settings(run), *past(run)]
    return whole_page(f"{run.name} · {run.state}", "".join(parts))


def header(run: Run) -> str:
    state, about = run.state, run.about
    what = [str(about[key]) for key in ("stage", "model", "strategy") if about.get(key)]
    if ranks := about.get("ranks"):
        nodes = about.get("nodes", 1)
        what.append(f"{ranks} x {about.get('device', '?')}" + (f" on {nodes} nodes" if nodes != 1 else ""))
    lines = [f"<p>{escape(' · '.join(what))}</p>"] if what else []
    if about.get("data"):
        lines.append(f"<p>{escape(shortened(str(about['data'])))}</p>")
    if run.reason:
        kind = "reason" if run.end is run.status else "note"
        lines.append(f"<p class='{kind}'>{escape(shortened(run.reason))}</p>")
    for name, count in run.unread.items():
        lines.append(f"<p class='note'>{count:,} lines of {escape(name)} could not be read and are left out.</p>")
    if lost := run.num_lost:
        lines.append(f"<p class='note'>{lost:,} of {run.history.step:,} steps have no row in metrics.jsonl.</p>")
    lines.append(f"<p class='note'>As of {moment(time.time())}.</p>")
    return (
        f"<header><h1>{escape(run.name)}<span class='state {escape(state)}'>{escape(state)}</span></h1>"
        f"{''.join(lines)}</header>\n"
    )


def tiles(run: Run) -> str:
    """The numbers that are asked for first."""
    history, found = run.history, []
    total = run.about.get("total_steps")
    found.append((f"{history.step:,}", f"of {total:,} steps" if isinstance(total, int) else "steps"))
    if history.loss is not None:
        found.append((f"{history.loss:.4f}", f"loss, last {len(history.recent)} steps"))
    if history.lowest_loss is not None:
        loss, step = history.lowest_loss
        found.append((f"{loss:.4f}", f"lowest loss, to step {step:,}"))
    for value, name in measured(run).values():
        found.append((value, name))
    for key, name in (("score", "score"), ("loss", "validation loss")):
        last = next((row for row in reversed(run.validations) if row.get(key) is not None), None)
        if last is not None:
            of = f"{name}, {last['metric']}" if key == "score" and last.get("metric") else name
            found.append((f"{last[key]:.4g}", f"{of}, step {last['step']:,}"))
    sums = history.sums
    found.append((shown(sums["tokens"]), f"tokens in {shown(sums['samples'])} samples"))
    skipped = history.skipped_steps
    found.append((f"{skipped:,}", "skipped steps"))
    found.append((duration(sums["seconds"]), remaining(run)))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in found)
    return f"<ul class='tiles'>{items}</ul>\n"


def measured(run: Run) -> dict[str, tuple[str, str]]:
    """How fast and how large, by name: the value in words, and what it is."""
    history, found = run.history, {}
    speed, mfu = history.mean("tokens_per_second"), history.mean("mfu")
    if speed is not None:
        found["speed"] = (shown(speed), "tokens a second, 2nd half")
    if mfu is not None:
        found["mfu"] = (f"{mfu:.1%}", "MFU, 2nd half")
    if (peak := history.most("peak_memory_bytes")) is not None:
        planned = run.about.get("planned_peak")
        plan = f", planned {readable(planned)}" if isinstance(planned, int) else ""
        found["memory"] = (readable(peak), f"peak memory of rank 0{plan}")
    if history.sums["seconds"] > 0:
        found["waits"] = (f"{history.sums['data_seconds'] / history.sums['seconds']:.1%}", "of the time waits for data")
    return found


def remaining(run: Run) -> str:
    total, pace = run.about.get("total_steps"), run.history.mean("seconds")
    if not isinstance(total, int) or pace is None or run.state not in ("running", "stopping"):
        return "in steps"
    return f"in steps; {duration((total - run.history.step) * pace)} left"
