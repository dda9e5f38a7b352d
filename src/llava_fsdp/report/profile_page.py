"""One page of where the time of recorded steps went: HTML that needs nothing, a PNG where matplotlib is installed."""

import html
import importlib.util
from pathlib import Path

from llava_fsdp.report.html import ticks
from llava_fsdp.report.profile_trace import CATEGORIES, Times

COLOURS = {
    "data": "#b07aa1", "forward": "#4e79a7", "backward": "#59a14f", "optimizer": "#edc948", "communication": "#e15759",
    "host gaps": "#bab0ac",
}  # fmt: skip
MEANING = {
    "data": "waiting for the step's samples, or preparing them where data.workers=0",
    "forward": "computing, launched by the forward pass",
    "backward": "computing, launched by the backward pass, recomputation included",
    "optimizer": "computing, launched by clipping and the update",
    "communication": "collectives beside which nothing computes; waiting for slower ranks is in them",
    "host gaps": "nothing runs: Python, launches, reports, saves",
}
LEFT, WIDTH, RIGHT = 90, 800, 110
"""Pixels: of the steps' names, of the longest bar, and of a step's sum."""
BAR, GAP = 22, 6
LONGEST = {
    True: "A kernel of NCCL runs while it waits for other ranks.",
    False: "Each without the operations it calls, and without waiting for a collective, which is communication above. "
    "autograd::... is autograd's own work around an operation, FSDP's hooks among it.",
}
"""What to know of the second table, with a GPU and without."""


def write_page(times: Times, path: Path, title: str, first: int = 1) -> Path:
    """Write `path`.html, and `path`.png where it can be drawn.

    Args:
        first: the number of the first step.

    Raises:
        OSError: it cannot be written.
    """
    page = path.with_name(path.name + ".html")
    page.write_text(page_of(times, title, first))
    if importlib.util.find_spec("matplotlib") is not None:
        draw(times, path.with_name(path.name + ".png"), title, first)
    return page


def page_of(times: Times, title: str, first: int = 1) -> str:
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
<p>{clock}; {whole / len(times.steps):.4g} seconds a step in the mean, {whole:.4g} in all</p>
{bars(times, first)}
<table><tr><th></th><th>ms a step</th><th>share</th><th></th></tr>
{chr(10).join(rows)}
<tr><td>step</td><td>{whole / len(times.steps) * 1e3:,.1f}</td><td>100.0%</td><td></td></tr>
</table>
<h2>{"Kernels" if times.on_device else "Operations"} that take longest</h2>
<p>{LONGEST[times.on_device]}</p>
<table><tr><th></th><th>ms a step</th></tr>
{chr(10).join(slowest)}
</table>
"""


def bars(times: Times, first: int) -> str:
    """A bar for each step, all to one scale, with its number, its sum and an axis of milliseconds."""
    longest = max(sum(step.values()) for step in times.steps)
    scale, high = WIDTH / longest, len(times.steps) * (BAR + GAP)
    drawn = []
    for milliseconds in ticks(0, longest * 1e3, 9):
        x = LEFT + milliseconds / 1e3 * scale
        drawn.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{high}" stroke="#ddd"/>')
        drawn.append(f'<text x="{x:.2f}" y="{high + 16}" text-anchor="middle">{milliseconds:,g}</text>')
    for number, step in enumerate(times.steps):
        at, top = float(LEFT), number * (BAR + GAP)
        text = top + BAR - GAP
        drawn.append(f'<text x="{LEFT - 10}" y="{text}" text-anchor="end">step {first + number}</text>')
        for name in CATEGORIES:
            wide = max(0.0, step[name] * scale)
            drawn.append(
                f'<rect x="{at:.2f}" y="{top}" width="{wide:.2f}" height="{BAR}" fill="{COLOURS[name]}">'
                f"<title>step {first + number}, {name}: {step[name] * 1e3:.1f} ms</title></rect>"
            )
            at += wide
        drawn.append(f'<text x="{at + 8:.2f}" y="{text}">{sum(step.values()) * 1e3:,.1f} ms</text>')
    drawn.append(f'<text x="{LEFT + WIDTH + 40}" y="{high + 16}">ms</text>')
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{high + 24}"'
    return f'<svg {size} font-size="13" xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'


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
