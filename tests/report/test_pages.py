"""All kinds of pages in a browser, in narrow and wide windows, light and dark; what they mark, hide and name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from imagined import imagine, lines

from llava_fsdp.data.images.thumbnails import tile_thumbnail
from llava_fsdp.plan.planner import Planner
from llava_fsdp.plan.show import scaling_page
from llava_fsdp.plan.time.hardware import machine_named
from llava_fsdp.plan.workload import Samples
from llava_fsdp.report import main as report
from llava_fsdp.report.charts.downsample import Point, RunHistory
from llava_fsdp.report.charts.html import table
from llava_fsdp.report.charts.svg import Chart, Line, draw
from llava_fsdp.report.compare_page import best_of, comparison_page
from llava_fsdp.report.dataset_page import badness, dataset_page, greatest_counts
from llava_fsdp.report.examples import Example, Gap, Images, Text
from llava_fsdp.report.profile.profile_page import profile_page
from llava_fsdp.report.profile.profile_trace import CATEGORIES, Times
from llava_fsdp.report.results import read_results
from llava_fsdp.report.run_page import header, tiles
from llava_fsdp.report.run_reader import RunRecord, read_run, runs_in
from llava_fsdp.runtime.text.humanize import duration
from llava_fsdp.sweep import results as sweep_results
from llava_fsdp.sweep.job import Job, read_jobs

LONG = "a_name_without_a_space_" * 6
KINDS = ("run", "comparison", "sweep", "dataset", "dataset, nothing cut", "profile", "plan")

CLIPPED = """() => {
  const found = [], told = (what, node) => found.push(`${what}: ${node.textContent.trim().slice(0, 60)}`);
  const tables = [...document.querySelectorAll("table")];
  const scrolling = new Set(tables.filter((table) => getComputedStyle(table).overflowX === "auto"));
  const scrolls = (node) => scrolling.has(node.closest("table"));
  const ground = getComputedStyle(document.body).backgroundColor;
  const shown = (node) => node.getClientRects().length && node.getBoundingClientRect().width;
  for (const node of document.querySelectorAll("body *:not(svg *):not(script)")) {
    if (!shown(node) || ![...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) continue;
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (!scrolls(node) && (box.left < 0 || box.right > innerWidth)) told("outside of the window", node);
    if (style.display !== "inline" && node.scrollWidth > node.clientWidth + 1 && !scrolls(node))
      told("wider than its box", node);
    if (style.color === ground) told("of the ground's colour", node);
  }
  for (const item of document.querySelectorAll(".legend li")) {
    const text = document.createRange();
    text.selectNodeContents(item);
    if (shown(item) && text.getClientRects()[0].left < item.getBoundingClientRect().left + 8)
      told("below its mark, not beside it", item);
  }
  for (const svg of document.querySelectorAll("svg")) {
    if (!shown(svg)) continue;
    const box = svg.getBoundingClientRect(), below = [];
    for (const text of svg.querySelectorAll("text")) {
      const own = text.getBoundingClientRect();
      if (own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1)
        told("outside of its chart", text);
      if (own.height < 9) told("too small to read", text);
      if (text.getAttribute("text-anchor") === "middle") {
        if (below.some((b) => b.left < own.right && own.left < b.right && b.top < own.bottom && own.top < b.bottom))
          told("over another", text);
        below.push(own);
      }
    }
  }
  return found;
}"""
"""Script that lists the texts of a page that are cut off, cannot be read or lie on each other."""


def job_of(folder: Path, number: int, lr: str, value: float | None, **more: Any) -> None:
    job = Job(number=number, overrides=[f"optim.lr={lr}"], folder=str(folder), value=value, **more)
    job.numbers = read_results(folder, job.last_steps)
    job.write()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three jobs, of which the first and the last have equal curves."""
    folder = tmp_path_factory.mktemp("sweep")
    for number, (lr, seed) in enumerate((("1.0e-05", 1), ("2.0e-05", 2), ("1.0e-05", 1))):
        run = imagine(folder / str(number), 60, config=f"optim:\n  lr: {lr}\n", seed=seed)
        job_of(run, number, lr, read_results(run, 20).loss, status="done", exit_code=0)
    return folder


@pytest.fixture(scope="module")
def pages(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind, with long names and many columns."""
    folder = tmp_path_factory.mktemp("pages")
    run = imagine(folder / LONG, 120, ("vqa", "captions", LONG), "failed", (0, 60))
    texts = {
        "dataset": dataset_page(dataset_report(cut=True), EXAMPLES),
        "dataset, nothing cut": dataset_page(dataset_report(cut=False), []),
        "profile": profile_page(times(), "steps 10 to 12 of this start, rank 0", 10),
    }
    paths = {name: folder / f"{name}.html" for name in KINDS}
    for name, text in texts.items():
        paths[name].write_text(text)
    report.write([str(run), f"out={paths['run']}"])
    report.write([str(run), str(sweep / "0"), f"out={paths['comparison']}"])
    report.write([str(sweep), f"out={paths['sweep']}"])
    cfg = SimpleNamespace(model=SimpleNamespace(name="llava_v1_5_13b"), global_batch_size=128)
    machine, samples = machine_named("a100-80gb", 8), Samples(841, 1, 180, 200, "guessed", 541)
    planner = cast(Planner, SimpleNamespace(cfg=cfg, machine=machine, samples=samples))
    scaling_page.write_page(scaling(), planner, paths["plan"])
    return paths


def example(*parts: Text | Images | Gap, error: str = "") -> Example:
    return Example(LONG, f"data/{LONG}.json", 7, 6, LONG, 2048, 300, parts, 1000, 20, 1, error)


URL = tile_thumbnail(np.zeros((3, 336, 336), dtype=np.uint8), 160)
WORDS = [
    (text, False) for text in ("a", " word", " and", f" {LONG}", "\u23ce\n\n\t", " \u0627\u0644", " <b>&amp;")
] * 40
EXAMPLES = [
    example(
        Text("system, human", False, 281, [("<s>", True), *WORDS]),
        *(Images(f"image {n}", f"{LONG}.jpg", 576, "tile", [URL] * n) for n in (1, 5, 37)),
        Text("gpt", True, 282, [*WORDS, (f"<|{LONG}|>", True), ("</s>", True)]),
        Gap(2000, 3, 4),
        Images("video 1", LONG, 6273, "frame", [], f"Not shown: {LONG}"),
        Text("", False, 280, WORDS),
    ),
    example(error=f"{LONG} does not exist"),
]


def dataset_report(cut: bool) -> dict[str, Any]:
    source = {
        "name": LONG, "file": f"data/{LONG}.json", "images": None, "records": 2000, "left_out": 3, "text_only": 4,
        "pictures": 2500, "tokens": 1_600_000, "median": 700, "longest": 2048, "label_tokens": 300_000,
        "label_weight": 2e5,
        "tiles": 2500, "image_tokens": 1_440_000, "problems": {kind: 3 for kind in ("image_missing", LONG, "url", "a")},
        "taught": {"answers": 2100, "proven": 2000, "split": 7, "thought": 11, "calls": 0, "text": 299_000},
    }  # fmt: skip
    files = (
        [source | {"file": f"data/{LONG}/{n}.json", "left_out": n == 1200} for n in range(1300)] if cut else [source]
    )
    kind = {
        "records": 400,
        "kept": False,
        "meaning": "the image cannot be read, so the record is skipped",
        "not_shown": 100,
    }
    first = {"source": LONG, "line": 7, "index": None, "id": "r7", "reason": f"data/{LONG}.jpg is not a file"}
    rows = [first | {"id": f"r{n}"} for n in range(300)]
    lost = {name: 0 for name in ("records_cut", "positions_lost", "label_tokens_lost", "left_without_labels")}
    return {
        "records": 2000, "kept": 1997, "samples": 2010, "left_out": {"wrong": 3, "too_long": 0},
        "examined": {"summary": "3,003 of 5,000,000 images"} if cut else None,
        "settings": {"data.max_length": 2048, "data.template": "v1", "model": f"{LONG} + clip"},
        "sources": [source],
        "files": files,
        "lengths": {
            "samples": 1997, "mean": 812.5, "percentiles": {"50": 700, "95": 1900, "100": 2300},
            "histogram": [{"from": n, "to": n + 99, "records": n // 10 if n > 300 else 0} for n in range(0, 2400, 100)],
        },
        "truncation": [
            {"max_length": n, **lost, **({"records_cut": 900 // at} if cut else {})}
            for at, n in enumerate((512, 1024, 2048, 4096), start=1)
        ],
        "problems": {"image_missing": {**kind, "first": rows}} if cut else {},
        "unread_keys": {"a": {f"messages[].{'long' * 20}": 12}} if cut else {},
    }  # fmt: skip


def times() -> Times:
    steps = [{name: 0.01 * (number + place) for place, name in enumerate(CATEGORIES)} for number in range(1, 4)]
    return Times(False, steps, [(f"aten::{LONG}", 0.3), ("aten::mm", 0.2)])


def scaling() -> list[dict[str, Any]]:
    return [
        {
            "nodes": nodes, "sharding": sharding, "activation_checkpointing": "selective", "fits": True,
            "tokens_per_second": 16652.4197 * nodes * share, "step_seconds": 6.4678 / nodes,
            "communication_seconds": 0.7853, "exposed_seconds": 0.0,
        }
        for sharding, share in (("zero3", 1), ("hybrid", 0.99))
        for nodes in (1, 2, 4, 8)
    ]  # fmt: skip


@pytest.fixture
def shown(browser: Any) -> Iterator[Any]:
    """An empty page of the browser's."""
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_every_window(kind: str, pages: dict[str, Path], shown: Any) -> None:
    url, said = pages[kind].resolve().as_uri(), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda request: said.append(request.url) if request.url != url else None)
    grounds = set()
    for width in (1280, 390):
        shown.set_viewport_size({"width": width, "height": 900})
        shown.goto(url)
        shown.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        for scheme in ("light", "dark"):
            shown.emulate_media(color_scheme=scheme)
            assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, scheme)
            assert shown.evaluate(CLIPPED) == [], (width, scheme)
            assert shown.locator("header .kind").inner_text() == f"llava-fsdp · {kind.partition(',')[0]}"
            grounds.add(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert said == [] and len(grounds) == 2


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The texts of the first table below a heading, row by row."""
    (found,) = re.findall(rf"<h2>{heading}</h2>.*?<table>(.*?)</table>", page, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>([^<]*)</t", row) for row in re.findall(r"<tr.*?</tr>", found, re.DOTALL)]


def test_a_loss_has_one_name_and_one_value(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the terminal after a sweep, in its files and on the pages of the sweep, of several runs and of one."""
    name, loss = "loss of last 20 steps", read_results(sweep / "1", 20).loss
    rows = [json.loads(line) for line in (sweep / "1" / "metrics.jsonl").read_text().splitlines()][-20:]
    assert loss == pytest.approx(sum(row["loss"] for row in rows) / 20, rel=1e-12)
    shown = f"{loss:.4f}"
    jobs = read_jobs(sweep)
    sweep_results.write_results(sweep, jobs)
    assert json.loads((sweep / "results.json").read_text())["jobs"][1]["numbers"]["loss"] == loss
    sweep_results.print_results(jobs)
    printed = capsys.readouterr().out
    assert shown in next(line for line in printed.splitlines() if line.startswith("│ 1"))
    assert f"best by {name}: job " in printed
    runs = [str(sweep / str(number)) for number in range(2)]
    alone, both = (report.write([*words, f"out={sweep / 'x.html'}"]).read_text() for words in (runs[1:], runs))
    for page, number in (((sweep / "report.html").read_text(), 2), (both, 2)):
        head, *results = rows_of(page, "Results")
        assert results[number - 1][head.index(name)] == shown
    assert f"<b>{shown}</b><span>{name}</span>" in alone


def test_the_loss_of_a_source_is_the_mean_of_the_same_steps(tmp_path: Path) -> None:
    rows = [
        {"step": step, "loss": float(step), "label_tokens": 4,
         "sources": {"a": {"loss": step - 1.0, "label_tokens": 1}, "b": {"loss": step + 1.0, "label_tokens": 3}}}
        for step in range(1, 31)
    ]  # fmt: skip
    run = imagine(tmp_path / "run", 3)
    lines(run / "metrics.jsonl", rows)
    head, *sources = rows_of(report.write([str(run)]).read_text(), "Sources")
    assert {row[0]: row[head.index("loss of last 20 steps")] for row in sources} == {"a": "19.5000", "b": "21.5000"}
    assert [row[:3] for row in sources] == [["a", "30", "25.0%"], ["b", "90", "75.0%"]]


def test_results_at_the_top_of_a_page(tmp_path: Path) -> None:
    row = {"label_tokens": 1, "tokens": 500, "samples": 3, "seconds": 4.0, "data_seconds": 1.0, "mfu": 0.25}
    run = RunRecord(tmp_path, "run", RunHistory(window=3), status={"status": "running"})
    for step, loss in enumerate((4.0, 2.0), start=1):
        run.history.add({"step": step, "loss": loss, **row, "peak_memory_bytes": 3 << 30, "tokens_per_second": 125.0})
    run.starts = [{"step": 0, "total_steps": 32, "planned_peak": 4 << 30}]
    run.validations = [
        {"step": 1, "loss": 1.5, "score": 0.5, "metric": "exact"}, {"step": 2, "loss": 1.75, "score": 0.25},
    ]  # fmt: skip

    def found() -> list[tuple[str, str]]:
        return re.findall(r"<li><b>(.*?)</b><span>(.*?)</span>", tiles(run))

    assert found() == [
        ("2", "of 32 steps"), ("3.0000", "loss of last 3 steps, 2 so far"), ("3.0000", "lowest loss, to step 2"),
        ("1.7500", "last val loss, step 2"), ("1.5000", "lowest val loss"), ("0.5000", "best val score, exact"),
        ("125", "tokens/s, 2nd half"), ("25.0%", "MFU, 2nd half"), ("3 GiB", "memory, peak of rank 0, planned 4 GiB"),
        ("25.0%", "waits for data, share of the time"), ("1000", "tokens in 6 samples"), ("0", "skipped steps"),
        (duration(8), f"training; {duration(120)} left"),
    ]  # fmt: skip
    run.status = {"status": "done"}
    run.history.add({"step": 3, "loss": 1.0, **row, "skipped": True})
    assert dict(found())[duration(12)] == "training" and ("1", "skipped steps") in found()
    assert ("2.3333", "loss of last 3 steps") in found()
    for nodes, words in ((1, ">16 x H100<"), (2, ">16 x H100 on 2 nodes<")):
        run.starts[-1] |= {"ranks": 16, "nodes": nodes, "device": "H100"}
        assert words in header(run)
    for status in ("running", "stopping", "done"):  # these tell of a start that took steps
        assert RunRecord(tmp_path, "a", status={"status": status, "before": {"status": "failed"}}).state == status


def test_counts_of_problems_and_the_order_of_files() -> None:
    assert greatest_counts({"a": 1, "b": 1200, "c": 3, "d": 2}) == "b\u00a01,200, c\u00a03, d\u00a02, 1\u00a0more"
    assert greatest_counts({"a": 1, "b": 2, "c": 3}) == "c\u00a03, b\u00a02, a\u00a01" and greatest_counts({}) == ""
    plain = {"name": "s", "records": 10, "left_out": 0, "problems": {}, "tokens": 100, "label_tokens": 50}
    worst = [
        plain | {"left_out": 2}, plain | {"left_out": 3, "records": 20}, plain | {"problems": {"a": 3}},
        plain | {"problems": {"a": 1, "b": 1}}, plain | {"label_tokens": 10}, plain | {"label_tokens": 80}, plain,
    ]  # fmt: skip
    sources = [plain | {"name": "other", "label_tokens": 10}, plain]
    assert sorted(reversed(worst), key=lambda file: badness(file, sources)) == worst


def test_shares_of_a_step_on_the_page_of_a_profile() -> None:
    steps = [dict.fromkeys(CATEGORIES, 0.0) | {"data": 0.1, "forward": 0.2}, dict.fromkeys(CATEGORIES, 0.1)]
    page = profile_page(Times(True, steps, [("gemm", 0.5)]), "steps", 10)
    _, *rows = rows_of(page, "Parts of a step")
    found = {row[0]: row[1:3] for row in rows}
    assert (found["data"], found["forward"]) == (["100.0", "22.2%"], ["150.0", "33.3%"])
    assert found["host gaps"] == ["50.0", "11.1%"] and found["step"] == ["450.0", "100.0%"]
    assert rows_of(page, "Kernels that take longest")[1:] == [["gemm", "250.00"]]
    assert "0.45 seconds a step in the mean, 0.9 in all" in page and "the GPU&#x27;s time" in page
    assert "step 11, data: 100.0 ms" in page and ">300.0 ms<" in page and "step 12" not in page


def test_the_best_run_is_marked(sweep: Path, tmp_path: Path) -> None:
    """A sweep's by its metric; otherwise by the last validation, or the loss if a run has none. With a word too."""
    values = [read_results(sweep / str(number), 20).loss or 0 for number in range(3)]
    place = values.index(min(values))
    page = comparison_page(runs_in(sweep))
    (marked,) = re.findall(r"<tr class=best>.*?</tr>", page)
    assert f">{place}: optim.lr=" in marked and ">done, best<" in marked and page.count("done, best") == 1
    assert "Best by loss of last 20 steps." in page

    runs = [read_run(imagine(tmp_path / name, 60, seed=seed)) for seed, name in enumerate("abc")]
    for run, loss in zip(runs, (1.5, 1.25, 1.75), strict=True):
        run.validations = [{"step": 50, "loss": 0.5}, {"step": 60, "loss": loss}]
    assert best_of(runs) == (1, "last_val_loss")
    assert "Best by last val loss." in comparison_page(runs)
    runs[0].validations.append({"step": 60, "loss": 1.25000004})
    assert best_of(runs)[0] is None, "equal up to rounding"
    runs[0].validations[-1]["loss"] = 1.2501
    assert best_of(runs)[0] == 1
    runs[0].validations, losses = [], [run.history.loss or 0 for run in runs]
    assert best_of(runs) == (losses.index(min(losses)), "loss")
    assert best_of([runs[1], runs[1]])[0] is None, "equal"
    assert best_of([runs[1], RunRecord(tmp_path, "empty")])[0] is None, "alone"
    assert "llava-fsdp · comparison" in comparison_page([*runs_in(sweep)[:1], runs[1]])
    empty = [RunRecord(tmp_path, name) for name in "ab"]
    assert best_of(empty)[0] is None and "best" not in rows_of(comparison_page(empty), "Results")[1][1]


def test_columns_that_are_empty_in_every_row_are_hidden(sweep: Path) -> None:
    page = table(["run", "MFU", "none", "loss"], [["a", "", None, 0], ["b", "1 %", "", None]])
    assert re.findall(r"<th[^>]*>([^<]*)<", page) == ["run", "MFU", "loss"]
    assert page.count("<td") == 6 and table(["a"], [[None]]) == ""
    runs = runs_in(sweep)
    for run in runs:
        run.history.curves.pop("mfu")
        run.validations = []
    head, *_ = rows_of(comparison_page(runs), "Results")
    assert not {"MFU", "last val loss", "lowest val loss", "best val score"} & set(head)


def test_equal_curves_are_told_apart(sweep: Path) -> None:
    """They are drawn as dashes in turn, and named."""
    page = comparison_page(runs_in(sweep))
    (loss,) = re.findall(r"<figure[^>]*><figcaption>Loss.*?</figure>", page, re.DOTALL)
    first, other, last = re.findall(r"<path class='line c\d'( style='[^']*')? d='", loss)
    assert first and last and first != last and not other
    assert "Equal curves: 0: optim.lr=1.0e-05 = 2: optim.lr=1.0e-05" in loss
    points = [Point(n, 1 / n, 1 / n, 1 / n) for n in range(1, 5)]
    assert "These curves are equal." in draw(Chart("t", [Line(name, points, n) for n, name in enumerate("abc")]))
    assert "qual" not in draw(Chart("t", [Line("a", points), Line("b", points[1:])]))


def test_a_dataset_of_which_nothing_is_cut_has_no_chart_of_it() -> None:
    cut, whole = (dataset_page(dataset_report(cut), []) for cut in (True, False))
    assert "Records by data.max_length" in cut and "No record would" not in cut
    assert "3,003 of 5,000,000 images." in cut and "images." not in whole
    assert "Records by data.max_length" not in whole
    assert "No record would be truncated, even with data.max_length=512." in whole
    for page in (cut, whole):
        assert all("<rect" in figure for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL))
        assert "<title>0 to 99: 0" not in page, "the bars begin at the shortest sample"


