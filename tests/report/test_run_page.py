"""Pages of a run, of several, and of a sweep."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import command
from imagined import ODD, imagine, lines
from pictured import charts_seen
from small import config_of
from tiers import slow_after

from llava_fsdp.config.command_line.recipes import differences
from llava_fsdp.report import main as report
from llava_fsdp.report import run_reader
from llava_fsdp.report.compare_page import differing
from llava_fsdp.report.run_reader import parse_overrides, read_run, runs_in
from llava_fsdp.runtime.errors import LlavaFsdpError


def texts(page: str) -> str:
    """What a reader sees, entities unescaped."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S))


def test_a_line_that_is_too_long_is_counted_and_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of as many characters as are read at once is the longest that is a row."""
    run = imagine(tmp_path / "run", 3)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    texts = [json.dumps(row | {"step": step}) for step in (4, 5, 6)]
    longest = max(len(line) for file in run.glob("*.jsonl") for line in file.read_text().splitlines()) + 10
    texts[0], texts[1] = texts[0].ljust(longest - 1), texts[1].ljust(longest - 2)[:-1] + "," + " " * longest + "}"
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(texts) + "\n")
    monkeypatch.setattr(run_reader, "LONGEST_LINE", longest)
    found = read_run(run)
    assert (found.history.last_step, found.history.num_rows, found.unread) == (6, 5, {"metrics.jsonl": 2})


def test_a_run(tmp_path: Path) -> None:
    run = imagine(tmp_path / "outputs" / "finetune", 300, ("vqa", "captions <i>"), "failed", (0, 100))
    page = report.write([str(run)]).read_text()
    assert page.count("<figure") == 10
    for title in (
        "Loss", "Loss by source", "Validation loss", "Validation score", "Learning rate", "Gradient norm",
        "Tokens a second", "Utilization", "Time of a step", "Peak memory",
    ):  # fmt: skip
        assert f"<figcaption>{title}" in page
    seen = texts(page)
    for words in (
        "outputs/finetune", "failed", "300", "of 300 steps", "vision_tower", "20,979,712", "0123456789ab", "2.28",
        "Unlike LLaVA: labels=exact", "optim.lr", "2e-05", "1e-05", "torchrun --nproc-per-node 8", "captions &lt;i&gt;",
        "image missing", "no image", "red | dark red", "8 x NVIDIA H100", "planned 59.14 GiB",
    ):  # fmt: skip
        assert words in seen, words
    assert "started after step 100" in page and page.count("data:image/jpeg;base64,") == 2
    for figure in re.findall(r"<figure.*?</figure>", page, flags=re.S):
        assert re.search(r"<path class='line c\d' d='M[\d.]+ [\d.]+L", figure), "drawn without JavaScript too"


def test_nothing_of_the_run_becomes_markup(tmp_path: Path) -> None:
    """Its texts are shown as they are, and nothing is loaded."""
    run = imagine(tmp_path / ODD.replace("/", "_"), 60, (ODD,), "failed")
    page = report.write([str(run)]).read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*['"]?(?!data:)(?:https?:)?//""", page)
    assert "default-src 'none'" in page


def test_lines_that_were_cut_short(tmp_path: Path) -> None:
    """Half a line is counted; a validation of a step that is to be done again is not shown."""
    run = imagine(tmp_path / "run", 120, status="running")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 121, "loss":')
    rows = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    lines(run / "validation.jsonl", [*rows, {**rows[-1], "step": 9999, "score": 0.123456}])
    seen = texts(report.write([str(run)]).read_text())
    assert "1 lines of metrics.jsonl could not be read" in seen and "killed" in seen
    assert "120" in seen and "0.1235" not in seen


