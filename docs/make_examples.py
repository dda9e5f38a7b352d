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
LINES = {"train": 4, "sweep": 1}
"""Last lines that are shown of an output, by command, of others 9; of the first output of the page all are."""
PROGRESS = re.compile(r"(?:job \d+: )?(?:step \d+/\d+ |questions: \d+ of \d+)")
"""A line that only tells how far a command has come."""
WARNING = re.compile(r"Warning: |warnings\.warn\(")
COMPARED = re.compile(r"export: |merged weights differ ")
"""A line of what an export compares, which the first training of the page shows."""
FIRST = re.compile(r"step \d+/|continuing after step ")
"""The first line of a training behind its summary."""
SCORE = re.compile(r"\s*source: (\w+)" + r"\s+([\d.,]+)" * 4)
"""A row of evaluate's table: source, questions, accuracy, with blank images, best blind guess."""


def page() -> str:
    """The page with all of its sections; an example without a result has none."""
    found = [json.loads(path.read_text()) for name in NAMES if (path := RESULTS / f"{name}.json").is_file()]
    machines = ", or ".join(dict.fromkeys(map(machine, found)))
    return replaced(PAGE.read_text(), "examples", "\n\n".join([f"Run on {machines}.", *map(section, found)]))


def section(result: Result) -> str:
    name = result["name"]
    parts = [f"## {TITLES[name]}", WHAT[name]]
    for place, command in enumerate(result["commands"]):
        output = thinned(command["output"])
        if place or name != NAMES[0]:
            output = last(output, LINES.get(command["words"][1], 9))
        parts.append(shown(command, output))
    parts += FIGURES[name](result) if name in FIGURES else [runs_table(result)]
    if result["image"]:
        parts.append(f"![The top of the page of this example](../examples/results/{result['image']})")
    return "\n\n".join([*(part for part in parts if part), origin(result)])


def thinned(output: list[str]) -> list[str]:
    """An output with only the first and the last of neighbouring lines of progress, without warnings of libraries."""
    output = [line for line in output if not WARNING.search(line)]
    told = [bool(PROGRESS.match(line)) for line in output]
    lines: list[str] = []
    for place, line in enumerate(output):
        if not all(told[max(place - 1, 0) : place + 2]) or place in (0, len(output) - 1):
            lines.append(line)
        elif lines[-1] != "...":
            lines.append("...")
    return lines


def last(output: list[str], most: int) -> list[str]:
    """The last lines of an output, of a training without its summary and without what its export compares."""
    output = [line for line in output if not COMPARED.match(line)]
    begin = next((place for place, line in enumerate(output) if FIRST.match(line)), 0)
    begin = max(begin, len(output) - most)
    while begin and output[begin] in ("...", ""):
        begin += 1
    return ["...", *output[begin:]] if begin else output


def shown(command: dict[str, Any], output: list[str]) -> str:
    """A command and what is shown of its output, in the form that the tests of the documents read."""
    ended = f"; exit code {command['exit_code']}" if command["exit_code"] else ""
    return "\n".join([
        "<!-- norun: tested elsewhere -->",
        "```bash", *folded(command["words"]), "```",
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
    """The runs, and if several seeds were tried (results named real, real-1, ...) the accuracies of every source. A
    model that has only learnt captions has no row."""
    rows, guesses = [], {}
    for path in sorted(RESULTS.glob("real*.json"), key=lambda path: path.stem):
        for command in json.loads(path.read_text())["commands"]:
            model = command["words"][2].rpartition("/")[2]
            if command["words"][1] == "evaluate" and model != "pretrain":
                scored = [found.groups() for found in map(SCORE.match, command["output"]) if found]
                guesses |= {source: guess for source, *_, guess in scored}
                rows.append([path.stem, code(model), *(f"{own} ({blank})" for _, _, own, blank, _ in scored)])
    told = ", ".join(f"{guess} of {source}" for source, guess in guesses.items())
    head = ("result", "model of", *(f"accuracy of {source} (with blank images)" for source in guesses))
    several = [table(head, rows), f"Best blind guess: {told}."] if len({row[0] for row in rows}) > 1 else []
    return [runs_table(result), *several]


def sweep(result: Result) -> list[str]:
    runs = result["runs"].values()
    least = min(run["loss"] for run in runs)
    rows = [
        [f"{run['lr']:g}", f"{run['losses'][0]:.4f}", f"{run['loss']:.4f}", "best" if run["loss"] == least else ""]
        for run in runs
    ]
    return [table(("highest learning rate", "loss of the first step", "loss of last 20 steps", ""), rows, "rrr")]


def killed(result: Result) -> list[str]:
    """The losses of both runs in the steps around the kill and at both ends, and their largest distance in any step."""
    whole, other = result["runs"]["whole"]["losses"], result["runs"]["killed"]["losses"]
    begun = result["runs"]["killed"]["starts"]
    distances = [abs(left - right) / left for left, right in zip(whole, other, strict=True)]
    rows = []
    for step in sorted({1, begun[-1]["step"], begun[-1]["step"] + 1, len(whole)}):
        ranks = next(start["ranks"] for start in reversed(begun) if start["step"] < step)
        rows.append([str(step), str(ranks), f"{whole[step - 1]:.9f}", f"{other[step - 1]:.9f}"])
    told = (
        f"It continued after step {begun[-1]['step']} on {begun[-1]['ranks']} ranks; {begun[0]['ranks']} had begun it. "
        f"The losses of all {len(whole)} steps agree within {max(distances):.1e} of their value."
    )
    return [told, table(("step", "ranks", "loss, never killed", "loss, killed and continued"), rows, "rrrr")]


def machine(result: Result) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['machine']['device']}, {result['machine']['cpus']} cores, {versions}"


def origin(result: Result) -> str:
    """Commit, date and file of a section; the file has the machine too."""
    return f"Commit {result['commit']}, {result['date']} ([result](../examples/results/{result['name']}.json))."


FIGURES = {"real": real, "lora": lora, "sweep": sweep, "killed": killed}


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
