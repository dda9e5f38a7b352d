"""Curves in bounded memory, and the charts that are drawn from them."""

import json
import math
import random
import re
import time
from pathlib import Path

import pytest
from imagined import imagine, row

from llava_fsdp.report.charts.downsample import Curve, Point, RunHistory
from llava_fsdp.report.charts.html import inline_json, table
from llava_fsdp.report.charts.svg import (
    Bar,
    Chart,
    Line,
    digits,
    draw,
    draw_bars,
    extent,
    round_digits,
    short_text,
    ticks,
)
from llava_fsdp.report.run_page import report_page
from llava_fsdp.report.run_reader import read_run


def curve_of(values: dict[int, float], most: int = 1000) -> Curve:
    curve = Curve(most)
    for step, value in values.items():
        curve.add(step, value)
    return curve


@pytest.mark.parametrize("steps", [1001, 5000, 20_000])
def test_a_long_curve_is_bounded_and_loses_no_spike(steps: int) -> None:
    curve = curve_of({step: 100.0 if step == 777 else step / steps for step in range(1, steps + 1)})
    points = curve.points()
    assert 500 <= len(points) <= 1000 and max(p.most for p in points) == 100.0
    assert points[0].step < curve.width + 1 and steps - curve.width <= points[-1].step <= steps
    assert [p.step for p in points] == sorted(p.step for p in points)
    assert sum(stretch.count for stretch in curve.stretches.values()) == steps
    assert len(curve.points(100)) <= 100 and max(p.most for p in curve.points(100)) == 100.0


def test_a_short_curve_is_every_value_and_fewer_points_leave_it_as_it_is() -> None:
    curve = curve_of({step: step / 2 for step in range(1, 101)})
    assert len(curve.points(9)) <= 9
    assert curve.points() == [(s, s / 2, s / 2, s / 2) for s in range(1, 101)]


def test_a_curve_depends_on_its_steps_alone() -> None:
    """One that is read from the file after a resume is the one that was kept: stretches begin at fixed steps."""
    order = list(range(1, 301))
    random.Random(1).shuffle(order)
    whole, shuffled = (curve_of({s: float(s % 17) for s in steps}, most=64) for steps in (range(1, 301), order))
    assert shuffled.points() == whole.points()


def test_missing_values_are_not_points() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, None, float("nan"), float("inf"), 2.0]):
        curve.add(step, value)
    assert [p.mean for p in curve.points()] == [1.0, 2.0]


def test_a_history_adds_up() -> None:
    dice, history = random.Random(0), RunHistory()
    rows = [row(step, dice, ("a", "b")) for step in range(1, 1001)]
    for one in rows:
        history.add(one)
    losses = [one["loss"] for one in rows if one["loss"] is not None]
    assert history.last_step == history.num_rows == 1000 and history.sums["tokens"] == 90_000 * 1000
    assert history.skipped == [997] and history.skipped_steps == 1
    assert history.loss is not None and history.loss == pytest.approx(sum(losses[-20:]) / 20, rel=1e-12)
    assert history.lowest_loss is not None and history.lowest_loss[0] <= history.loss
    assert history.source_labels == {"a": 900_000, "b": 900_000}


def test_lowest_loss_is_that_of_a_whole_window() -> None:
    """With the last of its steps; of fewer steps, their mean. A step weighs as its label tokens do."""
    history = RunHistory(window=2)
    seen = []
    for step, (loss, labels) in enumerate([(1.0, 1), (5.0, 1), (1.0, 3), (None, 9), (5.0, 1), (1.0, 1)], start=11):
        history.add({"step": step, "loss": loss, "label_tokens": labels, "skipped": loss is None})
        seen.append((history.loss, history.lowest_loss))
    assert seen == [
        (1.0, (1.0, 11)), (3.0, (3.0, 12)), (2.0, (2.0, 13)), (2.0, (2.0, 13)), (2.0, (2.0, 13)), (3.0, (2.0, 13)),
    ]  # fmt: skip
    assert (history.skipped, history.skipped_steps, history.num_rows) == ([14], 1, 6)
    assert RunHistory().lowest_loss is None and RunHistory().loss is None


def test_means_are_of_the_second_half_and_the_largest_sources_first() -> None:
    history = RunHistory(window=3)
    for step in range(1, 6):
        sources = {"a": {"loss": float(step), "label_tokens": 2}, "b": {"loss": 1.0, "label_tokens": 3}}
        sources |= {"c": {"loss": 7.0, "label_tokens": 1}} if step < 3 else {}
        history.add({"step": step, "loss": 1.0, "mfu": float(step), "sources": sources})
    assert (history.mean("mfu"), history.most("mfu"), history.mean("hfu")) == (4.0, 5.0, None)
    assert (history.source_loss("a"), history.source_loss("b"), history.source_loss("c")) == (4.0, 1.0, None)
    assert history.source_labels == {"a": 10, "b": 15, "c": 2}
    assert [name for name, _ in history.largest_sources(2)] == ["a", "b"]
    assert [name for name, _ in history.largest_sources(1)] == ["b"]


@pytest.mark.parametrize(
    "broken", [None, [], {}, {"step": "1"}, {"step": True}, {"step": 1, "loss": "low"}, {"step": 1, "sources": [1]},
               {"step": 1, "sources": {"a": 3}}, {"step": -1}, {"step": 1, "loss": 2.0, "tokens": "many"}],
)  # fmt: skip
def test_a_bad_row_is_refused_whole(broken: object) -> None:
    history = RunHistory()
    with pytest.raises(ValueError):
        history.add(broken)  # pyright: ignore[reportArgumentType]
    assert history == RunHistory()