def test_a_run_whose_lock_cannot_be_read_is_not_killed(tmp_path: Path) -> None:
    """A colleague's lock is theirs alone; a link to itself is refused to every user."""
    run = imagine(tmp_path / "run", 20, status="running")
    (run / ".lock").write_text("{}")
    assert read_run(run).state == "killed", "nobody holds it"
    assert read_run(run, is_own=True).state == "running"
    with (run / ".lock").open("r+") as lock:
        holder = subprocess.Popen(
            [sys.executable, "-c", "import fcntl; fcntl.lockf(0, fcntl.LOCK_EX); print(flush=True); "
             "import time; time.sleep(60)"],
            stdin=lock, stdout=subprocess.PIPE,
        )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        assert read_run(run).state == "running"
    finally:
        holder.kill()
        holder.wait()
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(".lock")
    assert read_run(run).state == "running"


def test_a_refused_start_does_not_end_the_run(tmp_path: Path) -> None:
    run = imagine(tmp_path / "run", 60)
    status = {"status": "failed", "reason": "other settings: <seed>", "exit_code": 3}
    for before, state, kind in (({"status": "done", "reason": ""}, "done", "note"), (None, "failed", "reason")):
        (run / "run_status.json").write_text(json.dumps({**status, "before": before}))
        page = report.write([str(run)]).read_text()
        assert f"<span class='state {state}'>" in page
        assert re.search(f"<p class='{kind}'>[^<]*other settings: &lt;seed&gt;</p>", page)
        both = report.write([str(run), str(run), f"out={tmp_path / 'both.html'}"]).read_text()
        assert both.count(f"<td class='r'>{state}</td>") == 2 and "other settings: &lt;seed&gt;" in both
        assert ("a later start: failed before its first step" in both) == (before is not None)


def test_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    imagine(tmp_path / "a", 120, seed=1)
    imagine(tmp_path / "b", 60, config="optim:\n  lr: 3.0e-05\nseed: 42\n", seed=2)
    path = report.write(["a", "b"])
    assert path == Path("comparison.html")
    page = path.read_text()
    seen = texts(page)
    assert "optim.lr" in seen and "3e-05" in seen and "1e-05" in seen
    assert not re.search(r"<td[^>]*>seed<", page)
    loss = json.loads(re.findall(r"<script type='application/json'>(.*?)</script>", page)[0])
    assert [(len(line["x"]), line["name"][-2:]) for line in loss["lines"]] == [(120, "/a"), (60, "/b")]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_page_with_a_private_run_is_private(order: tuple[str, str], tmp_path: Path) -> None:
    for name, mode in (("a", 0o644), ("b", 0o600)):
        (imagine(tmp_path / name, 60) / "metrics.jsonl").chmod(mode)
    path = report.write([*(str(tmp_path / name) for name in order), f"out={tmp_path / 'c.html'}"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def job_file(folder: Path, number: int, *overrides: str, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"number": number, "overrides": overrides, **more}))


