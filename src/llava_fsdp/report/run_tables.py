"""Build the parts of a run's page below the charts: answers, trained parts, differences from conf/, environment."""

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from llava_fsdp.config.command_line.tree import written
from llava_fsdp.report.charts.html import section, shorten_middle, table
from llava_fsdp.report.results import format_number, loss_name
from llava_fsdp.report.run_reader import RunRecord
from llava_fsdp.report.shown_answers import choose_answers
from llava_fsdp.runtime.files.scores_file import QUESTIONS, scores_text
from llava_fsdp.runtime.text.humanize import format_time, readable

MOST_STARTS = 50
MOST_ANSWERS = 100
MOST_EARLIER = 5
MOST_TEXT = 1200
"""Maximum number of characters of a question or an answer."""
MOST_ROWS = 1000
MOST_COMMAND = 20_000
Thumbnail = Callable[[str], str | None]
"""Returns the data: URL of a thumbnail for an image's path, or None."""


def answers(run: RunRecord, thumbnail: Thumbnail) -> Iterator[str]:
    """Yield, as HTML, the answers of the last validation that has any, each with earlier answers to the same question.
    `thumbnail`: returns the data: URL for an image's path, or None."""
    rows = [row for row in run.validations if row.get("answers")]
    if not rows:
        return
    shown, num_questions = choose_answers(rows[-1]["answers"], MOST_ANSWERS), rows[-1].get("questions")
    yield f"<h2>Sample answers, step {rows[-1]['step']:,}</h2>\n"
    if isinstance(num_questions, int):
        yield f"<p class='note'>{len(shown):,} of {num_questions:,}: wrong ones first, as many of every source.</p>\n"
    cut = rows[-1].get("thoughts_cut")
    if cut:
        yield f"<p class='note'>{cut:,} have no text: val.max_new_tokens ended their thought.</p>\n"
    yield "<div class='answers'>\n"
    for answer in shown:
        path = answer.get("picture")
        url = thumbnail(str(path)) if path else None
        missing = "image missing" if path else "no image"
        image = f"<img alt='' src='{url}'>" if url else f"<div class='nothing'>{missing}</div>"
        has_several_sources = len(rows[-1].get("sources") or {}) > 1
        texts = "".join(texts_of(answer if has_several_sources else {**answer, "source": None}, rows))
        yield f"<article>{image}<dl>{texts}</dl></article>\n"
    yield "</div>\n"


