"""Writes what the runs of examples/ left into docs/examples.md: `python docs/make_examples.py`. Commands, outputs,
figures and images are those of examples/results; nothing in them is typed by hand."""

import json
import re
import shlex
import sys
from typing import Any

from pages import DOCS, code, replaced, table

RESULTS = DOCS.parent / "examples" / "results"
PAGE = DOCS / "examples.md"
Result = dict[str, Any]
NAMES = ("embedded", "real", "lora", "sweep", "killed")
TITLES = {
    "embedded": "The embedded default",
    "real": "Published weights and data",
    "lora": "Low-rank adapters on one machine",
    "sweep": "Learning rates side by side",
    "killed": "A rank is killed, and the run continues on another number of ranks",
}
WHAT = {
    "embedded": "`examples/embedded.sh` trains both stages from random weights, scores the model on held-out images, "
    "with the true images and with blank ones, and asks it a question.",
    "real": "`examples/real/run.sh` fetches SmolLM2-135M, DINOv2-small, easy-VQA and emoji, trains the projector, then "
    "projector and language model, once whole and once with LoRA, and scores each on images that were not trained on.",
    "lora": "`examples/lora.sh` trains the projector, then adapters in the language model, scores the merged model, "
    "and writes the adapters for peft.",
    "sweep": "`examples/sweep.sh` trains one stage with three learning rates and compares the runs.",
    "killed": "`examples/killed.sh` trains to the end, trains the same again and kills one rank with SIGKILL, then "
    "continues that run on three ranks instead of two.",
}
LINES = 30
"""Last lines that are shown of an output."""
SCORE = re.compile(r"\s*source: (\w+)" + r"\s+([\d.,]+)" * 4)
"""A row of evaluate's table: source, questions, accuracy, with blank images, best blind guess."""
SHOWN = 8
"""The same, for a training that is not the first command of its example."""


def page() -> str:
    """The page with all of its sections; an example without a result has none."""
    found = [json.loads(path.read_text()) for name in NAMES if (path := RESULTS / f"{name}.json").is_file()]
    return replaced(PAGE.read_text(), "examples", "\n\n".join(section(result) for result in found))


def section(result: Result) -> str:
    name = result["name"]
    parts = [f"## {TITLES[name]}", WHAT[name]]
    for place, command in enumerate(result["commands"]):
        parts.append(shown(command, SHOWN if place and command["words"][1] == "train" else LINES))
    parts += FIGURES[name](result) if name in FIGURES else [runs_table(result)]
    if result["image"]:
        parts.append(f"![The top of the page of this example](../examples/results/{result['image']})")
    return "\n\n".join([*(part for part in parts if part), origin(result)])


def shown(command: dict[str, Any], most: int) -> str:
    """A command and the last lines of its output, in the form that the tests of the documents read."""
    words, output = command["words"], command["output"]
    output = output if len(output) <= most else ["...", *output[-most:]]
    ended = f"; exit code {command['exit_code']}" if command["exit_code"] else ""
    return "\n".join([
        "<!-- norun: a test runs the script of this example -->",
        "```bash", *folded(words), "```",
        f"{command['seconds']} seconds{ended}:", "",
        "```text", *output, "```",
    ])  # fmt: skip


def folded(words: list[str], width: int = 110) -> list[str]:
    """A command line over lines of a page's width."""
    lines, now = [], ""
    for word in map(shlex.quote, words):
        if now and len(now) + len(word) > width:
            lines.append(f"{now} \\")
            now = f"    {word}"
        else:
            now = f"{now} {word}" if now else word
    return [*lines, now]


def runs_table(result: Result) -> str:
    rows = []
    for name, run in result["runs"].items():
        trained, frozen = (sum(part[place] for part in run["trains"]) for place in (1, 2))
        rows.append([
            code(name), str(len(run["losses"])), f"{trained:,} of {trained + frozen:,}", f"{run['losses'][0]:.4f}",
            f"{run['loss']:.4f}", f"{run['seconds']:,.0f}",
        ])  # fmt: skip
    head = (
        "run",
        "steps",
        "weights that train",
        "loss of the first step",
        "loss of last 20 steps",
        "seconds of its steps",
    )
    return table(head, rows, "lrrrrr")


def lora(result: Result) -> list[str]:
    rows = [[code(file), f"{size:,}"] for file, size in result["files"].items()]
    return [runs_table(result), table(("file", "bytes"), rows, "lr")]


def real(result: Result) -> list[str]:
    """The runs, and the accuracies of every source with every seed that was tried (results named real, real-1, ...)."""
    rows = []
    for path in sorted(RESULTS.glob("real*.json"), key=lambda path: path.stem):
        for command in json.loads(path.read_text())["commands"]:
            if command["words"][1] == "evaluate":
                scored = filter(None, map(SCORE.match, command["output"]))
                rows += [[path.stem, code(command["words"][2].rpartition("/")[2]), *found.groups()] for found in scored]
    head = ("result", "model of", "source", "questions", "accuracy", "with blank images", "best blind guess")
    return [runs_table(result), table(head, rows, "lllrrrr")]


def sweep(result: Result) -> list[str]:
    runs = result["runs"].values()
    least = min(run["loss"] for run in runs)
    rows = [
        [f"{run['lr']:g}", f"{run['losses'][0]:.4f}", f"{run['loss']:.4f}", "best" if run["loss"] == least else ""]
        for run in runs
    ]
    return [table(("highest learning rate", "loss of the first step", "loss of last 20 steps", ""), rows, "rrr")]


def killed(result: Result) -> list[str]:
    """The losses of both runs, step by step."""
    whole, other = result["runs"]["whole"], result["runs"]["killed"]
    begun = other["starts"]
    rows = [
        [str(step), str(next(s["ranks"] for s in reversed(begun) if s["step"] < step)), *(f"{x:.9f}" for x in both),
         f"{abs(both[0] - both[1]) / both[0]:.1e}"]
        for step, both in enumerate(zip(whole["losses"], other["losses"], strict=True), start=1)
    ]  # fmt: skip
    last = begun[-1]
    told = f"It continued after step {last['step']} on {last['ranks']} ranks; {begun[0]['ranks']} had begun it."
    head = ("step", "ranks", "loss, never killed", "loss, killed and continued", "relative difference")
    return [told, table(head, rows, "rrrrr")]


def origin(result: Result) -> str:
    """Machine, commit, date and file of a section."""
    device, cpus = result["machine"]["device"], result["machine"]["cpus"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"{device}, {cpus} cores, {versions}, commit {result['commit']}, {result['date']} "
        f"([result](../examples/results/{result['name']}.json))."
    )


FIGURES = {"real": real, "lora": lora, "sweep": sweep, "killed": killed}


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
