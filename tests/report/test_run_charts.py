"""What the charts and the answers of a run's page hold, before they are HTML."""

import re
from pathlib import Path
from typing import Any

import pytest
from imagined import imagine

from llava_fsdp.report.charts import svg
from llava_fsdp.report.charts.downsample import Point
from llava_fsdp.report.charts.svg import Chart, Line, draw
from llava_fsdp.report.run_charts import charts_of
from llava_fsdp.report.run_reader import RunRecord, read_run
from llava_fsdp.report.run_tables import answers, validation_sources
from llava_fsdp.report.shown_answers import choose_answers

SOURCES = tuple("abcdefghijklmn")


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return read_run(imagine(tmp_path / "run", 120, SOURCES))


def test_restarts_are_marked(run: RunRecord) -> None:
    """The latest, and no first start."""
    run.starts = [{"step": step} for step in (0, 30, 7, 7)]
    assert next(iter(charts_of(run))).marks == [7, 30]
    run.starts = [{"step": step} for step in range(0, 400, 2)]
    assert {tuple(chart.marks) for chart in charts_of(run)} == {tuple(range(200, 400, 2))}


def test_the_largest_sources_have_curves(run: RunRecord) -> None:
    """As long as there is room on the page, also with all their points."""
    run.history.source_labels = {name: number for number, name in enumerate(SOURCES)}
    charts = {chart.title: chart for chart in charts_of(run)}
    found = charts["Loss by source"]
    assert [line.name for line in found.lines] == list(SOURCES[2:]) and " 2 more are" in found.note
    assert {len(line.points) for line in found.lines} == {120}
    assert [line.name for line in charts["Validation loss"].lines] == ["all", *SOURCES[:12]]


def test_curves_share_the_points_of_a_page(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "PAGE_POINTS", 1000)
    curves = [line for chart in charts_of(run) for line in chart.lines if not line.dots]
    assert len(curves) > 20 and sum(len(line.points) for line in curves) <= 1000


def test_memory_is_in_gib_beside_the_planned(run: RunRecord) -> None:
    run.starts[-1]["planned_peak"] = 3 << 29
    charts = {chart.title: chart for chart in charts_of(run)}
    (line,) = charts["Peak memory"].lines
    assert line.points[0].mean == 61_000_001_000 / (1 << 30)
    assert charts["Peak memory"].level == ("planned", 1.5) and charts["Loss"].level is None


def test_answers_of_the_last_validation_with_the_earlier_ones(run: RunRecord) -> None:
    """Of equal answers one after the other, the first; at most five; and no image where there is none."""
    texts = ["a", "b", "b", "c", "d", "", "a", "b", "now"]
    asked = {"record": "r", "question": "what?", "picture": "gone.jpg", "references": ["x", "y"], "score": 1}
    run.validations = [
        {
            "step": 1000 * step,
            "answers": [{"record": "other", "question": "what?", "answer": "z"}, asked | {"answer": t}],
        }
        for step, t in enumerate(texts, start=1)
    ]
    other, page = "".join(answers(run, lambda path: None)).split("<article>")[1:]
    assert ("no image" in other, "image missing" in other) == (True, False)
    assert ("no image" in page, "image missing" in page) == (False, True)
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page, re.DOTALL) == [
        ("question", "what?"),
        ("answer, score 1", "now"),
        ("reference", "x | y"),
        ("earlier answers", "4,000: c\n5,000: d\n6,000: (empty)\n7,000: a\n8,000: b"),
    ]


def answered(source: str | None, scores: list[float]) -> list[dict[str, Any]]:
    return [{"source": source, "record": f"{source} {n}", "score": score} for n, score in enumerate(scores)]


def test_wrong_answers_of_every_source_are_shown_first() -> None:
    """The sources take turns; of each, wrong answers come first and are spread over it; right ones fill the rest."""
    many = answered("a", [0.0] * 16)
    assert [own["record"] for own in choose_answers(many, 4)] == ["a 0", "a 4", "a 8", "a 12"]
    mixed = answered("a", [1, 1, 0.3, 1, 0]) + answered("b", [1, 1]) + answered(None, [0, 1, 1, 0, 1, 1, 1])
    assert [own["record"] for own in choose_answers(mixed, 3)] == ["a 4", "b 0", "None 0"]
    seven = ["a 0", "a 2", "a 4", "b 0", "b 1", "None 0", "None 3"]
    assert [own["record"] for own in choose_answers(mixed, 7)] == seven
    assert choose_answers(mixed, 99) == mixed and choose_answers(mixed, 0) == [] == choose_answers([], 3)
    assert choose_answers(mixed, 5) == choose_answers(list(mixed), 5)


def test_a_page_has_loss_and_score_of_every_validation_source(run: RunRecord) -> None:
    own = {"caps": {"loss": 2.0, "label_tokens": 30, "score": 0.25, "questions": 4},
           "vqa": {"loss": None, "label_tokens": 0, "score": None, "questions": 0}}  # fmt: skip
    whole = {"loss": 1.5, "label_tokens": 30, "score": 0.25, "questions": 4, "metric": "exact", "step": 10}
    wrong = {"source": "caps", "record": "r", "question": "q", "answer": "a", "references": ["b"], "score": 0.0}
    run.validations = [{**whole, "sources": own, "answers": [wrong]}]
    charts = {chart.title: chart for chart in charts_of(run)}
    assert [line.name for line in charts["Validation score"].lines] == ["score", "caps", "vqa"]
    assert [point.mean for point in charts["Validation score"].lines[1].points] == [0.25]
    table = "".join(validation_sources(run))
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)]
    assert rows[1:] == [
        ["all", "30", "1.5000", "4", "25.0%"],
        ["caps", "30", "2.0000", "4", "25.0%"],
        ["vqa", "0", "", "0", ""],
    ]
    assert "<dt>source</dt><dd>caps</dd>" in "".join(answers(run, lambda path: None))
    del own["vqa"]
    assert not [*validation_sources(run)], "one source is the total"
    assert "<dt>source</dt>" not in "".join(answers(run, lambda path: None))


def test_a_band_lies_between_the_least_and_the_greatest_values() -> None:
    """A curve of these values alone is drawn at the same places."""
    values = [(1, 2.0, 1.5, 4.0), (3, 3.0, 3.0, 5.0), (4, 2.5, 2.0, 2.5)]
    ends = [
        [Point(step, own, own, own) for step, own in zip((1, 3, 4), one, strict=True)]
        for one in ((4.0, 5.0, 2.5), (1.5, 3.0, 2.0))
    ]
    chart = draw(Chart("t", [Line("a", [Point(*own) for own in values]), *(Line("b", end, 1) for end in ends)]))
    (band,) = set(re.findall(r"class='band c0' d='M(.*?)Z'", chart)[:1])
    most, least = re.findall(r"class='line c1' d='M(.*?)'", chart)[:2]
    assert band.split("L") == [*most.split("L"), *reversed(least.split("L"))]


@pytest.mark.parametrize(("number", "name"), [(7, "c7"), (8, "c0 dashed"), (15, "c7 dashed")])
def test_one_value_is_a_dot_and_later_lines_are_dashed(number: int, name: str) -> None:
    chart = draw(Chart("t", [Line("a", [Point(5, 1.0, 1.0, 1.0)], number)]))
    assert f"<circle class='{name}' r='3'" in chart and "<path class='band" not in chart
    assert '"along": "step"' in chart or '"along":"step"' in chart
