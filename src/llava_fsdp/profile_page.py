"""One page of where the time of recorded steps went: HTML that needs nothing, a PNG where matplotlib is installed."""

import html
import importlib.util
from pathlib import Path

from llava_fsdp.profile_times import CATEGORIES, Times

COLOURS = {
    "data": "#b07aa1", "forward": "#4e79a7", "backward": "#59a14f", "optimizer": "#edc948", "communication": "#e15759",
    "host gaps": "#bab0ac",
}  # fmt: skip
MEANING = {
    "data": "waiting for the step's samples",
    "forward": "computing, launched by the forward pass",
    "backward": "computing, launched by the backward pass, recomputation included",
    "optimizer": "computing, launched by clipping and the update",
    "communication": "collectives beside which nothing computes",
    "host gaps": "nothing runs: Python, launches, reports, saves",
}
WIDTH, BAR = 800, 22


def write_page(times: Times, path: Path, title: str, first: int = 1) -> Path:
    """Write `path`.html, and `path`.png where it can be drawn.

    Args:
        first: the number of the first step.

    Raises:
        OSError: it cannot be written.
    """
    page = path.with_name(path.name + ".html")
    page.write_text(page_of(times, title))
    if importlib.util.find_spec("matplotlib") is not None:
        draw(times, path.with_name(path.name + ".png"), title, first)
    return page


def page_of(times: Times, title: str) -> str:
    """The HTML, with the bars as SVG."""
    total = {name: sum(step[name] for step in times.steps) for name in CATEGORIES}
    whole = sum(total.values())
    rows = [
        f'<tr><td><span style="background:{COLOURS[name]}">&emsp;</span> {name}</td>'
        f"<td>{total[name] / len(times.steps) * 1e3:,.1f}</td><td>{total[name] / whole:.1%}</td>"
        f"<td>{MEANING[name]}</td></tr>"
        for name in CATEGORIES
    ]
    slowest = [
        f"<tr><td><code>{html.escape(name[:100])}</code></td><td>{seconds / len(times.steps) * 1e3:,.2f}</td></tr>"
        for name, seconds in times.longest
    ]
    clock = "the GPU's time" if times.on_device else "the main thread's time: there is no GPU"
    return f"""<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>body{{font:15px sans-serif;margin:2em}}td,th{{padding:.1em 1em .1em 0;text-align:left}}</style>
<h1>Where the time goes: {html.escape(title)}</h1>
<p>{clock}; {whole / len(times.steps):.4g} seconds a step</p>
{bars(times)}
<table><tr><th></th><th>ms a step</th><th>share</th><th></th></tr>
{chr(10).join(rows)}
</table>
<h2>{"Kernels" if times.on_device else "Operations"} that take longest</h2>
<table><tr><th></th><th>ms a step</th></tr>
{chr(10).join(slowest)}
</table>
"""


def bars(times: Times) -> str:
    """A bar for each step, all to one scale."""
    scale = WIDTH / max(sum(step.values()) for step in times.steps)
    drawn = []
    for number, step in enumerate(times.steps):
        at = 0.0
        for name in CATEGORIES:
            wide = step[name] * scale
            drawn.append(
                f'<rect x="{at:.2f}" y="{number * (BAR + 6)}" width="{wide:.2f}" height="{BAR}" fill="{COLOURS[name]}">'
                f"<title>{name}: {step[name] * 1e3:.1f} ms</title></rect>"
            )
            at += wide
    high = len(times.steps) * (BAR + 6)
    return f'<svg width="{WIDTH}" height="{high}" xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'


def draw(times: Times, path: Path, title: str, first: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8 + 0.4 * len(times.steps)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(times.steps)
    for name in CATEGORIES:
        own = [step[name] * 1e3 for step in times.steps]
        axes.barh(range(len(own)), own, left=left, color=COLOURS[name], label=name)
        left = [before + value for before, value in zip(left, own, strict=True)]
    axes.set_yticks(range(len(times.steps)), [f"step {first + n}" for n in range(len(times.steps))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10)
    axes.legend(ncols=len(CATEGORIES), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    FigureCanvasAgg(figure).print_png(str(path))