def texts_of(answer: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield an answer of validation as HTML, with its question, its reference and earlier answers. `rows`: all rows of
    validation.jsonl that have answers; the last row has this one."""
    references, score = answer.get("references"), answer.get("score")
    entries = [
        ("source", answer.get("source")),
        ("question", answer.get("question")),
        ("answer" + (f", score {score:.3g}" if isinstance(score, int | float) else ""), answer.get("answer")),
        ("reference", " | ".join(map(str, references)) if isinstance(references, list) else references),
        ("earlier answers", "\n".join(f"{step:,}: {text}" for step, text in earlier_answers(answer, rows)) or None),
    ]
    for name, text in entries:
        if text is not None:
            yield f"<dt>{escape(name)}</dt><dd>{escape(shorten_middle(str(text) or '(empty)', MOST_TEXT))}</dd>"


def earlier_answers(answer: dict[str, Any], rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return (step, text) of the latest MOST_EARLIER earlier answers to the same question. The first of equal answers
    in a row is returned. `rows`: all rows of validation.jsonl that have answers; the last row has `answer`."""
    key = answer.get("record"), answer.get("question")
    texts: list[tuple[int, str]] = []
    for row in rows[:-1]:
        for other in row["answers"]:
            if (other.get("record"), other.get("question")) == key:
                text = shorten_middle(str(other.get("answer")) or "(empty)", 200)
                if not texts or texts[-1][1] != text:
                    texts.append((row["step"], text))
    return texts[-MOST_EARLIER:]


def validation_sources(run: RunRecord) -> Iterator[str]:
    """Yield an HTML table of the last validation's loss and score by data source, if it has several."""
    row = run.validations[-1] if run.validations else {}
    if len(row.get("sources") or {}) < 2:
        return
    keys = {"label_tokens": ",", "loss": ".4f", "questions": ",", "score": ".1%"}
    lines = [
        [name, *(None if source_row.get(key) is None else format(source_row[key], form) for key, form in keys.items())]
        for name, source_row in [("all", row), *row["sources"].items()][:MOST_ROWS]
    ]
    score = f"score ({row['metric']})" if row.get("metric") else "score"
    yield section(
        f"Validation by source, step {row['step']:,}",
        table(["source", "label tokens", "loss", "questions", score], lines),
    )


def evaluations(run: RunRecord) -> Iterator[str]:
    """Yield an HTML table of the scores in results.json, which `llava-fsdp evaluate` has recorded, and of the tasks of
    lmms-eval in the last validation."""
    lines = [
        [entry["task"], entry["data"], entry.get("step"), entry.get("questions"), scores_text(entry["scores"])]
        for entry in run.evaluations[-MOST_ROWS:]
    ]
    row = run.validations[-1] if run.validations else {}
    for task, scores in (row.get("tasks") or {}).items():
        lines.append([f"lmms-eval {task}, in training", task, row["step"], scores.get(QUESTIONS), scores_text(scores)])
    if lines:
        yield section("Evaluations", table(["task", "data", "step", "questions", "scores"], lines))


def settings(run: RunRecord) -> Iterator[str]:
    """Yield HTML sections: what trains, data sources, memory, and the configuration."""
    trains = run.about.get("trains")
    parts = [section("What trains", table(["part", "trains", "frozen"], trains))] if trains else []
    yield columns(*parts, *sources(run), *memory(run))
    yield section("Recipe", *recipe(run))


def recipe(run: RunRecord) -> Iterator[str]:
    """Yield, as HTML, the keys of a run that differ from its recipe (the YAML files of its stage and model), and all
    keys."""
    about = run.about
    files = escape(f"stage={about.get('stage')} model={about.get('model')}")
    if about.get("recipe") is None:
        yield "<p class='note'>There are no recipe files for this stage and model to compare with.</p>"
    elif about["recipe"]:
        yield f"<p>Unlike the files of <code>{files}</code>:</p>"
        yield table(["key", "recipe", "this run"], about["recipe"][:MOST_ROWS])
    else:
        yield f"<p>As the files of <code>{files}</code> have it, to the last key.</p>"
    if about.get("unlike"):
        yield f"<p>Unlike LLaVA: {escape(str(about['unlike']))}</p>"
    if run.config:
        rows = [(key, written(value)) for key, value in run.config.items()][:MOST_ROWS]
        yield f"<details><summary>The whole configuration</summary>{table(['key', 'value'], rows)}</details>\n"


def columns(*sections: str) -> str:
    """Put HTML sections side by side; empty without sections."""
    return f"<div class='columns'>{''.join(sections)}</div>\n" if sections else ""


def sources(run: RunRecord) -> Iterator[str]:
    """Yield an HTML table of a run's data sources, if it has several: label tokens and mean loss of the last steps."""
    history = run.history
    if len(history.sources) < 2:
        return
    rows, total = [], max(1, sum(history.source_labels.values()))
    for name, _ in history.largest_sources(MOST_ROWS):
        labels = history.source_labels[name]
        rows.append([name, labels, f"{labels / total:.1%}", format_number(history.source_loss(name), ".4f")])
    yield section("Sources", table(["source", "label tokens", "share", loss_name([history.window])], rows))


def memory(run: RunRecord) -> Iterator[str]:
    """Yield an HTML table of the memory that was predicted for rank 0, and of the measured peak, if they are known."""
    at_rest, planned = run.about.get("at_rest"), run.about.get("planned_peak")
    if not at_rest:
        return
    rows = [[f"{name} between steps, planned", readable(value)] for name, value in at_rest.items()]
    rows += [["at the worst moment, planned", readable(planned)]] if isinstance(planned, int) else []
    if (peak := run.history.most("peak_memory_bytes")) is not None:
        what = "the most that the process held" if run.about.get("device") == "CPU" else "the most that was allocated"
        rows.append([f"{what}, measured", readable(peak)])
    yield section("Memory of rank 0", table(["what", "size"], rows))


def history_tables(run: RunRecord) -> Iterator[str]:
    """Yield HTML sections: environment, starts, numbers of samples, command, and skipped steps."""
    yield columns(*environment(run), *starts(run), *samples(run))
    if run.about.get("command"):
        yield section("Command", f"<pre>{escape(shorten_middle(str(run.about['command']), MOST_COMMAND))}</pre>")
    if run.history.skipped:
        named = ", ".join(f"{step:,}" for step in run.history.skipped)
        more = " and more" if run.history.skipped_steps > len(run.history.skipped) else ""
        yield section("Skipped steps", f"<p>Not finite, the weights stayed as they were: {named}{more}.</p>")


def environment(run: RunRecord) -> Iterator[str]:
    """Yield an HTML table of the software and the machines of the run's last start."""
    about = run.about
    if about.get("versions"):
        facts = {**about["versions"], **{key: about.get(key) for key in ("commit", "ranks", "nodes", "device")}}
        rows = [(key, str(value)) for key, value in facts.items() if value is not None]
        yield section("Environment", table(["what", "which"], rows))


def starts(run: RunRecord) -> Iterator[str]:
    """Yield an HTML table of the starts of a run, if it was started more than once to continue it."""
    if len(run.starts) > 1:
        rows = [[s["step"], format_time(s["time"]), s.get("ranks"), s.get("device")] for s in run.starts[-MOST_STARTS:]]
        note = f"<p class='note'>{len(run.starts):,} starts make this run; the charts mark them.</p>"
        yield section("Starts", note, table(["after step", "when", "ranks", "device"], rows))


def samples(run: RunRecord) -> Iterator[str]:
    """Yield an HTML table of samples that were truncated, skipped or without labels, if there are any."""
    counts = {name: int(run.history.sums[name]) for name in ("truncated", "skipped_records", "unlabelled")}
    if any(counts.values()):
        yield section("Samples", table(["what", "samples"], counts.items()))
