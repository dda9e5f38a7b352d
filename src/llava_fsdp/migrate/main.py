"""Move over from DeepSpeed: `python -m llava_fsdp.migrate finetune.sh zero3.json gpus=8`.

Reads LLaVA training scripts, DeepSpeed JSON files and Accelerate's YAML files; prints the llava_fsdp command that
does the same, and a table of every key: what it became, or why nothing. Runs nothing, and imports neither torch nor
transformers.
"""

import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from llava_fsdp.config.cli import until_reader_leaves
from llava_fsdp.migrate.bash_script import shown
from llava_fsdp.migrate.command import Migration, lines, migrate
from llava_fsdp.migrate.context import written
from llava_fsdp.migrate.inputs import read_runs, sort_paths
from llava_fsdp.migrate.key_outcome import Row, Verdict
from llava_fsdp.migrate.source_run import Options
from llava_fsdp.runtime.console import TextConsole
from llava_fsdp.runtime.errors import ConfigError, ExitCode, LlavaFsdpError
from llava_fsdp.runtime.log import log, setup_logging
from llava_fsdp.runtime.redact import HIDDEN, is_secret_name, redact

USAGE = """\
usage: python -m llava_fsdp.migrate PATH... [gpus=N] [hidden_size=N] [steps=N] [format=json] [strict=true]
                                   [NAME=VALUE...]

PATH         a training script (finetune.sh), a DeepSpeed JSON (zero3.json) or an Accelerate YAML, in any number
gpus=N       GPUs of the whole training, where the launcher's flags do not say it
hidden_size  of the language model, for DeepSpeed's bucket sizes, where its name does not say it
steps=N      optimizer steps of the whole training, for the number of warm-up steps
NAME=VALUE   a variable that the script leaves unset
format=json  print one JSON object
strict=true  exit code 2 where a key is unknown, a file is missing or a variable is unset
"""
PARITY = "add compat=llava_v1_5 for the original's numbers exactly (its labels, order, pixels and mean of means)"

COMPILED = (
    "compile=auto compiles blocks on CUDA, and nothing here says whether to: add compile=false for torch's kernels"
)


@dataclass
class Request:
    paths: list[str] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    format: str = "text"
    strict: bool = False


def main() -> None:
    setup_logging()
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE, end="")
        sys.exit(ExitCode.DONE if sys.argv[1:] else ExitCode.USER)
    try:
        request = parse(sys.argv[1:])
        found = [
            migrate(run) for run in read_runs(sort_paths(request.paths), request.variables, Options(**request.options))
        ]
        check_variables(request.variables, found, request.paths)
    except LlavaFsdpError as error:
        log().error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    with until_reader_leaves():
        if request.format == "json":
            print(json.dumps({"runs": [as_json(migration) for migration in found]}, indent=1))
        else:
            for migration in found:
                show(migration)
    if request.strict and any(incomplete(migration) for migration in found):
        log().error("strict=true: a key is unknown, a file is missing or a variable is unset")
        sys.exit(ExitCode.USER)


def parse(arguments: list[str]) -> Request:
    """PATHs and `key=value`.

    Raises:
        ConfigError: an option has no such value, or no PATH was given.
    """
    request = Request()
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError(f"{argument} is no option; options are written key=value, and -h lists them")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            request.paths.append(argument)
        elif name in ("gpus", "hidden_size", "steps"):
            if not re.fullmatch(r"[1-9]\d*", value):
                raise ConfigError(f"{argument}: {name} is a number of at least 1")
            request.options[name] = int(value)
        elif name == "format":
            if value not in ("text", "json"):
                raise ConfigError(f"{argument}: choose text or json")
            request.format = value
        elif name == "strict":
            if value not in ("true", "false"):
                raise ConfigError(f"{argument}: choose true or false")
            request.strict = value == "true"
        else:
            request.variables[name] = value
    if not request.paths:
        raise ConfigError("no PATH was given: a training script, a DeepSpeed JSON or an Accelerate YAML")
    return request


def check_variables(given: dict[str, str], found: list[Migration], paths: list[str]) -> None:
    """A NAME=VALUE that nothing asks for is a slip of the pen."""
    text = "".join(Path(path).read_text(errors="replace") for path in paths)
    for name in given:
        if not re.search(rf"\$\{{?{name}\b", text):
            raise ConfigError(f"{name}={given[name]}: no script reads ${name}, and it is no option; -h lists them")


