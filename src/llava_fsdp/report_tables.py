"""What stands below the charts of one training: sample answers, what trains, the recipe, where it ran."""

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from llava_fsdp.markup import shortened, table
from llava_fsdp.runs import Run
from llava_fsdp.words import moment, readable

MOST_STARTS = 50
MOST_ANSWERS = 12
MOST_TEXT = 1200
"""Characters of a question or an answer."""
MOST_ROWS = 1000
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
    """What trains, which recipe, on what."""
    about = run.about
    if about.get("trains"):
        yield "<h2>What trains</h2>" + table(["part", "trains", "frozen"], about["trains"])
    yield from sources(run)
    yield from memory(run)
    yield "<h2>Recipe</h2>"
    if about.get("recipe") is None:
        yield "<p class='note'>There are no recipe files for this stage and model to compare with.</p>"
    elif about["recipe"]:
        yield (
            f"<p>Unlike the files of stage={escape(str(about.get('stage')))} "
            f"model={escape(str(about.get('model')))}:</p>"
        )
        yield table(["key", "recipe", "this run"], about["recipe"])
    else:
        yield "<p>As the files of its stage and model have it, to the last key.</p>"
    if about.get("unlike"):
        yield f"<p>Unlike LLaVA: {escape(str(about['unlike']))}</p>"
    if run.config:
        rows = ((key, str(value)) for key, value in run.config.items())
        yield f"<details><summary>The whole configuration</summary>{table(['key', 'value'], rows)}</details>\n"


def sources(run: Run) -> Iterator[str]:
    history = run.history
    if len(history.sources) < 2:
        return
    rows = []
    for name, curve in history.sources.items():
        points = curve.points()
        labels = history.source_labels[name]
        share = labels / max(1, sum(history.source_labels.values()))
        rows.append([name, labels, f"{share:.1%}", f"{points[-1].mean:.4f}" if points else ""])
    yield "<h2>Sources</h2>" + table(["source", "label_tokens", "share", "last loss"], rows)


def memory(run: Run) -> Iterator[str]:
    at_rest, planned = run.about.get("at_rest"), run.about.get("planned_peak")
    if not at_rest:
        return
    rows = [[f"{name} at rest, planned", readable(value)] for name, value in at_rest.items()]
    rows += [["at the worst moment, planned", readable(planned)]] if isinstance(planned, int) else []
    if (peak := run.history.most("peak_memory_bytes")) is not None:
        what = "the most that the process held" if run.about.get("device") == "CPU" else "the most that was allocated"
        rows.append([f"{what}, measured", readable(peak)])
    yield "<h2>Memory of rank 0</h2>" + table(["what", "bytes"], rows)


def past(run: Run) -> Iterator[str]:
    """How it was started, and what went wrong on the way."""
    about = run.about
    versions = dict(about.get("versions") or {})
    if about.get("commit"):
        versions["commit"] = about["commit"]
    if versions:
        launch = {"ranks": about.get("ranks"), "nodes": about.get("nodes"), "device": about.get("device")}
        rows = ([key, str(value)] for key, value in {**versions, **launch}.items())
        yield "<h2>Environment</h2>" + table(["what", "which"], rows)
    if about.get("command"):
        yield f"<h2>Command</h2><pre>{escape(shortened(str(about['command']), 20_000))}</pre>\n"
    if len(run.starts) > 1:
        yield f"<h2>Starts</h2><p>{len(run.starts):,} starts make this run; the charts mark them.</p>"
        rows = [[int(s["step"]), moment(s["time"]), s.get("ranks"), s.get("device")] for s in run.starts[-MOST_STARTS:]]
        yield table(["after step", "when", "ranks", "device"], rows)
    history = run.history
    if history.skipped:
        named = ", ".join(f"{step:,}" for step in history.skipped)
        yield f"<h2>Skipped steps</h2><p>Not finite, the weights stayed as they were: {named}</p>"
    counted = {name: int(history.sums[name]) for name in ("truncated", "quarantined", "unlabelled")}
    if any(counted.values()):
        yield "<h2>Samples</h2>" + table(["what", "samples"], ([name, count] for name, count in counted.items()))
