"""What all benchmarks share: their command line, configuration, clock, turns and child processes, and their result."""

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir
from provenance import REPOSITORY, commit, machine
from rich.console import Console
from rich.table import Table

from llava_fsdp.config import Config, config_dir, load

ASSETS = REPOSITORY / "src" / "llava_fsdp" / "assets"
MIB = 1 << 20
Report = dict[str, Any]


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose first argument is the folder for the result; default: benchmarks/results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = REPOSITORY / "benchmarks" / "results"
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help="for the JSON and the plot")
    return parser


def facts(question: str, options: argparse.Namespace) -> Report:
    """What is needed to run it again, without paths of this machine. Call it first: the checkout may change later."""
    return {
        "question": question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words_without_paths(options)]),
        "options": {
            name: value for name, value in vars(options).items() if value is not None and not isinstance(value, Path)
        },
        "machine": machine(torch.cuda.get_device_name() if torch.cuda.is_available() else None),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def words_without_paths(options: argparse.Namespace) -> list[str]:
    """The command line without the options whose values are paths."""
    paths = {f"--{name}": str(value) for name, value in vars(options).items() if isinstance(value, Path)}
    kept: list[str] = []
    for word in sys.argv[1:]:
        if str(Path(word)) in paths.values():
            if kept and kept[-1] in paths:
                kept.pop()
        elif word.partition("=")[0] not in paths or "=" not in word:
            kept.append(word)
    return kept


def composed(overrides: Iterable[str], root: type = Config, command: str = "train") -> Any:
    """The configuration of a command, from its keys as a user types them."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(root, compose(command, list(overrides)))


def clock(device: torch.device) -> float:
    """CPU seconds of this process; on a GPU wall-clock seconds, after all its kernels have ended."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(names: Sequence[Any], rounds: int) -> Iterator[Any]:
    """Each name once a round, in every second round from the last to the first."""
    for number in range(rounds):
        yield from names if number % 2 == 0 else names[::-1]


def spread(values: list[float]) -> dict[str, Any]:
    return {"min": min(values), "median": statistics.median(values), "all": values}


def reason(error: BaseException) -> str:
    """The first line of an error, with its class."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def run_json(command: list[str], timeout: float, more: dict[str, str] | None = None) -> Report:
    """The JSON in the last line that a command prints, or `failed` with the reason.

    Args:
        more: added to the environment.
    """
    environment = os.environ | (more or {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        print(bytes(error.stderr or b"").decode(errors="replace")[-4000:], file=sys.stderr)
        return {"failed": f"not done within {timeout:g} s"}
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {"failed": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def write_json(report: Report, name: str, folder: Path) -> Path:
    """Write a result, or as much of it as there is so far: a benchmark may be killed before its end."""
    path = folder / f"{name}-{report['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)
    return path


def write(report: Report, name: str, folder: Path, draw: Callable[[Any, Report], None]) -> None:
    """Write the JSON, and a plot beside it if matplotlib is installed.

    Args:
        draw: draws into matplotlib's pyplot; the title is added here.
    """
    path = write_json(report, name, folder)
    print(f"wrote {path}")
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        draw(pyplot, report)
        made = f"{report['machine']['device']}, torch {report['torch']}, {report['date'][:10]}"
        pyplot.gcf().suptitle(made, fontsize="small")
        pyplot.savefig(path.with_suffix(".png"), dpi=100)
        pyplot.close()
