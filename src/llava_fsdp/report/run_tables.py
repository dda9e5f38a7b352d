"""What stands below the charts of one training: sample answers, what trains, the recipe, where it ran."""

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from llava_fsdp.config.tree import written
from llava_fsdp.report.html import shortened, table
from llava_fsdp.report.run_reader import Run
from llava_fsdp.runtime.humanize import moment, readable

MOST_STARTS = 50
MOST_ANSWERS = 12
MOST_TEXT = 1200
"""Characters of a question or an answer."""
MOST_ROWS = 1000
MOST_COMMAND = 20_000
"""Characters."""
Thumbnail = Callable[[str], str | None]
"""A picture's path -> an address with the picture in it, or None."""


def answers(run: Run, thumbnail: Thumbnail) -> Iterator[str]:
    """What the model said at the last validation that asked it, and before of the same questions."""
    asked = [row for row in run.validations if row.get("answers")]
    if not asked:
        return
    last = asked[-1]
    yield f"<h2>Sample answers, step {last['step']:,}</h2><div class='answers'>\n"
    for answer in last["answers"][:MOST_ANSWERS]:
        address = thumbnail(str(answer["picture"])) if answer.get("picture") else None
        picture = "no picture" if not answer.get("picture") else "picture missing"
        shown_picture = f"<img alt='' src='{address}'>" if address else f"<div class='nothing'>{picture}</div>"
        yield f"<article>{shown_picture}<dl>{''.join(said(answer, asked))}</dl></article>\n"
    yield "</div>\n"


def said(answer: dict[str, Any], asked: list[dict[str, Any]]) -> Iterator[str]:
    references = answer.get("references")
    score = answer.get("score")
    found = [
        ("question", answer.get("question")),
        ("answer" + (f", score {score:.3g}" if isinstance(score, int | float) else ""), answer.get("answer")),
        ("reference", " | ".join(map(str, references)) if isinstance(references, list) else references),
    ]
    before = earlier(answer, asked)
    if before:
        found.append(("earlier answers", "\n".join(f"{step:,}: {text}" for step, text in before)))
    for name, text in found:
        if text is not None:
            yield f"<dt>{escape(name)}</dt><dd>{escape(shortened(str(text), MOST_TEXT))}</dd>"


def earlier(answer: dict[str, Any], asked: list[dict[str, Any]], most: int = 5) -> list[tuple[int, str]]:
    """The same question's answers before, where they changed: step and answer."""
    key = answer.get("record"), answer.get("question")
    found: list[tuple[int, str]] = []
    for row in asked[:-1]:
        for other in row["answers"]:
            if (other.get("record"), other.get("question")) == key:
                text = shortened(str(other.get("answer")), 200)
                if not found or found[-1][1] != text:
                    found.append((row["step"], text))
    return found[-most:]


def settings(run: Run) -> Iterator[str]:
    """What trains, by which recipe, and what that takes."""
    about = run.about
    trains = [about["trains"]] if about.get("trains") else []
    yield columns(
        *(section("What trains", table(["part", "trains", "frozen"], rows)) for rows in trains),
        *sources(run),
        *memory(run),
    )
    yield section("Recipe", "".join(recipe(run)))


def recipe(run: Run) -> Iterator[str]:
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


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def columns(*sections: str) -> str:
    return f"<div class='columns'>{''.join(sections)}</div>\n" if sections else ""


def sources(run: Run) -> Iterator[str]:
    history = run.history
    if len(history.sources) < 2:
        return
    rows = []
    for name, curve in history.largest_sources(MOST_ROWS):
        points = curve.points()
        labels = history.source_labels[name]
        share = labels / max(1, sum(history.source_labels.values()))
        rows.append([name, labels, f"{share:.1%}", f"{points[-1].mean:.4f}" if points else ""])
    yield section("Sources", table(["source", "label tokens", "share", "last loss"], rows))


def memory(run: Run) -> Iterator[str]:
    at_rest, planned = run.about.get("at_rest"), run.about.get("planned_peak")
    if not at_rest:
        return
    rows = [[f"{name} at rest, planned", readable(value)] for name, value in at_rest.items()]
    rows += [["at the worst moment, planned", readable(planned)]] if isinstance(planned, int) else []
    if (peak := run.history.most("peak_memory_bytes")) is not None:
        what = "the most that the process held" if run.about.get("device") == "CPU" else "the most that was allocated"
        rows.append([f"{what}, measured", readable(peak)])
    yield section("Memory of rank 0", table(["what", "bytes"], rows))


def past(run: Run) -> Iterator[str]:
    """Where and how it was started, and what went wrong on the way."""
    yield columns(*environment(run), *starts(run), *samples(run))
    if run.about.get("command"):
        yield section("Command", f"<pre>{escape(shortened(str(run.about['command']), MOST_COMMAND))}</pre>")
    if run.history.skipped:
        named = ", ".join(f"{step:,}" for step in run.history.skipped)
        more = " and more" if run.history.skipped_steps > len(run.history.skipped) else ""
        yield section("Skipped steps", f"<p>Not finite, the weights stayed as they were: {named}{more}.</p>")


def environment(run: Run) -> Iterator[str]:
    about = run.about
    if about.get("versions"):
        known = {**about["versions"], **{key: about.get(key) for key in ("commit", "ranks", "nodes", "device")}}
        rows = [(key, str(value)) for key, value in known.items() if value is not None]
        yield section("Environment", table(["what", "which"], rows))


def starts(run: Run) -> Iterator[str]:
    if len(run.starts) > 1:
        found = [[s["step"], moment(s["time"]), s.get("ranks"), s.get("device")] for s in run.starts[-MOST_STARTS:]]
        note = f"<p class='note'>{len(run.starts):,} starts make this run; the charts mark them.</p>"
        yield section("Starts", note + table(["after step", "when", "ranks", "device"], found))


def samples(run: Run) -> Iterator[str]:
    counted = {name: int(run.history.sums[name]) for name in ("truncated", "skipped_records", "unlabelled")}
    if any(counted.values()):
        yield section("Samples", table(["what", "samples"], counted.items()))