def incomplete(migration: Migration) -> bool:
    return bool(migration.unknown) or any("not found" in n or "not set" in n for n in migration.run.notes)


def as_json(migration: Migration) -> dict[str, object]:
    run = migration.run
    return {
        "name": run.name,
        "command": lines(migration.words, width=sys.maxsize),
        "overrides": {key: plain(value) for key, value in migration.kept.items()},
        "same_as_recipe": sorted(migration.decided.keys() - migration.kept.keys()),
        "gpus": run.gpus,
        "notes": list(map(shown, run.notes)),
        "refused": migration.refused,
        "cautions": list(map(shown, migration.cautions)),
        "counts": {verdict.value: migration.count(verdict) for verdict in Verdict},
        "unknown": [row.key for row in migration.unknown],
        "keys": [
            {
                "source": row.source, "key": row.key, "value": told(row, row.value),
                "resolved": told(row, row.resolved), "verdict": row.verdict.value, "text": redact(shown(row.text)),
            }
            for row in migration.rows
        ],
    }  # fmt: skip


def plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    known = value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else shown(value)


def told(row: Row, value: object) -> object:
    """As JSON has it, without what a script should not have held."""
    if value is not None and is_secret_name(row.key.rpartition(".")[2]):
        return HIDDEN
    found = plain(value)
    return redact(found) if isinstance(found, str) else found


def comment(text: str) -> str:
    """One line, whatever a name in a file had in it: these lines are pasted into shells."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in redact(shown(text)))


def show(migration: Migration) -> None:
    """The command, what to know about it, and the table."""
    run = migration.run
    print(f"# {comment(run.name)}")
    for note in run.notes:
        print(f"# note: {comment(note)}")
    if run.gpus is None:
        print("# the number of GPUs is not known: give gpus=N, or set GPUS (of a machine) and NODES in the shell")
    for caution in migration.cautions:
        print(f"# caution: {comment(caution)}")
    if migration.refused:
        print(f"# llava_fsdp will refuse this: {comment(migration.refused)}")
    missing = [row.key for row in migration.rows if row.verdict is Verdict.unsupported]
    if missing:
        print(f"# without: {comment(', '.join(missing))} (see the table)")
    print(lines(migration.words))
    if run.launch:
        print(f"# {PARITY}")
        if "compile" not in migration.decided:
            print(f"# {COMPILED}")
    print()
    console = TextConsole(width=None if sys.stdout.isatty() else 140)
    console.print(table(migration.rows, console.width))
    counts = ", ".join(f"{migration.count(v)} {v.value}" for v in Verdict if migration.count(v))
    print(f"{len(migration.rows)} keys: {counts}")
    if migration.unknown:
        print(f"{len(migration.unknown)} of them unknown to us: {comment(', '.join(r.key for r in migration.unknown))}")
    print()


VALUE, VERDICT, TEXT, LONGEST_KEY = 22, 13, 33, 60  # widths; the text has what is left, at least 33
BORDERS = 13  # of four columns: rich draws a bar and a space at each side of each


def table(rows: list[Row], width: int) -> Table:
    """Nothing is cut. Where there is room, a key is in one piece: somebody will search for it."""
    made = Table()
    longest = min(LONGEST_KEY, max((len(row.key) for row in rows), default=0))
    room = width - BORDERS - VALUE - VERDICT - TEXT
    # a width, not min_width: rich narrows columns first, widens to min_width then, and cuts what is too wide by it
    made.add_column("key", width=longest if 0 < longest <= room else None, max_width=LONGEST_KEY, overflow="fold")
    for name, most in {"value": VALUE, "verdict": VERDICT, "what it becomes, or why nothing does": None}.items():
        made.add_column(name, max_width=most, overflow="fold")
    source = ""
    for row in rows:
        if row.source != source:
            made.add_section()
            made.add_row(row.source, style="bold")
            source = row.source
        value, resolved = told(row, row.value), told(row, row.resolved)
        value = readable(value) if row.resolved is None else f"{readable(value)} = {readable(resolved)}"
        made.add_row(comment(row.key), comment(value), row.verdict.value, comment(row.text))
    return made


def readable(value: object) -> str:
    return written(value) if isinstance(value, float) else shown(value)
