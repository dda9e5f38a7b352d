"""Build the page of a profile: how the time of the recorded steps is divided."""

from llava_fsdp.report.charts.html import heading, section, table, whole_page
from llava_fsdp.report.charts.svg import Bar, draw_bars
from llava_fsdp.report.profile.profile_trace import CATEGORIES, Times

MEANING = {
    "data": "waiting for the step's samples, or preparing them where data.workers=0",
    "forward": "computing, launched by the forward pass",
    "backward": "computing, launched by the backward pass, activations computed again included",
    "optimizer": "computing, launched by clipping and the update",
    "communication": "collectives beside which nothing computes; waiting for slower ranks is in them",
    "host gaps": "nothing runs: Python, launches, reports, saves",
}
LONGEST = {
    True: "A kernel of NCCL runs while it waits for other ranks.",
    False: "Each without the operations it calls, and without waiting for a collective, which is communication above. "
    "autograd::... is autograd's own work around an operation, FSDP's hooks among it.",
}
"""Whether the profile was recorded on a GPU -> note above the table of what took longest."""
NAME_LENGTH = 100


def profile_page(times: Times, title: str, first: int = 1) -> str:
    """Return the page of a profile as HTML: the time of each step by category, and the kernels or operations that took
    longest. `first`: number of the first recorded step."""
    count = len(times.steps)
    total = {name: sum(step[name] for step in times.steps) for name in CATEGORIES}
    whole = sum(total.values())
    clock = "the GPU's time" if times.on_device else "the main thread's time: there is no GPU"
    rows = [[name, f"{total[name] / count * 1e3:,.1f}", f"{total[name] / whole:.1%}", MEANING[name]] for name in total]
    rows.append(["step", f"{whole / count * 1e3:,.1f}", "100.0%", ""])
    slowest = [[name[:NAME_LENGTH], f"{seconds / count * 1e3:,.2f}"] for name, seconds in times.longest]
    bars = [bar(step, first + number) for number, step in enumerate(times.steps)]
    body = [
        heading(
            "profile",
            f"Where the time goes: {title}",
            f"{clock}; {whole / count:.4g} seconds a step in the mean, {whole:.4g} in all",
        ),
        draw_bars("Steps", "ms", bars, CATEGORIES, stacked=True),
        section("Parts of a step", table(["part", "ms a step", "share", "what"], rows)),
        section(
            f"{'Kernels' if times.on_device else 'Operations'} that take longest",
            f"<p>{LONGEST[times.on_device]}</p>",
            table(["kernel" if times.on_device else "operation", "ms a step"], slowest),
        ),
    ]
    return whole_page(title, "".join(body))


def bar(step: dict[str, float], number: int) -> Bar:
    values = [max(0.0, step[name] * 1e3) for name in CATEGORIES]
    texts = [f"step {number}, {name}: {step[name] * 1e3:.1f} ms" for name in CATEGORIES]
    return Bar(f"step {number}", values, texts, f"{sum(step.values()) * 1e3:,.1f} ms")