def test_a_hundred_thousand_steps_are_a_small_page(tmp_path: Path) -> None:
    run = read_run(imagine(tmp_path / "run", 60, tuple("abcdefghijklmnop")))
    for step in range(61, 100_001, 10):
        for name, curve in run.history.curves.items():
            curve.add(step, (step * 37 % 1009) + len(name) / 7)
        for curve in run.history.sources.values():
            curve.add(step, (step * 31 % 1013) / 7)
    started = time.process_time()
    page = report_page(run, lambda path: None)
    assert len(page) < 3_000_000 and time.process_time() - started < 5


def test_ticks_and_values_are_short() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.013, 0.021, 5) == pytest.approx([0.014, 0.016, 0.018, 0.02])
    assert ticks(3, 3, 6) == [3] and len(ticks(0, 1e-12, 6)) <= 7
    found = [short_text(v) for v in (0, 0.00002, 1.25, 20_000, 61e9, -3)]
    assert found == ["0", "2e-5", "1.25", "20k", "61G", "-3"] and short_text(0.485, share=True) == "48.5 %"
    assert digits([1.0, 1.0]) == 4 == digits([0, 10]) and digits([1.0, 1.0001, 1.0002]) == 6
    found = [short_text(v) for v in (9999, 10_000, -12_346, 1e6, 2e12, 0.001, 0.00099, 1.23456)]
    assert found == ["9999", "10k", "-12.35k", "1M", "2T", "0.001", "9.9e-4", "1.235"]
    close = [1.2e-4, 1.21e-4, 1.22e-4], [1e-5, 1.00001e-5, 1.00002e-5]
    found = [[short_text(v, digits=digits(values)) for v in values] for values in close]
    assert found == [["1.2e-4", "1.21e-4", "1.22e-4"], ["1e-5", "1.00001e-5", "1.00002e-5"]]
    assert [round_digits(v) for v in (3.0, 1234567.89, 2e7, 0.1234567)] == [3, 1234567.9, 2e7, 0.123457]


def test_few_points_may_reach_out_of_a_chart() -> None:
    """Three of a hundred bands, but no mean."""
    points = [Point(n, 1.0, 0.5, 9.0 if n < 3 else 2.0) for n in range(100)]
    assert extent(Line("a", points)) == (0.5, 2.0)
    assert extent(Line("a", points[2:32])) == (0.5, 9.0), "one of thirty is more than 3 %"
    assert extent(Line("a", [*points, Point(100, 20.0, 0.1, 20.0)])) == (0.5, 20.0)


def test_a_chart_shows_its_level_and_the_marks_between_its_ends() -> None:
    points = [Point(n, 5.0, 5.0, 5.0) for n in (10, 20)]
    chart = Chart("t", [Line("a", points)], marks=[9, 10, 15, 20, 21], level=("planned", 10.0))
    figure = draw(chart)
    assert re.findall(r"started after step (\d+)", figure) == ["10", "15", "20"]
    (height,) = re.findall(r"class='level' d='M68 ([\d.]+)H630'", figure)
    (line,) = re.findall(r"class='line c0' d='M68.0 ([\d.]+)L630.0 ", figure)
    assert 10 < float(height) < float(line) < 216, "above the line, and both inside"
    values = json.loads(re.findall(r"<script type='application/json'>(.*?)</script>", figure)[0])
    assert (values["marks"], values["level"]) == (chart.marks, ["planned", 10.0])


def test_nothing_ends_a_script_or_a_cell() -> None:
    assert "</script" not in inline_json(["</script><script>alert(1)"]) and json.loads(inline_json(["<&"])) == ["<&"]
    assert "<b>" not in table(["<b>", "n"], [["<b>", 3]])


@pytest.mark.parametrize("value", [2e-5, 1e-3, 3.0])
def test_values_that_differ_by_rounding_are_a_flat_line(value: float) -> None:
    """As the means of a constant learning rate, some of which are one rounding off."""
    means = [value, value, math.nextafter(value, 1e9), value]
    figure = draw(Chart("Learning rate", [Line("lr", [Point(n, m, m, m) for n, m in enumerate(means)])]))
    (path,) = re.findall(r"class='line c0' d='M([^']*)'", figure)
    assert len({point.split()[1] for point in path.split("L")}) == 1


def test_charts_without_a_value_are_not_drawn() -> None:
    assert draw(Chart("t", [Line("a", [])])) == ""
    assert draw_bars("t", "", []) == draw_bars("t", "", [Bar("a", [0, 0], ["", ""])]) == ""


@pytest.mark.parametrize("stacked", [False, True])
def test_bars_have_heights_by_their_values(stacked: bool) -> None:
    figure = draw_bars("t", "ms", [Bar("<a>", [1, 3], ["<x>", "y"], "4 ms")], ["p", "q"], stacked)
    large_window, _ = re.findall(r"<svg.*?</svg>", figure)
    small, large = ({k: float(v) for k, v in re.findall(r"(x|y|width|height)='([\d.]+)'", rect)}
                    for rect in re.findall(r"<rect[^>]*>", large_window))  # fmt: skip
    assert large["height"] == pytest.approx(3 * small["height"], abs=0.2)
    if stacked:
        assert large["x"] == small["x"] and large["y"] + large["height"] == pytest.approx(small["y"], abs=0.2)
    else:
        assert large["x"] == pytest.approx(small["x"] + small["width"], abs=0.2)
    assert "&lt;a&gt;" in figure and "&lt;x&gt;" in figure and "4 ms" in figure and figure.count("<li") == 2