def test_a_sweep_is_all_of_its_jobs(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for number, lr in ((0, "1.0e-05"), (1, "2.0e-05")):
        folder = imagine(sweep / str(number), 60, seed=number, config=f"optim:\n  lr: {lr}\nseed: 42\n")
        job_file(folder, number, "max_steps=60", f"optim.lr={float(lr)}", exit_code=0, value=2.0 - number, last_steps=1)
    bad = {"exit_code": 2, "reason": "optim.lr=x must be a number", "value": 0.0}  # ended before it had a run
    job_file(sweep / "2", 2, "max_steps=60", "optim.lr=x", **bad)
    out = tmp_path / "c.html"
    page = report.write([str(sweep), f"out={out}"]).read_text()
    seen = texts(page)
    assert "3 runs" in seen and "0: optim.lr=1e-05" in seen and "max_steps" not in seen and str(bad["reason"]) in seen
    assert not re.search(r"<td[^>]*>seed<", page), "the job without a configuration is not compared"
    assert cells(page, "optim.lr") == ["optim.lr", "1e-05", "2e-05", "x"]
    assert "ranks" not in re.findall(r"<h2>What differs</h2>.*", page, re.DOTALL)[0]
    last = json.loads((sweep / "1" / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    assert cells(page, "1: optim.lr=2e-05")[1:4] == ["done, best", "60", f"{last:.4f}"], "the loss of last_steps"
    assert "best" not in cells(page, "0: optim.lr=1e-05")[1]
    assert report.write([f"output_dir={sweep / '1'}"]) == sweep / "1" / "report.html"


def cells(page: str, first: str) -> list[str]:
    """Texts of the first row that begins so."""
    row, *_ = re.findall(rf"<tr[^>]*><td[^>]*>{re.escape(first)}</td>.*?</tr>", page)
    return re.findall(r">([^<>]*)</td>", row)


def test_overrides_of_a_job_are_compared_as_values() -> None:
    typed = parse_overrides(
        ["stage=pretrain", "optim.lr=1e-4", "+a.b='x y'", "~data", "~seed=1", "max_steps=5", "x=False", "y=null"]
    )
    assert typed == {"stage": "pretrain", "optim.lr": 0.0001, "a.b": "x y", "max_steps": 5, "x": False, "y": None}
    assert parse_overrides(["a='b", 'c="d"']) == {"a": "'b", "c": "d"}
    trees = [{"optim.lr": 0.0001, "n": 1}, {"optim.lr": 0.0001}, {}]
    assert differing(trees, [{}, {}, typed]) == [["n", "1", "", ""]]
    assert differing(trees[1:], [{}, {"optim.lr": 0.1}]) == [["optim.lr", "0.0001", "0.1"]]
    assert differing([{}, {}], [{"n": 1}, {"n": 2}]) == []


def test_jobs_of_a_sweep_may_lie_deeper_and_one_be_damaged(tmp_path: Path) -> None:
    """As with hydra.sweep.subdir='${model.name}/${hydra.job.num}'."""
    for number in (0, 1):
        job_file(imagine(tmp_path / "small" / str(number), 60, seed=number), number, f"seed={number}")
    (tmp_path / "small" / "1" / "metrics.jsonl").write_text("nonsense\n")
    good, damaged = runs_in(tmp_path)
    assert (good.name, good.history.last_step, damaged.name, damaged.history.last_step) == (
        "0: seed=0",
        60,
        "1: seed=1",
        0,
    )
    assert "none is a step" in damaged.status["reason"]
    assert "2 runs" in texts(report.write([str(tmp_path), f"out={tmp_path / 'c.html'}"]).read_text())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (None, "", "is not the output_dir"),
        ("metrics.jsonl", "\0\1\2 nonsense\nmore of it\n", "has 2 lines, and none is a step"),
        ("metrics.jsonl", "[1, 2]\n", "none is a step"),
        ("metrics.jsonl", "[" * 100_000, "none is a step"),
        ("config.yaml", "a: [1", "is not YAML"),
        ("config.yaml", "a: &x [1]\nb: [*x, *x]", "refers to a part of itself"),
    ],
)
def test_nonsense_is_refused_by_name(name: str | None, content: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if name is not None:
        (folder / "run_status.json").write_text("{}")
        (folder / name).write_text(content)
    with pytest.raises(LlavaFsdpError, match=said) as caught:
        report.write([str(folder)])
    assert str(folder) in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["starts.jsonl", "validation.jsonl", "run_status.json"])
@pytest.mark.parametrize(
    "content",
    slow_after(9, [
        "nonsense", "{}", "[]", '{"step": 1}', '{"step": 5, "time": 1e300}', '{"step": 5, "time": 1e17}',
        '{"step": 5, "time": "x", "trains": 3}',
        '{"step": 5, "time": 1, "at_rest": {"a": "b"}, "trains": [[1]]}', '{"step": 5, "loss": NaN}',
        '{"step": 5, "sources": {"a": 4}}', '{"step": 5, "answers": [3]}', '{"step": 5, "time": 1, "recipe": [[1,2]]}',
        '{"step": 5, "answers": [{"picture": "\\u0000", "score": "x", "references": {"a": 1}}]}',
        '{"status": 3, "reason": ["x"], "exit_code": "y"}', '{"status": "failed", "before": {"reason": 5}}',
        '{"status": "failed", "before": 5}', '{"step": 1e400, "time": 1}',
        '{"step": 5, "time": 1, "versions": {"a": {}}, "total_steps": "x", "planned_peak": "y", "ranks": []}',
    ]),
)  # fmt: skip
def test_a_page_in_spite_of_damaged_files(name: str, content: str, tmp_path: Path) -> None:
    run = imagine(tmp_path / "run", 60)
    (run / name).write_text(content)
    page = report.write([str(run)]).read_text()
    assert "<figcaption>Loss" in page
    report.write([str(run), str(run), f"out={tmp_path / 'c.html'}"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage"), (["out=x.html"], "no RUN"), (["--x"], "not an option"), (["."], "is not the output_dir"),
        (["gone"], "not a folder"),
    ],
)  # fmt: skip
def test_a_wrong_command_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", *words])
    with pytest.raises(SystemExit) as ended:
        report.main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and said in printed.out + printed.err


def test_the_command_is_light(tmp_path: Path) -> None:
    code = "import runpy, sys; sys.argv[1:] = ['-h']\ntry: runpy.run_module('llava_fsdp.report', run_name='__main__')\n"
    code += "except SystemExit: print([m for m in ('torch', 'transformers', 'hydra') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("usage: ") and ran.stdout.endswith("[]\n")


def test_the_recipe_is_what_its_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(config_of(["stage=pretrain"]), []) == []
    found = differences(config_of(["stage=pretrain", "optim.lr=0.5", "sharding=zero3", "track.wandb=offline"]), [])
    assert found is not None and {row[0]: row[1:] for row in found} == {
        "optim.lr": ["0.004", "0.5"],
        "sharding.strategy": ["SHARD_GRAD_OP", "FULL_SHARD"],
        "track.wandb": ["off", "offline"],
    }
    assert differences(config_of(["stage=pretrain", "model.name=mine"]), []) is None
    monkeypatch.setenv("STORE_PASSWORD", "pass-word-7")  # what looks like a secret is refused before
    cfg = config_of(["stage=pretrain", "data.images=/store/pass-word-7/x"])
    assert [(key, ours) for key, _, ours in differences(cfg, []) or []] == [("data.images", "/store/***/x")]


def test_a_page_hides_the_secrets_of_a_configuration(tmp_path: Path) -> None:
    for name in ("a", "b"):
        secret = f"data:\n  path: https://me:pass-word-7{name}@host/x.json\nhub:\n  token: pass-word-7{name}\n"
        imagine(tmp_path / name, 60, config=secret)
    page = report.write([str(tmp_path / "a"), str(tmp_path / "b"), f"out={tmp_path / 'c.html'}"]).read_text()
    assert "pass-word-7" not in page


def test_recipes_of_a_config_dir(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    source = Path(report.__file__).parents[3] / "conf" / "model" / "tiny.yaml"
    (tmp_path / "model" / "mine.yaml").write_text(re.sub(r"(?m)^name:.*", "name: mine", source.read_text()))
    cfg = config_of(["stage=pretrain", "model.name=mine", "optim.lr=0.5"])
    found = differences(cfg, ["--config-dir", str(tmp_path)])
    assert found is not None and ["optim.lr", "0.001", "0.5"] in found


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[[Path], tuple[Any, list[str]]]]:
    """Open a page: it, and whatever it asked for or complained about."""
    pages = []

    def opened(path: Path, scheme: str = "light") -> tuple[Any, list[str]]:
        page, said = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme), []
        pages.append(page)
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: said.append(f"request: {request.url}"))
        page.goto(path.resolve().as_uri())
        return page, said

    yield opened
    for page in pages:
        page.close()