def test_of_many_files_the_worst_come_first() -> None:
    """Few at once, and more behind a fold; of the problems, too."""
    page = dataset_page(dataset_report(cut=True), [])
    section = page.partition("<h3>Files</h3>")[2].partition("</section>")[0]
    assert ">18.8 %<" in section and rows_of(page, "Problems")[1][1:3] == ["400", "skipped"]
    shown, fold, folded = section.partition("<details>")
    assert shown.count("<tr>") == 1 + 20 and folded.count("<tr>") == 1 + 1000 and "<details" in fold
    assert re.findall(r">(\d+)\.json<", shown)[0] == "1200" and f"data/{LONG}/." in shown
    _, reasons = page.split("<h3>image_missing</h3>")
    first, _, more = reasons.partition("</section>")[0].partition("<details>")
    assert (first.count("<tr>"), more.count("<tr>")) == (1 + 5, 1 + 95) and "395 more" in more
    assert ">source<" not in shown
    report = dataset_report(cut=True)
    several = dataset_page(report | {"sources": [*report["sources"], report["sources"][0] | {"name": "b"}]}, [])
    assert ">source<" in several.partition("<h3>Files</h3>")[2].partition("<details>")[0]
    few = dataset_page(dataset_report(cut=False), [])
    assert "<h3>" not in few and "<details" not in few and "There are no samples." in few


def test_labels_are_marked_by_more_than_colour(shown: Any, pages: dict[str, Path]) -> None:
    """By an underline and a text; and text that is no label has neither."""
    shown.goto(pages["dataset"].resolve().as_uri())
    lines = """(all) => all.map((own) => [!!own.closest(".labels"), getComputedStyle(own).textDecorationLine])"""
    drawn = shown.locator(".example .text i").evaluate_all(lines)
    assert {tuple(own) for own in drawn} == {(True, "underline"), (False, "none")}
    said = [text.split("\n")[-1] for text in shown.locator(".example .part:has(.text) .head").all_inner_texts()]
    assert [("with labels" in text, "no labels" in text) for text in said] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert shown.locator(".example img").count() == 43
    assert shown.locator(".example img:not([alt])").count() == 0