def axis(page: Any, chart: int = 0) -> list[str]:
    return page.locator("figure.chart svg").nth(chart).locator("text[text-anchor=middle]").all_text_contents()


def line(page: Any, chart: int = 0) -> str:
    return page.locator("figure.chart svg").nth(chart).locator("path.line").last.get_attribute("d")


def drag(page: Any, begin: float, end: float, chart: int = 0) -> None:
    """From one share of a chart's width to another."""
    box = page.locator("figure.chart svg").nth(chart).bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], middle, steps=4)
    page.mouse.up()


@pytest.mark.e2e
def test_a_browser_zooms_smooths_and_tells_values(visit: Any, tmp_path: Path) -> None:
    run = imagine(tmp_path / "run", 2500, ("vqa", "captions"), "done", (0, 1000))
    path = report.write([str(run)])
    page, said = visit(path)
    assert said == [f"request: {path.resolve().as_uri()}"]
    assert page.locator("figure.chart").count() == 10 and axis(page)[-1] == "2400"
    before, others = line(page), line(page, 4)
    drag(page, 0.4, 0.6)
    zoomed = [float(text) for text in axis(page)]
    assert 800 < zoomed[0] and zoomed[-1] < 1700 and line(page) != before
    assert line(page, 4) != others, "all charts show the same steps"
    page.keyboard.down("Shift")
    drag(page, 0.5, 0.2)
    page.keyboard.up("Shift")
    assert float(axis(page)[-1]) > zoomed[-1]
    page.locator("figure.chart svg").first.dblclick()
    assert line(page) == before and axis(page)[-1] == "2400"

    page.locator("input[type=range]").first.fill("0.9")
    assert line(page) != before and page.locator("figure.chart").first.locator("path.raw").count() == 1
    page.locator("input[type=checkbox]").first.check()
    labels = page.locator("figure.chart svg").first.locator("text[text-anchor=end]").all_text_contents()
    assert {"2", "5", "10"} <= set(labels)

    box = page.locator("figure.chart svg").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    tip = page.locator("figure.chart").first.locator(".tip")
    assert tip.is_visible() and re.match(r"step \d+\s+loss: \d", tip.inner_text())
    page.locator(".legend li").first.click()
    assert page.locator("figure.chart").nth(1).locator("path.line").count() == 1
    assert len(said) == 1, said


@pytest.mark.e2e
def test_a_browser_shows_several_runs_in_the_dark(visit: Any, tmp_path: Path) -> None:
    runs = [str(imagine(tmp_path / name, 60, seed=n)) for n, name in enumerate("abc")]
    page, said = visit(report.write([*runs, f"out={tmp_path / 'c.html'}"]), "dark")
    assert page.locator("figure.chart").first.locator("path.line").count() == 3
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    assert len(said) == 1, said


@pytest.mark.e2e
@pytest.mark.slow
def test_a_real_run_on_two_ranks(visit: Any, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Two starts of it; its page in a browser, with every curve that a CPU run has."""
    words = [
        "llava_fsdp.train", "stage=finetune", f"model.language={parts / 'language'}",
        f"model.vision={parts / 'vision'}", "data=llava_json", "data.path=null", f"data.images={dataset / 'images'}",
        *(f"data.sources.{name}.path={dataset / f'{name}.json'}" for name in ("mixed", "text")), "data.workers=0",
        "data.max_length=256", "global_batch_size=6", "micro_batch_size=2", "export.enabled=false", "compile=false",
        "optim.schedule=constant", "optim.warmup_ratio=0", "track.tensorboard=true", "output_dir=run",
        "model.random_weights=true", "model.projector=random",
    ]  # fmt: skip
    for steps in (3, 5):
        ran = command(*words, f"max_steps={steps}", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
    page, said = visit(tmp_path / "run" / "report.html")
    assert len(said) == 1, said
    assert charts_seen(page) == [
        "Loss", "Loss by source", "Learning rate", "Gradient norm", "Tokens a second", "Time of a step", "Peak memory",
    ]  # fmt: skip
    seen = page.inner_text("body")
    for words_ in ("done", "of 5 steps", "2 x CPU", "optim.schedule", "mixed", "Starts", "Unlike LLaVA", "max_steps=5"):
        assert words_ in seen, words_
    assert os.path.getsize(tmp_path / "run" / "report.html") < 5_000_000
    shot = Path(os.environ.get("REPORT_SCREENSHOT", tmp_path / "report.png"))
    page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 10_000
    found = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5] and all(set(r["sources"]) == {"mixed", "text"} for r in found)
    assert all(r["data_seconds"] >= 0 for r in found)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
